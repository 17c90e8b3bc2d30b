"""The groups of rows of the devices as an axis of arrays: `vmap` in the place of `shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxaccum.core import compat
from jaxaccum.devices import shards


def grouped(
    fn: Callable[..., Any],
    *,
    mesh: Any,
    names: Sequence[str],
    in_specs: Any,
    out_specs: Any,
    spmd: bool = True,
) -> Callable[..., Any]:
    """`jax.shard_map(fn, ..., axis_names=names)` with the axes left to the partitioner.

    `fn` may use collectives over `names`. Constraints, other axes and a `shard_map` over them stay
    legal in it; a `cond` on what differs between the groups runs both of its branches.

    Args:
      fn: from trees of arrays to a tree.
      mesh: the mesh.
      names: the axes over which arguments are split, and results.
      in_specs: a tree prefix of the arguments, with specs over `names` as leaves.
      out_specs: the same of the results; what has no axis must be the same in each group.
      spmd: whether all constraints in it keep the groups apart; JAX cannot do that where it holds
        a `shard_map` over some of the other axes.
    """

    def grouped_fn(*args: Any) -> Any:
        places = [_Places(mesh, names, spec) for spec in _flat_specs(in_specs, args)]
        leaves, tree = jax.tree.flatten(args)
        own = jax.tree.map(lambda spec: _Places(mesh, names, spec), out_specs, is_leaf=_is_spec)

        def flat_fn(*flat: Any) -> Any:
            return fn(*jax.tree.unflatten(tree, flat))

        mapped: Any = flat_fn
        for name in reversed(names):
            mapped = jax.vmap(
                mapped,
                in_axes=tuple(place.axis(name) for place in places),
                out_axes=jax.tree.map(lambda place, n=name: place.axis(n), own, is_leaf=_is_place),
                axis_size=mesh.shape[name],
                axis_name=name,
                spmd_axis_name=name if spmd else None,
            )
        outs = mapped(*[place.split(x) for place, x in zip(places, leaves, strict=True)])
        return jax.tree.map(
            lambda place, part: jax.tree.map(place.join, part), own, outs, is_leaf=_is_place
        )

    return jax.jit(grouped_fn)


class _Places(NamedTuple):
    """Where the groups of an array are, one label for each dimension of the split array."""

    mesh: Any
    names: Sequence[str]
    spec: PartitionSpec

    def axis(self, name: str) -> int | None:
        """The axis of `name` in an array that is mapped over the names before it already."""
        outer = self.names[: self.names.index(name)]
        labels = [n for n in self._labels(len(self.spec)) if n not in outer]
        return labels.index(name) if name in labels else None

    def split(self, x: jax.Array) -> jax.Array:
        """`x` with dimensions of groups beside those that are split over them."""
        labels = self._labels(x.ndim)
        if not any(labels):
            return x
        shape: list[Any] = []
        for size, axes in zip(x.shape, self._entries(x.ndim), strict=True):
            groups = [self.mesh.shape[name] for name in axes]
            for number in groups:
                size //= number
            shape += [*groups, size]
        typed = iter(self._others(x))
        spec = [name or next(typed) for name in labels]
        return self._reshaped(x, shape, spec, labels)

    def join(self, x: jax.Array) -> jax.Array:
        """The array whose `split` is `x`."""
        labels = self._labels(x.ndim - len(shards.axes_in(self.spec)))
        if not any(labels):
            return x
        shape, spec, groups, number = [], [], [], 1
        typed = [*compat.spec_of(x), *[None] * x.ndim]
        for size, label, own in zip(x.shape, labels, typed, strict=False):
            number *= size
            if label:
                groups.append(label)
                continue
            shape.append(number)
            spec.append((*groups, *shards.names_in(own)) or None)
            groups, number = [], 1
        return self._reshaped(x, shape, spec, [bool(entry) for entry in self._entries(len(shape))])

    def _reshaped(
        self, x: jax.Array, shape: Sequence[int], spec: Sequence[Any], said: Sequence[Any]
    ) -> jax.Array:
        if all(compat.is_explicit(self.mesh, name) for name in shards.axes_in(self.spec)):
            return jax.lax.reshape(x, shape, out_sharding=PartitionSpec(*spec))
        free = PartitionSpec.UNCONSTRAINED
        pinned = PartitionSpec(*[s if is_said else free for s, is_said in zip(spec, said)])
        x = x.reshape(shape)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, pinned))

    def _entries(self, ndim: int) -> list[tuple[str, ...]]:
        return [shards.names_in(entry) for entry in (*self.spec, *[None] * ndim)][:ndim]

    def _labels(self, ndim: int) -> list[str | None]:
        return [label for axes in self._entries(ndim) for label in (*axes, None)]

    def _others(self, x: jax.Array) -> list[Any]:
        typed = [*compat.spec_of(x), *[None] * x.ndim][: x.ndim]
        return [tuple(n for n in shards.names_in(e) if n not in self.names) or None for e in typed]


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _is_place(x: Any) -> bool:
    return isinstance(x, _Places)


def _flat_specs(specs: Any, tree: Any) -> list[PartitionSpec]:
    found: list[PartitionSpec] = []
    jax.tree.map(
        lambda spec, part: found.extend([spec] * len(jax.tree.leaves(part))),
        specs,
        tree,
        is_leaf=_is_spec,
    )
    return found
