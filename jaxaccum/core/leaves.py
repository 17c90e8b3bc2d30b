"""One function on each of many leaves, with a program that stays small."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

# Leaves of one type that are traced as one equation, and how many leaves there must be for it.
_TOGETHER, _MANY = 16, 64


def leafwise(
    fn: Callable[..., Any] | Sequence[Callable[..., Any] | None],
    *lists: Sequence[Any],
    shared: Sequence[Any] = (),
) -> list[Any]:
    """`[fn(*leaves, *shared) for leaves in zip(*lists)]`, traced once where many are of one type.

    A model of thousands of leaves has few types of them. Their program is traced and lowered for
    a few leaves and called for the others; the compiler sees the same as it does without.

    Args:
      fn: a function of arrays that closes over none; or one for each leaf, the same object for
        leaves that are treated alike, `None` for those of the first list that stay as they are.
      *lists: the leaves, or trees of arrays such as the carries of accumulators.
      shared: arrays or numbers that every call receives.

    Returns:
      What `fn` returns for each of the leaves, in their order.
    """
    rows = list(zip(*lists, strict=True))
    functions: list[Any] = [fn] * len(rows) if callable(fn) else list(fn)
    results = [row[0] for row in rows]
    for members in _alike(functions, rows):
        one = functions[members[0]]
        whole = len(members) - len(members) % _TOGETHER if len(members) >= _MANY else 0
        if whole:
            several = _several(one)
            for start in range(0, whole, _TOGETHER):
                chunk = members[start : start + _TOGETHER]
                found = several([rows[i] for i in chunk], tuple(shared))
                for i, result in zip(chunk, found, strict=True):
                    results[i] = result
        for i in members[whole:]:
            results[i] = one(*rows[i], *shared)
    return results


def _alike(functions: Sequence[Any], rows: Sequence[Any]) -> list[list[int]]:
    """The positions of the leaves that have the same types and the same function, if any."""
    places = [i for i, function in enumerate(functions) if function is not None]
    if len(places) < _MANY:
        return [[i] for i in places]
    groups: dict[Any, list[int]] = {}
    for i in places:
        function, row = functions[i], rows[i]
        leaves, tree = jax.tree.flatten(row)
        groups.setdefault((function, tree, *map(jax.typeof, leaves)), []).append(i)
    return list(groups.values())


def _several(fn: Any) -> Callable[..., list[Any]]:
    def leaves(rows: Sequence[Any], shared: Sequence[Any]) -> list[Any]:
        return [fn(*row, *shared) for row in rows]

    return jax.jit(leaves)
