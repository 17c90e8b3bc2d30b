"""From the arguments in `argnums` to flat gradient leaves, and back."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxaccum.core import checks
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.reducers import (
    Addition,
    Concat,
    Concatenation,
    Kept,
    Mark,
    Maximum,
    Minimum,
    Reducer,
    Sum,
)
from jaxaccum.devices import shards
from jaxaccum.devices.shards import Shard, shard_of, spread
from jaxaccum.window.arguments import Options
from jaxaccum.window.batch import Batch


class Differentiated:
    """The arguments in `argnums`, whose gradients are carried as a flat list.

    Everywhere in the order of `argnums`; those that are cut, with the batch, come last in the list.

    Attributes:
      positions: the arguments' positions.
      leaves: the leaves of those that are whole.
      moving: those of the leaves that have a gradient.
      rows: for each leaf of the batch whether it has a gradient.
    """

    def __init__(self, options: Options, args: Sequence[Any], batch: Batch):
        self.options, self.batch = options, batch
        self.positions = checks.argnums(options.function, options.argnums, len(args))
        self.rows = batch.moving(self.positions)
        self._whole = [p for p in self.positions if p not in batch.positions]
        trees = {p: args[p] for p in self._whole}
        checks.concrete(options.function, trees, name="argument")
        checks.arrays(options.function, trees, name="argument")
        self.leaves, self._structure = jax.tree.flatten([trees[p] for p in self._whole])
        self.moving = [jnp.asarray(x) for x in self.leaves if is_inexact(x)]

    def rebuild(self, moving: Sequence[Any]) -> dict[int, Any]:
        """The whole arguments by position, `moving` in place of the leaves with a gradient."""
        supply = iter(moving)
        return self.by_position([next(supply) if is_inexact(x) else x for x in self.leaves])

    def by_position(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """The whole arguments by position, made of `leaves`."""
        return dict(zip(self._whole, jax.tree.unflatten(self._structure, leaves), strict=True))

    def tree(self, leaves: Sequence[Any], rows: Sequence[Any]) -> Any:
        """One tree for an int `argnums`, a tuple of trees for a sequence.

        Args:
          leaves: what stands in the place of each leaf of the whole arguments.
          rows: in that of each leaf of the batch.
        """
        found = self.by_position(leaves)
        if len(found) < len(self.positions):
            found |= self.batch.by_position(rows)
        trees = tuple(found[p] for p in self.positions)
        return trees if isinstance(self.options.argnums, Sequence) else trees[0]

    def spread(
        self,
        argument: str,
        prefix: Any,
        leaf_fn: Callable[[Any, bool], Any],
        *,
        of: str = "parameters",
    ) -> list[Any]:
        """One value for each of `leaves`, from a tree prefix of the arguments in `argnums`.

        Args:
          argument: what the prefix was given as.
          prefix: the tree prefix.
          leaf_fn: from a leaf of the prefix, and whether it stands for rows of the batch, to the
            value.
          of: what the prefix is one of, for messages.
        """
        whole = self.tree([False] * len(self.leaves), [True] * len(self.batch.leaves))
        choices = spread(self.options.function, argument, prefix, whole, of=of)
        cuts = jax.tree.leaves(whole)
        chosen = [(leaf_fn(c, cut), cut) for c, cut in zip(choices, cuts, strict=True)]
        return [value for value, cut in chosen if not cut]

    def shards(self, argument: str, specs: Any, axes: Sequence[str]) -> list[Shard | None]:
        """The shard over `axes` of each of `leaves`, from a tree prefix of partition specs."""
        function = self.options.function

        def shard(spec: Any, cut: bool) -> Shard | None:
            found = shard_of(function, argument, spec, axes)
            if cut and found is not None and found.dimension:
                raise ValueError(
                    f"{function}: `{argument}` splits the batch's gradient, {spec}, whose rows lie "
                    "on the devices as the rows themselves do. Put `P()` in its place."
                )
            return found

        return [None] * len(self.leaves) if specs is None else self.spread(argument, specs, shard)

    def local_specs(self, axes: Sequence[str], mesh: Any = None) -> list[PartitionSpec]:
        """For each of `leaves` its part of `local_params` over the window's `axes`.

        Args:
          axes: the axes of the window.
          mesh: their mesh; that of the context by default.
        """
        specs, function = self.options.local_params, self.options.function
        if specs is None:
            return [PartitionSpec()] * len(self.leaves)
        known = (mesh or jax.sharding.get_abstract_mesh()).axis_names
        return self.spread(
            "local_params", specs, lambda spec, _: shards.local_spec(function, spec, axes, known)
        )

    def names(self) -> list[str]:
        """How each of `leaves` is called in messages."""
        trees = self.by_position(self.leaves)
        return [
            f"{'params' if position == 0 else f'argument {position}'}{jax.tree_util.keystr(path)}"
            for position, tree in trees.items()
            for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        ]

    def reducers(self, grads: Sequence[Any]) -> list[Reducer]:
        """The reducers of the gradient leaves; rows of the batch are concatenated."""
        pairs = zip(self._parameter_reducers(), self.leaves, strict=True)
        chosen = [reducer for reducer, leaf in pairs if is_inexact(leaf)]
        return chosen + [Concatenation()] * (len(grads) - len(chosen))

    def _parameter_reducers(self) -> list[Reducer]:
        accumulator, function = self.options.accumulator, self.options.function
        if self.options.grad_reducers is None:
            return [accumulator] * len(self.leaves)

        def reducer(choice: Any, cut: bool) -> Reducer:
            if not (isinstance(choice, type) and issubclass(choice, Mark) and choice is not Concat):
                raise TypeError(
                    f"{function}: the leaves of `grad_reducers` must be `ja.Sum`, "
                    f"`ja.Max`, `ja.Min` or `ja.Last`, got {checks.describe(choice)}."
                )
            if cut and choice is not Sum:
                raise ValueError(
                    f"{function}: `grad_reducers` names `ja.{choice.__name__}` for the batch, "
                    "whose rows have one gradient each, so there is nothing to combine. Put "
                    "`ja.Sum` in its place."
                )
            return accumulator if choice is Sum else choice.reducer

        found = self.spread("grad_reducers", self.options.grad_reducers, reducer, of="gradients")
        for leaf, chosen in zip(self.leaves, found, strict=True):
            if isinstance(chosen, Maximum | Minimum) and jnp.iscomplexobj(leaf):
                raise TypeError(
                    f"{function}: `grad_reducers` must be `ja.Sum` or `ja.Last` for a complex "
                    f"parameter, which has no order, got an extreme for {checks.describe(leaf)}."
                )
        return found

    def gradients(self, values: list[Any], reducers: list[Reducer]) -> tuple[Any, Any]:
        """The gradient tree of `argnums`, and the tree of its leaves' reducers."""
        supply = iter(zip(values, reducers, strict=True))

        def place(leaf: Any, moves: bool) -> _Placed:
            if not moves:
                return _Placed(np.zeros(np.shape(leaf), jax.dtypes.float0), Kept())
            value, reducer = next(supply)
            return _Placed(value, Addition() if isinstance(reducer, Addition) else reducer)

        whole = [place(leaf, is_inexact(leaf)) for leaf in self.leaves]
        cut = [p in self.positions for p in self.batch.owners]
        rows = [
            place(leaf, moves) if asked else None
            for leaf, moves, asked in zip(self.batch.leaves, self.rows, cut, strict=True)
        ]
        leaves, tree = jax.tree.flatten(self.tree(whole, rows))
        return tuple(
            jax.tree.unflatten(tree, part)
            for part in ([p.value for p in leaves], [p.reducer for p in leaves])
        )


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A gradient leaf beside its reducer; not a pytree, so it is a leaf."""

    value: Any
    reducer: Reducer
