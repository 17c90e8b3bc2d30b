"""A window under plain `jit`: the library writes the `shard_map` over the data axis itself."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

from jaxaccum.core import checks, compat
from jaxaccum.core.sums import WindowSums
from jaxaccum.devices import reduction, shards
from jaxaccum.devices.shards import Shard, shard_of
from jaxaccum.window import roads
from jaxaccum.window.arguments import Given, Options
from jaxaccum.window.batch import Batch
from jaxaccum.window.bound import Bound
from jaxaccum.window.gradients import Differentiated


def sums(
    options: Options, args: Sequence[Any], call: Given, bound_fn: type[Bound] = Bound
) -> WindowSums:
    """The window's sums, from each device's own rows of the batch.

    Arguments are whole on each device as far as the axes of `spmd_axis_name` go, except for
    parameters in parts; other mesh axes stay as they are. `num_real` may hold one number for each
    device.

    Raises:
      ValueError: there is no mesh with these axes, or the rows do not divide by the devices.
    """
    function = options.function
    batch = Batch(function, args, options.batch_argnums, options.argnums)
    names, mesh, number = _devices(options, args, batch)
    per_device = np.ndim(call.num_real) == 1
    if per_device and np.shape(call.num_real) != (number,):
        raise ValueError(
            f"{function}: `num_real` must be a scalar or one number for each of the {number} "
            f"devices, got {checks.describe(call.num_real)}."
        )
    return roads.either(
        options,
        mesh,
        names,
        lambda own, road: _sums(own, args, call, bound_fn, batch, road),
        rows=batch.positions,
        is_typed=bound_fn.is_typed,
    )


def _sums(
    options: Options,
    args: Sequence[Any],
    call: Given,
    bound_fn: type[Bound],
    batch: Batch,
    road: roads.Road,
) -> WindowSums:
    """`sums` by one of the roads."""
    mesh, names, num_real = road.mesh, road.names, call.num_real
    per_device = np.ndim(num_real) == 1
    tree = Differentiated(options, args, batch)
    own, out, apart = _layouts(tree, mesh, names)
    rows = PartitionSpec(names)
    local = _local(options, names, batch)
    whole_rows = [PartitionSpec()] * len(batch.leaves)
    local = dataclasses.replace(local, local_params=tree.tree(apart, whole_rows))
    final = list(map(_within, apart, out))
    in_parts = road.in_parts or not options.whole_params
    if in_parts:
        local = dataclasses.replace(
            local,
            param_specs=tree.tree(own, whole_rows),
            grad_specs=tree.tree(out, whole_rows),
        )
        own, out = list(map(_within, apart, own)), final
    else:  # whole in each group, as far as the window sees; where they lie is said to the compiler
        local = dataclasses.replace(local, param_specs=None, grad_specs=None)
        own, out = apart, apart

    others = batch.others(args)
    named = call._replace(num_real=None if per_device else num_real)._asdict()
    entering = _Entering([*others.values(), *named.values()], jax.Array | np.ndarray)
    by_position: dict[Any, Any] = tree.by_position(own)
    pairs = [*others.items(), *named.items()]
    specs = entering.pick([s for p, arg in pairs for s in shards.specs_of(arg, by_position.get(p))])
    layout: dict[str, Any] = {}
    grad_specs = jax.tree.leaves(tree.tree(out, [rows] * len(batch.leaves)))
    groups = list(dict.fromkeys([PartitionSpec(), rows, *grad_specs]))

    def window_fn(given: list[Any], sharded: Any) -> list[list[Any]]:
        values = entering.put(given)
        positional = dict(zip(others, values[: len(others)], strict=True))
        own_rows, real = sharded
        own = Given(*values[len(others) :])
        if per_device:
            own = own._replace(num_real=jnp.asarray(real)[0])
        every = batch.put([positional.get(p) for p in range(len(args))], own_rows)
        bound = bound_fn(local, every, own)
        road.check(bound.first_loss().program)
        result = bound.sums()
        flat, layout["tree"] = jax.tree.flatten(result)
        kinds = layout["kinds"] = _kinds(result, rows, grad_specs)
        layout["empty"] = [x for x, kind in zip(flat, kinds, strict=True) if kind is None]
        return [[x for x, kind in zip(flat, kinds, strict=True) if kind == g] for g in groups]

    given = [_place(x, spec, mesh, names) for x, spec in zip(entering.given, specs, strict=True)]
    sharded = (batch.leaves, num_real if per_device else None)
    sharded = jax.tree.map(lambda x: _place(x, rows, mesh, names), sharded)
    results = road.map(window_fn, (specs, rows), groups)(given, sharded)
    supplies: dict[Any, Any] = dict(zip(groups, map(iter, results), strict=True))
    supplies[None] = iter(layout["empty"])
    found = jax.tree.unflatten(layout["tree"], [next(supplies[kind]) for kind in layout["kinds"]])
    if in_parts:
        return found
    grads, structure = jax.tree.flatten(found.grads)
    lie = jax.tree.leaves(tree.tree(final, [rows] * len(batch.leaves)))
    grads = [road.laid(x, spec) for x, spec in zip(grads, lie, strict=True)]
    return dataclasses.replace(found, grads=jax.tree.unflatten(structure, grads))


def combine(
    options: Options,
    args: Sequence[Any],
    key: Any,
    num_real: Any,
    combined_fn: Callable[..., Any],
) -> Any:
    """The combined outputs of `microbatch`, from each device's own rows of the batch.

    Raises:
      ValueError: there is no mesh with these axes, or the rows do not divide by the devices.
    """
    batch = Batch(options.function, args, options.batch_argnums, options.argnums)
    names, mesh, _ = _devices(options, args, batch)
    entering = _Entering((batch.others(args), key, num_real), jax.Array | np.ndarray | float)
    tree = Differentiated(options, args, batch)
    apart = tree.by_position(tree.local_specs(names, mesh))
    places = [
        s for p, arg in batch.others(args).items() for s in shards.specs_of(arg, apart.get(p))
    ]
    specs = entering.pick([*places, *shards.specs_of((key, num_real))])
    rows = PartitionSpec(names)
    given = [_place(x, spec, mesh, names) for x, spec in zip(entering.given, specs, strict=True)]
    own_rows = [_place(x, rows, mesh, names) for x in batch.leaves]

    def combined(own: Options, road: roads.Road) -> Any:
        local = _local(own, names, batch)

        def local_fn(given: list[Any], own_rows: list[Any]) -> Any:
            others, own_key, real = entering.put(given)
            every = batch.put([others.get(p) for p in range(len(args))], own_rows)
            return combined_fn(local, every, own_key, real, road.check)

        return road.map(local_fn, (specs, rows), PartitionSpec())(given, own_rows)

    return roads.either(options, mesh, names, combined, rows=batch.positions)


class _Entering:
    """What enters a `shard_map` whole: the arrays of a tree; what is none is closed over.

    Attributes:
      given: the arrays.
    """

    def __init__(self, tree: Any, kinds: Any):
        self._leaves, self._tree = jax.tree.flatten(tree)
        self._enters = [isinstance(x, kinds) for x in self._leaves]
        self.given = [jnp.asarray(x) for x in self.pick(self._leaves)]

    def pick(self, values: Sequence[Any]) -> list[Any]:
        """Those of one value for each leaf that belong to the arrays."""
        return [x for x, enters in zip(values, self._enters, strict=True) if enters]

    def put(self, given: Sequence[Any]) -> Any:
        """The tree around other arrays."""
        supply = iter(given)
        pairs = zip(self._leaves, self._enters, strict=True)
        return jax.tree.unflatten(self._tree, [next(supply) if e else x for x, e in pairs])


def _local(options: Options, names: tuple[str, ...], batch: Batch) -> Options:
    """The options of each device's own window."""
    return dataclasses.replace(
        options, axis_name=names, spmd_axis_name=None, batch_argnums=batch.positions
    )


