"""Looking on the host at what a run has recorded, and raising what the traced code could not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks
from jaxaccum.core.sums import Window
from jaxaccum.stream.state import MultiStepsState
from jaxaccum.training.records import StepInfo, StepState

__all__ = ["check_healthy"]

_KINDS = (MultiStepsState, StepState, StepInfo, Window)


def check_healthy(record: Any, *, max_skipped: int | None = None) -> None:
    """Raises if a state or a record says that the run has gone wrong; waits for its values.

    Looks at every `StepInfo`, `Window`, `StepState` and `multi_steps` state in `record`: whether it
    has `diverged`, whether a window that counted something has a loss or a gradient norm that is
    not finite, whether a count did not fit, and whether more micro-batches than `max_skipped` were
    left out. A window without weight, whose loss is nan, is in order.

    Args:
      record: what to look at, alone or in a tree (the state of `optax.chain`, a dict of infos).
        Outside of `jit`.
      max_skipped: the largest `num_skipped` that passes; any number by default.

    Returns:
      Nothing.

    Raises:
      FloatingPointError: something is wrong; the message has the counts.
      ValueError: `record` holds nothing to look at.
      TypeError: it is traced.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp, optax
      >>> init, step = ja.train_step(
      ...     lambda w, x: ja.mean(w * x), optax.sgd(0.1), num_microbatches=2,
      ...     skip_nonfinite="window", max_bad_windows=1)
      >>> w = jnp.float32(1)
      >>> _, state, info = step(w, init(w), jnp.array([1.0, jnp.nan]))
      >>> try:
      ...     ja.check_healthy(info)
      ... except FloatingPointError as error:
      ...     print(error)
      check_healthy: `StepInfo` has diverged: 1 bad in a row, 1 windows dropped, 2 skipped.
    """
    found = [
        node
        for node in jax.tree.leaves(record, is_leaf=lambda x: isinstance(x, _KINDS))
        if isinstance(node, _KINDS)
    ]
    if not found:
        raise ValueError(
            "check_healthy: `record` must hold a `StepInfo`, `Window`, `StepState` or "
            f"`multi_steps` state, got {checks.describe(record)}."
        )
    for node in found:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(node)):
            raise TypeError(
                "check_healthy: `record` is traced; call it outside of `jit`, on what the step "
                "returned."
            )
        _check(node, max_skipped)


def _check(node: Any, max_skipped: int | None) -> None:
    name = type(node).__name__
    counts = f"{_number(node.num_skipped)} skipped"
    if not isinstance(node, Window):
        counts = (
            f"{_number(node.num_bad_in_row)} bad in a row, {_number(node.num_dropped)} windows "
            f"dropped, {counts}"
        )
        if bool(np.asarray(node.diverged).any()):
            raise FloatingPointError(f"check_healthy: `{name}` has diverged: {counts}.")
    if max_skipped is not None and _number(node.num_skipped) > max_skipped:
        raise FloatingPointError(
            f"check_healthy: `{name}` has more than {max_skipped} micro-batches left out: {counts}."
        )
    if isinstance(node, Window | StepInfo):
        weights = [np.asarray(w) for w in jax.tree.leaves(node.weight)]
        for weight in weights:
            whole = jnp.issubdtype(weight.dtype, jnp.integer)
            if whole and weight == np.iinfo(weight.dtype).min < 0:
                raise FloatingPointError(
                    f"check_healthy: the `weight` of `{name}` did not fit into {weight.dtype}. "
                    "Count in float32, `ja.Mean(total, weight.astype(jnp.float32))`, or make the "
                    "window shorter."
                )
        # Where denominators were given, a window without weight has a loss as well.
        updated = isinstance(node, StepInfo) and bool(np.asarray(node.updated).any())
        counted = updated or any(weight != 0 for weight in weights)
        norm = {"grad_norm": node.grad_norm} if isinstance(node, StepInfo) else {}
        for key, value in {"loss": node.loss, **norm}.items():
            if counted and not np.isfinite(np.asarray(value)):
                raise FloatingPointError(
                    f"check_healthy: the `{key}` of `{name}` is {value}, and nothing skipped it: "
                    f'{counts}. Use `skip_nonfinite="window"` or `True`.'
                )


def _number(count: Any) -> int:
    return int(np.asarray(count).max())
