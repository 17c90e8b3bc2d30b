"""In which dtype sums travel between devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxaccum.core import checks, dtypes


def check(function: str, value: Any, *axes: Any) -> None:
    """Requires a floating dtype, and for one of an effect of its own something to reduce over.

    Raises:
      TypeError: it is no floating dtype.
      ValueError: it is not that of the default, and none of the `axes` was given.
    """
    wire = check_dtype(function, "reduce_dtype", value)
    if wire != jnp.float32 and all(axis is None for axis in axes):
        raise ValueError(
            f"{function}: `reduce_dtype` {wire} is that of the reduction over devices, but there "
            "are no axes to reduce over. Pass `axis_name` or `spmd_axis_name`, or leave it out."
        )


def check_dtype(function: str, argument: str, value: Any) -> Any:
    """`value` as a dtype in which arrays may travel.

    Raises:
      TypeError: it is no floating dtype, or one of less than two bytes.
    """
    try:
        wire = jnp.dtype("object" if value is None else value)  # NumPy takes None for float64
    except TypeError:
        wire = jnp.dtype("object")
    if not jnp.issubdtype(wire, jnp.floating) or wire.itemsize < 2:
        raise TypeError(
            f"{function}: `{argument}` must be a floating dtype of two bytes or more, got "
            f"{checks.describe(value)}. For example `jnp.bfloat16`, which halves what travels."
        )
    return wire


def wire_of(dtype: Any, wire: Any) -> Any:
    """The dtype in which an array travels: a narrow `wire`, or else at least that of the array."""
    if wire is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    wire = jnp.dtype(wire)
    return wire if wire.itemsize < 4 else dtypes.promote(dtype, wire)


def summed(
    arrays: Sequence[jax.Array],
    *,
    sum_fn: Callable[[Sequence[jax.Array]], Sequence[jax.Array]],
    wire: Any,
) -> list[jax.Array]:
    """Sums over devices that travel in a dtype, returned in the arrays' own.

    Args:
      arrays: what this device holds.
      sum_fn: the collective.
      wire: the dtype, `None` for their own.
    """
    kinds = [wire_of(x.dtype, wire) for x in arrays]
    sent = [x.astype(kind) for x, kind in zip(arrays, kinds, strict=True)]
    halves = any(jnp.issubdtype(k, jnp.floating) and jnp.dtype(k).itemsize < 4 for k in kinds)
    mesh = jax.sharding.get_abstract_mesh()
    if halves and not set(mesh.axis_names) <= set(mesh.manual_axes):
        # Beside automatic axes the CPU's compiler aborts on sums of less than four bytes.
        def widened(*xs: jax.Array) -> tuple[jax.Array, ...]:
            wide = [x.astype(dtypes.promote(x.dtype, jnp.float32)) for x in xs]
            return tuple(y.astype(x.dtype) for y, x in zip(sum_fn(wide), xs, strict=True))

        found = lax.platform_dependent(*sent, cpu=widened, default=lambda *xs: tuple(sum_fn(xs)))
    else:
        found = sum_fn(sent)
    return [total.astype(x.dtype) for total, x in zip(found, arrays, strict=True)]
