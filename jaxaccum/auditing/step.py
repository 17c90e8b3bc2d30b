"""Compiles a step and reports what it does."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxaccum.auditing import frames, groups, hlo
from jaxaccum.auditing.arguments import Leaf, leaves_of, mesh_of, roles_of
from jaxaccum.auditing.findings import Collective, DonatedBuffer, LoopSum, memory_of
from jaxaccum.auditing.flow import Flow, Node
from jaxaccum.auditing.report import REDUCTIONS, Audit
from jaxaccum.core import checks
from jaxaccum.devices import reduction


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

    A collective *reduces gradients* if it runs over axes that count and what it makes goes, number
    by number, into a sum that a loop carries or into a result that is flat or shaped like a
    parameter: whole, by layers, in buckets, as integers, or through an optimizer. Activations,
    which products mix, statistics, which are repeated over rows, and single numbers never do.
    How much is told in gradients, a number counted as four bytes at least.

    The axes that count are those over which the batch is sharded: the arguments other than the
    parameters and whatever has a parameter's shape. If it isn't sharded, all axes count.

    Args:
      fn: a jitted function, any other function (which is then jitted), or the
        `jax.stages.Lowered` or `jax.stages.Compiled` of one, without further arguments.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct` with a sharding.
      axis_name: the mesh axes that count, in place of those found; a name or several.
      gradient_like: a tree of arrays or structs like the gradient. Default: the first positional
        argument, or else the keyword argument `params`; of it only what it holds under `params`,
        where it does.
      min_bytes: takes every collective over the axes that count with this payload or more for a
        reduction of gradients, in place of the rule, and allows none in a loop.
      **kwargs: its keyword arguments.

    Returns:
      An `Audit`: `collectives`, `in_loops`, `outside`, their bytes and gradients, `moved_rows`,
      `loop_sums`, `donated`, `memory`, `warnings`, `as_dict()`, and `assert_deferred()` for a test.
      Bytes are those of one call on one device. Rows move where a collective is given an argument
      of the batch that was at most sliced, cast or rearranged.

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
    names = reduction.names_of("audit", "axis_name", axis_name) if axis_name is not None else None
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
    gradient, batch = roles_of(leaves, gradient_like)
    if names is None:
        sharded = {axis for leaf in batch for entry in leaf.spec for axis in entry}
        names = tuple(axis for axis in mesh or () if axis in sharded) or None
    reader = _Reader(program, mesh, names, gradient, minimum)
    return Audit(
        name=program.name,
        num_devices=program.num_devices,
        mesh=mesh,
        axis_name=names,
        parts_axes=tuple(sorted({a for leaf in gradient for entry in leaf.spec for a in entry})),
        gradient_bytes=reader.bytes,
        min_bytes=minimum,
        collectives=tuple(reader.collectives(leaves, batch)),
        loop_sums=tuple(reader.loop_sums(batch)),
        donated=tuple(_donated(program, leaves, mesh or {})),
        memory=memory_of(compiled),
    )


class _Reader:
    """Reads a compiled program, knowing the shapes of the gradient on one device."""

    def __init__(
        self,
        program: hlo.Program,
        mesh: dict[str, int] | None,
        axes: Sequence[str] | None,
        gradient: list[Leaf],
        minimum: int | None,
    ):
        self.program, self.flow = program, Flow(program)
        self.mesh, self.axes, self.minimum = mesh or {}, axes, minimum
        self.bytes = 0
        self.labels: dict[tuple[int, ...], str] = {}  # of every shape that a sum may have
        number = math.prod(self.mesh[name] for name in axes or ())
        for leaf in gradient:
            # A collective over the axes that count works on arrays that are whole over them.
            whole = leaf.local_shape(self.mesh, tuple(self.mesh) if axes is None else axes)
            self.bytes += math.prod(whole) * max(4, leaf.dtype.itemsize)
            cut = [i for i, dim in enumerate(whole) if dim % number == 0]
            parts = [(*whole[:i], whole[i] // number, *whole[i + 1 :]) for i in cut]
            for shape in (whole, leaf.local_shape(self.mesh), *parts):
                self.labels.setdefault(_key(shape), leaf.label)
        self.labels.pop((), None)

    def collectives(self, leaves: list[Leaf], batch: list[Leaf]) -> Iterator[Collective]:
        """Every operation in which devices exchange data."""
        arguments = {leaf.number: leaf for leaf in leaves}
        reduced: set[Node] = set()  # where reductions of gradients lead
        found = [(frame, op) for frame, op in frames.walk(self.program) if op.kind is not None]
        # Gathers may only hand on what a reduction made, so reductions come first.
        for frame, op in sorted(found, key=lambda pair: pair[1].kind not in REDUCTIONS):
            members = groups.groups_of(op, self.program.num_devices)
            axes = groups.axes_of(members, self.mesh)
            size = None if members is None else max(map(len, members), default=1)
            overlap = self.axes is None or axes is None or not set(axes).isdisjoint(self.axes)
            counts = overlap and size != 1
            given = [a for name in op.operands for a in frame.computation.type_of(name)]
            arrays = given
            if op.kind == "all-gather":  # a started one returns what it was given, too
                arrays = list(op.arrays[len(given) : 2 * len(given)] or op.arrays)
            nodes = [Node(frame.computation.name, name) for name in op.operands]
            numbers = {n for node in nodes for n in self.flow.sources(node, moved=True)}
            moved = [arguments[n] for n in sorted(numbers) if n in arguments and size != 1]
            gradients = 0.0
            if counts and self.bytes and self.minimum is not None:
                large = sum(a.bytes for a in arrays) >= self.minimum
                gradients = large * sum(map(_weight, arrays)) / self.bytes
            elif counts and self.bytes and (op.kind in REDUCTIONS or not moved):
                weights = self._gradients(frame, op, given, size or 0, reduced)
                gradients = sum(weights) / self.bytes
            yield Collective(
                kind=op.kind or "",
                arrays=tuple(map(str, arrays)),
                bytes=sum(a.bytes for a in arrays) * (size != 1),
                axes=axes,
                loops=frame.loops,
                in_branch=frame.in_branch,
                branch_in_loop=frame.branch_in_loop,
                counts=counts,
                gradients=gradients,
                moves=tuple(leaf.label for leaf in moved),
                moves_rows=not gradients and any(leaf in batch for leaf in moved),
                op_name=op.op_name or frame.op_name,
            )

    def _gradients(
        self,
        frame: frames.Frame,
        op: hlo.Instruction,
        given: list[hlo.Array],
        size: int,
        reduced: set[Node],
    ) -> Iterator[int]:
        """The bytes of a gradient that a collective reduces, array by array."""
        reduces = op.kind in REDUCTIONS
        for number, array in enumerate(given):
            made = range(number, len(op.arrays), len(given))
            nodes = [Node(frame.computation.name, op.name, k) for k in made]
            if not reduces and (not frame.loops or reduced.intersection(nodes)):
                continue
            # Gathered numbers are reduced by a sum over the devices that gave them.
            fold = 0 if reduces else size
            paths = (self.flow.reach(node, fold=fold, trips=frame.loops)[0] for node in nodes)
            reached = set().union(*paths)
            if any(self._is_gradient(node, outputs=reduces) for node in reached):
                body = frame.body if reduces else ""
                if body and any(self.flow.reach(node, inside=body)[2] for node in nodes):
                    continue  # a statistic, which the same iteration repeats over its rows
                reduced |= reached if reduces else set()
                yield _weight(self.flow.unpacked(nodes[0]) if op.kind == "all-reduce" else array)

    def _is_gradient(self, node: Node, *, outputs: bool) -> bool:
        """Whether an array is a sum that a loop carries, or a result like a parameter or flat."""
        if self.flow.ends(node):
            return self.flow.is_sum(node.home, node.number)
        entry, shape = self.program.entry, _key(self.flow.array(node).shape)
        is_output = outputs and node[:2] == (entry.name, entry.root.name)
        return is_output and (len(shape) < 2 or shape in self.labels)

    def loop_sums(self, batch: list[Leaf]) -> Iterator[LoopSum]:
        """What loops add up in the shape of a parameter."""
        rows = {leaf.number for leaf in batch}
        for frame, op in frames.walk(self.program):
            for body in op.called["body"] if op.opcode == "while" else ():
                labels = [self.labels.get(_key(a.shape)) if a.inexact else None for a in op.arrays]
                sums = [i for i, x in enumerate(labels) if x and self.flow.is_sum(body, i)]
                read = self.flow.slices(body) if sums else ()
                origins = [self.flow.sources(node, moved=False) for node in read]
                cuts = any(numbers and numbers <= rows for numbers in origins)
                trips = frames.trip_count(self.program, frame, op)
                for i in sums:
                    name, shape = op.arrays[i].dtype_name, op.arrays[i].shape
                    yield LoopSum(name, shape, labels[i] or "", trips, cuts, op.op_name)


def _weight(array: hlo.Array) -> int:
    return max(4 * array.size, array.bytes)


def _key(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape whatever the order of its axes."""
    return tuple(sorted(dim for dim in shape if dim > 1))


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


def _donated(
    program: hlo.Program, leaves: list[Leaf], mesh: Mapping[str, int]
) -> Iterator[DonatedBuffer]:
    for leaf in leaves:
        if leaf.donated:
            size = math.prod(leaf.local_shape(mesh)) * leaf.dtype.itemsize
            if leaf.number is not None:  # keys, for example, are arrays of integers there
                size = sum(a.bytes for a in program.entry.parameters[leaf.number].arrays)
            known = leaf.number in program.aliased, leaf.number is not None
            yield DonatedBuffer(leaf.label, size, *known)
