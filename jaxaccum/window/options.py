"""The options of a window and the keywords of its call, each with its type: their one declaration.

A function takes one of these classes as `**options: Unpack[...]`. What stands behind them at run
time, with the defaults and in the order of `help`, is `jaxaccum.window.arguments.Options` and
`Given`. A new option is one line in each, and its words in the docstring of `ja.accumulate`.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import jax
from jax.typing import ArrayLike, DTypeLike

from jaxaccum.core.sums import WindowSums
from jaxaccum.numerics import accumulators


class CutOptions(TypedDict, total=False):
    """How a batch is cut; exactly one of the two, which every overload says for itself."""

    num_microbatches: int | None
    microbatch_size: int | None


class ArgnumsOptions(TypedDict, total=False):
    """What is differentiated."""

    argnums: int | Sequence[int]


class BatchOptions(TypedDict, total=False):
    """What everything takes that cuts a batch."""

    batch_argnums: int | Sequence[int] | None
    axis_name: str | Sequence[str] | None


class MapOptions(BatchOptions, total=False):
    """What everything takes that sums gradients."""

    spmd_axis_name: str | Sequence[str] | None
    local_params: Any
    accumulator: accumulators.Accumulator | None
    unroll: int | bool


class LossOptions(BatchOptions, total=False):
    """What everything takes that has a loss."""

    has_aux: bool


class ModelOptions(TypedDict, total=False):
    """What becomes of a model's state."""

    model_state: Literal["sequential", "pooled", "frozen"] | None


class FoldOptions(LossOptions, MapOptions, total=False):
    """What every window takes, the one whose micro-batches meet included."""

    reduction: Literal["defer", "scatter"]
    param_specs: Any
    grad_specs: Any
    reduce_dtype: DTypeLike


class GradOptions(FoldOptions, ModelOptions, total=False):
    """What every window takes whose micro-batches do not meet."""

    whole_params: bool
    overlap: bool
    skip_nonfinite: bool | Literal["window"]
    grad_reducers: Any


class SumsOptions(GradOptions, total=False):
    """What windows take that hand out their sums."""

    noise_scale: bool


class AccumulateOptions(SumsOptions, ArgnumsOptions, total=False):
    """Those of `ja.accumulate`."""


class ValueAndGradOptions(GradOptions, ArgnumsOptions, total=False):
    """Those of `ja.value_and_grad`."""


class DenominatorsOptions(LossOptions, ModelOptions, ArgnumsOptions, total=False):
    """Those of `ja.denominators`."""


class MicrobatchOptions(MapOptions, ArgnumsOptions, total=False):
    """Those of `ja.microbatch`."""


class KeyCall(TypedDict, total=False):
    """What every call takes."""

    key: jax.Array | None


class MapCall(KeyCall, total=False):
    """What every call takes whose micro-batches do not meet."""

    num_real: ArrayLike | None


class StepCall(MapCall, total=False):
    """What a training step takes."""

    denominators: Any


class GradCall(StepCall, total=False):
    """What a call takes that differentiates."""

    loss_scale: ArrayLike | None


class StateCall(TypedDict, total=False):
    """What a call takes that hands over a model's state."""

    model_state: Any


class WindowCall(GradCall, StateCall, total=False):
    """Those of what `ja.value_and_grad` returns."""


class IntoCall(TypedDict, total=False):
    """What a call takes that hands out its sums."""

    into: WindowSums | None


class SumsCall(WindowCall, IntoCall, total=False):
    """Those of what `ja.accumulate` returns."""


class DenominatorsCall(MapCall, StateCall, total=False):
    """Those of what `ja.denominators` returns."""
