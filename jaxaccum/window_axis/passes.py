"""The passes over the stages of a loss that meets over the window's axis.

Forward, one fold over the micro-batches for each stage; backward, from the last stage to the first,
one fold that runs the stage once more with the cotangents of what it had made. The last stage does
both at once, so the window costs two forwards and one backward, whatever the number of stages.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks, programs
from jaxaccum.core.mean import add, wide
from jaxaccum.core.reducers import (
    Addition,
    Concatenation,
    Reducer,
    Stack,
    reducers_of,
)
from jaxaccum.numerics import loss_scaling
from jaxaccum.window.scan import Outcome
from jaxaccum.window_axis import plan, sources
from jaxaccum.window_axis.call import Call
from jaxaccum.window_axis.flattening import Flattener
from jaxaccum.window_axis.meetings import Meeting
from jaxaccum.window_axis.plan import Plan, Stage
from jaxaccum.window_axis.sources import Source


@dataclasses.dataclass(frozen=True, eq=False)
class _Continued(Reducer):
    """A reducer that goes on from the carry of an earlier fold."""

    reducer: Reducer
    carry: Any

    def empty(self, aval: Any) -> Any:
        return self.carry

    def start(self, value: jax.Array) -> Any:
        return self.reducer.fold(self.carry, value)

    def fold(self, carry: Any, value: jax.Array) -> Any:
        return self.reducer.fold(carry, value)

    def keyed(self, key: jax.Array) -> Reducer:
        return dataclasses.replace(self, reducer=self.reducer.keyed(key))


class _Replay(NamedTuple):
    """What the backward pass runs of one stage.

    Attributes:
      seeds: the values whose cotangents come in.
      eqns: the equations that make them.
      reads: the inputs and earlier values that these read.
      moving: those that take a cotangent away.
    """

    seeds: list[Any]
    eqns: list[Any]
    reads: list[Any]
    moving: list[Any]


class Passes:
    """The passes over the stages of one call.

    Args:
      call: the loss and the fold.
      weights_only: whether only the terms' weights are wanted.
    """

    def __init__(self, call: Call, *, weights_only: bool):
        self.call = call
        loss, n = call.loss, call.loss.terms.num_leaves
        loss.weights_fn(call.function, call.differentiated)  # refuses what depends on the params
        self.num_terms = n
        avals = loss.program.closed.out_avals
        flattener = Flattener(call.function, call.axis, call.size)
        self.plan = Plan(
            call.function,
            flattener.flatten(loss.program),
            [not weights_only or n <= i < 2 * n for i in range(len(avals))],
            flattener=flattener,
            local=[i >= call.num_shared for i in range(len(call.differentiated))],
            storage=call.storage,
            effects=not weights_only,
        )
        aux = jax.tree.unflatten(loss.aux_tree, avals[2 * n :])
        sums: list[Reducer] = [Addition()] * (n if weights_only else 2 * n)
        self.reducers = sums if weights_only else sums + jax.tree.leaves(reducers_of(aux))
        self.flowing = set() if weights_only else self.plan.carriers(call.differentiated, n)
        self.outs: dict[int, Any] = {}  # by position: the combined outputs
        self.met: dict[Any, jax.Array] = {}  # by variable: what a meeting gave
        self.kept: dict[Any, jax.Array] = {}  # by variable: stored values, `[num, ...]`
        self._pulls: dict[int, Any] = {}  # by meeting: from cotangents of results to of operands
        self.carries: dict[Any, Any] = {}  # by variable: cotangents summed over micro-batches
        self.stacks: dict[Any, jax.Array] = {}  # by variable: cotangents of each micro-batch
        self._position = {v: i for i, v in enumerate(self.plan.inputs)}

    def outputs(self) -> list[Any]:
        """All wanted outputs, combined by their reducers, once every stage has run."""
        return [self.outs[i] for i in range(len(self.plan.outputs))]

    def forward(self) -> None:
        """Runs every stage, without gradients."""
        for depth in range(len(self.plan.stages)):
            self._fold(depth, None, makes=True)

    def gradients(self, seeds: Sequence[Any] | None) -> list[Any]:
        """Runs every stage forward and backward: the carries of the gradients.

        Args:
          seeds: the cotangent of each total; `None` for 1.

        Returns:
          One for each differentiated flat input; the gradients of rows are concatenated.
        """
        last = len(self.plan.stages) - 1
        for depth in range(last):
            self._fold(depth, None, makes=True)
        wanted = [v for v, d in zip(self.plan.inputs, self.call.differentiated, strict=True) if d]
        replays: list[_Replay] = []
        read: set[Any] = set()
        for depth in reversed(range(last + 1)):
            replays.append(self._replay(depth, read))
            read.update(replays[-1].moving)
        # The gradient of what no total depends on is zero, and is carried as the others are.
        replays[0].moving.extend(v for v in wanted if v not in read)
        for depth, replay in zip(reversed(range(last + 1)), replays, strict=True):
            if replay.moving or depth == last:
                moving = replay if replay.moving else None
                self._fold(depth, moving, makes=depth == last, seeds=seeds)
        return [self.carries[v] if v in self.carries else self.stacks[v] for v in wanted]

    def _replay(self, depth: int, read: set[Any]) -> _Replay:
        """What runs again for the gradients of a stage, of which later ones `read` some values."""
        stage = self.plan.stages[depth]
        atoms = [self.plan.outputs[i] for i in stage.outputs if i < self.num_terms]
        atoms += [v for m in stage.meetings if self._carries_gradient(m) for v in m.eqn.invars]
        atoms += [v for v in stage.stores if v in read]
        seeds = list(dict.fromkeys(v for v in atoms if self._flows(v)))
        eqns, reads = self.plan.slice(seeds, depth)
        return _Replay(seeds, eqns, reads, [v for v in reads if v in self.flowing])

    def _flows(self, atom: Any) -> bool:
        return not programs.is_literal(atom) and atom in self.flowing

    # One stage

    def _fold(self, depth: int, replay: _Replay | None, *, makes: bool, seeds: Any = None) -> None:
        """One fold over the micro-batches.

        Args:
          depth: the number of the stage.
          replay: what of it is differentiated; `None` for nothing.
          makes: whether it makes its values, or only gradients of values that were made before.
          seeds: the cotangent of each total.
        """
        stage = self.plan.stages[depth]
        eqns, reads = self.plan.slice(self.plan.targets(stage, effects=True), depth)
        eqns = self.plan.in_order([*eqns, *stage.effects])
        if replay and not makes:
            eqns, reads = replay.eqns, replay.reads
        given = self._sources(stage, seeds) if replay else {}

        def micro_fn(index: Any, rows: Any) -> Outcome:
            env = self._environment(index, rows, reads)
            known = {v: sources.entry(self.kept[v], index) for v in stage.stores if v in self.kept}

            def body(values: list[Any]) -> Any:
                inner = env | dict(zip(replay.moving if replay else [], values, strict=True))
                plan.run(eqns, inner, known)
                made = self._made(stage, inner) if makes else None
                return [inner[v] for v in replay.seeds] if replay else [], made

            if replay is None:
                return Outcome({"made": body([])[1]})
            start = [env[v] for v in replay.moving]
            outs, pull, made = jax.vjp(body, start, has_aux=True)
            cotangents = [
                functools.reduce(add, [s(index) for s in given[v]]).astype(out.dtype)
                for v, out in zip(replay.seeds, outs, strict=True)
            ]
            moved = self._moved(replay.moving, pull(cotangents)[0], index)
            key = self.call.key_fn(index)
            if key is not None:
                key = jax.random.fold_in(key, depth)
            return Outcome({"made": made, "moved": moved}, key=key)

        def reducers_fn(values: Any) -> Any:
            found: dict[str, Any] = {"made": self._makers(stage) if makes else None}
            if replay:
                found["moved"] = [self._mover(v) for v in replay.moving]
            return found

        values = self.call.fold_fn(micro_fn, reducers_fn)
        if replay:
            self._file(replay.moving, values["moved"])
        if makes:
            self._receive(stage, values["made"])

    def _environment(self, index: Any, rows: Any, reads: Sequence[Any]) -> dict[Any, Any]:
        """What one micro-batch finds: inputs, and of earlier values those that it `reads`."""
        flat = self.call.inputs_fn(index, rows)
        own = self.plan
        env = {**own.consts, own.index: index, **dict(zip(own.inputs, flat, strict=True))}
        for v in reads:
            if v in self.kept or v in self.met:
                value = self.kept[v] if v in self.kept else self.met[v]
                env[v] = sources.entry(value, index) if own.is_local(v) else value
        return env

    def _made(self, stage: Stage, env: dict[Any, Any]) -> dict[str, Any]:
        """What a stage hands on, from the values of one micro-batch."""
        return {
            "outs": [plan.read(env, self.plan.outputs[i]) for i in stage.outputs],
            "met": [[plan.read(env, v) for v in m.eqn.invars] for m in stage.meetings],
            "kept": [env[v] for v in stage.stores],
        }

    def _makers(self, stage: Stage) -> dict[str, Any]:
        """The reducers of `_made`."""
        return {
            "outs": [self.reducers[i] for i in stage.outputs],
            "met": [m.reducers() for m in stage.meetings],
            "kept": [Stack()] * len(stage.stores),
        }

    def _receive(self, stage: Stage, made: dict[str, Any]) -> None:
        """Files what a stage has made, and holds its meetings."""
        self.outs.update(zip(stage.outputs, made["outs"], strict=True))
        self.kept.update(zip(stage.stores, made["kept"], strict=True))
        for meeting, operands in zip(stage.meetings, made["met"], strict=True):
            if self._carries_gradient(meeting):
                values, self._pulls[id(meeting)] = meeting.combine_with_pull(operands)
            else:
                values = meeting.combine(operands)
            self.met.update(zip(meeting.eqn.outvars, values, strict=True))

    def _carries_gradient(self, meeting: Meeting) -> bool:
        return any(v in self.flowing for v in meeting.eqn.outvars)

    # Cotangents

    def _sources(self, stage: Stage, seeds: Sequence[Any] | None) -> dict[Any, list[Source]]:
        """By value: where its cotangent comes from, after all later stages have run backward."""
        found: dict[Any, list[Source]] = {}

        def add_source(v: Any, source: Source) -> None:
            if self._flows(v):
                found.setdefault(v, []).append(source)

        for i in stage.outputs:
            if i < self.num_terms:
                one = jnp.ones((), self.plan.outputs[i].aval.dtype)
                seed = one if seeds is None else seeds[i]
                if self.call.scale is not None:
                    seed = loss_scaling.scaled(seed, self.call.scale)
                add_source(self.plan.outputs[i], sources.whole(seed))
        for v in stage.stores:
            if v in self.stacks:
                add_source(v, sources.each(self.stacks[v]))
        for meeting in stage.meetings:
            if self._carries_gradient(meeting):
                for v, source in zip(meeting.eqn.invars, self._pulled(meeting), strict=True):
                    add_source(v, source)
        return found

    def _pulled(self, meeting: Meeting) -> list[Source]:
        """The cotangents of a meeting's operands."""
        cotangents = [self._cotangent(v) for v in meeting.eqn.outvars]
        (operands,) = self._pulls.pop(id(meeting))(cotangents)

        return [sources.combined(c, r) for c, r in zip(operands, meeting.reducers(), strict=True)]

    def _cotangent(self, v: Any) -> Any:
        """The cotangent of a meeting's result, in its own type."""
        value = self.met[v]
        if not checks.is_inexact(value):
            return np.zeros(value.shape, jax.dtypes.float0)
        found = self.carries.get(v, self.stacks.get(v))
        return jnp.zeros_like(value) if found is None else found.astype(value.dtype)

    def _moved(self, moving: Sequence[Any], values: Sequence[Any], index: Any) -> list[Any]:
        """One micro-batch's cotangents, in the form in which the fold takes them."""
        moved = []
        for v, value in zip(moving, values, strict=True):
            if v in self._position and self.call.scale is not None:
                value = loss_scaling.unscale(value, self.call.scale)
            shard = self._shard(v)
            if shard is not None:
                value = shard.scatter_here(value.astype(wide(value.dtype)), self.call.wire)
            elif v in self.stacks and not self._is_row(v):
                value = add(value, sources.entry(self.stacks[v], index))
            moved.append(value)
        return moved

    def _mover(self, v: Any) -> Reducer:
        """How the cotangents of `v` are brought together."""
        if self.plan.is_local(v):
            return Concatenation() if self._is_row(v) else Stack()
        position = self._position.get(v)
        reducer = Addition() if position is None else self.call.accumulator
        return _Continued(reducer, self.carries[v]) if v in self.carries else reducer

    def _file(self, moving: Sequence[Any], values: Sequence[Any]) -> None:
        for v, value in zip(moving, values, strict=True):
            if not self.plan.is_local(v):
                self.carries[v] = value
            elif self._is_row(v) and v in self.stacks:
                self.stacks[v] = add(self.stacks[v], value)
            else:
                self.stacks[v] = value

    def _is_row(self, v: Any) -> bool:
        return v in self._position

    def _shard(self, v: Any) -> Any:
        """The part of a parameter's gradient that stays on this device, in the loop."""
        position = self._position.get(v)
        return None if position is None or self.plan.is_local(v) else self.call.shards[position]
