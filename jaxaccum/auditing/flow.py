"""Where the values of a compiled program go to, and where they come from."""

import collections
from collections.abc import Container, Iterator
from typing import NamedTuple

from jaxaccum.auditing.frames import BRANCHES
from jaxaccum.auditing.hlo import Array, Computation, Instruction, Program

# What an instruction does with an operand: it moves its numbers, whole or in part; repeats or picks
# some of them; combines them one by one with others; or makes fewer of them. Anything else mixes.
MOVES, PICKS, JOINS, FOLDS, MIXES = range(5)
_USES = {  # and which operands, where others only say how
    name: (how, which)
    for how, which, names in (
        (
            MOVES,
            slice(1),
            "bitcast bitcast-convert convert copy dynamic-slice pad reduce-precision",
        ),
        (MOVES, slice(1), "reshape reverse slice transpose collective-permute ragged-all-to-all"),
        (MOVES, slice(None), "concatenate all-gather all-to-all collective-broadcast"),
        (MOVES, slice(2), "dynamic-update-slice"),
        (MOVES, slice(1, 3), "select"),
        (PICKS, slice(1), "broadcast gather"),
        (JOINS, slice(None), "add and atan2 complex divide maximum minimum multiply or power"),
        (JOINS, slice(None), "remainder shift-left shift-right-arithmetic shift-right-logical"),
        (JOINS, slice(None), "subtract xor all-reduce reduce-scatter stochastic-convert"),
        (JOINS, slice(1, 2), "clamp"),
        (JOINS, slice(0, None, 2), "scatter"),
        (FOLDS, slice(None), "reduce compare"),
    )
    for name in names.split()
}
_CALLS = {
    "while": ("body",),
    "conditional": BRANCHES,
    **dict.fromkeys(("fusion", "call", "async-start"), ("calls", "to_apply")),
}
_MADE = frozenset({"constant", "iota", "partition-id", "replica-id", "after-all"})


class Node(NamedTuple):
    """One array: a computation's name, an instruction's, and the number in its result."""

    home: str
    name: str
    number: int = 0


Edge = tuple[Node, Node, int]
Reach = tuple[dict[Node, bool], bool, bool]


class Flow:
    """The arrays of a program as a graph, through fusions, calls, branches and loops."""

    def __init__(self, program: Program):
        self.program = program
        self._out: dict[Node, list[tuple[Node, int]]] = collections.defaultdict(list)
        self._into: dict[Node, list[tuple[Node, int]]] = collections.defaultdict(list)
        self._roots: dict[str, str] = {}
        self._sums: dict[tuple[str, int], bool] = {}
        for home in program.computations.values():
            for op in home.instructions.values():
                for body in op.called.get("body", ()):
                    self._roots[body] = program.computations[body].root.name
                for source, target, how in _edges(program, home, op):
                    self._out[source].append((target, how))
                    self._into[target].append((source, how))

    def _op(self, node: Node) -> Instruction:
        return self.program.computations[node.home].instructions[node.name]

    def array(self, node: Node) -> Array:
        """Its type."""
        return self._op(node).arrays[node.number]

    def unpacked(self, node: Node) -> Array:
        """The numbers that an array holds: TPUs reduce small integers four at a time, as large."""
        made = [self.array(n) for n, _ in self._out[node] if self._op(n).opcode == "bitcast"]
        return next((a for a in made if a.dtype != self.array(node).dtype), self.array(node))

    def reach(
        self, start: Node, *, fold: int = 0, trips: Container[int | None] = (), inside: str = ""
    ) -> Reach:
        """Follows an array forward: moved, cut, cast, and combined number by number with others.

        So is what an instruction makes of it alone. Single numbers are not followed.

        Args:
          start: the array.
          fold: the factor by which a sum over several of its numbers may make it smaller.
          trips: the same, once it stands in a larger array, as one of a stack.
          inside: the body of a loop, one iteration of which is followed.

        Returns:
          Where it goes, with whether other numbers joined it on the way; whether something else
          mixes it with other numbers, as a product of matrices does; and whether it is repeated
          into a larger array, as a statistic is over the rows.
        """
        seen: dict[Node, bool] = {}
        stack, mixed, repeated, whole = [(start, False)], False, False, self.array(start).size
        while stack:
            node, joined = stack.pop()
            size = self.array(node).size
            if size < 2 or seen.get(node, -1) >= joined:
                continue
            seen[node] = joined
            for target, how in self._out[node] if not (inside and self.ends(node, inside)) else ():
                made = self.array(target).size
                if how == PICKS:
                    repeated |= made > size
                elif (
                    how == MIXES and sum(self.array(n).size > 1 for n, _ in self._into[target]) > 1
                ):
                    mixed |= made > 1
                elif how != FOLDS or fold * made == size or (size > whole and size / made in trips):
                    stack.append((target, joined or how == JOINS))
        return seen, mixed, repeated

    def ends(self, node: Node, body: str = "") -> bool:
        """Whether it is what an iteration, of one loop or any, hands on to the next."""
        return self._roots.get(node.home) == node.name and body in ("", node.home)

    def is_sum(self, body: str, number: int) -> bool:
        """Whether an iteration only adds to what a loop carries, and reads it for nothing else.

        So it is no state that a model computes on, no stack of outputs, and nothing that is only
        passed on.
        """
        if (body, number) not in self._sums:
            start = self.program.computations[body].parameters[0].name
            reached, mixed, _ = self.reach(Node(body, start, number), inside=body)
            end = Node(body, self._roots[body], number)
            self._sums[body, number] = reached.get(end, False) and not mixed
        return self._sums[body, number]

    def sources(self, start: Node, *, moved: bool) -> frozenset[int]:
        """The entry's parameters that an array depends on.

        With `moved`, those that it is a mere copy, slice, cast, repetition or rearrangement of:
        none if anything was computed.
        """
        found: set[int] = set()
        seen: set[Node] = set()
        stack = [start]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            op, into = self._op(node), self._into[node]
            if op.opcode == "parameter" and node.home == self.program.entry.name:
                found.add(int(op.inside))
            elif moved and op.opcode not in _MADE and {how for _, how in into} - {MOVES, PICKS}:
                return frozenset()
            stack += (source for source, _ in into)
        return frozenset(found)

    def slices(self, body: str) -> Iterator[Node]:
        """What one iteration of a loop takes slices of, other loops inside left out."""
        for op in self.program.computations[body].instructions.values():
            if op.opcode == "dynamic-slice":
                yield Node(body, op.operands[0])
            for name in op.called.get("calls", op.called.get("to_apply", ())):
                yield from self.slices(name)


