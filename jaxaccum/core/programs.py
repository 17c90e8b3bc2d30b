"""The one reader of programs (jaxprs): traced, evaluated, followed and pruned here alone.

The rest of the library stages and inspects functions through this file, JAX's staging interfaces
stand in no other. What it may take for granted of a primitive stands in `core.primitives`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.interpreters import partial_eval

from jaxaccum.core import compat, primitives

# From an equation and the values of its inputs to those of its outputs.
Rule = Callable[[Any, Sequence[Any]], Sequence[Any]]


class Program(NamedTuple):
    """A function traced once, to be called on flat inputs as often as needed.

    Attributes:
      closed: the closed jaxpr.
      out_shape: the output tree, with `jax.ShapeDtypeStruct` leaves.
      axis_env: names and sizes of axes that it may use in collectives.
    """

    closed: Any
    out_shape: Any
    axis_env: tuple[tuple[str, int], ...] = ()

    def __call__(self, *flat: Any) -> list[Any]:
        outs = jex.jaxpr_as_fun(self.closed)(*flat)
        # A constant output comes back as a typed Python scalar.
        return [out if isinstance(out, jax.Array) else jnp.asarray(out) for out in outs]

    @property
    def jaxpr(self) -> Any:
        """The program without the arrays that it closes over."""
        return self.closed.jaxpr

    def with_consts(self, consts: Sequence[Any]) -> "Program":
        """The same program with other values in place of the arrays that it closes over."""
        return self._replace(closed=jex.ClosedJaxpr(self.jaxpr, list(consts)))

    def opened(self, passed: frozenset[str] = frozenset()) -> "Program":
        """The same program, its inner jits and custom derivatives written out, in scans too.

        Primitives named in `passed`, such as `stop_gradient`, hand on their inputs.
        """

        def rule(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
            inner = called(eqn)
            if inner is not None:
                return evaluate(inner, values, rule)
            if eqn.primitive.name in passed:
                return values
            if eqn.primitive.name == "scan":
                body = eqn.params["jaxpr"]
                flat = stage(lambda *xs: evaluate(body, xs, rule), *body.in_avals)
                if not flat.closed.consts:
                    return bind(eqn, values, {**eqn.params, "jaxpr": flat.closed})
            return bind(eqn, values)

        run = lambda *xs: evaluate(self.closed, xs, rule)  # noqa: E731
        flat = stage(run, *self.closed.in_avals, axis_env=self.axis_env)
        return flat._replace(out_shape=self.out_shape)


def stage(fn: Callable[..., Any], *args: Any, axis_env: Sequence[tuple[str, int]] = ()) -> Program:
    """Traces `fn` once on the types of `args`; arrays it closes over become constants.

    Args:
      fn: the function.
      *args: arrays or their types.
      axis_env: names and sizes of axes that `fn` may use in collectives.
    """
    made = jax.make_jaxpr(fn, return_shape=True, axis_env=list(axis_env) or None)(*args)
    return Program(*made, tuple(axis_env))


def stage_call(fn: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Program]:
    """Traces `fn` once, to be called as one equation wherever the types of `args` come again.

    Returns:
      What to call, and the program, from the flat `args` to flat outputs.
    """
    call = jax.jit(fn)
    traced = call.trace(*args)
    if len(traced.jaxpr.in_avals) > len(jax.tree.leaves(args)):
        # It takes what `fn` closes over, too; traced around, the call has these as constants.
        return call, stage(call, *args)
    return call, Program(traced.jaxpr, traced.out_info)


# What stands in a program.


def is_literal(atom: Any) -> bool:
    """Whether an input of an equation is a constant in the program's text."""
    return isinstance(atom, jex.Literal)


def has(eqn: Any, trait: str) -> bool:
    """Whether the primitive of an equation has a trait of `core.primitives`."""
    return primitives.has(eqn.primitive.name, trait)


def where(eqn: Any) -> str:
    """The line of the user's program that made an equation."""
    return str(source_info_util.summarize(eqn.source_info))


