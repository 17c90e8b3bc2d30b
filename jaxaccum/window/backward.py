"""The backward pass of a micro-step as the fold runs it: into its sums, or beside them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxaccum.core import compat
from jaxaccum.core.in_place import Reach
from jaxaccum.core.leaves import leafwise
from jaxaccum.core.reducers import Reducer
from jaxaccum.numerics import loss_scaling


class Backward(NamedTuple):
    """A backward pass that has not run.

    Attributes:
      pull: what `jax.vjp` of a function of one tree returned.
      seed: the cotangent of what that function returned.
      scale: the loss scale, which the gradients still hold; or `None`.
    """

    pull: Any
    seed: Any
    scale: Any = None


@dataclasses.dataclass(frozen=True)
class Sums:
    """How the gradients of backward passes are summed, leaf by leaf.

    Attributes:
      reducers: of each gradient.
      types: the type of each.
      in_place: whether it is added inside the backward pass, in which case a loss scale stays in
        the sum until the window's end.
      structure: the tree of the arguments that are differentiated, a tuple.
      everywhere: whether also where it makes no difference.
    """

    reducers: list[Reducer]
    types: list[Any]
    in_place: list[bool]
    structure: Any
    everywhere: bool = False

    def where_it_pays(self, reaches: Sequence[Reach]) -> "Sums":
        """The same, in place only for what a loop of the loss reads, unless it is `everywhere`.

        Outside of loops compilers add a gradient where it is made, whoever writes the addition.

        Args:
          reaches: where gradients may be written, for each micro-batch shape.
        """
        flags = list(self.in_place)
        for reach in reaches:
            wanted = reach.safe if self.everywhere else map(all, zip(reach.looped, reach.safe))
            flags = [a and b for a, b in zip(flags, wanted, strict=True)]
        return dataclasses.replace(self, in_place=flags)

    def buffers(self, start: Sequence[Any], written: Sequence[bool]) -> list[Any]:
        """A buffer for each sum that is written in place, `None` for the others."""
        begin = [*start, *[None] * (len(self.types) - len(start))]
        return [self._buffer(*x) if w else None for *x, w in zip(self.types, begin, written)]

    @staticmethod
    def _buffer(kind: Any, start: Any) -> Any:
        return jax.new_ref(compat.filled(kind, kind.dtype) if start is None else start)

    def read(self, sums: Sequence[Any], scale: Any) -> list[Any]:
        """The sums at the window's end, those written in place without the loss scale."""
        if scale is None:
            return list(sums)
        here = [loss_scaling.unscale if flag else None for flag in self.in_place]
        return leafwise(here, sums, shared=(scale,))

    def run(self, backward: Backward, buffers: Sequence[Any]) -> list[Any]:
        """Runs the backward pass into the buffers; returns the gradients that have none."""
        if any(b is not None for b in buffers):
            places = [False if b is None else b for b in buffers]
            pull = backward.pull.with_refs(*jax.tree.unflatten(self.structure, places))
        else:
            pull = backward.pull
        grads = jax.tree.leaves(pull(backward.seed))
        if backward.scale is None:
            return grads
        kept = zip(self.reducers, self.in_place, buffers, strict=True)
        unscales = [
            loss_scaling.unscale if r.divides and not later else None
            for r, later, buffer in kept
            if buffer is None
        ]
        return leafwise(unscales, grads, shared=(backward.scale,))
