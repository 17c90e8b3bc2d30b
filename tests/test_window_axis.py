"""Losses that speak over the window's axis: exactly `jax.vmap(axis_name=)`, and the full batch."""

import re

import flax.linen as nn
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxaccum as ja

W = "window"
ROWS, FEATURES = 24, 6
STORAGES = ["store", "recompute"]
DTYPES = ["float32", "float64"]
LIMIT = {"float32": 5e-6, "float64": 1e-12}


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


# Two of each kind in both dtypes; the rest of the matrix is slow to compile.
QUICK = [loss_pmean, loss_gather, loss_pmax, loss_terms]


def matrix(quick):
    """Every loss with every dtype; those that are not `quick` are marked slow."""
    return [
        pytest.param(f, d, id=f"{f.__name__}-{d}", marks=() if quick(f, d) else pytest.mark.slow)
        for f in LOSSES
        for d in DTYPES
    ]


@pytest.mark.parametrize(("loss_fn", "dtype"), matrix(lambda f, d: f in QUICK or d == "float64"))
def test_is_what_vmap_computes(loss_fn, dtype):
    with jax.enable_x64(dtype == "float64"):
        params, batch = inputs(dtype)
        expected = over_vmap(loss_fn, 4)(params, batch)
        f = ja.window_axis.value_and_grad(loss_fn, num_microbatches=4)
        assert_close(jax.jit(f)(params, batch), expected, dtype)


@pytest.mark.parametrize(("loss_fn", "dtype"), matrix(lambda f, d: f in QUICK and d == "float64"))
def test_recomputing_is_the_same(loss_fn, dtype):
    with jax.enable_x64(dtype == "float64"):
        params, batch = inputs(dtype)
        options = {"num_microbatches": 3}
        f = ja.window_axis.value_and_grad(loss_fn, storage="recompute", **options)
        assert_close(jax.jit(f)(params, batch), over_vmap(loss_fn, 3)(params, batch), dtype)


# The full batch in one pass


def full_pmean(params, batch):
    x = batch["x"] @ params["first"]
    mean = x.mean(0, keepdims=True)
    x = (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(0, keepdims=True) + 1e-3)
    return jnp.mean((jax.nn.silu(x) @ params["second"] - batch["y"]) ** 2)


def full_contrast(params, batch):
    logits = (batch["x"] @ params["first"]) @ (batch["y"] @ params["second"]).T
    cross = optax.softmax_cross_entropy_with_integer_labels
    own = jnp.arange(logits.shape[0])
    return jnp.mean(cross(logits, own) + cross(logits.T, own))


def full_dice(params, batch):
    p = jax.nn.sigmoid(batch["x"] @ params["first"])
    y = (batch["y"] > 0).astype(p.dtype)
    return 1 - 2 * jnp.sum(p * y) / (jnp.sum(p) + jnp.sum(y))


FULL = [(loss_pmean, full_pmean), (loss_both_ways, full_contrast), (loss_dice, full_dice)]


@pytest.mark.parametrize(("loss_fn", "full_fn"), FULL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("cut", [{"num_microbatches": 1}, {"microbatch_size": 4}], ids=str)
def test_is_the_full_batch(loss_fn, full_fn, cut, x64):
    params, batch = inputs("float64")
    got = jax.jit(ja.window_axis.value_and_grad(loss_fn, **cut))(params, batch)
    assert_close(got, jax.value_and_grad(full_fn)(params, batch), "float64")


class Net(nn.Module):
    """Unmodified Flax batch normalisation in every layer."""

    layers: int
    axis_name: str | tuple[str, ...] | None = None
    width: int = FEATURES

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.Dense(self.width)(x)
            x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)
            x = nn.relu(x)
        return nn.Dense(FEATURES)(x)


def flax_losses(net):
    """`(loss_fn over the window, full-batch function, params, stats)` of a network."""

    def apply(net, params, batch, stats):
        variables = {"params": params, "batch_stats": stats}
        y, updates = net.apply(variables, batch["x"], mutable=["batch_stats"])
        return ja.mean((y - batch["y"]) ** 2), updates["batch_stats"]

    def loss_fn(params, batch, stats):
        loss, stats = apply(net, params, batch, stats)
        return loss, ja.Last(stats)

    def full_fn(params, batch, stats):
        loss, stats = apply(net.clone(axis_name=None), params, batch, stats)
        return loss.value, stats

    _, batch = inputs()
    variables = net.clone(axis_name=None).init(jax.random.key(0), batch["x"])
    variables = jax.tree.map(lambda x: x.astype(float), variables)  # as wide as is enabled
    return loss_fn, full_fn, variables["params"], variables["batch_stats"]


