"""Collectives over the window's own axis: every micro-batch as if it were a device."""

from jaxaccum.window_axis.windows import accumulate as accumulate
from jaxaccum.window_axis.windows import denominators as denominators
from jaxaccum.window_axis.windows import value_and_grad as value_and_grad

__all__ = ["accumulate", "denominators", "value_and_grad"]
