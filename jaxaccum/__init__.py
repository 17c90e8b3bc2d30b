"""Exact gradient accumulation for JAX and Optax."""

from jaxaccum.core.mean import Mean, mean
from jaxaccum.core.reducers import Concat, Last, Max, Min, Sum
from jaxaccum.core.sums import Window, WindowSums, finalize, merge
from jaxaccum.folds.cut import split
from jaxaccum.folds.window import accumulate, denominators, value_and_grad
from jaxaccum.numerics import accumulators
from jaxaccum.folds.stream import multi_steps, until_weight
from jaxaccum.folds.stream_state import MultiStepsState, flush, has_updated
