"""The ledger: what became of the windows so far, and the one function that writes it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxaccum.numerics.loss_scaling import LossScale, LossScaleState


class Ledger(NamedTuple):
    """What became of the micro-steps and windows so far.

    Attributes:
      num_skipped: the micro-batches that were left out because they were not finite, those of
        dropped windows too; of a stream the micro-steps. int32 scalar.
      num_dropped: the windows that closed without an optimizer step because they were not finite,
        or because the run had diverged; int32 scalar.
      num_empty: the windows in which nothing counted; int32 scalar. `None` in a training step,
        whose state such a window leaves as it is.
      num_bad_in_row: windows dropped in a row; of a stream that leaves out micro-steps, these.
        int32 scalar.
      diverged: whether `max_bad_windows` was reached; it stays so. Boolean scalar.
      loss_scale: the `LossScaleState`; `None` without a loss scale.
    """

    num_skipped: jax.Array
    num_dropped: jax.Array
    num_empty: jax.Array | None
    num_bad_in_row: jax.Array
    diverged: jax.Array
    loss_scale: LossScaleState | None = None

    @classmethod
    def first(cls, loss_scale: LossScale | None) -> "Ledger":
        """The ledger of a run that has made no step, each field in a buffer of its own."""
        return cls(
            num_skipped=jnp.zeros((), jnp.int32),
            num_dropped=jnp.zeros((), jnp.int32),
            num_empty=jnp.zeros((), jnp.int32),
            num_bad_in_row=jnp.zeros((), jnp.int32),
            diverged=jnp.zeros((), jnp.bool_),
            loss_scale=None if loss_scale is None else loss_scale.init(),
        )

    def stops(self, limit: int | None) -> jax.Array:
        """Whether no optimizer step is applied any more."""
        return jnp.zeros((), jnp.bool_) if limit is None else self.diverged


class Outcome(NamedTuple):
    """What became of one call.

    Attributes:
      closed: whether a window ended with it; boolean scalar.
      applied: whether an optimizer step was applied; boolean scalar.
      bad: whether a window was left out whole for what was not finite; boolean scalar.
      num_skipped: the micro-batches that were left out one by one; int32 scalar.
      skipped: whether the call's micro-step was left out; boolean scalar.
      taken: whether it was folded; boolean scalar. Neither, where there was none.
      num_held: the micro-steps of the window, left out with it where it is `bad`; int32 scalar.
    """

    closed: Any
    applied: jax.Array
    bad: jax.Array
    num_skipped: Any
    skipped: Any = False
    taken: Any = False
    num_held: Any = 0


def account(
    ledger: Ledger,
    outcome: Outcome,
    *,
    limit: int | None,
    loss_scale: LossScale | None,
    length: Any = None,
) -> Ledger:
    """The ledger after one call.

    Args:
      ledger: the one before it.
      outcome: what became of the call.
      limit: `max_bad_windows`.
      loss_scale: how the loss scale changes, if there is one.
      length: where micro-steps are left out one by one, how many of them in a row are as bad as a
        window; `None` where whole windows are judged.
    """
    failed, passed = outcome.bad, outcome.applied & ~outcome.bad
    if length is not None:
        failed, passed = jnp.asarray(outcome.skipped), outcome.taken
    in_row = jnp.where(passed, 0, count_if(ledger.num_bad_in_row, failed))
    length = 1 if length is None else length
    dropped = outcome.bad | (outcome.closed & ledger.stops(limit))
    scale = ledger.loss_scale
    if loss_scale is not None and scale is not None:
        # The scale of a window that never begins has to change all the same.
        in_vain = outcome.skipped & (outcome.num_held == 0) & (in_row % length == 0)
        scale = loss_scale.after_call(
            scale,
            overflowed=outcome.skipped | outcome.bad | (jnp.asarray(outcome.num_skipped) > 0),
            closed=outcome.closed | in_vain,
        )
    num_empty = ledger.num_empty
    if num_empty is not None:
        num_empty = count_if(num_empty, outcome.closed & ~outcome.applied & ~dropped)
    skips = count_if(ledger.num_skipped, jnp.ones((), jnp.bool_), outcome.num_skipped)
    diverged = ledger.diverged
    if limit is not None:
        diverged = diverged | (failed & (in_row // length >= limit))
    return Ledger(
        num_skipped=count_if(skips, outcome.bad, outcome.num_held),
        num_dropped=count_if(ledger.num_dropped, dropped),
        num_empty=num_empty,
        num_bad_in_row=in_row,
        diverged=diverged,
        loss_scale=scale,
    )


def count_if(number: jax.Array, happened: Any, by: Any = 1) -> jax.Array:
    """`number`, `by` more where `happened` holds; it stays at the largest int32."""
    room = jnp.iinfo(number.dtype).max - number
    return jnp.where(happened, number + jnp.minimum(by, room), number)


class WithLedger:
    """Base of the states that hold a `ledger`: what stands in it reads, and is replaced, as theirs.

    `state.num_skipped` is `state.ledger.num_skipped`, and
    `state._replace(diverged=...)` changes it there.
    """

    __slots__ = ()
    ledger: Any

    def __init_subclass__(cls) -> None:
        """Lists what the ledger holds among the state's own properties, for what reads these."""
        for name in Ledger._fields:
            setattr(cls, name, vars(WithLedger)[name])

    @property
    def num_skipped(self) -> jax.Array:
        """The micro-batches, or micro-steps, that were left out so far; int32 scalar."""
        return self.ledger.num_skipped

    @property
    def num_dropped(self) -> jax.Array:
        """The windows that were left out so far; int32 scalar."""
        return self.ledger.num_dropped

    @property
    def num_empty(self) -> jax.Array | None:
        """The windows so far in which nothing counted; int32 scalar, `None` in a training step."""
        return self.ledger.num_empty

    @property
    def num_bad_in_row(self) -> jax.Array:
        """Windows dropped in a row, or micro-steps skipped in a row; int32 scalar."""
        return self.ledger.num_bad_in_row

    @property
    def diverged(self) -> jax.Array:
        """Whether `max_bad_windows` was reached; it stays so. Boolean scalar."""
        return self.ledger.diverged

    @property
    def loss_scale(self) -> LossScaleState | None:
        """The `LossScaleState`; `None` without a loss scale."""
        return self.ledger.loss_scale

    def _replace(self, **fields: Any) -> Any:
        own = {name: fields.pop(name) for name in Ledger._fields if name in fields}
        if own:
            fields["ledger"] = fields.get("ledger", self.ledger)._replace(**own)
        return super()._replace(**fields)  # type: ignore[misc]
