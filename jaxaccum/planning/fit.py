"""What fits in memory: the compiled micro-batch sizes, as values and as a table."""

import dataclasses
from typing import Any

from jaxaccum.auditing import Memory
from jaxaccum.planning.units import bytes_text, columns


def total_of(memory: Memory, code: int) -> int:
    """All that a step holds on one device, its own program included."""
    return memory.arguments + memory.peak + code


@dataclasses.dataclass(frozen=True)
class MemoryPoint:
    """One compiled micro-batch size.

    Attributes:
      num_microbatches: micro-batches of the window on one device.
      microbatch_size: examples of the largest micro-batch on one device.
      memory: bytes on one device; `None` where the compiler refused the program as too large.
      code_bytes: the program itself, where it lies in the device's memory.
      fits: whether `total_bytes` is within the limit.
      flops: matrix products and convolutions of one optimizer step on one device.
      moved_bytes: bytes that one device reads and writes for it; `None` where unknown.
      compile_seconds: what tracing and compiling took.
    """

    num_microbatches: int
    microbatch_size: int
    memory: Memory | None
    code_bytes: int
    fits: bool
    flops: int
    moved_bytes: int | None
    compile_seconds: float

    @property
    def total_bytes(self) -> int | None:
        """`arguments + temporaries + outputs - aliased + code`: what the step holds on one device.

        What a TPU keeps in its on-chip memory is not in it.
        """
        return None if self.memory is None else total_of(self.memory, self.code_bytes)


@dataclasses.dataclass(frozen=True)
class MemoryFit:
    """Which micro-batch fits, from `ja.fit_microbatch`; `print` shows it as a table.

    Attributes:
      limit_bytes: what one device may hold.
      examples_per_step: examples of an optimizer step over all devices, the same for all points.
      data_parallel: devices that share them.
      points: what was compiled, by growing micro-batch.
    """

    limit_bytes: int
    examples_per_step: int
    data_parallel: int
    points: tuple[MemoryPoint, ...]

    @property
    def best(self) -> MemoryPoint | None:
        """The largest micro-batch that fits; `None` where none does."""
        return next((point for point in reversed(self.points) if point.fits), None)

    @property
    def num_microbatches(self) -> int | None:
        """The number of micro-batches of `best`; `None` where nothing fits."""
        return self.best.num_microbatches if self.best else None

    @property
    def microbatch_size(self) -> int | None:
        """The examples of a micro-batch of `best`; `None` where nothing fits."""
        return self.best.microbatch_size if self.best else None

    @property
    def needs_accumulation(self) -> bool:
        """Whether the whole batch is too large, so that it has to be cut."""
        return self.num_microbatches != 1

    def as_dict(self) -> dict[str, Any]:
        """All attributes and properties in plain values, for `json`."""
        points = [
            dataclasses.asdict(point) | {"total_bytes": point.total_bytes} for point in self.points
        ]
        return {
            "limit_bytes": self.limit_bytes,
            "examples_per_step": self.examples_per_step,
            "data_parallel": self.data_parallel,
            "num_microbatches": self.num_microbatches,
            "microbatch_size": self.microbatch_size,
            "needs_accumulation": self.needs_accumulation,
            "points": points,
        }

    def __str__(self) -> str:
        header = ("micro-batch", "num_microbatches", "memory", "of it arguments", "", "GFLOP",
                  "moved", "compile")  # fmt: skip
        rows = [header, *(_row(point) for point in self.points)]
        many = self.data_parallel > 1
        return "\n".join(
            [
                f"an optimizer step of {self.examples_per_step:,} examples"
                + (f" on {self.data_parallel} devices" if many else "")
                + f", {bytes_text(self.limit_bytes)}{' each' if many else ''}",
                *columns(rows),
                self._verdict(),
            ]
        )

    def _verdict(self) -> str:
        best, smallest = self.best, self.points[0]
        if best is None:
            need = (
                f"needs {bytes_text(smallest.total_bytes)}, "
                f"{bytes_text(smallest.memory.arguments)} of it for arguments"
                if smallest.total_bytes is not None and smallest.memory is not None
                else "is more than the compiler allows"
            )
            return (
                f"Nothing fits: a micro-batch of {smallest.microbatch_size:,} {need}. Shard or "
                "shrink the parameters and the optimizer state, donate them, or rematerialise."
            )
        if best.num_microbatches == 1:
            return "The whole batch fits: no accumulation is needed."
        return (
            f"The largest that fits: num_microbatches={best.num_microbatches}, micro-batches of "
            f"{best.microbatch_size:,}, {bytes_text(best.total_bytes or 0)}."
        )


def _row(point: MemoryPoint) -> tuple[str, ...]:
    memory, total = point.memory, point.total_bytes
    return (
        f"{point.microbatch_size:,}",
        f"{point.num_microbatches:,}",
        bytes_text(total) if total is not None else "more than allowed",
        bytes_text(memory.arguments) if memory else "",
        "fits" if point.fits else "too large",
        f"{point.flops / 1e9:.3g}",
        bytes_text(point.moved_bytes) if point.moved_bytes is not None else "",
        f"{point.compile_seconds:.1f} s",
    )
