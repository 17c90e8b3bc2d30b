"""One call of `multi_steps`: fold the micro-step, close the window if it is full, count."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxaccum.closing.handover import (
    APPLIED,
    DROPPED,
    cast,
    find_homes,
    hand_over,
    own_buffer,
)
from jaxaccum.closing.inner import check_shared, sees_every_window
from jaxaccum.closing.leaves import differentiated, no_update, trained
from jaxaccum.closing.ledger import Ledger, Outcome, account, count_if
from jaxaccum.core import checks, faults
from jaxaccum.core.checks import all_finite
from jaxaccum.core.leaves import leafwise
from jaxaccum.core.mean import Mean, quotient
from jaxaccum.devices import reduction
from jaxaccum.numerics import accumulators, loss_scaling, weights
from jaxaccum.stream.arguments import (
    Call,
    check_given,
    no_mean,
    read_call,
    rounding_key,
    split_extra_args,
)
from jaxaccum.stream.inner_call import InnerCall
from jaxaccum.stream.length import check_first, is_full, is_one, window_length
from jaxaccum.stream.open_window import OpenWindow, match, rebuild
from jaxaccum.stream.own_params import own_axes, own_parts
from jaxaccum.stream.state import MeanSum, MultiStepsState, check_no_window


@dataclasses.dataclass(frozen=True)
class Stream:
    """The checked options of one `multi_steps`; see there."""

    inner: Any
    every: Any
    axis_name: Any
    names: tuple[str, ...]
    local_params: Any
    accumulator: accumulators.Accumulator
    skips: str | None
    limit: int | None
    loss_scale: loss_scaling.LossScale | None
    mean_args: tuple[str, ...]
    grad_args: tuple[str, ...]
    normalize: bool

    def init(self, params: Any) -> MultiStepsState:
        """The state of an empty window."""
        checks.arrays("multi_steps", params, name="params")
        check_first(self.every)

        def carry(leaf: Any) -> Any:
            # A window of one micro-step needs no buffer.
            empty = self.accumulator.empty
            return accumulators.Uncarried() if is_one(self.every) else empty(leaf)

        seen = trained(params)
        inner_state = self.inner.init(seen)
        check_no_window("multi_steps", "inner", inner_state)
        return MultiStepsState(
            micro_step=jnp.zeros((), jnp.int32),
            optimizer_step=jnp.zeros((), jnp.int32),
            updated=jnp.zeros((), jnp.bool_),
            weight_carry=reduction.with_device_axis(weights.zero(), self.names),
            grad_carry=reduction.with_device_axis(
                jax.tree.map(carry, own_parts(differentiated(seen), self.local_params, self.names)),
                self.names,
            ),
            mean_args=reduction.with_device_axis(
                {name: MeanSum(no_mean().total, no_mean().weight) for name in self.mean_args},
                self.names,
            ),
            # Some optimizers keep the parameters themselves: donating both would free them twice.
            inner_state=jax.tree.map(own_buffer, inner_state),
            ledger=Ledger.first(self.loss_scale),
        )

    def update(
        self,
        updates: Any,
        state: MultiStepsState,
        params: Any,
        extra_args: dict[str, Any],
        *,
        weight: Any,
        flush: bool,
    ) -> tuple[Any, MultiStepsState]:
        """One call: a micro-step, or with `flush` the end of a window without one."""
        check_given(state, self.loss_scale, flush=flush)
        axes = reduction.axes("multi_steps", self.axis_name)
        grad_carry, weight_carry, mean_sums = reduction.without_device_axis(
            (state.grad_carry, accumulators.Compensated(*state.weight_carry), state.mean_args), axes
        )
        # A window of one micro-step carries nothing, unless it took over the state of a longer one.
        bare = is_one(self.every) and not jax.tree.leaves(grad_carry)
        call = (
            _nothing(grad_carry, params, bare=bare)
            if flush
            else read_call(updates, weight, state, axes, normalize=self.normalize)
        )
        leaves = match(call.grads, grad_carry, params, bare=bare)
        own = own_axes(call.grads, params, self.local_params, leaves.moves, axes)
        asked, key = frozenset(extra_args), None
        if self.accumulator.needs_key and not flush:
            key = rounding_key(extra_args.pop("key", None), axes)
        means, extra_args = split_extra_args(extra_args, self.mean_args, every_mean=flush)
        # A call that gives no mean leaves it to those before.
        offered = [name for name in mean_sums if name not in extra_args]
        given = [name for name in offered if name in asked]
        run = InnerCall.of(self.inner, leaves, params, extra_args, offered, given, self.grad_args)
        if bare and call.weight is None and not (self.skips or flush or axes):
            return self._plain_step(run, means, state)
        window = OpenWindow(
            leaves.carries,
            weight_carry,
            {name: Mean(*pair) for name, pair in mean_sums.items()},
            own,
        )
        run = run.tried(state.inner_state, reduction.without(axes, own), flush=flush)
        check_shared("multi_steps", run.trial.types, run.params, axes)
        if bare and flush:  # no window is ever open
            nothing = run.whole(jax.tree.map(no_update, run.trial.types))
            return nothing, state._replace(updated=jnp.zeros((), jnp.bool_))
        window, keep = self._folded(window, call, leaves.grads, means, key, axes, flush=flush)
        micro_step = count_if(state.micro_step, keep)
        if flush:
            closing = micro_step > 0
        else:
            closing = keep & is_full(
                self.every, micro_step, window.weight, state.optimizer_step, axes
            )
        new_updates, window, inner_state, outcome = self._closed(
            run, window, closing, state, axes, always=call.is_divided
        )
        grad_carry, weight_carry, mean_sums = reduction.with_device_axis(
            (rebuild(window.carries, grad_carry), window.weight, window.means), axes
        )
        applied = (outcome & APPLIED) > 0
        skipped = ~keep & (not flush)
        # What is lost of `WindowSums` they have counted themselves.
        alone = (skipped & ~jnp.asarray(call.is_lost)).astype(jnp.int32)
        what = Outcome(
            closed=closing,
            applied=applied,
            bad=(outcome & DROPPED) > 0,
            num_skipped=alone + call.num_skipped,
            skipped=skipped,
            taken=keep,
            num_held=micro_step,
        )
        return run.whole(new_updates), state._replace(
            micro_step=jnp.where(closing, 0, micro_step),
            optimizer_step=count_if(state.optimizer_step, applied),
            updated=applied,
            weight_carry=type(state.weight_carry)(*weight_carry),
            grad_carry=grad_carry,
            mean_args={name: MeanSum(m.total, m.weight) for name, m in mean_sums.items()},
            inner_state=inner_state,
            ledger=account(
                state.ledger,
                what,
                limit=self.limit,
                loss_scale=self.loss_scale,
                length=self._judged_length(state),
            ),
        )

    def _judged_length(self, state: MultiStepsState) -> Any:
        """How many micro-steps left out in a row are as bad as a window; `None` for windows."""
        if self.skips != faults.MICRO_BATCH:
            return None
        return jnp.maximum(window_length(self.every, state.optimizer_step), 1)

    def _plain_step(
        self, run: InnerCall, means: dict[str, Mean], state: MultiStepsState
    ) -> tuple[Any, MultiStepsState]:
        """A window of one micro-step: its gradients reach the optimizer untouched."""
        run = run.tried(state.inner_state, [()] * len(run.leaves.grads), flush=False)
        values = {name: mean.value for name, mean in means.items()}
        updates, inner_state = run(run.leaves.grads, values, state.inner_state, run.params)
        return run.whole(updates), state._replace(
            optimizer_step=optax.safe_increment(state.optimizer_step),
            updated=jnp.ones((), jnp.bool_),
            inner_state=jax.tree.map(cast, inner_state, state.inner_state),
        )

    def _folded(
        self,
        window: OpenWindow,
        call: Call,
        grads: Sequence[jax.Array],
        means: dict[str, Mean],
        key: Any,
        axes: tuple[str, ...],
        *,
        flush: bool,
    ) -> tuple[OpenWindow, jax.Array]:
        """The window with this micro-step in it, unless that is skipped, and whether it is in."""
        if flush:
            return window, jnp.zeros((), jnp.bool_)
        one = call.weight
        if one is None:
            one = weights.pair("multi_steps", "weight", 1, window.weight.total.dtype)
        one, means = reduction.vary((one, means), reduction.checked(axes))
        larger = window.fold(self.accumulator, grads, one, means, key)
        keep = ~jnp.asarray(call.is_lost)
        if self.skips == faults.MICRO_BATCH:
            finite = all_finite([*grads, larger.weight.total, *jax.tree.leaves(larger.means)])
            keep = keep & reduction.agree(finite, axes)
            larger = larger.select(keep, window)
        return larger, keep

    def _closed(
        self,
        run: InnerCall,
        window: OpenWindow,
        closing: jax.Array,
        state: MultiStepsState,
        axes: tuple[str, ...],
        *,
        always: bool,
    ) -> tuple[Any, OpenWindow, Any, jax.Array]:
        """Updates, the window after it, the inner state, and what became of it.

        Where it is not `closing` the window stays as it is and the updates change no bit. Without
        weight it is dropped, unless it counts `always`.
        """
        accumulator, types = self.accumulator, run.trial.types
        whole = sees_every_window(state.inner_state)

        def has_weight(window: OpenWindow) -> jax.Array:
            empty = weights.is_zero(window.weight)
            return jnp.ones_like(empty) if whole or always else ~empty

        def divide_and_run(sums: Sequence[Any], inner_state: Any, operands: Any) -> Any:
            window, params = operands
            window = window.with_sums(sums)
            mean = [accumulator.read(c) for c in window.carries]
            if self.normalize:
                mean = leafwise(quotient, mean, shared=(accumulators.read(window.weight),))
            return *run.closing(mean, window.means, inner_state, params), APPLIED

        def judge_first(sums: Sequence[Any], inner_state: Any, operands: Any) -> Any:
            window, params = operands
            window = window.with_sums(sums).across(accumulator, axes)
            sound = jnp.ones((), jnp.bool_)
            if self.skips == faults.WINDOW:
                sound = window.is_finite(accumulator)
                sound = reduction.agree(sound, axes) if any(window.own) else sound
                if whole:
                    window = window.select(sound, jax.tree.map(jnp.zeros_like, window))
            updates, _, inner_state, outcome = hand_over(
                has_weight(window) & (sound | whole),
                divide_and_run,
                window.sums(),
                inner_state,
                (window.without_sums(), params),
                types,
                find_homes(types, run.leaves.tree, window.sums()),
            )
            return updates, inner_state, outcome | jnp.where(sound, 0, DROPPED)

        # Over devices the weight is known only after the reduction, and the updates, which are
        # the same everywhere, cannot come back in the buffers of sums that are not.
        sums = window.sums()
        nowhere = [None] * len(jax.tree.leaves(types))
        late = bool(axes) or self.skips == faults.WINDOW
        applying = closing if late else closing & has_weight(window)
        new_updates, sums, inner_state, outcome = hand_over(
            applying & ~state.ledger.stops(self.limit),
            judge_first if late else divide_and_run,
            sums,
            state.inner_state,
            (window.without_sums(), run.params),
            types,
            nowhere if axes else find_homes(types, run.leaves.tree, sums),
            judged_over=frozenset() if axes or not late else window.varies_over(),
        )
        window = window.with_sums(sums)
        return new_updates, window.emptied(closing), inner_state, outcome


def _nothing(grad_carry: Any, params: Any, *, bare: bool) -> Call:
    """A call without a gradient; its updates need the types of one."""
    if params is None and bare:
        raise ValueError(
            "flush: `params` are needed where `every` is 1: the state holds no sum that tells "
            "the shapes of the updates."
        )
    like = accumulators.read(grad_carry) if params is None else differentiated(params)
    return Call(jax.tree.map(jnp.zeros_like, like), None)
