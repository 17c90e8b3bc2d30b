"""What the benchmarks share: fair timing, compiled programs, and one way to report.

The sides of a comparison run in turns within one process: every round calls each side once, in a
new random order, and waits for its result. A ratio is the median of the
rounds' own ratios, so that a disturbance which lasts longer than a round touches both of its
sides. Compiling comes first and is never part of a timed call.

Each benchmark prints JSON lines to stdout (every line names versions, device and arguments) and
Markdown tables to stderr.
"""

import argparse
import gc
import json
import os
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import optax

import jaxaccum


class Program(NamedTuple):
    """A compiled function and what compiling it told.

    Attributes:
      call: the compiled function.
      trace_s: seconds for tracing and lowering.
      compile_s: seconds in the compiler.
      temp_bytes: the compiled temporary memory.
      equations: the equations of the jaxpr, those of inner jaxprs included.
      loops: the `while` loops of the optimized program.
      hlo: the optimized program's text.
    """

    call: Callable[..., Any]
    trace_s: float
    compile_s: float
    temp_bytes: int
    equations: int
    loops: int
    hlo: str


def compile_program(fn: Callable[..., Any], *args: Any, donate: Sequence[int] = ()) -> Program:
    """Compiles `fn` for the types of `args`, with cold caches."""
    jax.clear_caches()
    start = time.perf_counter()
    traced = jax.jit(fn, donate_argnums=tuple(donate)).trace(*args)
    lowered = traced.lower()
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    hlo = compiled.as_text()
    return Program(
        compiled,
        middle - start,
        end - middle,
        compiled.memory_analysis().temp_size_in_bytes,
        _count_equations(traced.jaxpr.jaxpr),
        len(re.findall(r"\bwhile\(", hlo)),
        hlo,
    )


def _count_equations(jaxpr: Any) -> int:
    inner = jax.extend.core.jaxprs_in_params
    return sum(1 + sum(map(_count_equations, inner(eqn.params))) for eqn in jaxpr.eqns)


class Times(NamedTuple):
    """What the calls of one side took; equal indices of two sides are of the same round.

    Attributes:
      wall: seconds until the result was ready.
      cpu: seconds of processor time over all threads, which other processes disturb less.
    """

    wall: list[float]
    cpu: list[float]


def time_sides(
    sides: Mapping[str, Callable[[], Any]], *, rounds: int, warmup: int = 1
) -> dict[str, Times]:
    """Times every side once in each round."""
    times = {name: Times([], []) for name in sides}
    order = random.Random(0)
    for number in range(-warmup, rounds):
        for name in order.sample(list(sides), len(sides)):
            gc.collect()  # what one side has left is not collected in the time of the next
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(sides[name]())
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if number >= 0:
                times[name].wall.append(wall)
                times[name].cpu.append(cpu)
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The median between the two quartiles: `(lower, median, upper)`."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


def ratios(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles of the rounds' ratios `over / under`."""
    return quartiles([a / b for a, b in zip(over, under, strict=True)])


def parser(doc: str, *, rounds: int) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    out = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--rounds", type=int, default=rounds, help="timed rounds of each comparison")
    out.add_argument("--seed", type=int, default=0)
    out.add_argument("--quick", action="store_true", help="a small run that shows it works")
    return out


class Report:
    """Prints each row as a JSON line at once, and the tables as Markdown when they are complete."""

    def __init__(self, benchmark: str, args: argparse.Namespace):
        self._common = {
            "benchmark": benchmark,
            "arguments": vars(args),
            "device": device(),
            "versions": versions(),
        }
        print(
            f"{device()}; {', '.join(f'{k} {v}' for k, v in versions().items())}", file=sys.stderr
        )

    def table(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Reports rows that have the same keys; a tuple is the quartiles of something timed."""
        for row in rows:
            print(json.dumps({**self._common, "table": title, **row}), flush=True)
        lines = [list(rows[0]), ["---"] * len(rows[0])]
        lines += [[_text(key, value) for key, value in row.items()] for row in rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        print(f"\n### {title}\n\n{text}", file=sys.stderr, flush=True)

    def comparison(
        self,
        title: str,
        sides: Mapping[str, Callable[[], Any]],
        *,
        over: Mapping[str, str],
        rounds: int,
        extra: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Times `sides` in turns and reports seconds and the ratios in `over`.

        Args:
          title: heading of the table.
          sides: by name, a function without arguments.
          over: which ratio to state beside a side: its own time over that of the side named here.
          rounds: timed rounds.
          extra: further columns for each side.
        """
        times = time_sides(sides, rounds=rounds, warmup=1 if rounds > 3 else 0)
        rows = []
        for name, own in times.items():
            row: dict[str, Any] = {"side": name, "ms": quartiles([1e3 * t for t in own.wall])}
            base = over.get(name)
            row["time ratio"] = ratios(own.wall, times[base].wall) if base else None
            if jax.default_backend() == "cpu":
                row["CPU-time ratio"] = ratios(own.cpu, times[base].cpu) if base else None
            row["over"] = base
            rows.append({**row, **(extra or {}).get(name, {})})
        self.table(title, rows)


def device() -> str:
    """The device in words."""
    first = jax.devices()[0]
    return f"{os.cpu_count()}-core CPU" if first.platform == "cpu" else first.device_kind


def versions() -> dict[str, str]:
    """The versions that a figure depends on."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "optax": optax.__version__,
        "jaxaccum": jaxaccum.__version__ if hasattr(jaxaccum, "__version__") else "0.1.0",
    }


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        lower, middle, upper = (f"{v:.3f}" if "ratio" in key else f"{v:.4g}" for v in value)
        return f"{middle} ({lower} to {upper})"
    if isinstance(value, float):
        return f"{value:.3f}" if "ratio" in key else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
