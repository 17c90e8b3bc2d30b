"""The streaming transformation: a window over many calls of `update`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxaccum.core import checks, programs
from jaxaccum.core.checks import all_finite, is_inexact
from jaxaccum.core.mean import Mean, divide
from jaxaccum.folds import devices, faults
from jaxaccum.folds.handover import (
    APPLIED,
    DROPPED,
    cast,
    count_if,
    find_homes,
    hand_over,
    no_update,
    own_buffer,
)
from jaxaccum.folds.inner import differentiated, in_one_precision
from jaxaccum.folds.open_window import OpenWindow, carries_of, check_params, rebuild
from jaxaccum.folds.stream_arguments import (
    check_given,
    check_local,
    no_mean,
    rounding_key,
    split_extra_args,
)
from jaxaccum.folds.stream_length import (
    checked_length,
    is_full,
    is_one,
    until_weight,
    window_length,
)
from jaxaccum.folds.stream_state import MeanSum, MultiStepsState
from jaxaccum.numerics import accumulators, loss_scaling, weights


def multi_steps(
    inner: optax.GradientTransformation,
    every: int | Callable[[jax.Array], Any] | until_weight,
    *,
    axis_name: str | Sequence[str] | None = None,
    accumulator: accumulators.Accumulator | None = None,
    skip_nonfinite: bool | Literal["window"] = False,
    max_bad_windows: int | None = None,
    loss_scale: loss_scaling.LossScale | None = None,
    mean_args: Sequence[str] = ("value",),
    grad_args: Sequence[str] = ("grad",),
    normalize: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` once per window of `every` micro-steps, on the window's mean gradient.

    A micro-step adds `grad_sum` and `weight` to the state and returns zero updates. The
    micro-step that closes the window hands `grad_sum / weight` to `inner` and resets the sums.
    `optax.MultiSteps` averages unweighted means, and runs `inner` in every micro-step only to
    throw its result away in all but one.

    Donate the state (and the parameters) to the jitted function that calls `update`: then the
    sums are added in place.

    Args:
      inner: the optimizer; it sees the gradient of the large batch, and its step counts windows.
      every: micro-steps per window: a static int; or a function from the optimizer step (int32
        scalar) to an integer scalar, read at the window's start; or `until_weight(target)`.
      axis_name: mesh axes over which the batch is split, inside `shard_map` or `pmap`: sums stay on
        their device between calls and meet in one reduction when the window closes. Gradients
        must not be reduced before. See `ja.state_specs` for the state's layout.
      accumulator: how the gradient sums are carried; float32 by default.
      skip_nonfinite: leaves out every micro-step whose gradient, weight or averaged argument is not
        finite, on all devices where it is not on one. It does not advance the window: the next
        micro-step takes its place. "window" instead drops a window whose sums are not finite when
        it closes: no optimizer step, at no cost in the calls before.
      max_bad_windows: how many bad windows in a row set the state's `diverged`, after which no
        optimizer step is applied any more. Bad is a dropped window; where micro-steps are skipped,
        as many of them in a row as a window has (each one with `until_weight`).
      loss_scale: from `ja.loss_scaling`. Its state is `state.loss_scale`; pass
        `state.loss_scale.scale` to `ja.accumulate(...)(..., loss_scale=...)`, or multiply the loss
        and call `ja.loss_scaling.unscale`: `update` takes unscaled gradients, as always. Implies
        `skip_nonfinite="window"` where nothing else is chosen.
      mean_args: names of extra arguments that may be given as `ja.Mean`; `inner` receives their
        mean over the calls of the window that gave them.
      grad_args: names of extra arguments that are gradients (line searches take `grad=`); `inner`
        receives the window's mean gradient instead.
      normalize: whether to divide by the weight; `False` hands on the sums.

    Returns:
      A transformation. Its `update(grad_sum, state, params=None, *, weight=1, **extra_args)` takes
      the undivided gradients of one micro-batch (any inexact dtype) and their weight, a real
      scalar. With the default weight the gradients are means that count equally. Updates have the
      dtype that `inner` gives for the gradient's own dtype; between windows they are zero. A
      window that closes with a weight of zero is dropped: `inner` does not run.

    Raises:
      TypeError: `inner` or `every` has the wrong type.
      ValueError: `every` is less than 1, or the gradients do not match the state.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp, optax
      >>> tx = ja.multi_steps(optax.sgd(1.0), 2)
      >>> state = tx.init(jnp.float32(0))
      >>> updates, state = tx.update(jnp.float32(6), state, weight=3)
      >>> updates, state = tx.update(jnp.float32(7), state, weight=7)
      >>> print(updates)
      -1.3
    """
    checks.transformation("multi_steps", "inner", inner)
    accumulator = accumulators.checked("multi_steps", accumulator)
    every = checked_length(every)
    loss_scale = loss_scaling.checked("multi_steps", loss_scale)
    skips = faults.policy("multi_steps", skip_nonfinite)
    if loss_scale is not None and skips is None:
        skips = faults.WINDOW
    limit = faults.limit("multi_steps", max_bad_windows, skips)
    for name, value in (("mean_args", mean_args), ("grad_args", grad_args)):
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        if not (listed and all(isinstance(n, str) for n in value)):
            raise TypeError(
                f"multi_steps: `{name}` must be a tuple of argument names, got {value!r}. For one "
                f'name pass `{name}=("value",)`.'
            )
    inner = in_one_precision(inner)
    names = devices.names_of("multi_steps", "axis_name", axis_name)

    def init_fn(params: Any) -> MultiStepsState:
        checks.arrays("multi_steps", params, name="params")

        def carry(leaf: Any) -> Any:
            # A window of one micro-step needs no buffer, nor does what has no gradient.
            bare = is_one(every) or not is_inexact(leaf)
            return None if bare else accumulator.empty(jnp.asarray(leaf))

        return MultiStepsState(
            micro_step=jnp.zeros((), jnp.int32),
            optimizer_step=jnp.zeros((), jnp.int32),
            num_skipped=jnp.zeros((), jnp.int32),
            num_empty=jnp.zeros((), jnp.int32),
            updated=jnp.zeros((), jnp.bool_),
            weight_carry=devices.with_device_axis(weights.zero(), names),
            grad_carry=devices.with_device_axis(jax.tree.map(carry, differentiated(params)), names),
            mean_args=devices.with_device_axis(
                {name: MeanSum(no_mean().total, no_mean().weight) for name in mean_args}, names
            ),
            # Some optimizers keep the parameters themselves: donating both would free them twice.
            inner_state=jax.tree.map(own_buffer, inner.init(params)),
            num_dropped=jnp.zeros((), jnp.int32),
            num_bad_in_row=jnp.zeros((), jnp.int32),
            diverged=jnp.zeros((), jnp.bool_),
            loss_scale=None if loss_scale is None else loss_scale.init(),
        )

    def update_fn(
        updates: Any,
        state: MultiStepsState,
        params: Any = None,
        *,
        weight: Any = None,
        flush: bool = False,
        **extra_args: Any,
    ) -> tuple[Any, MultiStepsState]:
        check_given(updates, state, loss_scale, flush=flush)
        asked = frozenset(extra_args)
        axes = devices.axes("multi_steps", axis_name)
        grad_carry, weight_carry, mean_sums = devices.without_device_axis(
            (state.grad_carry, state.weight_carry, state.mean_args), axes
        )
        mean_sums = {name: Mean(*pair) for name, pair in mean_sums.items()}
        # A window of one micro-step carries nothing, unless it took over the state of a longer one.
        bare = is_one(every) and not jax.tree.leaves(grad_carry)
        if flush and params is None and bare:
            raise ValueError(
                "flush: `params` are needed where `every` is 1: the state holds no sum that tells "
                "the shapes of the updates."
            )
        if flush:  # there is no gradient, but the updates need its types
            like = accumulators.read(grad_carry) if params is None else differentiated(params)
            updates = jax.tree.map(jnp.zeros_like, like)
        else:
            check_local(updates, axes)
        carries = carries_of(updates, grad_carry, bare=bare)
        if params is not None:
            check_params(differentiated(params), updates)
        key = None
        if accumulator.needs_key and not flush:
            key = rounding_key(extra_args.pop("key", None), axes)
        means, extra_args = split_extra_args(extra_args, mean_args, every_mean=flush)
        leaves, tree = jax.tree.flatten(updates)
        ordinals = itertools.count()
        places = [next(ordinals) if is_inexact(g) else None for g in leaves]
        grads = [jnp.asarray(g) for g, p in zip(leaves, places, strict=True) if p is not None]

        def run_inner(grads: Sequence[Any], values: Any, inner_state: Any, params: Any) -> Any:
            # Integer parameters have no gradient (float0); optimizers expect an array.
            whole = [
                jnp.zeros(np.shape(g), jnp.int32) if p is None else grads[p]
                for g, p in zip(leaves, places, strict=True)
            ]
            mean_grads = jax.tree.unflatten(tree, whole)
            named = {**extra_args, **values}
            named |= {name: mean_grads for name in grad_args if name in named}
            try:
                return inner.update(mean_grads, inner_state, params, **named)
            except TypeError as error:
                # The window's means are offered; what takes none, as SAM, gets what was asked for.
                own = {name: value for name, value in named.items() if name in asked}
                if "unexpected keyword" not in str(error) or own.keys() == named.keys():
                    raise
                return inner.update(mean_grads, inner_state, params, **own)

        if bare and weight is None and not (skips or flush or axes):
            # Without accumulation the gradients reach the optimizer untouched.
            values = {name: mean.value for name, mean in means.items()}
            new_updates, inner_state = run_inner(grads, values, state.inner_state, params)
            return new_updates, state._replace(
                optimizer_step=optax.safe_increment(state.optimizer_step),
                updated=jnp.ones((), jnp.bool_),
                inner_state=jax.tree.map(cast, inner_state, state.inner_state),
            )

        samples = {name: jnp.zeros((), jnp.float32) for name in means}

        def updates_of(grads: Sequence[Any], inner_state: Any, params: Any) -> Any:
            # The inner optimizer sees what is the same on all devices.
            grads = jax.lax.psum(grads, axes) if axes else grads
            return run_inner(grads, samples, inner_state, params)[0]

        types = programs.types_of(updates_of, grads, state.inner_state, params)
        if bare and flush:  # no window is ever open
            nothing = jax.tree.map(no_update, types)
            return nothing, state._replace(updated=jnp.zeros((), jnp.bool_))

        # The window with this micro-step in it, unless that is skipped.
        window = OpenWindow(carries, weight_carry, mean_sums)
        keep = jnp.asarray(not flush)
        if not flush:
            dtype = weight_carry.total.dtype
            one = weights.pair("multi_steps", "weight", 1 if weight is None else weight, dtype)
            one, means = devices.vary((one, means), devices.checked(axes))
            larger = window.fold(accumulator, grads, one, means, key)
            if skips == faults.MICRO_BATCH:
                keep = devices.agree(
                    all_finite([*grads, larger.weight.total, *jax.tree.leaves(larger.means)]), axes
                )
                larger = larger.select(keep, window)
            window = larger
        micro_step = count_if(state.micro_step, keep)
        if flush:
            closing = micro_step > 0
        else:
            full = is_full(every, micro_step, window.weight, state.optimizer_step, axes)
            closing = keep & full

        def divide_and_run(sums: Sequence[Any], inner_state: Any, operands: Any) -> Any:
            window, params = operands
            window = window.with_sums(sums)
            mean = [accumulator.read(c) for c in window.carries]
            if normalize:
                mean = [divide(g, accumulators.read(window.weight), empty=0.0) for g in mean]
            # A call that gives no mean leaves it to those before.
            values = {n: m.value for n, m in window.means.items() if n not in extra_args}
            return *run_inner(mean, values, inner_state, params), APPLIED

        def judge_first(sums: Sequence[Any], inner_state: Any, operands: Any) -> Any:
            window, params = operands
            window = window.with_sums(sums).across(accumulator, axes)
            sound = jnp.ones((), jnp.bool_)
            if skips == faults.WINDOW:
                sound = window.is_finite(accumulator)
            updates, _, inner_state, outcome = hand_over(
                sound & ~weights.is_zero(window.weight),
                divide_and_run,
                window.sums(),
                inner_state,
                (window.without_sums(), params),
                types,
                find_homes(types, tree, places, window.sums()),
            )
            return updates, inner_state, jnp.where(sound, outcome, DROPPED)

        # Over devices the weight is known only after the reduction, and the updates, which are
        # the same everywhere, cannot come back in the buffers of sums that are not.
        sums = window.sums()
        nowhere = [None] * len(jax.tree.leaves(types))
        late = bool(axes) or skips == faults.WINDOW
        applying = closing if late else closing & ~weights.is_zero(window.weight)
        new_updates, sums, inner_state, outcome = hand_over(
            applying if limit is None else applying & ~state.diverged,
            judge_first if late else divide_and_run,
            sums,
            state.inner_state,
            (window.without_sums(), params),
            types,
            nowhere if axes else find_homes(types, tree, places, sums),
            judged_over=frozenset() if axes or not late else window.varies_over(),
        )
        applied, bad = outcome == APPLIED, outcome == DROPPED
        window = window.with_sums(sums)
        window = jax.tree.map(lambda x: jnp.where(closing, jnp.zeros_like(x), x), window)
        grad_carry, weight_carry, mean_sums = devices.with_device_axis(
            (rebuild(window.carries, grad_carry, updates), window.weight, window.means), axes
        )
        skipped = ~keep & (not flush)
        dropped = bad if limit is None else bad | (closing & state.diverged)
        in_row, diverged = state.num_bad_in_row, state.diverged
        renewed = closing
        if skips == faults.WINDOW:
            in_row = jnp.where(applied, 0, count_if(in_row, bad))
            worth = in_row
        elif skips == faults.MICRO_BATCH and not flush:
            in_row = jnp.where(skipped, count_if(in_row, skipped), 0)
            length = jnp.maximum(window_length(every, state.optimizer_step), 1)
            worth = in_row // length
            # The scale of a window that never begins has to change all the same.
            renewed = closing | (skipped & (micro_step == 0) & (in_row % length == 0))
        if limit is not None and not (flush and skips == faults.MICRO_BATCH):
            diverged = diverged | (worth >= limit)
        scaling = state.loss_scale
        if loss_scale is not None and scaling is not None:
            scaling = loss_scale.after_call(scaling, overflowed=skipped | bad, closed=renewed)
        return new_updates, MultiStepsState(
            micro_step=jnp.where(closing, 0, micro_step),
            optimizer_step=count_if(state.optimizer_step, applied),
            num_skipped=count_if(count_if(state.num_skipped, skipped), bad, micro_step),
            num_empty=count_if(state.num_empty, closing & ~applied & ~dropped),
            updated=applied,
            weight_carry=weight_carry,
            grad_carry=grad_carry,
            mean_args={name: MeanSum(m.total, m.weight) for name, m in mean_sums.items()},
            inner_state=inner_state,
            num_dropped=count_if(state.num_dropped, dropped),
            num_bad_in_row=in_row,
            diverged=diverged,
            loss_scale=scaling,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
