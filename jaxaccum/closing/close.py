"""The end of a window: reduced, judged, divided; the optimizer runs once, under one `cond`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxaccum.closing.handover import APPLIED, DROPPED, find_homes, hand_over
from jaxaccum.core import compat
from jaxaccum.core.checks import all_finite
from jaxaccum.core.folding import restart
from jaxaccum.core.leaves import leafwise
from jaxaccum.core.mean import quotient
from jaxaccum.core.sums import WindowSums, is_empty
from jaxaccum.devices import reduction
from jaxaccum.numerics import accumulators


class Closed(NamedTuple):
    """What became of a window that may have closed.

    Attributes:
      updates: those of the optimizer; where it did not run they change no bit.
      window: the sums, undefined where the window closed.
      inner_state: the optimizer's state.
      applied: whether the optimizer ran; boolean scalar.
      bad: whether the window was dropped because it was not finite; boolean scalar.
    """

    updates: Any
    window: WindowSums
    inner_state: Any
    applied: jax.Array
    bad: jax.Array


@dataclasses.dataclass(frozen=True)
class Ending:
    """What is done at the end of a window.

    Attributes:
      run_fn: the optimizer, `run_fn(grads, window, inner_state, params)` to the updates and the
        inner state.
      types: the abstract values of its updates.
      tree: the tree structure of the gradients.
      normalizes: whether the gradients are divided by the weight; else they are handed on.
      always: whether a window counts whatever its weight is.
      sees_all: whether the optimizer sees the windows in which nothing counts, too, and those that
        are dropped, with gradients of zero.
      judges: whether a window that is not finite is dropped.
      axes: the mesh axes over which the sums still have to meet.
      own: for each gradient the axes over which its parameter is a device's own.
      wire: the dtype in which the gradients' sums meet.
    """

    run_fn: Callable[..., tuple[Any, Any]]
    types: Any
    tree: Any
    normalizes: bool = False
    always: bool = False
    sees_all: bool = False
    judges: bool = False
    axes: tuple[str, ...] = ()
    own: Sequence[tuple[str, ...]] = ()
    wire: Any = None

    @property
    def is_late(self) -> bool:
        """Whether only a window that closes tells what becomes of it."""
        return bool(self.axes) or self.judges

    def counts(self, window: WindowSums) -> jax.Array:
        """Whether the optimizer runs for the window; a boolean scalar."""
        empty = is_empty(window)
        return jnp.ones_like(empty) if self.always or self.sees_all else ~empty

    def run(self, grads: Any, inner_state: Any, operands: Any) -> Any:
        """Divides and runs the optimizer, for `hand_over`."""
        rest, params = operands
        mean = _read(dataclasses.replace(rest, grads=grads)).grads
        if self.normalizes:
            mean = leafwise(quotient, mean, shared=(accumulators.read(rest.weight),))
        return *self.run_fn(mean, rest, inner_state, params), APPLIED

    def judge(self, grads: Any, inner_state: Any, operands: Any) -> Any:
        """Reduces and judges before that, for `hand_over`."""
        rest, params = operands
        window = dataclasses.replace(rest, grads=grads)
        window = reduction.reduce_window(window, self.axes, own=self.own, wire=self.wire)
        sound = jnp.ones((), jnp.bool_)
        if self.judges:
            sound = _read(window).is_finite() & all_finite(jax.tree.leaves(window.aux))
            sound = reduction.agree(sound, self.axes) if any(self.own) else sound
            if self.sees_all:
                window = restart(window, ~sound)
        updates, _, inner_state, outcome = hand_over(
            self.counts(window) & (sound | self.sees_all),
            self.run,
            window.grads,
            inner_state,
            (dataclasses.replace(window, grads=None), params),
            self.types,
            find_homes(self.types, self.tree, window.grads),
        )
        return updates, inner_state, outcome | jnp.where(sound, 0, DROPPED)


def close_window(
    window: WindowSums, closing: jax.Array, inner_state: Any, params: Any, ending: Ending
) -> Closed:
    """Ends the window where it is `closing`, and leaves everything as it is elsewhere.

    Args:
      window: its sums, of which `grads` is a list of carries.
      closing: boolean scalar.
      inner_state: the optimizer's state.
      params: what the optimizer is given beside it; a tree of arrays.
      ending: what is done.
    """
    late, axes = ending.is_late, ending.axes
    varying = [compat.varying_axes(x) for x in jax.tree.leaves(window)] if late else []
    # Over devices the weight is known only after the reduction, and the updates, which are the
    # same everywhere, cannot come back in the buffers of sums that are not.
    nowhere = [None] * len(jax.tree.leaves(ending.types))
    updates, grads, inner_state, outcome = hand_over(
        closing if late else closing & ending.counts(window),
        ending.judge if late else ending.run,
        window.grads,
        inner_state,
        (dataclasses.replace(window, grads=None), params),
        ending.types,
        nowhere if axes else find_homes(ending.types, ending.tree, window.grads),
        judged_over=frozenset() if axes else frozenset().union(*varying),
    )
    window = dataclasses.replace(window, grads=grads)
    applied, bad = (outcome & APPLIED) > 0, (outcome & DROPPED) > 0
    return Closed(updates, window, inner_state, applied, bad)


def _read(window: WindowSums) -> WindowSums:
    """The window with one array for each gradient."""
    marks = window.grad_reducers
    if marks is None:
        return window
    grads = [r.read(carry) for r, carry in zip(marks.tree, window.grads, strict=True)]
    return dataclasses.replace(window, grads=grads, grad_reducers=None)
