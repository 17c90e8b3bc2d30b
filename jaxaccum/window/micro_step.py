"""One micro-step: from a micro-batch's rows to the `WindowSums` that it adds."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import noise
from jaxaccum.core.checks import all_finite
from jaxaccum.core.leaves import leafwise
from jaxaccum.core.mean import wide
from jaxaccum.core.reducers import Addition, Reducers, Stack
from jaxaccum.core.sums import WindowSums
from jaxaccum.devices import reduction
from jaxaccum.numerics import loss_scaling
from jaxaccum.window.backward import Backward
from jaxaccum.window.scan import Outcome


class MicroStep:
    """What the fold runs on each micro-batch.

    Its values are a pair: the `WindowSums` of the micro-batch, whose gradients are a flat list,
    empty where the fold runs the backward pass; and where bad ones are left out, whether it was
    finite.

    Args:
      call: the loss, bound to the arguments of a call.
      factors: what each term's gradient is multiplied by, packed.
      kept: boolean for each micro-batch; only these count. `None`: all.
    """

    def __init__(self, call: Any, factors: Any, kept: Any):
        self.call, self.factors, self.kept = call, factors, kept

    @staticmethod
    def reducers(values: tuple[WindowSums, Any]) -> Any:
        """How the values are combined over the micro-batches of a window."""
        sums, finite = values
        return sums.reducers, None if finite is None else Stack()

    def __call__(self, index: Any, rows: Any, threads: Any = None) -> Outcome:
        call = self.call
        loss, flat = call.gradient_at(index, rows, threads)
        totals, weights, aux, grads = loss.call(flat, self.factors, call.scale)
        backward, reducers = None, []
        if isinstance(grads, Backward):
            backward, grads = grads._replace(scale=call.scale), []
        else:
            reducers = call.tree.reducers(grads)
            if call.scale is not None:  # what is no sum (FP8 scaling state) was not scaled
                unscales = [loss_scaling.unscale if r.divides else None for r in reducers]
                grads = leafwise(unscales, grads, shared=(call.scale,))
        spread = None
        if call.options.noise_scale:
            summed = [g for g, r in zip(grads, reducers, strict=True) if isinstance(r, Addition)]
            spread = noise.group(summed, weights[0])
        grads = self._scattered(grads)
        new_state, state, count = [], None, None
        if call.state is not None:
            aux, new_state, count = aux
            if call.state.pools:
                count = rows[0].shape[0] if count is None else count
                state = call.state.contribution(new_state, count)
        finite = self._judge([*grads, *totals, *weights], new_state, threads, count)
        if finite is not None:  # the gradients of the batch's own rows are not carried
            number = len(call.moving)
            cleared = [jnp.where(finite, g, jnp.zeros_like(g)) for g in grads[number:]]
            grads = [*grads[:number], *cleared]
        sums = WindowSums(
            grads=grads,
            loss=jax.tree.unflatten(loss.terms, totals),
            weight=jax.tree.unflatten(loss.terms, weights),
            aux=aux,
            num_microbatches=jnp.int32(1),
            num_skipped=None,  # type: ignore[arg-type]  # known by the end of the fold
            grad_reducers=Reducers(reducers),
            noise=spread,
            model_state=state,
        )
        threads = reduction.vary(new_state, call.varied) if threads is not None else ()
        keep = finite if self.kept is None or finite is None else finite & self.kept[index]
        values = reduction.vary((sums, finite), call.varied)
        return Outcome(values, keep, call.rounding_key(index), threads, backward)

    def _scattered(self, grads: list[Any]) -> list[Any]:
        """The gradients, those of parts reduce-scattered where that happens in every micro-step."""
        if not self.call.scattering:
            return grads
        shards, wire = self.call.scatters, self.call.options.reduce_dtype
        parts = [
            g if s is None else s.scatter_here(g.astype(wide(g.dtype)), wire)
            for g, s in zip(grads, shards, strict=False)
        ]
        return [*parts, *grads[len(shards) :]]

    def _judge(self, leaves: Sequence[Any], state: Any, threads: Any, count: Any) -> Any:
        """Whether all that the micro-batch gave is finite; `None` where nothing is left out."""
        if not self.call.options.skips:
            return None
        finite = all_finite(leaves)
        if self.call.state is not None:
            finite = finite & self.call.state.sound(state, threads, count)
        # A part holds every device's gradient, so all must agree.
        return reduction.agree(finite, self.call.axes) if self.call.meets else finite
