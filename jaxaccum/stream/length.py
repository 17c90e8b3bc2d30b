"""How long a window of `multi_steps` is: a number of micro-steps, a schedule, a weight."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks
from jaxaccum.numerics import accumulators, weights


class until_weight(NamedTuple):  # noqa: N801 - reads as a function, `every=until_weight(524_288)`
    """Closes a `multi_steps` window when it holds at least `target` weight (tokens).

    Attributes:
      target: the least weight of a window; a number, or a function from the optimizer step (int32
        scalar, read at the window's start) to one.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp, optax
      >>> tx = ja.multi_steps(optax.sgd(1.0), ja.until_weight(5))
      >>> state = tx.init(jnp.float32(0))
      >>> for tokens in (3, 1, 4):
      ...     _, state = tx.update(jnp.float32(1), state, weight=tokens)
      >>> print(ja.has_updated(state))
      True
    """

    target: Any


def checked_length(every: Any) -> Any:
    """`every`, checked: an int, a function of the optimizer step, or `until_weight`."""
    if every is until_weight:
        raise TypeError(
            "multi_steps: `every` is `until_weight` without its target; call it, "
            "`ja.until_weight(524_288)`."
        )
    if isinstance(every, until_weight):
        _check_target(every.target)
    elif not callable(every):
        remedy = "Pass an int, a function of the optimizer step, or `ja.until_weight(target)`."
        return checks.integer("multi_steps", "every", every, remedy=remedy)
    return every


def is_one(every: Any) -> bool:
    """Whether every window is known to hold one micro-step, so that nothing is carried."""
    return isinstance(every, int) and every == 1


def window_length(every: Any, optimizer_step: jax.Array) -> Any:
    """The micro-steps of a window; one where it is a weight that closes it."""
    if isinstance(every, until_weight):
        return 1
    if not callable(every):
        return every
    length = every(optimizer_step)
    _check_above_zero("every", length)
    length = jnp.asarray(length) if checks.is_array(length) else length
    if (
        np.shape(length)
        or not isinstance(length, jax.Array)
        or not jnp.issubdtype(length.dtype, jnp.integer)
    ):
        raise TypeError(
            "multi_steps: `every`, called with the optimizer step, must return an integer scalar, "
            f"got {checks.describe(length)}. Round it: `jnp.int32(...)`."
        )
    return length


def is_full(
    every: Any,
    micro_step: jax.Array,
    weight: accumulators.Compensated,
    optimizer_step: jax.Array,
    axes: tuple[str, ...],
) -> jax.Array:
    """Whether the window that holds `micro_step` micro-steps and `weight` closes."""
    if not isinstance(every, until_weight):
        return micro_step >= window_length(every, optimizer_step)
    target = _target(every, optimizer_step)
    if axes:
        weight = accumulators.Compensated(*jax.lax.psum(tuple(weight), axes))
    return weights.reaches(
        weight, weights.pair("multi_steps", "until_weight", target, weight.total.dtype)
    )


def check_first(every: Any) -> None:
    """Refuses a function of the optimizer step that returns no length for the first window."""
    nowhere = jax.sharding.AbstractMesh((), ())  # manual axes have no devices while tracing
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(nowhere):
        step = jnp.zeros((), jnp.int32)
        if isinstance(every, until_weight):
            _target(every, step)
        else:
            window_length(every, step)


def _target(every: until_weight, optimizer_step: jax.Array) -> Any:
    if not callable(every.target):
        return every.target
    target = every.target(optimizer_step)
    _check_above_zero("until_weight", target)
    return target


def _check_above_zero(name: str, value: Any) -> None:
    """Refuses a number that a function of the optimizer step returned, where it is known."""
    known = checks.is_array(value) and not isinstance(value, jax.core.Tracer)
    if known and np.ndim(value) == 0 and not value > 0:
        raise ValueError(
            f"multi_steps: `{name}`, called with the optimizer step, must return a number above 0, "
            f"got {value}. Return at least 1: `jnp.maximum(1, ...)`."
        )


def _check_target(target: Any) -> None:
    if callable(target):
        return
    number = isinstance(target, int | float | np.number) and not isinstance(target, bool)
    if not number and not (isinstance(target, jax.Array) and target.shape == ()):
        raise TypeError(
            "multi_steps: `until_weight` needs a number or a function of the optimizer step, got "
            f"{checks.describe(target)}."
        )
    if not target > 0:
        raise ValueError(f"multi_steps: `until_weight` needs a target above 0, got {target}.")
