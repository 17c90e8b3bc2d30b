"""Loss scaling for float16: pass `loss_scale=` a configuration or the scale of its state.

A float16 backward pass loses what is below 6e-8 and overflows above 65504. With the loss multiplied
by a scale its gradients stand where float16 has room; each micro-batch's gradient is divided by the
scale in float32 *before* it is added, so sums, clipping and the optimizer see the true gradient.
Scales are powers of two, with which this changes no bit of what float16 can hold.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.mean import wide

__all__ = ["LossScale", "LossScaleState", "dynamic", "static", "unscale"]


class LossScaleState(NamedTuple):
    """The state of a loss scale; part of the training state, and of its checkpoints.

    Attributes:
      scale: what the loss is multiplied by, constant inside a window; float32 scalar.
      good_windows: windows without overflow since the scale last changed; int32 scalar.
      overflowed: whether the open window has met a gradient that was not finite; boolean scalar.
    """

    scale: jax.Array
    good_windows: jax.Array
    overflowed: jax.Array


@dataclasses.dataclass(frozen=True)
class LossScale:
    """How the scale begins and changes; from `static` or `dynamic`.

    Attributes:
      initial: the first scale; a power of two, as all of these numbers are.
      growth_interval: good windows in a row after which the scale grows; 0 for never.
      factor: by how much it grows and shrinks; 1 for a scale that stays.
      minimum: the least scale.
      maximum: the largest.
    """

    initial: float
    growth_interval: int
    factor: float
    minimum: float
    maximum: float

    def init(self) -> LossScaleState:
        """The state of the first window."""
        return LossScaleState(
            jnp.asarray(self.initial, jnp.float32),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.bool_),
        )

    def update(self, state: LossScaleState, overflowed: Any) -> LossScaleState:
        """The state after a window: once for each, however many micro-batches overflowed.

        `scale / factor` where any micro-batch `overflowed` (boolean scalar), `scale * factor`
        after `growth_interval` windows in a row without; kept between `minimum` and `maximum`.
        """
        overflowed = jnp.asarray(overflowed)
        good = jnp.where(overflowed, 0, state.good_windows + 1)
        growing = (good >= self.growth_interval) & (self.growth_interval > 0)
        grown = jnp.minimum(state.scale * self.factor, self.maximum)
        shrunk = jnp.maximum(state.scale / self.factor, self.minimum)
        scale = jnp.where(overflowed, shrunk, jnp.where(growing, grown, state.scale))
        never = self.growth_interval == 0
        return LossScaleState(
            scale.astype(jnp.float32),
            jnp.where(growing | never, 0, good).astype(jnp.int32),
            jnp.zeros((), jnp.bool_),
        )

    def after_call(self, state: LossScaleState, *, overflowed: Any, closed: Any) -> LossScaleState:
        """The state after one micro-step: an overflow is noted, and counts when the window closes.

        Args:
          state: the state before.
          overflowed: whether this micro-step, or the window, was not finite; boolean scalar.
          closed: whether the window has closed; boolean scalar.
        """
        noted = state._replace(overflowed=state.overflowed | overflowed)
        after = self.update(noted, noted.overflowed)
        return jax.tree.map(lambda a, b: jnp.where(closed, a, b), after, noted)


def static(scale: float) -> LossScale:
    """A loss scale that stays as it is.

    Args:
      scale: a power of two. With parameters in float16 one micro-batch's undivided gradient, times
        the scale, must fit into float16 (65504); a scale below 1 makes room for larger ones.

    Returns:
      A `LossScale`.

    Raises:
      TypeError: `scale` is not a number.
      ValueError: `scale` is not a power of two.

    Example:
      >>> import jaxaccum as ja
      >>> print(ja.loss_scaling.static(1024).init().scale)
      1024.0
    """
    scale = _power("loss_scaling.static", "scale", scale)
    return LossScale(scale, 0, 1.0, scale, scale)


def dynamic(
    *,
    initial: float = 2.0**15,
    growth_interval: int = 2000,
    factor: float = 2.0,
    minimum: float = 1.0,
    maximum: float = 2.0**24,
) -> LossScale:
    """A loss scale that shrinks once after each window that overflowed, and grows again.

    All arguments but `growth_interval` are powers of two. With `minimum` below 1, for example
    `2.0**-14`, the scale also finds its way where undivided gradients are too large for float16:
    without it, one micro-batch's sum of gradients has to stay below 65504.

    Args:
      initial: the first scale.
      growth_interval: windows in a row without overflow after which the scale grows; static int.
      factor: by how much it grows and shrinks; above 1.
      minimum: the least scale.
      maximum: the largest scale.

    Returns:
      A `LossScale`.

    Raises:
      TypeError: an argument is not a number.
      ValueError: an argument is not a power of two, or `initial` is not between the bounds.

    Example:
      >>> import jaxaccum as ja
      >>> scaling = ja.loss_scaling.dynamic(growth_interval=2)
      >>> state = scaling.init()
      >>> for overflowed in (True, False, False):
      ...     state = scaling.update(state, overflowed)
      ...     print(state.scale)
      16384.0
      16384.0
      32768.0

    References:
      Paulius Micikevicius and others, "Mixed Precision Training", 2018.
    """
    name = "loss_scaling.dynamic"
    numbers = {"initial": initial, "factor": factor, "minimum": minimum, "maximum": maximum}
    first, step, least, most = (_power(name, key, value) for key, value in numbers.items())
    interval = checks.integer(name, "growth_interval", growth_interval)
    if step <= 1:
        raise ValueError(f"{name}: `factor` must be above 1, got {factor}. Use 2.")
    if not least <= first <= most:
        raise ValueError(
            f"{name}: `initial` must be between `minimum` {least:g} and `maximum` {most:g}, got "
            f"{first:g}. Choose other bounds."
        )
    return LossScale(first, interval, step, least, most)


def unscale(grads: Any, scale: Any) -> Any:
    """The true gradients, in float32 or wider, of a loss that was multiplied by `scale`.

    `grads / scale`. For gradients that `jax.grad` made of `scale * loss`; those of
    `ja.accumulate(...)(..., loss_scale=scale)` are unscaled already.

    Args:
      grads: a tree of gradients; integer and `None` leaves are left alone.
      scale: the scale, a float scalar, or a `LossScaleState`.

    Returns:
      The tree with float32 leaves, wider where the gradients are.

    Example:
      >>> import jax, jaxaccum as ja, jax.numpy as jnp
      >>> grads = jax.grad(lambda w: 1024 * (w * jnp.float16(1e-7)).sum())(jnp.ones(2, jnp.float16))
      >>> print(ja.loss_scaling.unscale(grads, 1024).dtype)
      float32
    """
    scale = scale.scale if isinstance(scale, LossScaleState) else scale
    inverse = 1 / jnp.asarray(scale, jnp.float32)

    def one(grad: Any) -> Any:
        if not is_inexact(grad):
            return grad
        dtype = wide(grad.dtype)
        return grad.astype(dtype) * inverse.astype(dtype)

    return jax.tree.map(one, grads)


def scaled(loss: jax.Array, scale: Any) -> jax.Array:
    """`scale * loss`, in float32 or wider."""
    dtype = wide(loss.dtype)
    return loss.astype(dtype) * jnp.asarray(scale, dtype)


def checked(function: str, value: Any) -> LossScale | None:
    """`value`, a `LossScale` or `None`.

    Raises:
      TypeError: it is something else.
    """
    if value is None or isinstance(value, LossScale):
        return value
    raise TypeError(
        f"{function}: `loss_scale` must come from `ja.loss_scaling`, got {checks.describe(value)}. "
        "For example `ja.loss_scaling.dynamic()`."
    )


def checked_scale(function: str, value: Any) -> Any:
    """One scale, as a float32 scalar, or `None`.

    Raises:
      TypeError: it is not a real scalar.
      ValueError: it is a number that is not above 0.
    """
    if value is None:
        return None
    remedy = "Pass `state.loss_scale.scale`, or a power of two."
    kind = getattr(value, "dtype", None)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    real = kind is not None and jnp.issubdtype(kind, jnp.number)
    real = real and not jnp.issubdtype(kind or bool, jnp.complexfloating)
    if not (number or real) or np.shape(value):
        raise TypeError(
            f"{function}: `loss_scale` must be a real scalar, got {checks.describe(value)}. "
            f"{remedy}"
        )
    if number and not (0 < value < math.inf):
        raise ValueError(f"{function}: `loss_scale` must be above 0, got {value}. {remedy}")
    return jnp.asarray(value, jnp.float32)


def _power(function: str, name: str, value: Any) -> float:
    remedy = "Powers of two change no bit of a gradient: `2.0**15`."
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
        raise TypeError(
            f"{function}: `{name}` must be a number, got {checks.describe(value)}. {remedy}"
        )
    number = float(value)
    if not (number > 0 and math.isfinite(number) and math.frexp(number)[0] == 0.5):
        raise ValueError(f"{function}: `{name}` must be a power of two, got {value}. {remedy}")
    return number
