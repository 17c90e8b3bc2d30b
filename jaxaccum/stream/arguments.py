"""The checked arguments of `multi_steps`' `update`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks, compat
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.mean import Mean
from jaxaccum.core.reducers import Kept
from jaxaccum.core.sums import WindowSums
from jaxaccum.devices import reduction
from jaxaccum.numerics import weights
from jaxaccum.stream.state import MultiStepsState, check_state


class Call(NamedTuple):
    """What one call brings into the window.

    Attributes:
      grads: the tree of undivided gradients.
      weight: their weight, an exact pair; `None` where it was not said, for means of equal weight.
      num_skipped: how many micro-batches were left out of them, over all devices; int32 scalar.
      is_lost: whether nothing is left of them for that reason; boolean scalar.
      is_divided: whether they are over denominators that were given; then they count whatever their
        weight is. Static.
    """

    grads: Any
    weight: Any
    num_skipped: jax.Array | int = 0
    is_lost: jax.Array | bool = False
    is_divided: bool = False


def check_given(state: Any, loss_scale: Any, *, flush: Any) -> None:
    """Refuses states of something else."""
    check_state(state)
    if not isinstance(flush, bool):
        raise TypeError(
            f"multi_steps: `flush` must be a static bool, got {checks.describe(flush)}."
        )
    if (state.loss_scale is None) != (loss_scale is None):
        made = "without" if state.loss_scale is None else "with"
        raise ValueError(
            f"multi_steps: `state` was made {made} `loss_scale`, this transformation is not. Put "
            "`loss_scale=loss_scale and loss_scale.init()` in its place with `state._replace`."
        )


def read_call(
    updates: Any, weight: Any, state: MultiStepsState, axes: tuple[str, ...], *, normalize: bool
) -> Call:
    """The call's gradients and their weight, from `WindowSums` or from a tree of gradients."""
    dtype = state.weight_carry.total.dtype
    if not isinstance(updates, WindowSums):
        checks.arrays("multi_steps", updates, name="updates")
        given = None if weight is None else weights.pair("multi_steps", "weight", weight, dtype)
        call = Call(updates, given)
    else:
        _check_sums(updates, weight, normalize=normalize)
        checks.arrays("multi_steps", updates.grads, name="updates.grads")
        call = Call(
            grads=updates.grads,
            weight=weights.largest("multi_steps", jax.tree.leaves(updates.weight), dtype),
            is_divided=updates.denominators is not None,
        )
        held, skipped = updates.num_microbatches, updates.num_skipped
        if not isinstance(skipped, np.ndarray) or skipped != 0:  # else known to be none
            if axes and (compat.varying_axes(skipped) or not reduction.checked(axes)):
                held, skipped = jax.lax.psum((held, skipped), axes)
            lost = (skipped > 0) & (held == 0)
            call = call._replace(num_skipped=skipped, is_lost=lost)
    if call.weight is not None and isinstance(state.weight_carry, weights.CountedAsOne):
        raise TypeError(
            "multi_steps: this call has a weight, but the open window was taken over from "
            "`optax.MultiSteps` with each of its micro-steps counted as 1. Say what each of them "
            "held: `ja.interop.from_optax(tx, state, params, weight=...)`."
        )
    check_local(call.grads, axes)
    return call


def _check_sums(sums: WindowSums, weight: Any, *, normalize: bool) -> None:
    """Refuses sums that cannot be added to those of other calls and divided by their weight."""
    if weight is not None:
        raise TypeError(
            "multi_steps: `updates` is a `WindowSums`, which holds its own weight, so `weight` "
            f"must not be given, got {checks.describe(weight)}. Leave it out."
        )
    for name in ("num_microbatches", "num_skipped"):
        number = getattr(sums, name)
        if getattr(number, "dtype", None) != jnp.int32:
            raise TypeError(
                f"multi_steps: `updates.{name}` must be an int32 scalar, got "
                f"{checks.describe(number)}: a transformation before `multi_steps` changed the "
                "sums with their weight. Put it inside, `multi_steps(optax.chain(...), ...)`."
            )
    marks = [] if sums.grad_reducers is None else jax.tree.leaves(sums.grad_reducers.tree)
    if not all(reducer.divides or isinstance(reducer, Kept) for reducer in marks):
        raise ValueError(
            "multi_steps: `updates` has leaves that `grad_reducers` combines otherwise than by "
            "`ja.Sum`, which are no gradients. Pass the tree of those that are sums, with "
            "`weight=sums.weight`, and replace the parameters of the others yourself."
        )
    if sums.denominators is None:
        return
    if not sums.denominators_given:
        raise ValueError(
            "multi_steps: the gradients in `updates`, of a loss of several terms, are over the "
            "denominators of their own micro-batches, so they do not add up over calls. Find those "
            "of the whole window first, with `ja.denominators`, pass `denominators=` to each call, "
            "and `normalize=False` to `multi_steps`."
        )
    if normalize:
        raise ValueError(
            "multi_steps: the gradients in `updates` are over their `denominators=` already and "
            "must not be divided again. Pass `normalize=False` to `multi_steps`."
        )


def check_local(updates: Any, axes: tuple[str, ...]) -> None:
    """Refuses gradients that are the same on all devices, which would be summed once too often."""
    over = reduction.checked(axes)
    for path, grad in jax.tree_util.tree_leaves_with_path(updates):
        if is_inexact(grad) and not over <= compat.varying_axes(grad):
            raise TypeError(
                f"multi_steps: `updates{jax.tree_util.keystr(path)}` is the same on all devices of "
                f"`axis_name` {tuple(sorted(over))}, so it was reduced already. Pass each device's "
                "own sum: `ja.accumulate` keeps it local, and so does `jax.grad` in parameters "
                'cast with `jax.lax.pcast(params, axis, to="varying")`.'
            )


def rounding_key(key: Any, axes: tuple[str, ...]) -> jax.Array:
    """The accumulator's key on this device."""
    if key is None:
        raise ValueError(
            "multi_steps: the accumulator rounds stochastically and needs `key=`, a PRNG key for "
            "each call of `update`, for example `key=jax.random.fold_in(key, micro_step)`."
        )
    checks.key("multi_steps", key)
    return jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key


def split_extra_args(
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
        if not all(
            checks.is_array(x) and not np.iscomplexobj(x) for x in (value.total, value.weight)
        ):
            raise TypeError(
                f"multi_steps: the extra argument `{name}` must be a `ja.Mean` of real scalars, "
                f"got {checks.describe(value.total)} over {checks.describe(value.weight)}."
            )
        if np.shape(value.total) or np.shape(value.weight):
            raise ValueError(
                f"multi_steps: the extra argument `{name}` must be a `ja.Mean` of scalars, got "
                f"{checks.describe(value.total)}."
            )
        dtype = no_mean().total.dtype
        means[name] = Mean(jnp.asarray(value.total, dtype), jnp.asarray(value.weight, dtype))
    if every_mean:
        means |= {name: no_mean() for name in mean_args if name not in extra_args}
    return means, others


def no_mean() -> Mean:
    """The mean of nothing, in the dtype in which extra arguments are averaged."""
    dtype = jnp.result_type(float)
    return Mean(jnp.zeros((), dtype), jnp.zeros((), dtype))
