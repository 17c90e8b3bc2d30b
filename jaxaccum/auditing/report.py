"""What an audit found: values to test, a table to read, and a check to fail."""

import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import Any

from jaxaccum.auditing import table
from jaxaccum.auditing.findings import Collective, DonatedBuffer, LoopSum, Memory

REDUCTIONS = frozenset({"all-reduce", "reduce-scatter"})


@dataclasses.dataclass(frozen=True)
class Audit:
    """What a compiled step does, from `ja.audit`; `print` shows it as a table.

    Attributes:
      name: the compiled program's.
      num_devices: how many devices run it.
      mesh: the size of each mesh axis; `None` where no mesh is known.
      axis_name: the axes that count; `None` if all do.
      gradient_bytes: one gradient on one device, in float32 or wider.
      collectives: every operation in which devices exchange data.
      loop_sums: what loops accumulate in the shape of a parameter.
      donated: the donated arguments.
      memory: bytes on one device; `None` where the backend does not tell.
    """

    name: str
    num_devices: int
    mesh: dict[str, int] | None
    axis_name: tuple[str, ...] | None
    gradient_bytes: int
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
        return table.total(self.in_loops)

    @property
    def outside_bytes(self) -> int:
        """The payload bytes of one call outside of loops; every branch counts as taken."""
        return table.total(self.outside)

    @property
    def loop_gradients(self) -> float:
        """The bytes inside loops over the axes that count, as a multiple of one gradient."""
        return self._gradients(c for c in self.in_loops if c.counts)

    @property
    def outside_gradients(self) -> float:
        """The bytes outside of loops over the axes that count, as a multiple of one gradient."""
        return self._gradients(c for c in self.outside if c.counts)

    @property
    def reduced_gradients(self) -> float:
        """Like `outside_gradients`, of all-reduces and reduce-scatters alone."""
        return self._gradients(c for c in self.outside if c.counts and c.kind in REDUCTIONS)

    @property
    def moved_rows(self) -> tuple[Collective, ...]:
        """The collectives that move rows of the batch between devices."""
        return tuple(c for c in self.collectives if c.moves_rows)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is likely to be a mistake, in sentences."""
        found = [
            f"{c.kind} of {c.bytes} bytes in a loop, gradient-sized: {table.origin(c)}"
            for c in self.in_loops
            if c.gradient_sized
        ]
        found += [
            f"rows of the batch move between devices ({', '.join(c.moves)}): {c.kind} of "
            f"{c.total_bytes} bytes"
            for c in self.moved_rows
        ]
        found += [
            f"a loop sums {s.dtype}[{','.join(map(str, s.shape))}], shaped like {s.parameter}, in "
            f"less than float32: {s.op_name}"
            for s in self.loop_sums
            if s.low_precision
        ]
        found += [
            f"{d.argument} was donated, but "
            + ("no output reuses its buffer" if d.used else "the program does not use it")
            for d in self.donated
            if not d.aliased
        ]
        return tuple(found)

    def assert_deferred(
        self,
        *,
        kinds: Collection[str] | None = None,
        allow_branches: bool = False,
        max_gradients: float | None = 1.5,
    ) -> "Audit":
        """Fails unless the devices reduce once per window, outside of every loop.

        Args:
          kinds: the kinds of collective that must not be in a loop, for example
            `("all-reduce", "reduce-scatter")` where parameters are gathered in each micro-batch;
            `None` for all.
          allow_branches: accept those in a loop that only a conditional inside that loop runs,
            such as the closing micro-step of `ja.multi_steps` in a scan.
          max_gradients: how many gradients all reductions outside of loops may amount to. An
            unrolled loop has its reductions there. `None` for any number.

        Returns:
          The audit.

        Raises:
          AssertionError: a gradient-sized collective runs in a loop, or the reductions outside
            amount to more than `max_gradients`. The message lists them.
          ValueError: no gradient is known to measure against.
        """
        if not self.gradient_bytes:
            raise ValueError(
                "Audit.assert_deferred: `gradient_like` has no floating-point arrays, so nothing "
                "can be compared with a gradient. Pass ja.audit(..., gradient_like=params)."
            )
        offending = [
            c
            for c in self.in_loops
            if c.gradient_sized
            and (kinds is None or c.kind in kinds)
            and not (allow_branches and c.branch_in_loop)
        ]
        if offending:
            total = self._gradients(offending)
            message = [
                f"Audit.assert_deferred: {self.name} runs {len(offending)} gradient-sized "
                f"collective(s) inside loops, {table.total(offending)} bytes or {total:.2f} "
                "gradients a call:",
                *table.lines(offending),
                "Keep the sums on the devices and reduce them after the loop: "
                "ja.value_and_grad(..., axis_name=...) inside jax.shard_map, or "
                "spmd_axis_name=... under plain jit.",
            ]
            if any(c.branch_in_loop for c in offending):
                message.append(
                    "If the conditional is a window's last micro-step, pass allow_branches=True."
                )
            if any(c.axes is None or self.axis_name is None for c in offending):
                message.append(
                    "If they belong to another axis than the data's, pass ja.audit(..., "
                    "axis_name=...)."
                )
            raise AssertionError("\n".join(message))
        if max_gradients is not None and self.reduced_gradients > max_gradients:
            reductions = [c for c in self.outside if c.counts and c.kind in REDUCTIONS]
            raise AssertionError(
                "\n".join(
                    [
                        f"Audit.assert_deferred: {self.name} reduces {self.reduced_gradients:.2f} "
                        f"gradients outside of loops, expected at most `max_gradients`, "
                        f"{max_gradients}:",
                        *table.lines(reductions),
                        "An unrolled loop reduces once for each micro-batch: use ja.accumulate or "
                        "lax.scan. If one gradient is not "
                        f"{self.gradient_bytes} bytes, pass ja.audit(..., gradient_like=params).",
                    ]
                )
            )
        return self

    def as_dict(self) -> dict[str, Any]:
        """All attributes and properties, in dicts, lists and plain values that `json` can write."""
        plain = _plain(self)
        plain["collectives"] = [_plain(c) for c in self.collectives]
        plain["loop_sums"] = [_plain(s) for s in self.loop_sums]
        plain["donated"] = [_plain(d) for d in self.donated]
        plain["memory"] = _plain(self.memory) if self.memory is not None else None
        for name in ("in_loops", "outside", "moved_rows"):
            del plain[name]  # `collectives` says all of it
        return plain

    def _gradients(self, collectives: Iterable[Collective]) -> float:
        total = table.total(collectives)
        return total / self.gradient_bytes if self.gradient_bytes else math.nan

    def __str__(self) -> str:
        mesh = ", ".join(f"{k}={v}" for k, v in self.mesh.items()) if self.mesh else "unknown"
        over = ", ".join(self.axis_name) if self.axis_name is not None else "all"
        out = [
            f"{self.name}: {self.num_devices} device(s), mesh {mesh}, axes that count: {over}",
            f"one gradient: {self.gradient_bytes} bytes on each device",
            "",
            f"collectives in loops: {self.loop_bytes} bytes a call"
            + self._share(self.loop_gradients),
            *table.table(self.in_loops),
            f"collectives outside: {self.outside_bytes} bytes a call"
            + self._share(self.outside_gradients),
            *table.table(self.outside),
        ]
        if self.collectives:
            out.append("(*: gradient-sized; bytes: payload on one device; every branch as taken)")
        out += ["", f"loop-carried sums: {len(self.loop_sums)}"]
        rows = [
            (f"{s.dtype}[{','.join(map(str, s.shape))}]", f"like {s.parameter}", table.trips(s))
            for s in self.loop_sums
        ]
        out += table.columns(rows)
        kept = [d for d in self.donated if d.aliased]
        out.append(
            f"donated: {len(self.donated)} buffer(s), {table.size(self.donated)} bytes; aliased: "
            f"{len(kept)} buffer(s), {table.size(kept)} bytes"
        )
        if self.memory is None:
            out.append("memory: not told by this backend")
        else:
            m = self.memory
            out.append(
                f"memory: peak {m.peak} bytes beside arguments of {m.arguments} (temporaries "
                f"{m.temporaries} + outputs {m.outputs} - aliased {m.aliased})"
            )
        if self.warnings:
            out += ["", "warnings:", *(f"  {w}" for w in self.warnings)]
        return "\n".join(out)

    def _share(self, gradients: float) -> str:
        return "" if math.isnan(gradients) else f", {gradients:.2f} gradients over axes that count"


def _plain(item: Any) -> dict[str, Any]:
    """The fields and properties of a dataclass; `nan` becomes `None`."""
    names = [field.name for field in dataclasses.fields(item)]
    names += [name for name, v in vars(type(item)).items() if isinstance(v, property)]
    return {name: _value(getattr(item, name)) for name in names}


def _value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_value(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value
