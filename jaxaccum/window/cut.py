"""Cutting a batch into micro-batches: exact for every size, without moving sharded rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from jaxaccum.core import checks, compat
from jaxaccum.devices import shards
from jaxaccum.window import refusals


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

        stop = self.start + self.num * self.rows

        def reshape(leaf: jax.Array) -> jax.Array:
            if (self.start, stop) != (0, leaf.shape[0]):
                leaf = lax.slice_in_dim(leaf, self.start, stop)
            return leaf.reshape((self.rows, self.num, *leaf.shape[1:]))

        def cut(leaf: Any) -> jax.Array:
            leaf = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
            spec = compat.spec_of(leaf)
            over = shards.names_in(spec[0]) if len(spec) else ()
            if not over:
                return reshape(leaf)
            mesh = jax.typeof(leaf).sharding.mesh
            number = math.prod(mesh.shape[name] for name in over)
            even = (self.start, stop) == (0, leaf.shape[0]) and not self.rows % number
            # Rows that are typed as split are so in each micro-batch, or not at all.
            kept = jax.sharding.PartitionSpec(spec[0] if even else None, None, *spec[1:])
            axes = shards.axes_in(spec)
            return jax.sharding.auto_axes(reshape, axes=axes, out_sharding=kept)(leaf)

        return jax.tree.map(cut, batch)


def micro_batch(grid: Any, index: Any) -> Any:
    """Micro-batch `index` of a grid from `Segment.grid`: leaves `[rows, ...]`."""
    return jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(leaf, index, axis=1, keepdims=False), grid
    )


def segments(
    function: str,
    size: int,
    num_microbatches: int | None,
    microbatch_size: int | None,
) -> tuple[Segment, ...]:
    """The blocks of micro-batches of equal size, in the order in which they run.

    Args:
      function: the public function's name, for messages.
      size: the rows of the batch.
      num_microbatches: into how many micro-batches they are cut.
      microbatch_size: the rows of each. Exactly one of the two is given.
    """
    if export.is_symbolic_dim(size):
        number, each = _check_symbolic(function, size, num_microbatches, microbatch_size)
        return (Segment(0, number, each),)
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


def _check_symbolic(
    function: str, size: Any, num_microbatches: int | None, microbatch_size: int | None
) -> tuple[Any, Any]:
    """Number and size of the micro-batches of a batch whose size is a symbol of `jax.export`."""
    parts = num_microbatches or microbatch_size
    rest = size % parts
    if export.is_symbolic_dim(rest) or rest:
        name = "num_microbatches" if num_microbatches else "microbatch_size"
        raise ValueError(
            f"{function}: the batch has the symbolic number of rows {size}, which does not "
            f"certainly divide by `{name}`, {parts}, and only an even cut is the same program for "
            f'every size. Export it with a multiple, `jax.export.symbolic_shape("{parts}*n")`.'
        )
    other = size // parts
    return (parts, other) if num_microbatches else (other, parts)


def common_rows(function: str, trees: dict[str, Any]) -> int:
    """The common size of axis 0 of all leaves.

    Args:
      function: the public function's name, for messages.
      trees: what is cut, by its name in messages.
    """
    names = " and ".join(f"`{name}`" for name in trees)
    leaves = [
        (name + jax.tree_util.keystr(path), leaf)
        for name, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    if not leaves:
        raise ValueError(f"{function}: {names} has no leaves, so there are no rows to cut.")
    sizes: dict[int, str] = {}
    for name, tree in trees.items():
        checks.concrete(function, tree, name=name)
    for name, leaf in leaves:
        checks.usable(function, name, leaf)
        if not checks.is_array(leaf):
            raise TypeError(
                f"{function}: `{name}` must be an array of numbers, got {checks.describe(leaf)}. "
                "Keep texts and objects out of the batch."
            )
        if np.ndim(leaf) == 0:
            raise ValueError(
                f"{function}: every leaf of {names} is cut along axis 0, but `{name}` is "
                f"{checks.describe(leaf)}. Pass what is not per example in `*args`."
            )
        sizes.setdefault(np.shape(leaf)[0], f"`{name}` ({checks.describe(leaf)})")
    if len(sizes) > 1:
        raise ValueError(
            f"{function}: all leaves of {names} need the same number of rows, got "
            f"{' and '.join(sizes.values())}."
        )
    (size,) = sizes
    if size == 0:
        raise ValueError(f"{function}: {names} has zero rows; leave the call out instead.")
    return size


_REMEDY = (
    "Pass plain arrays, with their rows along axis 0, and make such objects of them in the loss "
    "function."
)


def rebuilt(function: str, tree: Any, leaves: Sequence[Any]) -> Any:
    """The tree around the rows of a micro-batch.

    Raises:
      TypeError: a node of the tree does not accept arrays of another shape.
    """
    try:
        return jax.tree.unflatten(tree, leaves)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise TypeError(
            f"{function}: the batch holds a `{_refusing(tree, leaves)}`, which does not accept "
            f"the rows of one micro-batch in place of its arrays: {reason} {_REMEDY}"
        ) from error


def check_rows(function: str, batch: Any, rows: int) -> None:
    """Requires that array-like nodes, made of arrays, have as many rows as these.

    Named arrays keep the shape of the whole beside arrays that were cut; sparse ones have another.
    """
    for node in jax.tree.leaves(batch, is_leaf=lambda x: _own_shape(x) is not None):
        shape = _own_shape(node)
        if shape is not None and shape[0] != rows:
            raise TypeError(
                f"{function}: the batch holds a `{type(node).__name__}` that says it has the shape "
                f"{shape} where its arrays have {rows} rows, so it cannot be cut. {_REMEDY}"
            )


def _own_shape(x: Any) -> tuple[Any, ...] | None:
    """The shape that an array-like node of a tree says it has; `None` for anything else."""
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return None
    shape, axes = getattr(x, "shape", None), getattr(x, "axes", None)
    if isinstance(shape, tuple) and hasattr(x, "dtype") and hasattr(x, "ndim"):
        return shape or None
    if isinstance(axes, tuple) and all(hasattr(a, "name") and hasattr(a, "size") for a in axes):
        return tuple(axis.size for axis in axes) or None
    return None


def _refusing(tree: Any, leaves: Sequence[Any]) -> str:
    """The type of the innermost node that cannot be made of `leaves`."""
    rest = list(leaves)
    for child in tree.children():
        own, rest = rest[: child.num_leaves], rest[child.num_leaves :]
        try:
            jax.tree.unflatten(child, own)
        except Exception:
            return _refusing(child, own)
    return str(tree.node_data()[0].__name__)


# The options of a cut, none of which was given.
NONE: dict[str, Any] = {"num_microbatches": None, "microbatch_size": None}


def checked_cut(function: str, options: Mapping[str, Any]) -> dict[str, int | None]:
    """The two options of a cut as ints, of which `refusals` lets pass exactly one."""
    return {
        name: None if options.get(name) is None else checks.integer(function, name, options[name])
        for name in NONE
    }


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
    options = {"num_microbatches": num_microbatches, "microbatch_size": microbatch_size}
    refusals.check("split", options)
    chosen = checked_cut("split", options)
    leaves, tree = jax.tree.flatten(batch)
    rows = common_rows("split", {"batch": batch})
    check_rows("split", batch, rows)
    pieces = []
    for segment in segments("split", rows, **chosen):
        grid = segment.grid(leaves)
        pieces += [micro_batch(grid, index) for index in range(segment.num)]
    made = [rebuilt("split", tree, piece) for piece in pieces]
    for micro, piece in zip(made, pieces, strict=True):
        check_rows("split", micro, piece[0].shape[0])
    return made
