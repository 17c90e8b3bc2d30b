"""Programs with other equations in the places of some, wherever they stand."""

from collections.abc import Callable
from typing import Any

import jax

from jaxaccum.core import compat, programs


def rewritten(program: programs.Program, rule: Callable[[Any], Any]) -> programs.Program:
    """A program with `rule(eqn)` in the place of each equation, also in the programs inside it.

    The types of what goes in and comes out stay. Where a derivative is brought along, as a function
    that JAX traces later, its equations are replaced then.
    """

    def change(jaxpr: Any) -> Any:
        eqns = [rule(_derived(programs.within(eqn, change), change)) for eqn in jaxpr.eqns]
        same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        return jaxpr if same else jaxpr.replace(eqns=eqns)

    return _with(program, change(program.jaxpr))


def _with(program: programs.Program, jaxpr: Any) -> programs.Program:
    return program._replace(closed=program.closed.replace(jaxpr=jaxpr))


def _derived(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """An equation whose own derivative, if it brings one, is traced into programs so changed."""
    rules = {n: v for n, v in eqn.params.items() if compat.is_rule(v)}
    if not rules:
        return eqn

    def traced(fn: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        jaxpr, *rest = fn(*args)
        return (change(jaxpr), *rest)

    def backward(fn: Callable[..., Any], *args: Any) -> list[Any]:
        outs: list[Any] = []

        def arrays(*given: Any) -> list[Any]:
            outs[:] = fn(*programs.put(args, given, flags))
            return [x for x in outs if isinstance(x, jax.Array)]

        flags = [isinstance(x, jax.Array) for x in args]
        given = programs.pick(args, flags)
        program = programs.stage(arrays, *given)
        kept = [isinstance(x, jax.Array) for x in outs]  # the others are zeros without an array
        return programs.put(outs, _with(program, change(program.jaxpr))(*given), kept)

    new = {n: compat.around(v, backward if n == "bwd" else traced) for n, v in rules.items()}
    return eqn.replace(params=eqn.params | new)
