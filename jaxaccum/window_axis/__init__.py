"""Collectives over the window's own axis: every micro-batch as if it were a device."""

from jaxaccum.window_axis.windows import accumulate, denominators, value_and_grad

__all__ = ["accumulate", "denominators", "value_and_grad"]
