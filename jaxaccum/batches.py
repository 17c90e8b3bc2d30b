"""Batches on the host: windows from a loader, constant shapes, packed rows, per-example keys."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks
from jaxaccum.window import cut

__all__ = ["PackedBatch", "example_keys", "pack", "pad_batch", "windows"]

_INT32 = np.iinfo(np.int32)


def windows(iterable: Iterable[Any], num_microbatches: int) -> Iterator[list[Any]]:
    """Groups a loader's micro-batches into windows; the last one may be short.

    Nothing is dropped: of 7 micro-batches and windows of 4 the second window holds 3. Reads only
    as far ahead as the window it returns.

    Args:
      iterable: micro-batches, of any type.
      num_microbatches: micro-batches per window; a static int.

    Yields:
      Lists of up to `num_microbatches` micro-batches.

    Raises:
      TypeError: `num_microbatches` is not an integer.
      ValueError: `num_microbatches` is less than 1.

    Example:
      >>> list(windows(range(7), 4))
      [[0, 1, 2, 3], [4, 5, 6]]
    """
    size = checks.integer("windows", "num_microbatches", num_microbatches)
    if not isinstance(iterable, Iterable):
        raise TypeError(f"windows: `iterable` must be iterable, got {checks.describe(iterable)}.")
    return grouped(iterable, size, lambda micro_batch: 1)


def grouped(
    items: Iterable[Any], target: int, size_fn: Callable[[Any], int]
) -> Iterator[list[Any]]:
    """Lists of items, each closed by the item with which its sizes reach the target."""
    window: list[Any] = []
    held = 0
    for item in items:
        window.append(item)
        held += size_fn(item)
        if held >= target:
            yield window
            window, held = [], 0
    if window:
        yield window


def pad_batch(batch: Any, num_rows: int) -> tuple[Any, Any]:
    """Pads a batch to a constant number of rows that count for nothing.

    For the last batch of an epoch, so that it does not compile a second program. The padding
    repeats the last real row, so that it makes no nan of its own; mask it with the second result:
    `ja.mean(loss, where=where[:, None])`.

    Args:
      batch: a tree of NumPy or JAX arrays with the same number of rows along axis 0.
      num_rows: the rows wanted; a static int, at least those of the batch.

    Returns:
      `(padded, where)`: the padded tree and a boolean mask `[num_rows]`, true for real rows; NumPy
      where all leaves are.

    Raises:
      ValueError: the batch has no rows or more than `num_rows`, or its leaves disagree.

    Example:
      >>> padded, where = pad_batch(np.array([5, 6]), 4)
      >>> print(padded, where)
      [5 6 6 6] [ True  True False False]
    """
    rows = checks.integer("pad_batch", "num_rows", num_rows)
    size = cut.common_rows("pad_batch", {"batch": batch})
    if size > rows:
        raise ValueError(
            f"pad_batch: the batch has {size} rows, more than `num_rows`, {rows}. Cut it first, "
            "for example with `ja.split`."
        )
    index = np.minimum(np.arange(rows), size - 1)
    on_device = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch))
    where = np.arange(rows) < size
    padded = jax.tree.map(
        lambda leaf: leaf[index] if isinstance(leaf, jax.Array) else np.asarray(leaf)[index], batch
    )
    return padded, jnp.asarray(where) if on_device else where


class PackedBatch(NamedTuple):
    """Token sequences packed into rows of equal length.

    Attributes:
      tokens: int32 `[rows, length]`; the padding token after the last sequence of a row.
      segment_ids: int32 `[rows, length]`; 1, 2, … for the sequences of a row, 0 for padding.
      positions: int32 `[rows, length]`; the position inside the sequence, from 0.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray

    def target_mask(self) -> np.ndarray:
        """Where `tokens[:, 1:]` is a target: the next token of the same sequence.

        Returns:
          Boolean `[rows, length - 1]`. A sequence of n tokens has n - 1 targets; this, not the
          number of tokens, is what a causal loss divides by.
        """
        same = self.segment_ids[:, 1:] == self.segment_ids[:, :-1]
        return same & (self.segment_ids[:, 1:] > 0)


