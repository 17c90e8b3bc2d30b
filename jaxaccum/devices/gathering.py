"""One layer made whole from the devices' parts, its gradient summed into them: `gather`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import checks
from jaxaccum.core.checks import is_inexact
from jaxaccum.devices import reduction, shards, wires


def gather(parts: Any, specs: Any, dtype: Any = None, reduce_dtype: Any = jnp.float32) -> Any:
    """Makes parameters whole of which each device holds a part, for one layer of a model (ZeRO-3).

    `whole = all_gather(parts.astype(dtype))`. Its gradient comes back by one reduce-scatter: each
    device's part is the sum of all devices' gradients, as a window with `whole_params=False` adds
    it. Call it inside of the scan over layers and of the rematerialised layer, so that one layer is
    whole at a time, in the backward pass too.

    Args:
      parts: a tree of this device's parts.
      specs: how the whole lies over the mesh: a tree prefix of `parts` with `PartitionSpec` leaves,
        of the layer, that is without the axis that the scan has taken away. Axes that are not
        manual here are left to the compiler; `P()` and `None` are of what every device holds whole.
      dtype: the floating dtype of the whole, in which it travels; by default that of the part.
        Integers stay as they are.
      reduce_dtype: the floating dtype in which gradients travel and are summed.

    Returns:
      The tree of whole arrays.

    Raises:
      TypeError: a spec or a dtype is something else.
      ValueError: `specs` is no prefix, splits two dimensions, or names an axis that is not there.

    Example:
      >>> import jax, jaxaccum as ja, jax.numpy as jnp
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> def loss_fn(w, x):
      ...     return ja.mean(x @ ja.gather(w, jax.P("data"), dtype=jnp.bfloat16))
      >>> f = ja.value_and_grad(
      ...     loss_fn, num_microbatches=2, spmd_axis_name="data", param_specs=jax.P("data"),
      ...     whole_params=False,
      ... )
      >>> w, x = jnp.ones(8), jnp.ones((2 * jax.device_count(), 8))
      >>> with jax.set_mesh(mesh):
      ...     loss, grads = jax.jit(f)(w, x)
      >>> print(loss, grads)
      8.0 [1. 1. 1. 1. 1. 1. 1. 1.]
    """
    wires.check_dtype("gather", "reduce_dtype", reduce_dtype)
    if dtype is not None:
        wires.check_dtype("gather", "dtype", dtype)
    checks.arrays("gather", parts, name="parts")
    leaves, tree = jax.tree.flatten(parts)
    chosen = shards.spread("gather", "specs", specs, parts, of="parts")
    pairs = zip(map(jnp.asarray, leaves), chosen, strict=True)
    return jax.tree.unflatten(tree, [_whole(x, s, dtype, reduce_dtype) for x, s in pairs])


def _whole(x: jax.Array, spec: Any, dtype: Any, reduce_dtype: Any) -> jax.Array:
    moves = is_inexact(x) and not jnp.iscomplexobj(x)
    kind = jnp.dtype(x.dtype if dtype is None or not moves else dtype)
    shard = _bound(x, spec)
    if shard is None:
        return x.astype(kind)
    if not is_inexact(x):
        return shard.gather(x)
    return _gathered(x, shard, kind, reduce_dtype)


def _bound(x: jax.Array, spec: Any) -> shards.Shard | None:
    """The part of a spec over axes that are manual here.

    Raises:
      ValueError: one is neither manual nor of the mesh, or `x` does not have the dimension.
    """
    every = shards.axes_in(shards.checked_spec("specs", "gather", spec))
    mesh = jax.sharding.get_abstract_mesh()
    bound = [name for name in every if reduction.is_bound(name)]
    for name in every:
        if name not in bound and name not in mesh.axis_names:
            raise ValueError(
                f"gather: `specs` names the axis {name!r}, which is neither manual here nor of the "
                "mesh. Call it in the loss of a window with `whole_params=False`, under "
                "`spmd_axis_name`, or with `axis_name` inside `jax.shard_map`."
            )
    shard = shards.shard_of("gather", "specs", spec, bound)
    if shard is not None and shard.dimension >= x.ndim:
        raise ValueError(
            f"gather: `specs` {spec} splits dimension {shard.dimension} of a part that is "
            f"{checks.describe(x)}. Inside of a scan over layers, leave out the layers' axis."
        )
    return shard


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(x: jax.Array, shard: shards.Shard, kind: Any, reduce_dtype: Any) -> jax.Array:
    return shard.gather(x.astype(kind))


def _forward(x: jax.Array, shard: shards.Shard, kind: Any, reduce_dtype: Any) -> Any:
    return _gathered(x, shard, kind, reduce_dtype), jnp.zeros((), x.dtype)


def _backward(
    shard: shards.Shard, kind: Any, reduce_dtype: Any, like: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
    del kind
    sent = gradient.astype(wires.wire_of(gradient.dtype, reduce_dtype))
    return (shard.scatter(sent, reduce_dtype).astype(like.dtype),)


_gathered.defvjp(_forward, _backward)
