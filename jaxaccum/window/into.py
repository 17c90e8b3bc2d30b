"""A window that goes on from given sums: `accumulate(...)(..., into=sums)`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import checks, compat
from jaxaccum.core.sums import WindowSums, continued
from jaxaccum.devices import reduction
from jaxaccum.numerics import accumulators
from jaxaccum.window.gradients import Differentiated

_REMEDY = "Pass the sums of an earlier call with the same loss function, parameters and options."


def check(function: str, into: Any) -> None:
    """Requires sums, or `None` for none.

    Raises:
      TypeError: it is something else.
    """
    if into is not None and not isinstance(into, WindowSums):
        raise TypeError(
            f"{function}: `into` must be `WindowSums` from `accumulate`, got "
            f"{checks.describe(into)}. {_REMEDY}"
        )


def begin(
    function: str,
    into: WindowSums,
    tree: Differentiated,
    *,
    own: Sequence[tuple[str, ...]],
    shards: Sequence[Any],
    axes: tuple[str, ...],
    varied: frozenset[str],
) -> list[Any]:
    """What the fold of each gradient begins with, so that no second buffer is added afterwards.

    Args:
      function: the public function's name, for messages.
      into: the sums to go on from.
      tree: the parameters.
      own: the axes over which each parameter is a device's own.
      shards: the part of each gradient that a device is left with, `None` for the whole.
      axes: the axes of the window: over them `into` was summed already, so one device begins with
        it and the others with zeros.
      varied: the axes over which the sums differ while they are folded.

    Returns:
      For each parameter with a gradient its sum, or `None` where it is added afterwards: where it
      is carried otherwise than as one array of its dtype, or left in parts.

    Raises:
      ValueError: the gradients do not have the parameters' structure, shapes or dtypes, or differ
        over an axis of the window.
    """
    expected = tree.tree(tree.leaves, tree.batch.leaves)
    if not checks.same_tree(into.grads, expected):
        raise ValueError(
            f"{function}: `into.grads` has the tree structure {jax.tree.structure(into.grads)}, "
            f"expected that of the parameters, {jax.tree.structure(expected)}. {_REMEDY}"
        )
    number = len(tree.moving)
    reducers = tree.reducers(range(number + sum(tree.rows)))
    places, _ = tree.gradients(list(range(len(reducers))), reducers)
    given: list[Any] = [None] * len(reducers)
    leaves = jax.tree_util.tree_leaves_with_path(into.grads)
    for place, (path, leaf) in zip(jax.tree.leaves(places), leaves, strict=True):
        if isinstance(place, int):
            given[place] = (f"into.grads{jax.tree_util.keystr(path)}", leaf)
    found: list[Any] = []
    over = reduction.without(axes, own)
    for x, reducer, shard, names, (called, leaf) in zip(
        tree.moving, reducers, shards, over, given, strict=False
    ):
        dtype = accumulators.sum_dtype(reducer, x.dtype)
        if dtype is None or shard is not None:
            found.append(None)
            continue
        if leaf.shape != x.shape or leaf.dtype != dtype:
            raise ValueError(
                f"{function}: `{called}` is {checks.describe(leaf)}, expected the shape {x.shape} "
                f"and dtype {jnp.dtype(dtype)} of this window's sum. {_REMEDY}"
            )
        found.append(reduction.vary(_of_one_device(function, called, leaf, names), varied))
    return found


def _of_one_device(function: str, called: str, x: Any, names: tuple[str, ...]) -> Any:
    """`x` on the first of the devices, zeros on the others, so that their sum is `x`."""
    if not names:
        return x
    differs = sorted(compat.varying_axes(x) & set(names))
    if differs:
        raise ValueError(
            f"{function}: `{called}` differs over {differs} by its type, but the sums of a window "
            f"over {names} are the same on each device. Pass what this function returned; sums "
            "that stay on their device come from `ja.accumulate` without `axis_name`."
        )
    return jnp.where(jax.lax.axis_index(names) == 0, x, jnp.zeros_like(x))


def onto(
    function: str, into: WindowSums | None, sums: WindowSums, held: Sequence[bool] = ()
) -> WindowSums:
    """`merge(into, sums)`.

    Args:
      function: the public function's name, for messages.
      into: the sums to go on from, or `None`.
      sums: what this window adds.
      held: which of its gradient leaves hold those of `into` already.

    Raises:
      ValueError: the sums do not add up.
    """
    return sums if into is None else continued(function, into, sums, held)
