"""Parameters and gradient sums that are sharded over the axes of the window (FSDP, ZeRO)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxaccum.core import checks

REDUCTIONS = ("defer", "scatter")


class Shard(NamedTuple):
    """One array dimension that is split over mesh axes.

    Attributes:
      dimension: the dimension.
      axes: the mesh axes, major first.
    """

    dimension: int
    axes: tuple[str, ...]

    def gather(self, x: jax.Array) -> jax.Array:
        """The whole array from this device's part."""
        return lax.all_gather(x, self.axes, axis=self.dimension, tiled=True)

    def scatter(self, x: jax.Array) -> jax.Array:
        """This device's part of the sum of all devices' whole arrays."""
        return lax.psum_scatter(x, self.axes, scatter_dimension=self.dimension, tiled=True)

    def scatter_here(self, x: jax.Array) -> jax.Array:
        """`scatter`, at this place of the program.

        The TPU compiler moves the reduction of `sum += scatter(x)` out of a loop, which then
        carries whole sums, and moves a cast to float32 behind it. The barriers keep both in place.
        """
        return lax.optimization_barrier(self.scatter(lax.optimization_barrier(x)))

    def spec(self) -> PartitionSpec:
        """The `PartitionSpec` of an array split this way."""
        return PartitionSpec(*[None] * self.dimension, self.axes)


@dataclasses.dataclass(frozen=True)
class Place:
    """Holds the shard of one leaf in a tree, where a bare `None` would be no leaf."""

    shard: Shard | None


def shards(
    function: str, argument: str, specs: Any, tree: Any, axes: Sequence[str]
) -> list[Shard | None]:
    """The shard over `axes` of each leaf of `tree`, from a tree prefix of partition specs.

    Args:
      function: the public function's name, for messages.
      argument: the argument's name.
      specs: `PartitionSpec`s or `None`, a tree prefix of `tree`; other mesh axes are ignored.
      tree: the parameters.
      axes: the axes of the window.

    Raises:
      TypeError: a leaf of `specs` is not a `PartitionSpec`.
      ValueError: `specs` is no prefix of `tree`, or splits several dimensions over the axes.
    """
    is_spec = lambda x: x is None or isinstance(x, PartitionSpec)  # noqa: E731

    def spread(spec: Any, subtree: Any) -> Any:
        shard = shard_of(function, argument, spec, axes)
        return jax.tree.map(lambda _: Place(shard), subtree)

    if specs is None:
        specs = PartitionSpec()
    try:
        chosen = jax.tree.map(spread, specs, tree, is_leaf=is_spec)
    except ValueError as error:
        if function in str(error):
            raise
        raise ValueError(
            f"{function}: `{argument}` must be a tree prefix of the parameters, "
            f"{jax.tree.structure(tree)}, got {jax.tree.structure(specs, is_leaf=is_spec)}."
        ) from error
    return [place.shard for place in jax.tree.leaves(chosen)]


def shard_of(function: str, argument: str, spec: Any, axes: Sequence[str]) -> Shard | None:
    """The part of `spec` that concerns `axes`; see `shards`."""
    if spec is None:
        return None
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"{function}: the leaves of `{argument}` must be `PartitionSpec`s, got "
            f"{checks.describe(spec)}."
        )
    found = []
    for dimension, entry in enumerate(spec):
        names = entry if isinstance(entry, tuple) else (entry,)
        over = tuple(name for name in names if name in axes)
        if over:
            found.append(Shard(dimension, over))
    if len(found) > 1:
        raise ValueError(
            f"{function}: `{argument}` splits several dimensions over the axes of the window, "
            f"{spec}. Split one dimension over all of them."
        )
    return found[0] if found else None


def check_reduction(function: str, reduction: Any) -> None:
    """Requires one of the known choices."""
    if reduction not in REDUCTIONS:
        raise ValueError(
            f'{function}: `reduction` must be "defer" or "scatter", got {reduction!r}.'
        )


def reduce_sums(
    sums: Sequence[Any],
    scatters: Sequence[Shard | None],
    done: Sequence[Shard | None],
    axes: tuple[str, ...],
) -> list[Any]:
    """Sums trees of arrays over devices: one psum for all that need the same axes.

    Args:
      sums: what each device holds.
      scatters: the shard into which each is reduce-scattered here, or `None`.
      done: the shard into which each was reduce-scattered already, or `None`.
      axes: the axes of the window.
    """
    out = list(sums)
    rest: dict[tuple[str, ...], list[int]] = {}
    for i, (total, now, before) in enumerate(zip(sums, scatters, done, strict=True)):
        if now is not None:
            out[i] = jax.tree.map(now.scatter, total)
        shard = now or before
        pending = tuple(a for a in axes if shard is None or a not in shard.axes)
        if pending:
            rest.setdefault(pending, []).append(i)
    for pending, members in rest.items():
        totals = lax.psum([out[i] for i in members], pending)
        for i, total in zip(members, totals, strict=True):
            out[i] = total
    return out


def check_divides(function: str, name: str, x: Any, shard: Shard | None) -> None:
    """Requires the split dimension of a whole array to divide by the devices."""
    if shard is None:
        return
    number = 1
    for axis in shard.axes:
        number *= lax.axis_size(axis)
    if shard.dimension >= jnp.ndim(x) or x.shape[shard.dimension] % number:
        raise ValueError(
            f"{function}: `{name}` is {checks.describe(x)}, whose dimension {shard.dimension} does "
            f"not divide by the {number} devices of {shard.axes}. Leave it whole: `P()`."
        )
