"""Losses that speak over the window's axis: exactly `jax.vmap(axis_name=)`, and the full batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxaccum as ja

W = "window"
ROWS, FEATURES = 24, 6
STORAGES = ["store", "recompute"]
DTYPES = ["float32", "float64"]
LIMIT = {"float32": 5e-6, "float64": 1e-12}


@pytest.fixture(params=DTYPES)
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def inputs(dtype="float32", rows=ROWS):
    """`(params, batch)`: two square matrices, rows with labels and a ragged mask."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    params = {"first": draw(FEATURES, FEATURES) / 2, "second": draw(FEATURES, FEATURES) / 2}
    mask = jnp.asarray(rng.random(rows) < 0.7)
    return params, {"x": draw(rows, FEATURES), "y": draw(rows, FEATURES), "mask": mask}


def over_vmap(loss_fn, num, *, key=None, has_aux=False):
    """The meaning: micro-batches as devices, and the sum of totals over the sum of weights."""

    def window_fn(params, batch, *args):
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *ja.split(batch, num_microbatches=num))
        keys = None
        if key is not None:
            keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(num))

        def one(params, batch, key):
            named = {} if key is None else {"key": key}
            out = loss_fn(params, batch, *args, **named)
            loss, aux = out if has_aux else (out, None)
            terms = jax.tree.leaves(loss, is_leaf=lambda x: isinstance(x, ja.Mean))
            return [(t.total, jnp.asarray(t.weight)) for t in terms], aux

        def over(fn):
            return jax.vmap(fn, (None, 0, 0), axis_name=W)(params, stacked, keys)

        terms, aux = over(one)
        weights = [weight.sum() for _, weight in terms]
        loss = sum(total.sum() / d for (total, _), d in zip(terms, weights, strict=True))

        # Each device differentiates its own part, so that rules that meet find the axis.
        def part(params, batch, key):
            terms, _ = one(params, batch, key)
            return sum(total / d for (total, _), d in zip(terms, weights, strict=True))

        grads = jax.tree.map(lambda g: g.sum(0), over(jax.grad(part)))
        return ((loss, aux) if has_aux else loss), grads

    return jax.jit(window_fn)


