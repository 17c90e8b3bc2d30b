"""The largest micro-batch that fits in memory, from the compiler's own count. Nothing runs."""

import inspect
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax

from jaxaccum.auditing import Memory, hlo
from jaxaccum.core import checks
from jaxaccum.planning import cost
from jaxaccum.planning.fit import MemoryFit, MemoryPoint, total_of

_TOO_LARGE = ("RESOURCE_EXHAUSTED", "Ran out of memory", "Out of memory")


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
    examples = _integer("examples_per_step", examples_per_step)
    devices = _integer("data_parallel", data_parallel)
    if limit_bytes is not None:
        limit_bytes = _integer("limit_bytes", limit_bytes)
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
    search = _Search(make_step, rows, limit_bytes, stream)
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


def _integer(name: str, value: Any) -> int:
    return checks.integer("fit_microbatch", name, value)


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
        self.make_step = make_step
        self.rows = rows
        self.limit = limit
        self.stream = stream
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
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            traced = (fn if hasattr(fn, "trace") else jax.jit(fn)).trace(*args, **kwargs)
            lowered = traced.lower()
            try:
                compiled = lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                # Compilers for a device of known memory refuse what is larger.
                if not any(text in str(error) for text in _TOO_LARGE):
                    raise
                compiled = None
        seconds = time.perf_counter() - start
        program = hlo.parse(compiled.as_text()) if compiled is not None else None
        devices = program.num_devices if program is not None else len(_devices(args, kwargs))
        memory, code = _memory(compiled) if compiled is not None else (None, 0)
        total = total_of(memory, code) if memory is not None else None
        repeat = number if self.stream else 1
        moved = _moved(compiled, program) if program is not None else None
        return MemoryPoint(
            num_microbatches=number,
            microbatch_size=size,
            memory=memory,
            code_bytes=code,
            fits=total is not None and total <= (self.limit or 0),
            flops=repeat * cost.flops_of(traced.jaxpr.jaxpr) // max(1, devices),
            moved_bytes=repeat * moved if moved is not None else None,
            compile_seconds=seconds,
        )

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


def _memory(compiled: Any) -> tuple[Memory, int]:
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError(
            "fit_microbatch: the backend tells nothing of a compiled step's memory. Compile for "
            "another platform."
        )
    memory = Memory(
        int(stats.argument_size_in_bytes),
        int(stats.output_size_in_bytes),
        int(stats.alias_size_in_bytes),
        int(stats.temp_size_in_bytes),
    )
    return memory, int(stats.generated_code_size_in_bytes)


def _moved(compiled: Any, program: hlo.Program) -> int:
    """The bytes that a step moves: XLA's count, where it has one, with the loops repeated."""
    once, often = cost.moved_bytes(program)
    try:
        counted = compiled.cost_analysis()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        counted = None
    counted = counted[0] if isinstance(counted, list) and counted else counted
    if not counted or "bytes accessed" not in counted or not once:
        return often
    return round(counted["bytes accessed"] * often / once)
