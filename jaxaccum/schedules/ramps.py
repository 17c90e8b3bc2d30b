"""Whole numbers that grow during training: micro-batches or tokens of a window."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks

_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A whole number that changes at given optimizer steps; a function of the optimizer step.

    From `ramp` or `tabulate`. `ja.multi_steps(optimizer, every=ramp)` runs windows that grow.

    Attributes:
      starts: the optimizer steps from which on each value holds; the first is 0.
      values: the values, as many.
    """

    starts: tuple[int, ...]
    values: tuple[int, ...]

    def __call__(self, optimizer_step: Any) -> jax.Array:
        """The value at an optimizer step, an int32 scalar that may be traced."""
        return jnp.asarray(self.values, jnp.int32)[self.segment(optimizer_step)]

    def times(self, units: int) -> "Ramp":
        """The same ramp in other units: micro-batches times the tokens of a micro-batch."""
        units = checks.integer("Ramp.times", "units", units)
        return make("Ramp.times", self.starts, [units * value for value in self.values])

    def segment(self, optimizer_step: Any) -> jax.Array:
        """Which of the values holds at an optimizer step."""
        starts = jnp.asarray(self.starts, jnp.int32)
        found = jnp.searchsorted(starts, jnp.asarray(optimizer_step, jnp.int32), side="right") - 1
        return jnp.maximum(found, 0)  # before the start, as at the start

    def totals(self) -> list[int]:
        """What all steps before each of `starts` add up to."""
        steps = [b - a for a, b in itertools.pairwise(self.starts)]
        return [0, *itertools.accumulate(n * v for n, v in zip(steps, self.values))]


