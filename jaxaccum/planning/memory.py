"""The largest micro-batch that fits in memory, from the compiler's own count. Nothing runs."""

import dataclasses
import inspect
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax

from jaxaccum.auditing import Memory, hlo
from jaxaccum.core import checks
from jaxaccum.core.text import bytes_text, columns
from jaxaccum.planning import cost


@dataclasses.dataclass(frozen=True)
class MemoryPoint:
    """One compiled micro-batch size.

    Attributes:
      num_microbatches: micro-batches of the window on one device.
      microbatch_size: examples of the largest micro-batch on one device.
      memory: bytes on one device; `None` where the compiler refused the program.
      code_bytes: the program itself, where it lies in the device's memory.
      fits: whether `total_bytes` is within the limit.
      flops: matrix products and convolutions of one optimizer step on one device.
      moved_bytes: bytes that one device reads and writes for it; `None` where unknown.
      compile_seconds: what tracing and compiling took.
      refusal: what the compiler said where it refused, as it does for what is too large.
    """

    num_microbatches: int
    microbatch_size: int
    memory: Memory | None
    code_bytes: int
    fits: bool
    flops: int
    moved_bytes: int | None
    compile_seconds: float
    refusal: str | None = None

    @property
    def total_bytes(self) -> int | None:
        """`arguments + temporaries + outputs - aliased + code`: what the step holds on one device.

        What a TPU keeps in its on-chip memory is not in it.
        """
        memory = self.memory
        return None if memory is None else memory.arguments + memory.peak + self.code_bytes

    def _row(self) -> tuple[str, ...]:
        def text(number: int | None) -> str:
            return "" if number is None else bytes_text(number)

        return (
            f"{self.microbatch_size:,}",
            f"{self.num_microbatches:,}",
            text(self.total_bytes),
            text(self.memory.arguments if self.memory else None),
            "refused" if self.refusal else "fits" if self.fits else "too large",
            f"{self.flops / 1e9:.3g}",
            text(self.moved_bytes),
            f"{self.compile_seconds:.1f} s",
        )


_HEADER = ("micro-batch", "num_microbatches", "memory", "of it arguments", "", "GFLOP", "moved",
           "compile")  # fmt: skip


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
        names = ("num_microbatches", "microbatch_size", "needs_accumulation")
        points = [dataclasses.asdict(p) | {"total_bytes": p.total_bytes} for p in self.points]
        known = {name: getattr(self, name) for name in names}
        return dataclasses.asdict(self) | known | {"points": points}

    def __str__(self) -> str:
        many = self.data_parallel > 1
        devices = f" on {self.data_parallel} devices" if many else ""
        limit = f"{bytes_text(self.limit_bytes)}{' each' if many else ''}"
        refused = [
            f"{p.microbatch_size:,} examples: the compiler refused, {p.refusal}"
            for p in self.points
            if p.refusal
        ]
        return "\n".join(
            [
                f"an optimizer step of {self.examples_per_step:,} examples{devices}, {limit}",
                *columns([_HEADER, *(point._row() for point in self.points)]),
                *refused,
                self._verdict(),
            ]
        )

    def _verdict(self) -> str:
        best, smallest = self.best, self.points[0]
        if best is None:
            total, memory = smallest.total_bytes, smallest.memory
            need = "is more than the compiler allows"
            if total is not None and memory is not None:
                parts = bytes_text(total), bytes_text(memory.arguments)
                need = "needs {}, {} of it for arguments".format(*parts)
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


def fit_microbatch(
    make_step: Callable[..., Any],
    *,
    examples_per_step: int,
    limit_bytes: int | None = None,
    data_parallel: int = 1,
    stream: bool = False,
    uneven: bool = False,
    curve: bool = False,
) -> MemoryFit:
    """Finds the largest micro-batch whose step fits in memory, by compiling alone.

    The window stays the same: a smaller micro-batch means more of them. A step is compiled for a
    few numbers of micro-batches, bisecting between the whole batch and single examples, and
    `arguments + temporaries + outputs - aliased + code` of the compiler's own count is compared
    with the limit. Nothing is run or allocated, so nothing runs out; arguments may be
    `jax.ShapeDtypeStruct`s, also on the devices of a `jax.experimental.topologies` description: a
    TPU or GPU program is compiled on any machine that has the plugin.

    Args:
      make_step: returns `(fn, args)` or `(fn, args, kwargs)` for a number of micro-batches, which
        it gets by position, or by name if its parameters are called `num_microbatches` or
        `microbatch_size` (examples on one device). `fn` is the jitted step, or a function that is
        then jitted without donation.
      examples_per_step: examples of an optimizer step over all devices.
      limit_bytes: what one device may hold. Default: the device's memory, where it tells.
      data_parallel: devices that share the examples.
      stream: whether `fn` is a call with one micro-batch, `num_microbatches` of which make an
        optimizer step, and not the whole window; multiplies the cost, which then counts the
        optimizer's own share as often.
      uneven: whether to try every number of micro-batches, and not only those that divide the
        examples of a device evenly.
      curve: whether to compile every candidate, for the whole curve.

    Returns:
      A `MemoryFit`: `num_microbatches`, `microbatch_size`, `needs_accumulation`, and the compiled
      `points`. Memory is taken to grow with the micro-batch; the answer itself was compiled.

    Raises:
      TypeError: an argument has the wrong type, or `make_step` does not return a step.
      ValueError: the devices do not divide the examples, or no limit is given or known.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp
      >>> def make_step(num_microbatches):
      ...     def loss_fn(w, x):
      ...         for _ in range(4):
      ...             x = jnp.tanh(x @ w)
      ...         return ja.mean(x)
      ...     w, x = (jax.ShapeDtypeStruct((n, 64), "float32") for n in (64, 512))
      ...     return ja.value_and_grad(loss_fn, num_microbatches=num_microbatches), (w, x)
      >>> fit = fit_microbatch(make_step, examples_per_step=512, limit_bytes=450_000)
      >>> fit.num_microbatches, fit.microbatch_size, fit.needs_accumulation
      (4, 128, True)
    """
    given = {"examples_per_step": examples_per_step, "data_parallel": data_parallel}
    given |= {} if limit_bytes is None else {"limit_bytes": limit_bytes}
    given = {name: checks.integer("fit_microbatch", name, value) for name, value in given.items()}
    examples, devices = given["examples_per_step"], given["data_parallel"]
    if not callable(make_step):
        raise TypeError(
            "fit_microbatch: `make_step` must be a function of the number of micro-batches that "
            f"returns (fn, args), got {checks.describe(make_step)}."
        )
    rows, rest = divmod(examples, devices)
    if rest or not rows:
        above = (rows + 1) * devices
        below = f"{rows * devices} or " if rows else ""
        raise ValueError(
            f"fit_microbatch: `examples_per_step` must be a multiple of `data_parallel`, "
            f"{devices}, got {examples}. Use {below}{above}."
        )
    search = _Search(make_step, rows, given.get("limit_bytes"), stream)
    candidates = _candidates(rows, uneven)
    if curve:
        for number in candidates:
            search.at(number)
    elif not search.at(candidates[-1]).fits and len(candidates) > 1:
        low, high = 0, len(candidates) - 1  # `high` does not fit
        if search.at(candidates[low]).fits:
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if search.at(candidates[middle]).fits else (low, middle)
    points = sorted(search.points.values(), key=lambda point: -point.num_microbatches)
    return MemoryFit(search.limit or 0, examples, devices, tuple(points))


