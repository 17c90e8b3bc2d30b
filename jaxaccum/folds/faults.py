"""What becomes of micro-batches and windows whose numbers are not finite."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks
from jaxaccum.core.checks import all_finite, is_inexact
from jaxaccum.core.mean import add, as_float
from jaxaccum.core.reducers import Addition, reducers_of
from jaxaccum.core.sums import WindowSums
from jaxaccum.folds import devices

MICRO_BATCH, WINDOW = "micro_batch", "window"


def policy(function: str, value: Any) -> str | None:
    """`skip_nonfinite` as the name of what is left out, `None` for nothing.

    Raises:
      ValueError: it is none of the known choices.
    """
    if isinstance(value, bool | np.bool_):
        return MICRO_BATCH if value else None
    if isinstance(value, str) and value == WINDOW:
        return WINDOW
    raise ValueError(
        f"{function}: `skip_nonfinite` must be False, True (leaves out a micro-batch) or "
        f'"window" (leaves out the whole window), got {value!r}.'
    )


def limit(function: str, value: Any, skips: str | None) -> int | None:
    """`max_bad_windows`, checked.

    Raises:
      TypeError: it is not a static integer.
      ValueError: it is less than 1, or nothing is left out, so that no window is bad.
    """
    if value is None:
        return None
    if skips is None:
        raise ValueError(
            f"{function}: `max_bad_windows` counts windows that are left out; pass "
            '`skip_nonfinite="window"` or `skip_nonfinite=True` as well.'
        )
    return checks.integer(function, "max_bad_windows", value)


def drop_if_bad(
    sums: WindowSums, axes: tuple[str, ...], *, in_parts: bool, empty_state: Any = None
) -> WindowSums:
    """An empty window in the place of one whose sums are not finite.

    What is stacked or concatenated is kept as it came, but for gradients of the batch's rows.

    Args:
      sums: over all devices.
      axes: the axes of the window.
      in_parts: whether a device holds but a part of some sums, so that all must agree.
      empty_state: the model state of a window without micro-batches, if there is a state.
    """
    leaves, tree = jax.tree.flatten(sums.grads)
    numbers = [as_float(x, jnp.float32) for x in jax.tree.leaves(sums.weight)]
    numbers += [x for x in [*leaves, *jax.tree.leaves(sums.loss)] if _has_values(x)]
    good = all_finite(numbers)
    good = devices.agree(good, axes) if in_parts else good

    def kept(x: Any, empty: Any = None) -> Any:
        return jnp.where(good, x, jnp.zeros_like(x) if empty is None else empty)

    def carried(reducer: Any, x: Any) -> Any:
        return x if reducer.emits else kept(x, reducer.empty(x))

    reducers = sums.grad_reducers or (Addition(),) * len(leaves)
    grads = [
        x if not _has_values(x) else kept(x) if r.emits else carried(r, x)
        for r, x in zip(reducers, leaves, strict=True)
    ]
    denominators = sums.denominators
    if not sums.denominators_given:
        denominators = jax.tree.map(kept, denominators)
    model_state = sums.model_state
    if model_state is not None:
        model_state = jax.tree.map(kept, model_state, empty_state)
    return dataclasses.replace(
        sums,
        grads=jax.tree.unflatten(tree, grads),
        loss=jax.tree.map(kept, sums.loss),
        weight=jax.tree.map(kept, sums.weight),
        aux=jax.tree.map(carried, reducers_of(sums.aux), sums.aux),
        num_microbatches=kept(sums.num_microbatches),
        num_skipped=jnp.where(good, sums.num_skipped, add(sums.num_skipped, sums.num_microbatches)),
        noise=jax.tree.map(kept, sums.noise),
        denominators=denominators,
        model_state=model_state,
    )


def _has_values(x: Any) -> bool:
    return getattr(x, "dtype", None) != jax.dtypes.float0 and is_inexact(x)
