"""The fold over the micro-batches of a window: the one loop of the library."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxaccum.core import checks, in_place, programs
from jaxaccum.core.reducers import Concatenation, Reducer
from jaxaccum.window import cut
from jaxaccum.window.backward import Backward, Sums
from jaxaccum.window.micro_loop import Loop, State


class Outcome(NamedTuple):
    """What one micro-batch hands to the fold.

    Attributes:
      values: a tree of arrays; the function's reducers say how each leaf is combined.
      keep: whether its carried values count; a boolean scalar, or `None` for always.
      key: a PRNG key for accumulators that need one, or `None`.
      thread: what the next micro-batch receives, where the fold threads something.
      backward: the backward pass, where the fold runs it.
    """

    values: Any
    keep: jax.Array | None = None
    key: jax.Array | None = None
    thread: Sequence[jax.Array] = ()
    backward: Backward | None = None


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
    sums: Sums | None = None,
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
      sums: how the gradients of `Outcome.backward` are summed; their carries are the first ones.
      function: the public function's name, for messages.

    Returns:
      The tree of values, with carries in place of the leaves that are carried; with `thread` a
      pair of it and the arrays that the last micro-batch left; with `sums` a pair of the list of
      gradient carries and all that.
    """
    loops, leaves, shapes, offset = [], [], None, 0
    reducers: list[Reducer] = []
    for segment in segments:
        own, grid_tree = jax.tree.flatten(segment.grid(batch))

        def run(index: Any, threads: Any, *flat: Any, grid_tree: Any = grid_tree) -> Outcome:
            rows = cut.micro_batch(jax.tree.unflatten(grid_tree, flat), index[0])
            extra = () if thread is None else (threads,)
            return micro_fn(index[0] + index[1], rows, *extra)

        staged = programs.stage(run, (jnp.int32(0), jnp.int32(0)), list(thread or ()), *own)
        reducers = jax.tree.leaves(reducers_fn(staged.out_shape.values))
        if shapes is not None:
            _check_alike(function, shapes, staged.out_shape.values, reducers)
        shapes = staged.out_shape.values
        last = peel and segment is segments[-1]
        loops.append(Loop(staged, segment.num, offset, reducers, unroll, sums, last))
        leaves.append(own)
        offset += segment.num
    first = State(leaves, list(thread or ()), num_real, list(start))
    combined, threads = _fold_all(loops, first, writes=sums is not None and any(sums.in_place))
    grads = combined[: len(combined) - len(reducers)]
    values = jax.tree.unflatten(jax.tree.structure(shapes), combined[len(grads) :])
    result = values if thread is None else (values, threads)
    return result if sums is None else (grads, result)


def _fold_all(loops: Sequence[Loop], state: State, *, writes: bool) -> tuple[list[Any], list[Any]]:
    """The combined gradients and values of all segments, and what the last micro-batch left."""
    if not writes:
        return _evaluate(loops, state, writes=False)
    # What the micro-steps close over is passed to them, so that they can be run in another trace.
    consts = {id(c): c for loop in loops for c in loop.staged.closed.consts}
    places = {key: i for i, key in enumerate(consts)}
    used = [[places[id(c)] for c in loop.staged.closed.consts] for loop in loops]
    pairs = list(zip(loops, used, strict=True))
    free = [loop._replace(staged=loop.staged.with_consts([None] * len(u))) for loop, u in pairs]
    flat, tree = jax.tree.flatten((list(consts.values()), state))
    flat = [jnp.asarray(x) for x in flat]
    shape: list[Any] = []

    def run(*flat: Any, writes: bool) -> list[Any]:
        every, own = jax.tree.unflatten(tree, flat)
        bound = [
            loop._replace(staged=loop.staged.with_consts([every[i] for i in places]))
            for loop, places in zip(free, used, strict=True)
        ]
        outs, structure = jax.tree.flatten(_evaluate(bound, own, writes=writes))
        shape[:] = [structure]
        return outs

    outs = in_place.run(lambda *x: run(*x, writes=True), lambda *x: run(*x, writes=False), *flat)
    return jax.tree.unflatten(shape[0], outs)


def _evaluate(loops: Sequence[Loop], state: State, *, writes: bool) -> tuple[list[Any], list[Any]]:
    sums, carry, threads, pieces = loops[0].sums, None, state.threads, []
    buffers: list[Any] = []
    if sums is not None:
        written = [here and writes for here in sums.in_place]
        buffers = sums.buffers(state.start, written)
        rest = [*state.start, *[None] * (len(written) - len(state.start))]
        state = state._replace(start=[x for x, w in zip(rest, written, strict=True) if not w])
    for loop, leaves in zip(loops, state.leaves, strict=True):
        carry, threads, ys = loop.run(carry, threads, leaves, state, buffers)
        pieces.append(ys)
    carried, stacks = iter(carry or ()), iter(zip(*pieces, strict=True))
    combined = [next(carried) if buffer is None else jax.freeze(buffer) for buffer in buffers]
    combined += [r.gather(next(stacks)) if r.emits else next(carried) for r in loops[-1].reducers]
    return combined, threads


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
