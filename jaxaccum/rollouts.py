"""Reinforcement learning batches: ragged samples into windows, and the losses over them.

Sequences that a policy sampled have very different lengths, so by what a loss is divided matters,
and papers differ in it. Each of their means is here as a `ja.Mean`, exact for any cut of the
samples.

References:
  Zhihong Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language
  Models", 2024 (GRPO). Zichen Liu et al., "Understanding R1-Zero-Like Training: A Critical
  Perspective", 2025 (Dr. GRPO).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum import batches
from jaxaccum.core import checks
from jaxaccum.core.mean import mean
from jaxaccum.core.reducers import Max, Min
from jaxaccum.losses.policy import clipped_loss, constant_mean, sequence_mean, token_mean
from jaxaccum.losses.sampling import (
    effective_share,
    mismatch,
    reference_divergence,
    truncated_weights,
)

__all__ = [
    "Rollout", "RolloutBatch", "clipped_loss", "close_windows", "constant_mean", "effective_share",
    "group_advantages", "mismatch", "pad_rollouts", "reference_divergence", "sequence_mean",
    "token_mean", "truncated_weights", "version_lag",
]  # fmt: skip


class Rollout(NamedTuple):
    """One sampled sequence, on the host.

    Attributes:
      tokens: prompt and completion; int `[length]`.
      prompt_length: how many of the tokens are the prompt; at least 1.
      log_probs: the log-probability of each completion token under the policy that sampled it;
        float `[length - prompt_length]`.
      advantage: from `group_advantages`, or another estimate; one number, or one for each
        completion token.
      version: the version of the weights that sampled it; one int, or one for each completion
        token where weights were published while it was being written.
      own: which completion tokens the policy wrote itself, not a tool or another speaker; bool
        `[length - prompt_length]`, or `None` for all. The others stay in the sequence and are no
        targets.
    """

    tokens: np.ndarray
    prompt_length: int
    log_probs: np.ndarray
    advantage: float | np.ndarray
    version: int | np.ndarray = 0
    own: np.ndarray | None = None


class RolloutBatch(NamedTuple):
    """Padded rollouts; the targets of `tokens[:, :-1]` are `tokens[:, 1:]`.

    Attributes:
      tokens: int32 `[rows, length]`.
      mask: bool `[rows, length - 1]`; where a target is a completion token of the policy's own.
      log_probs: float32 `[rows, length - 1]`; of the targets, zero elsewhere.
      advantage: float32 `[rows, length - 1]`; of the targets, zero elsewhere.
      version: int32 `[rows, length - 1]`; likewise.
      real: bool `[rows]`; false for rows that only pad.
    """

    tokens: np.ndarray
    mask: np.ndarray
    log_probs: np.ndarray
    advantage: np.ndarray
    version: np.ndarray
    real: np.ndarray


def close_windows(
    samples: Iterable[Any],
    *,
    num_samples: int | None = None,
    num_tokens: int | None = None,
    size_fn: Callable[[Any], int] | None = None,
) -> Iterator[list[Any]]:
    """Groups samples into windows that close at a target number of samples or tokens.

    A window closes with the sample that reaches the target, as `ja.until_weight` does in a stream;
    nothing is cut or dropped, and the last window may be short.

    Args:
      samples: an iterable of `Rollout`s or of anything else.
      num_samples: samples per window; a static int.
      num_tokens: tokens per window, at least; a static int. Exactly one of the two.
      size_fn: the tokens of a sample; by default the completion tokens of a `Rollout`.

    Yields:
      Lists of samples.

    Raises:
      TypeError: a target is not an integer.
      ValueError: not exactly one target is given, or it is less than 1.

    Example:
      >>> list(close_windows([[1] * n for n in (3, 2, 4, 1)], num_tokens=5, size_fn=len))
      [[[1, 1, 1], [1, 1]], [[1, 1, 1, 1], [1]]]
    """
    checks.one_of("close_windows", num_samples=num_samples, num_tokens=num_tokens)
    if num_samples is not None:
        target = checks.integer("close_windows", "num_samples", num_samples)
        return batches.grouped(samples, target, lambda sample: 1)
    target = checks.integer("close_windows", "num_tokens", num_tokens)
    return batches.grouped(samples, target, size_fn or _completion)


def _completion(sample: Any) -> int:
    return len(sample.tokens) - sample.prompt_length


def pad_rollouts(
    rollouts: Sequence[Rollout],
    *,
    row_buckets: Sequence[int],
    length_buckets: Sequence[int],
    padding: int = 0,
) -> RolloutBatch:
    """Pads a window's rollouts to the smallest shape out of a few, so that few programs compile.

    Rows that only pad hold no target, so they count for nothing in any of the means below.

    Args:
      rollouts: at least one.
      row_buckets: the numbers of rows allowed; static ints, multiples of the number of
        micro-batches cut best.
      length_buckets: the sequence lengths allowed; static ints.
      padding: the token that fills up.

    Returns:
      A `RolloutBatch` of NumPy arrays.

    Raises:
      ValueError: there is no rollout, one has no prompt or the wrong number of log-probabilities,
        advantages, versions or marks, or no bucket is large enough.

    Example:
      >>> rollout = Rollout(np.array([5, 6, 7]), 1, np.array([-0.5, -1.0]), 2.0)
      >>> batch = pad_rollouts([rollout], row_buckets=[2, 4], length_buckets=[4, 8])
      >>> print(batch.tokens.tolist(), batch.mask.tolist())
      [[5, 6, 7, 0], [0, 0, 0, 0]] [[True, True, False], [False, False, False]]
    """
    if not rollouts:
        raise ValueError("pad_rollouts: `rollouts` is empty; leave the window out instead.")
    longest = max(len(r.tokens) for r in rollouts)
    rows = _bucket("row_buckets", row_buckets, len(rollouts))
    length = _bucket("length_buckets", length_buckets, longest)
    batch = RolloutBatch(
        tokens=np.full((rows, length), padding, np.int32),
        mask=np.zeros((rows, length - 1), bool),
        log_probs=np.zeros((rows, length - 1), np.float32),
        advantage=np.zeros((rows, length - 1), np.float32),
        version=np.zeros((rows, length - 1), np.int32),
        real=np.arange(rows) < len(rollouts),
    )
    for row, rollout in enumerate(rollouts):
        _check_rollout(row, rollout)
        size, prompt = len(rollout.tokens), rollout.prompt_length
        batch.tokens[row, :size] = rollout.tokens
        targets = slice(prompt - 1, size - 1)
        own = np.ones(size - prompt, bool) if rollout.own is None else np.asarray(rollout.own)
        batch.mask[row, targets] = own
        for name in ("log_probs", "advantage", "version"):
            # Tool output has no log-probability of the policy; whatever stands there is not kept.
            getattr(batch, name)[row, targets] = np.where(own, getattr(rollout, name), 0)
    return batch


def _check_rollout(row: int, rollout: Rollout) -> None:
    size, prompt = len(rollout.tokens), rollout.prompt_length
    if prompt < 1 or len(rollout.log_probs) != size - prompt:
        raise ValueError(
            f"pad_rollouts: rollout {row} has {size} tokens, a prompt of {prompt} and "
            f"{len(rollout.log_probs)} log-probabilities. Give one for each completion token "
            "and a prompt of at least one."
        )
    for name in ("advantage", "version", "own"):
        value = getattr(rollout, name)
        allowed = [(size - prompt,)] if name == "own" else [(), (size - prompt,)]
        if value is not None and np.shape(value) not in allowed:
            raise ValueError(
                f"pad_rollouts: `{name}` of rollout {row} has the shape {np.shape(value)}, and "
                f"there are {size - prompt} completion tokens. Give one for each."
            )
    if rollout.own is not None and np.asarray(rollout.own).dtype != bool:
        raise ValueError(
            f"pad_rollouts: `own` of rollout {row} must be boolean, got "
            f"{checks.describe(rollout.own)}. Compare first, for example `own > 0`."
        )


def _bucket(name: str, buckets: Sequence[int], needed: int) -> int:
    sizes = sorted(checks.integer("pad_rollouts", name, size) for size in buckets)
    if any(size >= needed for size in sizes):
        return next(size for size in sizes if size >= needed)
    raise ValueError(
        f"pad_rollouts: `{name}` {sizes} hold at most {max(sizes, default=0)}, but {needed} are "
        "needed. Add a larger one."
    )


def group_advantages(
    rewards: Any, group_size: int, *, scale: bool = True, epsilon: float = 1e-6
) -> jax.Array:
    """The advantage of each sample over its group: `(r - mean(r)) / (std(r) + epsilon)`.

    It needs whole groups, so it is computed before a window is cut into micro-batches.

    Args:
      rewards: `[samples]`; the samples of a group (of one prompt) stand side by side.
      group_size: samples per group; a static int.
      scale: whether to divide by the group's standard deviation (the population's), as GRPO does;
        Dr. GRPO does not, since it weighs easy and hard prompts more.
      epsilon: keeps groups of equal rewards finite, whose advantages are zero.

    Returns:
      Float32 `[samples]`.

    Raises:
      ValueError: the samples do not make whole groups.

    Example:
      >>> group_advantages([1.0, 3.0, 5.0, 5.0], 2, scale=False).tolist()
      [-1.0, 1.0, 0.0, 0.0]
    """
    size = checks.integer("group_advantages", "group_size", group_size)
    rewards = jnp.asarray(rewards, jnp.float32)
    if rewards.ndim != 1 or rewards.shape[0] % size:
        raise ValueError(
            f"group_advantages: `rewards` must be flat and make whole groups of {size}, got "
            f"{checks.describe(rewards)}."
        )
    groups = rewards.reshape(-1, size)
    # Against one of its own rewards first: the mean of equal ones rounds, and dividing what is left
    # by a deviation that is no more than rounding would make advantages of it.
    groups = groups - groups[:, :1]
    advantages = groups - groups.mean(1, keepdims=True)
    if scale:
        advantages = advantages / (groups.std(1, keepdims=True) + epsilon)
    return advantages.reshape(-1)


def version_lag(version: Any, current: Any, mask: jax.Array) -> dict[str, Any]:
    """How many versions behind the samples' weights are, as auxiliary outputs of a window.

    Args:
      version: the version that sampled each token; int `[rows, tokens]`, or another shape.
      current: the version that is trained, a scalar; pass it as an array so that it is traced.
      mask: bool, the shape of `version`; what counts.

    Returns:
      `{"min": ja.Min, "max": ja.Max, "mean": ja.Mean}`, int32 and a mean. In a window where nothing
      counts min is the largest int32 and max the smallest.

    Example:
      >>> lag = version_lag(jnp.array([3, 1, 0]), 3, jnp.array([True, True, False]))
      >>> print(lag["min"].value, lag["max"].value, lag["mean"].value)
      0 2 1.0
    """
    lag = jnp.asarray(current, jnp.int32) - jnp.asarray(version, jnp.int32)
    ends = jnp.iinfo(jnp.int32)
    return {
        "min": Min(jnp.min(jnp.where(mask, lag, ends.max))),
        "max": Max(jnp.max(jnp.where(mask, lag, ends.min))),
        "mean": mean(lag, where=mask),
    }
