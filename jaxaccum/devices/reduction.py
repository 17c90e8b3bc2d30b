"""The fold over devices: one reduction of local sums, at the window's end."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxaccum.core import checks, compat, dtypes
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.mean import as_float, divide, kept_sum, wide
from jaxaccum.core.reducers import Addition, Latest, Maximum, Minimum, Moments, Reducer
from jaxaccum.core.sums import WindowSums
from jaxaccum.devices import shards


def names_of(function: str, argument: str, value: Any) -> tuple[str, ...]:
    """One axis name or a sequence of them as a tuple; `None` is none.

    Raises:
      TypeError: `value` is something else.
      ValueError: a name comes twice.
    """
    if value is None:
        return ()
    names = (value,) if isinstance(value, str) else value
    if not (isinstance(names, Sequence) and names and all(isinstance(n, str) for n in names)):
        raise TypeError(
            f"{function}: `{argument}` must be the name of a mesh axis or a tuple of names, got "
            f"{checks.describe(value)}."
        )
    if len(set(names)) != len(names):
        raise ValueError(f"{function}: `{argument}` names an axis twice, got {tuple(names)}.")
    return tuple(names)


def axes(function: str, axis_name: Any) -> tuple[str, ...]:
    """`axis_name` as a tuple of mesh axes that are bound here.

    Raises:
      TypeError: `axis_name` is not a name or a sequence of names.
      ValueError: a name is not bound by `shard_map` or `pmap` around the call.
    """
    names = names_of(function, "axis_name", axis_name)
    for name in names:
        if not is_bound(name):
            raise ValueError(
                f"{function}: `axis_name` names the axis {name!r}, which is not bound here. Call "
                "it inside `jax.shard_map` or `jax.pmap` over that axis, or use "
                f"`spmd_axis_name={name!r}` under plain `jit`."
            )
    return names


def is_bound(name: str) -> bool:
    """Whether the code runs inside a `shard_map` or `pmap` over the axis `name`."""
    try:
        lax.axis_size(name)
    except (NameError, ValueError):
        return False
    return True


def checked(names: Sequence[str]) -> frozenset[str]:
    """Those of the bound axes `names` over which replication is checked."""
    return frozenset().union(*(compat.varying_axes(lax.axis_index(name)) for name in names))


def vary(tree: Any, over: frozenset[str]) -> Any:
    """Casts every leaf to differ over the axes `over`; the values stay."""
    if not over:
        return tree
    return jax.tree.map(lambda x: compat.vary(jnp.asarray(x), over), tree)


def reduce(
    reducers: Sequence[Reducer],
    carries: Sequence[Any],
    names: tuple[str, ...],
    holds: Any,
    scatters: Sequence[shards.Shard | None] | None = None,
    done: Sequence[shards.Shard | None] | None = None,
    over: Sequence[tuple[str, ...]] | None = None,
    wires: Sequence[Any] | None = None,
) -> list[Any]:
    """Combines the devices' carries; all sums meet in one reduction.

    Stacked and concatenated outputs stay on their device: as shards of an output over the same
    axes they are in the order of the whole batch.

    Args:
      reducers: the reducer of each carry.
      carries: what each device holds.
      names: the mesh axes.
      holds: whether this device holds any micro-batch; a boolean scalar. The last device that does
        has the last micro-batch.
      scatters: the shard into which each sum is reduce-scattered, `None` for whole sums.
      done: the shard into which each sum was reduce-scattered in the loop.
      over: the axes over which each is combined; `names` by default.
      wires: the dtype in which each sum travels, `None` for its own.
    """
    if not names:
        return list(carries)
    out = list(carries)

    def of(kind: type[Reducer]) -> list[int]:
        return [i for i, r in enumerate(reducers) if isinstance(r, kind)]

    nowhere: list[shards.Shard | None] = [None] * len(out)
    scatters, done, over = scatters or nowhere, done or nowhere, over or [names] * len(out)
    wires = wires or nowhere
    added = of(Addition)
    # A count travels with its rounded value, which tells whether the sum of the integers wrapped.
    counts = [i for i in added if _is_count(carries[i])]
    sums = shards.reduce_sums(
        [reducers[i].outgoing(carries[i]) for i in added]
        + [as_float(carries[i], jnp.float32) for i in counts],
        [scatters[i] for i in added] + [None] * len(counts),
        [done[i] for i in added] + [None] * len(counts),
        [over[i] for i in [*added, *counts]],
        [wires[i] for i in added] + [None] * len(counts),
    )
    estimates = dict(zip(counts, sums[len(added) :], strict=True))
    for i, total in zip(added, sums[: len(added)], strict=True):
        out[i] = reducers[i].renormalise(total)
        if i in estimates:
            out[i] = kept_sum(out[i], estimates[i])
    for kind, collective in ((Maximum, lax.pmax), (Minimum, lax.pmin)):
        for i in of(kind):
            if over[i]:
                out[i] = widened(lambda x, c=collective: _with_nan(c, x, over[i]), carries[i])
    for i in of(Moments):
        number, mean, squares = carries[i]
        every = lax.psum(number, names)
        center = divide(lax.psum(number * mean, names), every, empty=0.0)
        distance = mean - vary(center, compat.varying_axes(mean))
        out[i] = jnp.stack([every, center, lax.psum(squares + number * distance**2, names)])
    last = {axes: is_last(holds, axes) for axes in {over[i] for i in of(Latest)}}
    for i in of(Latest):
        if over[i]:
            mine = last[over[i]]
            out[i] = widened(
                lambda x: lax.psum(jnp.where(mine, x, jnp.zeros_like(x)), over[i]), carries[i]
            )
    return out


def _with_nan(collective: Any, x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """`pmax` or `pmin` that reads nan where any device does; on CPU they drop it."""
    if not is_inexact(x):
        return collective(x, names)
    bad = jnp.isnan(x)
    end = dtypes.lowest(x.dtype) if collective is lax.pmax else dtypes.highest(x.dtype)
    found = collective(jnp.where(bad, np.asarray(end, x.dtype), x), names)
    any_bad = lax.pmax(bad.astype(jnp.int32), names) > 0
    return jnp.where(any_bad, np.asarray(jnp.nan, x.dtype), found)


def without(names: tuple[str, ...], own: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """For each parameter the axes of `names` over which it is not a device's own."""
    return [tuple(name for name in names if name not in apart) for apart in own]