def _candidates(rows: int, uneven: bool) -> list[int]:
    """Numbers of micro-batches to try, by growing micro-batch; the smallest of each size."""
    sizes: dict[int, int] = {}
    for number in range(rows, 0, -1):
        if uneven or rows % number == 0:
            sizes[-(-rows // number)] = number
    return [sizes[size] for size in sorted(sizes)]


class _Search:
    """Compiles on demand, each number of micro-batches once."""

    def __init__(self, make_step: Any, rows: int, limit: int | None, stream: bool):
        self.make_step, self.rows, self.limit, self.stream = make_step, rows, limit, stream
        self.points: dict[int, MemoryPoint] = {}

    def at(self, number: int) -> MemoryPoint:
        if number not in self.points:
            self.points[number] = self._compile(number)
        return self.points[number]

    def _compile(self, number: int) -> MemoryPoint:
        size = -(-self.rows // number)
        fn, args, kwargs = self._step(number, size)
        if self.limit is None:
            self.limit = _device_limit(args, kwargs)
        start, refusal, compiled = time.perf_counter(), None, None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            traced = (fn if hasattr(fn, "trace") else jax.jit(fn)).trace(*args, **kwargs)
            lowered = traced.lower()
            try:
                compiled = lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                # Compilers for a device of known memory refuse what is larger.
                refusal = str(error).partition("\n")[0]
        seconds = time.perf_counter() - start
        memory, code, moved, devices = None, 0, None, len(_devices(args, kwargs))
        repeat = number if self.stream else 1
        if compiled is not None:
            program = hlo.parse(compiled.as_text())
            memory, code = cost.memory_of(compiled)
            moved, devices = repeat * cost.accessed_bytes(compiled, program), program.num_devices
        point = MemoryPoint(
            num_microbatches=number,
            microbatch_size=size,
            memory=memory,
            code_bytes=code,
            fits=False,
            flops=repeat * cost.flops_of(traced.jaxpr.jaxpr) // max(1, devices),
            moved_bytes=moved,
            compile_seconds=seconds,
            refusal=refusal,
        )
        total = point.total_bytes
        return dataclasses.replace(point, fits=total is not None and total <= self.limit)

    def _step(self, number: int, size: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        values = {"num_microbatches": number, "microbatch_size": size}
        try:
            names = [n for n in inspect.signature(self.make_step).parameters if n in values]
        except (TypeError, ValueError):  # a builtin without a signature
            names = []
        named = {name: values[name] for name in names}
        made = self.make_step(**named) if named else self.make_step(number)
        given: list[Any] = list(made) if isinstance(made, tuple) else []
        fn, args, kwargs = [*given, {}][:3] if len(given) in (2, 3) else (None, None, None)
        if not (callable(fn) and isinstance(args, tuple | list) and isinstance(kwargs, dict)):
            raise TypeError(
                "fit_microbatch: `make_step` must return (fn, args) or (fn, args, kwargs), with a "
                f"tuple of arguments, got {checks.describe(made)}."
            )
        return fn, tuple(args), kwargs


def _devices(args: Any, kwargs: Any) -> list[Any]:
    """The devices on which the arguments lie, or the first one."""
    for leaf in jax.tree.leaves((args, kwargs)):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding):
            try:
                return sorted(sharding.device_set, key=lambda device: device.id)
            except ValueError:  # an abstract mesh has no devices
                continue
    return jax.local_devices()[:1]


def _device_limit(args: Any, kwargs: Any) -> int:
    device = _devices(args, kwargs)[0]
    try:
        stats = device.memory_stats() or {}
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        stats = {}  # a described device, which does not exist here
    if "bytes_limit" not in stats:
        raise ValueError(
            f"fit_microbatch: `limit_bytes` is needed, since {device} does not tell its memory. "
            "Pass what one device may hold, for example `limit_bytes=16 * 2**30`."
        )
    return int(stats["bytes_limit"])
