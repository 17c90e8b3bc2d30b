"""From tokens per optimizer step to micro-batches, on paper."""

import dataclasses
import math
from typing import Any

from jaxaccum.core import checks
from jaxaccum.core.text import columns


@dataclasses.dataclass(frozen=True)
class WindowPlan:
    """How one window is cut, from `ja.plan_window`; `print` shows it as a table.

    Attributes:
      num_microbatches: micro-batches that one device runs for an optimizer step; pass it to
        `ja.value_and_grad` or as `every` to `ja.multi_steps`.
      sequences_per_step: sequences (examples) of an optimizer step, over all devices.
      tokens_per_step: tokens of an optimizer step over all devices; `None` where no sequence
        length is known.
      tokens_per_microbatch: tokens of one device's micro-batch; `None` likewise.
      sequences_per_microbatch: sequences of one device's micro-batch.
      sequence_length: tokens of a sequence, or `None`.
      data_parallel: devices that share the window.
    """

    num_microbatches: int
    sequences_per_step: int
    tokens_per_step: int | None
    tokens_per_microbatch: int | None
    sequences_per_microbatch: int
    sequence_length: int | None
    data_parallel: int

    @property
    def sequences_per_device(self) -> int:
        """The sequences that one device sees in an optimizer step."""
        return self.num_microbatches * self.sequences_per_microbatch

    @property
    def examples_per_step(self) -> int:
        """The same as `sequences_per_step`."""
        return self.sequences_per_step

    @property
    def examples_per_microbatch(self) -> int:
        """The same as `sequences_per_microbatch`."""
        return self.sequences_per_microbatch

    def as_dict(self) -> dict[str, int | None]:
        """The fields, for `json`."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        length = self.sequence_length
        rows = [("sequences" if length else "examples", self.sequences_per_microbatch)]
        if length:
            rows.insert(0, ("tokens", self.tokens_per_microbatch or 0))
        per_device = self.num_microbatches
        table: list[tuple[str, ...]] = [("", "optimizer step", "device", "micro-batch")]
        for name, amount in [*rows, ("micro-batches", 1)]:
            counts = (amount * per_device * self.data_parallel, amount * per_device, amount)
            table.append((name, *(f"{n:,}" for n in counts)))
        devices = f"{self.data_parallel} device{'s' if self.data_parallel > 1 else ''}"
        of = f", sequences of {length:,} tokens" if length else ""
        head = f"num_microbatches={per_device} on {devices}{of}"
        return "\n".join([head, *columns(table, names=1)])


def plan_window(
    *,
    tokens_per_step: int | None = None,
    sequence_length: int | None = None,
    sequences_per_microbatch: int | None = None,
    data_parallel: int = 1,
    sequences_per_step: int | None = None,
    examples_per_step: int | None = None,
    examples_per_microbatch: int | None = None,
) -> WindowPlan:
    """The number of micro-batches that makes an optimizer step of a wanted size, exactly.

    `num_microbatches = tokens_per_step / (sequence_length * sequences_per_microbatch *
    data_parallel)`. Nothing is rounded: a target that does not divide is refused, and the message
    names the nearest ones below and above.

    Give exactly one target, in tokens, sequences or examples, and exactly one size of a
    micro-batch. Examples and sequences are the same, rows of the batch.

    Args:
      tokens_per_step: tokens of an optimizer step over all devices, padding included.
      sequence_length: tokens of a sequence; needed with `tokens_per_step`.
      sequences_per_microbatch: sequences that one device holds at a time.
      data_parallel: devices that share the window.
      sequences_per_step: the target in sequences.
      examples_per_step: the target in examples.
      examples_per_microbatch: another name of `sequences_per_microbatch`.

    Returns:
      A `WindowPlan`.

    Raises:
      TypeError: an argument is not an integer.
      ValueError: the target does not divide, an argument is less than 1, or too few or too many
        of them are given.

    Example:
      >>> plan = plan_window(
      ...     tokens_per_step=524_288, sequence_length=2_048, sequences_per_microbatch=4,
      ...     data_parallel=8)
      >>> print(plan)
      num_microbatches=8 on 8 devices, sequences of 2,048 tokens
                     optimizer step  device  micro-batch
      tokens                524,288  65,536        8,192
      sequences                 256      32            4
      micro-batches              64       8            1
    """
    targets = {
        "tokens_per_step": tokens_per_step,
        "sequences_per_step": sequences_per_step,
        "examples_per_step": examples_per_step,
    }
    sizes = {
        "sequences_per_microbatch": sequences_per_microbatch,
        "examples_per_microbatch": examples_per_microbatch,
    }
    name, target = _only(targets)
    size_name, size = _only(sizes)
    devices = _integer("data_parallel", data_parallel)
    length = None if sequence_length is None else _integer("sequence_length", sequence_length)
    in_tokens = name == "tokens_per_step"
    if in_tokens and length is None:
        raise ValueError(
            "plan_window: `sequence_length` is needed with `tokens_per_step`. Pass the tokens of "
            "a row, or a target in sequences, `sequences_per_step`."
        )
    factors = {size_name: size, "data_parallel": devices}
    if in_tokens:
        factors = {"sequence_length": length or 1, **factors}
    number = _divide(name, target, factors)
    sequences = number * size * devices
    return WindowPlan(
        num_microbatches=number,
        sequences_per_step=sequences,
        tokens_per_step=sequences * length if length else None,
        tokens_per_microbatch=size * length if length else None,
        sequences_per_microbatch=size,
        sequence_length=length,
        data_parallel=devices,
    )


def _integer(name: str, value: Any) -> int:
    return checks.integer("plan_window", name, value)


def _only(arguments: dict[str, Any]) -> tuple[str, int]:
    """The one argument that is given, and its value."""
    checks.one_of("plan_window", **arguments)
    (name,) = (name for name, value in arguments.items() if value is not None)
    return name, _integer(name, arguments[name])


def _divide(name: str, target: int, factors: dict[str, int]) -> int:
    """`target` over the product of `factors`, which must be a whole number."""
    unit = math.prod(factors.values())
    number, rest = divmod(target, unit)
    if not rest:
        return number
    product = " * ".join(f"`{key}` ({value:,})" for key, value in factors.items())
    above = f"{(number + 1) * unit:,} ({_count(number + 1)})"
    nearest = f"{number * unit:,} ({_count(number)}) and {above}" if number else above
    raise ValueError(
        f"plan_window: `{name}` must be a multiple of {unit:,} = {product}, got {target:,}. The "
        f"nearest {'targets are' if number else 'target is'} {nearest}."
    )


def _count(number: int) -> str:
    return f"{number:,} micro-batch{'es' if number > 1 else ''}"
