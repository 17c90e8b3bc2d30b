"""A user's loss function and its gradient, traced together once per micro-batch shape."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks, in_place, programs
from jaxaccum.core.mean import add, wide
from jaxaccum.devices import reduction
from jaxaccum.numerics import loss_scaling
from jaxaccum.window.backward import Backward
from jaxaccum.window.losses import Loss, parts_of

# Room for the factors of so many terms; a loss of more is traced twice.
_TERMS = 16


class Results(NamedTuple):
    """What one micro-batch gives.

    Attributes:
      totals: the terms' totals.
      weights: their weights.
      aux: the auxiliary outputs, still marked.
      grads: the gradients of the differentiated inputs; the backward pass where it has not run.
    """

    totals: list[jax.Array]
    weights: list[jax.Array]
    aux: Any
    grads: list[jax.Array] | Backward


class LossGradient(NamedTuple):
    """A loss function and its gradient on one micro-batch shape, as one program on flat inputs.

    The function itself is differentiated, not a program that was made of it: JAX then knows the
    `jit`s in it (those of `jax.numpy`) again, which halves the time that many parameters take.

    Attributes:
      call: from flat inputs, the terms' factors and a loss scale to `Results`; one equation.
      program: what stands in that equation, on flat inputs to flat outputs.
      terms: the tree structure of the loss; its leaves are the terms.
      aux_tree: the tree structure of the auxiliary outputs, marks included.
      room: for how many factors `call` has room.
      weights_fn: from flat inputs to the weights, by the part of the program that they need.
      reach: where gradients may be written in place, where the backward pass has not run.
    """

    call: Callable[..., Results]
    program: programs.Program
    terms: Any
    aux_tree: Any
    room: int
    weights_fn: Callable[[Sequence[Any]], list[Any]]
    reach: in_place.Reach | None = None

    def pack(self, factors: Sequence[Any] | None) -> Any:
        """What each term is multiplied by, as `call` takes it; `None` where nothing is."""
        packed: Any = _no_factors(self.room)
        for i, factor in enumerate(factors or ()):
            packed = jnp.asarray(packed).at[i].set(factor.astype(packed.dtype))
        return packed


def stage_gradient(
    function: str,
    call_fn: Callable[..., Any],
    flat: Sequence[Any],
    rows: int,
    *,
    differentiated: Sequence[bool],
    has_aux: bool,
    divides: bool,
    scale: Any,
    own_over: frozenset[str],
    pulls: Sequence[bool] | None,
    alone_fn: Callable[[], Loss],
) -> LossGradient:
    """Traces the user's loss and its gradient once, and checks what the loss returns.

    Args:
      function: the public function's name, for messages.
      call_fn: from flat inputs to the loss function's own output.
      flat: inputs, or values of the same types.
      rows: the rows of the micro-batch.
      differentiated: which of the flat inputs are.
      has_aux: whether `call_fn` returns `(loss, aux)`.
      divides: whether a loss of one term has a factor, too, as those of several have.
      scale: the loss scale, or `None`.
      own_over: the axes over whose devices the window is summed, where replication is checked.
      pulls: which gradients the fold would write in place, where the backward pass is left to it.
      alone_fn: stages the loss alone, for the rare questions that the gradient hides.

    Raises:
      TypeError: the loss is not made of `Mean`s of real scalars.
      ValueError: a `Concat` output does not have one entry for each row; or a weight has a
        derivative in one of the `differentiated` inputs.
    """
    trees: list[Any] = []
    reached: list[in_place.Reach] = []

    def loss_and_gradient(flat: list[Any], factors: jax.Array, scale: Any) -> Results:
        def objective(moving: list[Any]) -> Any:
            supply = iter(moving)
            full = [next(supply) if d else x for x, d in zip(flat, differentiated, strict=True)]
            parts = parts_of(function, call_fn(*full), rows, has_aux=has_aux)
            trees[:] = [parts.terms, jax.tree.structure(parts.aux)]
            # Each device's own, also what it took from a statistic of all devices: only then is
            # the gradient that of the sum over devices, as it is without checking.
            totals = reduction.vary(parts.totals, own_over)
            value = _weighted(totals, factors) if divides or len(totals) > 1 else totals[0]
            if scale is not None:
                value = loss_scaling.scaled(value, scale)
            return value, (totals, parts.weights, parts.aux)

        start = [x for x, d in zip(flat, differentiated, strict=True) if d]
        grads: Any
        if pulls is not None:
            value, pull, (totals, weights, aux) = jax.vjp(objective, start, has_aux=True)
            grads = Backward(pull, _seed(value))
            reached[:] = [in_place.reach(pull, pulls)]
        else:
            grads, (totals, weights, aux) = jax.grad(objective, has_aux=True)(start)
        return Results(totals, weights, aux, grads)

    room = _TERMS
    while True:
        inputs = list(flat), _no_factors(room), scale
        try:
            call, program = programs.stage_call(loss_and_gradient, *inputs)
        except (TypeError, ValueError):
            if trees:  # the loss function itself has returned
                alone_fn()  # what is wrong with it is told before what that does to its gradient
            raise
        terms, aux_tree = trees
        if terms.num_leaves <= room:
            break
        room = terms.num_leaves
    # Differentiated, it no longer tells whether a weight that reads parameters depends on them.
    n, outputs = terms.num_leaves, len(program.closed.out_avals)
    pruned, used = programs.prune(program, [n <= i < 2 * n for i in range(outputs)])
    weights_fn = lambda flat: pruned(*[flat[i] for i in used])  # noqa: E731
    if any(differentiated[i] for i in used):
        weights_fn = alone_fn().weights_fn(function, differentiated)
    found = reached[0] if reached else None
    return LossGradient(call, program, terms, aux_tree, room, weights_fn, found)


def _seed(value: jax.Array) -> jax.Array:
    """The cotangent of a loss; what has no gradient is refused as `jax.grad` does."""
    return jnp.ones_like(value) if checks.is_inexact(value) else jax.grad(lambda x: x)(value)


def _no_factors(room: int) -> np.ndarray:
    return np.zeros(room, jnp.result_type(float))


def _weighted(totals: Sequence[jax.Array], factors: jax.Array) -> jax.Array:
    """The sum of the totals, each times its factor, in float32 or wider."""
    value: Any = None
    for i, total in enumerate(totals):
        # What has no factor yet is traced once more, with room for it.
        factor = factors[min(i, factors.shape[0] - 1)].astype(wide(total.dtype))
        term = factor * total.astype(factor.dtype)
        value = term if value is None else add(value, term)
    return value
