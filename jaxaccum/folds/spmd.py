"""A window under plain `jit`: the library writes the `shard_map` over the data axis itself."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxaccum.core import checks, compat
from jaxaccum.core.reducers import Concatenation, reducers_of
from jaxaccum.core.sums import WindowSums
from jaxaccum.folds import cut, devices


def axes(function: str, spmd_axis_name: Any, axis_name: Any) -> tuple[str, ...]:
    """`spmd_axis_name` as a tuple; empty where it is not given."""
    if spmd_axis_name is None:
        return ()
    if axis_name is not None:
        raise ValueError(
            f"{function}: `axis_name` is for code inside `shard_map` or `pmap`, `spmd_axis_name` "
            "for plain `jit`; pass one of them."
        )
    return devices.names_of(function, "spmd_axis_name", spmd_axis_name)


def spread(
    function: str,
    names: tuple[str, ...],
    window_fn: Callable[..., WindowSums],
    args: Sequence[Any],
    keywords: dict[str, Any],
) -> WindowSums:
    """Runs `window_fn(*args, **keywords)` on each device's own rows of the batch, `args[1]`.

    Parameters and all other arguments are whole on each device as far as the axes `names` go;
    other mesh axes stay as they are.

    Args:
      function: the public function's name.
      names: the mesh axes over which rows are split.
      window_fn: reduces over `names` itself.
      args: the positional arguments.
      keywords: the keyword arguments; `num_real` may hold one number for each device.

    Raises:
      ValueError: there is no mesh with these axes, or the rows do not divide by the devices.
    """
    mesh = _mesh(function, names, (args, keywords))
    number = int(np.prod([mesh.shape[name] for name in names]))
    rows = cut.batch_size(function, args[1])
    if rows % number:
        raise ValueError(
            f"{function}: the batch has {rows} rows, which do not divide by the {number} devices "
            f"of `spmd_axis_name` {names}. Pad it with `ja.pad_batch` to {-(-rows // number)} rows "
            "per device, or drop rows on purpose."
        )
    split = PartitionSpec(names)
    num_real: Any = keywords.get("num_real")
    per_device = np.ndim(num_real) == 1
    if per_device and np.shape(num_real) != (number,):
        raise ValueError(
            f"{function}: `num_real` must be a scalar or one number for each of the {number} "
            f"devices, got {checks.describe(num_real)}."
        )
    whole = (tuple(a for i, a in enumerate(args) if i != 1), {**keywords})
    sharded = (args[1], whole[1].pop("num_real") if per_device else None)
    leaves, tree = jax.tree.flatten(whole)
    arrays = [isinstance(x, jax.Array | np.ndarray) for x in leaves]
    layout: dict[str, Any] = {}

    def local(given: list[Any], sharded: Any) -> tuple[list[Any], list[Any]]:
        supply = iter(given)
        rest, named = jax.tree.unflatten(
            tree, [next(supply) if a else x for x, a in zip(leaves, arrays, strict=True)]
        )
        batch, real = sharded
        if real is not None:
            named["num_real"] = jnp.asarray(real)[0]
        sums = window_fn(rest[0], batch, *rest[1:], **named)
        flat, layout["tree"] = jax.tree.flatten(sums)
        layout["kinds"] = kinds = _kinds(sums)
        layout["empty"] = [x for x, kind in zip(flat, kinds, strict=True) if kind == "float0"]
        return (
            [x for x, kind in zip(flat, kinds, strict=True) if kind == "whole"],
            [x for x, kind in zip(flat, kinds, strict=True) if kind == "split"],
        )

    sharded = jax.tree.map(lambda x: _place(x, split, mesh, names), sharded)
    out = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), split),
        out_specs=(PartitionSpec(), split),
        axis_names=set(names),
    )([jnp.asarray(x) for x, a in zip(leaves, arrays, strict=True) if a], sharded)
    supplies = {"whole": iter(out[0]), "split": iter(out[1]), "float0": iter(layout["empty"])}
    return jax.tree.unflatten(layout["tree"], [next(supplies[kind]) for kind in layout["kinds"]])


def _kinds(sums: WindowSums) -> list[str]:
    """For each leaf of the sums: the same on all devices, split over them, or without values."""
    reducers = sums.grad_reducers or ()
    kinds = []
    for number, leaf in enumerate(jax.tree.leaves(sums.grads)):
        if leaf.dtype == jax.dtypes.float0:
            kinds.append("float0")
        elif reducers and isinstance(reducers[number], Concatenation):
            kinds.append("split")
        else:
            kinds.append("whole")
    scalars = jax.tree.leaves((sums.loss, sums.weight))
    kinds += ["whole"] * len(scalars)
    kinds += ["split" if r.emits else "whole" for r in jax.tree.leaves(reducers_of(sums.aux))]
    kinds += ["whole"] * (len(jax.tree.leaves(sums)) - len(kinds))
    return kinds


def _place(x: Any, split: PartitionSpec, mesh: Any, names: tuple[str, ...]) -> jax.Array:
    """Rows split over `names`, where an Explicit mesh would refuse other types."""
    x = jnp.asarray(x)
    explicit = all(compat.is_explicit(mesh, name) for name in names)
    return jax.sharding.reshard(x, split) if explicit else x


def _mesh(function: str, names: tuple[str, ...], arguments: Any) -> Any:
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
