"""Windows of one micro-step: nothing is carried from call to call."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxaccum.closing.handover import cast
from jaxaccum.closing.leaves import no_update
from jaxaccum.numerics import accumulators
from jaxaccum.stream.state import MultiStepsState
from jaxaccum.stream.update import Stream, Turn


class Single(Stream):
    """A stream with `every` of 1."""

    def empty_carry(self, leaf: Any) -> Any:
        return accumulators.Uncarried()

    def update(
        self,
        updates: Any,
        state: MultiStepsState,
        params: Any,
        extra_args: dict[str, Any],
        *,
        weight: Any,
        flush: bool,
    ) -> tuple[Any, MultiStepsState]:
        named = {"weight": weight, "flush": flush}
        if jax.tree.leaves(getattr(state, "grad_carry", None)):  # of longer windows
            return super().update(updates, state, params, extra_args, **named)
        turn = self.read(updates, state, params, extra_args, bare=True, **named)
        if flush:  # no window is ever open
            nothing = turn.run.whole(jax.tree.map(no_update, turn.run.trial.types))
            return nothing, state._replace(updated=jnp.zeros((), jnp.bool_))
        if turn.call.weight is None and not (self.skips or turn.axes):
            return self._plain(turn)
        window, keep = self.fold(None, turn)
        new_updates, _, fields = self.end(turn, window, keep, keep, keep.astype(jnp.int32))
        return new_updates, state._replace(**fields)

    def _plain(self, turn: Turn) -> tuple[Any, MultiStepsState]:
        """The gradients reach the optimizer untouched."""
        state, run = turn.state, turn.run
        values = {name: mean.value for name, mean in turn.means.items()}
        updates, inner_state = run(turn.leaves.grads, values, state.inner_state, run.params)
        return run.whole(updates), state._replace(
            optimizer_step=optax.safe_increment(state.optimizer_step),
            updated=jnp.ones((), jnp.bool_),
            inner_state=jax.tree.map(cast, inner_state, state.inner_state),
        )
