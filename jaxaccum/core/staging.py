"""A traced loss that speaks over the window's axis, flattened so that it can be cut in stages."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxaccum.core import checks, compat

# How an equation uses the axis: not at all, only to ask which micro-batch this is, or to meet the
# other micro-batches.
NOT, INDEX, MEETS = 0, 1, 2

_CUSTOM = frozenset(["custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"])


def axes_of(eqn: Any) -> tuple[Any, ...]:
    """The axis names that an equation's own primitive works over."""
    for parameter in ("axes", "axis_name"):
        if parameter in eqn.params:
            names = eqn.params[parameter]
            return tuple(names) if isinstance(names, tuple | list) else (names,)
    return ()


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

    def flatten(self, staged: compat.Staged) -> compat.Staged:
        """The program with one more input before the others: the int32 micro-batch's index."""

        def flat_fn(index: Any, *flat: Any) -> list[Any]:
            jaxpr = compat.open_jaxpr(staged.closed)
            return self._replay(jaxpr, staged.closed.consts, flat, index)

        return compat.stage(
            flat_fn, jnp.int32(0), *staged.closed.in_avals, axis_env=[(self.axis, self.size)]
        )

    def use(self, eqn: Any) -> int:
        """How `eqn` uses the axis, at any depth: `NOT`, `INDEX` or `MEETS`."""
        if id(eqn) not in self._known:
            found = self._use(eqn, rules=True)
            self._known[id(eqn)] = (eqn, found)  # the equation too, so that none takes its id
        return self._known[id(eqn)][1]

    def _use(self, eqn: Any, *, rules: bool) -> int:
        if self.axis in axes_of(eqn):
            return INDEX if eqn.primitive.name == "axis_index" else MEETS
        programs = compat.programs_in(eqn)
        found = max((self._use(e, rules=rules) for p in programs for e in p.eqns), default=NOT)
        if found == MEETS or not rules or eqn.primitive.name not in _CUSTOM:
            return found
        # What a rule calls is not differentiated, so the rules of that do not matter.
        rule = compat.open_jaxpr(self._rule(eqn))
        return max((self._use(e, rules=False) for e in rule.eqns), default=found)

    def _rule(self, eqn: Any) -> Any:
        """The program of a custom derivative, which may meet where the function does not."""
        avals = [v.aval for v in eqn.invars]
        moving = [checks.is_inexact(a) for a in avals]

        def derivative(*values: Any) -> Any:
            def at(*xs: Any) -> list[Any]:
                supply = iter(xs)
                full = [next(supply) if m else v for m, v in zip(moving, values, strict=True)]
                return [out for out in compat.bind(eqn, full) if checks.is_inexact(out)]

            start = [v for m, v in zip(moving, values, strict=True) if m]
            if eqn.primitive.name == "custom_jvp_call":
                return jax.jvp(at, tuple(start), tuple(start))
            outs, pull = jax.vjp(at, *start)
            return pull(outs)

        return compat.stage(derivative, *avals, axis_env=[(self.axis, self.size)]).closed

    def _replay(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], index: Any) -> Any:
        """Evaluates a jaxpr, opening what has to be opened."""
        env: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return atom.val if compat.is_literal(atom) else env[atom]

        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(atom) for atom in eqn.invars], index)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _closed(self, closed: Any, args: Sequence[Any], index: Any) -> list[Any]:
        consts = getattr(closed, "consts", ())
        return list(self._replay(compat.open_jaxpr(closed), consts, args, index))

    def _equation(self, eqn: Any, values: list[Any], index: Any) -> list[Any]:
        name, use = eqn.primitive.name, self.use(eqn)
        if use == NOT and not _stops(eqn):
            return compat.bind(eqn, values)
        if self.axis in axes_of(eqn):
            return [index] if use == INDEX else compat.bind(eqn, values)
        if name in _CUSTOM:
            return compat.bind(eqn, values)
        inner = compat.wrapped(eqn)
        if inner is not None:
            closed = next(p for p in eqn.params.values() if compat.open_jaxpr(p) is inner)
            return self._closed(closed, values, index)
        if name == "scan":
            loop = self._unrolled if use == MEETS else self._scan
            return loop(eqn.params, values, index)
        if use == INDEX and name in ("cond", "while"):
            return self._branches(eqn, values, index)
        what = {"cond": "`lax.cond` or `lax.switch`", "while": "`lax.while_loop`"}
        raise ValueError(
            f"{self.function}: `loss_fn` uses a collective over `window_axis_name` "
            f"{self.axis!r} inside {what.get(name, f'`{name}`')} (at {compat.where(eqn)}), where "
            "the micro-batches cannot wait for each other. Take the collective out of it: compute "
            "it before, and select its result with `jnp.where`; write a loop of fixed length as "
            "`lax.scan`."
        )

    def _scan(self, params: dict[str, Any], values: list[Any], index: Any) -> list[Any]:
        """The same loop, with the index of the micro-batch at hand."""
        consts, carry, xs = _split(params, values)

        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            outs = self._closed(params["jaxpr"], [*consts, *carry, *x], index)
            return outs[: len(carry)], outs[len(carry) :]

        options = {k: params[k] for k in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(step, carry, xs, **options)
        return [*carry, *ys]

    def _unrolled(self, params: dict[str, Any], values: list[Any], index: Any) -> list[Any]:
        """The steps of a loop one after the other, so that each can meet."""
        consts, carry, xs = _split(params, values)
        length = params["length"]
        stacks: list[Any] = [None] * length
        for i in range(length)[:: -1 if params["reverse"] else 1]:
            x = [lax.index_in_dim(x, i, keepdims=False) for x in xs]
            outs = self._closed(params["jaxpr"], [*consts, *carry, *x], index)
            carry, stacks[i] = outs[: len(carry)], outs[len(carry) :]
        ys = [jnp.stack(y) for y in zip(*stacks, strict=True)]
        return [*carry, *ys]

    def _branches(self, eqn: Any, values: list[Any], index: Any) -> list[Any]:
        """A `cond` or `while` that only asks for the index."""
        params = eqn.params
        if eqn.primitive.name == "cond":
            which, *operands = values
            branches = [lambda *xs, b=b: self._closed(b, xs, index) for b in params["branches"]]
            return list(lax.switch(which, branches, *operands))
        number, more = params["cond_nconsts"], params["body_nconsts"]
        first, second = values[:number], values[number : number + more]
        return list(
            lax.while_loop(
                lambda state: self._closed(params["cond_jaxpr"], [*first, *state], index)[0],
                lambda state: self._closed(params["body_jaxpr"], [*second, *state], index),
                values[number + more :],
            )
        )


def _split(params: dict[str, Any], values: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The constants, the first carry and the stacks of a `scan`."""
    consts, carry = compat.scan_sizes(params)
    return values[:consts], values[consts : consts + carry], values[consts + carry :]


def _stops(eqn: Any) -> bool:
    """Whether a plain `jit` hides a `stop_gradient`, which the plan wants to see."""
    inner = compat.wrapped(eqn)
    if inner is None or eqn.primitive.name not in ("jit", "pjit", "closed_call"):
        return False
    return any(e.primitive.name == "stop_gradient" or _stops(e) for e in inner.eqns)
