"""Parameters of a stream that are each device's own: `local_params` of `multi_steps`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxaccum.closing.leaves import differentiated, is_none
from jaxaccum.core import compat
from jaxaccum.devices import reduction, shards
from jaxaccum.numerics import accumulators


def own_axes(
    grads: Any, params: Any, specs: Any, moves: Sequence[bool], axes: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """For each gradient that moves the axes over which its parameter is a device's own.

    Args:
      grads: the gradients.
      params: the parameters, or `None` where the caller gave none.
      specs: `local_params`.
      moves: for each leaf of `grads`, `None` included, whether it is a gradient.
      axes: the axes of the window.

    Raises:
      TypeError: a leaf of `local_params` is not a `PartitionSpec`.
      ValueError: it is no tree prefix, or a parameter is typed as different for no known reason.
    """
    places = _local_specs(grads, specs, axes)
    own = tuple(shards.axes_in(spec) for spec, moving in zip(places, moves, strict=True) if moving)
    if params is not None and axes:
        named = jax.tree_util.tree_leaves_with_path(differentiated(params), is_leaf=is_none)
        leaves = [pair for pair, moving in zip(named, moves, strict=True) if moving]
        for (path, leaf), apart in zip(leaves, own, strict=True):
            over = compat.varying_axes(jnp.asarray(leaf)) & reduction.checked(axes)
            unsaid = sorted(over - set(apart))
            if unsaid:
                raise ValueError(
                    f"multi_steps: `params{jax.tree_util.keystr(path)}` differs over {unsaid} by "
                    "its type, so that the sum of its gradients over the window would mix those of "
                    "different parameters. Where each device has its own there (experts, stages) "
                    f"pass `local_params=P({unsaid[0]!r})` for it; where it is the same, pass it "
                    "as it came into the `shard_map`, with `P()`."
                )
    return own


def own_parts(params: Any, specs: Any, axes: tuple[str, ...]) -> Any:
    """Arrays with the shapes that one device has of the parameters.

    Outside of `shard_map` and `pmap` the mesh of the context says what part that is.
    """
    params = jax.tree.map(jnp.asarray, params)
    mesh = jax.sharding.get_abstract_mesh()
    bound = all(reduction.is_bound(name) for name in axes)
    if specs is None or bound or not set(axes) <= set(mesh.axis_names):
        return params
    leaves, tree = jax.tree.flatten(params)
    places = _local_specs(params, specs, axes, is_leaf=None)
    parts = [_part(x, spec, mesh) for x, spec in zip(leaves, places, strict=True)]
    return jax.tree.unflatten(tree, parts)


def inner_specs(inner_state: Any, grad_carry: Any, specs: Any, axes: tuple[str, ...]) -> Any:
    """How an inner optimizer's state lies: what it holds of parameters, as these do.

    Args:
      inner_state: the state; its parts that have the structure of the parameters are theirs.
      grad_carry: the carries of the stream, which tell that structure.
      specs: `local_params`.
      axes: the axes of the window.
    """
    structure: Any = jax.tree.structure(grad_carry, is_leaf=accumulators.is_carry)
    filled = jax.tree.unflatten(structure, [0] * structure.num_leaves)
    places = _local_specs(filled, specs, axes)

    def is_params(node: Any) -> bool:
        return bool(structure == jax.tree.structure(node, is_leaf=is_none))

    def lay(node: Any) -> Any:
        if not is_params(node):
            return PartitionSpec()
        leaves = jax.tree.leaves(node, is_leaf=is_none)
        found = [
            leaf if leaf is None else spec if len(spec) <= np.ndim(leaf) else PartitionSpec()
            for leaf, spec in zip(leaves, places, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    return jax.tree.map(lay, inner_state, is_leaf=is_params)


def _part(x: jax.Array, spec: PartitionSpec, mesh: Any) -> jax.Array:
    shape = list(x.shape)
    for dimension, entry in enumerate(spec):
        for name in shards.names_in(entry):
            shape[dimension] //= mesh.shape[name]
    return jnp.zeros(shape, x.dtype) if any(spec) else x


def _local_specs(
    tree: Any, specs: Any, axes: tuple[str, ...], is_leaf: Any = is_none
) -> list[PartitionSpec]:
    """For each leaf its part of `local_params` over the window's axes."""
    if specs is None:
        return [PartitionSpec()] * len(jax.tree.leaves(tree, is_leaf=is_leaf))
    found = shards.spread(
        "multi_steps", "local_params", specs, tree, of="parameters", is_leaf=is_leaf
    )
    known = (*jax.sharding.get_abstract_mesh().axis_names, *axes)
    return [shards.local_spec("multi_steps", spec, axes, known) for spec in found]
