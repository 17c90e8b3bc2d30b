"""A loss function evaluated on chosen rows, and the experiments that tell its faults apart."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks, compat, dtypes, labels, primitives, programs
from jaxaccum.core.checks import describe, is_inexact
from jaxaccum.core.mean import Mean
from jaxaccum.core.reducers import is_marked
from jaxaccum.folds.batch import Batch


class Parts(NamedTuple):
    """What a loss function returns for some rows, in float64.

    Attributes:
      totals: `[terms]`.
      weights: `[terms]`.
      grads: the gradients of the totals in the inexact parameters, each `[terms, ...]`.
    """

    totals: np.ndarray
    weights: np.ndarray
    grads: list[np.ndarray]

    def vector(self, term: int) -> np.ndarray:
        """The total and the gradient of one term as one vector."""
        return np.concatenate([self.totals[term, None], *[g[term].ravel() for g in self.grads]])

    def means(self) -> tuple[float, list[np.ndarray]]:
        """The loss and the gradient: the sum of the terms' means."""
        some = self.weights != 0
        scale = np.divide(1.0, self.weights, out=np.zeros_like(self.weights), where=some)
        loss = float(np.sum(np.where(some, self.totals, 0) * scale))
        grads = [np.tensordot(scale[some], g[some], 1) for g in self.grads]
        return (loss if some.any() else float("nan")), grads

    def sizes(self) -> "Parts":
        """The absolute values, against which rounding is measured."""
        grads = [np.abs(g) for g in self.grads]
        return Parts(np.abs(self.totals), np.abs(self.weights), grads)

    def is_finite(self) -> bool:
        """Whether every number is."""
        return all(np.isfinite(x).all() for x in (self.totals, self.weights, *self.grads))

    def __add__(self, other: Any) -> "Parts":
        return jax.tree.map(np.add, self, other)


class Probe:
    """A loss function to experiment with: rows in, `Parts` out.

    A bare scalar counts as a mean of weight 1. A `key` that the loss function takes is one from
    which all draws are the same, so that what is left to differ is no randomness.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        args: Sequence[Any],
        batch: Batch,
        *,
        has_aux: bool,
        axes: Sequence[str],
    ):
        self.loss_fn, self.args, self.batch = loss_fn, tuple(args), batch
        # Rows are picked on the host, without a program.
        self.data = [_on_host(leaf) for leaf in batch.leaves]
        self.has_aux, self.axes = has_aux, tuple(axes)
        self.named = {"key": compat.constant_key()} if takes_key(loss_fn) else {}
        self.leaves, self.tree = jax.tree.flatten(args[0])
        self.moving = [jnp.asarray(x) for x in self.leaves if is_inexact(x)]
        self.paths = [
            jax.tree_util.keystr(path)
            for path, x in jax.tree_util.tree_leaves_with_path(args[0])
            if is_inexact(x)
        ]
        self.rows = batch.rows
        self.terms: list[str] = []
        self.bare: list[bool] = []  # for each term, whether it is no `Mean`
        self._jitted = jax.jit(self._evaluate)

    def take(self, index: Sequence[int] | np.ndarray) -> Any:
        """The batch's rows `index`, leaf by leaf."""
        return [leaf[np.asarray(index)] for leaf in self.data]

    def __call__(self, index: Sequence[int] | np.ndarray) -> Parts:
        return self.on(self.take(index))

    def on(self, rows: Any) -> Parts:
        """The parts for rows that need not be the batch's."""
        out = self._jitted(self.moving, rows)
        totals, weights, *grads = [_float64(x) for x in jax.tree.leaves(out)]
        return Parts(totals, weights, grads)

    def flat_fn(self, moving: Sequence[Any], rows: Any) -> tuple[list[Any], list[Any]]:
        """The terms' totals and weights as the loss function returns them."""
        supply = iter(moving)
        leaves = [next(supply) if is_inexact(x) else x for x in self.leaves]
        args = self.batch.put(self.args, rows)
        args[0] = jax.tree.unflatten(self.tree, leaves)
        out = self.loss_fn(*args, **self.named)
        if self.has_aux and not (type(out) is tuple and len(out) == 2):
            raise TypeError(f"`has_aux` is set, but it returns no (loss, aux), but {describe(out)}")
        loss = out[0] if self.has_aux else out
        pairs = jax.tree_util.tree_leaves_with_path(loss, is_leaf=is_marked)
        self.terms = [jax.tree_util.keystr(path) for path, _ in pairs]
        means = [m if isinstance(m, Mean) else Mean(m, np.float32(1)) for _, m in pairs]
        self.bare = [not isinstance(m, Mean) for _, m in pairs]
        return [jnp.asarray(m.total) for m in means], [jnp.asarray(m.weight) for m in means]

    def _evaluate(self, moving: list[Any], rows: Any) -> Any:
        def totals_fn(moving: list[Any]) -> Any:
            totals, weights = self.flat_fn(moving, rows)
            return jnp.stack([_wide(t) for t in totals]), jnp.stack([_wide(w) for w in weights])

        def both(moving: list[Any]) -> Any:
            totals, pull, weights = jax.vjp(totals_fn, moving, has_aux=True)
            grads = [pull(seed)[0] for seed in jnp.eye(totals.shape[0], dtype=totals.dtype)]
            return totals, weights, [jnp.stack(g) for g in zip(*grads, strict=True)]

        run = both
        for name in self.axes:  # as the only device of each axis
            run = functools.partial(_alone, run, name)
        return run(moving)

    def stage(self, rows: Any, *, devices: int = 1) -> programs.Program:
        """The program from the inputs `flat(rows)` to totals and weights."""
        number, tree = len(self.moving), jax.tree.structure(rows)

        def fn(*flat: Any) -> Any:
            return self.flat_fn(flat[:number], jax.tree.unflatten(tree, flat[number:]))

        env = [(name, devices) for name in self.axes]
        return programs.stage(fn, *self.flat(rows), axis_env=env)

    def flat(self, rows: Any) -> list[Any]:
        """The inputs of a staged program: the parameters' inexact leaves, then the rows."""
        return [*self.moving, *jax.tree.leaves(rows)]


