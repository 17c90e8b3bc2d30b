"""Meetings: what micro-batches carry to a collective over the window's axis and take from it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxaccum.core import labels, primitives, programs
from jaxaccum.core.programs import pick, put
from jaxaccum.core.reducers import Addition, Latest, Maximum, Minimum, Reducer, Stack
from jaxaccum.devices import reduction

_EXTREMES: dict[str, tuple[Reducer, Callable[..., Any]]] = {
    "pmax": (Maximum(), lax.pmax),
    "pmin": (Minimum(), lax.pmin),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Meeting:
    """One equation at which all micro-batches meet.

    Attributes:
      eqn: the equation.
      axis: the name of the window's axis.
      size: the number of micro-batches.
      local: for each operand whether micro-batches differ in it.
    """

    eqn: Any
    axis: str
    size: int
    local: tuple[bool, ...]

    @property
    def uniform(self) -> bool:
        """Whether every micro-batch takes away the same."""
        alike = (primitives.SUM, primitives.EXTREME, primitives.GATHER)
        return any(self._has(trait) for trait in alike)

    @property
    def differentiable(self) -> bool:
        """Whether a gradient passes it."""
        return not self._has(primitives.EXTREME)

    def _has(self, trait: str) -> bool:
        return programs.has(self.eqn, trait)

    def check(self, function: str) -> None:
        """Refuses what has no meaning here.

        Raises:
          ValueError: groups of micro-batches, or an unusual collective over several axes.
        """
        name = self.eqn.primitive.name
        if self.eqn.params.get("axis_index_groups") is not None:
            raise ValueError(
                f"{function}: `{name}` (at {programs.where(self.eqn)}) has `axis_index_groups`, "
                f"but `window_axis_name` {self.axis!r} has no groups. Leave them out."
            )
        if self._rest() and not self.uniform:
            raise ValueError(
                f"{function}: `{name}` (at {programs.where(self.eqn)}) works over several axes, "
                f"{programs.axes_of(self.eqn)}. With `window_axis_name` only `psum`, `pmean`, "
                "`pmax`, `pmin` and `all_gather` do; take the axes one after the other."
            )

    def _rest(self) -> tuple[str, ...]:
        return tuple(name for name in programs.axes_of(self.eqn) if name != self.axis)

    def reducers(self) -> list[Reducer]:
        """How the operands of all micro-batches are brought together."""
        if self._has(primitives.SUM):
            return [Addition()] * len(self.local)
        if self._has(primitives.EXTREME):
            return [_EXTREMES[self.eqn.primitive.name][0]] * len(self.local)
        if self._has(primitives.GATHER):
            return [Stack()] * len(self.local)
        return [Stack() if local else Latest() for local in self.local]

    def combine(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """What every micro-batch takes away; `[size, ...]` where that differs (`uniform`)."""
        rest = self._rest()
        if self._has(primitives.SUM):
            out = list(lax.psum(list(operands), rest)) if rest else list(operands)
        elif self._has(primitives.EXTREME):
            over = _EXTREMES[self.eqn.primitive.name][1]
            out = [reduction.widened(lambda x: over(x, rest), x) if rest else x for x in operands]
        elif self._has(primitives.GATHER):
            out = [self._gather(x) for x in operands]
        else:
            out = self._vmapped(lambda *xs: programs.bind(self.eqn, xs))(*operands)
        return [x.astype(v.aval.dtype) for x, v in zip(out, self.eqn.outvars, strict=True)]

    def combine_with_pull(self, operands: Sequence[jax.Array]) -> tuple[list[jax.Array], Any]:
        """`combine`, and the function from cotangents of its results to those of its operands."""
        if self.uniform:
            return jax.vjp(lambda xs: self.combine(xs), list(operands))
        moving, wanted = labels.inexact(self.eqn.invars), labels.inexact(self.eqn.outvars)

        def pull_one(xs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            def at(*some: Any) -> list[Any]:
                return pick(programs.bind(self.eqn, put(xs, some, moving)), wanted)

            found = jax.vjp(at, *pick(xs, moving))[1](cotangents)
            return [
                c if local or c is None else lax.psum(c, self.axis)
                for c, local in zip(put([None] * len(xs), found, moving), self.local, strict=True)
            ]

        # The rule runs inside of the axis, as a custom derivative may meet in it.
        def pull(cotangents: Sequence[Any]) -> tuple[list[Any]]:
            places = ([0 if local else None for local in self.local], 0)
            outs = [0 if local else None for local in self.local]
            run = jax.vmap(pull_one, places, outs, axis_name=self.axis, axis_size=self.size)
            return (run(list(operands), pick(cotangents, wanted)),)

        return self.combine(operands), pull

    def _vmapped(self, fn: Any) -> Any:
        places = [0 if local else None for local in self.local]
        return jax.vmap(fn, places, axis_name=self.axis, axis_size=self.size)

    def _gather(self, stack: jax.Array) -> jax.Array:
        """`all_gather` of a stack `[size, ...]`, over devices too."""
        params, names = self.eqn.params, programs.axes_of(self.eqn)
        lead = 1
        for name in self._rest():
            stack = lax.all_gather(stack, name, axis=lead)
            lead += 1
        # [size, first of the rest, second, …] in the order of the names, then one axis.
        order = [0 if name == self.axis else 1 + self._rest().index(name) for name in names]
        stack = jnp.transpose(stack, [*order, *range(lead, stack.ndim)])
        stack = stack.reshape((-1, *stack.shape[lead:]))
        place = params["all_gather_dimension"]
        whole = jnp.moveaxis(stack, 0, place)
        if not params["tiled"]:
            return whole
        shape = whole.shape
        return whole.reshape((*shape[:place], -1, *shape[place + 2 :]))
