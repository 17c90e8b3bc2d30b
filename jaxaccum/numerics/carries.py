"""What is carried in the place of a gradient leaf, and how it reads."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxaccum.core import checks
from jaxaccum.core.mean import add, wide
from jaxaccum.core.reducers import Addition


class Accumulator(Addition):
    """Base of the accumulators: an addition that chooses how its sum is carried.

    Attributes:
      needs_key: whether `fold` draws random numbers, from the key that `keyed` gives it.
    """

    needs_key: ClassVar[bool] = False

    def restart(self, carry: Any, again: jax.Array) -> Any:
        return jax.tree.map(lambda x: jnp.where(again, jnp.zeros_like(x), x), carry)


class Compensated(NamedTuple):
    """The carry of `compensated`: the exact sum is `total + error`.

    Attributes:
      total: the rounded sum; float32 or wider.
      error: what rounding has left out of `total`; same shape and dtype.
    """

    total: Any
    error: Any


class Chunked(NamedTuple):
    """The carry of `chunked`: the sum is `total + run`.

    Attributes:
      total: the sum of the full runs; float32 or wider.
      run: the sum of the micro-batches since; the narrow dtype, same shape.
      filled: how many micro-batches `run` holds; int32 scalar.
    """

    total: Any
    run: Any
    filled: Any


class Uncarried(NamedTuple):
    """In the place of a carry where every window is one micro-step: there is a gradient, no sum."""


_CARRIES = (Compensated, Chunked, Uncarried)


def read(carries: Any) -> Any:
    """A tree of carries as a tree of arrays, float32 or wider.

    Args:
      carries: a tree of arrays, `Compensated` or `Chunked`.

    Returns:
      The same tree with one array for each carry; `None` where nothing is carried.
    """

    checks.arrays("accumulators.read", carries, name="carries")

    def one(carry: Any) -> Any:
        if isinstance(carry, Compensated):
            return carry.total
        if isinstance(carry, Uncarried):
            return None
        if isinstance(carry, Chunked):
            return add(carry.total, carry.run)
        carry = jnp.asarray(carry)
        return carry.astype(wide(carry.dtype))

    return jax.tree.map(one, carries, is_leaf=lambda c: isinstance(c, _CARRIES))


def is_carry(x: Any) -> bool:
    """Whether `x` is what is carried in the place of one leaf, `None` for nothing included."""
    return x is None or isinstance(x, _CARRIES)


def floating(function: str, dtype: Any) -> Any:
    """`dtype` as a floating dtype.

    Raises:
      TypeError: it is something else.
    """
    try:
        resolved = jnp.dtype("object" if dtype is None else dtype)  # NumPy takes None for float64
    except TypeError as error:
        raise TypeError(
            f"{function}: `dtype` must be a floating dtype, got {checks.describe(dtype)}."
        ) from error
    if not jnp.issubdtype(resolved, jnp.floating):
        raise TypeError(f"{function}: `dtype` must be a floating dtype, got {resolved}.")
    return resolved
