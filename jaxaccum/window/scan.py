"""The fold over the micro-batches of a window: the one loop of the library."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxaccum.core import checks, compat, programs
from jaxaccum.core.leaves import leafwise
from jaxaccum.core.reducers import Concatenation, Reducer, joined
from jaxaccum.window import cut


class Outcome(NamedTuple):
    """What one micro-batch hands to the fold.

    Attributes:
      values: a tree of arrays; the function's reducers say how each leaf is combined.
      keep: whether its carried values count; a boolean scalar, or `None` for always.
      key: a PRNG key for accumulators that need one, or `None`.
      thread: what the next micro-batch receives, where the fold threads something.
    """

    values: Any
    keep: jax.Array | None = None
    key: jax.Array | None = None
    thread: Sequence[jax.Array] = ()


def fold(
    micro_fn: Callable[..., Outcome],
    batch: Any,
    segments: Sequence[cut.Segment],
    reducers_fn: Callable[[Any], Any],
    *,
    num_real: Any = None,
    unroll: int | bool = 1,
    peel: bool = False,
    thread: Sequence[jax.Array] | None = None,
    start: Sequence[Any] = (),
    function: str = "accumulate",
) -> Any:
    """Runs `micro_fn(index, rows)` on every micro-batch and combines its values.

    The function is traced once for each segment, that is for each micro-batch shape. The first
    result starts the carry where nothing loops over it, so a window of one micro-batch has neither
    a loop nor a buffer of zeros.

    Args:
      micro_fn: from the micro-batch's int32 index and its rows to an `Outcome`.
      batch: a tree of arrays, rows along axis 0.
      segments: from `cut.segments`.
      reducers_fn: from the tree of values (shapes and dtypes) to the tree of their reducers.
      num_real: how many of the micro-batches run, the first ones; may be traced. `None`: all.
      unroll: as in `jax.lax.scan`.
      peel: whether the last micro-batch stands outside of the loop, where all of them run.
      thread: arrays that `micro_fn` receives as a third argument, each micro-batch those that the
        one before it returned as `Outcome.thread`.
      start: what the first carries begin with, in their order, `None` where one begins empty.
      function: the public function's name, for messages.

    Returns:
      The tree of values, with carries in place of the leaves that are carried; with `thread` a
      pair of it and the arrays that the last micro-batch left.
    """
    threads = list(thread or ())
    carry: list[Any] | None = None
    emitted: list[list[jax.Array]] = []
    reducers: list[Reducer] = []
    shapes, offset = None, 0
    for segment in segments:
        leaves, grid_tree = jax.tree.flatten(segment.grid(batch))

        def run(index: Any, threads: Any, *flat: Any, grid_tree: Any = grid_tree) -> Outcome:
            rows = cut.micro_batch(jax.tree.unflatten(grid_tree, flat), index[0])
            extra = () if thread is None else (threads,)
            return micro_fn(index[0] + index[1], rows, *extra)

        staged = programs.stage(run, (jnp.int32(0), jnp.int32(0)), threads, *leaves)
        reducers = jax.tree.leaves(reducers_fn(staged.out_shape.values))
        if shapes is not None:
            _check_alike(function, shapes, staged.out_shape.values, reducers)
        shapes = staged.out_shape.values
        guarded = staged.out_shape.keep is not None
        keyed = staged.out_shape.key is not None
        body = _Body(staged, leaves, offset, reducers, guarded, keyed)
        if carry is None and start:
            pairs = itertools.zip_longest(start, body.empty())
            carry = [empty if given is None else given for given, empty in pairs]
        rest = int(num_real is None and (segment.num == 1 or (peel and segment is segments[-1])))
        runs: list[list[jax.Array]] = []
        if segment.num > rest:
            if carry is None:
                carry = body.empty()
            number = segment.num - rest
            (carry, threads), pieces = body.loop((carry, threads), number, num_real, unroll)
            runs.append(pieces)
        if rest:
            (carry, threads), pieces = body.once(carry, threads, segment.num - 1)
            runs.append(pieces)
        emitted.append([joined(parts) for parts in zip(*runs, strict=True)])
        offset += segment.num
    carried = iter(carry or [])
    stacks = iter(zip(*emitted, strict=True))
    results = [
        reducer.gather(next(stacks)) if reducer.emits else next(carried) for reducer in reducers
    ]
    combined = jax.tree.unflatten(jax.tree.structure(shapes), results)
    return combined if thread is None else (combined, threads)


def _check_alike(function: str, first: Any, second: Any, reducers: Sequence[Reducer]) -> None:
    """Micro-batches of different size must agree in all that is not per example."""
    if not checks.same_tree(first, second):
        raise ValueError(
            f"{function}: the outputs have the structure "
            f"{jax.tree.structure(first)} for one micro-batch size and "
            f"{jax.tree.structure(second)} for another. Return the same structure for both."
        )
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second), reducers, strict=True
    )
    for (path, a), b, reducer in pairs:
        if isinstance(reducer, Concatenation):
            alike = a.shape[1:] == b.shape[1:] and a.dtype == b.dtype
        else:
            alike = a.shape == b.shape and a.dtype == b.dtype
        if not alike:
            raise ValueError(
                f"{function}: output {jax.tree_util.keystr(path)} is {checks.describe(a)} for one "
                f"micro-batch size and {checks.describe(b)} for another, so it cannot be combined. "
                "Wrap per-example outputs in `ja.Concat`, sums in `ja.Sum`, or let the batch "
                "divide evenly."
            )


class _Body(NamedTuple):
    """The micro-step of one segment."""

    staged: programs.Program
    leaves: list[jax.Array]
    offset: int
    reducers: list[Reducer]
    guarded: bool
    keyed: bool

    def _run(self, index: Any, threads: list[Any]) -> "_Result":
        outs = self.staged(index, jnp.int32(self.offset), *threads, *self.leaves)
        threads = [outs.pop() for _ in threads][::-1]
        key = outs.pop() if self.keyed else None
        keep = outs.pop() if self.guarded else None
        carried = [v for v, r in zip(outs, self.reducers, strict=True) if not r.emits]
        emitted = [v for v, r in zip(outs, self.reducers, strict=True) if r.emits]
        reducers = self._carriers()
        if key is not None:
            reducers = [r.keyed(jax.random.fold_in(key, i)) for i, r in enumerate(reducers)]
        return _Result(carried, reducers, emitted, keep, threads)

    def _carriers(self) -> list[Reducer]:
        return [r for r in self.reducers if not r.emits]

    def _avals(self, *, emits: bool) -> list[Any]:
        avals = self.staged.closed.out_avals[: len(self.reducers)]
        return [a for a, r in zip(avals, self.reducers, strict=True) if r.emits == emits]

    def empty(self) -> list[Any]:
        known: dict[Any, Any] = {}  # leaves of one type share their zeros
        pairs = list(zip(self._carriers(), self._avals(emits=False), strict=True))
        for pair in pairs:
            if pair not in known:
                known[pair] = pair[0].empty(pair[1])
        return [known[pair] for pair in pairs]

    def once(
        self, carry: list[Any] | None, threads: list[Any], index: int
    ) -> tuple[Any, list[jax.Array]]:
        """One micro-batch without a loop."""
        result = self._run(jnp.int32(index), threads)
        if carry is None and result.keep is None:
            carry = leafwise([r.start for r in result.reducers], result.carried)
            state = carry, result.threads
        else:
            state = result.fold(self.empty() if carry is None else carry, threads)
        return state, [y[None] for y in result.emitted]

    def loop(
        self, state: Any, num: int, num_real: Any, unroll: int | bool
    ) -> tuple[Any, list[jax.Array]]:
        def step(state: Any, index: Any) -> tuple[Any, list[Any]]:
            carry, threads = state
            result = self._run(index, threads)
            return result.fold(carry, threads), result.emitted

        if num_real is None:
            return lax.scan(step, state, jnp.arange(num, dtype=jnp.int32), unroll=unroll)

        # A trip count that is data cannot be a scan: the same step under `fori_loop`, which
        # writes what a scan would have stacked.
        def write(index: Any, held: Any) -> Any:
            state, buffers = held
            index = jnp.asarray(index, jnp.int32)
            state, emitted = step(state, index)
            buffers = [
                lax.dynamic_update_index_in_dim(b, y, index, axis=0)
                for b, y in zip(buffers, emitted, strict=True)
            ]
            return state, buffers

        avals = self._avals(emits=True)
        buffers = [
            jnp.broadcast_to(compat.filled(aval, aval.dtype), (num, *aval.shape)) for aval in avals
        ]
        trips = jnp.clip(jnp.asarray(num_real, jnp.int32) - self.offset, 0, num)
        return lax.fori_loop(0, trips, write, (state, buffers))


class _Result(NamedTuple):
    """What one micro-step has made: values to carry, their reducers, values to emit."""

    carried: list[Any]
    reducers: list[Reducer]
    emitted: list[Any]
    keep: Any
    threads: list[Any]

    def fold(self, carry: list[Any], threads: list[Any]) -> tuple[list[Any], list[Any]]:
        """The carry with this micro-step in it, and what the next one receives."""
        folded = leafwise([r.fold for r in self.reducers], carry, self.carried)
        if self.keep is None:
            return folded, self.threads
        # Selected, not multiplied: a nan in a dropped micro-batch reaches nothing.
        new, tree = jax.tree.flatten((folded, self.threads))
        old = jax.tree.leaves((carry, threads))
        return jax.tree.unflatten(tree, leafwise(_chosen, new, old, shared=(self.keep,)))


def _chosen(new: jax.Array, old: jax.Array, keep: jax.Array) -> jax.Array:
    return jnp.where(keep, new, old)