def ramp(
    values: Iterable[int],
    *,
    steps: Sequence[int] | None = None,
    amounts: Sequence[int] | None = None,
    over: int | None = None,
    units: int = 1,
) -> Ramp:
    """A window that grows during training: `every` for `ja.multi_steps`.

    Each value but the last holds until an optimizer step (`steps`), until an amount was seen
    (`amounts`), or for an equal share of an amount (`over`). A value ends at the first optimizer
    step at whose start at least its amount was seen. With `ja.train_step`, whose number of
    micro-batches is fixed, pass the largest value and `num_real=ramp(optimizer_step)`.

    Args:
      values: micro-batches per window, for example; static ints.
      steps: the optimizer steps at which one value gives way to the next, one less than `values`.
      amounts: the same in units that were seen.
      over: the amount of units over which the values before the last one are spread evenly.
        Exactly one of the three.
      units: what 1 in `values` stands for in `amounts` and `over`: tokens of a micro-batch.

    Returns:
      A `Ramp`. A value whose share ends before it begins is left out.

    Raises:
      TypeError: an argument is not an integer.
      ValueError: `steps` or `amounts` do not grow, or their number is not one less than `values`.

    Example:
      >>> every = ramp([2, 4, 8], over=12_000, units=500)  # 6,000 tokens with 2, then with 4
      >>> every.starts, every.values
      ((0, 6, 9), (2, 4, 8))
    """
    numbers = [checks.integer("ramp", "values", value) for value in values]
    units = checks.integer("ramp", "units", units)
    checks.one_of("ramp", steps=steps, amounts=amounts, over=over)
    if not numbers:
        raise ValueError("ramp: `values` must hold at least one value, got none.")
    shares = len(numbers) - 1
    if over is not None:
        over = checks.integer("ramp", "over", over)
        limits = [-(-over * i // max(1, shares)) for i in range(1, shares + 1)]
    else:
        name = "steps" if steps is not None else "amounts"
        limits = [checks.integer("ramp", name, v) for v in (steps or amounts or ())]
        if len(limits) != shares or any(a >= b for a, b in itertools.pairwise(limits)):
            raise ValueError(
                f"ramp: `{name}` must hold {shares} growing numbers, one less than `values`, got "
                f"{limits}."
            )
    if steps is not None:
        return make("ramp", [0, *limits], numbers)
    starts, seen = [0], 0
    for value, limit in zip(numbers, limits):
        held = max(0, -(-(limit - seen) // (value * units)))
        starts.append(starts[-1] + held)
        seen += held * value * units
    last = dict(zip(starts, numbers))  # the last value of a start
    return make("ramp", list(last), list(last.values()))


def tabulate(per_step_fn: Callable[[Any], Any], num_steps: int) -> Ramp:
    """A `Ramp` of any function of the optimizer step, from calling it on the first `num_steps`.

    Args:
      per_step_fn: from an int32 scalar to a positive integer scalar, as `every` of
        `ja.multi_steps`; it is called under `jax.vmap`.
      num_steps: how many optimizer steps to look at; the last value stays after them.

    Returns:
      A `Ramp` with the same values.

    Raises:
      TypeError: the function does not return an integer scalar.
      ValueError: a value is less than 1.

    Example:
      >>> tabulate(lambda optimizer_step: 1 + optimizer_step // 10, 25)
      Ramp(starts=(0, 10, 20), values=(1, 2, 3))
    """
    number = checks.integer("tabulate", "num_steps", num_steps)
    made = np.asarray(jax.vmap(per_step_fn)(jnp.arange(number, dtype=jnp.int32)))
    if made.shape != (number,) or not np.issubdtype(made.dtype, np.integer):
        raise TypeError(
            "tabulate: `per_step_fn` must return an integer scalar, got "
            f"{made.dtype}[{','.join(map(str, made.shape[1:]))}]. Round it: `jnp.int32(...)`."
        )
    starts = [0, *(np.flatnonzero(np.diff(made)) + 1).tolist()]
    return make("tabulate", starts, [checks.integer("tabulate", "value", made[i]) for i in starts])


def make(function: str, starts: Sequence[int], values: Sequence[int]) -> Ramp:
    """A `Ramp` whose numbers an int32 holds."""
    if max(*starts, *values) > _LARGEST:
        raise ValueError(
            f"{function}: optimizer steps and values must be below 2**31, got "
            f"{max(*starts, *values)}. Count in larger units."
        )
    return Ramp(tuple(starts), tuple(values))


def table_of(function: str, name: str, per_step: Any) -> Ramp:
    """The `Ramp` that an argument is, or that holds the integer that it is."""
    if isinstance(per_step, Ramp):
        return per_step
    remedy = "Pass an int or a `ja.schedules.Ramp`; `tabulate` makes one of a function."
    return Ramp((0,), (checks.integer(function, name, per_step, remedy=remedy),))


def amount_at(optimizer_step: int, *, per_step: Any) -> int:
    """What has been seen before an optimizer step, exactly.

    Args:
      optimizer_step: a static int, 0 for the start of the run.
      per_step: tokens, examples or micro-steps of an optimizer step: an int or a `Ramp`.

    Returns:
      The amount, an int.

    Example:
      >>> amount_at(1000, per_step=524_288)
      524288000
    """
    step = checks.integer("amount_at", "optimizer_step", optimizer_step, minimum=0)
    table = table_of("amount_at", "per_step", per_step)
    i = bisect.bisect_right(table.starts, step) - 1
    return table.totals()[i] + (step - table.starts[i]) * table.values[i]


def steps_at(amount: int, *, per_step: Any) -> int:
    """The first optimizer step at whose start at least `amount` has been seen.

    For the arguments of a schedule: `warmup_steps=steps_at(2_000_000_000, per_step=524_288)`.

    Args:
      amount: tokens, examples or micro-steps; a static int.
      per_step: the same of an optimizer step: an int or a `Ramp`.

    Returns:
      A number of optimizer steps, an int; `amount_at` of it is at least `amount`.

    Example:
      >>> steps_at(2_000_000_000, per_step=524_288)
      3815
    """
    amount = checks.integer("steps_at", "amount", amount, minimum=0)
    table = table_of("steps_at", "per_step", per_step)
    totals = table.totals()
    i = max(0, bisect.bisect_left(totals, amount) - 1)
    return table.starts[i] - (totals[i] - amount) // table.values[i]
