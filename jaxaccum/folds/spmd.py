"""A window under plain `jit`: the library writes the `shard_map` over the data axis itself."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxaccum.core import checks, compat
from jaxaccum.core.reducers import reducers_of
from jaxaccum.core.sums import WindowSums
from jaxaccum.folds import cut, devices
from jaxaccum.folds.arguments import Given, Options
from jaxaccum.folds.bound import Bound
from jaxaccum.folds.replay import Replay
from jaxaccum.folds.shards import Shard, shard_of, shards


def sums(options: Options, args: Sequence[Any], call: Given) -> WindowSums:
    """The window's sums, from each device's own rows of the batch, `args[1]`.

    Arguments are whole on each device as far as the axes of `spmd_axis_name` go, except for
    parameters in parts; other mesh axes stay as they are. `num_real` may hold one number for each
    device.

    Raises:
      ValueError: there is no mesh with these axes, or the rows do not divide by the devices.
    """
    function = options.function
    names, mesh, number = _devices(options, args)
    num_real = call.num_real
    per_device = np.ndim(num_real) == 1
    if per_device and np.shape(num_real) != (number,):
        raise ValueError(
            f"{function}: `num_real` must be a scalar or one number for each of the {number} "
            f"devices, got {checks.describe(num_real)}."
        )

    own, out = _layouts(options, args, mesh, names)
    rows = PartitionSpec(names)
    local = dataclasses.replace(
        options, axis_name=names, spmd_axis_name=None, param_specs=own, grad_specs=out
    )

    # What is not an array cannot enter a `shard_map` and is closed over.
    whole: dict[Any, Any] = {p: arg for p, arg in enumerate(args) if p != 1}
    whole |= call._replace(num_real=None if per_device else num_real)._asdict()
    leaves, tree = jax.tree.flatten(list(whole.values()))
    arrays = [isinstance(x, jax.Array | np.ndarray) for x in leaves]
    specs = _specs_of(whole, args, options, own)
    given = [jnp.asarray(x) for x, a in zip(leaves, arrays, strict=True) if a]
    specs = [spec for spec, a in zip(specs, arrays, strict=True) if a]
    layout: dict[str, Any] = {}
    grad_specs = jax.tree.leaves(_grad_specs(args, options, out, rows))
    groups = list(dict.fromkeys([PartitionSpec(), rows, *grad_specs]))

    def window_fn(given: list[Any], sharded: Any) -> list[list[Any]]:
        supply = iter(given)
        mixed = [next(supply) if a else x for x, a in zip(leaves, arrays, strict=True)]
        named: dict[Any, Any] = dict(zip(whole, jax.tree.unflatten(tree, mixed), strict=True))
        batch, real = sharded
        own = Given(*[named[name] for name in Given._fields])
        if per_device:
            own = own._replace(num_real=jnp.asarray(real)[0])
        named[1] = batch
        result = Bound(local, [named[p] for p in range(len(args))], own).sums()
        flat, layout["tree"] = jax.tree.flatten(result)
        kinds = layout["kinds"] = _kinds(result, rows, grad_specs)
        layout["empty"] = [x for x, kind in zip(flat, kinds, strict=True) if kind is None]
        return [[x for x, kind in zip(flat, kinds, strict=True) if kind == g] for g in groups]

    given = [_place(x, spec, mesh, names) for x, spec in zip(given, specs, strict=True)]
    sharded = (args[1], num_real if per_device else None)
    sharded = jax.tree.map(lambda x: _place(x, rows, mesh, names), sharded)
    results = jax.shard_map(
        window_fn,
        mesh=mesh,
        in_specs=(specs, rows),
        out_specs=groups,
        axis_names=set(names),
        # JAX types no collective over an axis that is not of the mesh.
        check_vma=options.window_axis_name is None,
    )(given, sharded)
    supplies: dict[Any, Any] = dict(zip(groups, map(iter, results), strict=True))
    supplies[None] = iter(layout["empty"])
    return jax.tree.unflatten(layout["tree"], [next(supplies[kind]) for kind in layout["kinds"]])


def combine(options: Options, args: Sequence[Any], key: Any, num_real: Any) -> Any:
    """The combined outputs of `microbatch`, from each device's own rows of the batch, `args[1]`.

    Raises:
      ValueError: there is no mesh with these axes, or the rows do not divide by the devices.
    """
    names, mesh, _ = _devices(options, args)
    local = dataclasses.replace(options, axis_name=names, spmd_axis_name=None)
    whole = {"args": [a for p, a in enumerate(args) if p != 1], "key": key, "real": num_real}
    # What is not an array cannot enter a `shard_map` and is closed over.
    leaves, tree = jax.tree.flatten(whole)
    arrays = [isinstance(x, jax.Array | np.ndarray | float) for x in leaves]
    given = [jnp.asarray(x) for x, a in zip(leaves, arrays, strict=True) if a]

    def local_fn(given: list[Any], batch: Any) -> Any:
        supply = iter(given)
        mixed = [next(supply) if a else x for x, a in zip(leaves, arrays, strict=True)]
        named = jax.tree.unflatten(tree, mixed)
        every = [named["args"][0], batch, *named["args"][1:]]
        return Replay(local, every, named["key"], named["real"]).combined()

    everywhere, rows = PartitionSpec(), PartitionSpec(names)
    given = [_place(x, everywhere, mesh, names) for x in given]
    batch = jax.tree.map(lambda x: _place(x, rows, mesh, names), args[1])
    return jax.shard_map(
        local_fn,
        mesh=mesh,
        in_specs=(everywhere, rows),
        out_specs=everywhere,
        axis_names=set(names),
    )(given, batch)


def _devices(options: Options, args: Sequence[Any]) -> tuple[tuple[str, ...], Any, int]:
    """The axes, their mesh and how many devices there are, whose number the rows divide by."""
    names = devices.names_of(options.function, "spmd_axis_name", options.spmd_axis_name)
    mesh = mesh_of(options.function, names, args)
    number = int(np.prod([mesh.shape[name] for name in names]))
    _check_rows(options.function, cut.batch_size(options.function, args[1]), number, names)
    return names, mesh, number


def _check_rows(function: str, rows: int, number: int, names: tuple[str, ...]) -> None:
    if rows % number:
        raise ValueError(
            f"{function}: the batch has {rows} rows, which do not divide by the {number} devices "
            f"of `spmd_axis_name` {names}. Pad it with `ja.pad_batch` to "
            f"{-(-rows // number) * number} rows."
        )


def _differentiated(args: Sequence[Any], options: Options) -> tuple[tuple[int, ...], Any]:
    """The positions of the differentiated arguments, and those but for the batch as one tree."""
    positions = checks.argnums(options.function, options.argnums, len(args))
    trees = tuple(args[p] for p in positions if p != 1)
    one = not isinstance(options.argnums, Sequence) and trees
    return positions, trees[0] if one else trees


def _layouts(
    options: Options, args: Sequence[Any], mesh: Any, names: tuple[str, ...]
) -> tuple[Any, Any]:
    """The specs over `names` of each parameter and of each gradient leaf."""
    _, tree = _differentiated(args, options)

    def spread(found: Sequence[Shard | None]) -> Any:
        specs = [shard.spec() if shard else PartitionSpec() for shard in found]
        return jax.tree.unflatten(jax.tree.structure(tree), specs)

    def of_type(leaf: Any) -> Shard | None:
        explicit = [name for name in names if compat.is_explicit(mesh, name)]
        if not (explicit and isinstance(leaf, jax.Array)):
            return None
        return shard_of(options.function, "params", compat.spec_of(leaf), explicit)

    if options.param_specs is None:
        own = spread([of_type(leaf) for leaf in jax.tree.leaves(tree)])
    else:
        own = spread(shards(options.function, "param_specs", options.param_specs, tree, names))
    if options.grad_specs is None:
        return own, own
    return own, spread(shards(options.function, "grad_specs", options.grad_specs, tree, names))


def _specs_of(
    whole: dict[Any, Any], args: Sequence[Any], options: Options, own: Any
) -> list[PartitionSpec]:
    """The spec of each leaf of what enters the `shard_map` beside the batch."""
    by_position = _by_position(args, options, own)
    specs: list[PartitionSpec] = []
    for name, value in whole.items():
        replicated = [PartitionSpec()] * len(jax.tree.leaves(value))
        specs += jax.tree.leaves(by_position[name]) if name in by_position else replicated
    return specs


def _by_position(args: Sequence[Any], options: Options, specs: Any) -> dict[Any, Any]:
    positions, _ = _differentiated(args, options)
    positions = tuple(p for p in positions if p != 1)
    trees = specs if isinstance(options.argnums, Sequence) else (specs,)
    return dict(zip(positions, trees, strict=False))


def _grad_specs(args: Sequence[Any], options: Options, out: Any, rows: PartitionSpec) -> Any:
    """The spec of each leaf of the gradients, in the order of `argnums`."""
    by_position = _by_position(args, options, out)
    positions, _ = _differentiated(args, options)
    by_position[1] = jax.tree.map(lambda _: rows, args[1])
    return [by_position[p] for p in positions]


def _kinds(
    sums: WindowSums, rows: PartitionSpec, grad_specs: Sequence[PartitionSpec]
) -> list[PartitionSpec | None]:
    """How each leaf of the sums lies over the devices; `None` for leaves without values."""
    whole = PartitionSpec()
    kinds: list[PartitionSpec | None] = [
        None if leaf.dtype == jax.dtypes.float0 else spec
        for leaf, spec in zip(jax.tree.leaves(sums.grads), grad_specs, strict=True)
    ]
    kinds += [whole] * len(jax.tree.leaves((sums.loss, sums.weight)))
    kinds += [rows if r.emits else whole for r in jax.tree.leaves(reducers_of(sums.aux))]
    kinds += [whole] * (len(jax.tree.leaves(sums)) - len(kinds))
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
    entry = spec[dimension] if dimension < len(spec) else None
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


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
