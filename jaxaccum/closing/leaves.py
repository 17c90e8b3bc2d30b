"""The leaves of a parameter tree that have a gradient, and the others, which no optimizer sees.

Integers, booleans, keys, and whatever the state was made without: the inner optimizer finds `None`
in their places, and their updates change no bit of them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxaccum.core import checks, compat
from jaxaccum.core.checks import is_inexact


class NoUpdate(optax.MaskedNode):
    """The update of a leaf that has no gradient: `leaf + NoUpdate()` is the leaf itself.

    `optax.apply_updates` can add nothing else to a key. Like `optax.MaskedNode` it holds no array,
    so that transformations behind the window pass it by.
    """

    __slots__ = ()
    __array_ufunc__ = None  # NumPy arrays leave the addition to it, as others do

    def __radd__(self, leaf: Any) -> Any:
        return leaf


def is_none(x: Any) -> bool:
    return x is None


def trained(params: Any) -> Any:
    """The parameters that have a gradient, `None` in the places of the others."""
    return jax.tree.map(lambda p: p if is_inexact(p) else None, params)


def differentiated(params: Any) -> Any:
    """What the gradients are of: `optax.lookahead` differentiates its fast parameters only."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def each(fn: Callable[[Any], Any], params: Any) -> Any:
    """`fn` of the parameters, of both trees where `optax.lookahead` keeps two."""
    if isinstance(params, optax.LookaheadParams):
        return optax.LookaheadParams(fn(params.fast), fn(params.slow))
    return fn(params)


def hide(params: Any, moves: Sequence[bool]) -> Any:
    """`params` with `None` in the places, counted with those of `None`, that do not move."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_none)
    return jax.tree.unflatten(
        tree, [leaf if m else None for leaf, m in zip(leaves, moves, strict=True)]
    )


def fill(updates: Any, moves: Sequence[bool], others: Sequence[Any]) -> Any:
    """`updates` with `others` in the places that do not move.

    Updates of another structure than the parameters, which have no such places, stay as they are.
    """
    leaves, tree = jax.tree.flatten(updates, is_leaf=is_none)
    if len(leaves) != len(moves) or not all(
        m or x is None for x, m in zip(leaves, moves, strict=True)
    ):
        return updates
    full = [x if m else other for x, m, other in zip(leaves, moves, others, strict=True)]
    return jax.tree.unflatten(tree, full)


def unchanged(grad: Any, param: Any) -> Any:
    """The update, in kind, of a leaf that does not move.

    Args:
      grad: what came as its gradient.
      param: the leaf; `None` where it is not known.

    Returns:
      `None` for `None`, zeros in the dtype of the leaf, or `NoUpdate` where that is not known or,
      as a key, has no zeros.
    """
    if grad is None:
        return None
    like = grad if param is None else param
    if checks.is_key(like) or getattr(like, "dtype", None) == jax.dtypes.float0:
        return NoUpdate()
    return no_update(jnp.asarray(like))


def no_update(like: Any) -> jax.Array:
    """An update that changes no bit: minus zero, since `-0.0 + 0.0` loses the parameter's sign."""
    inexact = jnp.issubdtype(like.dtype, jnp.inexact)
    return compat.filled(like, like.dtype, -0.0 if inexact else 0)


def still(updates: Any, constant: Sequence[bool] | None) -> Any:
    """`updates` with minus zero for the zeros among those that are `constant`.

    An update that depends on no input is that of a frozen parameter: `optax.set_to_zero` adds
    `0.0`, which turns the parameter's `-0.0` into `0.0`.
    """
    if constant is None or not any(constant):
        return updates
    leaves, tree = jax.tree.flatten(updates)

    def one(update: Any) -> Any:
        return jnp.where(update == 0, np.asarray(-0.0, update.dtype), update)

    return jax.tree.unflatten(
        tree,
        [one(x) if c and is_inexact(x) else x for x, c in zip(leaves, constant, strict=True)],
    )


def whole_again(value: Any, params: Any, moves: Sequence[bool]) -> Any:
    """`value`, or, for a function of the parameters, one that is given all of them.

    A line search calls `value_fn` with the parameters that it saw.
    """
    if not callable(value) or params is None or all(moves):
        return value
    tree: Any = jax.tree.structure(hide(params, moves))
    others = jax.tree.leaves(params, is_leaf=is_none)

    @functools.wraps(value)
    def whole(*args: Any, **named: Any) -> Any:
        def one(x: Any) -> Any:
            return fill(x, moves, others) if jax.tree.structure(x) == tree else x

        return value(*map(one, args), **{name: one(x) for name, x in named.items()})

    return whole
