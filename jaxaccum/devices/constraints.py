"""Losses that say how values lie over the devices of the window, which then hold whole rows."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxaccum.core import compat, programs, rewriting
from jaxaccum.devices import shards


def check_unnamed(
    function: str,
    loss_fn: Callable[..., Any],
    args: Sequence[Any],
    named: dict[str, Any],
    *,
    rows: Sequence[int],
    mesh: Any,
    names: Sequence[str],
) -> None:
    """Refuses a loss that names Explicit axes of the window, if that is why it cannot be traced.

    It is traced once more as its author saw it: with rows that are typed as split over them.

    Args:
      function: the public function's name, for messages.
      loss_fn: the user's function.
      args: its arguments, in the manual region.
      named: its keywords.
      rows: the positions of those that are cut.
      mesh: the mesh.
      names: the axes of the window.

    Raises:
      ValueError: it can be traced so.
    """
    whole, number = mesh.abstract_mesh, math.prod(mesh.shape[name] for name in names)
    leaves, tree = jax.tree.flatten((tuple(args), named))
    cut = jax.tree.leaves(
        (tuple(jax.tree.map(lambda _, p=p: p in rows, a) for p, a in enumerate(args)), named)
    )
    enters = [isinstance(x, jax.Array) for x in leaves]

    def typed(x: jax.Array, is_cut: Any) -> jax.ShapeDtypeStruct:
        spec, shape = compat.spec_of(x), x.shape
        if is_cut is True:
            shape = (number * shape[0], *shape[1:])
            first = shards.names_in(spec[0]) if len(spec) else ()
            spec = PartitionSpec((*names, *first), *spec[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(whole, spec))

    def flat_fn(*flat: Any) -> Any:
        own_args, own_named = jax.tree.unflatten(tree, programs.put(leaves, flat, enters))
        return loss_fn(*own_args, **own_named)

    pairs = zip(programs.pick(leaves, enters), programs.pick(cut, enters), strict=True)
    try:
        with jax.sharding.use_abstract_mesh(whole):
            program = programs.stage(flat_fn, *[typed(x, is_cut) for x, is_cut in pairs])
    except Exception:
        return
    if _holds_map(program):
        return
    said = [(eqn, spec) for eqn, spec in _specs_said(program) if {*shards.axes_in(spec)} & {*names}]
    what = "names an axis"
    if said:
        eqn, spec = said[0]
        rest = PartitionSpec(
            *[tuple(n for n in shards.names_in(e) if n not in names) or None for e in spec]
        )
        what = (
            f"asks `{eqn.primitive.name}` for the sharding {spec} at {programs.where(eqn)}, where "
            f"{rest} is meant,"
        )
    raise ValueError(
        f"{function}: the loss function {what} of `spmd_axis_name` {tuple(names)}, which are "
        "Explicit. Inside of the window each device holds whole rows of its own, so that values "
        f"have no such axis: leave {tuple(names)} out of the specs in the loss, or make the mesh "
        "with `axis_types=(AxisType.Auto, ...)`, whose constraints may name them."
    ) from None


def _specs_said(program: programs.Program) -> list[tuple[Any, PartitionSpec]]:
    """The equations whose result was given a sharding, `reshard` and matrix products first."""
    found = []
    for eqn in programs.equations(program.jaxpr):
        for name, value in eqn.params.items():
            if isinstance(value, NamedSharding) and name.endswith("sharding"):
                found.append((eqn, value.spec))
    first = ("reshard", "dot_general", "sharding_constraint")
    return sorted(found, key=lambda pair: pair[0].primitive.name not in first)


class HoldsMapError(Exception):
    """A loss holds a `shard_map` where JAX does not always lower one."""


class Free:
    """A loss function that may constrain values over the axes of the window.

    Each group of rows is whole on its device, so those axes fall out of its constraints.

    Args:
      function: the public function's name, for messages.
      loss_fn: the user's function, which is traced outside of any manual axes.
      mesh: the mesh.
      names: the axes of the window.
      maps: whether it may hold a `shard_map`.

    Attributes:
      found: whether it named one of the axes, or holds a `shard_map`.
    """

    def __init__(
        self,
        function: str,
        loss_fn: Callable[..., Any],
        mesh: Any,
        names: Sequence[str],
        *,
        maps: bool,
    ):
        self.function, self.loss_fn, self.mesh, self.names = function, loss_fn, mesh, names
        self.maps, self.found = maps, False
        functools.update_wrapper(self, loss_fn)

    def __call__(self, *args: Any, **named: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, named))
        enters = [isinstance(x, jax.Array) for x in leaves]

        def flat_fn(*flat: Any) -> Any:
            own_args, own_named = jax.tree.unflatten(tree, programs.put(leaves, flat, enters))
            return self.loss_fn(*own_args, **own_named)

        flat = programs.pick(leaves, enters)
        program = rewriting.rewritten(programs.stage(flat_fn, *flat), self._freed)
        return jax.tree.unflatten(
            jax.tree.structure(program.out_shape), program(*map(self._pinned, flat))
        )

    def _pinned(self, x: jax.Array) -> jax.Array:
        """`x`; of what differs between the groups, its gradient too, each lies on its devices."""
        if any(compat.is_explicit(self.mesh, name) for name in self.mesh.axis_names):
            return x  # the types say it
        free = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, free))

    def _freed(self, eqn: Any) -> Any:
        name = eqn.primitive.name
        if name == "shard_map":
            self.found = True
            self._check_map(eqn)
            if not self.maps:
                raise HoldsMapError
        if name != "sharding_constraint":
            return eqn
        sharding = eqn.params["sharding"]
        if not isinstance(sharding, NamedSharding):
            return eqn
        spec = self._without(sharding.spec)
        if spec == sharding.spec:
            return eqn
        self.found = True
        new = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
        return eqn.replace(params=eqn.params | {"sharding": new})

    def _without(self, spec: PartitionSpec) -> PartitionSpec:
        def entry(axes: Any) -> Any:
            if axes is PartitionSpec.UNCONSTRAINED:
                return axes
            return tuple(n for n in shards.names_in(axes) if n not in self.names) or None

        return PartitionSpec(*map(entry, spec))

    def _check_map(self, eqn: Any) -> None:
        specs = [*eqn.params["in_specs"], *eqn.params["out_specs"]]
        over = sorted({n for spec in specs for n in shards.axes_in(spec)} & set(self.names))
        if over:
            raise ValueError(
                f"{self.function}: the loss function holds a `shard_map` whose specs name "
                f"{over}, of `spmd_axis_name`, at {programs.where(eqn)}; inside of the window each "
                "device holds whole rows of its own. Leave these axes out of its specs and "
                f"`axis_names`, or call the window inside `jax.shard_map` with `axis_name={over}`."
            )


def check_no_map(program: programs.Program) -> None:
    """Requires that a program holds no `shard_map`.

    Raises:
      HoldsMapError: it does.
    """
    if _holds_map(program):
        raise HoldsMapError


def _holds_map(program: programs.Program) -> bool:
    return any(eqn.primitive.name == "shard_map" for eqn in programs.equations(program.jaxpr))