def _devices(
    options: Options, args: Sequence[Any], batch: Batch
) -> tuple[tuple[str, ...], Any, int]:
    """The axes, their mesh and how many devices there are, whose number the rows divide by."""
    names = reduction.names_of(options.function, "spmd_axis_name", options.spmd_axis_name)
    mesh = mesh_of(options.function, names, args)
    number = int(np.prod([mesh.shape[name] for name in names]))
    rest = batch.rows % number
    if export.is_symbolic_dim(rest) or rest:
        raise ValueError(
            f"{options.function}: the batch has {batch.rows} rows, which do not divide by the "
            f"{number} devices of `spmd_axis_name` {names}. Pad it with `ja.pad_batch` to "
            f"{-(-batch.rows // number) * number} rows."
        )
    return names, mesh, number


def _layouts(
    tree: Differentiated, mesh: Any, names: tuple[str, ...]
) -> tuple[list[PartitionSpec], list[PartitionSpec], list[PartitionSpec]]:
    """Of each leaf of the parameters the specs over `names`: its own, its gradient's, the local.

    The first two say which parts it is gathered from and its gradient is scattered to, the third
    how the devices' own parameters make up one array.
    """
    options = tree.options
    apart = tree.local_specs(names, mesh)

    def specs(found: Sequence[Shard | None]) -> list[PartitionSpec]:
        return [shard.spec() if shard else PartitionSpec() for shard in found]

    def of_type(leaf: Any, local: PartitionSpec) -> Shard | None:
        explicit = [name for name in names if compat.is_explicit(mesh, name)]
        explicit = [name for name in explicit if name not in shards.axes_in(local)]
        if not (explicit and isinstance(leaf, jax.Array)):
            return None
        return shard_of(options.function, "params", compat.spec_of(leaf), explicit)

    if options.param_specs is None:
        own = specs(list(map(of_type, tree.leaves, apart)))
    else:
        own = specs(tree.shards("param_specs", options.param_specs, names))
    if options.grad_specs is None:
        return own, own, apart
    return own, specs(tree.shards("grad_specs", options.grad_specs, names)), apart


