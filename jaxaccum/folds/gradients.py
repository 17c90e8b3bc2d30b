"""From the arguments in `argnums` to flat gradient leaves, and back."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.reducers import Addition, Concat, Concatenation, Mark, Reducer, Sum
from jaxaccum.folds.arguments import Options


class Differentiated:
    """The arguments in `argnums`, whose gradients are carried as a flat list.

    Attributes:
      positions: the arguments' positions.
      leaves: their leaves, but for the batch.
      moving: those of the leaves that have a gradient.
    """

    def __init__(self, options: Options, args: Sequence[Any]):
        self.options, self.batch = options, args[1]
        self.positions = checks.argnums(options.function, options.argnums, len(args))
        whole = {p: args[p] for p in self.positions if p != 1}
        checks.arrays(options.function, whole, name="argument")
        self.leaves, self.structure = jax.tree.flatten(whole)
        self.moving = [jnp.asarray(x) for x in self.leaves if is_inexact(x)]

    def rebuild(self, moving: Sequence[Any]) -> dict[int, Any]:
        """The arguments by position, with `moving` in the places of the leaves with a gradient."""
        supply = iter(moving)
        leaves = [next(supply) if is_inexact(x) else x for x in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)

    def reducers(self, grads: Sequence[Any]) -> list[Reducer]:
        """The reducers of the gradient leaves; rows of the batch are concatenated."""
        pairs = zip(self._parameter_reducers(), self.leaves, strict=True)
        chosen = [reducer for reducer, leaf in pairs if is_inexact(leaf)]
        return chosen + [Concatenation()] * (len(grads) - len(chosen))

    def _parameter_reducers(self) -> list[Reducer]:
        accumulator, prefix = self.options.accumulator, self.options.grad_reducers
        if prefix is None:
            return [accumulator] * len(self.leaves)

        def spread(choice: Any, subtree: Any) -> Any:
            if not (isinstance(choice, type) and issubclass(choice, Mark) and choice is not Concat):
                raise TypeError(
                    f"{self.options.function}: the leaves of `grad_reducers` must be `ja.Sum`, "
                    f"`ja.Max`, `ja.Min` or `ja.Last`, got {checks.describe(choice)}."
                )
            reducer = accumulator if choice is Sum else choice.reducer
            return jax.tree.map(lambda _: reducer, subtree)

        arguments = self.select(self.rebuild(self.moving))
        try:
            reducers = jax.tree.map(spread, prefix, arguments)
        except ValueError as error:
            raise ValueError(
                f"{self.options.function}: `grad_reducers` must be a tree prefix of the "
                f"gradients, {jax.tree.structure(arguments)}, got {jax.tree.structure(prefix)}."
            ) from error
        return jax.tree.leaves(reducers)

    def gradients(self, values: list[Any], reducers: list[Reducer]) -> tuple[Any, list[Reducer]]:
        """The gradient tree of `argnums`, and the reducer of each of its leaves."""
        supply = iter(zip(values, reducers, strict=True))

        def place(leaf: Any) -> _Placed:
            if not is_inexact(leaf):
                return _Placed(np.zeros(np.shape(leaf), jax.dtypes.float0), Addition())
            value, reducer = next(supply)
            return _Placed(value, Addition() if isinstance(reducer, Addition) else reducer)

        arguments = jax.tree.unflatten(self.structure, [place(leaf) for leaf in self.leaves])
        if 1 in self.positions:
            arguments[1] = jax.tree.map(place, self.batch)
        pairs = self.select(arguments)
        leaves, tree = jax.tree.flatten(pairs, is_leaf=lambda x: isinstance(x, _Placed))
        return jax.tree.unflatten(tree, [p.value for p in leaves]), [p.reducer for p in leaves]

    def select(self, arguments: dict[int, Any]) -> Any:
        """One tree for an int `argnums`, a tuple of trees for a sequence."""
        trees = tuple(arguments[p] for p in self.positions if p in arguments)
        return trees if isinstance(self.options.argnums, Sequence) else trees[0]


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A gradient leaf beside its reducer; not a pytree, so it is a leaf."""

    value: Any
    reducer: Reducer
