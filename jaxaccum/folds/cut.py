"""Cutting a batch into micro-batches: exact for every size, without moving sharded rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxaccum.core import checks


class Segment(NamedTuple):
    """A block of consecutive rows cut into micro-batches of equal size.

    The block is cut strided: micro-batch `k` takes its rows `k`, `k + num`, `k + 2 * num`, …, so
    that rows sharded over devices stay on the device that holds them.

    Attributes:
      start: the first row of the block.
      num: the number of micro-batches.
      rows: the rows of each micro-batch.
    """

    start: int
    num: int
    rows: int

    def grid(self, batch: Any) -> Any:
        """The block's leaves, reshaped from `[num * rows, ...]` to `[rows, num, ...]`."""

        def reshape(leaf: Any) -> jax.Array:
            leaf = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
            stop = self.start + self.num * self.rows
            if (self.start, stop) != (0, leaf.shape[0]):
                leaf = lax.slice_in_dim(leaf, self.start, stop)
            return leaf.reshape((self.rows, self.num, *leaf.shape[1:]))

        return jax.tree.map(reshape, batch)


def micro_batch(grid: Any, index: Any) -> Any:
    """Micro-batch `index` of a grid from `Segment.grid`: leaves `[rows, ...]`."""
    return jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(leaf, index, axis=1, keepdims=False), grid
    )


def segments(
    function: str,
    batch: Any,
    num_microbatches: int | None,
    microbatch_size: int | None,
) -> tuple[Segment, ...]:
    """The blocks of micro-batches of equal size, in the order in which they run."""
    size = batch_size(function, batch)
    if num_microbatches is not None:
        if num_microbatches > size:
            raise ValueError(
                f"{function}: `num_microbatches` is {num_microbatches}, but the batch has only "
                f"{size} rows. Use at most {size}."
            )
        rows, longer = divmod(size, num_microbatches)
        first = Segment(0, longer, rows + 1)
        second = Segment(longer * (rows + 1), num_microbatches - longer, rows)
    elif microbatch_size is not None:
        number, rest = divmod(size, microbatch_size)
        first = Segment(0, number, microbatch_size)
        second = Segment(number * microbatch_size, 1 if rest else 0, rest)
    else:
        raise ValueError(f"{function}: `num_microbatches` or `microbatch_size` is needed.")
    return tuple(segment for segment in (first, second) if segment.num)


def batch_size(function: str, batch: Any) -> int:
    """The common size of axis 0 of all leaves of `batch`."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError(f"{function}: `batch` has no leaves, so there are no rows to cut.")
    sizes: dict[int, str] = {}
    for path, leaf in leaves:
        name = f"batch{jax.tree_util.keystr(path)}"
        if not checks.is_array(leaf):
            raise TypeError(
                f"{function}: `{name}` must be an array of numbers, got {checks.describe(leaf)}. "
                "Keep texts and objects out of the batch."
            )
        if np.ndim(leaf) == 0:
            raise ValueError(
                f"{function}: every leaf of `batch` is cut along axis 0, but `{name}` is "
                f"{checks.describe(leaf)}. Pass what is not per example in `*args`."
            )
        sizes.setdefault(np.shape(leaf)[0], f"`{name}` ({checks.describe(leaf)})")
    if len(sizes) > 1:
        raise ValueError(
            f"{function}: all leaves of `batch` need the same number of rows, got "
            f"{' and '.join(sizes.values())}."
        )
    (size,) = sizes
    if size == 0:
        raise ValueError(f"{function}: `batch` has zero rows; leave the call out instead.")
    return size


def check_cut(
    function: str, num_microbatches: Any, microbatch_size: Any
) -> tuple[int | None, int | None]:
    """Both options as ints, exactly one of them given."""
    checks.one_of(function, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    if num_microbatches is not None:
        return checks.integer(function, "num_microbatches", num_microbatches), None
    return None, checks.integer(function, "microbatch_size", microbatch_size)


def split(
    batch: Any, *, num_microbatches: int | None = None, microbatch_size: int | None = None
) -> list[Any]:
    """Cuts a batch into the micro-batches that `accumulate` would run, in the same order.

    For training loops that stream micro-batches through `multi_steps`. Of `B` rows,
    `num_microbatches` gives the first `B % num_microbatches` micro-batches one row more,
    `microbatch_size` leaves a shorter last one. The longer ones take the first rows, the shorter
    ones the rest, and each of the two blocks is cut strided: micro-batch `k` of `n` takes the
    block's rows `k`, `k + n`, `k + 2 * n`, …

    Args:
      batch: a tree of arrays with the same size along axis 0.
      num_microbatches: into how many micro-batches to cut; a static int, at most the rows.
      microbatch_size: the rows of each; a static int. Exactly one of the two is given.

    Returns:
      A list of trees like `batch`.

    Raises:
      ValueError: the batch is empty, its leaves disagree, or there are too few rows.

    Example:
      >>> [micro.tolist() for micro in split(jnp.arange(4), num_microbatches=2)]
      [[0, 2], [1, 3]]
      >>> [micro.tolist() for micro in split(jnp.arange(5), num_microbatches=2)]
      [[0, 1, 2], [3, 4]]
    """
    number, size = check_cut("split", num_microbatches, microbatch_size)
    pieces = []
    for segment in segments("split", batch, number, size):
        grid = segment.grid(batch)
        pieces += [micro_batch(grid, index) for index in range(segment.num)]
    return pieces
