"""Answers before the first step: how a window is cut, and which micro-batch fits in memory."""

from jaxaccum.planning.memory import MemoryFit, MemoryPoint, fit_microbatch
from jaxaccum.planning.plan import WindowPlan, plan_window

__all__ = ["MemoryFit", "MemoryPoint", "WindowPlan", "fit_microbatch", "plan_window"]
