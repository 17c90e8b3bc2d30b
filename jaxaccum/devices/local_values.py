"""Local values: each device's own, not yet summed over the devices of the window."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxaccum.core import labels, primitives, programs
from jaxaccum.core.mean import Mean
from jaxaccum.core.reducers import Sum, is_marked


def check_undivided(
    function: str,
    program: programs.Program,
    number: int,
    names: Sequence[str],
    *,
    parameters: int = 0,
) -> None:
    """Refuses a loss that was already reduced over the axes that the window reduces over.

    A psum of the loss inside the loss function makes gradients a device count too large, without
    an error. Collectives inside the model, such as synchronised batch statistics, are fine: what
    is no multiple of their results may use them.

    Args:
      function: the public function's name.
      program: the loss; its first `number` flat outputs are totals, the next `number` weights.
      number: how many terms the loss has.
      names: the mesh axes.
      parameters: so many flat inputs, the first, are parameters, whose parts may be gathered.
    """
    inputs = _inputs(program, parameters, None)
    found = labels.follow(program.closed, inputs, _reduced_over(frozenset(names))).outs
    for position, collective in enumerate(found[: 2 * number]):
        if collective not in (None, _PARAMETER):
            what = "total" if position < number else "weight"
            raise ValueError(
                f"{function}: the loss function takes a {collective} of its {what} over the axis "
                f"{', '.join(map(repr, names))}, over which the window is reduced as well, so it "
                "would count every device once more for each device. Return the local sum; "
                "`axis_name` reduces it."
            )


def check_outputs(
    function: str,
    program: programs.Program,
    outputs: Any,
    names: Sequence[str],
    *,
    terms: Sequence[str] = (),
    parameters: int = 0,
) -> None:
    """Refuses what would be summed over devices though a collective made it the same on each.

    Such a `ja.Sum` would count once for each device, and a `ja.Mean` of it over a weight of each
    device's own would be a device count too large. What is made of local values too is not
    refused: it may use a statistic of all devices.

    Args:
      function: the public function's name.
      program: the user's function. Its flat outputs are a total for each of `terms`, a weight for
        each, and the leaves of `outputs`.
      outputs: its marked outputs.
      names: the mesh axes.
      terms: how the terms of a loss are called in messages.
      parameters: as in `check_undivided`.
    """
    inputs = _inputs(program, parameters, _LOCAL)
    found = labels.follow(program.closed, inputs, _same_over(frozenset(names))).outs
    found = [_LOCAL if label is _PARAMETER else label for label in found]
    means = list(zip(terms, found, found[len(terms) :], strict=False))
    rest = iter(found[2 * len(terms) :])
    for path, mark in jax.tree_util.tree_leaves_with_path(outputs, is_leaf=is_marked):
        own = [next(rest) for _ in jax.tree.leaves(mark)]
        where = f"output{jax.tree_util.keystr(path)}"
        if isinstance(mark, Mean):
            means.append((where, *own))
        same = [label for label in own if label not in (None, _LOCAL)]
        if isinstance(mark, Sum) and same:
            _refuse(function, f"`{where}`, a `ja.Sum`,", same[0], names)
    for where, *parts in means:
        same = [label for label in parts if label not in (None, _LOCAL)]
        if same and _LOCAL in parts:
            what = "total" if parts[1] == _LOCAL else "weight"
            _refuse(function, f"the {what} of `{where}`", same[0], names)


def _refuse(function: str, what: str, collective: str, names: Sequence[str]) -> None:
    raise ValueError(
        f"{function}: {what} is the same on each device, as a {collective} over the axis "
        f"{', '.join(map(repr, names))} has made it. The window is reduced over it as well and "
        "would count it once more for each device. Return this device's own; `axis_name` reduces "
        "it."
    )


# The label of what is made of each device's own values, and of parameters alone.
_LOCAL, _PARAMETER = "local", "parameter"


def _inputs(program: programs.Program, parameters: int, label: Any) -> list[Any]:
    rest = len(program.closed.in_avals) - parameters
    return [*[_PARAMETER] * parameters, *[label] * rest]


def _completes(eqn: Any, found: Sequence[Any]) -> bool:
    """Whether an equation gathers the parts of parameters, which makes no sum of them."""
    return programs.has(eqn, primitives.GATHER) and set(found) == {_PARAMETER}


def _same_over(names: frozenset[str]) -> programs.Rule:
    """A rule that labels what collectives over `names` have made the same on each device.

    It is labelled with one of the collectives, what is made of local values too with `_LOCAL`, and
    what is constant with nothing.
    """

    def rule(eqn: Any, found: Sequence[Any]) -> Sequence[Any]:
        same = [label for label in found if label not in (None, _LOCAL, _PARAMETER)]
        if _completes(eqn, found):
            label = _PARAMETER
        elif _reduces(eqn, names):
            label = _said(eqn)
        elif _LOCAL in found or not names.isdisjoint(programs.axes_of(eqn)):
            label = _LOCAL
        elif _PARAMETER in found:
            label = _LOCAL if same else _PARAMETER
        else:
            label = labels.first(found)
        return [label] * len(eqn.outvars)

    return rule


def _reduces(eqn: Any, names: frozenset[str]) -> bool:
    """Whether a collective over any of `names` gives each device the same, or may do so."""
    alike = (primitives.SUM, primitives.EXTREME, primitives.GATHER)
    known = primitives.is_known(eqn.primitive.name)
    is_it = not known or any(programs.has(eqn, trait) for trait in alike)
    return is_it and not names.isdisjoint(programs.axes_of(eqn))


def _said(eqn: Any) -> str:
    return f"`{eqn.primitive.name.removesuffix('2').removesuffix('_invariant')}`"


def _reduced_over(names: frozenset[str]) -> programs.Rule:
    """A rule that labels each value with the collective over `names` that it is a multiple of."""

    def rule(eqn: Any, found: Sequence[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if _completes(eqn, found):
            return [_PARAMETER] * len(eqn.outvars)
        found = [None if label is _PARAMETER and len(eqn.invars) > 1 else label for label in found]
        if _reduces(eqn, names):
            return [_said(eqn)] * len(eqn.outvars)
        if programs.has(eqn, primitives.MULTIPLE):
            return labels.joined(eqn, found)
        if primitives.is_known(name):
            return [None] * len(eqn.outvars)
        # It may hand on what it is given, or be a kernel of the model that was also given a
        # statistic of all devices: the first is assumed where there is nothing else to work on,
        # and where it holds a collective, which then may be its result.
        given = [f for f, v in zip(found, eqn.invars, strict=True) if not programs.is_literal(v)]
        label = labels.first(given) if None not in given else None
        inside = (e for program in programs.programs_in(eqn) for e in programs.equations(program))
        label = label or next((_said(e) for e in inside if _reduces(e, names)), None)
        return [label and f"{label} behind `{name}`"] * len(eqn.outvars)

    return rule
