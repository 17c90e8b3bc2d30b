"""From the cotangents of combined outputs to those of each micro-batch's outputs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxaccum.core import compat
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.reducers import Concatenation, Latest, Maximum, Minimum, Reducer, Stack
from jaxaccum.devices import reduction


def spread(
    reducers: Sequence[Reducer],
    outs: Sequence[jax.Array],
    extremes: Sequence[jax.Array],
    cotangents: Sequence[Any],
    number: int,
    number_run: Any,
    axes: tuple[str, ...],
    devices: int,
) -> tuple[Callable[[Any, Sequence[Any]], list[Any]], list[Any]]:
    """The transpose of combining: what each micro-batch's inexact outputs receive.

    A sum hands its cotangent to every micro-batch; a stack, a concatenation and the last value to
    those they came from; a maximum and a minimum to those that reach it, in equal shares.

    Args:
      reducers: the reducer of each output.
      outs: the combined outputs.
      extremes: for each maximum and minimum the micro-batches' own values, stacked.
      cotangents: of the combined outputs; may be symbolic zeros.
      number: the micro-batches on this device.
      number_run: how many of them ran; may be traced.
      axes: the mesh axes over which outputs were combined.
      devices: how many devices there are over them.

    Returns:
      `f(index, rows)` to the cotangents for micro-batch `index`, and the leaves whose rows the
      fold must cut for it: cotangents of concatenated outputs.
    """
    numbers = jnp.arange(number, dtype=jnp.int32)
    ran = numbers < number_run
    stored = iter(extremes)
    whole: list[tuple[str, Any]] = []
    ct_rows = []
    for reducer, out, ct in zip(reducers, outs, cotangents, strict=True):
        own = next(stored) if isinstance(reducer, Maximum | Minimum) else None
        if not is_inexact(out):
            continue
        if isinstance(ct, jax.custom_derivatives.SymbolicZero):
            ct = compat.filled(out, out.dtype)
        if isinstance(reducer, Concatenation):
            ct_rows.append(reduction.own_part(ct, axes, devices))
            whole.append(("rows", None))
        elif isinstance(reducer, Stack):
            whole.append(("stack", reduction.own_part(ct, axes, devices)))
        elif isinstance(reducer, Latest):
            last = reduction.is_last(number_run > 0, axes) & (number_run > 0)
            here = numbers == number_run - 1
            whole.append(("stack", _where(here & last, ct)))
        elif own is not None:
            ties = jax.vmap(lambda x, r, out=out: (x == out) & r)(own, ran)
            reached = jnp.sum(ties, axis=0, dtype=jnp.int32)
            reached = lax.psum(reached, axes) if axes else reached
            whole.append(("stack", _where(ties, ct / jnp.maximum(reached, 1).astype(ct.dtype))))
        else:
            whole.append(("sum", ct))

    def micro_cotangents(index: Any, rows: Sequence[Any]) -> list[Any]:
        supply = iter(rows)
        take = {
            "rows": lambda _: next(supply),
            "stack": lambda ct: lax.dynamic_index_in_dim(ct, index, keepdims=False),
            "sum": lambda ct: ct,
        }
        return [take[kind](ct) for kind, ct in whole]

    return micro_cotangents, ct_rows


def _where(flags: jax.Array, ct: jax.Array) -> jax.Array:
    """`ct` for the micro-batches where `flags` holds, zeros for the others, stacked."""
    return jax.vmap(lambda flag: jnp.where(flag, ct, jnp.zeros_like(ct)))(flags)
