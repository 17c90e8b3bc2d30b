"""Which gradients of a window are added in place, inside the backward pass, and why not others."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxaccum.core import compat
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.reducers import Reducer
from jaxaccum.numerics import accumulators
from jaxaccum.window.arguments import Options
from jaxaccum.window.gradients import Differentiated


class Window(NamedTuple):
    """What of a call decides.

    Attributes:
      options: its options.
      alone: whether there is nothing to add to: one micro-batch, that always runs.
      scatters: whether each micro-batch's gradient is reduce-scattered.
      gathers: whether rows of the batch have gradients.
    """

    options: Options
    alone: bool
    scatters: bool
    gathers: bool

    def reason(self) -> str | None:
        """Why no gradient can be added in place, or `None`."""
        if self.options.skips:
            return (
                "`skip_nonfinite=True` must see a micro-batch's gradient before it is added "
                '(`"window"` judges the sum)'
            )
        if self.options.noise_scale:
            return "`noise_scale=True` needs the gradient of each micro-batch by itself"
        if self.scatters:
            return '`reduction="scatter"` reduces the gradient of each micro-batch by itself'
        if self.gathers:
            return "rows of the batch have gradients, which are joined, not added"
        return None


def in_place(
    window: Window, tree: Differentiated, reducers: Sequence[Reducer], types: Sequence[Any]
) -> list[bool]:
    """Whether each gradient is added in place.

    Args:
      window: what of the call decides.
      tree: the parameters.
      reducers: of their gradients.
      types: theirs.

    Raises:
      ValueError: the accumulator demands it where it cannot be.
    """
    asked = accumulators.in_place(window.options.accumulator)
    if asked is False:
        return [False] * len(types)
    whole = window.reason()
    reasons = [whole or _reason(r, t) for r, t in zip(reducers, types, strict=False)]
    reasons += [whole] * (len(types) - len(reasons))
    refused = [i for i, reason in enumerate(reasons) if reason is not None]
    if asked and refused:
        refuse(window.options.function, tree, refused[0], reasons[refused[0]])
    return [reason is None and not window.alone for reason in reasons]


def refuse(function: str, tree: Differentiated, position: int, reason: str | None = None) -> None:
    """Says that a gradient cannot be added in place, though the accumulator demands it.

    Args:
      function: the public function's name.
      tree: the parameters.
      position: which of those that have a gradient.
      reason: why; by default, that JAX would not add it rightly.

    Raises:
      ValueError: always.
    """
    names = [n for n, x in zip(tree.names(), tree.leaves, strict=True) if is_inexact(x)]
    reason = reason or (
        "the loss reads it in slices, in a `lax.cond`, or in a loop behind other values that "
        "depend on parameters, where JAX may add it to the wrong sum"
    )
    raise ValueError(
        f"{function}: `accumulators.plain(in_place=True)` cannot add the gradient of "
        f"`{names[position]}` in place: {reason}. Leave it out, or pass `in_place=None`, which "
        "adds the others in place."
    )


def _reason(reducer: Reducer, kind: Any) -> str | None:
    """Why the gradient of a parameter of the type `kind` cannot be added in place, or `None`."""
    dtype = accumulators.sum_dtype(reducer, kind.dtype)
    if dtype is None:
        return "its accumulator or reducer is not a plain sum"
    if jnp.dtype(dtype) != kind.dtype:
        return f"it is {kind.dtype}, its sum {jnp.dtype(dtype)}"
    spec = compat.spec_of(kind)
    if spec.unreduced or spec.reduced:
        return "its type says that it is reduced or unreduced"
    return None
