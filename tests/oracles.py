"""Problems for the tests and their float64 answers.

The model is a linear fit of tokens, `error = x @ w + b - y`. A problem's integer data is small
enough that every float32 sum is exact, so sums must match the answer bit for bit. Its real data
makes every gradient a sum of positive numbers, so that errors are relative to each entry.

The answers do not use the library: they are NumPy formulas (`token_answer`, `terms_answer`), or
any loss function on the full batch in one pass with 64-bit types (`full_batch`). Micro-batches are
listed independently by `cut_rows`.
"""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxaccum as ja

TOKENS, FEATURES, ROWS = 4, 3, 7

# Ways to cut seven rows: even, uneven, one row each, one micro-batch.
CUTS = [
    *({"num_microbatches": k} for k in (1, 2, 3, 7)),
    *({"microbatch_size": s} for s in (2, 3, 9)),
]

# Largest relative error by the dtype of the result.
RTOL = {"float32": 2e-6, "complex64": 2e-6, "float64": 1e-12, "complex128": 1e-12}


# Compiler options that undo what conftest.py takes away: the optimizations of a user's program.
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
if jax.__version__.startswith("0.10."):
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True


def child_environment():
    """For a process of its own: the suite's compiler flags, but the devices that it finds."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if "device_count" not in flag]
    return {**os.environ, "XLA_FLAGS": " ".join(kept)}


class Answer(NamedTuple):
    """What the full batch gives: the loss, its gradient, the tree of weights."""

    loss: Any
    grads: Any
    weight: Any


def problem(seed, rows=ROWS, *, integer=False):
    """`(params, batch)` with NumPy leaves."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        x = rng.integers(-3, 4, shape) if integer else rng.uniform(0.5, 1.5, shape)
        return x.astype(np.float32)

    y = draw(rows, TOKENS)
    batch = {
        "x": draw(rows, TOKENS, FEATURES),
        "y": y if integer else -y,
        "mask": rng.random((rows, TOKENS)) < 0.6,
        "weight": rng.integers(0, 4, (rows, TOKENS)).astype(np.float32),
    }
    return {"w": draw(FEATURES), "b": draw()}, batch


def error(params, batch):
    """The signed error of every token, `[rows, TOKENS]`; NumPy or JAX arrays."""
    return batch["x"] @ params["w"] + (params["b"] - batch["y"])


def token_loss(params, batch):
    """The mean squared error of the kept tokens: one term."""
    e = error(params, batch)
    return ja.mean(e * e, where=batch["mask"])


def terms_loss(params, batch):
    """Three terms with denominators of their own; the last one is counted once per window."""
    e = error(params, batch)
    kept = batch["mask"].any(axis=1)
    return {
        "token": ja.mean(e * e, where=batch["mask"], weights=constant(batch["weight"])),
        "sequence": ja.Mean(jnp.sum(jnp.where(batch["mask"], e, 0)), jnp.sum(kept)),
        "penalty": ja.Mean(0.5 * jnp.sum(params["w"] * params["w"]), 1.0),
    }


def constant(x):
    """`x` without a derivative, as a weight must be where the batch is differentiated."""
    return jax.lax.stop_gradient(x)


def token_answer(params, batch, num_microbatches=1):
    """The window's answer for `token_loss`, whatever the number of micro-batches."""
    params, batch = wide(params), wide(batch)
    e, mask = error(params, batch), batch["mask"]
    return _over(mask.sum(), (mask * e**2).sum(), _push(batch, mask * 2 * e))


