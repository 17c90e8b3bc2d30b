"""Answers before the first step: how a window is cut, and which micro-batch fits in memory."""

from jaxaccum.planning.memory import MemoryFit as MemoryFit
from jaxaccum.planning.memory import MemoryPoint as MemoryPoint
from jaxaccum.planning.memory import fit_microbatch as fit_microbatch
from jaxaccum.planning.plan import WindowPlan as WindowPlan
from jaxaccum.planning.plan import plan_window as plan_window
