"""The streaming transformation: a window over many calls of `update`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxaccum.core import checks, compat
from jaxaccum.core.checks import all_finite, is_inexact
from jaxaccum.core.mean import Mean, divide
from jaxaccum.core.sums import WindowSums
from jaxaccum.folds import devices
from jaxaccum.folds.handover import cast, count_if, find_homes, hand_over, no_update, own_buffer
from jaxaccum.folds.inner import differentiated, in_one_precision
from jaxaccum.folds.open_window import OpenWindow, carries_of, rebuild
from jaxaccum.folds.stream_state import MultiStepsState
from jaxaccum.numerics import accumulators, weights


class until_weight(NamedTuple):  # noqa: N801 - reads as a function, `every=until_weight(524_288)`
    """Closes a `multi_steps` window when it holds at least `target` weight (tokens).

    Attributes:
      target: the least weight of a window; a number, or a function from the optimizer step (int32
        scalar, read at the window's start) to one.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp, optax
      >>> tx = ja.multi_steps(optax.sgd(1.0), ja.until_weight(5))
      >>> state = tx.init(jnp.float32(0))
      >>> for tokens in (3, 1, 4):
      ...     _, state = tx.update(jnp.float32(1), state, weight=tokens)
      >>> print(ja.has_updated(state))
      True
    """

    target: Any


def multi_steps(
    inner: optax.GradientTransformation,
    every: int | Callable[[jax.Array], Any] | until_weight,
    *,
    axis_name: str | Sequence[str] | None = None,
    accumulator: accumulators.Accumulator | None = None,
    skip_nonfinite: bool = False,
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
        micro-step takes its place.
      mean_args: names of extra arguments that may be given as `ja.Mean`; `inner` receives their
        mean over the window.
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
    if every is until_weight:
        raise TypeError(
            "multi_steps: `every` is `until_weight` without its target; call it, "
            "`ja.until_weight(524_288)`."
        )
    if isinstance(every, until_weight):
        _check_target(every.target)
    elif not callable(every):
        remedy = "Pass an int, a function of the optimizer step, or `ja.until_weight(target)`."
        every = checks.integer("multi_steps", "every", every, remedy=remedy)
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
            bare = _is_one(every) or not is_inexact(leaf)
            return None if bare else accumulator.empty(jnp.asarray(leaf))

        return MultiStepsState(
            micro_step=jnp.zeros((), jnp.int32),
            optimizer_step=jnp.zeros((), jnp.int32),
            num_skipped=jnp.zeros((), jnp.int32),
            num_empty=jnp.zeros((), jnp.int32),
            updated=jnp.zeros((), jnp.bool_),
            weight_carry=devices.with_device_axis(weights.zero(), names),
            grad_carry=devices.with_device_axis(jax.tree.map(carry, differentiated(params)), names),
            mean_args=devices.with_device_axis({name: _no_mean() for name in mean_args}, names),
            # Some optimizers keep the parameters themselves: donating both would free them twice.
            inner_state=jax.tree.map(own_buffer, inner.init(params)),
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
        if not isinstance(state, MultiStepsState):
            raise TypeError(
                f"multi_steps: `state` must come from `init`, got {type(state).__name__}."
            )
        if isinstance(updates, WindowSums):
            raise TypeError(
                "multi_steps: `updates` is a `WindowSums`; pass `sums.grads`, with "
                "`weight=sums.weight`."
            )
        axes = devices.axes("multi_steps", axis_name)
        grad_carry, weight_carry, mean_sums = devices.without_device_axis(
            (state.grad_carry, state.weight_carry, state.mean_args), axes
        )
        if flush and params is None and _is_one(every):
            raise ValueError(
                "flush: `params` are needed where `every` is 1: the state holds no sum that tells "
                "the shapes of the updates."
            )
        if flush:  # there is no gradient, but the updates need its types
            like = accumulators.read(grad_carry) if params is None else differentiated(params)
            updates = jax.tree.map(jnp.zeros_like, like)
        else:
            _check_local(updates, axes)
        carries = carries_of(updates, grad_carry)
        rounding_key = None
        if accumulator.needs_key and not flush:
            rounding_key = _rounding_key(extra_args.pop("key", None), axes)
        means, extra_args = _split_extra_args(extra_args, mean_args, every_mean=flush)
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
            return inner.update(mean_grads, inner_state, params, **named)

        if _is_one(every) and weight is None and not (skip_nonfinite or flush or axes):
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

        types = compat.types_of(updates_of, grads, state.inner_state, params)
        if _is_one(every) and flush:  # no window is ever open
            nothing = jax.tree.map(no_update, types)
            return nothing, state._replace(updated=jnp.zeros((), jnp.bool_))

        # The window with this micro-step in it, unless that is skipped.
        window = OpenWindow(carries, weight_carry, mean_sums)
        keep = jnp.asarray(not flush)
        if not flush:
            dtype = weight_carry.total.dtype
            one = weights.pair("multi_steps", "weight", 1 if weight is None else weight, dtype)
            one, means = devices.vary((one, means), devices.checked(axes))
            larger = window.fold(accumulator, grads, one, means, rounding_key)
            if skip_nonfinite:
                keep = devices.agree(
                    all_finite([*grads, larger.weight.total, *jax.tree.leaves(larger.means)]), axes
                )
                larger = larger.select(keep, window)
            window = larger
        micro_step = state.micro_step + keep.astype(jnp.int32)
        if flush:
            closing = micro_step > 0
        else:
            full = _is_full(every, micro_step, window.weight, state.optimizer_step, axes)
            closing = keep & full

        def divide_and_run(sums: Sequence[Any], inner_state: Any, operands: Any) -> Any:
            window, params = operands
            window = window.with_sums(sums)
            mean = [accumulator.read(c) for c in window.carries]
            if normalize:
                mean = [divide(g, accumulators.read(window.weight), empty=0.0) for g in mean]
            values = {name: window.means[name].value for name in means}
            return *run_inner(mean, values, inner_state, params), True

        def reduce_first(sums: Sequence[Any], inner_state: Any, operands: Any) -> Any:
            window, params = operands
            window = window.with_sums(sums).across(accumulator, axes)
            updates, _, inner_state, ran = hand_over(
                ~weights.is_zero(window.weight),
                divide_and_run,
                window.sums(),
                inner_state,
                (window.without_sums(), params),
                types,
                find_homes(types, tree, places, window.sums()),
            )
            return updates, inner_state, ran

        # Over devices the weight is known only after the reduction, and the updates, which are
        # the same everywhere, cannot come back in the buffers of sums that are not.
        sums = window.sums()
        nowhere = [None] * len(jax.tree.leaves(types))
        new_updates, sums, inner_state, applied = hand_over(
            closing if axes else closing & ~weights.is_zero(window.weight),
            reduce_first if axes else divide_and_run,
            sums,
            state.inner_state,
            (window.without_sums(), params),
            types,
            nowhere if axes else find_homes(types, tree, places, sums),
        )
        window = window.with_sums(sums)
        window = jax.tree.map(lambda x: jnp.where(closing, jnp.zeros_like(x), x), window)
        grad_carry, weight_carry, mean_sums = devices.with_device_axis(
            (rebuild(window.carries, grad_carry, updates), window.weight, window.means), axes
        )
        return new_updates, MultiStepsState(
            micro_step=jnp.where(closing, 0, micro_step),
            optimizer_step=count_if(state.optimizer_step, applied),
            num_skipped=count_if(state.num_skipped, ~keep & (not flush)),
            num_empty=count_if(state.num_empty, closing & ~applied),
            updated=applied,
            weight_carry=weight_carry,
            grad_carry=grad_carry,
            mean_args=mean_sums,
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_full(
    every: Any,
    micro_step: jax.Array,
    weight: accumulators.Compensated,
    optimizer_step: jax.Array,
    axes: tuple[str, ...],
) -> jax.Array:
    """Whether the window that holds `micro_step` micro-steps and `weight` closes."""
    if not isinstance(every, until_weight):
        return micro_step >= _window_length(every, optimizer_step)
    target = every.target(optimizer_step) if callable(every.target) else every.target
    if axes:
        weight = accumulators.Compensated(*jax.lax.psum(tuple(weight), axes))
    return weights.reaches(
        weight, weights.pair("multi_steps", "until_weight", target, weight.total.dtype)
    )


def _rounding_key(key: Any, axes: tuple[str, ...]) -> jax.Array:
    if key is None:
        raise ValueError(
            "multi_steps: the accumulator rounds stochastically and needs `key=`, a PRNG key for "
            "each call of `update`, for example `key=jax.random.fold_in(key, micro_step)`."
        )
    return jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key


def _check_target(target: Any) -> None:
    if callable(target):
        return
    number = isinstance(target, int | float | np.number) and not isinstance(target, bool)
    if not number and not (isinstance(target, jax.Array) and target.shape == ()):
        raise TypeError(
            "multi_steps: `until_weight` needs a number or a function of the optimizer step, got "
            f"{checks.describe(target)}."
        )
    if not target > 0:
        raise ValueError(f"multi_steps: `until_weight` needs a target above 0, got {target}.")


def _check_local(updates: Any, axes: tuple[str, ...]) -> None:
    """Refuses gradients that are the same on all devices, which would be summed once too often."""
    over = devices.checked(axes)
    for path, grad in jax.tree_util.tree_leaves_with_path(updates):
        if is_inexact(grad) and not over <= compat.varying_axes(grad):
            raise TypeError(
                f"multi_steps: `updates{jax.tree_util.keystr(path)}` is the same on all devices of "
                f"`axis_name` {tuple(sorted(over))}, so it was reduced already. Pass each device's "
                "own sum: `ja.accumulate` keeps it local, and so does `jax.grad` in parameters "
                'cast with `jax.lax.pcast(params, axis, to="varying")`.'
            )


def _window_length(every: Any, optimizer_step: jax.Array) -> Any:
    if not callable(every):
        return every
    length = jnp.asarray(every(optimizer_step))
    if length.shape or not jnp.issubdtype(length.dtype, jnp.integer):
        raise TypeError(
            "multi_steps: `every`, called with the optimizer step, must return an integer scalar, "
            f"got {checks.describe(length)}. Round it: `jnp.int32(...)`."
        )
    return length


def _is_one(every: Any) -> bool:
    return isinstance(every, int) and every == 1


def _split_extra_args(
    extra_args: dict[str, Any], mean_args: Sequence[str], *, every_mean: bool
) -> tuple[dict[str, Mean], dict[str, Any]]:
    """The extra arguments that are averaged over the window, and the others."""
    means, others = {}, {}
    for name, value in extra_args.items():
        if not isinstance(value, Mean):
            others[name] = value
            continue
        if name not in mean_args:
            raise TypeError(
                f"multi_steps: the extra argument `{name}` is a `ja.Mean`, but `mean_args` names "
                f"only {tuple(mean_args)}. Add it there, or pass its `.value`."
            )
        if np.shape(value.total) or np.shape(value.weight):
            raise ValueError(
                f"multi_steps: the extra argument `{name}` must be a `ja.Mean` of scalars, got "
                f"{checks.describe(value.total)}."
            )
        dtype = _no_mean().total.dtype
        means[name] = Mean(jnp.asarray(value.total, dtype), jnp.asarray(value.weight, dtype))
    if every_mean:
        means |= {name: _no_mean() for name in mean_args if name not in extra_args}
    return means, others


def _no_mean() -> Mean:
    dtype = jnp.result_type(float)
    return Mean(jnp.zeros((), dtype), jnp.zeros((), dtype))
