"""One training step to copy: a window, a clip-ready gradient, one optimizer step."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxaccum.closing.handover import APPLIED, count_if, find_homes, hand_over, own_buffer
from jaxaccum.closing.inner import in_one_precision, sees_every_window, tried
from jaxaccum.closing.leaves import is_none, still
from jaxaccum.core import checks, faults
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.reducers import Sum
from jaxaccum.core.sums import finalize, is_empty
from jaxaccum.diagnostics.gradient_noise import NoiseScale, noise_scale
from jaxaccum.numerics import accumulators, loss_scaling, weights
from jaxaccum.stream.state import check_no_window
from jaxaccum.training.donation import Step
from jaxaccum.window.arguments import NOTHING, check_not_of_call, positional
from jaxaccum.window.model_state import check_given
from jaxaccum.window.window_fn import WindowFn
from jaxaccum.window.windows import accumulate


class StepState(NamedTuple):
    """The state of a `train_step`.

    Attributes:
      optimizer_step: how many optimizer steps were applied; int32 scalar.
      weight_seen_carry: the weight of all windows so far, as an exact pair of floats.
      inner_state: the state of the optimizer.
      num_skipped: the micro-batches that were left out so far; int32 scalar.
      num_dropped: the windows that were left out so far, not one of their micro-batches being
        finite, or after `diverged`; int32 scalar.
      num_bad_in_row: windows left out in a row; int32 scalar.
      diverged: whether `max_bad_windows` was reached; it stays so. Boolean scalar.
      loss_scale: the `LossScaleState`; `None` without a loss scale.
      model_state: the model's own state, such as batch statistics; `None` without `model_state`.
    """

    optimizer_step: jax.Array
    weight_seen_carry: accumulators.Compensated
    inner_state: Any
    num_skipped: jax.Array
    num_dropped: jax.Array
    num_bad_in_row: jax.Array
    diverged: jax.Array
    loss_scale: loss_scaling.LossScaleState | None = None
    model_state: Any = None


class StepInfo(NamedTuple):
    """What a person wants to read after a step; every field is an array.

    Attributes:
      loss: the window's mean loss; nan where nothing was counted.
      weight: the window's weight; a scalar, or the loss's tree of them.
      grad_norm: the global norm of the mean gradient, before any clipping.
      num_microbatches: the micro-batches of the window.
      num_skipped: the micro-batches that were left out.
      updated: whether an optimizer step was applied; false for a window in which nothing counts.
      optimizer_step: the optimizer steps so far, this one included.
      weight_seen_carry: see `tokens_seen`.
      aux: the combined auxiliary outputs; `None` without `has_aux`.
      noise_scale: the window's `NoiseScale`; `None` without `noise_scale=True`.
      num_dropped: as in `StepState`, as are the next two.
      num_bad_in_row: windows left out in a row.
      diverged: whether `max_bad_windows` was reached.
      loss_scale: the scale of this window; `None` without a loss scale.
      overflowed: whether any of its micro-batches was not finite, so that the scale shrinks;
        `None` without a loss scale.
    """

    loss: jax.Array
    weight: Any
    grad_norm: jax.Array
    num_microbatches: jax.Array
    num_skipped: jax.Array
    updated: jax.Array
    optimizer_step: jax.Array
    weight_seen_carry: accumulators.Compensated
    aux: Any = None
    noise_scale: NoiseScale | None = None
    num_dropped: Any = None
    num_bad_in_row: Any = None
    diverged: Any = None
    loss_scale: Any = None
    overflowed: Any = None

    @property
    def tokens_seen(self) -> Any:
        """The weight of all windows so far, exact past 2**31 when read outside of `jit`.

        For a loss of several terms it is the largest of their weights that is counted.
        """
        return weights.read(self.weight_seen_carry)


class TrainStep(NamedTuple):
    """What `train_step` returns; unpacks as `init_fn, step_fn`.

    Attributes:
      init: `init(params, model_state=None)` to the `StepState`.
      step: `step(params, state, batch, *args, key=None, num_real=None, denominators=None)` to
        `(params, state, info)`.
    """

    init: Callable[..., StepState]
    step: Callable[..., tuple[Any, StepState, StepInfo]]


def train_step(
    loss_fn: Callable[..., Any],
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
    inner = in_one_precision(optimizer)
    loss_scale = loss_scaling.checked("train_step", loss_scale)
    window_fn = _window_fn(loss_fn, window_options, scales=loss_scale is not None)
    options = window_fn.options
    marks, policy = options.grad_reducers, options.model_state
    _check_whole(options.batch_argnums)
    limit = faults.limit("train_step", max_bad_windows, options.skip_nonfinite)

    def init_fn(params: Any, model_state: Any = None) -> StepState:
        check_given("train_step", policy, model_state)
        checks.arrays("train_step", params, name="params")
        if isinstance(params, optax.LookaheadParams):
            raise TypeError(
                "train_step: `params` are `optax.LookaheadParams`, of which only the fast ones "
                "have a gradient. Call `ja.value_and_grad` on `params.fast` in a step of your own."
            )
        inner_state = inner.init(_trainable(params, marks))
        check_no_window("train_step", "optimizer", inner_state)
        # Some optimizers keep the parameters themselves: donating both would free them twice.
        inner_state, model_state = jax.tree.map(own_buffer, (inner_state, model_state))
        return first_state(inner_state, loss_scale, model_state)

    def step_fn(
        params: Any,
        state: StepState,
        batch: Any = NOTHING,
        *args: Any,
        key: Any = None,
        num_real: Any = None,
        denominators: Any = None,
        **inputs: Any,
    ) -> tuple[Any, StepState, StepInfo]:
        every = positional("train_step", (params, batch, *args), inputs, options.batch_argnums)
        _check_state(state, inner, params, marks)
        if (state.loss_scale is None) != (loss_scale is None):
            raise ValueError(
                "train_step: `state` and this step differ in whether they have a `loss_scale`. Put "
                "`loss_scale.init()`, or `None`, in its place with `state._replace`."
            )
        scale = None if state.loss_scale is None else state.loss_scale.scale
        named = {
            "key": key,
            "num_real": num_real,
            "denominators": denominators,
            "loss_scale": scale,
            "model_state": state.model_state,
        }
        # The windows of some rooms take fewer.
        window_sums = window_fn(*every, **{k: v for k, v in named.items() if v is not None})
        noise = None if window_sums.noise is None else noise_scale(window_sums)
        window = finalize(window_sums)
        trainable = _trainable(params, marks)
        grads = jax.tree.map(
            lambda p, g: None if p is None else g, trainable, window.grads, is_leaf=is_none
        )
        largest = weights.largest("train_step", jax.tree.leaves(window.weight))
        applying = ~is_empty(window_sums)
        if sees_every_window(state.inner_state):
            applying = jnp.ones_like(applying)
        bad = (window.num_microbatches == 0) & (window.num_skipped > 0)
        dropped, diverged = bad, state.diverged
        if limit is not None:
            dropped = bad | (applying & state.diverged)
            applying = applying & ~state.diverged
        in_row = jnp.where(applying & ~bad, 0, count_if(state.num_bad_in_row, bad))
        if limit is not None:
            diverged = diverged | (in_row >= limit)
        overflowed = window.num_skipped > 0

        updates, inner_state = _updated(
            inner, applying, grads, window.loss, trainable, state.inner_state
        )
        new_params = jax.tree.map(
            lambda new, old, value: _replaced(old, value, applying) if new is None else new,
            optax.apply_updates(trainable, updates),
            params,
            window.grads,
            is_leaf=is_none,
        )
        # Dropped windows leave the state as it was by themselves; those after `diverged` do not.
        model_state = jax.tree.map(
            lambda new, old: jnp.where(dropped, old, new), window.model_state, state.model_state
        )
        new_state = StepState(
            count_if(state.optimizer_step, applying),
            weights.add(state.weight_seen_carry, largest),
            inner_state,
            num_skipped=count_if(state.num_skipped, overflowed, window.num_skipped),
            num_dropped=count_if(state.num_dropped, dropped),
            num_bad_in_row=in_row,
            diverged=diverged,
            loss_scale=None
            if loss_scale is None or state.loss_scale is None
            else loss_scale.update(state.loss_scale, overflowed),
            model_state=model_state,
        )
        info = StepInfo(
            loss=window.loss,
            weight=window.weight,
            grad_norm=optax.tree.norm(grads),
            num_microbatches=window.num_microbatches,
            num_skipped=window.num_skipped,
            updated=applying,
            optimizer_step=new_state.optimizer_step,
            weight_seen_carry=jax.tree.map(jnp.copy, new_state.weight_seen_carry),
            aux=window.aux if options.has_aux else None,
            noise_scale=noise,
            num_dropped=new_state.num_dropped,
            num_bad_in_row=new_state.num_bad_in_row,
            diverged=new_state.diverged,
            loss_scale=None if scale is None else jnp.copy(scale),
            overflowed=None if scale is None else overflowed,
        )
        return new_params, new_state, info

    return TrainStep(init_fn, Step("train_step", step_fn, (0, 1) if donate else ()))


def _check_whole(batch_argnums: Any) -> None:
    """Refuses to cut the parameters."""
    positions = batch_argnums if isinstance(batch_argnums, Sequence) else (batch_argnums,)
    if 0 in positions:
        raise ValueError(
            "train_step: `batch_argnums` must not name argument 0, the parameters, got "
            f"{batch_argnums!r}. It counts the arguments of `loss_fn`: 1 is the batch."
        )


def _window_fn(loss_fn: Any, window_options: dict[str, Any], *, scales: bool) -> WindowFn:
    """The window of a step: made already, or from a loss function and its options."""
    if isinstance(loss_fn, WindowFn):
        window_fn, maker = loss_fn, f"ja.{loss_fn.options.function}"
        if window_options:
            raise TypeError(
                f"train_step: `{min(window_options)}` is an option of the window, which was made "
                f"already. Pass it to `{maker}`."
            )
    else:
        unknown = window_options.keys() - inspect.signature(accumulate).parameters.keys()
        check_not_of_call("train_step", unknown, ("key", "num_real", "denominators"))
        if unknown:
            raise TypeError(
                f"train_step: `{min(unknown)}` is no keyword of `ja.accumulate`, whose options a "
                "step takes."
            )
        window_fn = accumulate(loss_fn, **window_options)
    argnums = window_fn.options.argnums
    if argnums != 0:
        raise ValueError(f"train_step: `argnums` must be 0, the parameters, got {argnums!r}.")
    if scales and window_fn.options.skip_nonfinite is None:
        return window_fn.having(skip_nonfinite=faults.WINDOW)
    return window_fn


def _updated(
    inner: Any, applying: jax.Array, grads: Any, loss: Any, trainable: Any, inner_state: Any
) -> tuple[Any, Any]:
    """Updates and inner state of an optimizer step, taken where `applying`."""
    structure, sums = jax.tree.structure(grads), jax.tree.leaves(grads)

    @functools.partial(jax.jit, static_argnums=0)  # traced once for gradients of the same types
    def run(offering: bool, sums: Any, inner_state: Any, operands: Any) -> tuple[Any, Any]:
        loss, params = operands
        tree = jax.tree.unflatten(structure, sums)
        offered = {"value": loss, "grad": tree} if offering else {}
        updates, inner_state = inner.update(tree, inner_state, params, **offered)
        return updates, inner_state

    # Their types are those that the updates have for gradients in the parameters' own types.
    operands = (loss, trainable)
    trial = tried(
        lambda *args: run(*args)[0], jax.tree.leaves(trainable), inner_state, operands, offers=True
    )

    def inner_fn(*args: Any) -> tuple[Any, Any, int]:
        updates, inner_state = run(trial.takes_offers, *args)
        return still(updates, trial.constant), inner_state, APPLIED

    updates, _, inner_state, _ = hand_over(
        applying,
        inner_fn,
        sums,
        inner_state,
        operands,
        trial.types,
        find_homes(trial.types, structure, sums),
    )
    return updates, inner_state


def _check_state(state: Any, inner: Any, params: Any, marks: Any) -> None:
    """Requires the state of this optimizer and these parameters."""
    if not isinstance(state, StepState):
        raise TypeError(
            f"train_step: `state` must come from `init`, got {type(state).__name__}. For a plain "
            "optimizer state: `init(params)._replace(inner_state=state)`; for one of "
            "`optax.MultiSteps` the same with `state.inner_opt_state`, between two windows, or "
            "`ja.interop.from_optax` and a `ja.multi_steps`."
        )
    like = jax.eval_shape(inner.init, _trainable(params, marks))
    remedy = "Pass the state that `init` made for this optimizer and these parameters."
    checks.same_structure("train_step", "state.inner_state", state.inner_state, like, remedy=remedy)


def first_state(
    inner_state: Any, loss_scale: loss_scaling.LossScale | None, model_state: Any = None
) -> StepState:
    """The state of a training that has made no step."""
    return StepState(
        optimizer_step=jnp.zeros((), jnp.int32),
        weight_seen_carry=weights.zero(),
        inner_state=inner_state,
        num_skipped=jnp.zeros((), jnp.int32),
        num_dropped=jnp.zeros((), jnp.int32),
        num_bad_in_row=jnp.zeros((), jnp.int32),
        diverged=jnp.zeros((), jnp.bool_),
        loss_scale=None if loss_scale is None else loss_scale.init(),
        model_state=model_state,
    )


def _trainable(params: Any, marks: Any) -> Any:
    """The parameters that have a gradient; `None` in the places of the others."""
    summed = jax.tree.map(lambda _: True, params)
    if marks is not None:
        summed = jax.tree.map(lambda m, p: jax.tree.map(lambda _: m is Sum, p), marks, params)
    return jax.tree.map(
        lambda p, s: jnp.asarray(p) if s and is_inexact(p) else None, params, summed
    )


def _replaced(parameter: Any, value: Any, applying: jax.Array) -> Any:
    """A parameter that the window gave a new value instead of a gradient."""
    if parameter is None or not is_inexact(parameter):
        return parameter
    return jnp.where(applying, value.astype(jnp.asarray(parameter).dtype), parameter)
