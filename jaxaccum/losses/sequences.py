"""Means over the sequences of packed rows."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import checks, dtypes
from jaxaccum.core.mean import Mean, divide, mean


def sequence_mean(values: Any, segment_ids: Any, *, where: Any = None) -> Mean:
    """The undivided mean over sequences of each sequence's own mean, in packed rows.

    `Mean(sum_s mean(values of s), number of sequences)`. `ja.mean(values)` weighs a sequence by
    its tokens; the mean of each row weighs it by the company it is packed with. This one splits
    into micro-batches, so that `ja.value_and_grad` takes it as it is.

    Args:
      values: per-token losses `[rows, length]`.
      segment_ids: integers `[rows, length]`, as from `ja.batches.pack`: a sequence is a run of
        equal numbers in a row, and 0 is padding.
      where: boolean `[rows, length]`; tokens that it drops count for nothing, such as those without
        a target. A sequence without any other does not count.

    Returns:
      A `Mean` of two scalars; `weight` is the number of sequences, int32.

    Raises:
      ValueError: a shape does not fit.
      TypeError: `segment_ids` are not integers, or `where` is not boolean.

    Example:
      >>> loss = sequence_mean(jnp.array([[10.0, 1, 1, 1, 1]]), jnp.array([[1, 2, 2, 2, 2]]))
      >>> print(loss.total, loss.weight, loss.value)
      11.0 2 5.5
    """
    values, segment_ids = jnp.asarray(values), jnp.asarray(segment_ids)
    if values.ndim != 2 or segment_ids.shape != values.shape:
        raise ValueError(
            "sequence_mean: `values` and `segment_ids` must both be `[rows, length]`, got "
            f"{checks.describe(values)} and {checks.describe(segment_ids)}."
        )
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(
            f"sequence_mean: `segment_ids` must be integers, got {checks.describe(segment_ids)}."
        )
    kept = segment_ids != 0
    if where is not None:
        kept = kept & checks.mask("sequence_mean", "where", where, values.shape)
    values = jnp.where(kept, values, jnp.zeros_like(values))
    values = values.astype(dtypes.promote(values, jnp.float32))
    rows, length = values.shape
    begins = segment_ids[:, 1:] != segment_ids[:, :-1]
    run = jnp.pad(jnp.cumsum(begins, axis=1, dtype=jnp.int32), [(0, 0), (1, 0)])
    run = run + length * jnp.arange(rows, dtype=jnp.int32)[:, None]
    sums, lengths = (
        jax.ops.segment_sum(x.reshape(-1), run.reshape(-1), num_segments=rows * length)
        for x in (values, kept.astype(jnp.int32))
    )
    return mean(divide(sums, lengths, empty=0.0), where=lengths > 0)
