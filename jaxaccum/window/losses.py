"""A user's loss function, traced once per micro-batch shape and checked."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxaccum.core import checks, labels, programs
from jaxaccum.core.mean import Mean
from jaxaccum.core.reducers import Concat, Mark, Max, Min, is_marked

_FIX = (
    "Return an undivided mean, so that micro-batches of different weight merge exactly: "
    "`return ja.mean(per_token_loss, where=mask)` instead of `per_token_loss.mean()`, or "
    "`ja.Mean(total, weight)`."
)


class Loss(NamedTuple):
    """A loss function on one micro-batch shape, as a program on flat inputs.

    Attributes:
      program: from flat inputs to the terms' totals, their weights, and the auxiliary leaves.
      terms: the tree structure of the loss; its leaves are the terms.
      aux_tree: the tree structure of the auxiliary outputs, marks included.
    """

    program: programs.Program
    terms: Any
    aux_tree: Any

    def __call__(self, flat: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
        """The terms' totals, their weights, and the marked auxiliary outputs."""
        outs, n = self.program(*flat), self.terms.num_leaves
        return outs[:n], outs[n : 2 * n], jax.tree.unflatten(self.aux_tree, outs[2 * n :])

    def weights_fn(
        self, function: str, differentiated: Sequence[bool]
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """The part of the program that computes the weights, stripped of the model.

        Raises:
          ValueError: a weight has a derivative in one of the `differentiated` inputs.
        """
        n = self.terms.num_leaves
        outputs = len(self.program.closed.out_avals)
        pruned, used = programs.prune(self.program, [n <= i < 2 * n for i in range(outputs)])
        moving = [differentiated[i] for i in used]
        if any(moving):
            for path, bad in zip(paths(self.terms), labels.moved(pruned, moving), strict=True):
                if bad:
                    raise ValueError(
                        f"{function}: the weight of `{path}` has a gradient in the "
                        "differentiated arguments, so the window's loss is not a sum over its "
                        "micro-batches. Put `jax.lax.stop_gradient` around a weight that is meant "
                        "as a constant; use `ja.microbatch` for a loss that is a function of "
                        "window-wide sums."
                    )
            # A custom derivative may hide that a count needs nothing of the model beside it.
            pruned, again = programs.prune(pruned.opened(), [True] * n)
            used = [used[i] for i in again]
        return lambda flat: pruned(*[flat[i] for i in used])


def stage_loss(
    function: str,
    call_fn: Callable[..., Any],
    flat: Sequence[Any],
    rows: int,
    *,
    has_aux: bool,
    axis_env: Sequence[tuple[str, int]] = (),
) -> Loss:
    """Traces `call_fn(*flat)`, the user's loss, once and checks what it returns.

    Args:
      function: the public function's name, for messages.
      call_fn: from flat inputs to the loss function's own output.
      flat: inputs, or values of the same types.
      rows: the rows of the micro-batch.
      has_aux: whether `call_fn` returns `(loss, aux)`.
      axis_env: names and sizes of axes that the loss may use in collectives.

    Raises:
      TypeError: the loss is not made of `Mean`s of real scalars.
      ValueError: a `Concat` output does not have one entry for each row.
    """
    trees: list[Any] = []

    def flat_fn(*inputs: Any) -> Any:
        parts = parts_of(function, call_fn(*inputs), rows, has_aux=has_aux)
        trees[:] = [parts.terms, jax.tree.structure(parts.aux)]
        return parts.totals, parts.weights, parts.aux

    program = programs.stage(flat_fn, *flat, axis_env=axis_env)
    return Loss(program, *trees)


class Parts(NamedTuple):
    """What a loss function returned, checked and taken apart; see `Loss`."""

    totals: list[jax.Array]
    weights: list[jax.Array]
    aux: Any
    terms: Any


def parts_of(function: str, out: Any, rows: int, *, has_aux: bool) -> Parts:
    """The parts of what a loss function returned for a micro-batch of so many `rows`.

    Raises:
      TypeError: the loss is not made of `Mean`s of real scalars.
      ValueError: a `Concat` output does not have one entry for each row.
    """
    loss, aux = _unpack(function, out, has_aux)
    means, terms = jax.tree.flatten(loss, is_leaf=_is_mean)
    totals = [jnp.asarray(m.total) for m in means]
    weights = [jnp.asarray(m.weight) for m in means]
    aux = jax.tree.map(jnp.asarray, aux)
    for path, total, weight in zip(paths(terms), totals, weights, strict=True):
        if total.shape or not jnp.issubdtype(total.dtype, jnp.floating):
            raise TypeError(
                f"{function}: the total of `{path}` must be a real floating scalar, got "
                f"{checks.describe(total)}. Sum it: `ja.Mean(jnp.sum(values), weight)`."
            )
        real = jnp.issubdtype(weight.dtype, jnp.number) or weight.dtype == jnp.bool_
        if weight.shape or not real or jnp.issubdtype(weight.dtype, jnp.complexfloating):
            raise TypeError(
                f"{function}: the weight of `{path}` must be a real scalar, got "
                f"{checks.describe(weight)}. Sum it: `ja.Mean(total, jnp.sum(mask))`."
            )
    check_rows(function, "aux", aux, rows)
    return Parts(totals, weights, aux, terms)


def check_rows(function: str, name: str, outputs: Any, rows: int) -> None:
    """Requires that each mark can combine what it marks: rows of the micro-batch, real numbers."""
    for keys, mark in jax.tree_util.tree_leaves_with_path(outputs, is_leaf=is_marked):
        where = f"{function}: `{name}{jax.tree_util.keystr(keys)}`"
        marked = is_marked(mark)
        inside = jax.tree.leaves(mark.value, is_leaf=is_marked) if isinstance(mark, Mark) else []
        if any(map(is_marked, inside)):
            raise TypeError(
                f"{where} is a mark around a mark; only one can say how it is combined."
            )
        for leaf in jax.tree.leaves(mark):
            if isinstance(mark, Concat) and leaf.shape[:1] != (rows,):
                raise ValueError(
                    f"{where} is marked `ja.Concat`, so its axis 0 must be the micro-batch's "
                    f"{rows} rows, got {checks.describe(leaf)}."
                )
            number = jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_
            ordered = not jnp.issubdtype(leaf.dtype, jnp.complexfloating)
            if not number or (isinstance(mark, Max | Min) and not ordered):
                kind = (
                    f"is marked `ja.{type(mark).__name__}`, so it" if marked else "is stacked; it"
                )
                raise TypeError(
                    f"{where} {kind} must hold {'numbers' if not number else 'real numbers'}, got "
                    f"{checks.describe(leaf)}."
                )


def check_same_outputs(function: str, loss: Any, other: Any) -> None:
    """Requires micro-batches of different size to return the same terms, marks and structure."""
    _check_same(function, "loss", loss.terms, other.terms)
    _check_same(function, "aux", loss.aux_tree, other.aux_tree)


def check_same_marks(function: str, outputs: Any, other: Any) -> None:
    """Requires the outputs for micro-batches of different size to have the same marks."""
    _check_same(function, "outputs", jax.tree.structure(outputs), jax.tree.structure(other))


def _check_same(function: str, name: str, a: Any, b: Any) -> None:
    if not checks.same_structures(a, b):
        raise ValueError(
            f"{function}: `{name}` must have the same structure for every micro-batch, but it "
            f"is {a} for one size of micro-batch and {b} for another. Return the same terms "
            "and marks, or let the batch divide evenly."
        )


def _unpack(function: str, out: Any, has_aux: bool) -> tuple[Any, Any]:
    loss, aux = out, None
    if has_aux:
        if not (isinstance(out, tuple | list) and len(out) == 2):
            raise TypeError(
                f"{function}: with `has_aux=True` the loss function must return `(loss, aux)`, "
                f"got {_say(out)}."
            )
        loss, aux = out
    leaves = jax.tree_util.tree_leaves_with_path(loss, is_leaf=lambda x: x is None or is_marked(x))
    for path, leaf in leaves:
        if not _is_mean(leaf):
            hint = "" if has_aux or not path else " For auxiliary outputs pass `has_aux=True`."
            raise TypeError(
                f"{function}: the loss function must return a `ja.Mean`, or a dict or tuple of "
                f"them, but `loss{jax.tree_util.keystr(path)}` is {_say(leaf)}, and by what it "
                f"was divided cannot be known. {_FIX}{hint}"
            )
        for name, part in (("total", leaf.total), ("weight", leaf.weight)):
            if not checks.is_array(part):
                raise TypeError(
                    f"{function}: the {name} of `loss{jax.tree_util.keystr(path)}` must be a real "
                    f"scalar, got {_say(part)}."
                )
    if not leaves:
        raise TypeError(
            f"{function}: `loss_fn` must return a `ja.Mean`, but it returned {_say(loss)}. {_FIX}"
        )
    checks.arrays(function, aux, name="aux", remedy="Return only arrays and numbers in `aux`.")
    return loss, aux


def paths(terms: Any) -> list[str]:
    """How the terms of a loss are called in messages."""
    tree = jax.tree.unflatten(terms, range(terms.num_leaves))
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [f"loss{jax.tree_util.keystr(path)}" for path, _ in found]


def _is_mean(node: Any) -> bool:
    return isinstance(node, Mean)


def _say(x: Any) -> str:
    text = checks.describe(x)
    return text if hasattr(x, "dtype") else f"{text} of type {type(x).__name__}"
