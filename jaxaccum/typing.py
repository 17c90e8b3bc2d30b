"""Types for the annotations of a script: losses, what the factories return, and their options.

`f: SumsFn = ja.accumulate(...)`; a function that hands options on takes `**options:
Unpack[AccumulateOptions]`. Nothing here does anything at run time.
"""

from jaxaccum.stream.state import MultiSteps
from jaxaccum.training.records import InitFn, StepFn, StepOptions
from jaxaccum.window.options import (
    AccumulateOptions,
    DenominatorsOptions,
    MicrobatchOptions,
    ValueAndGradOptions,
)
from jaxaccum.window.protocols import (
    CombinedFn,
    DenominatorsFn,
    Loss,
    LossFn,
    LossOutput,
    SumsFn,
    WindowFn,
)
from jaxaccum.window_axis.options import AxisSumsFn, AxisWindowFn, AxisWindowOptions

__all__ = [
    "AccumulateOptions",
    "AxisSumsFn",
    "AxisWindowFn",
    "AxisWindowOptions",
    "CombinedFn",
    "DenominatorsFn",
    "DenominatorsOptions",
    "InitFn",
    "Loss",
    "LossFn",
    "LossOutput",
    "MicrobatchOptions",
    "MultiSteps",
    "StepFn",
    "StepOptions",
    "SumsFn",
    "ValueAndGradOptions",
    "WindowFn",
]
