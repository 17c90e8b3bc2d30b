"""The global norm of a tree whose arrays lie in parts on the devices of a `shard_map`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxaccum.closing.leaves import is_none
from jaxaccum.core import checks
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.mean import wide
from jaxaccum.devices import reduction, shards

__all__ = ["clip_by_global_norm", "global_norm"]


def global_norm(tree: Any, specs: Any = None) -> jax.Array:
    """The norm of all leaves together, those in parts with the parts of all devices.

    `sqrt(sum_leaf psum(sum(|leaf|^2), the leaf's axes))`. Inside `shard_map` and `pmap`
    `optax.tree.norm` is that of what one device holds: another number on each device where any leaf
    is in parts (`param_specs`, `grad_specs`, `local_params`). Under plain `jit`, where arrays are
    whole, both are the same.

    Args:
      tree: arrays; integers, booleans and keys are left out.
      specs: how they lie: a tree prefix of `tree` with `PartitionSpec` leaves, as `param_specs` and
        `local_params` are. `None`, and what names no axis, is the same on all devices.

    Returns:
      A scalar, float32 or wider, the same on all devices of the axes that `specs` names.

    Raises:
      TypeError: a leaf of `specs` is no `PartitionSpec`.
      ValueError: `specs` is no tree prefix, or names an axis that there is not.

    Example:
      >>> import jax
      >>> from jaxaccum import norms
      >>> mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
      >>> norm = lambda tree: norms.global_norm(tree, jax.P("data"))
      >>> split = jax.shard_map(norm, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
      >>> print(split(jnp.array([3.0, 4.0])))
      5.0
    """
    return _norm(tree, _axes("global_norm", tree, specs))


def clip_by_global_norm(max_norm: Any, specs: Any = None) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` by the norm of the whole, for gradients in parts.

    `g * min(1, max_norm / global_norm(g, specs))`. `optax.clip_by_global_norm` inside `shard_map`
    scales by the norm of what one device holds, so that parameters which devices share drift apart.

    Args:
      max_norm: the largest norm, in units of the gradient; a positive number, may be traced.
      specs: how the gradients lie over the devices; as in `global_norm`.

    Returns:
      A transformation without a state.

    Raises:
      TypeError: `max_norm` is no number.
      ValueError: it is not positive.

    Example:
      >>> from jaxaccum import norms
      >>> tx = norms.clip_by_global_norm(1.0)
      >>> grads = jnp.array([6.0, 8.0])
      >>> print(tx.update(grads, tx.init(grads))[0])
      [0.6 0.8]
    """
    checks.positive("clip_by_global_norm", "max_norm", max_norm)

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        norm = _norm(updates, _axes("clip_by_global_norm", updates, specs))

        def clipped(x: Any) -> Any:
            if not is_inexact(x):
                return x
            return jnp.where(norm < max_norm, x, (x / norm.astype(x.dtype)) * max_norm)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def of_window(grads: Any, options: Any) -> jax.Array:
    """The norm of a window's gradients, which lie as the window's options say."""
    names = reduction.names_of(options.function, "axis_name", options.axis_name)
    by = options.param_specs if options.grad_specs is None else options.grad_specs
    places = [_axes(options.function, grads, specs) for specs in (by, options.local_params)]
    axes = [tuple(n for n in names if n in {*a, *b}) for a, b in zip(*places, strict=True)]
    return _norm(grads, axes)


def _axes(function: str, tree: Any, specs: Any) -> list[tuple[str, ...]]:
    """For each leaf, `None` included, the bound axes over whose devices its parts lie."""
    leaves = jax.tree.leaves(tree, is_leaf=is_none)
    if specs is None:
        return [()] * len(leaves)
    found = shards.spread(function, "specs", specs, tree, of="tree", is_leaf=is_none)
    for spec in found:
        if not (spec is None or isinstance(spec, jax.P)):
            raise TypeError(
                f"{function}: the leaves of `specs` must be `PartitionSpec`s, got "
                f"{checks.describe(spec)}."
            )
    axes = [() if spec is None else shards.axes_in(spec) for spec in found]
    named = {name for over in axes for name in over}
    bound = {name for name in named if reduction.is_bound(name)}
    known = jax.sharding.get_abstract_mesh().axis_names
    for name in sorted(named - bound):
        if known and name not in known:
            raise ValueError(
                f"{function}: `specs` names the axis {name!r}, but the axes here are {known}. "
                "Name those over which the arrays are in parts."
            )
    return [tuple(name for name in over if name in bound) for over in axes]


def _norm(tree: Any, axes: Sequence[tuple[str, ...]]) -> jax.Array:
    groups: dict[tuple[str, ...], list[jax.Array]] = {}
    leaves = jax.tree.leaves(tree, is_leaf=is_none)
    for leaf, over in zip(leaves, axes, strict=True):
        if leaf is not None and is_inexact(leaf):
            leaf = jnp.asarray(leaf)
            groups.setdefault(over, []).append(leaf.astype(wide(leaf.dtype)))
    square = jnp.zeros(())
    for over, members in groups.items():
        part = optax.tree.norm(members, squared=True)
        if over:
            part = jax.lax.psum(reduction.vary(part, reduction.checked(over)), over)
        square = square + part
    return jnp.sqrt(square)
