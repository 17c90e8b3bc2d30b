"""Flattening: a loss rewritten until it meets on its outermost level, where it can be cut."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxaccum.core import labels, primitives, programs

# How an equation uses the axis: not at all, only to ask which micro-batch this is, or to meet the
# other micro-batches.
NOT, INDEX, MEETS = 0, 1, 2


class Flattener:
    """Rewrites a program until it uses the axis only on its outermost level.

    `jit`, `checkpoint` and loops over layers (`scan`) that hold a collective over the axis are
    opened, a `scan` step by step. A custom derivative stays whole, so that its rule is kept.
    `axis_index` becomes an input.

    Args:
      function: the public function's name, for messages.
      axis: the name of the axis.
      size: the number of micro-batches.
    """

    def __init__(self, function: str, axis: str, size: int):
        self.function, self.axis, self.size = function, axis, size
        self._known: dict[int, tuple[Any, int]] = {}

    def flatten(self, program: programs.Program) -> programs.Program:
        """The program with one more input before the others: the int32 micro-batch's index."""

        def flat_fn(index: Any, *flat: Any) -> list[Any]:
            return self._evaluate(program.closed, flat, index)

        return programs.stage(
            flat_fn, jnp.int32(0), *program.closed.in_avals, axis_env=program.axis_env
        )

    def use(self, eqn: Any) -> int:
        """How `eqn` uses the axis, at any depth: `NOT`, `INDEX` or `MEETS`."""
        if id(eqn) not in self._known:
            found = self._use(eqn, rules=True)
            self._known[id(eqn)] = (eqn, found)  # the equation too, so that none takes its id
        return self._known[id(eqn)][1]

    def _use(self, eqn: Any, *, rules: bool) -> int:
        if self.axis in programs.axes_of(eqn):
            return INDEX if eqn.primitive.name == "axis_index" else MEETS
        inside = (e for program in programs.programs_in(eqn) for e in program.eqns)
        found = max((self._use(e, rules=rules) for e in inside), default=NOT)
        if found == MEETS or not rules or eqn.primitive.name not in primitives.CUSTOM:
            return found
        # What a rule calls is not differentiated, so the rules of that do not matter.
        rule = labels.derivative(eqn, [(self.axis, self.size)]).jaxpr
        return max((self._use(e, rules=False) for e in rule.eqns), default=found)

    def _evaluate(self, program: Any, args: Sequence[Any], index: Any) -> list[Any]:
        return programs.evaluate(program, args, functools.partial(self._equation, index))

    def _equation(self, index: Any, eqn: Any, values: Sequence[Any]) -> list[Any]:
        """Evaluates an equation, opening what has to be opened."""
        name, use = eqn.primitive.name, self.use(eqn)
        if self.axis in programs.axes_of(eqn):
            return [index] if use == INDEX else programs.bind(eqn, values)
        if name in primitives.CUSTOM or (use == NOT and not _stops(eqn)):
            return programs.bind(eqn, values)
        inner = programs.called(eqn)
        if inner is not None:
            return self._evaluate(inner, values, index)
        if name == "scan":
            loop = self._unrolled if use == MEETS else self._scan
            return loop(eqn.params, values, index)
        if use == INDEX and name in ("cond", "while"):
            return self._branches(eqn, values, index)
        what = {"cond": "`lax.cond` or `lax.switch`", "while": "`lax.while_loop`"}
        raise ValueError(
            f"{self.function}: `loss_fn` uses a collective over `window_axis_name` "
            f"{self.axis!r} inside {what.get(name, f'`{name}`')} (at {programs.where(eqn)}), where "
            "the micro-batches cannot wait for each other. Take the collective out of it: compute "
            "it before, and select its result with `jnp.where`; write a loop of fixed length as "
            "`lax.scan`."
        )

    def _scan(self, params: dict[str, Any], values: Sequence[Any], index: Any) -> list[Any]:
        """The same loop, with the index of the micro-batch at hand."""
        consts, carry, xs = programs.split_scan(params, values)

        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            outs = self._evaluate(params["jaxpr"], [*consts, *carry, *x], index)
            return outs[: len(carry)], outs[len(carry) :]

        options = {k: params[k] for k in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(step, carry, xs, **options)
        return [*carry, *ys]

    def _unrolled(self, params: dict[str, Any], values: Sequence[Any], index: Any) -> list[Any]:
        """The steps of a loop one after the other, so that each can meet."""
        consts, carry, xs = programs.split_scan(params, values)
        length = params["length"]
        stacks: list[Any] = [None] * length
        for i in range(length)[:: -1 if params["reverse"] else 1]:
            x = [lax.index_in_dim(x, i, keepdims=False) for x in xs]
            outs = self._evaluate(params["jaxpr"], [*consts, *carry, *x], index)
            carry, stacks[i] = outs[: len(carry)], outs[len(carry) :]
        ys = [jnp.stack(y) for y in zip(*stacks, strict=True)]
        return [*carry, *ys]

    def _branches(self, eqn: Any, values: Sequence[Any], index: Any) -> list[Any]:
        """A `cond` or `while` that only asks for the index."""
        params = eqn.params
        if eqn.primitive.name == "cond":
            which, *operands = values
            branches = [lambda *xs, b=b: self._evaluate(b, xs, index) for b in params["branches"]]
            return list(lax.switch(which, branches, *operands))
        number, more = params["cond_nconsts"], params["body_nconsts"]
        first, second = values[:number], values[number : number + more]
        return list(
            lax.while_loop(
                lambda state: self._evaluate(params["cond_jaxpr"], [*first, *state], index)[0],
                lambda state: self._evaluate(params["body_jaxpr"], [*second, *state], index),
                values[number + more :],
            )
        )


def _stops(eqn: Any) -> bool:
    """Whether a plain `jit` hides a `stop_gradient`, which the plan wants to see."""
    if eqn.primitive.name not in ("jit", "pjit", "closed_call"):
        return False
    inside = programs.equations(programs.called(eqn))
    return any(e.primitive.name == "stop_gradient" for e in inside)
