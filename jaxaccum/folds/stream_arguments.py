"""The checked arguments of `multi_steps`' `update`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks, compat
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.mean import Mean
from jaxaccum.core.sums import WindowSums
from jaxaccum.folds import devices
from jaxaccum.folds.stream_state import check_state


def check_given(updates: Any, state: Any, loss_scale: Any, *, flush: Any) -> None:
    """Refuses sums in the place of gradients, and states of something else."""
    check_state(state)
    if not isinstance(flush, bool):
        raise TypeError(
            f"multi_steps: `flush` must be a static bool, got {checks.describe(flush)}."
        )
    if isinstance(updates, WindowSums):
        raise TypeError(
            "multi_steps: `updates` is a `WindowSums`; pass `sums.grads`, with "
            "`weight=sums.weight`."
        )
    checks.arrays("multi_steps", updates, name="updates")
    if (state.loss_scale is None) != (loss_scale is None):
        made = "without" if state.loss_scale is None else "with"
        raise ValueError(
            f"multi_steps: `state` was made {made} `loss_scale`, this transformation is not. Put "
            "`loss_scale=loss_scale and loss_scale.init()` in its place with `state._replace`."
        )


def check_local(updates: Any, axes: tuple[str, ...]) -> None:
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