def _edges(program: Program, home: Computation, op: Instruction) -> Iterator[Edge]:
    """How the arrays that an instruction is given become those of its result, or go inside."""
    made = [Node(home.name, op.name, k) for k in range(len(op.arrays))]
    if op.opcode == "get-tuple-element":
        first = int(op.attribute("index"))
        yield from ((Node(home.name, op.operands[0], first + n.number), n, MOVES) for n in made)
        return
    given = [home.instructions[name] for name in op.operands if name in home.instructions]
    flat = [Node(home.name, i.name, k) for i in given for k in range(len(i.arrays))]
    if op.opcode in _CALLS:
        yield from _inside(program, op, given, flat, made)
    elif op.opcode in ("tuple", "optimization-barrier"):
        yield from _moved(flat, made)
    elif op.opcode == "async-done":  # after what was given comes what was made
        yield from _moved(flat[sum(len(home.type_of(name)) for name in given[0].operands) :], made)
    elif op.opcode.endswith("-done"):
        yield from ((source, made[k % len(made)], MOVES) for k, source in enumerate(flat))
    else:
        how, chosen = _USES.get(op.opcode.removesuffix("-start"), (MIXES, slice(None)))
        if how == PICKS and op.arrays[0].size == given[0].arrays[0].size:
            how = MOVES
        for number, source in list(enumerate(flat))[chosen]:
            # Collectives keep the order of their arrays; those that start may return both.
            own = made[number :: len(flat)] if op.kind and len(made) >= len(flat) else made
            yield from ((source, target, how) for target in own)


def _inside(
    program: Program, op: Instruction, given: list[Instruction], flat: list[Node], made: list[Node]
) -> Iterator[Edge]:
    """The edges into the computations that an instruction runs, and out of them."""
    names = [name for role in _CALLS[op.opcode] for name in op.called.get(role, ())]
    for branch, body in enumerate(map(program.computations.__getitem__, names)):
        root = [Node(body.name, body.root.name, k) for k in range(len(body.root.arrays))]
        yield from _moved(root, made[len(flat) :] if op.opcode == "async-start" else made)
        # A conditional gives each branch its own operand, behind the one that chooses.
        skipped = 1 + branch if op.opcode == "conditional" else 0
        chosen = given[skipped : skipped + 1] if skipped else given
        first = sum(len(i.arrays) for i in given[:skipped])
        for number, operand in enumerate(chosen):
            name, width = body.parameters[number].name, len(operand.arrays)
            entry = [Node(body.name, name, k) for k in range(width)]
            yield from _moved(flat[first : first + width], entry)
            first += width
            if op.opcode == "while":
                yield from _moved(root, entry)


def _moved(sources: list[Node], targets: list[Node]) -> Iterator[Edge]:
    return ((a, b, MOVES) for a, b in zip(sources, targets))
