"""Sums carried in bfloat16: stochastically rounded, or in short runs."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxaccum.core import checks, compat
from jaxaccum.core.mean import add, wide
from jaxaccum.numerics.carries import Accumulator, Chunked, floating, read


@dataclasses.dataclass(frozen=True)
class _Narrow(Accumulator):
    """What both have in common: float32 and narrower gradients are carried in `dtype`."""

    dtype: Any

    def _narrow(self, dtype: Any) -> Any:
        """The dtype that is carried; wider gradients stay wide."""
        return self.dtype if wide(dtype) == jnp.float32 else wide(dtype)

    def read(self, carry: Any) -> jax.Array:
        return read(carry)

    def outgoing(self, carry: Any) -> Any:
        return read(carry)


@dataclasses.dataclass(frozen=True)
class _Stochastic(_Narrow):
    key: Any = dataclasses.field(default=None, compare=False)
    needs_key: ClassVar[bool] = True

    def keyed(self, key: jax.Array) -> "_Stochastic":
        return dataclasses.replace(self, key=key)

    def empty(self, aval: Any) -> jax.Array:
        return compat.filled(aval, self._narrow(aval.dtype))

    def start(self, value: jax.Array) -> jax.Array:
        return self._round(value.astype(wide(value.dtype)), self._narrow(value.dtype))

    def fold(self, carry: jax.Array, value: jax.Array) -> jax.Array:
        return self._round(add(read(carry), value.astype(wide(value.dtype))), carry.dtype)

    def _round(self, x: jax.Array, dtype: Any) -> jax.Array:
        if dtype != self.dtype:
            return x
        return _rounded(x, jax.random.bits(self.key, x.shape, jnp.uint32))


def _rounded(x: jax.Array, noise: jax.Array) -> jax.Array:
    """A float32 array in bfloat16, rounded up with the probability of the part that is cut off.

    So no sum is biased. Bits have no derivative, so that of the nearest value is added to them,
    with the value zero: it goes straight through the rounding. (A custom derivative is forgotten
    where JAX differentiates a loop twice.)
    """
    bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(x), jnp.uint32)
    up = (bits + (noise & jnp.uint32(0xFFFF))) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(up, jnp.float32).astype(jnp.bfloat16)
    nearest = x.astype(jnp.bfloat16)
    zero = nearest - jax.lax.stop_gradient(nearest)
    return jnp.where(jnp.isfinite(nearest), rounded + zero, nearest)


@dataclasses.dataclass(frozen=True)
class _Chunked(_Narrow):
    every: int

    def empty(self, aval: Any) -> Chunked:
        return Chunked(
            compat.filled(aval, wide(aval.dtype)),
            compat.filled(aval, self._narrow(aval.dtype)),
            _none_like(aval),
        )

    def start(self, value: jax.Array) -> Chunked:
        total = jnp.zeros_like(value, wide(value.dtype))
        run = jnp.zeros_like(value, self._narrow(value.dtype))
        return self.fold(Chunked(total, run, _none_like(value)), value)

    def fold(self, carry: Chunked, value: jax.Array) -> Chunked:
        run = add(carry.run, value.astype(carry.run.dtype))
        filled = carry.filled + 1

        def close(total: jax.Array, run: jax.Array) -> tuple[jax.Array, jax.Array]:
            return add(total, run), jnp.zeros_like(run)

        total, run = jax.lax.cond(
            filled >= self.every, close, lambda total, run: (total, run), carry.total, run
        )
        return Chunked(total, run, jnp.where(filled >= self.every, 0, filled))


def _none_like(aval: Any) -> jax.Array:
    """A count of zero that differs over the devices where `aval` does: they may skip apart."""
    return compat.vary(jnp.zeros((), jnp.int32), compat.varying_axes(aval))


def stochastic(*, dtype: Any = jnp.bfloat16) -> Accumulator:
    """Carries each sum in bfloat16, rounded up or down at random.

    `E[rounded] = sum`: rounding is unbiased, so small gradients are not lost as in a plain
    bfloat16 sum, which stops growing at 256 ones. The error of K micro-batches is random, about
    `2**-9 * sqrt(K)` of the sum. Two bytes a parameter, `plain` has four.

    The randomness comes from the `key=` of `f` or of `update`, a different one for each micro-step,
    leaf and device.

    Derivatives of what a window returns go straight through the rounding and are those of the
    unrounded sum, to the precision of bfloat16. In forward mode (`jax.jvp`, `jax.hessian`) tangents
    are summed in bfloat16 to the nearest, which for more than some dozen micro-batches needs
    `plain`.

    Args:
      dtype: bfloat16. Wider gradients (float64, complex) are summed in theirs.

    Returns:
      An accumulator.

    Raises:
      ValueError: `dtype` is not bfloat16.

    References:
      George E. Forsythe, "Round-off errors in numerical integration on automatic machinery", 1950.
    """
    return _Stochastic(_bfloat16("accumulators.stochastic", dtype))


def chunked(*, dtype: Any = jnp.bfloat16, every: int = 32) -> Accumulator:
    """Carries short runs in bfloat16 and folds each full run into float32.

    `sum = total + run`: a run of `every` micro-batches costs a relative error of at most
    `every * 2**-9`, the float32 total none to speak of. Six bytes a parameter, but most
    micro-steps touch only the two of the run.

    Args:
      dtype: bfloat16. Wider gradients (float64, complex) are summed in theirs.
      every: micro-batches in a run; a static int.

    Returns:
      An accumulator.

    Raises:
      TypeError: `every` is not an integer.
      ValueError: `dtype` is not bfloat16, or `every` is less than 1.
    """
    length = checks.integer("accumulators.chunked", "every", every)
    return _Chunked(_bfloat16("accumulators.chunked", dtype), length)


def _bfloat16(function: str, dtype: Any) -> Any:
    resolved = floating(function, dtype)
    if resolved != jnp.bfloat16:
        raise ValueError(
            f"{function}: `dtype` must be bfloat16, got {resolved}. float16 sums overflow at "
            "65504; for float32 use `accumulators.plain()`."
        )
    return resolved