def takes_key(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss function has a parameter `key`."""
    try:
        return "key" in inspect.signature(loss_fn).parameters
    except (TypeError, ValueError):
        return False


def _on_host(leaf: Any) -> Any:
    return leaf if checks.is_key(leaf) else np.asarray(leaf)


def _alone(fn: Callable[..., Any], name: str, moving: Any) -> Any:
    stacked = jax.tree.map(lambda x: x[None], moving)
    out = jax.vmap(fn, axis_name=name)(stacked)
    return jax.tree.map(lambda x: x[0], out)


def _wide(x: Any) -> jax.Array:
    return jnp.asarray(x, dtypes.promote(x, jnp.float32))


def _float64(x: Any) -> np.ndarray:
    kind = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
    return np.asarray(x).astype(kind)


def distance(a: np.ndarray, b: np.ndarray, size: np.ndarray) -> float:
    """The largest difference against the largest number that went into either."""
    scale = float(np.max(np.abs(size), initial=0.0))
    gap = float(np.max(np.abs(a - b), initial=0.0))
    return 0.0 if gap == 0 else gap / scale if scale else float("inf")


def narrowest(staged: programs.Program) -> Any:
    """The floating dtype of the fewest digits that a program computes in, float32 at most."""
    found = np.dtype(np.float32)
    for eqn in programs.equations(staged.jaxpr):
        for var in eqn.outvars:
            dtype = getattr(var.aval, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                continue
            if jnp.finfo(dtype).eps > jnp.finfo(found).eps:
                found = dtype
    return found


def same_program(a: programs.Program, b: programs.Program) -> bool:
    """Whether two programs are the same, equation by equation, constants included."""
    texts = [re.sub("0x[0-9a-f]+", "", str(staged.closed)) for staged in (a, b)]
    constants = [jax.tree.leaves(staged.closed.consts) for staged in (a, b)]
    return texts[0] == texts[1] and all(
        np.shape(x) == np.shape(y) and bool(jnp.array_equal(x, y))
        for x, y in zip(*constants, strict=True)
    )


def callbacks(staged: programs.Program) -> bool:
    """Whether a program calls the host."""
    return any("callback" in eqn.primitive.name for eqn in programs.equations(staged.jaxpr))


def draws(staged: programs.Program) -> bool:
    """Whether a program draws random numbers from a key other than the one of the micro-batch."""
    still = compat.constant_key().dtype
    return any(
        eqn.primitive.name == "random_bits" and eqn.invars[0].aval.dtype != still
        for eqn in programs.equations(staged.jaxpr)
    )


def summed_shapes(staged: programs.Program) -> list[tuple[int, ...] | None]:
    """The shape of what each output of a program is the sum of, `None` where that is not seen."""

    def rule(eqn: Any, found: Sequence[Any]) -> list[Any]:
        """The shape that went into a sum, or `()` for other results; inputs have none."""
        made = [(f, v) for f, v in zip(found, eqn.invars, strict=True) if f is not None]
        shape: tuple[int, ...] = ()
        if eqn.primitive.name == "reduce_sum":
            shape = found[0] or tuple(eqn.invars[0].aval.shape)
        elif len(made) == 1 and programs.has(eqn, primitives.MULTIPLE):
            ((own, v),) = made  # times a number, in another layout
            shape = own if v.aval.size == eqn.outvars[0].aval.size else ()
        return [shape] * len(eqn.outvars)

    inputs = [None] * len(staged.closed.in_avals)
    return [shape or None for shape in labels.follow(staged.closed, inputs, rule).outs]