def deep(*layers):
    return [pytest.param(n, marks=pytest.mark.slow if n in (3, 5, 6, 7) else ()) for n in layers]


@pytest.mark.parametrize("layers", deep(1, 2, 3, 4, 5, 6, 7, 8))
def test_flax_batch_norm_is_the_full_batch(layers, x64):
    loss_fn, full_fn, params, stats = flax_losses(Net(layers, W))
    _, batch = inputs("float64")
    f = ja.window_axis.value_and_grad(loss_fn, num_microbatches=6, has_aux=True)
    got = jax.jit(f)(params, batch, stats)
    expected = jax.jit(jax.value_and_grad(full_fn, has_aux=True))(params, batch, stats)
    assert_close(got, expected, "float64")  # running statistics included


def test_flax_batch_norm_in_float32():
    loss_fn, full_fn, params, stats = flax_losses(Net(2, W))
    _, batch = inputs()
    f = ja.window_axis.value_and_grad(loss_fn, num_microbatches=3, has_aux=True)
    got = jax.jit(f)(params, batch, stats)
    expected = jax.jit(jax.value_and_grad(full_fn, has_aux=True))(params, batch, stats)
    assert_close(got, expected, "float32")


class Block(nn.Module):
    """One layer for `nn.scan`, rematerialised."""

    axis_name: str | None

    @nn.compact
    def __call__(self, x, _):
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)
        return x + nn.gelu(nn.Dense(FEATURES)(x)), None