def reduce_window(
    sums: WindowSums,
    names: tuple[str, ...],
    *,
    own: Sequence[tuple[str, ...]],
    shards: Sequence[shards.Shard | None] = (),
    done: Sequence[bool] = (),
    wire: Any = None,
) -> WindowSums:
    """The sums of all devices; `reduce` says how.

    Args:
      sums: what this device holds.
      names: the mesh axes.
      own: for the first of the gradients, the parameters', the axes over which each is a device's
        own.
      shards: the part of each of them that this device keeps, `None` for the whole.
      done: whether each was reduce-scattered in the loop.
      wire: the dtype in which they travel, `None` for their own; nothing else does.
    """
    tree: Any
    reducers, tree = jax.tree.flatten(sums.reducers)
    rest: list[Any] = [None] * (len(reducers) - len(shards))  # gradients are the first field
    flags = done or [False] * len(shards)
    carries = reduce(
        reducers,
        tree.flatten_up_to(sums),
        names,
        sums.num_microbatches is None or sums.num_microbatches > 0,
        scatters=[*(None if f else s for s, f in zip(shards, flags, strict=True)), *rest],
        done=[*(s if f else None for s, f in zip(shards, flags, strict=True)), *rest],
        over=[*without(names, own), *[names] * (len(reducers) - len(own))],
        wires=[*[wire] * len(own), *[None] * (len(reducers) - len(own))],
    )
    return jax.tree.unflatten(tree, carries)


def is_last(holds: Any, names: tuple[str, ...]) -> jax.Array:
    """Whether this is the last of the devices where `holds` is true."""
    if not names:
        return jnp.asarray(holds)
    rank = jnp.where(holds, place_of(names), -1)
    return rank == lax.pmax(rank, names)


