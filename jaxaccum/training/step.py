"""One training step to copy: a window, a clip-ready gradient, one optimizer step."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import optax

from jaxaccum import norms
from jaxaccum.closing.handover import APPLIED, find_homes, hand_over, own_buffer
from jaxaccum.closing.inner import check_shared, in_one_precision, sees_every_window, strong, tried
from jaxaccum.closing.leaves import is_none, still
from jaxaccum.closing.ledger import Outcome, account, count_if
from jaxaccum.core import checks, faults
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.reducers import Sum
from jaxaccum.core.sums import Window, WindowSums, finalize, is_empty
from jaxaccum.devices import reduction
from jaxaccum.diagnostics.gradient_noise import noise_scale
from jaxaccum.numerics import loss_scaling, weights
from jaxaccum.stream.state import check_no_window
from jaxaccum.training.donation import Step
from jaxaccum.training.records import StepInfo, StepOptions, StepState, TrainStep
from jaxaccum.window import refusals
from jaxaccum.window.arguments import Given
from jaxaccum.window.model_state import check_given
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
    training = _Training(in_one_precision(optimizer), window_fn, limit, loss_scale)

    @signed(call_signature(StepCall, "params", "state", "batch"))
    def step_fn(
        params: Any, state: StepState, batch: Any = NOTHING, *args: Any, **call: Any
    ) -> tuple[Any, StepState, StepInfo]:
        every, given = taken("train_step", (params, batch, *args), call, StepCall, cut)
        return training.step(state, every, given)

    return TrainStep(training.init, Step("train_step", step_fn, (0, 1) if donate else ()))


@dataclasses.dataclass(frozen=True)
class _Training:
    """The checked options of one `train_step`; see there."""

    inner: Any
    window_fn: Accumulation
    limit: int | None
    loss_scale: loss_scaling.LossScale | None

    @property
    def marks(self) -> Any:
        """How the gradients are combined, where not all are sums."""
        return self.window_fn.options.grad_reducers

    @property
    def axes(self) -> tuple[str, ...]:
        """The manual mesh axes of the window."""
        return reduction.names_of("train_step", "axis_name", self.window_fn.options.axis_name)

    def init(self, params: Any, model_state: Any = None) -> StepState:
        check_given("train_step", self.window_fn.options.model_state, model_state)
        checks.arrays("train_step", params, name="params")
        if isinstance(params, optax.LookaheadParams):
            raise TypeError(
                "train_step: `params` are `optax.LookaheadParams`, of which only the fast ones "
                "have a gradient. Call `ja.value_and_grad` on `params.fast` in a step of your own."
            )
        inner_state = self.inner.init(_trainable(params, self.marks))
        check_no_window("train_step", "optimizer", inner_state)
        # Some optimizers keep the parameters themselves: donating both would free them twice.
        inner_state, model_state = jax.tree.map(own_buffer, (inner_state, model_state))
        return StepState.first(inner_state, self.loss_scale, model_state)

    def step(
        self, state: StepState, every: Sequence[Any], given: Given
    ) -> tuple[Any, StepState, StepInfo]:
        """One step, from the positional arguments of the loss function: the parameters first."""
        params = every[0]
        self._check(state, params)
        scale = None if state.loss_scale is None else state.loss_scale.scale
        given = given._replace(loss_scale=scale, model_state=state.model_state)
        # The windows of some rooms take fewer.
        named = {name: value for name, value in given._asdict().items() if value is not None}
        sums = self.window_fn(*every, **named)
        window, trainable = finalize(sums), _trainable(params, self.marks)
        grads = jax.tree.map(
            lambda p, g: None if p is None else g, trainable, window.grads, is_leaf=is_none
        )
        stopped = state.ledger.stops(self.limit)
        applying = ~is_empty(sums)
        if sees_every_window(state.inner_state):
            applying = jnp.ones_like(applying)
        applying = applying & ~stopped
        updates, inner_state = _updated(
            self.inner, applying, grads, window.loss, trainable, state.inner_state, self.axes
        )
        new_params = jax.tree.map(
            lambda new, old, value: _replaced(old, value, applying) if new is None else new,
            optax.apply_updates(trainable, updates),
            params,
            window.grads,
            is_leaf=is_none,
        )
        outcome = Outcome(
            closed=jnp.ones((), jnp.bool_),
            applied=applying,
            bad=(window.num_microbatches == 0) & (window.num_skipped > 0),
            num_skipped=window.num_skipped,
        )
        largest = weights.largest("train_step", jax.tree.leaves(window.weight))
        new_state = StepState(
            optimizer_step=count_if(state.optimizer_step, applying),
            weight_seen_carry=weights.add(state.weight_seen_carry, largest),
            inner_state=inner_state,
            ledger=account(state.ledger, outcome, limit=self.limit, loss_scale=self.loss_scale),
            # Windows left out keep the state by themselves; those after `diverged` do not.
            model_state=jax.tree.map(
                lambda new, old: jnp.where(stopped, old, new), window.model_state, state.model_state
            ),
        )
        return new_params, new_state, self._info(sums, window, grads, state, new_state, applying)

    def _info(
        self,
        sums: WindowSums,
        window: Window,
        grads: Any,
        old: StepState,
        new: StepState,
        updated: jax.Array,
    ) -> StepInfo:
        scale = old.loss_scale
        return StepInfo(
            loss=window.loss,
            weight=window.weight,
            grad_norm=norms.of_window(grads, self.window_fn.options),
            num_microbatches=window.num_microbatches,
            num_skipped=window.num_skipped,
            updated=updated,
            optimizer_step=new.optimizer_step,
            weight_seen_carry=jax.tree.map(jnp.copy, new.weight_seen_carry),
            aux=window.aux if self.window_fn.options.has_aux else None,
            noise_scale=None if sums.noise is None else noise_scale(sums),
            num_dropped=new.num_dropped,
            num_bad_in_row=new.num_bad_in_row,
            diverged=new.diverged,
            loss_scale=None if scale is None else jnp.copy(scale.scale),
            overflowed=None if scale is None else window.num_skipped > 0,
        )

    def _check(self, state: Any, params: Any) -> None:
        """Requires the state of this optimizer and these parameters."""
        if not isinstance(state, StepState):
            raise TypeError(
                f"train_step: `state` must come from `init`, got {type(state).__name__}. For a "
                "plain optimizer state: `init(params)._replace(inner_state=state)`; for one of "
                "`optax.MultiSteps` the same with `state.inner_opt_state`, between two windows, or "
                "`ja.interop.from_optax` and a `ja.multi_steps`."
            )
        like = jax.eval_shape(self.inner.init, _trainable(params, self.marks))
        remedy = "Pass the state that `init` made for this optimizer and these parameters."
        checks.same_structure(
            "train_step", "state.inner_state", state.inner_state, like, remedy=remedy
        )
        if (state.loss_scale is None) != (self.loss_scale is None):
            raise ValueError(
                "train_step: `state` and this step differ in whether they have a `loss_scale`. Put "
                "`loss_scale.init()`, or `None`, in its place with `state._replace`."
            )


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


def _updated(
    inner: Any,
    applying: jax.Array,
    grads: Any,
    loss: Any,
    trainable: Any,
    inner_state: Any,
    axes: Sequence[str],
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
        lambda *args: run(*args)[0],
        strong(jax.tree.leaves(trainable)),
        inner_state,
        operands,
        offers=True,
    )

    check_shared("train_step", trial.types, trainable, axes)

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
