"""The micro-steps of one segment: run once, in a loop, or as often as data say."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxaccum.core import compat, programs
from jaxaccum.core.leaves import leafwise
from jaxaccum.core.reducers import Reducer, joined
from jaxaccum.window.backward import Sums


class State(NamedTuple):
    """The arrays that a fold starts from.

    Attributes:
      leaves: the rows of each segment, as grids.
      threads: what the first micro-batch receives.
      num_real: how many micro-batches run; `None`: all.
      start: what the first carries begin with, `None` where one begins empty.
    """

    leaves: list[list[Any]]
    threads: list[Any]
    num_real: Any
    start: list[Any]


class Loop(NamedTuple):
    """The micro-step of one segment, staged.

    Attributes:
      staged: from the index in the segment, its offset, the threads and the grids to an `Outcome`.
      num: how many micro-batches the segment has.
      offset: how many come before it.
      reducers: of the outcome's values.
      unroll: as in `jax.lax.scan`.
      sums: how the gradients are summed, where the fold runs the backward pass.
      peel: whether the last micro-batch stands behind the loop.
    """

    staged: programs.Program
    num: int
    offset: int
    reducers: list[Reducer]
    unroll: int | bool
    sums: Sums | None
    peel: bool = False

    def run(
        self,
        carry: list[Any] | None,
        threads: list[Any],
        leaves: list[Any],
        state: State,
        buffers: Sequence[Any],
    ) -> tuple[list[Any], list[Any], list[jax.Array]]:
        """The carry after the segment, what its last micro-batch left, and what all emitted.

        Args:
          carry: what the segments before it hold; `None` for the first.
          threads: what its first micro-batch receives.
          leaves: its rows.
          state: what the fold started from.
          buffers: where gradients are written, `None` for those that are carried.
        """
        body = _Body(self, leaves, buffers)
        if carry is None and any(x is not None for x in state.start):
            pairs = itertools.zip_longest(state.start, body.empty())
            carry = [empty if given is None else given for given, empty in pairs]
        rest = int(state.num_real is None and (self.num == 1 or self.peel))
        runs: list[list[jax.Array]] = []
        if self.num > rest:
            carry = body.empty() if carry is None else carry
            (carry, threads), ys = body.loop((carry, threads), self.num - rest, state.num_real)
            runs.append(ys)
        if rest:
            (carry, threads), ys = body.once(carry, threads, self.num - 1)
            runs.append(ys)
        return carry or [], threads, [joined(parts) for parts in zip(*runs, strict=True)]


class _Body(NamedTuple):
    """The micro-step of one segment on its rows."""

    of: Loop
    leaves: list[jax.Array]
    buffers: Sequence[Any]

    def _run(self, index: Any, threads: list[Any]) -> "_Result":
        shape, of = self.of.staged.out_shape, self.of
        outs = self.of.staged(index, jnp.int32(of.offset), *threads, *self.leaves)
        outcome = jax.tree.unflatten(jax.tree.structure(shape), outs)
        values, grads = outs[: len(of.reducers)], []
        if of.sums is not None:
            grads = of.sums.run(outcome.backward, self.buffers)
        carried = [v for v, r in zip(values, of.reducers, strict=True) if not r.emits]
        emitted = [v for v, r in zip(values, of.reducers, strict=True) if r.emits]
        reducers = self._carriers()
        if outcome.key is not None:
            keys = (jax.random.fold_in(outcome.key, i) for i in range(len(reducers)))
            reducers = [r.keyed(key) for r, key in zip(reducers, keys, strict=True)]
        return _Result([*grads, *carried], reducers, emitted, outcome.keep, list(outcome.thread))

    def _sums(self) -> list[tuple[Reducer, Any]]:
        """The reducers and types of the gradients that are carried."""
        sums = self.of.sums
        pairs = [] if sums is None else zip(sums.reducers, sums.types, strict=True)
        return [p for p, buffer in zip(pairs, self.buffers, strict=True) if buffer is None]

    def _carriers(self) -> list[Reducer]:
        return [*[r for r, _ in self._sums()], *[r for r in self.of.reducers if not r.emits]]

    def _avals(self, *, emits: bool) -> list[Any]:
        avals = self.of.staged.closed.out_avals[: len(self.of.reducers)]
        return [a for a, r in zip(avals, self.of.reducers, strict=True) if r.emits == emits]

    def empty(self) -> list[Any]:
        known: dict[Any, Any] = {}  # leaves of one type share their zeros
        avals = [*[kind for _, kind in self._sums()], *self._avals(emits=False)]
        pairs = list(zip(self._carriers(), avals, strict=True))
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

    def loop(self, state: Any, num: int, num_real: Any) -> tuple[Any, list[jax.Array]]:
        def step(state: Any, index: Any) -> tuple[Any, list[Any]]:
            carry, threads = state
            result = self._run(index, threads)
            return result.fold(carry, threads), result.emitted

        if num_real is None:
            return lax.scan(step, state, jnp.arange(num, dtype=jnp.int32), unroll=self.of.unroll)

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
        trips = jnp.clip(jnp.asarray(num_real, jnp.int32) - self.of.offset, 0, num)
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
