"""What an audit finds in a compiled program, as plain values."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation in which devices exchange data.

    Attributes:
      kind: such as `"all-reduce"`; an operation that starts asynchronously has the same kind.
      arrays: what one device sends or receives, such as `("float32[16,4]",)`; see `bytes`.
      bytes: the payload of one run on one device: the array that is reduced, scattered, permuted
        or exchanged, or the gathered result. A ring moves about twice that for an all-reduce, once
        for the others. 0 where every group is one device.
      axes: the axes of the mesh, whole or in part, along which it exchanges data, in the mesh's
        order; `None` where the groups or the mesh are unknown.
      group_size: devices in each group; `None` where unknown.
      replica_groups: the groups, as the compiler writes them.
      loops: the trip counts of the loops around it, the outermost first, `None` where the compiler
        knows none; empty outside of loops.
      in_branch: whether it runs only when a conditional takes a branch.
      branch_in_loop: whether that conditional is inside the innermost loop.
      gradient_sized: whether it has the size of a gradient, runs over axes that count, and moves
        no rows.
      counts: whether it runs over axes that count, or unknown ones.
      moves: the arguments that it moves unchanged (sliced, cast or rearranged at most).
      moves_rows: whether one of them belongs to the batch.
      op_name: its path in the traced program, or that of the loop or call around it where the
        compiler merged several operations.
    """

    kind: str
    arrays: tuple[str, ...]
    bytes: int
    axes: tuple[str, ...] | None
    group_size: int | None
    replica_groups: str
    loops: tuple[int | None, ...]
    in_branch: bool
    branch_in_loop: bool
    gradient_sized: bool
    counts: bool
    moves: tuple[str, ...]
    moves_rows: bool
    op_name: str

    @property
    def in_loop(self) -> bool:
        """Whether a loop runs it, however deep."""
        return bool(self.loops)

    @property
    def trip_count(self) -> int | None:
        """How often it runs in one call, at most; `None` where a loop's trip count is unknown."""
        known = [trips for trips in self.loops if trips is not None]
        return math.prod(known) if len(known) == len(self.loops) else None

    @property
    def total_bytes(self) -> int:
        """The bytes of one call, at most; a loop of unknown trip count counts once."""
        return self.bytes * math.prod(trips for trips in self.loops if trips is not None)


@dataclasses.dataclass(frozen=True)
class LoopSum:
    """An array that a loop carries and computes anew in every iteration, shaped like a parameter.

    Attributes:
      dtype: such as `"bfloat16"`.
      shape: on one device.
      parameter: the first parameter of that shape.
      trip_count: how often the loop runs; `None` where unknown.
      op_name: the loop's path in the traced program.
    """

    dtype: str
    shape: tuple[int, ...]
    parameter: str
    trip_count: int | None
    op_name: str

    @property
    def low_precision(self) -> bool:
        """Whether it is narrower than float32."""
        return self.dtype in ("bfloat16", "float16") or self.dtype.startswith("float8")


@dataclasses.dataclass(frozen=True)
class DonatedBuffer:
    """A donated argument, and what became of it.

    Attributes:
      argument: its name.
      bytes: on one device.
      aliased: whether an output reuses its buffer.
      used: whether the compiled program has it as an argument at all.
    """

    argument: str
    bytes: int
    aliased: bool
    used: bool


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, as the compiler counts them.

    Attributes:
      arguments: of all arguments.
      outputs: of all outputs.
      aliased: outputs that reuse a donated argument.
      temporaries: what lives only during the call.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def peak(self) -> int:
        """`temporaries + outputs - aliased`: what a call needs beside its arguments."""
        return self.temporaries + self.outputs - self.aliased
