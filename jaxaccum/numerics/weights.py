"""Weights summed exactly: a pair of floats, so that no token is lost past 2**24."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks
from jaxaccum.core.mean import as_float
from jaxaccum.core.reducers import Carried
from jaxaccum.numerics.accumulators import Compensated, compensated

_PAIR = compensated()


class Exact(Carried, Compensated):
    """A weight among the sums of a window."""

    __slots__ = ()
    reducer = _PAIR


class CountedAsOne(Compensated):
    """A weight that counts micro-steps whose own weights are not known: none may be added."""

    __slots__ = ()


def zero() -> Compensated:
    """No weight; two float32 scalars, float64 where that is enabled."""
    dtype = jnp.result_type(float)
    return Compensated(jnp.zeros((), dtype), jnp.zeros((), dtype))


def pair(function: str, name: str, weight: Any, dtype: Any = None) -> Compensated:
    """A weight as an exact pair: integers to 2**48, fractions to twice float32's precision.

    Args:
      function: the public function's name, for messages.
      name: the argument's name.
      weight: a real scalar. An integer array that says that a count did not fit becomes nan.
      dtype: the dtype of the pair; that of `zero` by default.

    Raises:
      TypeError: `weight` is not a real scalar.
    """
    dtype = jnp.result_type(float) if dtype is None else dtype
    kind = getattr(weight, "dtype", None)
    number = isinstance(weight, bool | int | float) or (
        kind is not None and (jnp.issubdtype(kind, jnp.number) or kind == jnp.bool_)
    )
    if not number or np.shape(weight) or jnp.issubdtype(kind or dtype, jnp.complexfloating):
        raise TypeError(
            f"{function}: `{name}` must be a real scalar, got {checks.describe(weight)}. Pass the "
            "number of tokens, for example `jnp.sum(mask)`."
        )
    if not isinstance(weight, jax.Array):
        with np.errstate(over="ignore", invalid="ignore"):
            high = np.asarray(weight).astype(dtype)
            rest = np.float64(weight) - np.float64(high)
        return Compensated(jnp.asarray(high), jnp.asarray(rest if np.isfinite(rest) else 0, dtype))
    if jnp.issubdtype(weight.dtype, jnp.integer):
        # Both halves have few enough bits to convert exactly.
        low = weight & 0xFFFF
        high_half = (weight - low).astype(dtype)
        if not jnp.issubdtype(weight.dtype, jnp.unsignedinteger):
            is_lost = jnp.isnan(as_float(weight, dtype))
            high_half = jnp.where(is_lost, np.asarray(jnp.nan, dtype), high_half)
        return add(_PAIR.start(high_half), _PAIR.start(low.astype(dtype)))
    rounded = weight.astype(dtype)
    return Compensated(rounded, jnp.zeros_like(rounded))


def add(a: Compensated, b: Compensated) -> Compensated:
    """The exact sum of two weights."""
    return Compensated(*_PAIR.merge(Compensated(*a), b))


def is_zero(weight: Compensated) -> jax.Array:
    """Whether there is no weight at all; a boolean scalar."""
    return (weight.total == 0) & (weight.error == 0)


def reaches(weight: Compensated, target: Compensated) -> jax.Array:
    """Whether `weight >= target`; a boolean scalar."""
    short = (weight.total - target.total) + (weight.error - target.error) < 0
    return ~short  # a weight that is nan must not hold the window open for ever


def largest(function: str, several: Sequence[Any], dtype: Any = None) -> Compensated:
    """The largest of the weights of a loss's terms, as an exact pair: its tokens, as a rule."""
    most, *others = [pair(function, "weight", weight, dtype) for weight in several]
    for other in others:
        larger = reaches(other, most)
        most = Compensated(*(jnp.where(larger, a, b) for a, b in zip(other, most, strict=True)))
    return most


def read(weight: Compensated) -> Any:
    """A weight as one float scalar.

    Outside of `jit` it is read from both limbs as a NumPy float64, exact for integers far past
    2**24; inside, or where another host holds it, it is the rounded sum.
    """
    readable = all(
        not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)
        for x in weight
    )
    if not readable:
        return weight.total
    return np.float64(weight.total) + np.float64(weight.error)
