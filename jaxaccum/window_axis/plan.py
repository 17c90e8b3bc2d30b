"""The plan: a loss that meets over the window's axis, cut in stages between its meetings."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxaccum.core import labels, primitives, programs
from jaxaccum.window_axis import flattening
from jaxaccum.window_axis.meetings import Meeting

# A value more cheap steps away than this is kept after all: in a residual network the way back to
# the values that are kept anyway grows with every layer.
_REACH = 48


class Stage(NamedTuple):
    """What one micro-batch does between two meetings.

    Attributes:
      effects: equations that are run for what they do, such as `jax.debug.print`.
      outputs: positions of the outputs of the program that are ready here.
      meetings: those that follow.
      stores: the values that later stages read again, one for each micro-batch.
    """

    effects: list[Any]
    outputs: list[int]
    meetings: list[Meeting]
    stores: list[Any]


class Plan:
    """The stages of one flattened program.

    Args:
      function: the public function's name, for messages.
      program: the program, from `flattening.Flattener`; its inputs are the micro-batch's index and
        the flat inputs of the loss.
      keep: which outputs are wanted.
      flattener: the one that made it.
      local: for each flat input whether micro-batches differ in it.
      storage: "store" keeps what crosses a meeting, "recompute" computes it again from the rows.
      effects: whether `jax.debug.print` and its like are run.
    """

    def __init__(
        self,
        function: str,
        program: programs.Program,
        keep: Sequence[bool],
        *,
        flattener: flattening.Flattener,
        local: Sequence[bool],
        storage: str,
        effects: bool = True,
    ):
        self.function = function
        closed = programs.prune(program, keep, reports=effects, whole=True)[0].closed
        self.jaxpr, eqns = closed.jaxpr, closed.jaxpr.eqns
        self.consts = dict(zip(self.jaxpr.constvars, closed.consts, strict=True))
        self.index, *self.inputs = self.jaxpr.invars
        self.outputs = list(self.jaxpr.outvars)
        self.recomputes = storage == "recompute"
        self._made = {v: i for i, e in enumerate(eqns) for v in e.outvars}
        # What is pruned and still has no reader is run for what it does.
        read = {v for v in [*self.outputs, *(v for e in eqns for v in e.invars)] if _is_variable(v)}
        self.effects = [e for e in eqns if read.isdisjoint(e.outvars)]
        # By variable: after how many meetings it is there, and whether micro-batches differ in it.
        self.depth: dict[Any, int] = {}
        self.local: dict[Any, bool] = dict(zip(self.inputs, local, strict=True))
        self.local[self.index] = True
        self._meetings: dict[int, Meeting] = {}
        for number, eqn in enumerate(eqns):
            self._place(number, eqn, flattener)
        self.num_stages = 1 + max(
            [self.depth_of(v) for v in self.outputs]
            + [self.depth_of(v) for e in self.effects for v in e.invars],
            default=0,
        )
        # By variable: the stage that makes it. Values without one, which depend on the inputs
        # alone and which no meeting needs, are made where they are read.
        self.birth: dict[Any, int] = {}
        self._time()
        self.stored: set[Any] = set()
        self.stages = self._cut()

    def _place(self, number: int, eqn: Any, flattener: flattening.Flattener) -> None:
        depth = self._depth(eqn)
        local = any(map(self.is_local, eqn.invars))
        if flattener.use(eqn) == flattening.MEETS:
            differ = tuple(map(self.is_local, eqn.invars))
            meeting = Meeting(eqn, flattener.axis, flattener.size, differ)
            meeting.check(self.function)
            self._meetings[number] = meeting
            depth, local = depth + 1, not meeting.uniform
        for v in eqn.outvars:
            self.depth[v], self.local[v] = depth, local

    def _time(self) -> None:
        """Finds the stage of each value.

        It is that of the first meeting that needs it, or else the first that has what it is made
        of.
        """
        for number in reversed(range(len(self.jaxpr.eqns))):
            eqn = self.jaxpr.eqns[number]
            found = [self.birth[v] for v in eqn.outvars if v in self.birth]
            if number in self._meetings:
                found = [self._depth(eqn)]
            for v in eqn.invars if found else ():
                if _is_variable(v):
                    self.birth[v] = min([*found, self.birth.get(v, self.num_stages)])
        for v in [self.index, *self.inputs]:
            self.birth.pop(v, None)
        for number, eqn in enumerate(self.jaxpr.eqns):
            met = number in self._meetings
            stage = self._depth(eqn) + 1 if met else self._first(eqn.invars)
            if stage is not None:
                for v in eqn.outvars:
                    self.birth[v] = stage if met else self.birth.get(v, stage)

    def _first(self, atoms: Iterable[Any]) -> int | None:
        """The first stage that has values made in other stages; `None` for inputs alone."""
        local = [self.birth.get(v, 0) for v in atoms if self.is_local(v)]
        stage = max([*local, *map(self.depth_of, atoms)], default=0)
        known = any(self.is_local(v) and v in self.birth for v in atoms)
        return stage if stage or known else None

    def _depth(self, eqn: Any) -> int:
        return max(map(self.depth_of, eqn.invars), default=0)

    def _stage_of(self, atoms: Iterable[Any]) -> int:
        """The stage that hands out values: where they are there, or else the last."""
        stage = self._first(list(atoms))
        return self.num_stages - 1 if stage is None else stage

    def depth_of(self, atom: Any) -> int:
        return self.depth.get(atom, 0) if _is_variable(atom) else 0

    def is_local(self, atom: Any) -> bool:
        return _is_variable(atom) and self.local.get(atom, False)

    def is_met(self, v: Any) -> bool:
        """Whether `v` comes out of a meeting."""
        return self._made.get(v) in self._meetings

    def _cut(self) -> list[Stage]:
        """The stages, from the last to the first: what one reads, an earlier one has to keep."""
        stages: list[Stage] = []
        for depth in reversed(range(self.num_stages)):
            effects = [e for e in self.effects if self._stage_of(e.invars) == depth]
            outputs = [i for i, v in enumerate(self.outputs) if self._stage_of([v]) == depth]
            meetings = [
                m
                for m in self._meetings.values()
                if self._depth(m.eqn) == depth and depth + 1 < self.num_stages
            ]
            stores = [v for v in self.stored if self.birth[v] == depth]
            stage = Stage(effects, outputs, meetings, sorted(stores, key=self._made.__getitem__))
            if not self.recomputes:
                self._keep(self.targets(stage, effects=True), depth)
            stages.append(stage)
        return stages[::-1]

    def targets(self, stage: Stage, *, effects: bool = False) -> list[Any]:
        """The values that a stage has to make."""
        atoms = [self.outputs[i] for i in stage.outputs]
        atoms += [v for m in stage.meetings for v in m.eqn.invars]
        atoms += stage.stores
        if effects:
            atoms += [v for e in stage.effects for v in e.invars]
        return list(dict.fromkeys(v for v in atoms if _is_variable(v)))

    def _keep(self, targets: Iterable[Any], depth: int) -> None:
        """Marks what the stage at `depth` reads of earlier ones as stored."""
        seen, queue = set(), list(targets)
        while queue:
            v = queue.pop()
            if v in seen or v not in self._made or self.is_met(v) or v in self.stored:
                seen.add(v)
                if v in self.stored and self.birth[v] == depth:
                    queue += self._parents(v)
                continue
            seen.add(v)
            if self.is_local(v) and self.birth.get(v, depth) < depth:
                self.stored |= self._cheaper(v)
            else:
                queue += self._parents(v)

    def _parents(self, v: Any) -> list[Any]:
        return [u for u in self.jaxpr.eqns[self._made[v]].invars if _is_variable(u)]

    def _cheaper(self, v: Any) -> set[Any]:
        """What to store in the place of `v`: values from which it is cheap, if they are smaller."""
        found, seen, queue, steps = set(), set(), [v], 0
        while queue:
            u = queue.pop()
            if u in seen or u in self.stored or u not in self._made or self.is_met(u):
                continue
            if not self.is_local(u):
                continue
            seen.add(u)
            if steps > _REACH:
                return {v}
            if _is_cheap(self.jaxpr.eqns[self._made[u]]):
                steps += 1
                queue += self._parents(u)
            elif u in self.birth:
                found.add(u)
            else:  # made where it is read, and not cheap
                return {v}
        return found if sum(map(_bytes, found)) <= _bytes(v) else {v}

    def slice(self, targets: Iterable[Any], depth: int) -> tuple[list[Any], list[Any]]:
        """The equations that make `targets` in the stage at `depth`, and what they read.

        Returns:
          Equations in their order, and the inputs, stored values and results of meetings read.
        """
        numbers, reads, seen, queue = set(), [], set(), list(targets)
        while queue:
            v = queue.pop()
            if v in seen or v in self.consts:
                continue
            seen.add(v)
            kept = v in self.stored and self.birth[v] < depth
            if v not in self._made or self.is_met(v) or kept:
                reads.append(v)
                continue
            numbers.add(self._made[v])
            queue += self._parents(v)
        return [self.jaxpr.eqns[i] for i in sorted(numbers)], reads

    def in_order(self, eqns: Iterable[Any]) -> list[Any]:
        """Equations in the order of the program, each once."""
        chosen = {id(eqn) for eqn in eqns}
        return [eqn for eqn in self.jaxpr.eqns if id(eqn) in chosen]

    def carriers(self, differentiated: Sequence[bool], totals: int) -> set[Any]:
        """The variables through which a gradient flows from `differentiated` inputs to a total.

        Args:
          differentiated: a flag for each flat input.
          totals: the first so many outputs are the totals.

        Raises:
          ValueError: it would flow through a `pmax` or `pmin`, which have no derivative.
        """
        flags = [flag or None for flag in (False, *differentiated)]
        moved = labels.follow(self.jaxpr, flags, labels.derived, customs=False).of
        flowing = {v for v in self.outputs[:totals] if _is_variable(v) and moved.get(v)}
        for eqn in reversed(self.jaxpr.eqns):
            if not flowing.isdisjoint(eqn.outvars):
                moving = programs.pick(eqn.invars, labels.inexact(eqn.invars))
                flowing.update(v for v in moving if _is_variable(v) and moved.get(v))
        for meeting in self._meetings.values():
            eqn = meeting.eqn
            if not meeting.differentiable and any(v in flowing for v in eqn.outvars):
                name = eqn.primitive.name
                raise ValueError(
                    f"{self.function}: the gradient goes through `{name}` over `window_axis_name` "
                    f"{meeting.axis!r} (at {programs.where(eqn)}), which has no derivative. Put "
                    f"`jax.lax.stop_gradient` around what goes into it, or take `.max()` of an "
                    "`all_gather`."
                )
        return flowing


def run(eqns: Sequence[Any], env: dict[Any, Any], known: dict[Any, Any]) -> None:
    """Evaluates equations into `env`, which maps variables to values.

    Args:
      eqns: the equations.
      env: the values of what they read.
      known: the values of some of their results, which are not computed again but where a
        derivative needs what they were made of.
    """

    def rule(eqn: Any, values: Sequence[Any]) -> list[Any]:
        pairs = zip(eqn.outvars, programs.bind(eqn, values), strict=True)
        return [_known(known[v], out) if v in known else out for v, out in pairs]

    programs.run(eqns, env, rule)


@jax.custom_jvp
def _known(value: jax.Array, made: jax.Array) -> jax.Array:
    """`value`, with the derivative of `made`, which nobody then has to compute."""
    return value


@_known.defjvp
def _known_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[1]


def read(env: dict[Any, Any], atom: Any) -> Any:
    """The value of a variable, or a constant in the program's text as an array."""
    return env[atom] if _is_variable(atom) else jnp.asarray(atom.val, atom.aval.dtype)


def _is_variable(atom: Any) -> bool:
    return not programs.is_literal(atom)


def _is_cheap(eqn: Any) -> bool:
    inner = programs.called(eqn)
    if inner is not None:
        return all(map(_is_cheap, inner.eqns))
    return programs.has(eqn, primitives.CHEAP)


def _bytes(v: Any) -> int:
    return math.prod(v.aval.shape) * int(getattr(v.aval.dtype, "itemsize", 8))