class Deep(nn.Module):
    """A loop over rematerialised layers."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        over = {"params": 0, "batch_stats": 0}
        loop = nn.scan(nn.remat(Block), over, split_rngs={"params": True}, length=3)
        return nn.Dense(FEATURES)(loop(self.axis_name)(x, None)[0])


def test_flax_scan_over_remat_layers(x64):
    loss_fn, full_fn, params, stats = flax_losses(Deep(W))
    _, batch = inputs("float64")
    f = ja.window_axis.value_and_grad(loss_fn, num_microbatches=4, has_aux=True)
    got = jax.jit(f)(params, batch, stats)
    expected = jax.jit(jax.value_and_grad(full_fn, has_aux=True))(params, batch, stats)
    assert_close(got, expected, "float64")


def test_statistics_pool_over_the_window():
    """x = {0, 2, 4, 6, 8, 10}: mean 5, variance 35 / 3."""
    x = jnp.array([[0.0], [2.0], [4.0], [6.0], [8.0], [10.0]])
    norm = nn.BatchNorm(use_running_average=False, axis_name=W, momentum=0.0)
    variables = norm.clone(axis_name=None).init(jax.random.key(0), x)

    def loss_fn(params, batch):
        variables_ = {"params": params, "batch_stats": variables["batch_stats"]}
        y, updates = norm.apply(variables_, batch, mutable=["batch_stats"])
        return ja.mean(y), ja.Last(updates["batch_stats"])

    f = ja.window_axis.value_and_grad(loss_fn, num_microbatches=3, has_aux=True)
    (_, stats), _ = f(variables["params"], x)
    np.testing.assert_allclose(stats["mean"], [5.0], rtol=1e-6)
    np.testing.assert_allclose(stats["var"], [35 / 3], rtol=1e-6)


# What else a window has: keys, outputs, rows, weights, accumulators, scales


def loss_dropout(params, batch, *, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    h = normalise(jnp.where(keep, batch["x"] @ params["first"], 0))
    again = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, h.shape)
    return ja.mean(jnp.where(again & keep, h, 0) * batch["y"])


@pytest.mark.parametrize("storage", STORAGES)
def test_keys_are_those_of_each_micro_batch(storage, x64):
    params, batch = inputs("float64")
    key = jax.random.key(3)
    options = {"storage": storage}
    f = ja.window_axis.value_and_grad(loss_dropout, num_microbatches=4, **options)
    got = jax.jit(f)(params, batch, key=key)
    assert_close(got, over_vmap(loss_dropout, 4, key=key)(params, batch), "float64")


def test_outputs_are_combined_at_every_depth(x64):
    params, batch = inputs("float64")

    def loss_fn(params, batch):
        h = batch["x"] @ params["first"]
        g = normalise(h)
        early = {"sum": ja.Sum(h.sum()), "rows": ja.Concat(h), "last": ja.Last(h[0])}
        late = {"max": ja.Max(g.max()), "stack": g.sum(), "rows": ja.Concat(g), "one": 1.0}
        return ja.mean(g * batch["y"]), {"early": early, "late": late}

    f = ja.window_axis.value_and_grad(loss_fn, num_microbatches=4, has_aux=True)
    (_, aux), _ = f(params, batch)
    h = batch["x"] @ params["first"]
    g = (h - h.mean(0)[None]) / np.sqrt(h.var(0) + 1e-3)[None]
    strided = [g[k::4].sum() for k in range(4)]
    expected = {
        "early": {"sum": h.sum(), "rows": h, "last": h[3]},
        "late": {"max": g.max(), "stack": jnp.stack(strided), "rows": g, "one": jnp.ones(4)},
    }
    np.testing.assert_allclose(*(jax.flatten_util.ravel_pytree(t)[0] for t in (aux, expected)))


def test_gradients_of_the_rows(x64):
    params, batch = inputs("float64")
    batch.pop("mask")
    options = {"num_microbatches": 4, "argnums": (0, 1)}
    got = ja.window_axis.value_and_grad(loss_both_ways, **options)(params, batch)
    expected = jax.value_and_grad(full_contrast, argnums=(0, 1))(params, batch)
    assert_close(got, expected, "float64")


@pytest.mark.parametrize("name", ["compensated", "chunked", "stochastic"])
def test_accumulators_carry_across_stages(name):
    """A parameter that several stages use is one sum, in the carry that was asked for."""
    params, batch = inputs()

    def loss_fn(params, batch):
        h = normalise(batch["x"] @ params["first"])
        return ja.mean(normalise(h @ params["first"]) * batch["y"])

    accumulator = getattr(ja.accumulators, name)()
    options = {"num_microbatches": 4}
    f = ja.window_axis.value_and_grad(loss_fn, accumulator=accumulator, **options)
    named = {"key": jax.random.key(0)} if accumulator.needs_key else {}
    grads = jax.jit(f)(params, batch, **named)[1]["first"]
    expected = ja.window_axis.value_and_grad(loss_fn, **options)(params, batch)[1]["first"]
    error = np.abs(grads - expected).max() / np.abs(expected).max()
    assert error <= (2e-6 if name == "compensated" else 2e-2)
    assert not grads[0, 0].weak_type


def test_loss_scale_and_bfloat16():
    params, batch = inputs()
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    f = ja.window_axis.value_and_grad(loss_pmean, num_microbatches=4)
    loss, grads = f(params, batch, loss_scale=jnp.float32(1024))
    assert_close((loss, grads), f(params, batch), "float32")
    loss_narrow, grads_narrow = f(narrow, batch)
    assert grads_narrow["first"].dtype == jnp.bfloat16
    np.testing.assert_allclose(loss_narrow, loss, rtol=0.05)


def test_windows_merge_and_denominators():
    params, batch = inputs()
    options = {"num_microbatches": 2}
    counts = ja.window_axis.denominators(loss_terms, **options)(params, batch)
    assert counts["fit"] == FEATURES * batch["mask"].sum()
    assert counts["spread"] == 2 * max(batch["mask"][k::2].sum() for k in range(2))
    f = ja.window_axis.accumulate(loss_terms, **options)
    one = f(params, batch, denominators=counts)
    two = f(params, batch, denominators=counts)
    both = ja.finalize(ja.merge(one, two))
    assert_close(both.loss, 2 * ja.finalize(one).loss, "float32")


def test_train_step():
    params, batch = inputs()
    window_fn = ja.window_axis.accumulate(loss_both_ways, num_microbatches=4)
    init, step = ja.train_step(window_fn, optax.sgd(0.1), donate=False)
    new, _, info = step(params, init(params), batch)
    loss, grads = jax.value_and_grad(full_contrast)(params, batch)
    assert_close(info.loss, loss, "float32")
    assert_close(new, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), "float32")


def test_a_window_that_is_not_finite_is_left_out():
    params, batch = inputs()
    batch["y"] = batch["y"].at[3].set(jnp.nan)
    options = {"num_microbatches": 4}
    sums = ja.window_axis.accumulate(loss_pmean, skip_nonfinite="window", **options)(params, batch)
    assert sums.weight == 0
    assert not any(np.any(g) for g in jax.tree.leaves(sums.grads))


def test_prints_once_for_each_micro_batch():
    seen = []

    def loss_fn(params, batch):
        h = batch["x"] @ params["first"]
        jax.debug.callback(lambda i: seen.append(("first", int(i))), lax.axis_index(W))
        h = normalise(h)
        jax.debug.callback(lambda i, _: seen.append(("second", int(i))), lax.axis_index(W), h.sum())
        return ja.mean(h * batch["y"])

    params, batch = inputs()
    jax.block_until_ready(ja.window_axis.value_and_grad(loss_fn, num_microbatches=3)(params, batch))
    jax.effects_barrier()
    assert sorted(seen) == [(n, i) for n in ("first", "second") for i in range(3)]


# Devices


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


BOTH = ("data", W)


def loss_on_devices(params, batch):
    """Statistics and negatives of all micro-batches of all devices."""
    h = normalise(batch["x"] @ params["first"], (W, "data"))
    keys = lax.all_gather(h, (W, "data"), tiled=True)
    top = lax.pmax(lax.stop_gradient(h).max(), BOTH)
    return ja.mean(jax.nn.logsumexp(h @ keys.T / top, axis=1) * batch["y"][:, 0])


def full_on_devices(params, batch):
    h = batch["x"] @ params["first"]
    mean = h.mean(0, keepdims=True)
    h = (h - mean) * lax.rsqrt(((h - mean) ** 2).mean(0, keepdims=True) + 1e-3)
    top = lax.stop_gradient(h).max()
    return jnp.mean(jax.nn.logsumexp(h @ h.T / top, axis=1) * batch["y"][:, 0])


def test_devices_in_a_shard_map(x64):
    params, batch = inputs("float64", rows=32)
    f = ja.window_axis.value_and_grad(loss_on_devices, num_microbatches=2, axis_name="data")
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    got = jax.jit(jax.shard_map(f, mesh=mesh(), **specs))(params, batch)
    assert_close(got, jax.value_and_grad(full_on_devices)(params, batch), "float64")


@pytest.mark.parametrize("reduction", ["defer", "scatter"])
def test_devices_under_plain_jit(reduction, x64):
    params, batch = inputs("float64", rows=32)
    params["first"] = jnp.tile(params["first"], (1, 4))[:, :16]
    options = {"reduction": reduction, "grad_specs": {"first": P(None, "data"), "second": P()}}
    f = ja.window_axis.value_and_grad(
        loss_on_devices, num_microbatches=2, spmd_axis_name="data", **options
    )
    with jax.set_mesh(mesh()):
        got = jax.jit(f)(params, batch)
    expected = jax.jit(jax.value_and_grad(full_on_devices))(params, batch)
    assert_close(jax.device_get(got), jax.device_get(expected), "float64")


def test_flax_batch_norm_over_devices(x64):
    loss_fn, full_fn, params, stats = flax_losses(Net(2, (W, "data")))
    _, batch = inputs("float64", rows=32)
    options = {"has_aux": True, "spmd_axis_name": "data"}
    f = ja.window_axis.value_and_grad(loss_fn, num_microbatches=2, **options)
    with jax.set_mesh(mesh()):
        got = jax.jit(f)(params, batch, stats)
    expected = jax.value_and_grad(full_fn, has_aux=True)(params, batch, stats)
    assert_close(jax.device_get(got), jax.device_get(expected), "float64")


def test_the_gradient_is_reduced_once():
    params, batch = inputs(rows=32)
    f = ja.window_axis.value_and_grad(loss_pmean, num_microbatches=2, spmd_axis_name="data")
    with jax.set_mesh(mesh()):
        ja.audit(f, params, batch).assert_deferred()


# Cost


def executions(jaxpr, name):
    """How often a primitive runs, loops counted by their length."""
    total = 0
    for eqn in jaxpr.eqns:
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += eqn.primitive.name == name
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += times * executions(inner, name)
    return total


def products(fn, *args):
    """How many matrix products the compiled program holds; those in a loop count once."""
    return len(re.findall(r" dot\(", jax.jit(fn).lower(*args).compile().as_text()))


@pytest.mark.parametrize("layers", [1, 4])
def test_two_forwards_and_one_backward(layers):
    """Whatever the number of stages, each product and each other costly step."""
    num = 4

    def loss_fn(params, batch):
        x = batch["x"]
        for _ in range(layers):
            x = normalise(lax.erf_inv(jnp.tanh(x @ params["first"] / 9)))
        return ja.mean(x * batch["y"])

    params, batch = inputs()
    f = ja.window_axis.value_and_grad(loss_fn, num_microbatches=num)
    program = jax.make_jaxpr(f)(params, batch).jaxpr
    assert executions(program, "erf_inv") == 2 * num * layers
    # Backward there are two for each layer, but one for the first.
    assert products(f, params, batch) == 2 * layers + 2 * layers - 1


def test_stored_products_are_not_computed_again():
    def loss_fn(params, batch):
        x = batch["x"]
        for _ in range(4):
            x = jax.nn.relu(normalise(x @ params["first"]))
        return ja.mean(x * batch["y"])

    f = ja.window_axis.value_and_grad(loss_fn, num_microbatches=4)
    assert products(f, *inputs()) == 4 + 2 * 4 - 1


def temporary(fn, *args):
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_memory():
    """Contrast: one micro-batch's activations and the features of all rows."""
    width, rows = 64, 512
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(width, width)) / 8, jnp.float32) for _ in range(6)]
    batch = jnp.asarray(rng.normal(size=(rows, width)), jnp.float32)

    def features(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    def loss_fn(params, x):
        z = features(params, x)
        return ja.mean(jax.nn.logsumexp(z @ lax.all_gather(z, W, tiled=True).T, axis=1))

    def full_fn(params, x):
        z = features(params, x)
        return jnp.mean(jax.nn.logsumexp(z @ z.T, axis=1))

    f = ja.window_axis.value_and_grad(loss_fn, num_microbatches=16)
    small, large = (temporary(g, params, batch) for g in (f, jax.value_and_grad(full_fn)))
    assert small < 0.4 * large


def test_memory_of_batch_norm():
    loss_fn, full_fn, params, stats = flax_losses(Net(4, W, 32))
    _, batch = inputs(rows=2048)

    def of(storage):
        options = {"storage": storage}
        return ja.window_axis.value_and_grad(loss_fn, num_microbatches=16, has_aux=True, **options)

    full = temporary(jax.value_and_grad(full_fn, has_aux=True), params, batch, stats)
    assert temporary(of("store"), params, batch, stats) < 0.75 * full
    assert temporary(of("recompute"), params, batch, stats) < 0.25 * full


# Refusals


def inside_cond(params, batch):
    h = batch["x"] @ params["first"]
    h = lax.cond(h.sum() > 0, lambda x: x - lax.pmean(x, W), lambda x: x, h)
    return ja.mean(h)


def inside_while(params, batch):
    h = lax.while_loop(lambda x: x.sum() < 0, lambda x: x + lax.pmean(x, W), batch["x"])
    return ja.mean(h @ params["first"])


def through_pmax(params, batch):
    return ja.mean(lax.pmax(batch["x"] @ params["first"], W))


def with_groups(params, batch):
    return ja.mean(lax.psum(batch["x"] @ params["first"], W, axis_index_groups=[[0, 1], [2, 3]]))


def moving_weight(params, batch):
    return ja.Mean(jnp.float32(1), lax.psum(jnp.sum(batch["x"] @ params["first"]), W))


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (inside_cond, r"inside `lax.cond`.*test_window_axis.py.*jnp.where"),
        (inside_while, r"inside `lax.while_loop`.*test_window_axis.py"),
        (through_pmax, r"goes through `pmax`.*test_window_axis.py.*stop_gradient"),
        (with_groups, r"axis_index_groups"),
        (moving_weight, r"weight of `loss` has a gradient"),
    ],
)
def test_losses_that_are_refused(loss_fn, message):
    f = ja.window_axis.value_and_grad(loss_fn, num_microbatches=4)
    with pytest.raises(ValueError, match=message):
        f(*inputs())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_axis_name": 3}, "name of an axis"),
        ({"storage": "disk"}, "store.*recompute"),
        ({"skip_nonfinite": True}, 'reaches all others.*skip_nonfinite="window"'),
        ({"axis_name": W}, "both name the axis"),
        ({"spmd_axis_name": W}, "both name the axis"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ja.window_axis.accumulate(loss_psum, num_microbatches=2, **options)


def test_what_has_no_meaning_here_is_no_option():
    """Options that only a plain window has, and those that it lacks, are not there to give."""
    for name in ("grad_reducers", "noise_scale", "model_state"):
        with pytest.raises(TypeError, match=f"`{name}` has no meaning here"):
            ja.window_axis.accumulate(loss_psum, num_microbatches=2, **{name: None})
    for name in ("window_axis_name", "storage"):
        with pytest.raises(TypeError, match=f"`{name}` is none of its options"):
            ja.accumulate(loss_psum, num_microbatches=2, **{name: None})


def test_calls_that_are_refused():
    params, batch = inputs()
    f = ja.window_axis.value_and_grad(loss_psum, num_microbatches=4)
    with pytest.raises(ValueError, match="same number of rows, got 4 of 5 rows and 1 of 4"):
        ja.window_axis.value_and_grad(loss_psum, num_microbatches=5)(params, batch)
    with pytest.raises(ValueError, match="already an axis around"):
        jax.vmap(lambda _: f(params, batch), axis_name=W)(jnp.ones(2))
    g = jax.shard_map(
        ja.window_axis.value_and_grad(loss_psum, num_microbatches=1, axis_name="data"),
        mesh=mesh(),
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="check_vma=False"):
        g(params, batch)
