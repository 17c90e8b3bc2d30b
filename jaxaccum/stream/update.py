"""One call of `multi_steps`: fold the micro-step, close the window if it is full, account."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxaccum.closing.close import Ending, close_window
from jaxaccum.closing.handover import own_buffer
from jaxaccum.closing.inner import check_shared, sees_every_window
from jaxaccum.closing.leaves import differentiated, trained
from jaxaccum.closing.ledger import Ledger, Outcome, account, count_if
from jaxaccum.core import checks, faults
from jaxaccum.core.checks import all_finite
from jaxaccum.core.folding import fold, restart
from jaxaccum.core.mean import Mean
from jaxaccum.core.sums import WindowSums
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
from jaxaccum.stream.length import check_first, is_full, window_length
from jaxaccum.stream.open_window import Leaves, match, rebuild, window_sums
from jaxaccum.stream.own_params import own_axes, own_parts
from jaxaccum.stream.state import LOCAL, MeanSum, MultiStepsState, check_no_window


class Turn(NamedTuple):
    """One call, read, beside the state that it meets.

    Attributes:
      state: the state before it.
      flush: whether it only ends a window.
      axes: the mesh axes over which the sums meet.
      held: what this device holds of the open window: the state's fields, by name.
      call: the call's gradients and their weight.
      leaves: the gradients beside their carries.
      own: for each gradient the axes over which its parameter is a device's own.
      means: the arguments that are averaged, as far as the call gave them.
      key: the accumulator's PRNG key, where it needs one.
      run: the inner optimizer with the other arguments.
    """

    state: MultiStepsState
    flush: bool
    axes: tuple[str, ...]
    held: dict[str, Any]
    call: Call
    leaves: Leaves
    own: tuple[tuple[str, ...], ...]
    means: dict[str, Mean]
    key: Any
    run: InnerCall

    def open_window(self, accumulator: accumulators.Accumulator) -> WindowSums:
        """The sums of the micro-steps before this one."""
        held = self.held
        return window_sums(
            self.leaves.carries, held["weight_carry"], held["mean_args"], accumulator
        )

    def values(self, accumulator: accumulators.Accumulator) -> WindowSums:
        """What the call adds to them."""
        one = self.call.weight
        if one is None:
            dtype = self.state.weight_carry.total.dtype
            one = weights.pair("multi_steps", "weight", 1, dtype)
        means = {  # in the dtype of `init`
            name: jax.tree.map(lambda x, like: x.astype(like.dtype), _pair(self.means, name), held)
            for name, held in self.held["mean_args"].items()
        }
        one, means = reduction.vary((one, means), reduction.checked(self.axes))
        return window_sums(self.leaves.grads, one, means, accumulator)

    def holding(self, window: WindowSums) -> dict[str, Any]:
        """The fields of a state that holds the window, by name."""
        new = {
            "weight_carry": type(self.state.weight_carry)(*window.weight),
            "grad_carry": rebuild(window.grads, self.held["grad_carry"]),
            "mean_args": {name: _pair(window.aux, name) for name in window.aux},
        }
        return reduction.with_device_axis(new, self.axes)


@dataclasses.dataclass(frozen=True)
class Stream:
    """The checked options of one `multi_steps`; see there."""

    inner: Any
    every: Any
    axis_name: Any
    names: tuple[str, ...]
    local_params: Any
    reduce_dtype: Any
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
        seen = trained(params)
        inner_state = self.inner.init(seen)
        check_no_window("multi_steps", "inner", inner_state)
        own = own_parts(differentiated(seen), self.local_params, self.names)
        held = {
            "weight_carry": weights.zero(),
            "grad_carry": jax.tree.map(self.empty_carry, own),
            "mean_args": {name: _pair({}, name) for name in self.mean_args},
        }
        return MultiStepsState(
            micro_step=jnp.zeros((), jnp.int32),
            optimizer_step=jnp.zeros((), jnp.int32),
            updated=jnp.zeros((), jnp.bool_),
            **reduction.with_device_axis(held, self.names),
            # Some optimizers keep the parameters themselves: donating both would free them twice.
            inner_state=jax.tree.map(own_buffer, inner_state),
            ledger=Ledger.first(self.loss_scale),
        )

    def empty_carry(self, leaf: Any) -> Any:
        """What an empty window carries for a gradient."""
        return self.accumulator.empty(leaf)

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
        turn = self.read(updates, state, params, extra_args, weight=weight, flush=flush)
        window, keep = turn.open_window(self.accumulator), jnp.zeros((), jnp.bool_)
        if not flush:
            window, keep = self.fold(window, turn)
        micro_step = count_if(state.micro_step, keep)
        closing = micro_step > 0
        if not flush:
            closing = keep & is_full(
                self.every, micro_step, window.weight, state.optimizer_step, turn.axes
            )
        new_updates, window, fields = self.end(turn, window, keep, closing, micro_step)
        return new_updates, state._replace(
            micro_step=jnp.where(closing, 0, micro_step),
            **turn.holding(restart(window, closing)),
            **fields,
        )

    def read(
        self,
        updates: Any,
        state: MultiStepsState,
        params: Any,
        extra_args: dict[str, Any],
        *,
        weight: Any,
        flush: bool,
        bare: bool = False,
    ) -> Turn:
        """The checked arguments of a call; `bare` where the state carries no gradients."""
        check_given(state, self.loss_scale, flush=flush)
        axes = reduction.axes("multi_steps", self.axis_name)
        held = reduction.without_device_axis({n: getattr(state, n) for n in LOCAL}, axes)
        grad_carry = held["grad_carry"]
        if flush:
            call = _nothing(grad_carry, params, bare=bare)
        else:
            call = read_call(updates, weight, state, axes, normalize=self.normalize)
        leaves = match(call.grads, grad_carry, params, bare=bare)
        own = own_axes(call.grads, params, self.local_params, leaves.moves, axes)
        asked, key = frozenset(extra_args), None
        if self.accumulator.needs_key and not flush:
            key = rounding_key(extra_args.pop("key", None), axes)
        means, others = split_extra_args(extra_args, self.mean_args, every_mean=flush)
        # A call that gives no mean leaves it to those before.
        offered = [name for name in held["mean_args"] if name not in others]
        given = [name for name in offered if name in asked]
        run = InnerCall.of(self.inner, leaves, params, others, offered, given, self.grad_args)
        run = run.tried(state.inner_state, reduction.without(axes, own), flush=flush)
        check_shared("multi_steps", run.trial.types, run.params, axes)
        return Turn(state, flush, axes, held, call, leaves, own, means, key, run)

    def fold(self, window: WindowSums | None, turn: Turn) -> tuple[WindowSums, jax.Array]:
        """The window with this micro-step in it, unless that is skipped, and whether it is in."""
        values = turn.values(self.accumulator)
        larger = fold(window, values, turn.key)
        keep = ~jnp.asarray(turn.call.is_lost)
        if self.skips != faults.MICRO_BATCH:
            return larger, keep
        sums = [larger.weight.total, *jax.tree.leaves(larger.aux)]
        keep = keep & reduction.agree(all_finite([*values.grads, *sums]), turn.axes)
        if window is None:
            return restart(larger, ~keep), keep
        return larger.select(keep, window), keep

    def end(
        self,
        turn: Turn,
        window: WindowSums,
        keep: jax.Array,
        closing: jax.Array,
        micro_step: jax.Array,
    ) -> tuple[Any, WindowSums, dict[str, Any]]:
        """The updates, the sums after them, and the other fields of the state, by name."""
        state, call, run = turn.state, turn.call, turn.run
        ending = Ending(
            run_fn=run.closing,
            types=run.trial.types,
            tree=turn.leaves.tree,
            normalizes=self.normalize,
            always=call.is_divided,
            sees_all=sees_every_window(state.inner_state),
            judges=self.skips == faults.WINDOW,
            axes=turn.axes,
            own=turn.own,
            wire=self.reduce_dtype,
        )
        able = closing & ~state.ledger.stops(self.limit)
        closed = close_window(window, able, state.inner_state, run.params, ending)
        skipped = ~keep & (not turn.flush)
        # What is lost of `WindowSums` they have counted themselves.
        alone = (skipped & ~jnp.asarray(call.is_lost)).astype(jnp.int32)
        outcome = Outcome(
            closed=closing,
            applied=closed.applied,
            bad=closed.bad,
            num_skipped=alone + call.num_skipped,
            skipped=skipped,
            taken=keep,
            num_held=micro_step,
        )
        length = None  # of windows that are judged whole
        if self.skips == faults.MICRO_BATCH:
            length = jnp.maximum(window_length(self.every, state.optimizer_step), 1)
        fields = {
            "optimizer_step": count_if(state.optimizer_step, closed.applied),
            "updated": closed.applied,
            "inner_state": closed.inner_state,
            "ledger": account(
                state.ledger, outcome, limit=self.limit, loss_scale=self.loss_scale, length=length
            ),
        }
        return run.whole(closed.updates), closed.window, fields


def _pair(means: dict[str, Mean], name: str) -> MeanSum:
    """A mean in the form that the state has; that of nothing where there is none."""
    mean = means.get(name, no_mean())
    return MeanSum(mean.total, mean.weight)


def _nothing(grad_carry: Any, params: Any, *, bare: bool) -> Call:
    """A call without a gradient; its updates need the types of one."""
    if params is None and bare:
        raise ValueError(
            "flush: `params` are needed where `every` is 1: the state holds no sum that tells "
            "the shapes of the updates."
        )
    like = accumulators.read(grad_carry) if params is None else differentiated(params)
    return Call(jax.tree.map(jnp.zeros_like, like), None)
