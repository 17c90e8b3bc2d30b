"""What an audit found: values to test, a page to read, and a check to fail."""

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from jaxaccum.auditing.findings import Collective, DonatedBuffer, LoopSum, Memory
from jaxaccum.core.text import bytes_text, columns

REDUCTIONS = frozenset({"all-reduce", "reduce-scatter"})
_MOST = 1.5  # gradients: one, and whatever else a window reduces


@dataclasses.dataclass(frozen=True)
class Audit:
    """What a compiled step does, from `ja.audit`; `print` shows it on one screen.

    Attributes:
      name: the compiled program's.
      num_devices: how many devices run it.
      mesh: the size of each mesh axis; `None` where no mesh is known.
      axis_name: the axes that count; `None` if all do.
      parts_axes: the axes over which parameters are given in parts.
      gradient_bytes: one gradient on one device, in float32 or wider.
      min_bytes: as given.
      collectives: every operation in which devices exchange data.
      loop_sums: what loops accumulate in the shape of a parameter.
      donated: the donated arguments.
      memory: bytes on one device; `None` where the backend does not tell.
    """

    name: str
    num_devices: int
    mesh: dict[str, int] | None
    axis_name: tuple[str, ...] | None
    parts_axes: tuple[str, ...]
    gradient_bytes: int
    min_bytes: int | None
    collectives: tuple[Collective, ...]
    loop_sums: tuple[LoopSum, ...]
    donated: tuple[DonatedBuffer, ...]
    memory: Memory | None

    @property
    def in_loops(self) -> tuple[Collective, ...]:
        """The collectives that a loop runs."""
        return tuple(c for c in self.collectives if c.in_loop)

    @property
    def outside(self) -> tuple[Collective, ...]:
        """The collectives outside of all loops, those in branches included."""
        return tuple(c for c in self.collectives if not c.in_loop)

    @property
    def loop_bytes(self) -> int:
        """The payload bytes of one call inside loops; every branch counts as taken."""
        return sum(c.total_bytes for c in self.in_loops)

    @property
    def outside_bytes(self) -> int:
        """The payload bytes of one call outside of loops; every branch counts as taken."""
        return sum(c.total_bytes for c in self.outside)

    @property
    def loop_gradients(self) -> float:
        """How many gradients loops reduce in one call; one of unknown trip count counts once."""
        return self._gradients(self.in_loops)

    @property
    def outside_gradients(self) -> float:
        """How many gradients are reduced outside of loops in one call."""
        return self._gradients(self.outside)

    @property
    def reduced_gradients(self) -> float:
        """How many gradients are reduced in one call, in loops and outside."""
        return self._gradients(self.collectives)

    @property
    def moved_rows(self) -> tuple[Collective, ...]:
        """The collectives that move rows of the batch between devices."""
        return tuple(c for c in self.collectives if c.moves_rows)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is likely to be a mistake, in sentences."""
        # To scatter every micro-batch's gradient into parts like the parameters' is a choice.
        unchosen = [c for c in self.collectives if not self._is_choice(c)]
        found = [self._reduced(unchosen)] if self._too_many(unchosen, _MOST) else []
        found += [
            f"rows of the batch move between devices ({', '.join(c.moves)}): {c.kind} of "
            f"{bytes_text(c.total_bytes)}"
            for c in self.moved_rows
        ]
        found += [
            f"a loop sums {s}, shaped like {s.parameter}, in less than float32: {s.op_name}"
            for s in self.loop_sums
            if s.low_precision and s.cuts_batch
        ]
        found += [
            f"{d.argument} was donated, but "
            + ("no output reuses its buffer" if d.used else "the program does not use it")
            for d in self.donated
            if not d.aliased
        ]
        return tuple(dict.fromkeys(found))

    def assert_deferred(
        self,
        *,
        kinds: Collection[str] | None = None,
        allow_branches: bool = False,
        max_gradients: float | None = _MOST,
    ) -> "Audit":
        """Fails unless the devices reduce about one gradient per window.

        What is reduced is counted, wherever it stands. A loop over micro-batches reduces a gradient
        in each: in one operation, in buckets, or layer by layer in a loop inside; an unrolled one
        does so outside of loops. One pass over the layers reduces one gradient, in their loop too.

        Args:
          kinds: the kinds of collective to count, for example `("all-reduce",)` where every
            micro-batch's gradient is scattered into parts by choice; `None` for all.
          allow_branches: leave out those in a loop that only a conditional inside that loop runs,
            such as the closing micro-step of `ja.multi_steps` in a scan.
          max_gradients: how many gradients may be reduced over the same axes. `None` for any number
            outside of loops, and 1.5 in them.

        Returns:
          The audit.

        Raises:
          AssertionError: more is reduced, or gradients are reduced in a loop of unknown length. The
            message says how many gradients, and lists the operations.
          ValueError: no gradient is known to measure against.
        """
        if not self.gradient_bytes:
            raise ValueError(
                "Audit.assert_deferred: `gradient_like` has no floating-point arrays, so nothing "
                "can be compared with a gradient. Pass ja.audit(..., gradient_like=params)."
            )
        counted = [
            c
            for c in self.collectives
            if c.gradient_sized
            and (kinds is None or c.kind in kinds)
            and (c.in_loop or max_gradients is not None)
            and not (allow_branches and c.branch_in_loop)
        ]
        limit = _MOST if max_gradients is None else max_gradients
        if self._too_many(counted, limit):
            size = bytes_text(sum(c.total_bytes for c in counted))
            head = f"Audit.assert_deferred: {self.name}: {self._reduced(counted)}, {size} a call, "
            head += f"expected at most {limit:g}, `max_gradients`:"
            raise AssertionError("\n".join([head, *_table(counted, 8), *self._remedies(counted)]))
        return self

    def _remedies(self, counted: Sequence[Collective]) -> Iterator[str]:
        if any(c.in_loop for c in counted):
            yield (
                "Keep the sums on the devices and reduce them after the loop: axis_name=... inside "
                "jax.shard_map, or spmd_axis_name=... under plain jit."
            )
        else:
            yield (
                "An unrolled loop reduces in every micro-batch: use ja.accumulate or lax.scan. "
                f"If one gradient is not {bytes_text(self.gradient_bytes)}, pass gradient_like=. "
                "Compensated sums reduce two: pass max_gradients=2.5."
            )
        if any(c.branch_in_loop for c in counted):
            yield "If the conditional is a window's last micro-step, pass allow_branches=True."
        if any(map(self._is_choice, counted)):
            yield 'If every micro-batch scatters by choice, pass kinds=("all-reduce",).'
        if any(c.axes is None or self.axis_name is None for c in counted):
            yield "If they belong to other axes than the data's, pass ja.audit(..., axis_name=...)."

    def as_dict(self) -> dict[str, Any]:
        """All attributes and properties, in dicts, lists and plain values that `json` can write."""
        plain = _plain(self)
        for name in ("in_loops", "outside", "moved_rows"):
            del plain[name]  # `collectives` says all of it
        return plain

    def _is_choice(self, c: Collective) -> bool:
        in_parts = bool(c.axes) and set(c.axes or ()) <= set(self.parts_axes)
        return c.in_loop and c.kind == "reduce-scatter" and in_parts

    def _gradients(self, collectives: Iterable[Collective]) -> float:
        found = math.fsum(c.gradients * c.runs for c in collectives)
        return found if self.gradient_bytes else math.nan

    def _too_many(self, collectives: Iterable[Collective], limit: float) -> bool:
        """Whether more gradients are reduced over the same axes, or in a loop without end."""
        over: dict[Any, list[Collective]] = collections.defaultdict(list)
        for c in collectives:
            over[c.axes].append(c)
            if c.gradients and c.in_loop and (c.trip_count is None or self.min_bytes):
                return True
        return any(self._gradients(group) > limit for group in over.values())

    def _reduced(self, collectives: Collection[Collective]) -> str:
        inside = self._gradients(c for c in collectives if c.in_loop)
        outside = self._gradients(c for c in collectives if not c.in_loop)
        return f"{inside:.2f} gradients are reduced in loops, {outside:.2f} outside of them"

    def __str__(self) -> str:
        mesh = ", ".join(f"{k}={v}" for k, v in self.mesh.items()) if self.mesh else "unknown"
        over = ", ".join(self.axis_name) if self.axis_name is not None else "all"
        sums = collections.Counter(f"{s} like {s.parameter}  {_trips(s)}" for s in self.loop_sums)
        lost = sum(not d.aliased for d in self.donated)
        out = [
            f"{self.name}: {self.num_devices} device(s), mesh {mesh}, axes that count: {over}",
            f"one gradient: {bytes_text(self.gradient_bytes)} on each device",
            f"collectives in loops: {bytes_text(self.loop_bytes)} a call, "
            f"{self.loop_gradients:.2f} gradients reduced",
            *_table(self.in_loops, 4),
            f"collectives outside: {bytes_text(self.outside_bytes)} a call, "
            f"{self.outside_gradients:.2f} gradients reduced",
            *_table(self.outside, 4),
            "(*: reduces gradients; payload on one device; every branch as taken)",
            f"loop-carried sums: {len(self.loop_sums)}",
            *_some([f"  {n} {text}" for text, n in sums.items()], 3),
            f"donated: {len(self.donated)} buffer(s), "
            f"{bytes_text(sum(d.bytes for d in self.donated))}; not reused: {lost}",
            f"memory: {self.memory or 'not told by this backend'}",
        ]
        if self.warnings:
            out += ["warnings:", *_some([f"  {w}" for w in self.warnings], 4)]
        return "\n".join(_cut(line, 100) for line in out)


def _table(collectives: Sequence[Collective], most: int) -> list[str]:
    """A line for all that are alike, a star for what reduces gradients, the largest first."""
    alike: dict[Any, list[Collective]] = collections.defaultdict(list)
    for c in sorted(collectives, key=lambda c: -c.bytes):
        alike[c.gradient_sized, c.kind, c.axes, c.loops, c.in_branch].append(c)
    groups = sorted(alike.values(), key=lambda group: -sum(c.total_bytes for c in group))
    used = [column for column in zip(*map(_row, groups)) if any(column)]
    return _some([f"  {line}" for line in columns(list(zip(*used)), names=len(used))], most)


def _row(alike: Sequence[Collective]) -> tuple[str, ...]:
    c = alike[0]
    others = sum(len(c.arrays) for c in alike) - 1
    moves = ", ".join(sorted({name for c in alike for name in c.moves}))
    return (
        "*" if c.gradient_sized else " ",
        c.kind if len(alike) == 1 else f"{len(alike)} {c.kind}s",
        f"over {', '.join(c.axes) or 'nothing'}" if c.axes is not None else "axes unknown",
        ", ".join(c.arrays[:1]) + (f" and {others} more" if others > 0 else ""),
        f"{_trips(c)} = {bytes_text(sum(c.total_bytes for c in alike))}",
        "in a branch" if c.in_branch else "",
        _cut(f"moves {moves}" if moves else c.op_name, 60),
    )


def _trips(what: Collective | LoopSum) -> str:
    """How often something runs."""
    if isinstance(what, Collective) and not what.in_loop:
        return "once"
    return f"x {what.trip_count}" if what.trip_count is not None else "x ? (counted once)"


def _some(lines: list[str], most: int) -> list[str]:
    """The first lines, and how many more there are."""
    rest = len(lines) - most + 1
    return lines if rest < 2 else [*lines[: most - 1], f"  and {rest} more"]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _plain(value: Any) -> Any:
    """Fields and properties of dataclasses in dicts, tuples as lists; `nan` becomes `None`."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name, v in vars(type(value)).items() if isinstance(v, property)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value
