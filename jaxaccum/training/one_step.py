"""One step of a training: a window, its end, the ledger, and what it tells."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxaccum import norms
from jaxaccum.closing.close import Ending, close_window
from jaxaccum.closing.handover import own_buffer
from jaxaccum.closing.inner import check_shared, sees_every_window, strong, tried
from jaxaccum.closing.leaves import is_none, still
from jaxaccum.closing.ledger import Outcome, account, count_if
from jaxaccum.core import checks
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.reducers import Sum
from jaxaccum.core.sums import Window, WindowSums, finalize
from jaxaccum.devices import reduction
from jaxaccum.diagnostics.gradient_noise import noise_scale
from jaxaccum.numerics import loss_scaling, weights
from jaxaccum.stream.state import check_no_window
from jaxaccum.training.records import StepInfo, StepState
from jaxaccum.window.arguments import Given
from jaxaccum.window.model_state import check_given
from jaxaccum.window.window_fn import Accumulation


@dataclasses.dataclass(frozen=True)
class Training:
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
        # Reduced, judged and divided; only the gradients and what tells whether they count go on.
        divided = dataclasses.replace(
            sums,
            grads=jax.tree.leaves(grads),
            grad_reducers=None,
            aux=None,
            noise=None,
            model_state=None,
        )
        operands = window.loss, trainable
        closed = close_window(
            divided, ~stopped, state.inner_state, operands, self._ending(grads, operands, state)
        )
        new_params = jax.tree.map(
            lambda new, old, value: _replaced(old, value, closed.applied) if new is None else new,
            optax.apply_updates(trainable, closed.updates),
            params,
            window.grads,
            is_leaf=is_none,
        )
        outcome = Outcome(
            closed=jnp.ones((), jnp.bool_),
            applied=closed.applied,
            bad=(window.num_microbatches == 0) & (window.num_skipped > 0),
            num_skipped=window.num_skipped,
        )
        largest = weights.largest("train_step", jax.tree.leaves(window.weight))
        new_state = StepState(
            optimizer_step=count_if(state.optimizer_step, closed.applied),
            weight_seen_carry=weights.add(state.weight_seen_carry, largest),
            inner_state=closed.inner_state,
            ledger=account(state.ledger, outcome, limit=self.limit, loss_scale=self.loss_scale),
            # Windows left out keep the state by themselves; those after `diverged` do not.
            model_state=jax.tree.map(
                lambda new, old: jnp.where(stopped, old, new), window.model_state, state.model_state
            ),
        )
        info = self._info(sums, window, grads, state, new_state, closed.applied)
        return new_params, new_state, info

    def _ending(self, grads: Any, operands: Any, state: StepState) -> Ending:
        """The optimizer's step; it is offered the window's loss and its gradient."""
        inner, structure = self.inner, jax.tree.structure(grads)

        @functools.partial(jax.jit, static_argnums=0)  # traced once for gradients of the same types
        def run(offering: bool, grads: Any, inner_state: Any, operands: Any) -> tuple[Any, Any]:
            loss, params = operands
            tree = jax.tree.unflatten(structure, grads)
            offered = {"value": loss, "grad": tree} if offering else {}
            updates, inner_state = inner.update(tree, inner_state, params, **offered)
            return updates, inner_state

        # Their types are those that the updates have for gradients in the parameters' own types.
        trainable = operands[1]
        like = strong(jax.tree.leaves(trainable))
        trial = tried(lambda *args: run(*args)[0], like, state.inner_state, operands, offers=True)
        check_shared("train_step", trial.types, trainable, self.axes)

        def run_fn(grads: Any, _: Any, inner_state: Any, operands: Any) -> tuple[Any, Any]:
            updates, inner_state = run(trial.takes_offers, grads, inner_state, operands)
            return still(updates, trial.constant), inner_state

        sees_all = sees_every_window(state.inner_state)
        return Ending(run_fn=run_fn, types=trial.types, tree=structure, sees_all=sees_all)

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
