"""How a sum of gradients is carried: pass one as `accumulator=`.

Whatever is carried, `sums.grads`, `state.grad_sum` and what the optimizer receives read as one
array per parameter, in float32 or wider.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import checks, compat, dtypes
from jaxaccum.core.mean import add, wide
from jaxaccum.numerics.carries import (
    Accumulator,
    Chunked,
    Compensated,
    Uncarried,
    floating,
    is_carry,
    read,
)
from jaxaccum.numerics.narrow import chunked, stochastic

__all__ = [
    "Accumulator",
    "Compensated",
    "Uncarried",
    "chunked",
    "compensated",
    "is_carry",
    "join",
    "plain",
    "read",
    "stochastic",
]


@dataclasses.dataclass(frozen=True)
class _Plain(Accumulator):
    dtype: Any
    in_place: bool | None = None

    def empty(self, aval: Any) -> jax.Array:
        return compat.filled(aval, self.carried(aval.dtype))

    def start(self, value: jax.Array) -> jax.Array:
        return value.astype(self.carried(value.dtype))

    def carried(self, dtype: Any) -> Any:
        inexact = jnp.issubdtype(dtype, jnp.inexact)
        return dtypes.promote(wide(dtype), self.dtype) if inexact else wide(dtype)


def plain(*, dtype: Any = jnp.float32, in_place: bool | None = None) -> Accumulator:
    """Carries each sum as one array: `sum = sum + gradient`.

    In a window the backward pass adds each gradient into its sum where it is made, so that no
    gradient of a micro-batch is ever there as a whole: a model that scans over its layers then
    needs one gradient less of memory. The values are those of the ordinary way; where a parameter
    is used several times they are added one by one.

    Unlike `optax.MultiSteps`, which carries a running mean, nothing is divided until the window
    closes. K micro-batches cost a relative error of at most about `K * 2**-24` in float32.

    Args:
      dtype: floating dtype of the sums, float32 or wider; gradients of a wider dtype (float64,
        complex) are summed in theirs.
      in_place: whether gradients are added inside the backward pass. `None` does it leaf by leaf
        where it can be: where the gradient has its sum's dtype, and no micro-batch is left out,
        reduce-scattered or measured by itself (`skip_nonfinite=True`, `reduction="scatter"`,
        `noise_scale=True`), and never under `vmap`, where the window is differentiated, or on JAX
        newer than 0.10. `True` refuses where it cannot be, with the reason. `False` never does it.

    Returns:
      An accumulator.

    Raises:
      TypeError: `dtype` is not a floating dtype, or `in_place` something else.
      ValueError: `dtype` is narrower than float32. A bfloat16 sum of ones stops growing at 256.
    """
    dtype = floating("accumulators.plain", dtype)
    if dtype.itemsize < 4:
        raise ValueError(
            f"accumulators.plain: `dtype` must be float32 or wider, got {dtype}: its sums stop "
            "growing after a few hundred micro-batches. Use the default, "
            "accumulators.plain(dtype=jnp.float32)."
        )
    if in_place is not None and not isinstance(in_place, bool):
        raise TypeError(
            f"accumulators.plain: `in_place` must be `None`, `True` or `False`, got "
            f"{checks.describe(in_place)}."
        )
    return _Plain(dtype, in_place)


@dataclasses.dataclass(frozen=True)
class _Compensated(Accumulator):
    def empty(self, aval: Any) -> Compensated:
        dtype = wide(aval.dtype)
        return Compensated(compat.filled(aval, dtype), compat.filled(aval, dtype))

    def start(self, value: Any) -> Compensated:
        if isinstance(value, Compensated):  # exact already
            return value
        value = value.astype(wide(value.dtype))
        return Compensated(value, jnp.zeros_like(value))

    def merge(self, a: Any, b: Any) -> Any:
        total, lost = _two_sum(a.total, b.total)
        lost = jnp.where(jnp.isfinite(total), lost, jnp.zeros_like(lost))
        total, lost = _two_sum(total, lost + (a.error + b.error))
        # An overflow has no error term: inf - inf would turn an honest inf into nan.
        return type(a)(total, jnp.where(jnp.isfinite(total), lost, jnp.zeros_like(lost)))

    def renormalise(self, carry: Any) -> Any:
        return type(carry)(*_two_sum(carry.total, carry.error))

    def read(self, carry: Any) -> jax.Array:
        return carry.total


def compensated() -> Accumulator:
    """Carries each sum as a float32 pair, the rounded sum and its error term.

    Knuth's two-sum keeps what every addition rounds away, so the error stays near the rounding of
    the result for any number of micro-batches. Costs eight bytes a parameter, `plain` four.

    Returns:
      An accumulator.

    References:
      Donald E. Knuth, The Art of Computer Programming, volume 2, section 4.2.2, 1969.
    """
    return _Compensated()


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rounded sum and its exact error, whichever of the two is larger."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def sum_dtype(reducer: Any, dtype: Any) -> Any:
    """The dtype in which one array sums gradients of `dtype`; `None` where none does."""
    return reducer.carried(dtype) if isinstance(reducer, _Plain) else None


def in_place(accumulator: Accumulator) -> bool | None:
    """What `accumulator` says of sums in place; `False` where it is no plain sum."""
    return accumulator.in_place if isinstance(accumulator, _Plain) else False


def join(a: Any, b: Any) -> Any:
    """The carry of one leaf that holds what `a` and `b` hold, whatever accumulator made them.

    Args:
      a: a carry.
      b: a carry of the same kind, shape and dtype.

    Returns:
      A carry of that kind. Sums in bfloat16 are added in float32 and rounded to the nearest.
    """
    if isinstance(a, Compensated):
        return compensated().merge(a, b)
    total = add(read(a), read(b))
    if isinstance(a, Chunked):
        return Chunked(total, jnp.zeros_like(a.run), jnp.zeros_like(a.filled))
    return total.astype(a.dtype)


def checked(function: str, accumulator: Accumulator | None, *, apart: str = "") -> Accumulator:
    """`accumulator`, the default for `None`.

    Args:
      function: the public function's name, for messages.
      accumulator: what the user gave.
      apart: why the function adds no gradient inside a backward pass, if it does not.

    Returns:
      An accumulator.

    Raises:
      TypeError: it is something else.
      ValueError: it demands sums in place of a function that has none.
    """
    if accumulator is None:
        return plain()
    if not isinstance(accumulator, Accumulator):
        raise TypeError(
            f"{function}: `accumulator` must come from `ja.accumulators`, got "
            f"{checks.describe(accumulator)}. For example `ja.accumulators.plain()`."
        )
    if apart and in_place(accumulator):
        raise ValueError(
            f"{function}: `accumulators.plain(in_place=True)` cannot be here: {apart}. Pass "
            "`in_place=None`, or leave the accumulator out."
        )
    return accumulator
