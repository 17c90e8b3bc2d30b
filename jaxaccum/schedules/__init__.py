"""Schedules in what people think in, batch-size ramps, and hyperparameters of another batch size.

An optimizer counts optimizer steps. These functions turn a schedule written in tokens, examples,
epochs or micro-steps into one of optimizer steps and back, also where the window grows. What was
seen before an optimizer step is counted exactly to 2**48, inside of `jit` too, and then rounded
once, to float32 (float64 where that is enabled). Write the amounts of a schedule past 2**31 as
floats, `8e9`: JAX takes a Python int of that size for an error.
"""

from jaxaccum.schedules.ramps import Ramp, amount_at, ramp, steps_at, tabulate
from jaxaccum.schedules.scaling import (
    AdamHyperparameters,
    adam_scaling,
    half_life,
    linear_scaling,
    square_root_scaling,
)
from jaxaccum.schedules.units import (
    by_epochs,
    by_examples,
    by_micro_steps,
    by_tokens,
    in_units,
    rewindow,
)

__all__ = [
    "AdamHyperparameters",
    "Ramp",
    "adam_scaling",
    "amount_at",
    "by_epochs",
    "by_examples",
    "by_micro_steps",
    "by_tokens",
    "half_life",
    "in_units",
    "linear_scaling",
    "ramp",
    "rewindow",
    "square_root_scaling",
    "steps_at",
    "tabulate",
]