def assert_close(got, expected, dtype):
    """Largest error over the largest entry of each leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        assert np.abs(a - b).max(initial=0) <= LIMIT[dtype] * max(1.0, np.abs(b).max(initial=0))


def normalise(x, axis=W):
    """Batch normalisation by the statistics of the whole window."""
    mean = lax.pmean(x.mean(0, keepdims=True), axis)
    var = lax.pmean(((x - mean) ** 2).mean(0, keepdims=True), axis)
    return (x - mean) * lax.rsqrt(var + 1e-3)


def forward(params, x):
    return jax.nn.silu(normalise(x @ params["first"])) @ params["second"]


def loss_psum(params, batch):
    h = jnp.tanh(batch["x"] @ params["first"])
    return ja.mean((h - batch["y"]) ** 2 * lax.psum(h.sum(), W), where=batch["mask"][:, None])


def loss_pmean(params, batch):
    return ja.mean((forward(params, batch["x"]) - batch["y"]) ** 2)


def loss_gather(params, batch):
    """In-batch contrast: every row against all rows of the window."""
    a = batch["x"] @ params["first"]
    b = lax.all_gather(batch["y"] @ params["second"], W, tiled=True)
    own = lax.axis_index(W) * a.shape[0] + jnp.arange(a.shape[0])
    logits = a @ b.T
    return ja.mean(optax.softmax_cross_entropy_with_integer_labels(logits, own))


def loss_both_ways(params, batch):
    a, b = batch["x"] @ params["first"], batch["y"] @ params["second"]
    own = lax.axis_index(W) * a.shape[0] + jnp.arange(a.shape[0])
    cross = optax.softmax_cross_entropy_with_integer_labels
    across, down = (
        cross(x @ lax.all_gather(y, W, axis=1, tiled=True), own) for x, y in ((a, b.T), (b, a.T))
    )
    return ja.mean(across + down)


def loss_pmax(params, batch):
    h = batch["x"] @ params["first"]
    scale = lax.pmax(lax.stop_gradient(jnp.abs(h)).max(), W)
    low = lax.pmin(lax.stop_gradient(h.min()), W)
    return ja.mean((h / scale - low) ** 2)


def loss_index(params, batch):
    h = batch["x"] @ params["first"]
    return ja.Mean((h.sum() ** 2) * (1 + lax.axis_index(W)), h.shape[0] + lax.axis_index(W))


def loss_dice(params, batch):
    """Soft Dice: a function of sums over the window."""
    p = jax.nn.sigmoid(batch["x"] @ params["first"])
    y = (batch["y"] > 0).astype(p.dtype)
    both, total = lax.psum((jnp.sum(p * y), jnp.sum(p) + jnp.sum(y)), W)
    return ja.Mean(1 - 2 * both / total, 1.0)


def loss_neighbours(params, batch):
    """The collectives that give every micro-batch something else."""
    h = batch["x"] @ params["first"]
    size = lax.axis_size(W)
    ring = lax.ppermute(h, W, [(i, (i + 1) % size) for i in range(size)])
    parts = jnp.stack([h * (i + 1) for i in range(size)])
    turned = lax.all_to_all(parts, W, 0, 0)
    scattered = lax.psum_scatter(parts, W)
    return ja.mean((ring - h) ** 2 + turned.mean(0) * scattered)


def loss_terms(params, batch):
    """Three terms with denominators of their own, one of them counted over the window."""
    h = forward(params, batch["x"])
    most = lax.pmax(batch["mask"].sum(), W)
    return {
        "fit": ja.mean((h - batch["y"]) ** 2, where=batch["mask"][:, None]),
        "spread": ja.Mean(lax.psum(h.sum(), W) * h.mean(), most),
        "penalty": ja.Mean(jnp.sum(params["first"] ** 2), 1.0),
    }


@jax.jit
def loss_jit(params, batch):
    return loss_pmean(params, batch)


def loss_checkpoint(params, batch):
    layer = jax.checkpoint(lambda w, x: jax.nn.relu(normalise(x @ w)))
    return ja.mean(layer(params["second"], layer(params["first"], batch["x"])) * batch["y"])


def loss_scan(params, batch):
    """A loop over layers with a collective in each, forwards and backwards."""
    stack = jnp.stack([params["first"], params["second"], params["first"]])

    def layer(x, w):
        return jax.nn.gelu(normalise(x @ w)), x.sum()

    x, sums = lax.scan(layer, batch["x"], stack)
    x, more = lax.scan(layer, x, stack, reverse=True)
    return ja.mean(x * batch["y"] + (sums - more).sum())


def loss_loops_with_index(params, batch):
    """Loops and branches that only ask which micro-batch this is."""
    i = lax.axis_index(W)

    def layer(x, _):
        x = lax.cond(lax.axis_index(W) > 1, jnp.sin, jnp.cos, x @ params["first"])
        return jnp.where(i == lax.axis_index(W), x, 0), None

    x, _ = lax.scan(layer, batch["x"], None, length=2)
    steps = lax.while_loop(lambda n: n < lax.axis_index(W), lambda n: n + 1, jnp.int32(0))
    return ja.mean(normalise(x * (steps + 1)) * batch["y"])


@jax.custom_jvp
def _centred(x):
    return x - lax.pmean(x.mean(0, keepdims=True), W)


@_centred.defjvp
def _centred_jvp(primals, tangents):
    return _centred(*primals), 3 * _centred(*tangents)  # deliberately not its derivative


def loss_custom_jvp(params, batch):
    return ja.mean(jnp.tanh(_centred(batch["x"] @ params["first"])) * batch["y"])


@jax.custom_vjp
def _scaled(x, w):
    return x * lax.psum(jnp.sum(w), W)


def _scaled_fwd(x, w):
    return _scaled(x, w), (x, w)


def _scaled_bwd(saved, ct):
    x, w = saved
    return lax.pmean(ct, W) * jnp.sum(w), 2 * jnp.sum(ct * x) * jnp.ones_like(w)


_scaled.defvjp(_scaled_fwd, _scaled_bwd)


@jax.custom_vjp
def _summed_backwards(x):
    return x


_summed_backwards.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, W),))


def loss_custom_vjp(params, batch):
    h = jnp.tanh(batch["x"] @ params["first"])
    return ja.mean(jnp.sin(_scaled(h, params["second"])) * batch["y"])


def loss_custom_vjp_backwards(params, batch):
    """Only the rule meets, not the function."""

    def layer(x, w):
        return jnp.tanh(_summed_backwards(x @ w)), None

    x, _ = lax.scan(layer, batch["x"], jnp.stack([params["first"], params["second"]]))
    return ja.mean(x * batch["y"])


LOSSES = [
    loss_psum,
    loss_pmean,
    loss_gather,
    loss_both_ways,
    loss_pmax,
    loss_index,
    loss_dice,
    loss_neighbours,
    loss_terms,
    loss_jit,
    loss_checkpoint,
    loss_scan,
    loss_loops_with_index,
    loss_custom_jvp,
    loss_custom_vjp,
    loss_custom_vjp_backwards,
]


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_is_what_vmap_computes(loss_fn, dtype):
    params, batch = inputs(dtype)
    expected = over_vmap(loss_fn, 4)(params, batch)
    f = ja.value_and_grad(loss_fn, num_microbatches=4, window_axis_name=W)
    assert_close(jax.jit(f)(params, batch), expected, dtype)


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_recomputing_is_the_same(loss_fn, x64):
    params, batch = inputs("float64")
    options = {"num_microbatches": 3, "window_axis_name": W}
    f = ja.value_and_grad(loss_fn, window_axis_storage="recompute", **options)
    assert_close(jax.jit(f)(params, batch), over_vmap(loss_fn, 3)(params, batch), "float64")
