"""A loss function evaluated on chosen rows, and the experiments that tell its faults apart."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks, compat, dtypes, programs
from jaxaccum.core.checks import describe, is_inexact
from jaxaccum.core.mean import Mean
from jaxaccum.core.reducers import is_marked
from jaxaccum.window.batch import Batch


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


def quick_jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` for what runs once or twice: compiled sooner, to a slower program."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(fn, compiler_options=quick if jax.default_backend() == "cpu" else None)


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
        self.loss_fn, self.args, self.batch, self.rows = loss_fn, tuple(args), batch, batch.rows
        # Rows are picked on the host, without a program.
        self.host = [_on_host(leaf) for leaf in batch.leaves]
        self.has_aux, self.axes = has_aux, tuple(axes)
        self.named = {"key": compat.constant_key()} if takes_key(loss_fn) else {}
        self.leaves, self.tree = jax.tree.flatten(args[0])
        self.moving = [jnp.asarray(x) for x in self.leaves if is_inexact(x)]
        self.paths = [
            jax.tree_util.keystr(path)
            for path, x in jax.tree_util.tree_leaves_with_path(args[0])
            if is_inexact(x)
        ]
        self.terms: list[str] = []
        self.scalar: list[bool] = []  # for each term, whether it is no `Mean`
        self._jitted = quick_jit(self._evaluate)

    def cutting(self, positions: Sequence[int]) -> "Probe":
        """The same loss, with the arguments at these positions cut as well."""
        batch = Batch("", self.args, sorted({*self.batch.positions, *positions}))
        return Probe(self.loss_fn, self.args, batch, has_aux=self.has_aux, axes=self.axes)

    def put(self, params: Any, rows: Sequence[Any]) -> list[Any]:
        """All arguments, with `rows` in place of those that are cut."""
        return [params, *self.batch.put(self.args, rows)[1:]]

    def take(self, index: Sequence[int] | np.ndarray) -> list[Any]:
        """The batch's rows `index`, leaf by leaf."""
        return [leaf[np.asarray(index)] for leaf in self.host]

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
        out = self.loss_fn(*self.put(jax.tree.unflatten(self.tree, leaves), rows), **self.named)
        if self.has_aux and not (type(out) is tuple and len(out) == 2):
            raise TypeError(f"`has_aux` is set, but it returns no (loss, aux), but {describe(out)}")
        loss = out[0] if self.has_aux else out
        pairs = jax.tree_util.tree_leaves_with_path(loss, is_leaf=is_marked)
        self.terms = [jax.tree_util.keystr(path) for path, _ in pairs]
        means = [m if isinstance(m, Mean) else Mean(m, np.float32(1)) for _, m in pairs]
        self.scalar = [not isinstance(m, Mean) for _, m in pairs]
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
        """The inputs of a program: the parameters' inexact leaves, then the rows."""
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
