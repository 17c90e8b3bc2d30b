"""Where a value in a compiled program comes from, and what its loops carry."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxaccum.auditing.frames import Frame, enter, trip_count
from jaxaccum.auditing.hlo import Array, Instruction, Program, arrays

# Instructions that move numbers and compute none, and which operands they move (`None`: all).
_MOVES: dict[str, slice | None] = {
    **dict.fromkeys(
        """bitcast bitcast-convert broadcast convert copy copy-done copy-start dynamic-slice gather
        get-tuple-element pad reshape reverse slice transpose""".split(),  # noqa: SIM905
        slice(0, 1),
    ),
    "dynamic-update-slice": slice(0, 2),
    "select": slice(1, 3),
    "concatenate": None,
    "all-gather": None,
    "all-to-all": None,
    "collective-permute": slice(0, 1),
}
_PASSES = ("copy", "bitcast", "reshape", "transpose", "dynamic-update-slice")
_MADE = frozenset({"constant", "iota", "partition-id", "replica-id", "after-all"})
_DEEPEST = 200

Path = tuple[int, ...]


class Carry(NamedTuple):
    """What a loop changes in every iteration.

    Attributes:
      array: its type on one device.
      trip_count: how often the loop runs; `None` where unknown.
      op_name: the loop's path in the traced program.
    """

    array: Array
    trip_count: int | None
    op_name: str


def sources(program: Program, frame: Frame, name: str) -> frozenset[int] | None:
    """The entry's parameters that a value is a mere copy, slice, cast or rearrangement of.

    Follows the value back through fusions, calls and whatever a loop leaves unchanged.

    Returns:
      Numbers of parameters, none for a constant; `None` for a value that was computed.
    """
    return _trace(program, frame, name, (), 0)


def carries(program: Program, frame: Frame, loop: Instruction) -> Iterator[Carry]:
    """The arrays that a `while` carries and computes anew in every iteration.

    Left out is what an iteration only passes on, such as parameters, and what it only writes a
    slice of, such as stacked outputs.
    """
    body = _body(program, frame, loop)
    if body is None:
        return
    for index, array in enumerate(arrays(loop.type)):
        if not _keeps(program, body, index):
            yield Carry(array, trip_count(program, frame, loop), loop.op_name)


def _body(program: Program, frame: Frame, loop: Instruction) -> Frame | None:
    frames = (f for f in enter(program, frame, loop) if f.role == "body")
    return next(frames, None)


def _keeps(program: Program, body: Frame, index: int) -> bool:
    """Whether a loop's body passes on one of its carries, whole or with a slice overwritten."""
    end = Frame(body.computation, "end")  # its parameters are where the tracing stops
    root = body.computation.root
    frame, at = end, root.name
    path: Path = (index,)
    for _ in range(_DEEPEST):
        step = frame.computation.instructions.get(at)
        if step is None:
            return False
        if step.opcode == "parameter":
            if frame is end:
                return path == (index,)
            call, outer, operand = frame.call, frame.caller, int(step.inside)
            if call is None or outer is None or operand >= len(call.operands):
                return False
            frame, at = outer, call.operands[operand]
        elif step.opcode == "get-tuple-element":
            at, path = step.operands[0], (_index(step), *path)
        elif step.opcode == "optimization-barrier":
            at = step.operands[0]
        elif step.opcode == "tuple" and path and path[0] < len(step.operands):
            at, path = step.operands[path[0]], path[1:]
        elif step.opcode in _PASSES:
            at = step.operands[0]
        elif step.opcode == "while" and path:
            nested = _body(program, frame, step)
            if nested is None or not _keeps(program, nested, path[0]):
                return False
            at = step.operands[0]
        elif step.opcode in ("fusion", "call"):
            inner = next(iter(enter(program, frame, step)), None)
            if inner is None:
                return False
            frame, at = inner, inner.computation.root.name
        else:
            return False
    return False


def _trace(
    program: Program, frame: Frame, name: str, path: Path, depth: int
) -> frozenset[int] | None:
    step = frame.computation.instructions.get(name)
    if step is None or depth > _DEEPEST:
        return None

    def back(operand: str, path: Path) -> frozenset[int] | None:
        return _trace(program, frame, operand, path, depth + 1)

    opcode = step.opcode.removesuffix("-start").removesuffix("-done")
    if step.opcode == "parameter":
        return _outside(program, frame, int(step.inside), path, depth)
    if step.opcode in _MADE:
        return frozenset()
    if step.opcode == "get-tuple-element":
        return back(step.operands[0], (_index(step), *path))
    if step.opcode == "optimization-barrier":
        return back(step.operands[0], path)
    if step.opcode == "tuple":
        known = path and path[0] < len(step.operands)
        return back(step.operands[path[0]], path[1:]) if known else None
    if step.opcode in ("fusion", "call"):
        inner = next(iter(enter(program, frame, step)), None)
        if inner is None:
            return None
        return _trace(program, inner, inner.computation.root.name, path, depth + 1)
    if step.opcode == "while":
        body = _body(program, frame, step)
        kept = body is not None and bool(path) and _keeps(program, body, path[0])
        return back(step.operands[0], path) if kept else None
    found: frozenset[int] = frozenset()
    moves = _MOVES.get(step.opcode, _MOVES.get(opcode, slice(0)))
    moved = step.operands[moves] if moves is not None else step.operands
    for operand in moved:
        more = back(operand, ())
        if more is None:
            return None
        found |= more
    return found if moved else None


def _outside(
    program: Program, frame: Frame, number: int, path: Path, depth: int
) -> frozenset[int] | None:
    """Where a computation's parameter comes from."""
    call, caller = frame.call, frame.caller
    if call is None or caller is None:
        return frozenset({number})
    if frame.role in ("body", "condition"):
        body = _body(program, caller, call)
        if body is None or not path or not _keeps(program, body, path[0]):
            return None
        operand = 0
    elif call.opcode == "conditional":
        operand = 1 + frame.branch
    elif frame.role in ("calls", "to_apply") and call.opcode in ("fusion", "call", "async-start"):
        operand = number
    else:
        return None
    if operand >= len(call.operands):
        return None
    return _trace(program, caller, call.operands[operand], path, depth + 1)


def _index(step: Instruction) -> int:
    return int(step.attribute("index") or 0)
