"""Labels: what each value of a program is made of, followed from its inputs to its outputs."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxaccum.core import checks, primitives, programs
from jaxaccum.core.programs import Program, Rule, has, is_literal, pick, put


@dataclasses.dataclass(frozen=True)
class Labels:
    """The label of each value of a program; `None` for none.

    Attributes:
      of: by variable.
      outs: of the outputs.
    """

    of: dict[Any, Any]
    outs: list[Any]


def follow(program: Any, labels: Sequence[Any], rule: Rule, *, customs: bool = True) -> Labels:
    """Labels every value of a program by what it is made of, from inputs to outputs.

    Inner programs are entered; a loop is gone through until the labels of its carry stay.

    Args:
      program: a jaxpr, open or closed.
      labels: of the inputs; `None` for none. What two ways lead to takes the first label.
      rule: from an equation that is not entered and the labels of its inputs to those of its
        outputs.
      customs: whether functions with a custom derivative are entered.
    """
    return _Walk(rule, customs).through(program, labels)


class _Walk:
    """One walk through a program; `written` is the label of what any `jax.Ref` holds."""

    def __init__(self, rule: Rule, customs: bool):
        self.rule, self.customs = rule, customs
        self.written: Any = None

    def through(self, program: Any, labels: Sequence[Any]) -> Labels:
        jaxpr = getattr(program, "jaxpr", program)
        found = dict(zip(jaxpr.invars, labels, strict=True))

        def read(atom: Any) -> Any:
            return None if is_literal(atom) else found.get(atom)

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, list(map(read, eqn.invars)))
            found.update(zip(eqn.outvars, outs, strict=True))
        return Labels(found, list(map(read, jaxpr.outvars)))

    def _equation(self, eqn: Any, labels: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        inner = params.get(primitives.WITHIN.get(name, "")) or programs.called(eqn)
        if inner is not None and (self.customs or name not in primitives.CUSTOM):
            return self.through(inner, labels).outs
        if name == "cond":
            branches = [self.through(branch, labels[1:]).outs for branch in params["branches"]]
            return [first(column) for column in zip(*branches, strict=True)]
        if name == "scan":
            consts, carry, xs = programs.split_scan(params, labels)
            carry, outs = self._loop(params["jaxpr"], consts, carry, xs)
            return outs if params["length"] else [*carry, *outs[len(carry) :]]
        if name == "while":
            start, stop = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            self.through(params["cond_jaxpr"], [*labels[:start], *labels[stop:]])
            return self._loop(params["body_jaxpr"], labels[start:stop], labels[stop:], ())[0]
        if programs.acts(eqn):  # may write any of its inputs, and read what was written
            self.written = first([self.written, *labels])
            return [self.written] * len(eqn.outvars)
        return self.rule(eqn, labels)

    def _loop(self, body: Any, consts: Any, carry: list[Any], xs: Any) -> tuple[Any, Any]:
        """The labels of a loop's carry before any of its steps, and of what a step returns."""
        while True:
            before = [*carry, self.written]
            outs = self.through(body, [*consts, *carry, *xs]).outs
            carry = [first(pair) for pair in zip(carry, outs, strict=False)]
            if [*carry, self.written] == before:
                return carry, outs


def first(labels: Iterable[Any]) -> Any:
    """The first label there is."""
    return next((label for label in labels if label is not None), None)


def joined(eqn: Any, labels: Sequence[Any]) -> list[Any]:
    """A rule: each result is labelled as what it is made of."""
    if has(eqn, primitives.ALIGNED):
        return list(labels)
    return [first(labels)] * len(eqn.outvars)


def derived(eqn: Any, labels: Sequence[Any]) -> list[Any]:
    """A rule: through what a derivative passes; what is not known to have none has one."""
    if has(eqn, primitives.FLAT):
        return [None] * len(eqn.outvars)
    moving = zip(labels, inexact(eqn.invars), strict=True)
    found = joined(eqn, [label if moves else None for label, moves in moving])
    return [f if moves else None for f, moves in zip(found, inexact(eqn.outvars), strict=True)]


def inexact(atoms: Sequence[Any]) -> list[bool]:
    """For each of the inputs or outputs of an equation whether it may have a derivative."""
    avals = [atom.aval for atom in atoms]
    return [hasattr(aval, "dtype") and checks.is_inexact(aval) for aval in avals]


def moved(program: Program, flags: Sequence[bool]) -> list[bool]:
    """Which outputs of a program have a derivative in the flagged inputs.

    The answer is structural: what passes through `stop_gradient`, a comparison or an `argmax` has
    none. Custom derivatives are asked for their rules.
    """

    def rule(eqn: Any, labels: Sequence[Any]) -> list[Any]:
        found = derived(eqn, labels)
        if eqn.primitive.name not in primitives.CUSTOM or first(found) is None:
            return found
        of_rule = derivative(eqn, program.axis_env).closed
        given, ends = pick(labels, inexact(eqn.invars)), inexact(eqn.outvars)

        def through(directions: Sequence[Any]) -> list[Any]:
            values = [None] * len(labels)
            return follow(of_rule, [*values, *directions], rule, customs=False).outs

        if eqn.primitive.name == "custom_jvp_call":
            return put(found, through(given), ends)
        chosen = []
        for out in range(sum(ends)):  # which inputs the cotangent of one output reaches
            reached = through([True if i == out else None for i in range(sum(ends))])
            chosen.append(first(m for m, r in zip(given, reached, strict=True) if r))
        return put(found, chosen, ends)

    labels = follow(program.closed, [flag or None for flag in flags], rule, customs=False)
    return [label is not None for label in labels.outs]


def derivative(eqn: Any, axis_env: Sequence[tuple[str, int]]) -> Program:
    """The rule of a custom derivative, as a program.

    From its inputs and a tangent for each inexact one to the tangents of its inexact outputs; for
    a rule that runs backwards, a cotangent for each inexact output to those of its inexact inputs.
    """
    moving, ends = inexact(eqn.invars), inexact(eqn.outvars)
    forward = eqn.primitive.name == "custom_jvp_call"

    def rule(values: list[Any], directions: list[Any]) -> Any:
        start = pick(values, moving)
        run = lambda *xs: pick(programs.bind(eqn, put(values, xs, moving)), ends)  # noqa: E731
        if forward:
            return jax.jvp(run, tuple(start), tuple(directions))[1]
        return jax.vjp(run, *start)[1](directions)

    at = pick(eqn.invars, moving) if forward else pick(eqn.outvars, ends)
    avals = [v.aval for v in eqn.invars], [v.aval for v in at]
    return programs.stage(rule, *avals, axis_env=axis_env)
