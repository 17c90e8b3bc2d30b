"""What is done to sums by their reducers, whatever fields they have."""

from typing import Any

import jax

from jaxaccum.core.leaves import leafwise


def fold(held: Any, values: Any, key: jax.Array | None = None) -> Any:
    """The sums with one more micro-step in them.

    Args:
      held: the sums so far, a carry in the place of each leaf; `None` before the first micro-step.
      values: what the micro-step adds, in the same structure.
      key: a PRNG key for accumulators that round stochastically.
    """
    tree: Any
    reducers, tree = jax.tree.flatten(values.reducers)
    if key is not None:
        reducers = [r.keyed(jax.random.fold_in(key, i)) for i, r in enumerate(reducers)]
    lists = [tree.flatten_up_to(sums) for sums in (held, values) if sums is not None]
    fns = [r.start if held is None else r.fold for r in reducers]
    return jax.tree.unflatten(tree, leafwise(fns, *lists))


def restart(sums: Any, again: jax.Array) -> Any:
    """The sums, those of no micro-step where `again` holds: selected, never multiplied."""
    tree: Any
    reducers, tree = jax.tree.flatten(sums.reducers)
    carries = leafwise([r.restart for r in reducers], tree.flatten_up_to(sums), shared=(again,))
    return jax.tree.unflatten(tree, carries)
