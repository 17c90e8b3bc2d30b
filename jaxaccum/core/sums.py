"""`WindowSums`, its merge and its one division."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks
from jaxaccum.core.agreement import Pair
from jaxaccum.core.leaves import leafwise
from jaxaccum.core.mean import Mean, add, as_float, divide, pool, quotient
from jaxaccum.core.noise import NoiseSums
from jaxaccum.core.reducers import (
    Addition,
    Agreed,
    Carried,
    Kept,
    Latest,
    Reducer,
    Reducers,
    reducers_of,
    values_of,
)
from jaxaccum.core.state_sums import StateSums, sound

# How each field of `WindowSums` is combined whose arrays are all combined alike.
_REDUCERS: dict[str, Reducer] = {
    "loss": Addition(),
    "weight": Addition(),
    "num_microbatches": Addition(),
    "num_skipped": Addition(),
    "denominators": Agreed(),
    "noise": Addition(),
}
_KEPT = Kept()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WindowSums:
    """What the micro-batches of a window add up to, before the division: the sum that is folded.

    A statistic more is a field more, with its reducer in `_REDUCERS`; all that is done to sums goes
    by `reducers`.

    Attributes:
      grads: sums of the micro-batches' gradients; the structure and shapes of the differentiated
        arguments, float32 or wider. Undivided for a loss of one term; with several terms each
        term's gradient is already over its denominator (see `denominators`). Integer parameters
        have float0 leaves, as from `jax.grad(..., allow_int=True)`.
      loss: the undivided losses; a scalar, or the loss function's tree of them.
      weight: the summed weights; a scalar, or the loss function's tree of them.
      aux: the combined auxiliary outputs, still marked (`Sum`, `Mean`, …), so that they merge.
      num_microbatches: how many micro-batches the sums hold; int32 scalar.
      num_skipped: how many were left out because they were not finite; int32 scalar.
      denominators: the tree of denominators that the terms' gradients were divided by, or `None`
        where the gradients are undivided.
      denominators_given: static; whether the caller passed them, so that a term counts whatever
        its own weight is. Sums whose denominators were found from their own batch do not merge.
      grad_reducers: static; the reducers of the gradients, or `None` where all are sums.
      noise: what `noise_scale` needs of the micro-batches; `None` without `noise_scale=True`.
      model_state: the model's state; with the policy "pooled" undivided sums (`.read()`).
    """

    grads: Any
    loss: Any
    weight: Any
    aux: Any
    num_microbatches: jax.Array
    num_skipped: jax.Array
    denominators: Any = None
    denominators_given: bool = dataclasses.field(default=False, metadata={"static": True})
    grad_reducers: Reducers | None = dataclasses.field(default=None, metadata={"static": True})
    noise: NoiseSums | None = None
    model_state: Any = None

    @property
    def reducers(self) -> "WindowSums":
        """The same structure with a reducer in the place of each array."""
        pools = isinstance(self.model_state, StateSums)
        found = {
            "grads": jax.tree.map(_of_gradient, self.grads)
            if self.grad_reducers is None
            else self.grad_reducers.tree,
            "aux": reducers_of(self.aux),
            "model_state": self.model_state.reducers if pools else _all(Kept(), self.model_state),
        }
        found |= {name: _all(reducer, getattr(self, name)) for name, reducer in _REDUCERS.items()}
        return dataclasses.replace(self, **found)

    def is_finite(self, start: Any = None) -> jax.Array:
        """Whether all that the optimizer or the next window would read is finite.

        Args:
          start: the model's state at the window's start, beside which `model_state` is judged where
            it is the one after it: what was not finite there already is no fault of the window.
        """
        weights = [as_float(x, jnp.float32) for x in jax.tree.leaves(self.weight)]
        read = jax.tree.leaves((self.grads, self.loss))
        finite = checks.all_finite([*weights, *(x for x in read if checks.is_inexact(x))])
        state = self.model_state
        if isinstance(state, StateSums):
            state, start = state.read(), state.start
        return finite if start is None else finite & sound(state, start)

    def emptied(self) -> "WindowSums":
        """The sums of a window without micro-batches.

        What came in from outside stays, and what is stacked or concatenated in `aux` as it came.
        """
        reducers = self.reducers
        empty = _each(_methods("empty", reducers), self)
        aux = jax.tree.map(lambda r, x, y: x if r.emits else y, reducers.aux, self.aux, empty.aux)
        own = empty.denominators if not self.denominators_given else self.denominators
        return dataclasses.replace(empty, aux=aux, denominators=own)

    def select(self, keep: jax.Array, other: "WindowSums") -> "WindowSums":
        """These sums where `keep` holds, `other` elsewhere: selected, never multiplied."""
        chosen = [None if _is_float0(x) else _chosen for x in jax.tree.leaves(self)]
        return _each(chosen, self, other, shared=(keep,))


class Window(NamedTuple):
    """The result of one window, divided once.

    Attributes:
      loss: the window's mean loss, the sum of its terms' means; float32 scalar or wider, nan where
        nothing was counted.
      grads: the gradient of `loss`, in the dtype in which it was summed; exactly zero where
        nothing was counted.
      aux: the combined auxiliary outputs as plain values; `None` without `has_aux`.
      weight: the summed weights; a scalar, or the loss function's tree of them.
      num_microbatches: how many micro-batches the window holds; int32 scalar.
      num_skipped: how many were left out; int32 scalar.
      model_state: the model's state after the window; `None` without `model_state`.
    """

    loss: jax.Array
    grads: Any
    aux: Any
    weight: Any
    num_microbatches: jax.Array
    num_skipped: jax.Array
    model_state: Any = None


def merge(a: Any, b: Any, *more: Any) -> Any:
    """What several sets of examples add up to: of `WindowSums`, or of `Mean`s of one loss.

    `finalize(merge(a, b))` is the window over both batches: every field is added, auxiliary
    outputs by their own reducer. `a` comes first where the order matters (`Last`, `Concat`).
    `merge(Mean(a, n), Mean(b, m)) = Mean(a + b, n + m)`, one mean over all examples; two losses
    that keep their own denominators stand side by side in a tuple or dict instead.

    Args:
      a: sums from `accumulate`, or a `Mean`.
      b: sums of the same loss function on another batch, or a `Mean`.
      *more: any number more of the same kind.

    Returns:
      The merged `WindowSums`, or the merged `Mean`.

    Raises:
      TypeError: not all are `WindowSums`, or all `Mean`s.
      ValueError: the structures differ; or the loss has several terms and the sums were not made
        with the same `denominators=`, so that their gradients stand on different scales. Where
        the denominators are traced and differ, the merged loss and gradients are nan.

    Example:
      >>> import jaxaccum as ja
      >>> f = ja.accumulate(lambda w, x: ja.mean(w * x), num_microbatches=1)
      >>> a, b = f(0.0, jnp.array([1.0, 2.0, 3.0])), f(0.0, jnp.ones(7))
      >>> print(ja.finalize(ja.merge(a, b)).grads)
      1.3
    """
    parts = (a, b, *more)
    for kind, pair_fn in ((Mean, pool), (WindowSums, _merge)):
        if all(isinstance(part, kind) for part in parts):
            return functools.reduce(pair_fn, parts)
    raise TypeError(
        "merge: `a` and `b` must be `WindowSums` from `accumulate`, or all of them `ja.Mean`s, got "
        f"{' and '.join(map(checks.describe, parts))}."
    )


def _merge(a: WindowSums, b: WindowSums) -> WindowSums:
    Pair(a, b).check()
    return _added(a, b)


def continued(
    function: str, into: WindowSums, sums: WindowSums, held: Sequence[bool]
) -> WindowSums:
    """`merge(into, sums)` for a `function` that went on from `into`.

    Args:
      function: the public function's name, for messages.
      into: what was there before.
      sums: what is added to it, of the same types.
      held: which of the first leaves of `sums`, its gradients, hold those of `into` already.

    Raises:
      ValueError: they do not add up.
    """
    pair = Pair(into, sums, function, "into", "the sums of this call")
    pair.check()
    pair.check_types()
    return _added(into, sums, held)


def _added(a: WindowSums, b: WindowSums, held: Sequence[bool] = ()) -> WindowSums:
    """The merged sums; of `b`, the flagged ones of the first leaves are those of both already."""
    merges = _methods("merge", a.reducers)
    merges[: len(held)] = [_later if h else m for h, m in zip(held, merges, strict=False)]
    merged = _each(merges, a, b)
    ran = b.num_microbatches > 0  # what did not run is not the last

    def last(reducer: Reducer, new: Any, old: Any) -> Any:
        latest = isinstance(reducer, Latest) and not _is_float0(new)
        return jnp.where(ran, new, old) if latest else new

    return jax.tree.map(last, a.reducers, merged, a)


def _later(a: Any, b: Any) -> Any:
    return b


def finalize(sums: WindowSums) -> Window:
    """Divides a window's sums, once.

    `grads = sums.grads / sums.weight` and `loss = sums.loss / sums.weight` for a loss of one term;
    for several terms the loss is the sum of each term's own mean, and the gradients, divided term
    by term as they were summed, are taken as they are. A term of weight zero adds nothing. Where
    `denominators=` were given the loss is `sum_t sums.loss_t / denominators_t`, whatever the terms'
    own weights are, and a term whose denominator is zero adds nothing.

    Args:
      sums: from `accumulate` or `merge`.

    Returns:
      A `Window`. Where nothing counts (no weight, or with given denominators no micro-batch) the
      gradients are exactly zero, the loss is nan.

    Raises:
      TypeError: `sums` is not a `WindowSums`.
    """
    if not isinstance(sums, WindowSums):
        raise TypeError(
            f"finalize: expected `WindowSums` from `accumulate`, got {checks.describe(sums)}."
        )
    totals, weights = jax.tree.leaves(sums.loss), jax.tree.leaves(sums.weight)
    if sums.denominators is None:
        (total,), (weight,) = totals, weights
        loss = Mean(total, weight).value
        finish: Any = quotient
        by = weight
    else:
        loss = _sum_of_means(totals, jax.tree.leaves(sums.denominators), _counting(sums))
        loss = jnp.where(is_empty(sums), np.asarray(jnp.nan, loss.dtype), loss)
        finish, by = _poisoned, _differing(sums.denominators)
    return Window(
        loss=loss,
        grads=_each_gradient(finish, sums, by),
        aux=values_of(sums.aux),
        weight=sums.weight,
        num_microbatches=sums.num_microbatches,
        num_skipped=sums.num_skipped,
        model_state=(
            sums.model_state.read() if isinstance(sums.model_state, StateSums) else sums.model_state
        ),
    )


def is_empty(sums: WindowSums) -> jax.Array:
    """Whether nothing counts in the window, so that it has no mean; a boolean scalar.

    No term has a weight; or, where `denominators=` were given, there is no micro-batch.
    """
    empty = ~jnp.stack([number != 0 for number in _counting(sums)]).any()
    return empty | (sums.num_microbatches == 0) if sums.denominators_given else empty


def cleared(sums: WindowSums) -> WindowSums:
    """`sums` with gradients of exactly zero where nothing counts.

    For gradients that were divided as they were summed: zero times a nan upstream of a term without
    weight is still a nan.
    """
    if sums.denominators is None:
        return sums
    return dataclasses.replace(sums, grads=_each_gradient(_zero_if, sums, is_empty(sums)))


def kept_if(good: jax.Array, sums: WindowSums, start: Any) -> WindowSums:
    """`sums` where they are good, a window without micro-batches elsewhere, its own skipped.

    Args:
      good: boolean scalar.
      sums: over all devices.
      start: the model's state at the window's start, where `sums.model_state` is the one after it.
    """
    empty = sums.emptied()
    if not isinstance(sums.model_state, StateSums):
        empty = dataclasses.replace(empty, model_state=start)
    skipped = add(sums.num_skipped, sums.num_microbatches)
    return dataclasses.replace(
        sums.select(good, empty), num_skipped=jnp.where(good, sums.num_skipped, skipped)
    )


def _counting(sums: WindowSums) -> list[jax.Array]:
    """For each term the number that is zero where it adds nothing."""
    by = sums.denominators if sums.denominators_given else sums.weight
    return [jnp.asarray(number) for number in jax.tree.leaves(by)]


def _sum_of_means(
    totals: list[Any], denominators: list[Any], counting: list[jax.Array]
) -> jax.Array:
    terms = []
    for total, denominator, number in zip(totals, denominators, counting, strict=True):
        term = divide(total, denominator, empty=0.0)
        terms.append(jnp.where(number == 0, jnp.zeros_like(term), term))
    return functools.reduce(add, terms)


def _differing(denominators: Any) -> jax.Array:
    """Whether merged denominators differed."""
    flags = [jnp.isnan(d) for d in jax.tree.leaves(denominators)]
    return jnp.stack(flags).any()


def _is_float0(x: Any) -> bool:
    return getattr(x, "dtype", None) == jax.dtypes.float0


def _each(fns: Any, tree: Any, *trees: Any, shared: Any = ()) -> Any:
    """`tree` with the results of one function for each array; `None` keeps it."""
    leaves, structure = jax.tree.flatten(tree)
    lists = [leaves, *map(jax.tree.leaves, trees)]
    return jax.tree.unflatten(structure, leafwise(fns, *lists, shared=shared))


def _methods(name: str, reducers: Any) -> list[Any]:
    """A method of each of the reducers, `None` of those that keep their array."""
    leaves = jax.tree.leaves(reducers)
    return [None if isinstance(r, Kept) else getattr(r, name) for r in leaves]


def _each_gradient(fn: Any, sums: WindowSums, *shared: Any) -> Any:
    """The gradients that the window's weight divides, through `fn(gradient, *shared)`."""
    divided = [r.divides for r in jax.tree.leaves(sums.reducers.grads)]
    return _each([fn if d else None for d in divided], sums.grads, shared=shared)


def _poisoned(grad: jax.Array, differing: Any) -> jax.Array:
    return jnp.where(differing, np.asarray(jnp.nan, grad.dtype), grad)


def _zero_if(grad: jax.Array, empty: jax.Array) -> jax.Array:
    return jnp.where(empty, jnp.zeros_like(grad), grad)


def _chosen(x: jax.Array, y: jax.Array, keep: jax.Array) -> jax.Array:
    return jnp.where(keep, x, y)


def _all(reducer: Reducer, tree: Any) -> Any:
    """A tree of reducers, `reducer` for each array and its own for each carry that has one."""
    return jax.tree.map(
        lambda x: x.reducer if isinstance(x, Carried) else reducer,
        tree,
        is_leaf=lambda x: isinstance(x, Carried),
    )


def _of_gradient(leaf: Any) -> Reducer:
    return _KEPT if _is_float0(leaf) else _REDUCERS["loss"]