def pack(
    sequences: Iterable[Sequence[int]],
    length: int,
    *,
    overlong: Literal["raise", "split"] = "raise",
    padding: int = 0,
) -> PackedBatch:
    """Packs token sequences into rows, each into the first row that has room (first fit).

    Rows, and therefore windows, then hold nearly the same number of tokens, whatever the lengths
    of the sequences. Order is kept inside a row; no token is dropped.

    Args:
      sequences: sequences of token ids; empty ones are left out.
      length: tokens per row; a static int.
      overlong: what happens to a sequence of more than `length` tokens: an error, or pieces of up
        to `length` tokens that count as sequences of their own.
      padding: the token id that fills a row.

    Returns:
      A `PackedBatch`.

    Raises:
      ValueError: a sequence is too long, or there is none.
      TypeError: a sequence does not hold integers.

    References:
      David S. Johnson, "Near-optimal bin packing algorithms", 1973 (first fit).

    Example:
      >>> packed = pack([[1, 2, 3], [4, 5], [6]], 4)
      >>> print(packed.tokens.tolist(), packed.segment_ids.tolist())
      [[1, 2, 3, 6], [4, 5, 0, 0]] [[1, 1, 1, 2], [1, 1, 0, 0]]
    """
    length = checks.integer("pack", "length", length)
    if overlong not in ("raise", "split"):
        raise ValueError(f'pack: `overlong` must be "raise" or "split", got {overlong!r}.')
    padding = checks.integer("pack", "padding", padding, minimum=_INT32.min)
    if not isinstance(sequences, Iterable):
        raise TypeError(
            f"pack: `sequences` must be an iterable of sequences, got {checks.describe(sequences)}."
        )
    pieces: list[np.ndarray] = []
    for number, sequence in enumerate(sequences):
        tokens = _tokens(sequence)
        if tokens is None:
            raise TypeError(
                f"pack: `sequences[{number}]` must be a flat sequence of token ids, got "
                f"{checks.describe(sequence)}."
            )
        if tokens.size and (tokens.min() < _INT32.min or tokens.max() > _INT32.max):
            raise ValueError(
                f"pack: `sequences[{number}]` holds a token id that does not fit into int32, "
                f"between {tokens.min()} and {tokens.max()}."
            )
        if len(tokens) > length and overlong == "raise":
            raise ValueError(
                f"pack: `sequences[{number}]` has {len(tokens)} tokens, more than `length`, "
                f"{length}. "
                'Pass overlong="split" to cut it into pieces.'
            )
        pieces += [tokens[i : i + length] for i in range(0, len(tokens), length)]
    if not pieces:
        raise ValueError("pack: `sequences` holds no tokens.")
    row_of = _first_fit([len(piece) for piece in pieces], length)
    shape = (max(row_of) + 1, length)
    packed = PackedBatch(
        np.full(shape, padding, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    )
    start, segment = np.zeros(shape[0], int), np.zeros(shape[0], int)
    for row, piece in zip(row_of, pieces, strict=True):
        span = slice(start[row], start[row] + len(piece))
        segment[row] += 1
        packed.tokens[row, span] = piece
        packed.segment_ids[row, span] = segment[row]
        packed.positions[row, span] = np.arange(len(piece))
        start[row] = span.stop
    return packed


def _first_fit(sizes: Sequence[int], length: int) -> list[int]:
    """For each size the first row that has room for it."""
    free, used, rows = np.full(len(sizes), length), 0, []
    for size in sizes:
        row = int(np.argmax(free[: used + 1] >= size))
        free[row] -= size
        used = max(used, row + 1)
        rows.append(row)
    return rows


def _tokens(sequence: Any) -> np.ndarray | None:
    """A flat sequence of integers as an array; `None` for anything else."""
    try:
        tokens = np.asarray(sequence)
    except ValueError:  # ragged
        return None
    integers = np.issubdtype(tokens.dtype, np.integer) or not tokens.size
    return tokens if tokens.ndim == 1 and integers else None


def example_keys(key: jax.Array, batch_size: int, *, start: Any = 0) -> jax.Array:
    """One PRNG key for each example, which does not depend on how the batch is cut.

    Put them into the batch, `batch["key"] = ja.batches.example_keys(key, batch_size)`, and use them
    under `jax.vmap` in the loss: a dropout mask then stays the same for every number of
    micro-batches. The `key=` of `ja.value_and_grad`, in contrast, is one key for each micro-batch.

    Args:
      key: a PRNG key, typed or raw.
      batch_size: the number of examples; a static int.
      start: the number of the first example, for batches made in parts; an int, may be traced.

    Returns:
      Keys `[batch_size]`; key `i` is `jax.random.fold_in(key, start + i)`.

    Raises:
      TypeError: `batch_size` is not an integer.
      ValueError: `batch_size` is less than 1.

    Example:
      >>> keys = example_keys(jax.random.key(0), 4)
      >>> keys.shape
      (4,)
    """
    size = checks.integer("example_keys", "batch_size", batch_size)
    checks.key("example_keys", key)
    if np.shape(start) or not jnp.issubdtype(getattr(start, "dtype", type(start)), jnp.integer):
        raise TypeError(
            f"example_keys: `start` must be an integer scalar, got {checks.describe(start)}."
        )
    numbers = jnp.arange(size) + start
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)
