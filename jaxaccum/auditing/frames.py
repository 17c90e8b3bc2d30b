"""How a program's computations are reached: through calls, loops and branches."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxaccum.auditing.hlo import Computation, Instruction, Program

BRANCHES = ("branch_computations", "true_computation", "false_computation")
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"?(\d+)')


class Frame(NamedTuple):
    """A computation as it is reached from the entry, one frame for each call.

    Attributes:
      computation: the one that runs.
      op_name: the traced path of the nearest call that has one; empty where none has.
      body: the name of the innermost loop's body; empty outside of loops.
      loops: the trip counts of the loops around it, the outermost first; `None` where unknown.
      in_branch: whether it runs only when a conditional takes a branch.
      branch_in_loop: whether that conditional is inside the innermost loop.
    """

    computation: Computation
    op_name: str = ""
    body: str = ""
    loops: tuple[int | None, ...] = ()
    in_branch: bool = False
    branch_in_loop: bool = False


def enter(program: Program, frame: Frame, call: Instruction) -> Iterator[Frame]:
    """The frames of the computations that one instruction runs."""
    for role, names in call.called.items():
        for name in names:
            new = Frame(program.computations[name], call.op_name or frame.op_name, *frame[2:])
            if role in BRANCHES:
                new = new._replace(in_branch=True, branch_in_loop=bool(frame.loops))
            elif role in ("body", "condition"):
                trips = trip_count(program, frame, call)
                # The condition is evaluated once more than the body.
                trips = trips + (role == "condition") if trips is not None else None
                new = new._replace(body=name, loops=(*frame.loops, trips), branch_in_loop=False)
            yield new


def walk(program: Program) -> Iterator[tuple[Frame, Instruction]]:
    """Every collective and every loop of the program, each as often as it is called."""
    stack = [Frame(program.entry)]
    while stack:
        frame = stack.pop()
        for instruction in frame.computation.instructions.values():
            if instruction.kind is not None or instruction.opcode == "while":
                yield frame, instruction
            if instruction.kind is None:  # what a collective calls only adds two numbers
                stack += enter(program, frame, instruction)


def trip_count(program: Program, frame: Frame, loop: Instruction) -> int | None:
    """How often a `while` runs its body: as the compiler says, or from a counter in steps of one.

    Returns:
      `None` where neither is there.
    """
    if found := _TRIPS.search(loop.attributes):
        return int(found[1])
    condition, body = (program.computations[loop.called[n][0]] for n in ("condition", "body"))
    if condition.root.opcode != "compare" or condition.root.attribute("direction") != "LT":
        return None
    counter, stop = (_behind(condition, name) for name in condition.root.operands)
    given = _behind(frame.computation, loop.operands[0])
    if not (counter and counter.attribute("index") and given and given.opcode == "tuple"):
        return None
    index = counter.attribute("index")
    start = _behind(frame.computation, given.operands[int(index)])
    step = _behind(body, body.root.operands[int(index)])
    if step is None or step.opcode != "add":
        return None
    before, by = (_behind(body, name) for name in step.operands)
    steps = before is not None and before.attribute("index") == index
    first, last = _constant(start), _constant(stop)
    if not steps or _constant(by) != 1 or first is None or last is None:
        return None
    return max(0, last - first)


def _behind(computation: Computation, name: str) -> Instruction | None:
    """The instruction that a value is a copy of."""
    found = computation.instructions.get(name)
    while found is not None and found.opcode in ("copy", "bitcast"):
        found = computation.instructions.get(found.operands[0])
    return found


def _constant(found: Instruction | None) -> int | None:
    known = found is not None and found.opcode == "constant"
    return int(found.inside) if found and known and re.fullmatch(r"-?\d+", found.inside) else None
