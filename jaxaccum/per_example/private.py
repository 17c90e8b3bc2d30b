"""Private noise, once per window."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxaccum.closing.handover import own_buffer
from jaxaccum.closing.inner import EveryWindow
from jaxaccum.core import checks
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.mean import wide


def add_noise(
    grads: Any, key: jax.Array, *, noise_multiplier: Any, clip_norm: Any, denominator: Any = 1.0
) -> Any:
    """Adds the Gaussian mechanism's noise to a window's gradient, once.

    `grads + noise_multiplier * clip_norm / denominator * normal(key)`. Call it on the gradient of
    the whole window, after the reduction over devices: the noise then has the scale that the
    privacy accountant assumes, whatever the number of micro-batches or devices, and is the same on
    every device. Noise in each micro-batch would be `sqrt(K)` times as large.

    Args:
      grads: the window's gradients, divided by `denominator`; whole arrays.
      key: a PRNG key, used once; the same on all devices.
      noise_multiplier: the noise's standard deviation in units of `clip_norm`.
      clip_norm: the largest norm of one example's gradient, as given to `clip`.
      denominator: what the sum of clipped gradients was divided by. With Poisson sampling that is
        the expected batch size, which is public, and not the number of examples drawn: pass
        `denominators=` to `f` of `ja.value_and_grad`. 1 for undivided sums.

    Returns:
      The tree with noise in every inexact leaf, drawn in float32 or wider; dtypes are kept.

    Raises:
      TypeError: `key` is not one PRNG key, or an argument no number.
      ValueError: `clip_norm` or `denominator` is not positive, `noise_multiplier` negative.

    Example:
      >>> grads = {"w": jnp.zeros(100_000)}
      >>> noisy = add_noise(
      ...     grads, jax.random.key(0), noise_multiplier=2.0, clip_norm=3.0, denominator=12.0)
      >>> print(f"{noisy['w'].std():.2f}")
      0.50
    """
    if key is None:
        raise TypeError("per_example.add_noise: `key` must be one PRNG key, got None.")
    checks.key("per_example.add_noise", key)
    _check_scale("per_example.add_noise", noise_multiplier, clip_norm, denominator)
    leaves, tree = jax.tree.flatten(grads)

    def noisy(number: int, grad: Any) -> Any:
        if not is_inexact(grad):
            return grad
        grad = jnp.asarray(grad)
        dtype = wide(grad.dtype)
        own = jax.random.fold_in(key, number)
        if jnp.issubdtype(dtype, jnp.complexfloating):  # each part as a real gradient's
            parts = jax.random.normal(own, (2, *grad.shape), jnp.finfo(dtype).dtype)
            draw = jax.lax.complex(parts[0], parts[1])
        else:
            draw = jax.random.normal(own, grad.shape, dtype)
        scale = jnp.asarray(noise_multiplier * clip_norm / denominator, dtype)
        return (grad.astype(dtype) + scale * draw).astype(grad.dtype)

    return jax.tree.unflatten(tree, [noisy(*pair) for pair in enumerate(leaves)])


def _check_scale(function: str, noise_multiplier: Any, clip_norm: Any, denominator: Any) -> None:
    """Refuses a scale without noise, which only `noise_multiplier=0` asks for."""
    checks.positive(function, "clip_norm", clip_norm)
    checks.positive(function, "denominator", denominator)
    if isinstance(noise_multiplier, jax.core.Tracer) or np.any(noise_multiplier != 0):
        checks.positive(function, "noise_multiplier", noise_multiplier)


class _Noise(NamedTuple):
    key: jax.Array
    optimizer_step: jax.Array


class NoiseState(_Noise, EveryWindow):
    """The state of `noise`; a window in which nothing was sampled needs its noise too.

    Attributes:
      key: the PRNG key that all windows' keys come from.
      optimizer_step: how many windows have been given noise; int32 scalar.
    """

    __slots__ = ()


def noise(
    key: jax.Array, *, noise_multiplier: Any, clip_norm: Any, denominator: Any = 1.0
) -> optax.GradientTransformation:
    """`add_noise` as the first part of an optimizer, with new noise in every optimizer step.

    `optax.chain(noise(...), optax.sgd(0.1))` inside `ja.train_step` or `ja.multi_steps`, which call
    the optimizer once per window: also for one of zero weight, in which nothing was sampled, and
    for one that was left out as not finite. Its gradient is zero, with the noise of every other.

    Args:
      key: a PRNG key, the same on all devices; step `t` uses `fold_in(key, t)`.
      noise_multiplier: the noise's standard deviation in units of `clip_norm`.
      clip_norm: the largest norm of one example's gradient, as given to `clip`.
      denominator: what the sum of clipped gradients is divided by; see `add_noise`.

    Returns:
      An `optax.GradientTransformation` with a `NoiseState`. Restore it with the optimizer's state:
      noise that is drawn twice protects nothing.

    Raises:
      TypeError: `key` is not one PRNG key, or an argument no number.
      ValueError: `clip_norm` or `denominator` is not positive, `noise_multiplier` negative.

    Example:
      >>> tx = noise(jax.random.key(0), noise_multiplier=1.0, clip_norm=1.0, denominator=64.0)
      >>> state = tx.init(jnp.zeros(3))
      >>> first, state = tx.update(jnp.zeros(3), state)
      >>> second, state = tx.update(jnp.zeros(3), state)
      >>> print((first == second).any(), state.optimizer_step)
      False 2
    """
    if key is None:
        raise TypeError("per_example.noise: `key` must be one PRNG key, got None.")
    checks.key("per_example.noise", key)
    _check_scale("per_example.noise", noise_multiplier, clip_norm, denominator)

    def init_fn(params: Any) -> NoiseState:
        del params
        return NoiseState(own_buffer(key), jnp.zeros((), jnp.int32))

    def update_fn(updates: Any, state: NoiseState, params: Any = None) -> Any:
        del params
        updates = add_noise(
            updates,
            jax.random.fold_in(state.key, state.optimizer_step),
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            denominator=denominator,
        )
        return updates, state._replace(optimizer_step=state.optimizer_step + 1)

    return optax.GradientTransformation(init_fn, update_fn)
