"""What a compiled step costs, with the repetitions of its loops.

XLA's `cost_analysis` counts the body of a loop once. Here the matrix products are counted in the
traced program, where a scan says how long it is, and the bytes that XLA states are multiplied by
how much more the same instructions move when every loop runs as often as the compiler knows.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax

from jaxaccum.auditing import Memory, findings, frames, hlo
from jaxaccum.core import programs

_FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"})
_CALLS = frozenset({"while", "conditional", "call"})
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})


def flops_of(jaxpr: Any) -> int:
    """The operations of all matrix products and convolutions, over all devices.

    A multiplication and an addition are two. Of a conditional the costliest branch counts; a
    `while` whose length is data counts once.
    """
    total = 0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        inner = [flops_of(j) for j in programs.programs_in(eqn)]
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * _size(eqn.outvars[0]) * math.prod(shape[i] for i in contracted)
        elif name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            features = kernel[params["dimension_numbers"].rhs_spec[0]]
            total += 2 * _size(eqn.outvars[0]) * math.prod(kernel) // features
        elif name == "scan":
            total += params["length"] * sum(inner)
        elif name == "cond":
            total += max(inner, default=0)
        elif name == "shard_map":
            mesh, manual = params["mesh"], params.get("manual_axes", ())
            total += math.prod(mesh.shape[a] for a in manual or mesh.axis_names) * sum(inner)
        else:
            total += sum(inner)
    return total


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def memory_of(compiled: Any) -> tuple[Memory, int]:
    """The memory of a compiled step, and the size of its own program."""
    memory = findings.memory_of(compiled)
    if memory is None:
        raise ValueError(
            "fit_microbatch: the backend tells nothing of a compiled step's memory. Compile for "
            "another platform."
        )
    return memory, int(compiled.memory_analysis().generated_code_size_in_bytes)


def accessed_bytes(compiled: Any, program: hlo.Program) -> int:
    """The bytes that a step moves: XLA's count, where it has one, with the loops repeated."""
    once, often = moved_bytes(program)
    try:
        counted = compiled.cost_analysis()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        counted = None
    counted = counted[0] if isinstance(counted, list) and counted else counted
    if not counted or "bytes accessed" not in counted or not once:
        return often
    return round(counted["bytes accessed"] * often / once)


def moved_bytes(program: hlo.Program) -> tuple[int, int]:
    """The bytes that the program reads and writes: with every loop run once, and as often as it is.

    A loop of unknown trip count counts once.
    """
    once = often = 0
    for frame, moved in _traffic(program):
        once += moved
        often += moved * math.prod(trips for trips in frame.loops if trips is not None)
    return once, often


def _traffic(program: hlo.Program) -> Iterator[tuple[frames.Frame, int]]:
    """The bytes that each instruction reads and writes; a fusion is one instruction."""
    stack = [frames.Frame(program.entry)]
    while stack:
        frame = stack.pop()
        for op in frame.computation.instructions.values():
            if op.opcode in _CALLS:
                stack += frames.enter(program, frame, op)
            elif op.opcode not in _FREE:
                yield frame, _moved(program, frame.computation, op)


def _moved(program: hlo.Program, computation: hlo.Computation, op: hlo.Instruction) -> int:
    written = sum(a.bytes for a in op.arrays)
    reads = [sum(a.bytes for a in computation.type_of(name)) for name in op.operands]
    if op.opcode in _SLICES:
        return 2 * written
    if op.opcode == "dynamic-update-slice":
        return 2 * reads[1] if len(reads) > 1 else written
    for name in op.called.get("calls", ()):
        body = program.computations.get(name)
        if body is not None:
            reads = [min(whole, _read(body, i, whole)) for i, whole in enumerate(reads)]
            if body.root.opcode == "dynamic-update-slice":  # written in place
                written = sum(a.bytes for a in body.type_of(body.root.operands[1]))
    return written + sum(reads)


def _read(body: hlo.Computation, number: int, whole: int) -> int:
    """What a fusion reads of one operand: slices of it, where it only slices it."""
    inside = body.instructions.values()
    parameter = next(
        (i.name for i in inside if i.opcode == "parameter" and i.inside == str(number)), None
    )
    users = [i for i in inside if parameter in i.operands]
    if users and all(i.opcode in _SLICES and i.operands[0] == parameter for i in users):
        return sum(a.bytes for i in users for a in i.arrays)
    in_place = [i for i in users if i.opcode == "dynamic-update-slice"]
    return 0 if users and len(in_place) == len(users) and body.root in in_place else whole
