"""Parameters and gradient sums that are sharded over the axes of the window (FSDP, ZeRO)."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxaccum.core import checks, compat
from jaxaccum.devices import wires

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

    def scatter(self, x: jax.Array, wire: Any = None) -> jax.Array:
        """This device's part of the sum of all devices' whole arrays, which travels as `wire`."""

        def scattered(x: jax.Array) -> jax.Array:
            sum_fn = functools.partial(
                lax.psum_scatter,
                axis_name=self.axes,
                scatter_dimension=self.dimension,
                tiled=True,
            )
            (part,) = wires.summed([x], sum_fn=lambda xs: [sum_fn(x) for x in xs], wire=wire)
            return part

        spec = compat.spec_of(x)
        if not any(spec):
            return scattered(x)
        # JAX gives no type to the part of an array that lies over other Explicit axes as well.
        return jax.sharding.auto_axes(scattered, axes=axes_in(spec), out_sharding=spec)(x)

    def scatter_here(self, x: jax.Array, wire: Any = None) -> jax.Array:
        """`scatter`, at this place of the program.

        The TPU compiler moves the reduction of `sum += scatter(x)` out of a loop, which then
        carries whole sums, and moves a cast to float32 behind it. The barriers keep both in place.
        """
        return lax.optimization_barrier(self.scatter(lax.optimization_barrier(x), wire))

    def spec(self) -> PartitionSpec:
        """The `PartitionSpec` of an array split this way."""
        return PartitionSpec(*[None] * self.dimension, self.axes)


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
    found = []
    for dimension, entry in enumerate(checked_spec(argument, function, spec)):
        over = tuple(name for name in names_in(entry) if name in axes)
        if over:
            found.append(Shard(dimension, over))
    if len(found) > 1:
        raise ValueError(
            f"{function}: `{argument}` splits several dimensions over the axes of the window, "
            f"{spec}. Split one dimension over all of them."
        )
    return found[0] if found else None


def local_spec(
    function: str, spec: Any, axes: Sequence[str], known: Sequence[str]
) -> PartitionSpec:
    """The part of a leaf of `local_params` that concerns the window's `axes`.

    Args:
      function: the public function's name, for messages.
      spec: the leaf, a partition spec or `None`.
      axes: the axes of the window.
      known: the axes of the mesh; those that are not of the window are ignored.

    Raises:
      TypeError: it is not a `PartitionSpec`.
      ValueError: it names an axis that is neither of the mesh nor of the window.
    """
    spec = checked_spec("local_params", function, spec)
    for name in axes_in(spec):
        if name not in (*axes, *known):
            raise ValueError(
                f"{function}: `local_params` names the axis {name!r}, but the axes here are "
                f"{tuple(dict.fromkeys((*axes, *known)))}. Name the axis over which each device "
                "has its own."
            )
    entries = [tuple(name for name in names_in(entry) if name in axes) for entry in spec]
    return PartitionSpec(*[entry or None for entry in entries])


def axes_in(spec: PartitionSpec) -> tuple[str, ...]:
    """All axes of a partition spec."""
    return tuple(name for entry in spec for name in names_in(entry))


def spread(
    function: str, argument: str, prefix: Any, tree: Any, *, of: str, is_leaf: Any = None
) -> list[Any]:
    """For each leaf of a tree the leaf of a tree prefix that stands for it.

    Args:
      function: the public function's name, for messages.
      argument: what the prefix was given as.
      prefix: the tree prefix, whose leaves may be `None` and partition specs.
      tree: the tree.
      of: what the tree is, for messages.
      is_leaf: what else is a leaf of it.

    Raises:
      ValueError: it is no prefix.
    """
    is_choice = lambda x: x is None or isinstance(x, PartitionSpec)  # noqa: E731
    found: list[Any] = []
    try:
        jax.tree.map(
            lambda choice, part: found.extend(
                [choice] * len(jax.tree.leaves(part, is_leaf=is_leaf))
            ),
            prefix,
            tree,
            is_leaf=is_choice,
        )
    except ValueError as error:
        raise ValueError(
            f"{function}: `{argument}` must be a tree prefix of the {of}, "
            f"{jax.tree.structure(tree)}, got {jax.tree.structure(prefix, is_leaf=is_choice)}."
        ) from error
    return found


def specs_of(tree: Any, specs: Any = None) -> list[PartitionSpec]:
    """The partition spec of each leaf of a tree, from a tree of them; `None` is whole."""
    return (
        [PartitionSpec()] * len(jax.tree.leaves(tree)) if specs is None else jax.tree.leaves(specs)
    )


def names_in(entry: Any) -> tuple[Any, ...]:
    """The axes of one entry of a partition spec."""
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def checked_spec(argument: str, function: str, spec: Any) -> PartitionSpec:
    """A partition spec; that of what is whole for `None`.

    Raises:
      TypeError: it is something else.
    """
    if spec is None:
        return PartitionSpec()
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"{function}: the leaves of `{argument}` must be `PartitionSpec`s, got "
            f"{checks.describe(spec)}."
        )
    return spec


def check_reduction(function: str, reduction: Any) -> None:
    """Requires one of the known choices."""
    if reduction not in REDUCTIONS:
        raise ValueError(
            f'{function}: `reduction` must be "defer" or "scatter", got {reduction!r}.'
        )


def check_whole(function: str, value: Any, param_specs: Any) -> None:
    """Requires a boolean, and of `False` that it is known what comes in parts.

    Raises:
      TypeError: it is no boolean.
      ValueError: it is `False` without `param_specs`.
    """
    if not isinstance(value, bool):
        raise TypeError(
            f"{function}: `whole_params` must be True or False, got {checks.describe(value)}."
        )
    if not value and param_specs is None:
        raise ValueError(
            f"{function}: `whole_params=False` hands each device's parts to the loss, but no "
            "`param_specs` says which parameters come in parts. Pass `param_specs=`."
        )


def reduce_sums(
    sums: Sequence[Any],
    scatters: Sequence[Shard | None],
    done: Sequence[Shard | None],
    over: Sequence[tuple[str, ...]],
    dtypes: Sequence[Any],
) -> list[Any]:
    """Sums trees of arrays over devices: one psum for all that need the same axes.

    Args:
      sums: what each device holds.
      scatters: the shard into which each is reduce-scattered here, or `None`.
      done: the shard into which each was reduce-scattered already, or `None`.
      over: the axes over which each is summed.
      dtypes: the dtype in which each travels, `None` for its own.
    """
    out = list(sums)
    rest: dict[Any, list[int]] = {}
    places = zip(sums, scatters, done, over, strict=True)
    for i, (total, now, before, axes) in enumerate(places):
        if now is not None:
            out[i] = jax.tree.map(functools.partial(now.scatter, wire=dtypes[i]), total)
        shard = now or before
        pending = tuple(a for a in axes if shard is None or a not in shard.axes)
        if pending:
            rest.setdefault((pending, dtypes[i]), []).append(i)
    for (pending, wire), members in rest.items():
        totals = _summed([out[i] for i in members], pending, wire)
        for i, total in zip(members, totals, strict=True):
            out[i] = total
    return out


def _summed(trees: list[Any], axes: tuple[str, ...], wire: Any) -> list[Any]:
    """`psum` over axes that are manual, or those of a `vmap`."""
    leaves, tree = jax.tree.flatten(trees)

    def summed(*xs: Any) -> tuple[Any, ...]:
        return tuple(wires.summed(xs, sum_fn=lambda xs: lax.psum(xs, axes), wire=wire))

    mesh = jax.sharding.get_abstract_mesh()
    specs = [PartitionSpec(*compat.spec_of(x)) for x in leaves]
    if not set(axes) <= set(mesh.manual_axes) and any(map(any, specs)):
        # JAX gives no type to the sum over a `vmap` of arrays that lie over Explicit axes.
        named = {name for spec in specs for name in axes_in(spec)}
        summed = jax.sharding.auto_axes(
            summed, axes=tuple(sorted(named)), out_sharding=tuple(specs)
        )
    return jax.tree.unflatten(tree, summed(*leaves))


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
