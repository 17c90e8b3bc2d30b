"""The load balance of a mixture of experts over the whole window."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxaccum.core import checks, compat
from jaxaccum.core.mean import Mean
from jaxaccum.losses import arguments


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
    kept = jnp.ones(tokens, bool) if where is None else arguments.mask("routing", where, tokens)
    dtype = compat.promote(probabilities, jnp.float32)
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
    combined = arguments.combined("load_balance", combined, Routing, "routing")
    fraction = lax.stop_gradient(jnp.asarray(combined.fraction))
    return fraction.shape[-1] * jnp.sum(fraction * combined.probability)
