"""Sources: where each micro-batch finds its part of a cotangent."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxaccum.core.reducers import Latest, Reducer, Stack

# From the index of a micro-batch to its part of a cotangent.
Source = Callable[[Any], jax.Array]


def combined(cotangent: Any, reducer: Reducer) -> Source:
    """The cotangents of values that a meeting has brought together with `reducer`."""
    if isinstance(reducer, Stack):
        return each(cotangent)
    return first(cotangent) if isinstance(reducer, Latest) else whole(cotangent)


def whole(cotangent: Any) -> Source:
    """The same for every micro-batch."""
    return lambda index: cotangent


def each(stack: Any) -> Source:
    """Its own for every micro-batch."""
    return lambda index: entry(stack, index)


def first(cotangent: Any) -> Source:
    """Of one value that was there for all: one micro-batch takes it."""
    return lambda index: jnp.where(index == 0, cotangent, jnp.zeros_like(cotangent))


def entry(stack: jax.Array, index: Any) -> jax.Array:
    """One micro-batch's entry of a stack `[num, ...]`."""
    return lax.dynamic_index_in_dim(stack, index, keepdims=False)
