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


def shard_of(function: str, argument: str, spec: Any, axes: Sequence[str]) -> Shard | None:
    """The part of a partition spec, or `None`, that concerns `axes`.

    Args:
      function: the public function's name, for messages.
      argument: the argument's name.
      spec: how an array lies; other mesh axes are ignored.
      axes: the axes of the window.

    Raises:
      TypeError: it is not a `PartitionSpec`.
      ValueError: it splits several dimensions over the axes.
    """
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
