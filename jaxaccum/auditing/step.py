"""Compiles a step and reports what it does."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxaccum.auditing import flow, frames, groups, hlo
from jaxaccum.auditing.arguments import Leaf, leaves_of, mesh_of, roles_of
from jaxaccum.auditing.findings import Collective, DonatedBuffer, LoopSum, Memory
from jaxaccum.auditing.report import Audit
from jaxaccum.core import checks
from jaxaccum.folds import devices


def audit(
    fn: Callable[..., Any] | jax.stages.Lowered | jax.stages.Compiled,
    *args: Any,
    axis_name: str | Sequence[str] | None = None,
    gradient_like: Any = None,
    min_bytes: int | None = None,
    **kwargs: Any,
) -> Audit:
    """Compiles any step, runs nothing, and reports what the compiled program does.

    It reads the compiler's own output, so that it sees the reductions that XLA inserts, moves or
    merges, which the traced program does not show.

    A collective is *gradient-sized* if it runs over axes that count and one of its floating-point
    arrays has as many elements as a parameter of two elements or more (the whole of it, or the
    part that a device holds), or half as many as the smallest matrix among the parameters (the
    smallest vector, if there is none) or more. Scalars and moved rows never are. Synchronised
    batch statistics have the size of a parameter and are marked; raise `min_bytes` above them.

    The axes that count are those over which the batch is sharded: the arguments other than the
    parameters and whatever has a parameter's shape. If it isn't sharded, all axes count. So an
    activation that is reduced over a tensor-parallel axis is reported, but not marked.

    Args:
      fn: a jitted function, any other function (which is then jitted), or the
        `jax.stages.Lowered` or `jax.stages.Compiled` of one, without further arguments.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct` with a sharding.
      axis_name: the mesh axes that count, in place of those found; a name or several.
      gradient_like: a tree of arrays or structs like the gradient. Default: the first positional
        argument, or else the keyword argument `params`; of it only what it holds under `params`,
        where it does.
      min_bytes: the payload from which on a collective is gradient-sized, in place of the rule.
      **kwargs: its keyword arguments.

    Returns:
      An `Audit`: `collectives`, `in_loops`, `outside`, `loop_bytes`, `outside_bytes`,
      `reduced_gradients`, `moved_rows`, `loop_sums`, `donated`, `memory`, `warnings`,
      `as_dict()`, and `assert_deferred()` for a test. Bytes are those of one call on one device.
      Rows are found to move where a collective is given an argument of the batch that was at most
      sliced, cast or rearranged on the way.

    Raises:
      TypeError: `fn` cannot be called, or is compiled already and comes with arguments.
      ValueError: `axis_name` names an axis that the mesh does not have.

    Example:
      >>> import jax.numpy as jnp
      >>> def step(params, batch):
      ...     return jax.grad(lambda p: jnp.sum((batch @ p) ** 2))(params)
      >>> report = audit(step, jnp.ones((4, 2)), jnp.ones((8, 4)))
      >>> report.gradient_bytes, report.loop_bytes, report.assert_deferred() is report
      (32, 0, True)
    """
    names = devices.names_of("audit", "axis_name", axis_name) if axis_name is not None else None
    minimum = checks.integer("audit", "min_bytes", min_bytes) if min_bytes is not None else None
    compiled = _compiled(fn, args, kwargs)
    program = hlo.parse(compiled.as_text() or "")
    mesh = mesh_of(compiled, program.num_devices)
    for name in names or ():
        if mesh is None or name not in mesh:
            raise ValueError(
                f"audit: `axis_name` names the axis {name!r}, which the mesh of the arguments does "
                f"not have, got {mesh}. Give the arguments a sharding on the mesh."
            )
    leaves = leaves_of(compiled, program, mesh)
    gradient, batch = roles_of(leaves, gradient_like, mesh)
    if names is None:
        sharded = {axis for leaf in batch for entry in leaf.spec for axis in entry}
        names = tuple(axis for axis in mesh or () if axis in sharded) or None
    sizes = _Sizes(gradient, mesh or {}, names, minimum)
    sizes.add_shards(math.prod((mesh or {})[name] for name in names or ()))
    return Audit(
        name=program.name,
        num_devices=program.num_devices,
        mesh=mesh,
        axis_name=names,
        gradient_bytes=sizes.bytes,
        collectives=tuple(_collectives(program, mesh, names, leaves, batch, sizes)),
        loop_sums=tuple(_loop_sums(program, sizes)),
        donated=tuple(_donated(program, leaves, mesh or {})),
        memory=_memory(compiled),
    )


class _Sizes:
    """How large the gradient and its parts are on one device."""

    def __init__(
        self,
        gradient: list[Leaf],
        mesh: Mapping[str, int],
        axes: Sequence[str] | None,
        minimum: int | None,
    ):
        self.minimum = minimum
        self.shapes: dict[tuple[int, ...], str] = {}
        self.numbers: set[int] = set()
        self.bytes = 0
        smallest: dict[bool, int] = {}
        for leaf in gradient:
            # A collective over the axes that count works on arrays that are whole over them.
            whole = leaf.local_shape(mesh, tuple(mesh) if axes is None else axes)
            held = leaf.local_shape(mesh)
            self.bytes += math.prod(whole) * max(4, leaf.dtype.itemsize)
            for shape in (whole, held):
                if math.prod(shape) > 1:
                    self.shapes.setdefault(tuple(sorted(shape)), leaf.label)
                    self.numbers.add(math.prod(shape))
            if math.prod(whole) > 1:
                matrix = sum(dim > 1 for dim in whole) > 1
                smallest[matrix] = min(smallest.get(matrix, math.prod(whole)), math.prod(whole))
        self.smallest = smallest.get(True, smallest.get(False))

    def add_shards(self, number: int) -> None:
        """Adds the shapes of sums that are scattered over `number` devices."""
        for shape, label in list(self.shapes.items()):
            for i, dim in enumerate(shape):
                if number > 1 and dim % number == 0:
                    part = (*shape[:i], dim // number, *shape[i + 1 :])
                    self.shapes.setdefault(tuple(sorted(part)), label)

    def like_gradient(self, arrays: Sequence[hlo.Array]) -> bool:
        """Whether a payload is large enough for a gradient."""
        if self.minimum is not None:
            return sum(a.bytes for a in arrays) >= self.minimum
        sizes = [a.size for a in arrays if a.inexact and a.size > 1]
        if self.smallest is None:
            return False
        return any(s in self.numbers or 2 * s >= self.smallest for s in sizes)


def _compiled(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(fn, jax.stages.Compiled | jax.stages.Lowered):
        if args or kwargs:
            raise TypeError(
                f"audit: `fn` is {type(fn).__name__}, compiled for its arguments already, and "
                f"{len(args) + len(kwargs)} more were given. Leave them out."
            )
    elif not callable(fn):
        raise TypeError(
            f"audit: `fn` must be a function, a `jax.stages.Lowered` or a `jax.stages.Compiled`, "
            f"got {checks.describe(fn)}. Pass the step itself and its arguments after it."
        )
    with warnings.catch_warnings():
        # The report says the same, for each buffer.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        if isinstance(fn, jax.stages.Compiled):
            return fn
        if not isinstance(fn, jax.stages.Lowered):
            fn = (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args, **kwargs)
        return fn.compile()


def _collectives(
    program: hlo.Program,
    mesh: dict[str, int] | None,
    counted: Sequence[str] | None,
    leaves: list[Leaf],
    batch: list[Leaf],
    sizes: _Sizes,
) -> list[Collective]:
    arguments = {leaf.number: leaf for leaf in leaves if leaf.number is not None}
    found = []
    for frame, op in frames.walk(program):
        if op.kind is None:
            continue
        members = groups.groups_of(op, program.num_devices)
        axes = groups.axes_of(members, mesh)
        alone = members is not None and all(len(set(group)) < 2 for group in members)
        overlap = counted is None or axes is None or bool(set(axes) & set(counted))
        counts = overlap and not alone
        arrays = frames.payload(frame, op)
        origins = {n for name in op.operands for n in flow.sources(program, frame, name) or ()}
        moved = [arguments[n] for n in sorted(origins) if n in arguments and not alone]
        rows = any(leaf in batch for leaf in moved)
        found.append(
            Collective(
                kind=op.kind,
                arrays=tuple(map(str, arrays)),
                bytes=0 if alone else sum(a.bytes for a in arrays),
                axes=axes,
                group_size=max(map(len, members), default=1) if members is not None else None,
                replica_groups=groups.text_of(op),
                loops=frame.loops,
                in_branch=frame.in_branch,
                branch_in_loop=frame.branch_in_loop,
                gradient_sized=counts and not rows and sizes.like_gradient(arrays),
                counts=counts,
                moves=tuple(leaf.label for leaf in moved),
                moves_rows=rows,
                op_name=op.op_name or frame.op_name,
            )
        )
    return found


def _loop_sums(program: hlo.Program, sizes: _Sizes) -> list[LoopSum]:
    found = []
    for frame, op in frames.walk(program):
        if op.opcode != "while":
            continue
        for carry in flow.carries(program, frame, op):
            like = sizes.shapes.get(tuple(sorted(carry.array.shape)))
            if like is not None and carry.array.inexact:
                found.append(
                    LoopSum(
                        carry.array.dtype_name,
                        carry.array.shape,
                        like,
                        carry.trip_count,
                        carry.op_name,
                    )
                )
    return found


def _donated(
    program: hlo.Program, leaves: list[Leaf], mesh: Mapping[str, int]
) -> list[DonatedBuffer]:
    aliased = program.aliased()
    found = []
    for leaf in leaves:
        if not leaf.donated:
            continue
        if leaf.number is not None:
            size = sum(a.bytes for a in hlo.arrays(program.parameters[leaf.number].type))
        else:
            size = math.prod(leaf.local_shape(mesh)) * leaf.dtype.itemsize
        found.append(
            DonatedBuffer(leaf.label, size, leaf.number in aliased, leaf.number is not None)
        )
    return found


def _memory(compiled: Any) -> Memory | None:
    try:
        stats = compiled.memory_analysis()
    except NotImplementedError:
        stats = None
    if stats is None:
        return None
    return Memory(
        int(stats.argument_size_in_bytes),
        int(stats.output_size_in_bytes),
        int(stats.alias_size_in_bytes),
        int(stats.temp_size_in_bytes),
    )
