"""Whether the sums of two batches may be merged: made with the same loss function and options."""

from typing import Any

import jax
import numpy as np

from jaxaccum.core import checks
from jaxaccum.core.reducers import reducers_of
from jaxaccum.core.state_sums import StateSums


def check_merge(a: Any, b: Any) -> None:
    """Requires two `WindowSums` to add up.

    Raises:
      ValueError: their structures or shapes differ; they hold two model states that do not pool; or
        the denominators of their terms are not the same.
    """
    _check_denominators(a, b)
    if not checks.same_tree(a, b):
        raise ValueError(
            f"merge: `a` and `b` have different structures, {jax.tree.structure(a)} and "
            f"{jax.tree.structure(b)}. Make both with the same loss function and options."
        )
    if a.model_state is not None and not isinstance(a.model_state, StateSums):
        raise ValueError(
            "merge: the sums hold two model states, of which it is not known how they combine. Use "
            '`model_state="pooled"`, whose statistics add up, or pass the whole batch in one call.'
        )
    if a.grad_reducers is None:  # else the gradients of the batch's rows differ in their number
        remedy = "Make both with the same loss function and parameters."
        checks.same_structure("merge", "b.grads", b.grads, a.grads, remedy=remedy)
    _check_aux(a.aux, b.aux)


def _check_aux(a: Any, b: Any) -> None:
    """Requires that auxiliary outputs agree in all but the axis along which they are joined."""
    reducers = jax.tree.leaves(reducers_of(a))
    pairs = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), reducers, strict=True)
    for (path, x), y, reducer in pairs:
        skipped = 1 if reducer.emits else 0
        if np.shape(x)[skipped:] != np.shape(y)[skipped:]:
            raise ValueError(
                f"merge: `b.aux{jax.tree_util.keystr(path)}` is {checks.describe(y)}, expected the "
                f"shape of {checks.describe(x)}. Make both with the same loss function."
            )


def _check_denominators(a: Any, b: Any) -> None:
    if a.denominators is None and b.denominators is None:
        return
    remedy = (
        "Find them over all batches first, `d = ja.denominators(loss_fn, ...)` summed over the "
        "batches, and pass `denominators=d` to each call."
    )
    if not (a.denominators_given and b.denominators_given):
        raise ValueError(
            "merge: a loss of several terms merges only if both sums were made with the same "
            f"`denominators=`; here at least one found its own. {remedy}"
        )
    pairs = zip(jax.tree.leaves(a.denominators), jax.tree.leaves(b.denominators), strict=False)
    for x, y in pairs:
        traced = isinstance(x, jax.core.Tracer) or isinstance(y, jax.core.Tracer)
        if not traced and not np.array_equal(x, y):
            raise ValueError(
                f"merge: the sums were made with different `denominators=`, {x} and {y}. {remedy}"
            )
