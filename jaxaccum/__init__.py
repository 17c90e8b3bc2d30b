"""Exact gradient accumulation for JAX and Optax."""

from jaxaccum import (
    batches,
    diagnostics,
    interop,
    losses,
    per_example,
    reporting,
    rollouts,
    schedules,
    training,
    window_axis,
)
from jaxaccum.auditing import audit
from jaxaccum.batches import pad_batch
from jaxaccum.combine.microbatch import microbatch
from jaxaccum.core.mean import Mean, mean
from jaxaccum.core.reducers import Concat, Last, Max, Min, Sum
from jaxaccum.core.sums import Window, WindowSums, finalize, merge
from jaxaccum.devices.gathering import gather
from jaxaccum.diagnostics.equivalence import check_equivalence
from jaxaccum.diagnostics.gradient_noise import noise_scale
from jaxaccum.health import check_healthy
from jaxaccum.numerics import accumulators, loss_scaling
from jaxaccum.planning import WindowPlan, fit_microbatch, plan_window
from jaxaccum.stream.length import until_weight
from jaxaccum.stream.multi_steps import multi_steps
from jaxaccum.stream.state import MultiStepsState, flush, has_updated, state_specs
from jaxaccum.training import train_step
from jaxaccum.window.cut import split
from jaxaccum.window.model_state import Counted
from jaxaccum.window.windows import accumulate, denominators, value_and_grad

__version__ = "0.1.0"

__all__ = [
    "Concat",
    "Counted",
    "Last",
    "Max",
    "Mean",
    "Min",
    "MultiStepsState",
    "Sum",
    "Window",
    "WindowPlan",
    "WindowSums",
    "accumulate",
    "accumulators",
    "audit",
    "batches",
    "check_equivalence",
    "check_healthy",
    "denominators",
    "diagnostics",
    "finalize",
    "fit_microbatch",
    "flush",
    "gather",
    "has_updated",
    "interop",
    "loss_scaling",
    "losses",
    "mean",
    "merge",
    "microbatch",
    "multi_steps",
    "noise_scale",
    "pad_batch",
    "per_example",
    "plan_window",
    "reporting",
    "rollouts",
    "schedules",
    "split",
    "state_specs",
    "train_step",
    "training",
    "until_weight",
    "value_and_grad",
    "window_axis",
]


def __dir__() -> list[str]:
    """The public names; `import jaxaccum` binds its packages beside them."""
    return __all__