def terms_answer(params, batch, num_microbatches=1):
    """The window's answer for `terms_loss`: the sum of the terms that have a weight.

    Every micro-batch counts one for the penalty, and the mean of the equal penalties is one.
    """
    params, batch = wide(params), wide(batch)
    e, mask, w = error(params, batch), batch["mask"], params["w"]
    weight = mask * batch["weight"]
    slope = {"w": w, "b": np.float64(0)}
    terms = {
        "token": _over(weight.sum(), (weight * e**2).sum(), _push(batch, weight * 2 * e)),
        "sequence": _over(mask.any(axis=1).sum(), (mask * e).sum(), _push(batch, mask * 1.0)),
        "penalty": Answer(0.5 * np.sum(w * w), slope, num_microbatches),
    }
    return Answer(
        np.nansum([t.loss for t in terms.values()]),
        jax.tree.map(lambda *g: sum(g), *[t.grads for t in terms.values()]),
        {name: t.weight for name, t in terms.items()},
    )


def _push(batch, slopes):
    return {"w": np.einsum("bt,btd->d", slopes, batch["x"]), "b": slopes.sum()}


def _over(weight, loss, grads):
    if weight == 0:
        return Answer(np.nan, jax.tree.map(np.zeros_like, grads), 0)
    return Answer(loss / weight, jax.tree.map(lambda g: g / weight, grads), weight)


def full_batch(loss_fn, *args, argnums=0):
    """`(loss, grads)` of any loss function on the whole batch, in float64 or complex128."""

    def value(*args):
        terms = jax.tree.leaves(loss_fn(*args), is_leaf=lambda x: isinstance(x, ja.Mean))
        return sum(t.total / t.weight for t in terms)

    with jax.enable_x64(True):
        out = jax.jit(jax.value_and_grad(value, argnums, allow_int=True))(*wide(args))
        return jax.tree.map(np.asarray, out)


def wide(tree):
    """The tree in float64 or complex128 NumPy arrays; integers and booleans are kept."""

    def widen(x):
        x = np.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return x.astype(np.complex128)
        return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(widen, tree)


def cut_rows(rows, *, num_microbatches=None, microbatch_size=None):
    """The row numbers of each micro-batch, in the order in which they run."""
    if num_microbatches is None:
        blocks = [(rows // microbatch_size, microbatch_size), (1, rows % microbatch_size)]
    else:
        size, longer = divmod(rows, num_microbatches)
        blocks = [(longer, size + 1), (num_microbatches - longer, size)]
    order, start = [], 0
    for number, size in blocks:
        if number and size:
            block = np.arange(start, start + number * size)
            order += [block[k::number] for k in range(number)]
            start += number * size
    return order


def take(batch, rows):
    """The given rows of every leaf."""
    return jax.tree.map(lambda leaf: leaf[np.asarray(rows)], batch)


def cut_name(cut):
    """A test id such as `num_microbatches=3`."""
    return "-".join(f"{name}={value}" for name, value in cut.items())


def assert_close(got, want):
    """Each leaf within its dtype's `RTOL` of the answer, entry by entry."""

    def check(path, g, w):
        g, w = np.asarray(g), np.asarray(w)
        if g.dtype == jax.dtypes.float0 or g.dtype.kind in "iub":
            assert np.array_equal(g, w), f"{jax.tree_util.keystr(path)}: {g} instead of {w}"
            return
        assert g.shape == w.shape, f"{jax.tree_util.keystr(path)}: {g.shape} instead of {w.shape}"
        close = np.allclose(g, w, rtol=RTOL[g.dtype.name], atol=0, equal_nan=True)
        assert close, f"{jax.tree_util.keystr(path)}: {g} instead of {w}"

    jax.tree_util.tree_map_with_path(check, got, want)


def assert_equal(got, want):
    """Each leaf equal to the answer, rounded to the leaf's dtype, bit for bit."""

    def check(path, g, w):
        g = np.asarray(g)
        w = np.asarray(w).astype(g.dtype)
        equal = g.shape == w.shape and np.array_equal(g, w, equal_nan=g.dtype.kind in "fc")
        assert equal, f"{jax.tree_util.keystr(path)}: {g} instead of {w}"

    jax.tree_util.tree_map_with_path(check, got, want)


def same(a, b):
    """Requires two trees of the same structure, dtypes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if x.dtype != jax.dtypes.float0:
            np.testing.assert_array_equal(x, y)
