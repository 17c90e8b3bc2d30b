"""How a program's computations are reached: through calls, loops and branches."""

import dataclasses
import re
from collections.abc import Iterator

from jaxaccum.auditing.hlo import Array, Computation, Instruction, Program, arrays

_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"?(\d+)')


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """A computation as it is reached from the entry, one frame for each call.

    Attributes:
      computation: the one that runs.
      role: the attribute through which it was called; empty for the entry.
      call: the instruction that called it.
      caller: the frame of that instruction.
      branch: the number of the conditional's branch.
      loops: the trip counts of the loops around it, the outermost first; `None` where unknown.
      in_branch: whether it runs only when a conditional takes a branch.
      branch_in_loop: whether that conditional is inside the innermost loop.
    """

    computation: Computation
    role: str = ""
    call: Instruction | None = None
    caller: "Frame | None" = None
    branch: int = 0
    loops: tuple[int | None, ...] = ()
    in_branch: bool = False
    branch_in_loop: bool = False

    @property
    def op_name(self) -> str:
        """The traced path of the nearest call that has one; empty where none has."""
        own = self.call.op_name if self.call is not None else ""
        return own or (self.caller.op_name if self.caller is not None else "")


_BRANCHES = ("branch_computations", "true_computation", "false_computation")


def enter(program: Program, frame: Frame, call: Instruction) -> Iterator[Frame]:
    """The frames of the computations that one instruction runs."""
    for role, names in call.called.items():
        for number, name in enumerate(names):
            if name not in program.computations:
                continue
            loops, in_branch, in_loop = frame.loops, frame.in_branch, frame.branch_in_loop
            if role in ("body", "condition"):
                trips = trip_count(program, frame, call)
                # The condition is evaluated once more than the body.
                loops = (*loops, trips + (role == "condition") if trips is not None else None)
                in_loop = False
            elif role in _BRANCHES:
                in_branch, in_loop = True, bool(loops)
            yield Frame(
                program.computations[name],
                role,
                call,
                frame,
                int(role == "false_computation") or number,
                loops,
                in_branch,
                in_loop,
            )


def walk(program: Program) -> Iterator[tuple[Frame, Instruction]]:
    """Every collective and every loop of the program, each as often as it is called."""
    holds: dict[str, bool] = {}

    def interesting(name: str) -> bool:
        if name not in holds:
            holds[name] = False  # computations do not call themselves
            body = program.computations.get(name)
            holds[name] = body is not None and any(
                i.kind is not None
                or i.opcode == "while"
                or any(interesting(n) for names in i.called.values() for n in names)
                for i in body.instructions.values()
            )
        return holds[name]

    stack = [Frame(program.entry)]
    while stack:
        frame = stack.pop()
        for instruction in frame.computation.instructions.values():
            if instruction.kind is not None:
                yield frame, instruction
                continue  # what it calls only adds two numbers
            if instruction.opcode == "while":
                yield frame, instruction
            inner = enter(program, frame, instruction)
            stack += [f for f in inner if interesting(f.computation.name)]


def payload(frame: Frame, collective: Instruction) -> tuple[Array, ...]:
    """The arrays that a collective moves on one device: the gathered ones, or what it is given."""
    given = tuple(a for name in collective.operands for a in frame.computation.type_of(name))
    made = arrays(collective.type)
    if collective.kind == "all-gather":
        # A started gather returns what it was given, then what it made.
        return made[len(given) : 2 * len(given)] if collective.opcode != "all-gather" else made
    if collective.kind == "ragged-all-to-all":
        return given[:1]
    return given or made


def trip_count(program: Program, frame: Frame, loop: Instruction) -> int | None:
    """How often a `while` runs its body: as the compiler says, or from a counter in steps of one.

    Returns:
      `None` where neither is there.
    """
    if found := _TRIPS.search(loop.attributes):
        return int(found[1])
    names = [*loop.called.get("condition", ()), *loop.called.get("body", ())]
    if len(names) != 2 or not all(name in program.computations for name in names):
        return None
    condition, body = (program.computations[name] for name in names)
    test = condition.root
    if test.opcode != "compare" or test.attribute("direction") != "LT":
        return None
    counter = _behind(condition, test.operands[0])
    stop = _constant(condition, test.operands[1])
    if counter is None or counter.opcode != "get-tuple-element" or stop is None:
        return None
    index = int(counter.attribute("index") or 0)
    start = _constant(frame.computation, _element(frame.computation, loop.operands[0], index))
    step = _behind(body, _element(body, body.root.name, index))
    if start is None or step is None or step.opcode != "add":
        return None
    before = _behind(body, step.operands[0])
    if before is None or before.attribute("index") != str(index):
        return None
    return max(0, stop - start) if _constant(body, step.operands[1]) == 1 else None


def _behind(computation: Computation, name: str | None) -> Instruction | None:
    """The instruction that a value is a copy of."""
    found = computation.instructions.get(name or "")
    while found is not None and found.opcode in ("copy", "bitcast"):
        found = computation.instructions.get(found.operands[0])
    return found


def _constant(computation: Computation, name: str | None) -> int | None:
    found = _behind(computation, name)
    known = found is not None and found.opcode == "constant"
    return int(found.inside) if found and known and re.fullmatch(r"-?\d+", found.inside) else None


def _element(computation: Computation, name: str, index: int) -> str | None:
    """The name of one element of a tuple."""
    found = computation.instructions.get(name)
    if found is None or found.opcode != "tuple" or index >= len(found.operands):
        return None
    return found.operands[index]
