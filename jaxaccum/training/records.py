"""The state of a training step, and what a step tells."""

from typing import Any, NamedTuple, Protocol, Unpack

import jax
import jax.numpy as jnp

from jaxaccum.closing.ledger import Ledger, WithLedger
from jaxaccum.diagnostics.gradient_noise import NoiseScale
from jaxaccum.numerics import accumulators, loss_scaling, weights
from jaxaccum.window.options import StepCall, SumsOptions


class _Fields(NamedTuple):
    optimizer_step: jax.Array
    weight_seen_carry: accumulators.Compensated
    inner_state: Any
    ledger: Ledger
    model_state: Any = None


class StepState(WithLedger, _Fields):
    """The state of a `train_step`.

    What stands in the ledger reads as a field too: `state.num_skipped`.

    Attributes:
      optimizer_step: how many optimizer steps were applied; int32 scalar.
      weight_seen_carry: the weight of all windows so far, as an exact pair of floats.
      inner_state: the state of the optimizer.
      ledger: what was skipped and dropped so far, `diverged`, and the state of the loss scale; see
        `Ledger`.
      model_state: the model's own state, such as batch statistics; `None` without `model_state`.
    """

    __slots__ = ()

    @classmethod
    def first(
        cls, inner_state: Any, loss_scale: loss_scaling.LossScale | None, model_state: Any = None
    ) -> "StepState":
        """The state of a training that has made no step."""
        return cls(
            optimizer_step=jnp.zeros((), jnp.int32),
            weight_seen_carry=weights.zero(),
            inner_state=inner_state,
            ledger=Ledger.first(loss_scale)._replace(num_empty=None),
            model_state=model_state,
        )


class StepInfo(NamedTuple):
    """What a person wants to read after a step; every field is an array.

    Attributes:
      loss: the window's mean loss; nan where nothing was counted.
      weight: the window's weight; a scalar, or the loss's tree of them.
      grad_norm: the global norm of the mean gradient, before any clipping; of the whole one, where
        parameters or gradients are in parts.
      num_microbatches: the micro-batches of the window.
      num_skipped: the micro-batches that were left out.
      updated: whether an optimizer step was applied; false for a window in which nothing counts.
      optimizer_step: the optimizer steps so far, this one included.
      weight_seen_carry: see `tokens_seen`.
      aux: the combined auxiliary outputs; `None` without `has_aux`.
      noise_scale: the window's `NoiseScale`; `None` without `noise_scale=True`.
      num_dropped: as in `StepState`, as are the next two.
      num_bad_in_row: windows left out in a row.
      diverged: whether `max_bad_windows` was reached.
      loss_scale: the scale of this window; `None` without a loss scale.
      overflowed: whether any of its micro-batches was not finite, so that the scale shrinks;
        `None` without a loss scale.
    """

    loss: jax.Array
    weight: Any
    grad_norm: jax.Array
    num_microbatches: jax.Array
    num_skipped: jax.Array
    updated: jax.Array
    optimizer_step: jax.Array
    weight_seen_carry: accumulators.Compensated
    aux: Any = None
    noise_scale: NoiseScale | None = None
    num_dropped: Any = None
    num_bad_in_row: Any = None
    diverged: Any = None
    loss_scale: Any = None
    overflowed: Any = None

    @property
    def tokens_seen(self) -> Any:
        """The weight of all windows so far, exact past 2**31 when read outside of `jit`.

        For a loss of several terms it is the largest of their weights that is counted.
        """
        return weights.read(self.weight_seen_carry)


class StepOptions(SumsOptions, total=False):
    """The options of a training step beside the cut."""

    donate: bool
    max_bad_windows: int | None
    loss_scale: loss_scaling.LossScale | None


class InitFn(Protocol):
    """From the parameters to the state of a `train_step`."""

    def __call__(self, params: Any, model_state: Any = None) -> StepState: ...


class StepFn(Protocol):
    """From a batch to new parameters, a new state, and what a person wants to read."""

    def __call__(
        self, params: Any, state: StepState, batch: Any, *args: Any, **call: Unpack[StepCall]
    ) -> tuple[Any, StepState, StepInfo]: ...


class TrainStep(NamedTuple):
    """What `train_step` returns; unpacks as `init_fn, step_fn`.

    Attributes:
      init: `init(params, model_state=None)` to the `StepState`.
      step: `step(params, state, batch, *args, key=None, num_real=None, denominators=None)` to
        `(params, state, info)`.
    """

    init: InitFn
    step: StepFn
