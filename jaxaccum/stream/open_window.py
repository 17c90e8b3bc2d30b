"""The open window of `multi_steps`: its sums, and the gradients of a call beside them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.closing.leaves import differentiated, hide, is_none, unchanged
from jaxaccum.core import checks, dtypes
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.mean import Mean
from jaxaccum.core.reducers import Reducers
from jaxaccum.core.sums import WindowSums
from jaxaccum.numerics import accumulators, weights


def window_sums(
    grads: Sequence[Any],
    weight: accumulators.Compensated,
    means: dict[str, Any],
    accumulator: accumulators.Accumulator,
) -> WindowSums:
    """The sums of a stream: gradients or their carries, the weight, and averaged arguments.

    How many micro-steps they hold is the state's own count, the same on all devices.
    """
    return WindowSums(
        grads=list(grads),
        loss=None,
        weight=weights.Exact(*weight),
        aux={name: Mean(mean.total, mean.weight) for name, mean in means.items()},
        num_microbatches=None,  # type: ignore[arg-type]
        num_skipped=None,  # type: ignore[arg-type]
        grad_reducers=Reducers([accumulator] * len(grads)),
    )


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
