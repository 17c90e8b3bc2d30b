"""The arguments of a compiled step: their names, their sharding, and which of them are what."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxaccum.auditing import hlo


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array among the arguments, or one of the gradient.

    The first two keys of `path` say which argument it belongs to; `spec` holds the mesh axes that
    shard each dimension; `number` is that of the compiled program's parameter, `None` if it was
    left out.
    """

    label: str
    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any
    spec: tuple[tuple[str, ...], ...]
    donated: bool = False
    number: int | None = None

    @property
    def inexact(self) -> bool:
        """Whether it holds floating or complex numbers."""
        return jax.numpy.issubdtype(self.dtype, np.inexact)

    def local_shape(self, mesh: Mapping[str, int], whole: Sequence[str] = ()) -> tuple[int, ...]:
        """The shape on one device, as if the axes `whole` did not shard it."""
        factors = [math.prod(mesh[n] for n in entry if n not in whole) for entry in self.spec]
        return tuple(-(-dim // factor) for dim, factor in zip(self.shape, factors, strict=True))


def _shardings(compiled: Any) -> list[Any]:
    """The sharding of each array argument, `None` for those that the program leaves out."""
    tree: Any = jax.tree.structure(compiled.args_info)
    return tree.flatten_up_to(compiled.input_shardings)


def mesh_of(compiled: Any, number: int) -> dict[str, int] | None:
    """The mesh of the arguments, of the outputs, or of the context, if it fits the program."""
    shardings = [*_shardings(compiled), *jax.tree.leaves(compiled.output_shardings)]
    meshes = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if mesh.axis_names and math.prod(mesh.shape.values()) == number:
            return {name: mesh.shape[name] for name in mesh.axis_names}
    return None


def _spec(
    sharding: Any, shape: tuple[int, ...], mesh: Mapping[str, int] | None
) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that shard each dimension, from any kind of sharding; none where unknown."""
    nothing: tuple[tuple[str, ...], ...] = ((),) * len(shape)
    if sharding is None or not mesh or not shape:
        return nothing
    if isinstance(sharding, jax.sharding.NamedSharding):
        entries = [*sharding.spec, *nothing][: len(shape)]
        spec = tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in entries)
        return spec if {name for entry in spec for name in entry} <= set(mesh) else nothing
    if sharding.is_fully_replicated or len(sharding.device_set) != math.prod(mesh.values()):
        return nothing
    indices = sharding.devices_indices_map(shape).values()  # in the order of the mesh
    starts = [[piece.start or 0 for piece in index] for index in indices]
    found: list[tuple[str, ...]] = []
    for column in np.array(starts).T:
        places = column.reshape(tuple(mesh.values()))
        varying = (bool((np.diff(places, axis=i) != 0).any()) for i in range(places.ndim))
        found.append(tuple(name for name, varies in zip(mesh, varying) if varies))
    return tuple(found)


def leaves_of(compiled: Any, program: hlo.Program, mesh: Mapping[str, int] | None) -> list[Leaf]:
    """The array arguments, each with its parameter in the program.

    `jit` leaves out unused arguments and keeps the order of the others.
    """
    info = jax.tree_util.tree_leaves_with_path(compiled.args_info)
    shardings, parameters = _shardings(compiled), program.entry.parameters
    kept = [i for i, sharding in enumerate(shardings) if sharding is not None]
    if len(kept) != len(parameters):
        kept = []  # constants became parameters: which is which is not known
    numbers = {i: number for number, i in enumerate(kept)}
    leaves = []
    for i, (path, leaf) in enumerate(info):
        number = numbers.get(i)
        label = parameters[number].op_name if number is not None else ""
        label = label or ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
        spec = _spec(shardings[i], leaf.shape, mesh)
        leaves.append(Leaf(label, path, leaf.shape, leaf.dtype, spec, leaf.donated, number))
    return leaves


def roles_of(leaves: list[Leaf], gradient_like: Any) -> tuple[list[Leaf], list[Leaf]]:
    """The leaves of the gradient, and those arguments that belong to the batch."""
    if gradient_like is None:
        order = {leaf.path[:2]: leaf.path[0].idx for leaf in leaves}  # keywords by the alphabet
        params = [path for path, keyword in order.items() if keyword and _is_params(path[1])]
        first = [*(path for path, keyword in order.items() if not keyword), *params, *order][:1]
        of_first = [leaf for leaf in leaves if leaf.path[:2] in first]
        inside = [leaf for leaf in of_first if len(leaf.path) > 2 and _is_params(leaf.path[2])]
        gradient = inside or of_first
        others = [leaf for leaf in leaves if leaf.path[:2] not in first]
    else:
        known = {leaf.shape: leaf.spec for leaf in reversed(leaves) if leaf.inexact}
        gradient = []
        for path, x in jax.tree.leaves_with_path(gradient_like):
            label, dtype = jax.tree_util.keystr(path), jax.dtypes.result_type(x)
            spec = known.get(np.shape(x), ((),) * np.ndim(x))
            gradient.append(Leaf(label, path, np.shape(x), dtype, spec))
        others = leaves
    gradient = [leaf for leaf in gradient if leaf.inexact]
    shapes = {leaf.shape for leaf in gradient}
    return gradient, [leaf for leaf in others if leaf.shape and leaf.shape not in shapes]


def _is_params(key: Any) -> bool:
    return "params" in (getattr(key, "key", None), getattr(key, "name", None))