def _within(outer: PartitionSpec, inner: PartitionSpec) -> PartitionSpec:
    """How an array lies whose parts, after `outer`, lie after `inner`."""
    dimensions = range(max(len(outer), len(inner)))
    entries = [(*_names(outer, d), *_names(inner, d)) for d in dimensions]
    return PartitionSpec(*[entry or None for entry in entries])


def _kinds(
    sums: WindowSums, rows: PartitionSpec, grad_specs: Sequence[PartitionSpec]
) -> list[PartitionSpec | None]:
    """How each leaf of the sums lies over the devices; `None` for leaves without values."""
    kinds: list[PartitionSpec | None] = [
        rows if reducer.emits else PartitionSpec() for reducer in jax.tree.leaves(sums.reducers)
    ]
    for i, (leaf, spec) in enumerate(zip(jax.tree.leaves(sums.grads), grad_specs, strict=True)):
        kinds[i] = None if leaf.dtype == jax.dtypes.float0 else spec
    return kinds


def _place(x: Any, spec: PartitionSpec, mesh: Any, names: tuple[str, ...]) -> jax.Array:
    """`x` laid out over `names` as `spec` says, where an Explicit mesh would refuse other types."""
    x = jnp.asarray(x)
    if not all(compat.is_explicit(mesh, name) for name in names):
        return x
    typed = compat.spec_of(x)

    def entry(dimension: int) -> Any:
        wanted = _names(spec, dimension)
        return (*wanted, *[n for n in _names(typed, dimension) if n not in names]) or None

    placed = PartitionSpec(*map(entry, range(x.ndim)))
    return jax.sharding.reshard(x, NamedSharding(mesh, placed))


def _names(spec: PartitionSpec, dimension: int) -> tuple[Any, ...]:
    return shards.names_in(spec[dimension]) if dimension < len(spec) else ()


def mesh_of(function: str, names: tuple[str, ...], arguments: Any) -> Any:
    """The mesh of the context, or else the one in the types or shardings of the arguments."""
    candidates: list[Any] = [jax.sharding.get_abstract_mesh()]
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, jax.Array):
            candidates.append(getattr(jax.typeof(leaf).sharding, "mesh", None))
            if not isinstance(leaf, jax.core.Tracer):
                candidates.append(getattr(leaf.sharding, "mesh", None))
    for mesh in candidates:
        if mesh is not None and set(names) <= set(mesh.axis_names):
            return mesh
    raise ValueError(
        f"{function}: no mesh with the axes {names} of `spmd_axis_name` was found. Call it under "
        "`with jax.set_mesh(mesh):`, or pass arrays that are sharded over such a mesh."
    )
