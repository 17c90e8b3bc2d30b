"""What a window remembers of its micro-batches' spread: one scalar and one count."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxaccum.core import dtypes
from jaxaccum.core.mean import divide, wide


class NoiseSums(NamedTuple):
    """Sums over the groups of a window, a group being one micro-batch of one device.

    Attributes:
      square: `sum_k |S_k|**2 / n_k` with the undivided gradient `S_k` and the weight `n_k` of each
        group; float32 scalar or wider. Groups without weight are left out.
      num_groups: how many groups had a weight; int32 scalar.
    """

    square: jax.Array
    num_groups: jax.Array


def group(grads: Sequence[jax.Array], weight: jax.Array) -> NoiseSums:
    """The sums of one group, from the leaves of its undivided gradient and its weight."""
    square = divide(square_norm(grads), weight, empty=0.0)
    return NoiseSums(square, (weight != 0).astype(jnp.int32))


def square_norm(leaves: Sequence[Any]) -> jax.Array:
    """The squared Euclidean norm over all `leaves`, in float32 or wider."""
    total = jnp.zeros((), jnp.float32)
    for leaf in leaves:
        x = jnp.abs(leaf.astype(wide(leaf.dtype)))
        dtype = dtypes.promote(total, x)
        total = total.astype(dtype) + jnp.sum(jnp.square(x.astype(dtype)))
    return total
