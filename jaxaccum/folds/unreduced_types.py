"""JAX's `reduced` and `unreduced` types: sums over devices that have not been taken yet."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxaccum.core import compat


def mark(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """A parameter typed `reduced` over `names`: its gradient is then typed `unreduced`."""
    spec = compat.spec_of(x)
    return jax.sharding.reshard(x, PartitionSpec(*spec.partitions, reduced=set(names)))


def check_types(function: str, grads: Sequence[jax.Array], names: tuple[str, ...]) -> None:
    """Requires every gradient to be `unreduced` over `names`.

    Raises:
      ValueError: an operator reduced one already, in every micro-step.
    """
    for place, grad in enumerate(grads):
        if not set(names) <= set(compat.spec_of(grad).unreduced):
            raise ValueError(
                f'{function}: reduction="unreduced" needs every gradient to be of the unreduced '
                f"type over {names}, but that of parameter leaf {place} is "
                f'{jax.typeof(grad)}. Use reduction="defer".'
            )


def reduce(x: Any) -> Any:
    """Takes the sum over devices that the type of `x` says is due."""
    spec = compat.spec_of(x)
    return jax.sharding.reshard(x, PartitionSpec(*spec.partitions)) if spec.unreduced else x