def number_of(names: tuple[str, ...]) -> int:
    """How many devices there are over the bound axes `names`."""
    return lax.axis_size(names) if names else 1


def place_of(names: tuple[str, ...]) -> jax.Array:
    """This device's place among those over `names`, also in a rule that runs after its `vmap`."""
    if all(map(is_bound, names)):
        return lax.axis_index(names)
    place = jnp.int32(0)
    for name in names:
        place = place * lax.psum(jnp.int32(1), name) + lax.axis_index(name)
    return place


def gather(x: jax.Array, names: tuple[str, ...], number: int) -> jax.Array:
    """All devices' `x`, concatenated along axis 0 in their order; the same on each device.

    A rule of differentiation that runs after its `vmap` no longer finds how many there are, and so
    takes their `number`.
    """
    if not checked(names) and all(map(is_bound, names)):
        return lax.all_gather(x, names, tiled=True)
    return widened(lambda part: _gathered(part, names, number), x)


def _gathered(x: jax.Array, names: tuple[str, ...], number: int) -> jax.Array:
    # The type of a gathered array says that it differs per device; that of a sum does not.
    shape, spec = (number, *x.shape), compat.spec_of(x)
    # Where `x` lies in parts over an axis that is not of `names`, so does the whole.
    wider = jax.sharding.PartitionSpec(None, *spec) if any(spec) else None
    whole = jnp.zeros(shape, x.dtype, out_sharding=wider)
    whole = lax.dynamic_update_index_in_dim(
        vary(whole, compat.varying_axes(x)), x, place_of(names), axis=0
    )
    whole = lax.psum(whole, names)
    return whole.reshape((-1, *x.shape[1:]), out_sharding=spec if any(spec) else None)


def own_part(x: jax.Array, names: tuple[str, ...], number: int) -> jax.Array:
    """This device's part of what `gather` made."""
    if not names:
        return x
    size = x.shape[0] // number
    return lax.dynamic_slice_in_dim(x, place_of(names) * size, size)


def _is_count(carry: Any) -> bool:
    scalar = isinstance(carry, jax.Array) and carry.ndim == 0
    return bool(scalar and jnp.issubdtype(carry.dtype, jnp.integer))


def agree(flag: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Whether `flag` holds on every device: one scalar."""
    if not names:
        return flag
    return lax.pmin(flag.astype(jnp.int32), names) > 0


def with_device_axis(tree: Any, names: tuple[str, ...]) -> Any:
    """Adds a leading axis of devices to every leaf: this device's 1, or all of them outside.

    Outside of `shard_map` and `pmap` the mesh of the context says how many there are.
    """
    if not names:
        return tree
    if all(is_bound(name) for name in names):
        return vary(jax.tree.map(lambda x: x[None], tree), checked(names))
    mesh = jax.sharding.get_abstract_mesh()
    if not set(names) <= set(mesh.axis_names):
        return jax.tree.map(lambda x: x[None], tree)
    number = int(np.prod([mesh.shape[name] for name in names]))

    def spread(x: jax.Array) -> jax.Array:
        spec = jax.sharding.PartitionSpec(names, *compat.spec_of(x))
        x = jnp.broadcast_to(x[None], (number, *x.shape))
        explicit = all(compat.is_explicit(mesh, name) for name in names)
        return jax.sharding.reshard(x, spec) if explicit else x

    return jax.tree.map(spread, tree)


def without_device_axis(tree: Any, names: tuple[str, ...]) -> Any:
    """The leaves of one device, without their leading axis."""
    return jax.tree.map(lambda x: jnp.squeeze(x, 0), tree) if names else tree


def widened(collective: Any, x: jax.Array) -> jax.Array:
    """Runs a collective in a dtype that every backend reduces and that has a zero."""
    half = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    if half or x.dtype == jnp.bool_ or dtypes.promote(x) != x.dtype:
        return collective(x.astype(wide(x.dtype))).astype(x.dtype)
    return collective(x)
