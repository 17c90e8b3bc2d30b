"""Tokens that an older policy sampled: truncated importance weights, and how far it had drifted.

A sampler lags behind the trainer, and computes log-probabilities a little differently. Its tokens
are weighted by how much more probable they are now, up to a limit.

References:
  Edward L. Ionides, "Truncated Importance Sampling", 2008. Augustine Kong, "A Note on Importance
  Sampling using Standardized Weights", 1992 (effective sample size). John Schulman, "Approximating
  KL Divergence", 2020.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import checks
from jaxaccum.core.mean import mean


def truncated_weights(
    log_probs: jax.Array, old_log_probs: jax.Array, *, limit: float = 2.0
) -> jax.Array:
    """The importance weight of each token, `min(exp(log_probs - old_log_probs), limit)`.

    It is a constant: no gradient goes through it. Multiply it onto `-advantages * log_probs`.

    Args:
      log_probs: of the tokens under the policy that is trained; `[rows, tokens]`.
      old_log_probs: under the policy that sampled them; the same shape.
      limit: the largest weight; a static number above 0.

    Returns:
      `[rows, tokens]`.

    Raises:
      ValueError: the shapes differ, or `limit` is not positive.

    Example:
      >>> print(truncated_weights(jnp.log(jnp.array([[1.0, 4.0]])), jnp.zeros((1, 2))))
      [[1. 2.]]
    """
    _check("truncated_weights", old_log_probs=old_log_probs, log_probs=log_probs)
    if not checks.number("truncated_weights", "limit", limit) > 0:
        raise ValueError(f"truncated_weights: `limit` must be positive, got {limit!r}.")
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_probs - old_log_probs), limit))


def mismatch(log_probs: jax.Array, old_log_probs: jax.Array, *, mask: jax.Array) -> dict[str, Any]:
    """How far the sampler is from the trainer, as auxiliary outputs of a window.

    With `d = log_probs - old_log_probs` and `w = exp(d)`, over the tokens of the window: the means
    of `w`, of `w ** 2` and of `w - 1 - d`. The last estimates the Kullback-Leibler divergence of
    the trained policy from the sampler, without bias and never negative. The first two give
    `effective_share`, once the window has combined them.

    Args:
      log_probs: of the tokens under the policy that is trained; `[rows, tokens]`.
      old_log_probs: under the policy that sampled them; the same shape.
      mask: bool, the same shape; tokens that count.

    Returns:
      `{"weight": ja.Mean, "square": ja.Mean, "divergence": ja.Mean}`, without a gradient.

    Raises:
      ValueError: the shapes differ.

    Example:
      >>> log_probs = jnp.log(jnp.array([[2.0, 1.0, 5.0]]))
      >>> seen = mismatch(log_probs, jnp.zeros((1, 3)), mask=jnp.array([[True, True, False]]))
      >>> print(seen["weight"].value, seen["square"].value)
      1.5 2.5
    """
    _check("mismatch", mask=mask, old_log_probs=old_log_probs, log_probs=log_probs)
    gap = jnp.where(mask, jax.lax.stop_gradient(log_probs - old_log_probs), 0)
    weight = jnp.exp(gap)
    return {
        "weight": mean(weight, where=mask),
        "square": mean(weight**2, where=mask),
        "divergence": mean(jnp.expm1(gap) - gap, where=mask),
    }


def effective_share(seen: dict[str, Any]) -> Any:
    """The effective sample size of a window, as a share of its tokens.

    `mean(w) ** 2 / mean(w ** 2)`: one where all weights are equal. It is a ratio of two means of
    the whole window, so it is taken after the window, not in the loss function.

    Args:
      seen: the window's values of what `mismatch` returned, from `aux`.

    Returns:
      A scalar between 0 and 1.

    Example:
      >>> print(effective_share({"weight": 1.5, "square": 2.5}))
      0.9
    """
    return seen["weight"] ** 2 / seen["square"]


def reference_divergence(log_probs: jax.Array, reference_log_probs: jax.Array) -> jax.Array:
    """The divergence from a reference policy at each token, to be minimised beside the objective.

    `exp(d) - 1 - d` with `d = reference_log_probs - log_probs`, as GRPO has it: an unbiased
    estimate for tokens that the trained policy sampled, never negative. Give it to one of the means
    and return that as a loss term of its own, which keeps its own denominator.

    Args:
      log_probs: of the tokens under the policy that is trained; `[rows, tokens]`.
      reference_log_probs: under the reference; the same shape. No gradient goes through them.

    Returns:
      `[rows, tokens]`.

    Raises:
      ValueError: the shapes differ.

    Example:
      >>> apart = reference_divergence(jnp.zeros((1, 2)), jnp.array([[0.0, -1.0]]))
      >>> [round(x, 3) for x in apart[0].tolist()]
      [0.0, 0.368]
    """
    shapes = {"reference_log_probs": reference_log_probs, "log_probs": log_probs}
    _check("reference_divergence", **shapes)
    gap = jax.lax.stop_gradient(reference_log_probs) - log_probs
    return jnp.expm1(gap) - gap


def _check(function: str, **arrays: Any) -> None:
    shapes = {jnp.shape(x) for x in arrays.values()}
    if len(shapes) > 1 or len(*shapes) != 2:
        names = " and ".join(f"`{name}`" for name in arrays)
        found = ", ".join(checks.describe(x) for x in arrays.values())
        raise ValueError(f"{function}: {names} must have one shape [rows, tokens], got {found}.")
