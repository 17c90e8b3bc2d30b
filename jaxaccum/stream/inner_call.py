"""The inner optimizer with the arguments of one call of a stream."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxaccum.closing.inner import Trial, strong, tried
from jaxaccum.closing.leaves import differentiated, each, fill, hide, still, whole_again
from jaxaccum.core import programs
from jaxaccum.core.sums import WindowSums
from jaxaccum.stream.arguments import no_mean
from jaxaccum.stream.open_window import Leaves


class InnerCall(NamedTuple):
    """The inner optimizer, with the arguments of one call.

    Attributes:
      leaves: the call's gradients; the optimizer sees the parameters that they are of.
      params: the parameters that it sees, or `None`.
      offered: the names of the window's means.
      asked: those of them that this call gave.
      update: the optimizer's update with the other arguments.
      traced: the same, traced once for gradients of the same types.
      trial: what is known of its updates.
    """

    leaves: Leaves
    params: Any
    offered: Sequence[str]
    asked: Sequence[str]
    update: Callable[..., Any]
    traced: Callable[..., Any]
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
        """The call that sees the leaves of `params` that move, and no others.

        Args:
          inner: the optimizer.
          leaves: the call's gradients.
          params: the parameters, or `None`.
          extra_args: the extra arguments that are handed on as they are.
          offered: the names of the window's means.
          asked: those of them that this call gave.
          grad_args: which extra arguments are the window's mean gradient.
        """
        seen = None if params is None else each(lambda p: hide(p, leaves.moves), params)
        whole = {
            name: whole_again(value, differentiated(params), leaves.moves)
            for name, value in extra_args.items()
        }

        def update(grads: Sequence[Any], values: Any, inner_state: Any, params: Any) -> Any:
            mean_grads = jax.tree.unflatten(leaves.tree, grads)
            named = {**whole, **values}
            named |= {name: mean_grads for name in grad_args if name in named}
            return inner.update(mean_grads, inner_state, params, **named)

        return cls(leaves, seen, offered, asked, update, jax.jit(update))

    def __call__(self, grads: Sequence[Any], values: Any, inner_state: Any, params: Any) -> Any:
        """Updates and the new inner state, for gradients that meet no others."""
        updates, inner_state = self.update(grads, values, inner_state, params)
        return still(updates, self.trial.constant), inner_state

    def closing(
        self, grads: Sequence[Any], window: WindowSums, inner_state: Any, params: Any
    ) -> Any:
        """The update of a window, with all of its means if the optimizer takes them."""
        names = self.offered if self.trial.takes_offers else self.asked
        values = {name: window.aux[name].value for name in names}
        updates, inner_state = self.traced(list(grads), values, inner_state, params)
        return still(updates, self.trial.constant), inner_state

    def tried(
        self, inner_state: Any, over: Sequence[tuple[str, ...]], *, flush: bool
    ) -> "InnerCall":
        """The same after a trial: with all of the window's means, or with those of this call.

        What reads a mean that this call did not give has to do without it, too; a flush gives all.

        Args:
          inner_state: the optimizer's state.
          over: the axes over which each gradient meets before the optimizer sees it.
          flush: whether this call is a flush.
        """

        def run(values: Any, grads: Any, inner_state: Any, params: Any) -> Any:
            # The inner optimizer sees what is the same on the devices that share a parameter.
            pairs = zip(grads, over, strict=True)
            grads = [jax.lax.psum(grad, axes) if axes else grad for grad, axes in pairs]
            return self.traced(grads, values, inner_state, params)

        def zeros(names: Sequence[str]) -> dict[str, Any]:
            return {name: no_mean().total for name in names}

        def updates_of(offering: bool, *args: Any) -> Any:
            return run(zeros(self.offered if offering else self.asked), *args)[0]

        args = strong(self.leaves.grads), inner_state, self.params
        trial = tried(updates_of, *args, offers=flush or self.offered != self.asked)
        if trial.takes_offers and not flush:
            program = programs.stage(run, zeros(self.offered), *args)
            _, used = programs.prune(program, [True] * len(program.closed.out_avals))
            read = [name for i, name in enumerate(sorted(self.offered)) if i in used]
            if not set(read) <= set(self.asked):
                tried(updates_of, *args, offers=False)
        return self._replace(trial=trial)

    def whole(self, updates: Any) -> Any:
        """The updates with those of the leaves that the optimizer does not see."""
        return each(lambda u: fill(u, self.leaves.moves, self.leaves.others), updates)
