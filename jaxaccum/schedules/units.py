"""Schedules in tokens, examples, epochs and micro-steps, as schedules of optimizer steps."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks
from jaxaccum.numerics import accumulators, weights
from jaxaccum.schedules.ramps import Ramp, amount_at, steps_at, table_of


def by_tokens(schedule_fn: Callable[[Any], Any], *, tokens_per_step: Any) -> Callable[[Any], Any]:
    """A schedule written in tokens, as one of optimizer steps.

    `schedule(t) = schedule_fn(tokens seen before optimizer step t)`: warm-up and decay stay where
    they are in tokens, whatever the window, also while it grows. Write amounts past 2**31 in the
    schedule as floats, `8e9`: JAX takes a Python int of that size for an error.

    Args:
      schedule_fn: from tokens, a float scalar, to a value; any Optax schedule.
      tokens_per_step: tokens of an optimizer step over all devices: an int, or a `Ramp` such as
        `ramp(...).times(tokens_per_microbatch)`.

    Returns:
      A schedule for any Optax optimizer, traced or not.

    Raises:
      TypeError: `tokens_per_step` is neither; make a `Ramp` of a function with `tabulate`.
      ValueError: it is less than 1.

    Example:
      >>> import optax
      >>> warm_up = optax.linear_schedule(0.0, 1.0, 8e9)
      >>> schedule = by_tokens(warm_up, tokens_per_step=4_000_000)
      >>> print(schedule(500), schedule(1000), schedule(2000))
      0.25 0.5 1.0
    """
    return _by("by_tokens", "tokens_per_step", schedule_fn, tokens_per_step)


def by_examples(
    schedule_fn: Callable[[Any], Any], *, examples_per_step: Any
) -> Callable[[Any], Any]:
    """A schedule written in examples, as one of optimizer steps; see `by_tokens`.

    Args:
      schedule_fn: from examples, a float scalar, to a value.
      examples_per_step: examples of an optimizer step over all devices: an int or a `Ramp`.

    Returns:
      A schedule of optimizer steps.
    """
    return _by("by_examples", "examples_per_step", schedule_fn, examples_per_step)


def by_micro_steps(schedule_fn: Callable[[Any], Any], *, every: Any) -> Callable[[Any], Any]:
    """A schedule written in micro-steps, as one of optimizer steps; see `by_tokens`.

    For a schedule from a run without accumulation, whose steps have become micro-steps.

    Args:
      schedule_fn: from micro-steps, a float scalar, to a value.
      every: micro-steps of an optimizer step, as for `ja.multi_steps`: an int or a `Ramp`.

    Returns:
      A schedule of optimizer steps.
    """
    return _by("by_micro_steps", "every", schedule_fn, every)


def by_epochs(
    schedule_fn: Callable[[Any], Any], *, examples_per_epoch: int, examples_per_step: Any
) -> Callable[[Any], Any]:
    """A schedule written in epochs, as one of optimizer steps; see `by_tokens`.

    Args:
      schedule_fn: from epochs, a float scalar that is whole where an epoch ends with a window, to
        a value.
      examples_per_epoch: examples of an epoch; a static int.
      examples_per_step: examples of an optimizer step over all devices: an int or a `Ramp`.

    Returns:
      A schedule of optimizer steps.

    Example:
      >>> import optax
      >>> drops = optax.piecewise_constant_schedule(1.0, {30: 0.5})
      >>> schedule = by_epochs(drops, examples_per_epoch=1000, examples_per_step=100)
      >>> print(schedule(299), schedule(300))
      1.0 0.5
    """
    epoch = checks.integer("by_epochs", "examples_per_epoch", examples_per_epoch)
    return _by("by_epochs", "examples_per_step", schedule_fn, examples_per_step, epoch)


def rewindow(schedule_fn: Callable[[Any], Any], *, old: int, new: Any) -> Callable[[Any], Any]:
    """A schedule of optimizer steps, for windows of another size: nothing moves in tokens.

    `schedule(t) = schedule_fn(what was seen before step t of the new run / old)`.

    Args:
      schedule_fn: a schedule of optimizer steps that takes fractions of them, as Optax's do.
      old: tokens (or examples) of an optimizer step for which it was written; a static int.
      new: the same of the new run: an int or a `Ramp`.

    Returns:
      A schedule of the new run's optimizer steps.

    Example:
      >>> import optax
      >>> warm_up = optax.linear_schedule(0.0, 1.0, 1000)
      >>> print(rewindow(warm_up, old=256, new=1024)(125))
      0.5
    """
    return _by("rewindow", "new", schedule_fn, new, checks.integer("rewindow", "old", old))


def _by(
    function: str, name: str, schedule_fn: Any, per_step: Any, divisor: int | None = None
) -> Callable[[Any], Any]:
    if not callable(schedule_fn):
        raise TypeError(
            f"{function}: `schedule_fn` must be a function, got {checks.describe(schedule_fn)}."
        )
    table = table_of(function, name, per_step)

    def by_optimizer_step(optimizer_step: Any) -> Any:
        seen = _seen(table, optimizer_step)
        return schedule_fn(seen.total if divisor is None else _quotient(seen, divisor))

    return by_optimizer_step


def _seen(table: Ramp, optimizer_step: Any) -> accumulators.Compensated:
    """What all steps before this one add up to, as an exact pair of floats."""
    if isinstance(optimizer_step, int | np.integer):
        return weights.pair("schedules", "seen", amount_at(int(optimizer_step), per_step=table))
    step = jnp.asarray(optimizer_step)
    if not jnp.issubdtype(step.dtype, jnp.integer):
        step = jnp.floor(step)
    step = step.astype(jnp.int32)
    segment = table.segment(step)
    totals = [weights.pair("schedules", "total", total) for total in table.totals()]
    base = jax.tree.map(lambda *xs: jnp.stack(xs)[segment], *totals)
    steps = step - jnp.asarray(table.starts, jnp.int32)[segment]
    size = max(value.bit_length() for value in table.values)
    digits = [
        jnp.asarray([value >> shift & 0xFF for value in table.values], jnp.int32)[segment]
        for shift in range(0, size, 8)
    ]
    return weights.add(base, _product(steps, digits))


def _product(a: jax.Array, digits: Sequence[Any]) -> accumulators.Compensated:
    """`a * sum_i digits[i] * 2**(8 * i)` as an exact pair; `a` is an int32 that is not negative.

    Every partial product has at most 24 bits, so that a float32 holds it.
    """
    total = weights.zero()
    for i, digit in enumerate(digits):
        for half, shift in ((a & 0xFFFF, 0), (a >> 16, 16)):
            term = (half * digit).astype(total.total.dtype) * 2.0 ** (8 * i + shift)
            total = weights.add(total, accumulators.Compensated(term, jnp.zeros_like(term)))
    return total


def _quotient(seen: accumulators.Compensated, divisor: int) -> jax.Array:
    """`seen / divisor`, which is whole where `divisor` divides what was seen."""
    whole = jnp.floor(seen.total / float(divisor)).astype(jnp.int32)
    digits = [divisor >> shift & 0xFF for shift in range(0, divisor.bit_length(), 8)]
    product = _product(whole, digits)
    rest = weights.add(seen, accumulators.Compensated(-product.total, -product.error))
    return whole + rest.total / float(divisor)


def in_units(schedule_fn: Callable[[Any], Any], *, per_step: Any) -> Callable[[int], Any]:
    """A schedule of optimizer steps, as a function of tokens, examples or micro-steps.

    `f(amount) = schedule_fn(t)` for the optimizer step `t` that is under way when `amount` has
    been seen. On the host, for plots and comparisons; undoes `by_tokens` where a step begins.

    Args:
      schedule_fn: a schedule of optimizer steps.
      per_step: tokens, examples or micro-steps of an optimizer step: an int or a `Ramp`.

    Returns:
      A function of a static int.

    Example:
      >>> value_fn = in_units(lambda optimizer_step: optimizer_step, per_step=1024)
      >>> value_fn(1023), value_fn(2048)
      (0, 2)
    """
    table = table_of("in_units", "per_step", per_step)

    def by_amount(amount: int) -> Any:
        step = steps_at(amount, per_step=table)
        begun = amount_at(step, per_step=table) > amount
        return schedule_fn(step - begun)

    return by_amount
