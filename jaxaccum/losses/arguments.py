"""What the losses check."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import checks
from jaxaccum.core.mean import Mean
from jaxaccum.core.reducers import Sum


def mask(function: str, where: Any, shape: tuple[int, ...]) -> jax.Array:
    """`where` as a boolean array of this shape."""
    where = jnp.asarray(where)
    if where.dtype != jnp.bool_:
        raise TypeError(
            f"{function}: `where` must be boolean, got {checks.describe(where)}. Compare first, "
            "for example `where=mask > 0`."
        )
    if where.shape != shape:
        raise ValueError(
            f"{function}: `where` must have the shape {shape}, got {checks.describe(where)}."
        )
    return where


def combined(function: str, value: Any, kind: type[tuple[Any, ...]], maker: str) -> Any:
    """`value`, if it is a `kind` of plain arrays."""
    if not isinstance(value, kind) or any(isinstance(x, Mean | Sum) for x in value):
        raise TypeError(
            f"{function}: expected a combined `{kind.__name__}`, got {type(value).__name__} "
            f"{checks.describe(value)}. Return `{maker}(...)` from the function given to "
            f"`ja.microbatch`, and pass on what that returns."
        )
    return value
