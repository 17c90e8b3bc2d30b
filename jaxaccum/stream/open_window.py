"""What an open window of `multi_steps` holds, and how it lies in the state."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.closing.leaves import differentiated, hide, is_none, unchanged
from jaxaccum.core import checks, compat, dtypes
from jaxaccum.core.checks import all_finite, is_inexact
from jaxaccum.core.leaves import leafwise
from jaxaccum.core.mean import Mean, pool
from jaxaccum.core.reducers import Sum
from jaxaccum.devices import reduction
from jaxaccum.numerics import accumulators, weights


def _chosen(new: jax.Array, old: jax.Array, keep: jax.Array) -> jax.Array:
    return jnp.where(keep, new, old)


def _emptied(x: jax.Array, closing: jax.Array) -> jax.Array:
    return jnp.where(closing, jnp.zeros_like(x), x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OpenWindow:
    """What the open window holds: carries of the inexact gradients, weight, averaged arguments.

    Attributes:
      carries: the carry of each gradient.
      weight: the summed weight.
      means: the undivided means of extra arguments, by name.
      own: static; for each gradient the axes over which its parameter is a device's own.
    """

    carries: list[Any]
    weight: accumulators.Compensated
    means: dict[str, Mean]
    own: tuple[tuple[str, ...], ...] = dataclasses.field(metadata={"static": True})

    def fold(
        self,
        accumulator: accumulators.Accumulator,
        grads: Sequence[jax.Array],
        weight: accumulators.Compensated,
        means: dict[str, Mean],
        key: Any = None,
    ) -> "OpenWindow":
        """The window with one more micro-step."""

        each: list[Any] = [accumulator] * len(grads)
        if key is not None:
            each = [accumulator.keyed(jax.random.fold_in(key, i)) for i in range(len(grads))]
        if None in self.carries:  # of a window of one micro-step
            carries = leafwise([one.start for one in each], grads)
        else:
            carries = leafwise([one.fold for one in each], self.carries, grads)
        sums = {n: pool(old, means[n]) if n in means else old for n, old in self.means.items()}
        return OpenWindow(carries, weights.add(self.weight, weight), sums, self.own)

    def select(self, keep: jax.Array, other: "OpenWindow") -> "OpenWindow":
        """This window where `keep` holds, `other` elsewhere."""

        if None in other.carries:
            other = dataclasses.replace(other, carries=self.carries)
        new, tree = jax.tree.flatten(self)
        chosen = leafwise(_chosen, new, jax.tree.leaves(other), shared=(keep,))
        return jax.tree.unflatten(tree, chosen)

    def emptied(self, closing: jax.Array) -> "OpenWindow":
        """This window, without anything in it where it is `closing`."""
        leaves, tree = jax.tree.flatten(self)
        return jax.tree.unflatten(tree, leafwise(_emptied, leaves, shared=(closing,)))

    def across(self, accumulator: accumulators.Accumulator, axes: tuple[str, ...]) -> "OpenWindow":
        """The window over all devices: one reduction."""
        if not axes:
            return self
        leaves, tree = jax.tree.flatten((self.weight, self.means))
        n = len(self.carries)
        reducers = [accumulator] * n + [Sum.reducer] * len(leaves)
        over = [*reduction.without(axes, self.own), *[axes] * len(leaves)]
        out = reduction.reduce(reducers, [*self.carries, *leaves], axes, True, over=over)
        weight, means = jax.tree.unflatten(tree, out[n:])
        return OpenWindow(out[:n], weights.add(weight, weights.zero()), means, self.own)

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
        return dataclasses.replace(self, carries=carries)


class Leaves(NamedTuple):
    """The gradients of one call beside what the state carries for them.

    Attributes:
      grads: those of the leaves that the state has a gradient for.
      carries: the carry of each of them; `None` where nothing is carried.
      tree: their tree structure, with `None` in the places of the other leaves.
      moves: for every leaf, `None` included, whether it is one of them.
      others: for every other leaf the update that changes no bit of it, `None` for one of them.
    """

    grads: list[jax.Array]
    carries: list[Any]
    tree: Any
    moves: list[bool]
    others: list[Any]


def match(updates: Any, grad_carry: Any, params: Any, *, bare: bool) -> Leaves:
    """Finds the carry of each gradient, after checking that the trees match.

    Args:
      updates: the gradients.
      grad_carry: the state's carries.
      params: the parameters, or `None` where the caller gave none.
      bare: whether nothing is carried, in a window of one micro-step.
    """
    held_tree: Any
    held, held_tree = jax.tree.flatten(grad_carry, is_leaf=accumulators.is_carry)
    given, given_tree = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_none)
    if held_tree != given_tree:
        raise ValueError(
            f"multi_steps: `updates` has the tree structure {given_tree}, but the state was made "
            f"for {held_tree}. {_REMEDY}"
        )
    names = [f"updates{jax.tree_util.keystr(path)}" for path, _ in given]
    grads = [grad for _, grad in given]
    for name, grad, carry in zip(names, grads, held, strict=True):
        if carry is not None:
            _check_grad(name, grad, carry, bare=bare)
    known = [None] * len(held)
    if params is not None:
        params = differentiated(params)
        check_params(params, updates, grad_carry)
        known = jax.tree.leaves(params, is_leaf=is_none)
    for name, grad, carry, param in zip(names, grads, held, known, strict=True):
        unknown = carry is None and grad is not None and is_inexact(grad)
        if unknown and (param is None or is_inexact(param)):
            raise ValueError(
                f"multi_steps: the state holds no sum for `{name}`: the parameter was an integer, "
                f"or `None`, in `init`. {_REMEDY}"
            )
    moves = [carry is not None for carry in held]
    return Leaves(
        grads=[jnp.asarray(g) for g, moving in zip(grads, moves, strict=True) if moving],
        carries=[None if bare else carry for carry in held if carry is not None],
        tree=jax.tree.structure(hide(updates, moves)),
        moves=moves,
        others=[
            None if moving else unchanged(g, p)
            for g, p, moving in zip(grads, known, moves, strict=True)
        ],
    )


_REMEDY = "Pass gradients of the parameters that `init` saw."


def _check_grad(name: str, grad: Any, carry: Any, *, bare: bool) -> None:
    """Requires the gradient of one leaf, and room for it in the state."""
    if grad is None:
        raise TypeError(
            f"multi_steps: `{name}` is None, but the parameter has a gradient. Pass zeros; for "
            "parameters that are not trained, put None into their places in `init` too, or freeze "
            "them with `optax.multi_transform`."
        )
    if isinstance(carry, accumulators.Uncarried):
        if not bare:
            raise ValueError(
                f"multi_steps: the state holds no sum for `{name}`: it was made for windows of one "
                "micro-step. `ja.interop.from_inner_state(tx, state.inner_state, params)` makes "
                "one that does."
            )
        if not is_inexact(grad):
            raise TypeError(
                f"multi_steps: `{name}` is {checks.describe(grad)}, which is no gradient. {_REMEDY}"
            )
        return
    total = accumulators.read(carry)
    if np.shape(grad) != np.shape(total):
        raise ValueError(
            f"multi_steps: `{name}` is {checks.describe(grad)}, but the state holds a sum "
            f"of shape {np.shape(total)}. {_REMEDY}"
        )
    if not is_inexact(grad) or dtypes.promote(grad, total.dtype) != total.dtype:
        raise TypeError(
            f"multi_steps: `{name}` is {checks.describe(grad)}, which the state's sum in "
            f"{total.dtype} cannot hold. {_REMEDY}"
        )


def check_params(params: Any, updates: Any, grad_carry: Any) -> None:
    """Requires the parameters to have the structure and shapes of the gradients."""
    remedy = "Pass the parameters that `init` saw, as they are now."
    tree: Any
    leaves, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_none)
    grads, grads_tree = jax.tree.flatten(updates, is_leaf=is_none)
    if tree != grads_tree:
        raise ValueError(
            f"multi_steps: `params` has the tree structure {tree}, but `updates` has "
            f"{grads_tree}. {remedy}"
        )
    held = jax.tree.leaves(grad_carry, is_leaf=accumulators.is_carry)
    for (path, leaf), grad, carry in zip(leaves, grads, held, strict=True):
        name = f"params{jax.tree_util.keystr(path)}"
        if leaf is not None and grad is not None and np.shape(leaf) != np.shape(grad):
            raise ValueError(
                f"multi_steps: `{name}` is {checks.describe(leaf)}, but its gradient is "
                f"{checks.describe(grad)}. {remedy}"
            )
        if carry is not None and (leaf is None or not is_inexact(leaf)):
            raise TypeError(
                f"multi_steps: `{name}` is {checks.describe(leaf)}, but had a gradient in `init`. "
                f"{remedy}"
            )


def rebuild(carries: Sequence[Any], grad_carry: Any) -> Any:
    """`grad_carry` with new carries in the places of the old ones."""
    held, tree = jax.tree.flatten(grad_carry, is_leaf=accumulators.is_carry)
    supply = iter(carries)
    new = [None if old is None else next(supply) for old in held]
    kept = [
        old if isinstance(old, accumulators.Uncarried) else carry
        for old, carry in zip(held, new, strict=True)
    ]
    return jax.tree.unflatten(tree, kept)
