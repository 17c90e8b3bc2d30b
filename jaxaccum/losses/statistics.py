"""Losses of window-wide sums: the overlap of classes (Dice, F1), the balance of experts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxaccum.core import checks, dtypes
from jaxaccum.core.mean import Mean, divide, mean
from jaxaccum.core.reducers import Sum


class Overlap(NamedTuple):
    """How much of each class was predicted where it is; three sums.

    Attributes:
      both: the predicted mass that lies on the class, `[classes]`.
      predicted: the predicted mass, `[classes]`.
      target: the mass of the targets, `[classes]`.
    """

    both: Any
    predicted: Any
    target: Any


def overlap(
    probabilities: Any, targets: Any, *, where: Any = None, squared: bool = False
) -> Overlap:
    """What `dice` and `f_score` need to know of one micro-batch.

    `both = sum(p * t)`, `predicted = sum(p)`, `target = sum(t)` for each class, over all other
    positions; with `squared`, `sum(p**2)` and `sum(t**2)` in the last two.

    Args:
      probabilities: predictions in [0, 1], `[..., classes]`.
      targets: zeros and ones, or soft targets, of the same shape.
      where: boolean `[...]`; positions that it drops count for nothing.
      squared: whether the sizes are sums of squares.

    Returns:
      An `Overlap` of three `ja.Sum`s, to be returned from the function given to `ja.microbatch`.

    Raises:
      ValueError: a shape does not fit.
      TypeError: `where` is not boolean.

    Example:
      >>> out = overlap(jnp.array([[0.5], [1.0]]), jnp.array([[1], [0]]))
      >>> print(out.both.value, out.predicted.value, out.target.value)
      [0.5] [1.5] [1.]
    """
    dtype = dtypes.promote(jnp.asarray(probabilities), jnp.float32)
    p, t = jnp.asarray(probabilities).astype(dtype), jnp.asarray(targets).astype(dtype)
    if p.shape != t.shape:
        raise ValueError(
            f"overlap: `targets` must have the shape of `probabilities` {p.shape}, got {t.shape}. "
            "Class numbers become `jax.nn.one_hot(numbers, classes)`."
        )
    if where is not None:
        kept = checks.mask("overlap", "where", where, p.shape[:-1])[..., None]
        p, t = (jnp.where(kept, x, jnp.zeros_like(x)) for x in (p, t))
    power = 2 if squared else 1
    values = (p * t, p**power, t**power)
    return Overlap(*[Sum(jnp.sum(x.reshape(-1, x.shape[-1]), axis=0)) for x in values])


def f_score(combined: Overlap, *, beta: Any = 1.0, smooth: Any = 0.0) -> jax.Array:
    """The soft F-beta score of each class over the window; a differentiable loss is 1 minus it.

    `((1 + beta**2) * both + smooth) / (predicted + beta**2 * target + smooth)`. With `beta=1` it is
    the soft F1, or Dice coefficient: twice the true positives over themselves and the errors.

    Args:
      combined: the `Overlap` that `ja.microbatch` returned, or one made of plain arrays.
      beta: how many times recall counts as much as precision.
      smooth: added to numerator and denominator, in units of the sums.

    Returns:
      `[classes]`, in [0, 1], float32 or wider; nan for a class that is neither predicted nor there
      (without `smooth`).

    Raises:
      TypeError: `combined` is not an `Overlap`, or has not been combined.

    Example:
      >>> print(f_score(Overlap(jnp.array([1.0]), jnp.array([2.0]), jnp.array([1.0]))))
      [0.6666667]
    """
    both, size = _sizes("f_score", combined, beta, smooth)
    return divide(both, size, empty=jnp.nan)


def dice(combined: Overlap, *, smooth: Any = 1.0) -> jax.Array:
    """The soft Dice loss over the window, `1 - mean(f_score(combined, smooth=smooth))`.

    The mean is over the classes; without `smooth` those that are neither predicted nor there are
    left out. The window counts as one image: every position of a class weighs the same, whichever
    micro-batch it is in. `dice` with `smooth=0` is the soft F1 loss.

    Args:
      combined: the `Overlap` that `ja.microbatch` returned, or one made of plain arrays.
      smooth: added to numerator and denominator, in units of the sums.

    Returns:
      A scalar in float32 or wider; nan where all classes are left out.

    Raises:
      TypeError: `combined` is not an `Overlap`, or has not been combined.

    References:
      Fausto Milletari, Nassir Navab, Seyed-Ahmad Ahmadi, "V-Net: Fully Convolutional Neural
      Networks for Volumetric Medical Image Segmentation", 2016 (with `squared=True`).

    Example:
      >>> print(dice(Overlap(jnp.array([1.0]), jnp.array([2.0]), jnp.array([1.0]))))
      0.25
    """
    both, size = _sizes("dice", combined, 1.0, smooth)
    return 1 - mean(divide(both, size, empty=0.0), where=size != 0).value


def _sizes(function: str, combined: Any, beta: Any, smooth: Any) -> tuple[jax.Array, jax.Array]:
    """Numerator and denominator of the F-beta score."""
    both, predicted, target = map(jnp.asarray, _combined(function, combined, Overlap, "overlap"))
    square = jnp.asarray(beta, both.dtype) ** 2
    smooth = jnp.asarray(smooth, both.dtype)
    return (1 + square) * both + smooth, predicted + square * target + smooth


class Routing(NamedTuple):
    """Where a router sent tokens; two means over tokens, of which `microbatch` returns the values.

    Attributes:
      fraction: the share of the tokens' choices that fell on each expert, `[experts]`; no gradient.
      probability: the mean probability of each expert, `[experts]`.
    """

    fraction: Any
    probability: Any


def routing(probabilities: Any, chosen: Any = None, *, where: Any = None) -> Routing:
    """What `load_balance` needs to know of one micro-batch.

    Args:
      probabilities: the router's softmax, `[..., experts]`.
      chosen: the experts that were chosen, integers `[...]` or `[..., k]`; the most probable one if
        left out.
      where: boolean `[...]`; tokens that it drops, such as padding, do not count.

    Returns:
      A `Routing` of two `ja.Mean`s, to be returned from the function given to `ja.microbatch`.

    Raises:
      ValueError: a shape does not fit.
      TypeError: `where` is not boolean, or `chosen` does not hold integers.

    Example:
      >>> out = routing(jnp.array([[0.75, 0.25], [0.75, 0.25], [0.0, 1.0]]))
      >>> print(out.fraction.total, out.probability.total, out.fraction.weight)
      [2. 1.] [1.5 1.5] 3
    """
    probabilities = jnp.asarray(probabilities)
    tokens, experts = probabilities.shape[:-1], probabilities.shape[-1]
    chosen = jnp.argmax(probabilities, axis=-1) if chosen is None else jnp.asarray(chosen)
    if not jnp.issubdtype(chosen.dtype, jnp.integer):
        raise TypeError(
            f"routing: `chosen` must hold the experts' numbers, got {checks.describe(chosen)}."
        )
    if chosen.shape == tokens:
        chosen = chosen[..., None]
    if chosen.shape[:-1] != tokens:
        raise ValueError(
            f"routing: `chosen` must have the shape {tokens} or {(*tokens, 'k')}, got "
            f"{checks.describe(chosen)}."
        )
    kept = (
        jnp.ones(tokens, bool) if where is None else checks.mask("routing", "where", where, tokens)
    )
    dtype = dtypes.promote(probabilities, jnp.float32)
    shares = jnp.mean(jax.nn.one_hot(chosen, experts, dtype=dtype), axis=-2)
    number = jnp.sum(kept, dtype=jnp.int32)

    def total(values: jax.Array) -> Mean:
        values = jnp.where(kept[..., None], values, jnp.zeros_like(values))
        return Mean(jnp.sum(values.reshape(-1, experts), axis=0), number)

    return Routing(total(lax.stop_gradient(shares)), total(probabilities.astype(dtype)))


def load_balance(combined: Routing) -> jax.Array:
    """The load-balancing loss of a mixture of experts, over all tokens of the window.

    `experts * sum(fraction * probability)`: 1 for a router that spreads its tokens evenly,
    `experts` for one that sends them all to one. `fraction` has no gradient. Both are means over
    the window; the mean of the micro-batches' own losses punishes a micro-batch for holding text of
    one kind.

    Args:
      combined: the `Routing` that `ja.microbatch` returned, or one made of plain arrays.

    Returns:
      A scalar in float32 or wider; nan where no token counts.

    Raises:
      TypeError: `combined` is not a `Routing`, or has not been combined.

    References:
      William Fedus, Barret Zoph, Noam Shazeer, "Switch Transformers: Scaling to Trillion Parameter
      Models with Simple and Efficient Sparsity", 2021, equation 4. Dmitry Lepikhin and others,
      "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020.

    Example:
      >>> print(load_balance(Routing(jnp.array([1.0, 0.0]), jnp.array([0.75, 0.25]))))
      1.5
    """
    combined = _combined("load_balance", combined, Routing, "routing")
    fraction = lax.stop_gradient(jnp.asarray(combined.fraction))
    return fraction.shape[-1] * jnp.sum(fraction * combined.probability)


def _combined(function: str, value: Any, kind: type[tuple[Any, ...]], maker: str) -> Any:
    """`value`, if it is a `kind` of plain arrays."""
    if not isinstance(value, kind) or any(isinstance(x, Mean | Sum) for x in value):
        raise TypeError(
            f"{function}: expected a combined `{kind.__name__}`, got {type(value).__name__} "
            f"{checks.describe(value)}. Return `{maker}(...)` from the function given to "
            f"`ja.microbatch`, and pass on what that returns."
        )
    return value
