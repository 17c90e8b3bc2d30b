"""What an open window of `multi_steps` holds, and how it lies in the state."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks, compat, dtypes
from jaxaccum.core.checks import all_finite, is_inexact
from jaxaccum.core.mean import Mean, pool
from jaxaccum.core.reducers import Sum
from jaxaccum.folds import devices
from jaxaccum.numerics import accumulators, weights


class OpenWindow(NamedTuple):
    """What the open window holds: carries of the inexact gradients, weight, averaged arguments."""

    carries: list[Any]
    weight: accumulators.Compensated
    means: dict[str, Mean]

    def fold(
        self,
        accumulator: accumulators.Accumulator,
        grads: Sequence[jax.Array],
        weight: accumulators.Compensated,
        means: dict[str, Mean],
        key: Any = None,
    ) -> "OpenWindow":
        """The window with one more micro-step."""

        def add(leaf: int, carry: Any, grad: jax.Array) -> Any:
            one = accumulator if key is None else accumulator.keyed(jax.random.fold_in(key, leaf))
            return one.start(grad) if carry is None else one.fold(carry, grad)

        carries = [add(i, c, g) for i, (c, g) in enumerate(zip(self.carries, grads, strict=True))]
        sums = {n: pool(old, means[n]) if n in means else old for n, old in self.means.items()}
        return OpenWindow(carries, weights.add(self.weight, weight), sums)

    def select(self, keep: jax.Array, other: "OpenWindow") -> "OpenWindow":
        """This window where `keep` holds, `other` elsewhere."""

        def choose(new: Any, old: Any) -> Any:
            if old is None:
                return new
            return jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, old)

        return OpenWindow(
            [choose(a, b) for a, b in zip(self.carries, other.carries, strict=True)],
            choose(self.weight, other.weight),
            choose(self.means, other.means),
        )

    def across(self, accumulator: accumulators.Accumulator, axes: tuple[str, ...]) -> "OpenWindow":
        """The window over all devices: one reduction."""
        if not axes:
            return self
        leaves, tree = jax.tree.flatten((self.weight, self.means))
        n = len(self.carries)
        reducers = [accumulator] * n + [Sum.reducer] * len(leaves)
        out = devices.reduce(reducers, [*self.carries, *leaves], axes, True)
        weight, means = jax.tree.unflatten(tree, out[n:])
        return OpenWindow(out[:n], weights.add(weight, weights.zero()), means)

    def is_finite(self, accumulator: accumulators.Accumulator) -> jax.Array:
        """Whether all that the window holds is finite: what was not stays in its sums."""
        sums = [accumulator.read(c) for c in self.carries]
        return all_finite([*sums, self.weight.total, *jax.tree.leaves(self.means)])

    def varies_over(self) -> frozenset[str]:
        """The manual mesh axes over which any part of the window differs."""
        return frozenset().union(*(compat.varying_axes(x) for x in jax.tree.leaves(self)))

    # The first array of each carry is the sum itself; `hand_over` lends its buffer.

    def sums(self) -> list[jax.Array]:
        return [jax.tree.leaves(c)[0] for c in self.carries]

    def without_sums(self) -> "OpenWindow":
        return self.with_sums([None] * len(self.carries))

    def with_sums(self, sums: Sequence[Any]) -> "OpenWindow":
        carries = []
        for carry, total in zip(self.carries, sums, strict=True):
            leaves, tree = jax.tree.flatten(carry, is_leaf=lambda x: x is None)
            carries.append(jax.tree.unflatten(tree, [total, *leaves[1:]]))
        return self._replace(carries=carries)


def carries_of(updates: Any, grad_carry: Any, *, bare: bool) -> list[Any]:
    """The carry of each inexact gradient leaf, after checking that the trees match.

    Where the window is `bare`, of one micro-step, nothing is carried.
    """
    held, held_tree = jax.tree.flatten(grad_carry, is_leaf=accumulators.is_carry)
    given_tree: Any = jax.tree.structure(updates, is_leaf=lambda x: x is None)
    remedy = "Pass gradients of the parameters that `init` saw."
    if held_tree != given_tree:
        raise ValueError(
            f"multi_steps: `updates` has the tree structure {given_tree}, but the state was made "
            f"for {held_tree}. {remedy}"
        )
    given = jax.tree_util.tree_leaves_with_path(updates, is_leaf=lambda x: x is None)
    carries = []
    for (path, grad), carry in zip(given, held, strict=True):
        if grad is not None and carry is not None:
            total = accumulators.read(carry)
            name = f"updates{jax.tree_util.keystr(path)}"
            if np.shape(grad) != np.shape(total):
                raise ValueError(
                    f"multi_steps: `{name}` is {checks.describe(grad)}, but the state holds a sum "
                    f"of shape {np.shape(total)}. {remedy}"
                )
            kept = is_inexact(grad) and dtypes.promote(grad, total.dtype) == total.dtype
            if not kept:
                raise TypeError(
                    f"multi_steps: `{name}` is {checks.describe(grad)}, which the state's sum in "
                    f"{total.dtype} cannot hold. {remedy}"
                )
        if grad is not None and is_inexact(grad):
            if carry is None and not bare:
                raise ValueError(
                    f"multi_steps: the state holds no sum for `updates{jax.tree_util.keystr(path)}`"
                    ": it was made for windows of one micro-step, or for an integer parameter. "
                    "`ja.interop.from_inner_state(tx, params, state.inner_state)` makes one that "
                    "does."
                )
            carries.append(carry)
    return carries


def check_params(params: Any, updates: Any) -> None:
    """Requires the parameters to have the structure and shapes of the gradients."""
    remedy = "Pass the parameters that `init` saw, as they are now."
    is_none = lambda x: x is None  # noqa: E731
    trees: Any = [jax.tree.structure(tree, is_leaf=is_none) for tree in (params, updates)]
    if trees[0] != trees[1]:
        raise ValueError(
            f"multi_steps: `params` has the tree structure {trees[0]}, but `updates` has "
            f"{trees[1]}. {remedy}"
        )
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(params, is_leaf=is_none),
        jax.tree.leaves(updates, is_leaf=is_none),
        strict=True,
    )
    for (path, leaf), grad in pairs:
        if leaf is not None and grad is not None and np.shape(leaf) != np.shape(grad):
            raise ValueError(
                f"multi_steps: `params{jax.tree_util.keystr(path)}` is {checks.describe(leaf)}, "
                f"but its gradient is {checks.describe(grad)}. {remedy}"
            )


def rebuild(carries: Sequence[Any], grad_carry: Any, updates: Any) -> Any:
    """`grad_carry` with new carries in the places of inexact gradients."""
    held, tree = jax.tree.flatten(grad_carry, is_leaf=accumulators.is_carry)
    given = jax.tree.leaves(updates, is_leaf=lambda x: x is None)
    supply = iter(carries)
    new = []
    for old, grad in zip(held, given, strict=True):
        carry = next(supply) if grad is not None and is_inexact(grad) else old
        new.append(None if old is None else carry)
    return jax.tree.unflatten(tree, new)
