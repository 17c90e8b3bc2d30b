"""The one place for differences between JAX versions, and what types say on each of them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.random as jex_random
import jax.numpy as jnp
from jax.extend import linear_util


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and how many carries the inputs of a `scan` begin with."""
    if "ft_in" in params:  # since jax 0.12
        consts, carry, _ = map(len, params["ft_in"].unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def is_rule(x: Any) -> bool:
    """Whether a parameter of an equation is a function that JAX traces into a derivative."""
    return isinstance(x, linear_util.WrappedFun)


@linear_util.transformation2
def around(fn: Callable[..., Any], wrapper_fn: Callable[..., Any], *args: Any) -> Any:
    """The rule that is `wrapper_fn(rule, *args)`."""
    return wrapper_fn(fn, *args)


def filled(aval: Any, dtype: Any, value: Any = 0) -> jax.Array:
    """An array like `aval` in `dtype`, with its sharding and its varying manual axes.

    Args:
      aval: an array, or an abstract value or `jax.ShapeDtypeStruct`.
      dtype: the dtype wanted.
      value: what it is filled with.
    """
    if isinstance(aval, jax.Array):
        return jnp.full_like(aval, value, dtype)
    spec = spec_of(aval)
    typed = any(spec.partitions) or spec.unreduced or spec.reduced
    named = {"out_sharding": aval.sharding} if typed else {}
    array = jnp.full(aval.shape, value, dtype, **named)
    return vary(array, varying_axes(aval))


def spec_of(x: Any) -> jax.sharding.PartitionSpec:
    """The partition spec in the type of `x`; empty where shardings are not part of types."""
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    return getattr(getattr(aval, "sharding", None), "spec", None) or jax.sharding.PartitionSpec()


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes over which `x` differs; empty where replication is not checked."""
    aval = x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(manual.varying) if manual is not None else frozenset()


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Casts `x` to differ over `axes`; axes over which it does already are left alone."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def is_explicit(mesh: Any, name: str) -> bool:
    """Whether the mesh axis `name` is of the Explicit type, whose shardings are part of types."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return kinds[name] == jax.sharding.AxisType.Explicit


@functools.cache
def _constant_impl() -> Any:
    """A generator of which every draw is the same: the uniform number 0.05."""

    def bits(key: Any, bit_width: int, shape: Sequence[int]) -> jax.Array:
        del key
        return jnp.full(shape, 0x0CCCCCCCCCCCCCCC >> (64 - bit_width), f"uint{bit_width}")

    return jex_random.define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: jnp.zeros((1,), jnp.uint32),
        split=lambda key, shape: jnp.zeros((*shape, 1), jnp.uint32),
        random_bits=bits,
        fold_in=lambda key, data: key,
        name="constant",
        tag="constant",
    )


def constant_key() -> jax.Array:
    """A PRNG key from which all draws are equal, whatever it is folded or split into."""
    return jax.random.key(0, impl=_constant_impl())