def axes_of(eqn: Any) -> tuple[Any, ...]:
    """The axis names that an equation's own primitive works over."""
    for parameter in ("axes", "axis_name"):
        if parameter in eqn.params:
            names = eqn.params[parameter]
            names = names if isinstance(names, tuple | list) else (names,)
            return tuple(name for name in names if isinstance(name, str))
    return ()


def called(eqn: Any) -> Any:
    """The program that `eqn` only calls (`jit`, a custom derivative, …), or `None`."""
    return eqn.params.get(primitives.CALLS.get(eqn.primitive.name, ""))


def programs_in(eqn: Any) -> list[Any]:
    """The jaxprs, open or closed, among the parameters of an equation."""
    found = []
    for value in eqn.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if isinstance(x, jex.Jaxpr | jex.ClosedJaxpr):
                found.append(x)
    return found


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a program and of the programs inside it."""
    return _inside(jaxpr.eqns)


def _inside(eqns: Iterable[Any]) -> Iterator[Any]:
    for eqn in eqns:
        yield eqn
        for program in programs_in(eqn):
            yield from _inside(program.eqns)


def acts(eqn: Any) -> bool:
    """Whether an equation may do more than return values, such as write into a `jax.Ref`.

    Collectives do not, nor do calls of the host; of what is not known any effect counts.
    """
    if not eqn.effects or axes_of(eqn) or has(eqn, primitives.REPORT):
        return False
    _, *inside = _inside([eqn])
    return any(map(acts, inside)) or bool(eqn.effects - _effects(inside))


def _effects(eqns: Iterable[Any]) -> frozenset[Any]:
    return frozenset().union(*(eqn.effects for eqn in eqns))


# The evaluator.


def bind(eqn: Any, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Evaluates one equation on `values`."""
    params = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    info = eqn.source_info
    name_stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=name_stack), eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def run(eqns: Iterable[Any], env: dict[Any, Any], rule: Rule = bind) -> None:
    """Evaluates equations, each by `rule`, into `env`, which maps variables to values."""
    for eqn in eqns:
        outs = rule(eqn, [read(env, atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))


def read(env: dict[Any, Any], atom: Any) -> Any:
    """The value of a variable, or of a constant in the program's text."""
    return atom.val if is_literal(atom) else env[atom]


def evaluate(program: Any, args: Sequence[Any], rule: Rule = bind) -> list[Any]:
    """The outputs of a jaxpr, open or closed, whose equations are evaluated by `rule`."""
    jaxpr = getattr(program, "jaxpr", program)
    env = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    run(jaxpr.eqns, env, rule)
    return [read(env, atom) for atom in jaxpr.outvars]


def split_scan(params: dict[str, Any], inputs: Sequence[Any]) -> tuple[Any, Any, Any]:
    """What goes into a `scan` as constants, as first carry and to be scanned over."""
    consts, carry = compat.scan_sizes(params)
    return inputs[:consts], inputs[consts : consts + carry], inputs[consts + carry :]


def passed_on(program: Program) -> list[int | None]:
    """For each flat output of a program the input that it is, unchanged; `None` for all others.

    Looks through inner jits, remats, custom derivatives and scans.
    """

    def rule(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
        inner = called(eqn)
        if inner is not None:
            return evaluate(inner, values, rule)
        if eqn.primitive.name != "scan":
            return [None] * len(eqn.outvars)
        own = [object() for _ in values]
        _, carry, rows = split_scan(eqn.params, list(zip(own, values, strict=True)))
        # A carry stays what it was in its own place; rows come out in their order.
        places = [*({id(c): x} for c, x in carry), *[{id(r): x for r, x in rows}] * len(values)]
        outs = evaluate(eqn.params["jaxpr"], own, rule)
        return [place.get(id(out)) for place, out in zip(places, outs)]

    inputs = range(len(program.closed.in_avals))
    tags = [(index,) for index in inputs]
    found = {id(tag): index for index, tag in zip(inputs, tags, strict=True)}
    return [found.get(id(out)) for out in evaluate(program.closed, tags, rule)]


def constant(program: Program) -> list[bool]:
    """For each flat output of a program whether it depends on none of its inputs."""
    moving = object()

    def rule(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
        if not any(x is moving for x in values):
            return [None] * len(eqn.outvars)
        inner = called(eqn)
        return [moving] * len(eqn.outvars) if inner is None else evaluate(inner, values, rule)

    outs = evaluate(program.closed, [moving] * len(program.closed.in_avals), rule)
    return [out is not moving for out in outs]


def pick(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """The flagged ones of `values`."""
    return [x for x, flag in zip(values, flags, strict=True) if flag]


def put(values: Sequence[Any], chosen: Iterable[Any], flags: Sequence[bool]) -> list[Any]:
    """`values` with `chosen` in the flagged places."""
    supply = iter(chosen)
    return [next(supply) if flag else x for x, flag in zip(values, flags, strict=True)]


# Parts of programs.


def prune(
    program: Program, keep: Sequence[bool], *, reports: bool = False, whole: bool = False
) -> tuple[Program, list[int]]:
    """The flagged flat outputs of a program, with only the equations that they need.

    Args:
      program: the program.
      keep: a flag for each output.
      reports: whether calls of the host that nobody waits for (`jax.debug.print`) stay.
      whole: whether it still takes all inputs.

    Returns:
      The program, which returns a flat list, and which inputs of `program` it takes.
    """
    jaxpr = program.jaxpr if reports else _silent(program.jaxpr, keep)
    jaxpr, used = partial_eval.dce_jaxpr(jaxpr, list(keep), instantiate=whole)[:2]
    out_shape = pick(jax.tree.leaves(program.out_shape), keep)
    closed = jex.ClosedJaxpr(jaxpr, program.closed.consts)
    return Program(closed, out_shape, program.axis_env), [i for i, u in enumerate(used) if u]


def _silent(jaxpr: Any, keep: Sequence[bool]) -> Any:
    """A program for some of its outputs, without the calls of the host that nobody waits for."""
    needed, eqns = {v for v in pick(jaxpr.outvars, keep) if not is_literal(v)}, []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars) or acts(eqn):
            needed.update(v for v in eqn.invars if not is_literal(v))
            eqns.append(_silent_within(eqn))
    return jaxpr.replace(eqns=eqns[::-1], effects=_left(jaxpr.effects, jaxpr.eqns, eqns))


def _silent_within(eqn: Any) -> Any:
    """An equation whose inner programs are `_silent`."""
    name = eqn.primitive.name
    known = name in (*primitives.CALLS, *primitives.WITHIN, "cond", "scan", "while")
    if not (known and eqn.effects):
        return eqn
    new = within(eqn, lambda jaxpr: _silent(jaxpr, [True] * len(jaxpr.outvars)))
    return new.replace(effects=_left(eqn.effects, [eqn], [new]))


def within(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """An equation with its inner programs changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, jex.Jaxpr):  # since jax 0.12 the closed ones too
            return change(value)
        if isinstance(value, jex.ClosedJaxpr):
            new = change(value.jaxpr)
            return value if new is value.jaxpr else value.replace(jaxpr=new)
        return tuple(map(changed, value)) if type(value) is tuple else value

    params = {k: changed(v) for k, v in eqn.params.items()}
    same = all(
        params[k] is v or (type(v) is tuple and params[k] == v) for k, v in eqn.params.items()
    )
    return eqn if same else eqn.replace(params=params)


def _left(effects: Any, before: Iterable[Any], after: Iterable[Any]) -> Any:
    """The effects that stay where equations `before` became those `after`."""
    if not effects:
        return effects
    gone = _effects(e for e in _inside(before) if has(e, primitives.REPORT))
    return effects - (gone - _effects(_inside(after)))
