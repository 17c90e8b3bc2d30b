"""One training step to copy: a window, a clip-ready gradient, one optimizer step."""

from collections.abc import Sequence
from typing import Any, Unpack, overload

import optax

from jaxaccum.closing.inner import in_one_precision
from jaxaccum.core import checks, faults
from jaxaccum.numerics import loss_scaling
from jaxaccum.stream.state import check_no_window
from jaxaccum.training.donation import Step
from jaxaccum.training.one_step import Training
from jaxaccum.training.records import StepInfo, StepOptions, StepState, TrainStep
from jaxaccum.window import refusals
from jaxaccum.window.options import StepCall, WindowCall
from jaxaccum.window.protocols import LossFn, SumsFn
from jaxaccum.window.signatures import NOTHING, call_signature, factory, signed, taken
from jaxaccum.window.window_fn import Accumulation, checked_options
from jaxaccum.window_axis.options import AxisSumsFn


@overload
def train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    num_microbatches: int,
    **options: Unpack[StepOptions],
) -> TrainStep: ...


@overload
def train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    microbatch_size: int,
    **options: Unpack[StepOptions],
) -> TrainStep: ...


@overload
def train_step(
    loss_fn: SumsFn | AxisSumsFn,
    optimizer: optax.GradientTransformation,
    *,
    donate: bool = True,
    max_bad_windows: int | None = None,
    loss_scale: loss_scaling.LossScale | None = None,
) -> TrainStep: ...


@factory("train_step", StepOptions, StepCall)
def train_step(
    loss_fn: LossFn | SumsFn | AxisSumsFn,
    optimizer: optax.GradientTransformation,
    *,
    donate: bool = True,
    max_bad_windows: int | None = None,
    loss_scale: loss_scaling.LossScale | None = None,
    **window_options: Any,
) -> TrainStep:
    """A jitted training step: one window, one division, one optimizer step.

    `params + optimizer.update(sum_k grad_k / sum_k weight_k)`. Clipping, schedules and weight
    decay in `optimizer` see the gradient of the whole window in float32. A window in which nothing
    counts leaves parameters and optimizer state as they are. Integer parameters are left alone.
    Leaves that `grad_reducers` combines otherwise than by `ja.Sum` hold no gradients but new values
    (FP8 scaling state), which replace the parameters.

    Args:
      loss_fn: as in `ja.accumulate`; or, in place of a loss and its options, what `ja.accumulate`
        or `ja.window_axis.accumulate` returned.
      optimizer: an Optax transformation. It is offered the extra arguments `value` (the window's
        loss) and `grad`.
      donate: whether the step takes over the buffers of `params` and `state`, which then must not
        be used again. Halves the memory that they need.
      max_bad_windows: how many windows in a row may be left out whole, for what is not finite,
        before `state.diverged` is set and no optimizer step is applied any more.
      loss_scale: from `ja.loss_scaling`, for float16: the loss is scaled, each micro-batch's
        gradient unscaled in float32 before it is added, and the scale changed once per window.
        Implies `skip_nonfinite="window"` where nothing else is chosen; with `True` an overflowed
        micro-batch leaves with its tokens.
      **window_options: the keywords of `ja.accumulate`, `num_microbatches` or `microbatch_size`
        among them.

    Returns:
      A `TrainStep`: `init(params, model_state=None)` and `step(params, state, batch, *args,
      key=None, num_real=None, denominators=None)`, which returns the new parameters, the new state
      and a `StepInfo`. The keywords are those of `ja.accumulate`; with `denominators` a window
      steps whatever its weight is.

    Raises:
      TypeError: `optimizer` is not a transformation, or as `ja.accumulate`.
      ValueError: as `ja.accumulate`.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp, optax
      >>> init, step = ja.train_step(
      ...     lambda w, x: ja.mean((w - x) ** 2), optax.sgd(0.5), num_microbatches=2)
      >>> w = jnp.float32(0)
      >>> w, state, info = step(w, init(w), jnp.array([1.0, 3.0, 5.0, 3.0]))
      >>> print(w, info.grad_norm, info.tokens_seen)
      3.0 6.0 4.0
    """
    checks.transformation("train_step", "optimizer", optimizer)
    check_no_window("train_step", "optimizer", optimizer)
    loss_scale = loss_scaling.checked("train_step", loss_scale)
    window_fn = _window_fn(loss_fn, window_options, scales=loss_scale is not None)
    cut = window_fn.options.batch_argnums
    _check_whole(cut)
    limit = faults.limit("train_step", max_bad_windows)
    policy = window_fn.options.policy
    refusals.check("train_step", {"max_bad_windows": limit, "skip_nonfinite": policy})
    training = Training(in_one_precision(optimizer), window_fn, limit, loss_scale)

    @signed(call_signature(StepCall, "params", "state", "batch"))
    def step_fn(
        params: Any, state: StepState, batch: Any = NOTHING, *args: Any, **call: Any
    ) -> tuple[Any, StepState, StepInfo]:
        every, given = taken("train_step", (params, batch, *args), call, StepCall, cut)
        return training.step(state, every, given)

    return TrainStep(training.init, Step("train_step", step_fn, (0, 1) if donate else ()))


def _check_whole(batch_argnums: Any) -> None:
    """Refuses to cut the parameters."""
    positions = batch_argnums if isinstance(batch_argnums, Sequence) else (batch_argnums,)
    if 0 in positions:
        raise ValueError(
            "train_step: `batch_argnums` must not name argument 0, the parameters, got "
            f"{batch_argnums!r}. It counts the arguments of `loss_fn`: 1 is the batch."
        )


def _window_fn(loss_fn: Any, window_options: dict[str, Any], *, scales: bool) -> Accumulation:
    """The window of a step: made already, or from a loss function and its options."""
    if isinstance(loss_fn, Accumulation):
        window_fn, maker = loss_fn, f"ja.{loss_fn.options.function}"
        if window_options:
            raise TypeError(
                f"train_step: `{min(window_options)}` is an option of the window, which was made "
                f"already. Pass it to `{maker}`."
            )
    else:
        checked = checked_options("train_step", loss_fn, window_options)
        window_fn = Accumulation(checked, WindowCall)
    argnums = window_fn.options.argnums
    if argnums != 0:
        raise ValueError(f"train_step: `argnums` must be 0, the parameters, got {argnums!r}.")
    if scales and window_fn.options.policy is None:
        return window_fn.having(skip_nonfinite=faults.WINDOW)
    return window_fn
