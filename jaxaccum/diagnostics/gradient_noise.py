"""The gradient noise scale of a window, smoothed over windows, and what it says about its size."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxaccum.core import checks
from jaxaccum.core.mean import divide
from jaxaccum.core.noise import square_norm
from jaxaccum.core.reducers import Addition
from jaxaccum.core.sums import WindowSums


class NoiseScale(NamedTuple):
    """How noisy a gradient is: the spread of its parts against its length.

    Attributes:
      trace: the trace of the covariance of one unit of weight's gradient (one token's, one
        example's); a window of weight `N` has the variance `trace / N` in its gradient. Float32
        scalar or wider.
      grad_sq_norm: the squared norm of the true gradient, what the noise adds taken off. An
        unbiased estimate, which may come out negative where noise rules.
      value: `trace / grad_sq_norm`, the simple noise scale, in units of weight.
    """

    trace: jax.Array
    grad_sq_norm: jax.Array
    value: jax.Array


def noise_scale(sums: WindowSums) -> NoiseScale:
    """The gradient noise scale from the micro-batch sums of one window.

    With the groups `k` (one micro-batch of one device each), their undivided gradients `S_k` and
    weights `n_k`, `S = sum_k S_k` and `N = sum_k n_k`:

        trace = (sum_k |S_k|**2 / n_k - |S|**2 / N) / (groups - 1)
        grad_sq_norm = |S / N|**2 - trace / N
        value = trace / grad_sq_norm

    Both estimates are unbiased for any weights, if the units of weight are independent and each
    adds a gradient of the same distribution. Groups without weight are left out, as are
    micro-batches that were skipped. Two batch sizes, as in the paper's appendix A.1, are not
    needed: the micro-batches are the small one.

    Args:
      sums: from `ja.accumulate(..., noise_scale=True)`, also merged. More groups measure better:
        the relative error of `trace` is at least `sqrt(2 / (groups - 1) / rank)` for Gaussian
        noise of that many equal directions.

    Returns:
      A `NoiseScale`. With fewer than two groups all three are nan: there is no spread to measure.
      `value` is inf where `grad_sq_norm` is zero and negative where its estimate is: smooth both
      over windows, `ja.diagnostics.smooth_noise`, and not their quotient.

    Raises:
      TypeError: `sums` is not a `WindowSums`.
      ValueError: the sums were made without `noise_scale=True`.

    References:
      Sam McCandlish, Jared Kaplan, Dario Amodei and the OpenAI Dota team, "An Empirical Model of
      Large-Batch Training", 2018.

    Example:
      >>> import jaxaccum as ja
      >>> def loss_fn(w, rows):  # a row is the gradient of one micro-batch and its weight
      ...     return ja.Mean((rows[:, :2] @ w).sum(), rows[:, 2].sum())
      >>> f = ja.accumulate(loss_fn, num_microbatches=2, noise_scale=True)
      >>> noise = ja.noise_scale(f(jnp.zeros(2), jnp.array([[3.0, 0, 3], [0, 7, 7]])))
      >>> print(f"{noise.trace:.2f} {noise.grad_sq_norm:.2f} {noise.value:.2f}")
      4.20 0.16 26.25
    """
    if not isinstance(sums, WindowSums):
        raise TypeError(
            f"noise_scale: expected `WindowSums` from `accumulate`, got {checks.describe(sums)}."
        )
    if sums.noise is None:
        raise ValueError(
            "noise_scale: the sums hold no noise statistics. Make them with "
            "`ja.accumulate(..., noise_scale=True)`."
        )
    pairs = zip(jax.tree.leaves(sums.grads), jax.tree.leaves(sums.reducers.grads), strict=True)
    added = [leaf for leaf, reducer in pairs if isinstance(reducer, Addition)]
    (weight,) = jax.tree.leaves(sums.weight)
    square = square_norm(added)
    spread = sums.noise.square - divide(square, weight, empty=jnp.nan)
    # One group has no spread, and 0 / 0 is what is known about it.
    degrees = jnp.maximum(sums.noise.num_groups - 1, 0)
    trace = divide(spread, degrees, empty=jnp.nan)
    mean = divide(divide(square, weight, empty=jnp.nan) - trace, weight, empty=jnp.nan)
    return NoiseScale(trace, mean, trace / mean)


class NoiseTracker(NamedTuple):
    """The noise scale smoothed over windows; a state of three scalars.

    Attributes:
      trace_ema: the undivided moving average of `trace`; float32 scalar.
      grad_sq_norm_ema: the undivided moving average of `grad_sq_norm`; float32 scalar.
      weight: what both are divided by, `1 - decay**windows`; float32 scalar.
    """

    trace_ema: jax.Array
    grad_sq_norm_ema: jax.Array
    weight: jax.Array

    @property
    def noise_scale(self) -> NoiseScale:
        """The smoothed `NoiseScale`: the quotient of the averages; nan before the first window."""
        trace = divide(self.trace_ema, self.weight, empty=jnp.nan)
        mean = divide(self.grad_sq_norm_ema, self.weight, empty=jnp.nan)
        return NoiseScale(trace, mean, trace / mean)


def noise_tracker() -> NoiseTracker:
    """An empty tracker, for the first `smooth_noise`.

    Returns:
      A `NoiseTracker` of zeros, each in a buffer of its own.
    """
    return NoiseTracker(*(jnp.zeros((), jnp.float32) for _ in NoiseTracker._fields))


def smooth_noise(tracker: NoiseTracker, noise: NoiseScale, *, decay: float = 0.95) -> NoiseTracker:
    """One more window in the moving averages of numerator and denominator.

    `ema = decay * ema + (1 - decay) * new` for `trace` and `grad_sq_norm` apart, since the mean of
    their quotients is biased and one denominator near zero would rule it. The average is divided
    by its own weight, so the first windows count in full.

    Args:
      tracker: from `noise_tracker` or the last call.
      noise: from `noise_scale`, or the field of a `StepInfo`.
      decay: in [0, 1); a static float. The average spans about `1 / (1 - decay)` windows.

    Returns:
      A new `NoiseTracker`. A window whose noise is not finite (fewer than two micro-batches with
      weight) leaves it as it was.

    Raises:
      TypeError: an argument is of another type.
      ValueError: `decay` is not in [0, 1).

    Example:
      >>> tracker = noise_tracker()
      >>> for trace, square in ((4.0, 1.0), (6.0, -0.5), (5.0, 1.0)):
      ...     noise = NoiseScale(jnp.float32(trace), jnp.float32(square), jnp.float32(0))
      ...     tracker = smooth_noise(tracker, noise, decay=0.5)
      >>> print(f"{tracker.noise_scale.trace:.3f} {tracker.noise_scale.value:.1f}")
      5.143 9.0
    """
    if not (isinstance(tracker, NoiseTracker) and isinstance(noise, NoiseScale)):
        raise TypeError(
            "smooth_noise: expected a `NoiseTracker` and a `NoiseScale`, got "
            f"{checks.describe(tracker)} and {checks.describe(noise)}. `noise_tracker` makes the "
            "first, `ja.noise_scale` the second."
        )
    if not 0 <= checks.number("smooth_noise", "decay", decay) < 1:
        raise ValueError(f"smooth_noise: `decay` must be in [0, 1), got {decay!r}.")
    good = jnp.isfinite(noise.trace) & jnp.isfinite(noise.grad_sq_norm)
    news = (noise.trace, noise.grad_sq_norm, jnp.ones(()))
    return NoiseTracker(
        *(
            jnp.where(good, decay * old + (1 - decay) * new.astype(old.dtype), old)
            for old, new in zip(tracker, news, strict=True)
        )
    )


class BatchAdvice(NamedTuple):
    """What the noise scale says about the size of a window; `str` puts it into words.

    Attributes:
      critical_weight: the critical batch size in units of weight, the noise scale itself.
      window_weight: the weight of the window that was asked about.
      num_microbatches: the micro-batches of that window, or `None`.
      steps_factor: how many more optimizer steps than with endless windows reach the same loss.
      data_factor: how much more data than with the smallest windows reaches the same loss.
      critical_num_microbatches: how many micro-batches of this window's size make a window of the
        critical weight, at least 1; `None` without `num_microbatches`.
    """

    critical_weight: float
    window_weight: float
    num_microbatches: int | None
    steps_factor: float
    data_factor: float
    critical_num_microbatches: int | None

    def __str__(self) -> str:
        if not 0 < self.critical_weight < float("inf"):
            return (
                "The noise scale is not known: the estimated gradient is lost in its noise. Smooth "
                "over more windows, or cut them into more micro-batches."
            )
        ratio = self.window_weight / self.critical_weight
        text = (
            f"A window weighs {self.window_weight:,.0f}, {ratio:.2g} times the critical "
            f"{self.critical_weight:,.0f}. The same loss takes {self.steps_factor:.2f} times the "
            f"optimizer steps of endless windows, {self.data_factor:.2f} times the data of the "
            "smallest ones."
        )
        if self.critical_num_microbatches is None:
            return text
        if ratio > 2:
            verdict = "Fewer micro-batches would save data and take few steps more"
        elif ratio < 0.5:
            verdict = "More micro-batches would save optimizer steps at little more data"
        else:
            verdict = "This number of micro-batches is near the balance of both"
        return (
            f"{text} {verdict}: {self.critical_num_microbatches} of them make the critical size, "
            f"now {self.num_microbatches}."
        )


def batch_advice(
    noise: NoiseScale, window_weight: Any, *, num_microbatches: Any = None
) -> BatchAdvice:
    """What the noise scale `B` says about windows of weight `N`.

    `steps_factor = 1 + B / N` and `data_factor = 1 + N / B`: both are 2 at the critical size
    `N = B`. Far above it a larger window saves hardly any optimizer steps, far below it costs
    hardly any data. The model holds at one place of the training, for a well-tuned learning rate;
    `B` usually grows while the loss falls.

    Args:
      noise: from `noise_scale`, better from a tracker's `noise_scale`; concrete numbers.
      window_weight: the weight of a window, in the unit of the noise (tokens, examples).
      num_microbatches: how many micro-batches make the window now.

    Returns:
      A `BatchAdvice` of Python numbers. Its factors are nan where the noise scale is not positive
      or not finite.

    Raises:
      TypeError: an argument is of another type.
      ValueError: `window_weight` is not positive and finite.

    References:
      Sam McCandlish, Jared Kaplan, Dario Amodei and the OpenAI Dota team, "An Empirical Model of
      Large-Batch Training", 2018, equations 2.11 and 2.12.

    Example:
      >>> noise = NoiseScale(jnp.float32(8000), jnp.float32(2), jnp.float32(4000))
      >>> advice = batch_advice(noise, 1000, num_microbatches=2)
      >>> print(advice.steps_factor, advice.data_factor, advice.critical_num_microbatches)
      5.0 1.25 8
    """
    if not isinstance(noise, NoiseScale):
        raise TypeError(
            f"batch_advice: `noise` must be a `NoiseScale`, got {checks.describe(noise)}. "
            "`ja.noise_scale` makes one, a tracker's `noise_scale` is one."
        )
    weight = checks.number("batch_advice", "window_weight", window_weight)
    if not 0 < weight < float("inf"):
        raise ValueError(
            f"batch_advice: `window_weight` must be positive and finite, got {window_weight!r}."
        )
    critical = float(noise.value)
    known = 0 < critical < float("inf")
    number, wanted = None, None
    if num_microbatches is not None:
        number = checks.integer("batch_advice", "num_microbatches", num_microbatches)
        wanted = max(1, round(critical * number / weight)) if known else None
    nan = float("nan")
    return BatchAdvice(
        critical_weight=critical,
        window_weight=weight,
        num_microbatches=number,
        steps_factor=1 + critical / weight if known else nan,
        data_factor=1 + weight / critical if known else nan,
        critical_num_microbatches=wanted,
    )
