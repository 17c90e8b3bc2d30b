"""Hyperparameters for another batch size, by published rules."""

from typing import Any, NamedTuple

from jaxaccum.core import checks
from jaxaccum.schedules.ramps import Ramp, table_of


class AdamHyperparameters(NamedTuple):
    """What `adam_scaling` returns, by the names of `optax.adam`.

    Attributes:
      learning_rate: a float, or a schedule where one was given.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: the term that keeps the denominator from zero.
    """

    learning_rate: Any
    b1: float
    b2: float
    eps: float


def linear_scaling(learning_rate: Any, *, old: int, new: Any) -> Any:
    """The linear rule: `learning_rate * new / old`.

    Holds for SGD with and without momentum on a mean loss, together with a warm-up, as long as the
    step is small against the curvature. It does not hold in the first epochs without a warm-up,
    for batches far above the critical one (`ja.noise_scale`), or for adaptive optimizers.

    Args:
      learning_rate: that of the old batch size: a float or a schedule.
      old: the old batch size, in any unit; a static int.
      new: the new batch size in the same unit: an int, or a `Ramp`, which gives a schedule.

    Returns:
      A float, or a schedule where either argument is one.

    References:
      Priya Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017.

    Example:
      >>> linear_scaling(0.1, old=256, new=8192)
      3.2
    """
    return _scaled("linear_scaling", learning_rate, old, new, 1.0)


def square_root_scaling(learning_rate: Any, *, old: int, new: Any) -> Any:
    """The square-root rule: `learning_rate * sqrt(new / old)`.

    Keeps the variance of an update the same. For Adam and its kin see `adam_scaling`, which is the
    whole rule; for SGD its first source already found that the linear rule worked better. It does
    not hold where gradients are nearly free of noise.

    Args:
      learning_rate: that of the old batch size: a float or a schedule.
      old: the old batch size, in any unit; a static int.
      new: the new batch size in the same unit: an int, or a `Ramp`, which gives a schedule.

    Returns:
      A float, or a schedule where either argument is one.

    References:
      Alex Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
      Sadhika Malladi, Kaifeng Lyu, Abhishek Panigrahi, Sanjeev Arora, "On the SDEs and Scaling
      Rules for Adaptive Gradient Algorithms", 2022.

    Example:
      >>> square_root_scaling(0.001, old=256, new=1024)
      0.002
    """
    return _scaled("square_root_scaling", learning_rate, old, new, 0.5)


def adam_scaling(
    learning_rate: Any, *, old: int, new: int, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> AdamHyperparameters:
    """The square-root rule for all of Adam's hyperparameters, with `k = new / old`.

    `learning_rate * sqrt(k)`, `1 - b = k * (1 - b)` for both decays, `eps / sqrt(k)`. It follows
    Adam's path on average while noise dominates the gradient. It does not hold for batches above
    the critical one, and not where `k * (1 - b)` comes near 1, which is refused.

    Args:
      learning_rate: that of the old batch size: a float or a schedule.
      old: the old batch size, in any unit; a static int.
      new: the new batch size in the same unit; a static int.
      b1: decay of the first moment at the old batch size.
      b2: decay of the second moment at the old batch size.
      eps: `eps` at the old batch size.

    Returns:
      `AdamHyperparameters`; `optax.adam(**adam_scaling(...)._asdict())`.

    Raises:
      ValueError: a decay is not in [0, 1), or would fall below 0.

    References:
      Sadhika Malladi, Kaifeng Lyu, Abhishek Panigrahi, Sanjeev Arora, "On the SDEs and Scaling
      Rules for Adaptive Gradient Algorithms", 2022.

    Example:
      >>> adam_scaling(0.001, old=256, new=1024, b1=0.9, b2=0.99, eps=2e-8)
      AdamHyperparameters(learning_rate=0.002, b1=0.6, b2=0.96, eps=1e-08)
    """
    old, new = (checks.integer("adam_scaling", n, v) for n, v in (("old", old), ("new", new)))

    def decay(name: str, value: float) -> float:
        scaled = round(1 - new / old * (1 - _decay("adam_scaling", name, value)), 15)
        if scaled < 0:
            raise ValueError(
                f"adam_scaling: `{name}`, {value}, would become {scaled:.3g} at {new / old:g} "
                "times the batch. The rule does not reach so far; scale in smaller steps."
            )
        return scaled

    rate = square_root_scaling(learning_rate, old=old, new=new)
    return AdamHyperparameters(rate, decay("b1", b1), decay("b2", b2), eps / (new / old) ** 0.5)


def half_life(decay: float, *, old: int, new: Any) -> Any:
    """A decay (Adam's `b2`) with the same half-life in tokens: `decay ** (new / old)`.

    A moment then forgets half of what it holds after as many tokens as before. Found for Adam's
    second moment in pretraining language models, down to a batch of one sequence. It says nothing
    about the learning rate, and does not hold for batches so large that the half-life becomes a
    few steps and the moment as noisy as one gradient.

    Args:
      decay: that of the old batch size, in (0, 1).
      old: tokens of an optimizer step then; a static int.
      new: tokens of an optimizer step now: an int, or a `Ramp`, which gives a schedule (for
        `optax.inject_hyperparams`).

    Returns:
      A float, or a schedule where `new` is a `Ramp`.

    Raises:
      ValueError: `decay` is not in [0, 1).

    References:
      Martin Marek, Sanae Lotfi, Aditya Somasundaram, Andrew Gordon Wilson, Micah Goldblum, "Small
      Batch Size Training for Language Models: When Vanilla SGD Works, and Why Gradient
      Accumulation Is Wasteful", 2025.

    Example:
      >>> half_life(0.9, old=1024, new=2048)
      0.81
    """
    base = _decay("half_life", "decay", decay)
    old = checks.integer("half_life", "old", old)
    table = table_of("half_life", "new", new)
    if not isinstance(new, Ramp):
        return round(base ** (table.values[0] / old), 15)
    return lambda optimizer_step: base ** (table(optimizer_step) / old)


def _decay(function: str, name: str, value: Any) -> float:
    number = checks.number(function, name, value)
    if not 0 <= number < 1:
        raise ValueError(f"{function}: `{name}` must be in [0, 1), got {value}.")
    return number


def _scaled(function: str, learning_rate: Any, old: Any, new: Any, power: float) -> Any:
    old = checks.integer(function, "old", old)
    table = table_of(function, "new", new)
    growing, scheduled = isinstance(new, Ramp), callable(learning_rate)
    if not growing and not scheduled:
        return learning_rate * (table.values[0] / old) ** power

    def schedule(optimizer_step: Any) -> Any:
        rate = learning_rate(optimizer_step) if scheduled else learning_rate
        size = table(optimizer_step) if growing else table.values[0]
        return rate * (size / old) ** power

    return schedule
