"""Schedules in what people think in, batch-size ramps, and hyperparameters of another batch size.

An optimizer counts optimizer steps. These functions turn a schedule written in tokens, examples,
epochs or micro-steps into one of optimizer steps and back, also where the window grows. What was
seen before an optimizer step is counted exactly to 2**48, inside of `jit` too, and then rounded
once, to float32 (float64 where that is enabled). Write the amounts of a schedule past 2**31 as
floats, `8e9`: JAX takes a Python int of that size for an error.
"""

from jaxaccum.schedules.ramps import Ramp as Ramp
from jaxaccum.schedules.ramps import amount_at as amount_at
from jaxaccum.schedules.ramps import ramp as ramp
from jaxaccum.schedules.ramps import steps_at as steps_at
from jaxaccum.schedules.ramps import tabulate as tabulate
from jaxaccum.schedules.scaling import AdamHyperparameters as AdamHyperparameters
from jaxaccum.schedules.scaling import adam_scaling as adam_scaling
from jaxaccum.schedules.scaling import half_life as half_life
from jaxaccum.schedules.scaling import linear_scaling as linear_scaling
from jaxaccum.schedules.scaling import square_root_scaling as square_root_scaling
from jaxaccum.schedules.units import by_epochs as by_epochs
from jaxaccum.schedules.units import by_examples as by_examples
from jaxaccum.schedules.units import by_micro_steps as by_micro_steps
from jaxaccum.schedules.units import by_tokens as by_tokens
from jaxaccum.schedules.units import in_units as in_units
from jaxaccum.schedules.units import rewindow as rewindow
