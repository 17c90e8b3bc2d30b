"""Dtypes: the one that values share, and the ends of their range."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def promote(*values: Any) -> Any:
    """The common dtype of values and dtypes, also under `jax_numpy_dtype_promotion="strict"`.

    JAX promotes floats of a byte and less, and integers of less, to nothing else. Here they count
    as float32 and int32.
    """
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*map(_promotable, values))


def _promotable(value: Any) -> Any:
    dtype = getattr(value, "dtype", value)
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        dtype = np.dtype(dtype)
    return value if not isinstance(dtype, np.dtype) else _wider(dtype) or value


@functools.cache
def _wider(dtype: Any) -> Any:
    """What a dtype counts as that has no promotion; `None` for all others."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float32) if dtype.itemsize == 1 else None
    if jnp.issubdtype(dtype, jnp.integer):
        return np.dtype(np.int32) if jnp.iinfo(dtype).bits < 8 else None
    return None


def lowest(dtype: Any) -> Any:
    """The value of a real dtype below or equal to all others: -inf where there is one."""
    return _end(dtype, lowest=True)


def highest(dtype: Any) -> Any:
    """The value of a real dtype above or equal to all others: inf where there is one."""
    return _end(dtype, lowest=False)


def _end(dtype: Any, *, lowest: bool) -> Any:
    if dtype == jnp.bool_:
        return not lowest
    if not jnp.issubdtype(dtype, jnp.floating):
        info = jnp.iinfo(dtype)
        return info.min if lowest else info.max
    infinity = np.asarray(-np.inf if lowest else np.inf, np.float32).astype(dtype)
    if np.isinf(infinity):
        return infinity
    return jnp.finfo(dtype).min if lowest else jnp.finfo(dtype).max
