"""What an audit finds in a compiled program, as plain values."""

import dataclasses
import math
from typing import Any

from jaxaccum.core.text import bytes_text


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation in which devices exchange data.

    Attributes:
      kind: such as `"all-reduce"`; an operation that starts asynchronously has the same kind.
      arrays: what one device sends or receives, such as `("float32[16,4]",)`; see `bytes`.
      bytes: the payload of one run on one device: the array that is reduced, scattered, permuted
        or exchanged, or the gathered result. 0 where every group is one device.
      axes: the axes of the mesh along which it exchanges data; `None` where unknown.
      loops: the trip counts of the loops around it, the outermost first, `None` where unknown.
      in_branch: whether it runs only when a conditional takes a branch.
      branch_in_loop: whether that conditional is inside the innermost loop.
      counts: whether it runs over axes that count, or unknown ones.
      gradients: how much of one gradient it reduces in one run, 0 for whatever is no gradient.
      moves: the arguments that it moves unchanged (sliced, cast or rearranged at most).
      moves_rows: whether one of them belongs to the batch.
      op_name: its path in the traced program, or that of the loop or call around it where the
        compiler merged several operations.
    """

    kind: str
    arrays: tuple[str, ...]
    bytes: int
    axes: tuple[str, ...] | None
    loops: tuple[int | None, ...]
    in_branch: bool
    branch_in_loop: bool
    counts: bool
    gradients: float
    moves: tuple[str, ...]
    moves_rows: bool
    op_name: str

    @property
    def gradient_sized(self) -> bool:
        """Whether it reduces gradients, or parts of them."""
        return self.gradients > 0

    @property
    def in_loop(self) -> bool:
        """Whether a loop runs it, however deep."""
        return bool(self.loops)

    @property
    def trip_count(self) -> int | None:
        """How often it runs in one call, at most; `None` where a loop's trip count is unknown."""
        return None if None in self.loops else self.runs

    @property
    def runs(self) -> int:
        """How often it runs in one call, at most; a loop of unknown trip count counts once."""
        return math.prod(trips for trips in self.loops if trips is not None)

    @property
    def total_bytes(self) -> int:
        """The bytes of one call: `bytes * runs`."""
        return self.bytes * self.runs


@dataclasses.dataclass(frozen=True)
class LoopSum:
    """An array that a loop only adds to, shaped like a parameter.

    Attributes:
      dtype: such as `"bfloat16"`.
      shape: on one device.
      parameter: the first parameter of that shape.
      trip_count: how often the loop runs; `None` where unknown.
      cuts_batch: whether an iteration takes a slice of the batch, as a window's does and one over
        layers does not.
      op_name: the loop's path in the traced program.
    """

    dtype: str
    shape: tuple[int, ...]
    parameter: str
    trip_count: int | None
    cuts_batch: bool
    op_name: str

    @property
    def low_precision(self) -> bool:
        """Whether it is narrower than float32."""
        return self.dtype in ("bfloat16", "float16") or self.dtype.startswith("float8")

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class DonatedBuffer:
    """A donated argument, whether an output reuses its buffer, and whether the program uses it."""

    argument: str
    bytes: int
    aliased: bool
    used: bool


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device: `aliased` outputs reuse arguments, `temporaries` end with the call."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def peak(self) -> int:
        """`temporaries + outputs - aliased`: what a call needs beside its arguments."""
        return self.temporaries + self.outputs - self.aliased

    def __str__(self) -> str:
        return (
            f"peak {bytes_text(self.peak)}, arguments {bytes_text(self.arguments)} "
            f"(temporaries {bytes_text(self.temporaries)}, outputs {bytes_text(self.outputs)}, "
            f"reused {bytes_text(self.aliased)})"
        )


def memory_of(compiled: Any) -> Memory | None:
    """The memory of a compiled step; `None` where the backend does not tell."""
    try:
        stats = compiled.memory_analysis()
    except NotImplementedError:
        stats = None
    names = ("argument", "output", "alias", "temp")
    return stats and Memory(*(int(getattr(stats, f"{name}_size_in_bytes")) for name in names))
