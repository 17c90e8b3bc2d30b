"""Running the inner optimizer once per window, under one `cond`, without extra buffers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.closing.leaves import no_update
from jaxaccum.core import compat, dtypes
from jaxaccum.core.leaves import leafwise

HELD, APPLIED, DROPPED = 0, 1, 2


def hand_over(
    applying: jax.Array,
    inner_fn: Callable[..., tuple[Any, Any, Any]],
    sums: Any,
    inner_state: Any,
    operands: Any,
    types: Any,
    homes: Sequence[int | None],
    *,
    judged_over: frozenset[str] = frozenset(),
) -> tuple[Any, Any, Any, jax.Array]:
    """Calls `inner_fn` where `applying` holds, and returns updates of zero elsewhere.

    The sums travel through the `cond` in place, and where it is taken the updates come back in
    their buffers. A call between windows therefore writes no buffer of zero updates and copies no
    optimizer state; XLA fuses the selection with whatever applies the updates.

    Args:
      applying: boolean scalar.
      inner_fn: `inner_fn(sums, inner_state, operands)` to the updates, the inner state, and what
        became of the window: `APPLIED` where the inner optimizer ran, `DROPPED`, or `HELD`.
      sums: the window's sums, a tree.
      inner_state: the state of the inner optimizer; its dtypes are kept.
      operands: a tree of whatever else `inner_fn` reads.
      types: the tree of the updates' `jax.ShapeDtypeStruct`s.
      homes: for each leaf of `types` the leaf of `sums` in whose buffer it comes back, or `None`
        where none can hold it exactly.
      judged_over: the manual mesh axes over which what becomes of the window differs.

    Returns:
      The updates; the sums, undefined where `applying` holds; the inner state; what became of the
      window, an int32 scalar, `HELD` where `applying` does not hold.
    """
    wanted, tree = jax.tree.flatten(types)

    def close(sums: Any, inner_state: Any, operands: Any) -> Any:
        updates, new_state, outcome = inner_fn(sums, inner_state, operands)
        (slots, lent), others = jax.tree.flatten(sums), []
        for update, like, home in zip(jax.tree.leaves(updates), wanted, homes, strict=True):
            if home is None:
                others.append(cast(update, like))
            else:
                slots[home] = cast(update, like).astype(slots[home].dtype)
        return (
            jax.tree.unflatten(lent, slots),
            others,
            jax.tree.map(_as_before, new_state, inner_state),
            compat.vary(jnp.asarray(outcome, jnp.int32), judged_over),
        )

    def hold(sums: Any, inner_state: Any, operands: Any) -> Any:
        others = [no_update(t) for t, home in zip(wanted, homes, strict=True) if home is None]
        return (
            sums,
            others,
            inner_state,
            compat.vary(jnp.asarray(HELD, jnp.int32), judged_over),
        )

    sums, others, inner_state, outcome = jax.lax.cond(
        applying, close, hold, sums, inner_state, operands
    )
    slots = jax.tree.leaves(sums)
    at_home = [(like, slots[home]) for like, home in zip(wanted, homes) if home is not None]
    taken = {like: functools.partial(_taken, like) for like, _ in at_home}
    fns, slots_home = [taken[like] for like, _ in at_home], [x for _, x in at_home]
    back = leafwise(fns, slots_home, shared=(applying,))
    supply, returned = iter(others), iter(back)
    updates = [next(supply) if home is None else next(returned) for home in homes]
    return jax.tree.unflatten(tree, updates), sums, inner_state, outcome


def _taken(like: Any, slot: jax.Array, applying: jax.Array) -> jax.Array:
    """The update that came back in a sum's buffer, where the optimizer ran."""
    return jnp.where(applying, slot.astype(like.dtype), no_update(like))


def find_homes(types: Any, tree: Any, carries: Sequence[Any]) -> list[int | None]:
    """For each update the sum of the same parameter, where its dtype and shape can hold it.

    Args:
      types: the tree of the updates' `jax.ShapeDtypeStruct`s.
      tree: the tree structure of the gradients.
      carries: the carry of each gradient, whose first array is the sum itself.

    Returns:
      Positions among the leaves of `carries`.
    """
    wanted = jax.tree.leaves(types)
    if jax.tree.structure(types) != tree:
        return [None] * len(wanted)
    homes: list[int | None] = []
    place = 0
    for like, carry in zip(wanted, carries, strict=True):
        total, *others = jax.tree.leaves(carry)
        fits = like.shape == total.shape and dtypes.promote(like.dtype, total.dtype) == total.dtype
        homes.append(place if fits else None)
        place += 1 + len(others)
    return homes


def cast(x: Any, like: Any) -> jax.Array:
    """`x` in the dtype of `like`, without a weak type."""
    x = jnp.asarray(x)
    return x if x.dtype == like.dtype and not x.weak_type else x.astype(like.dtype)


def _as_before(x: Any, old: jax.Array) -> jax.Array:
    """A leaf of the inner state in the type of what it replaces, where JAX has lost a part of it.

    What leaves a `shard_map` over an Auto axis is no longer typed over an Explicit one beside it.
    """
    x, spec = cast(x, old), compat.spec_of(old)
    return x if compat.spec_of(x) == spec else jax.sharding.reshard(x, spec)


def own_buffer(x: Any) -> jax.Array:
    """A copy without a weak type, which a branch or a scan could not keep."""
    x = jnp.array(x, copy=True)
    weak = getattr(x, "weak_type", False)
    return jax.lax.convert_element_type(x, x.dtype) if weak else x
