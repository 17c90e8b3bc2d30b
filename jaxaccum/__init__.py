"""Exact gradient accumulation for JAX and Optax."""

from jaxaccum import diagnostics as diagnostics
from jaxaccum import interop as interop
from jaxaccum import schedules as schedules
from jaxaccum.auditing import audit as audit
from jaxaccum.batches import PackedBatch as PackedBatch
from jaxaccum.batches import example_keys as example_keys
from jaxaccum.batches import pack as pack
from jaxaccum.batches import pad_batch as pad_batch
from jaxaccum.batches import windows as windows
from jaxaccum.core.mean import Mean as Mean
from jaxaccum.core.mean import mean as mean
from jaxaccum.core.reducers import Concat as Concat
from jaxaccum.core.reducers import Last as Last
from jaxaccum.core.reducers import Max as Max
from jaxaccum.core.reducers import Min as Min
from jaxaccum.core.reducers import Sum as Sum
from jaxaccum.core.sums import Window as Window
from jaxaccum.core.sums import WindowSums as WindowSums
from jaxaccum.core.sums import finalize as finalize
from jaxaccum.core.sums import merge as merge
from jaxaccum.diagnostics.noise import NoiseScale as NoiseScale
from jaxaccum.diagnostics.noise import noise_scale as noise_scale
from jaxaccum.folds.cut import split as split
from jaxaccum.folds.microbatch import microbatch as microbatch
from jaxaccum.folds.model_state import Counted as Counted
from jaxaccum.folds.stream import multi_steps as multi_steps
from jaxaccum.folds.stream_length import until_weight as until_weight
from jaxaccum.folds.stream_state import MultiStepsState as MultiStepsState
from jaxaccum.folds.stream_state import flush as flush
from jaxaccum.folds.stream_state import has_updated as has_updated
from jaxaccum.folds.stream_state import state_specs as state_specs
from jaxaccum.folds.window import accumulate as accumulate
from jaxaccum.folds.window import denominators as denominators
from jaxaccum.folds.window import value_and_grad as value_and_grad
from jaxaccum.health import check_healthy as check_healthy
from jaxaccum.numerics import accumulators as accumulators
from jaxaccum.numerics import loss_scaling as loss_scaling
from jaxaccum.planning import WindowPlan as WindowPlan
from jaxaccum.planning import fit_microbatch as fit_microbatch
from jaxaccum.planning import plan_window as plan_window
from jaxaccum.training import StepInfo as StepInfo
from jaxaccum.training import StepState as StepState
from jaxaccum.training import TrainStep as TrainStep
from jaxaccum.training import train_step as train_step

__version__ = "0.1.0"
