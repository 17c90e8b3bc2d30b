"""A policy over sampled sequences: the clipped objective, and the means that papers take of it.

References:
  John Schulman et al., "Proximal Policy Optimization Algorithms", 2017 (PPO). Zhihong Shao et al.,
  "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", 2024
  (GRPO). Qiying Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025.
  Zichen Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", 2025 (Dr. GRPO).
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import checks
from jaxaccum.core.mean import Mean, mean
from jaxaccum.losses import sequences


def clipped_loss(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    *,
    advantages: jax.Array,
    clip: float = 0.2,
    clip_high: float | None = None,
) -> jax.Array:
    """The clipped objective of each token, to be minimised.

    `-min(ratio * A, clip(ratio, 1 - clip, 1 + clip_high) * A)` with `ratio = exp(log_probs -
    old_log_probs)`.

    Args:
      log_probs: of the tokens under the policy that is trained; `[rows, tokens]`.
      old_log_probs: under the policy that sampled them; the same shape.
      advantages: `[rows]`, or one for each token, `[rows, tokens]`.
      clip: how far the ratio counts downwards.
      clip_high: how far upwards, `clip` by default; DAPO takes 0.28 with 0.2.

    Returns:
      `[rows, tokens]`; give it to one of the means below.

    Raises:
      ValueError: the shapes do not fit.

    Example:
      >>> values = clipped_loss(jnp.log(jnp.array([[1.0, 2.0]])), jnp.zeros((1, 2)),
      ...                       advantages=jnp.ones(1))
      >>> print(values)
      [[-1.  -1.2]]
    """
    shape = jnp.shape(log_probs)
    allowed = (shape[:1], shape) if len(shape) == 2 else ()
    if jnp.shape(old_log_probs) != shape or jnp.shape(advantages) not in allowed:
        raise ValueError(
            "clipped_loss: `log_probs` and `old_log_probs` must have one shape [rows, tokens], and "
            "`advantages` one number for each row or token, got "
            f"{checks.describe(log_probs)}, "
            f"{checks.describe(old_log_probs)} and {checks.describe(advantages)}."
        )
    ratio = jnp.exp(log_probs - old_log_probs)
    high = clip if clip_high is None else clip_high
    if jnp.ndim(advantages) == 1:
        advantages = advantages[:, None]
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip, 1 + high) * advantages)


def token_mean(values: jax.Array, mask: jax.Array) -> Mean:
    """The mean over all tokens of the window: DAPO, "token level".

    `total = sum_i sum_t values_it`, `weight = tokens`. Every token counts alike.

    Args:
      values: per-token losses `[rows, tokens]`.
      mask: bool, the same shape; where a completion token is.

    Returns:
      A `Mean`.

    Example:
      >>> mask = jnp.array([[True, False], [True, True]])
      >>> print(token_mean(jnp.array([[1.0, 9.0], [2.0, 6.0]]), mask).value)
      3.0
    """
    _check_mask("token_mean", values, mask)
    return mean(values, where=mask)


def sequence_mean(values: jax.Array, mask: jax.Array) -> Mean:
    """The mean over sequences of each sequence's own mean: GRPO, "sample level".

    `ja.losses.sequence_mean` of rows that hold one sequence each: `total = sum_i sum_t values_it /
    length_i`, `weight = sequences`. Tokens of long sequences count less. A sequence without a token
    is not counted.

    Args:
      values: per-token losses `[rows, tokens]`.
      mask: bool, the same shape; where a completion token is.

    Example:
      >>> mask = jnp.array([[True, False], [True, True]])
      >>> print(sequence_mean(jnp.array([[1.0, 9.0], [2.0, 4.0]]), mask).value)
      2.0
    """
    _check_mask("sequence_mean", values, mask)
    return sequences.sequence_mean(values, jnp.ones(mask.shape, jnp.int32), where=mask)


def constant_mean(values: jax.Array, mask: jax.Array, *, length: float) -> Mean:
    """The sum over tokens, divided by the sequences and a constant length: Dr. GRPO.

    `total = sum_i sum_t values_it`, `weight = sequences * length`. Neither long nor short sequences
    are favoured. A sequence without a token is not counted.

    Args:
      values: per-token losses `[rows, tokens]`.
      mask: bool, the same shape; where a completion token is.
      length: the constant, such as the largest completion length.

    Example:
      >>> mask = jnp.array([[True, False], [True, True]])
      >>> print(constant_mean(jnp.array([[1.0, 9.0], [2.0, 5.0]]), mask, length=4).value)
      1.0
    """
    _check_mask("constant_mean", values, mask)
    if not checks.number("constant_mean", "length", length) > 0:
        raise ValueError(f"constant_mean: `length` must be positive, got {length!r}.")
    return Mean(mean(values, where=mask).total, mask.any(1).sum() * length)


def _check_mask(function: str, values: Any, mask: Any) -> None:
    if jnp.shape(mask) != jnp.shape(values) or jnp.ndim(mask) != 2 or mask.dtype != bool:
        raise ValueError(
            f"{function}: `values` and `mask` must have one shape [rows, tokens], and `mask` must "
            f"be boolean, got {checks.describe(values)} and {checks.describe(mask)}. Compare or "
            "broadcast first, for example `mask > 0`."
        )
