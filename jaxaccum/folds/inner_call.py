"""The inner optimizer with the arguments of one call of a stream."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxaccum.core.mean import Mean
from jaxaccum.folds.inner import Trial, tried
from jaxaccum.folds.leaves import differentiated, each, fill, hide, still, whole_again
from jaxaccum.folds.open_window import Leaves


class InnerCall(NamedTuple):
    """The inner optimizer, with the arguments of one call.

    Attributes:
      inner: the optimizer.
      leaves: the call's gradients; the optimizer sees the parameters that they are of.
      extra_args: the extra arguments that are handed on as they are.
      grad_args: which of them are the window's mean gradient.
      params: the parameters that it sees, or `None`.
      offered: the names of the window's means.
      asked: those of them that this call gave.
      trial: what is known of its updates.
    """

    inner: Any
    leaves: Leaves
    extra_args: dict[str, Any]
    grad_args: tuple[str, ...]
    params: Any
    offered: Sequence[str]
    asked: Sequence[str]
    trial: Trial = Trial(False, None, None)

    @classmethod
    def of(
        cls,
        inner: Any,
        leaves: Leaves,
        params: Any,
        extra_args: dict[str, Any],
        offered: Sequence[str],
        asked: Sequence[str],
        grad_args: tuple[str, ...],
    ) -> "InnerCall":
        """The call that sees the leaves of `params` that move, and no others."""
        seen = None if params is None else each(lambda p: hide(p, leaves.moves), params)
        whole = {
            name: whole_again(value, differentiated(params), leaves.moves)
            for name, value in extra_args.items()
        }
        return cls(inner, leaves, whole, grad_args, seen, offered, asked)

    def __call__(self, grads: Sequence[Any], values: Any, inner_state: Any, params: Any) -> Any:
        mean_grads = jax.tree.unflatten(self.leaves.tree, grads)
        named = {**self.extra_args, **values}
        named |= {name: mean_grads for name in self.grad_args if name in named}
        updates, inner_state = self.inner.update(mean_grads, inner_state, params, **named)
        return still(updates, self.trial.constant), inner_state

    def closing(
        self, grads: Sequence[Any], means: dict[str, Mean], inner_state: Any, params: Any
    ) -> Any:
        """The update of a window, with all of its means if the optimizer takes them."""

        def given(names: Sequence[str]) -> Any:
            return self(grads, {n: means[n].value for n in names}, inner_state, params)

        if self.offered == self.asked:
            return given(self.asked)
        try:
            return given(self.offered)
        except TypeError:  # what this call gave was tried, and is taken
            return given(self.asked)

    def tried(
        self, inner_state: Any, over: Sequence[tuple[str, ...]], *, flush: bool
    ) -> "InnerCall":
        """The same after a trial with what this call gave; a flush gives all or nothing.

        Args:
          inner_state: the optimizer's state.
          over: the axes over which each gradient meets before the optimizer sees it.
          flush: whether this call is a flush.
        """

        def updates_of(offering: bool, grads: Any, inner_state: Any, params: Any) -> Any:
            # The inner optimizer sees what is the same on the devices that share a parameter.
            pairs = zip(grads, over, strict=True)
            grads = [jax.lax.psum(grad, axes) if axes else grad for grad, axes in pairs]
            names = self.offered if offering else self.asked
            values = {name: jnp.zeros((), jnp.float32) for name in names}
            return self(grads, values, inner_state, params)[0]

        return self._replace(
            trial=tried(updates_of, self.leaves.grads, inner_state, self.params, offers=flush)
        )

    def whole(self, updates: Any) -> Any:
        """The updates with those of the leaves that the optimizer does not see."""
        return each(lambda u: fill(u, self.leaves.moves, self.leaves.others), updates)
