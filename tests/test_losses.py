"""`ja.losses`: exact for every cut and over devices, against formulas on the full batch.

The oracles use plain `jax.numpy` on all rows in one pass, in float64, and NumPy for the values.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxaccum as ja

ROWS, FEATURES, WIDTH, EXPERTS = 24, 6, 5, 4
TOLERANCE = {"float32": 5e-6, "float64": 1e-12}
CUTS = [
    *({"num_microbatches": k} for k in (1, 2, 5, 24)),
    *({"microbatch_size": s} for s in (7, 24)),
]


def tower(w, x):
    return jnp.tanh(jnp.tanh(x @ w["in"]) @ w["out"])


def unit(x):
    return x / jnp.sqrt(jnp.sum(x * x, axis=1, keepdims=True))


# In-batch contrastive: two encoders and a learned temperature.


def encode(params, batch):
    return unit(tower(params["a"], batch["x"])), unit(tower(params["b"], batch["y"]))


def encode_masked(params, batch):
    return (*encode(params, batch), batch["real"])


def temperature(params):
    return jnp.exp(-params["log_scale"])


def contrastive_window(**options):
    return ja.losses.contrastive_fn(encode_masked, temperature=temperature, **options)


def contrastive_full(params, batch):
    """The pairs that are real picked out, so that nothing is masked."""
    index = np.flatnonzero(batch["real"])
    a, b = (x[index] for x in encode(params, batch))
    logits = a @ b.T * jnp.exp(params["log_scale"])
    terms = [jnp.diag(jax.nn.log_softmax(x, axis=1)) for x in (logits, logits.T)]
    return -(jnp.mean(terms[0]) + jnp.mean(terms[1])) / 2


# Load balance of a mixture of experts.


def route(params, batch):
    hidden = tower(params["a"], batch["x"])
    return jax.nn.softmax(2 * hidden @ params["router"])


def balance_window(**options):
    def fn(params, batch):
        return ja.losses.routing(route(params, batch), where=batch["real"])

    combined = ja.microbatch(fn, **options)
    return lambda params, batch: ja.losses.load_balance(combined(params, batch))


def balance_full(params, batch):
    probabilities = route(params, batch)[np.flatnonzero(batch["real"])]
    chosen = jnp.argmax(jax.lax.stop_gradient(probabilities), axis=1)
    fraction = jnp.bincount(chosen, length=EXPERTS) / len(chosen)
    return EXPERTS * jnp.sum(fraction * jnp.mean(probabilities, axis=0))


# Soft Dice and soft F1.


def predict(params, batch):
    return jax.nn.softmax(tower(params["a"], batch["x"]) @ params["router"])


def overlap_window(loss_fn, *, squared=False, **options):
    def fn(params, batch):
        targets = jax.nn.one_hot(batch["label"], EXPERTS)
        return ja.losses.overlap(
            predict(params, batch), targets, where=batch["real"], squared=squared
        )

    combined = ja.microbatch(fn, **options)
    return lambda params, batch: loss_fn(combined(params, batch))


def overlap_full(params, batch, *, smooth, squared=False, beta=1.0):
    index = np.flatnonzero(batch["real"])
    p = predict(params, batch)[index]
    t = jnp.eye(EXPERTS)[batch["label"][index]]
    power = 2 if squared else 1
    truth, wrong = jnp.sum(p * t, 0), (jnp.sum(p**power, 0), jnp.sum(t**power, 0))
    score = ((1 + beta**2) * truth + smooth) / (wrong[0] + beta**2 * wrong[1] + smooth)
    return 1 - jnp.mean(score)


def soft_f2(combined):
    return 1 - jnp.mean(ja.losses.f_score(combined, beta=2.0))


class Case(NamedTuple):
    window: Callable[..., Any]
    full: Callable[..., Any]
    naive_is_off: float  # at least so much, with micro-batches of four rows


LOSSES = {
    "contrastive": Case(contrastive_window, contrastive_full, 0.1),
    "contrastive in blocks": Case(
        functools.partial(contrastive_window, block_size=7), contrastive_full, 0.1
    ),
    "load balance": Case(balance_window, balance_full, 0.05),
    "dice": Case(
        functools.partial(overlap_window, ja.losses.dice),
        functools.partial(overlap_full, smooth=1.0),
        0.1,
    ),
    "dice squared": Case(
        functools.partial(overlap_window, ja.losses.dice, squared=True),
        functools.partial(overlap_full, smooth=1.0, squared=True),
        0.1,
    ),
    "soft F1": Case(
        functools.partial(overlap_window, functools.partial(ja.losses.dice, smooth=0.0)),
        functools.partial(overlap_full, smooth=0.0),
        0.1,
    ),
    "soft F2": Case(
        functools.partial(overlap_window, soft_f2),
        functools.partial(overlap_full, smooth=0.0, beta=2.0),
        0.1,
    ),
}
ALWAYS = ["contrastive", "load balance", "dice"]  # the others are variants, run on request
FAST = [*ALWAYS, "contrastive in blocks"]
EACH = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow) for n in LOSSES],
)


def some(fast, names, others):
    """All pairs of a loss and something else; those not in `fast` only run on request."""
    return [
        pytest.param(name, other, marks=() if fast(name, other) else pytest.mark.slow, id=id_)
        for name in names
        for other in others
        for id_ in [f"{name}-{other}"]
    ]


def problem(dtype="float64", *, padded=True, rows=ROWS):
    """Parameters and a batch whose rows are grouped by kind, as data often is."""
    rng = np.random.default_rng(5)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    towers = {name: {"in": draw(FEATURES, 8), "out": 0.5 * draw(8, WIDTH)} for name in ("a", "b")}
    params = {**towers, "router": draw(WIDTH, EXPERTS), "log_scale": jnp.asarray(1.5, dtype)}
    label = np.arange(rows) * EXPERTS // rows
    x = draw(rows, FEATURES) + jnp.asarray(label[:, None] % 2, dtype)
    real = np.arange(rows) % 6 != 4 if padded else np.ones(rows, bool)
    batch = {"x": x, "y": x + 0.3 * draw(rows, FEATURES), "label": label, "real": real}
    return params, jax.tree.map(jnp.asarray, batch)


def used(grads):
    """The leaves that a loss reads."""
    return [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)]


def deviation(got, want):
    """Relative deviation of loss and gradient: the largest over leaves of the norm's ratio."""
    (loss, grads), (true_loss, true_grads) = got, want
    scale = max(np.linalg.norm(g) for g in used(true_grads))
    leaves = zip(used(grads), used(true_grads), strict=True)
    errors = [np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-3 * scale) for a, b in leaves]
    return max([*errors, abs(float(loss) - float(true_loss)) / abs(float(true_loss))])


@functools.cache
def answer(name, **options):
    with jax.enable_x64(True):
        params, batch = problem(**options)
        real = np.asarray(batch["real"])

        def full(params, batch):
            return LOSSES[name].full(params, {**batch, "real": real})

        return jax.device_get(jax.jit(jax.value_and_grad(full))(params, batch))


@pytest.mark.parametrize(
    ("name", "cut"), some(lambda name, cut: 5 in cut.values() and name in FAST, LOSSES, CUTS)
)
def test_equals_the_full_batch(name, cut, x64):
    params, batch = problem()
    got = jax.jit(jax.value_and_grad(LOSSES[name].window(**cut)))(params, batch)
    assert deviation(got, answer(name)) < TOLERANCE["float64"]


@EACH
def test_float32(name):
    params, batch = problem("float32")
    got = jax.jit(jax.value_and_grad(LOSSES[name].window(num_microbatches=5)))(params, batch)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(got))
    assert deviation(got, answer(name)) < TOLERANCE["float32"]


def on_devices(name, params, batch, *, check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    step = jax.value_and_grad(LOSSES[name].window(num_microbatches=2, axis_name="data"))
    run = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=check_vma
    )
    return jax.jit(run)(params, batch)


def spmd(name, params, batch, *, types):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(types,))
    with jax.set_mesh(mesh):
        step = jax.value_and_grad(LOSSES[name].window(num_microbatches=2, spmd_axis_name="data"))
        return jax.jit(step)(params, jax.device_put(batch, P("data")))


ROUTES = {
    "checked": functools.partial(on_devices, check_vma=True),
    "unchecked": functools.partial(on_devices, check_vma=False),
    "spmd auto": functools.partial(spmd, types=AxisType.Auto),
    "spmd explicit": functools.partial(spmd, types=AxisType.Explicit),
}


@pytest.mark.parametrize(
    ("name", "route"),
    some(
        lambda name, route: name == "contrastive" or (name in ALWAYS and route == "checked"),
        LOSSES,
        ROUTES,
    ),
)
def test_devices(name, route, x64):
    got = ROUTES[route](name, *problem())
    assert deviation(got, answer(name)) < TOLERANCE["float64"]


@pytest.mark.parametrize("name", ["contrastive", "dice"])
def test_one_reduction_of_gradients_and_none_in_a_loop(name):
    params, batch = problem("float32")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    step = jax.grad(LOSSES[name].window(num_microbatches=3, axis_name="data"))
    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    report = ja.audit(run, params, batch, min_bytes=1)
    # The embeddings are gathered once, in the forward pass, by a sum.
    report.assert_deferred(max_gradients=None if name == "contrastive" else 1.5)


def naive(name, params, batch, number):
    """The mean of the micro-batches' own losses: what accumulation without this library does."""
    step = jax.jit(jax.value_and_grad(LOSSES[name].window(num_microbatches=1)))
    parts = [step(params, micro) for micro in ja.split(batch, num_microbatches=number)]
    return jax.tree.map(lambda *xs: sum(xs) / number, *parts)


def distance(got, want):
    """The relative distance of two gradients as vectors."""
    a, b = (np.concatenate([g.ravel() for g in used(x[1])]) for x in (got, want))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@EACH
def test_the_mean_of_the_micro_batches_losses_is_far_off(name, x64):
    params, batch = problem(padded=False)
    want = answer(name, padded=False)
    off = distance(naive(name, params, batch, 6), want)
    exact = jax.jit(jax.value_and_grad(LOSSES[name].window(num_microbatches=6)))(params, batch)
    assert off > LOSSES[name].naive_is_off
    assert distance(exact, want) < 1e-12


def counted(name):
    """A batch size of 6 micro-batches' calls of a layer, forward and backward, as they run."""
    calls = []

    @jax.custom_vjp
    def layer(x):
        jax.debug.callback(lambda: calls.append("forward"))
        return jnp.sin(x)

    def forward(x):
        return layer(x), x

    def backward(x, ct):
        jax.debug.callback(lambda: calls.append("backward"))
        return (ct * jnp.cos(x),)

    layer.defvjp(forward, backward)
    params, batch = problem("float32")

    def fn(params, batch):
        return {**batch, "x": layer(batch["x"] @ params["a"]["in"] @ params["a"]["in"].T)}

    return calls, fn, params, batch


def test_two_forwards_and_one_backward():
    calls, layer, params, batch = counted("contrastive")
    loss = ja.losses.contrastive_fn(
        lambda params, batch: encode(params, layer(params, batch)), num_microbatches=6
    )
    jax.block_until_ready(jax.jit(jax.grad(loss))(params, batch))
    jax.effects_barrier()
    assert (calls.count("forward"), calls.count("backward")) == (12, 6)


@pytest.mark.parametrize("statistic", ["routing", "overlap"])
def test_two_forwards_and_one_backward_of_sums(statistic):
    calls, layer, params, batch = counted(statistic)

    def fn(params, batch):
        probabilities = predict(params, layer(params, batch))
        if statistic == "routing":
            return ja.losses.routing(probabilities)
        return ja.losses.overlap(probabilities, jax.nn.one_hot(batch["label"], EXPERTS))

    combined = ja.microbatch(fn, num_microbatches=6)
    loss = {"routing": ja.losses.load_balance, "overlap": ja.losses.dice}[statistic]
    grad = jax.jit(jax.grad(lambda p, b: loss(combined(p, b))))
    jax.block_until_ready(grad(params, batch))
    jax.effects_barrier()
    assert (calls.count("forward"), calls.count("backward")) == (12, 6)


@pytest.mark.parametrize("name", ["contrastive", "dice"])
def test_memory_is_that_of_one_micro_batch(name):
    """The window needs a fraction of the full batch's, and about what naive accumulation needs."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    towers = {n: {"in": draw(FEATURES, 4096), "out": draw(4096, WIDTH)} for n in ("a", "b")}
    params = {**towers, "router": draw(WIDTH, EXPERTS), "log_scale": jnp.float32(0)}
    _, batch = problem("float32", rows=512)

    def temporaries(fn):
        compiled = jax.jit(fn).lower(params, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def accumulated(params, batch):
        grad = jax.value_and_grad(LOSSES[name].window(num_microbatches=1))
        grids = jax.tree.map(lambda x: x.reshape(16, -1, *x.shape[1:]), batch)
        add = lambda sums, micro: (jax.tree.map(jnp.add, sums, grad(params, micro)), None)  # noqa: E731
        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        return jax.lax.scan(add, zeros, grids)[0]

    full = temporaries(jax.value_and_grad(LOSSES[name].window(num_microbatches=1)))
    window = temporaries(jax.value_and_grad(LOSSES[name].window(num_microbatches=16)))
    naive_bytes = temporaries(accumulated)
    logits = 8 * 512 * 512 * 4  # what the loss itself needs of the whole batch
    assert window < full / 4
    assert window < 2 * naive_bytes + (logits if name == "contrastive" else 0)


def test_blocks_keep_the_logits_small():
    a = jnp.ones((2048, 8))

    def temporaries(**options):
        grad = jax.jit(jax.grad(lambda a: ja.losses.contrastive(a, a, **options)))
        return grad.lower(a).compile().memory_analysis().temp_size_in_bytes

    assert temporaries() > 2048 * 2048 * 4
    assert temporaries(block_size=64) < 2048 * 2048 * 4 / 8


class TestContrastive:
    def test_is_the_mean_of_both_directions(self):
        rng = np.random.default_rng(0)
        a, b = rng.normal(size=(2, 7, 3))
        logits = a @ b.T / 0.5
        rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        columns = logits - np.log(np.exp(logits).sum(axis=0, keepdims=True))
        want = -(np.diag(rows).mean() + np.diag(columns).mean()) / 2
        got = ja.losses.contrastive(np.float32(a), np.float32(b), temperature=0.5)
        np.testing.assert_allclose(got, want, rtol=2e-6)

    @pytest.mark.parametrize("block_size", [None, 4])
    def test_padding_may_hold_anything(self, block_size):
        rng = np.random.default_rng(0)
        a, b = jnp.asarray(rng.normal(size=(2, 6, 3)), jnp.float32)
        where = jnp.array([True, False, True, True, False, True])
        bad = jnp.where(where[:, None], a, jnp.nan)
        options = {"where": where, "block_size": block_size}
        grad = jax.jit(jax.grad(lambda a: ja.losses.contrastive(a, b, **options)))
        np.testing.assert_array_equal(grad(bad), grad(a))
        np.testing.assert_array_equal(grad(bad)[1], 0)
        index = np.flatnonzero(where)
        want = jax.grad(lambda a: ja.losses.contrastive(a, b[index]))(a[index])
        np.testing.assert_allclose(grad(bad)[index], want, rtol=1e-5, atol=1e-7)

    def test_no_pairs(self):
        a = jnp.ones((3, 2))
        loss, grad = jax.value_and_grad(
            lambda a: ja.losses.contrastive(a, a, where=jnp.zeros(3, bool))
        )(a)
        assert np.isnan(loss)
        np.testing.assert_array_equal(grad, np.zeros((3, 2)))

    def test_micro_batches_that_do_not_run_hold_no_pairs(self, x64):
        params, batch = problem(padded=False)
        loss = ja.losses.contrastive_fn(encode, num_microbatches=6)
        got = jax.jit(jax.value_and_grad(loss))(params, batch, num_real=4)
        rows = np.sort(np.concatenate([np.arange(24)[k::6] for k in range(4)]))
        kept = jax.tree.map(lambda x: x[rows], batch)
        one = ja.losses.contrastive_fn(encode, num_microbatches=1)
        want = jax.jit(jax.value_and_grad(one))(params, kept)
        assert deviation(got, want) < 1e-12

    def test_bfloat16_embeddings_are_compared_in_float32(self):
        a = jnp.ones((4, 8), jnp.bfloat16)
        assert ja.losses.contrastive(a, a).dtype == jnp.float32

    def test_keys_reach_the_encoder(self):
        def noisy(params, x, *, key):
            return x + params * jax.random.normal(key, x.shape), x

        loss = jax.jit(ja.losses.contrastive_fn(noisy, num_microbatches=2))
        x = jnp.eye(4)
        a, b = (loss(1.0, x, key=jax.random.key(k)) for k in (0, 1))
        assert a != b
        assert a == loss(1.0, x, key=jax.random.key(0))

    def test_refusals(self):
        a = jnp.ones((4, 2))
        with pytest.raises(ValueError, match="contrastive: `a` and `b` must hold the two sides"):
            ja.losses.contrastive(a, a[:3])
        with pytest.raises(ValueError, match=r"contrastive: `b` must be real embeddings"):
            ja.losses.contrastive(a, a[0])
        with pytest.raises(TypeError, match="contrastive: `where` must be boolean"):
            ja.losses.contrastive(a, a, where=jnp.ones(4))
        with pytest.raises(ValueError, match="contrastive: `where` must have the shape"):
            ja.losses.contrastive(a, a, where=jnp.ones(3, bool))
        with pytest.raises(ValueError, match="contrastive: `block_size` must be at least 1"):
            ja.losses.contrastive(a, a, block_size=0)
        with pytest.raises(TypeError, match="contrastive_fn: `encode_fn` must be a function"):
            ja.losses.contrastive_fn(1, num_microbatches=1)
        with pytest.raises(TypeError, match="contrastive_fn: `encode_fn` must return"):
            ja.losses.contrastive_fn(lambda p, x: x, num_microbatches=1)(1.0, a)


class TestLoadBalance:
    def test_even_and_uneven_routers(self):
        even = ja.losses.Routing(jnp.full(4, 0.25), jnp.full(4, 0.25))
        assert ja.losses.load_balance(even) == 1
        one = jnp.array([1.0, 0, 0, 0])
        assert ja.losses.load_balance(ja.losses.Routing(one, one)) == 4

    @pytest.mark.parametrize("k", [1, 2])
    def test_chosen_experts(self, k):
        rng = np.random.default_rng(0)
        p = rng.dirichlet(np.ones(5), (3, 4)).astype(np.float32)
        chosen = np.argsort(-p, axis=-1)[..., :k]
        where = rng.random((3, 4)) < 0.7
        got = ja.losses.routing(p, chosen[..., 0] if k == 1 else chosen, where=where)
        counts = np.bincount(chosen[where].ravel(), minlength=5) / k
        np.testing.assert_allclose(got.fraction.total, counts, rtol=1e-6)
        np.testing.assert_allclose(got.probability.total, p[where].sum(axis=0), rtol=1e-6)
        assert got.fraction.weight == got.probability.weight == where.sum()

    def test_no_tokens(self):
        def loss(p):
            fn = ja.microbatch(
                lambda p, x: ja.losses.routing(x * p, where=jnp.zeros(2, bool)), num_microbatches=2
            )
            return ja.losses.load_balance(fn(p, jnp.ones((4, 3))))

        value, grad = jax.value_and_grad(loss)(1.0)
        assert np.isnan(value)
        assert grad == 0

    def test_refusals(self):
        p = jnp.full((4, 3), 1 / 3)
        with pytest.raises(TypeError, match="load_balance: expected a combined `Routing`"):
            ja.losses.load_balance(ja.losses.routing(p))
        with pytest.raises(TypeError, match="routing: `chosen` must hold the experts' numbers"):
            ja.losses.routing(p, jnp.ones(4))
        with pytest.raises(ValueError, match="routing: `chosen` must have the shape"):
            ja.losses.routing(p, jnp.ones(3, jnp.int32))
        with pytest.raises(ValueError, match="routing: `where` must have the shape"):
            ja.losses.routing(p, where=jnp.ones(3, bool))


class TestOverlap:
    def test_scores_are_those_of_counts(self):
        """Hard predictions: twice the true positives over themselves and the errors."""
        rng = np.random.default_rng(0)
        truth, guess = rng.integers(0, 3, (2, 40))
        got = ja.losses.f_score(_plain(ja.losses.overlap(np.eye(3)[guess], np.eye(3)[truth])))
        for c in range(3):
            right = np.sum((truth == c) & (guess == c))
            wrong = np.sum((truth == c) != (guess == c))
            np.testing.assert_allclose(got[c], 2 * right / (2 * right + wrong), rtol=1e-6)

    def test_a_class_that_is_nowhere(self):
        overlap = ja.losses.Overlap(jnp.array([1.0, 0]), jnp.array([1.0, 0]), jnp.array([3.0, 0]))
        np.testing.assert_array_equal(ja.losses.f_score(overlap), [0.5, np.nan])
        assert ja.losses.dice(overlap, smooth=0.0) == 0.5
        np.testing.assert_allclose(ja.losses.dice(overlap), 1 - (3 / 5 + 1) / 2, rtol=1e-6)
        grad = jax.grad(lambda o: ja.losses.dice(o, smooth=0.0))(overlap)
        assert all(np.isfinite(g).all() for g in grad)
        nothing = ja.losses.Overlap(*[jnp.zeros(2)] * 3)
        assert np.isnan(ja.losses.dice(nothing, smooth=0.0))

    def test_masked_positions_may_hold_anything(self):
        p, t = jnp.array([[0.5], [jnp.nan]]), jnp.array([[1.0], [jnp.inf]])
        where = jnp.array([True, False])
        got = ja.losses.overlap(p, t, where=where)
        assert (got.both.value[0], got.predicted.value[0], got.target.value[0]) == (0.5, 0.5, 1)
        grad = jax.grad(lambda p: ja.losses.dice(_plain(ja.losses.overlap(p, t, where=where))))(p)
        assert np.isfinite(grad).all()
        assert grad[1] == 0

    def test_refusals(self):
        p = jnp.full((4, 3), 1 / 3)
        with pytest.raises(TypeError, match="dice: expected a combined `Overlap`"):
            ja.losses.dice(ja.losses.overlap(p, p))
        with pytest.raises(TypeError, match="f_score: expected a combined `Overlap`"):
            ja.losses.f_score((p, p, p))
        with pytest.raises(ValueError, match="overlap: `targets` must have the shape"):
            ja.losses.overlap(p, jnp.ones(4))
        with pytest.raises(ValueError, match="overlap: `where` must have the shape"):
            ja.losses.overlap(p, p, where=jnp.ones((4, 3), bool))


def _plain(marked):
    return type(marked)(*[x.value for x in marked])


class TestSequenceMean:
    def test_case_9(self):
        """A packed row of two sequences, lengths 1 and 4: 5.5, where the row's mean is 2.8."""
        x = jnp.array([[10.0, 1, 1, 1, 1]] * 3)
        ids = jnp.array([[1, 2, 2, 2, 2]] * 3)

        def loss_fn(w, batch):
            return ja.losses.sequence_mean(w * batch[0], batch[1])

        for number in (1, 2):
            f = jax.jit(ja.accumulate(loss_fn, num_microbatches=number))
            window = ja.finalize(f(jnp.float32(0), (x, ids)))
            assert window.grads == 5.5
            assert window.weight == 6
        assert jax.grad(lambda w: ja.mean(jnp.mean(w * x, axis=1)).value)(0.0) != 5.5

    def test_case_10_a_constant_denominator(self):
        x = jnp.array([[10.0, 1, 1, 1, 1]] * 4)
        ids = jnp.array([[1, 2, 2, 2, 2]] * 4)

        def loss_fn(w, batch):
            return ja.losses.sequence_mean(w * batch[0], batch[1])

        for number in (1, 3):
            f = jax.jit(ja.value_and_grad(loss_fn, num_microbatches=number))
            _, grad = f(jnp.float32(0), (x, ids), denominators=100.0)
            np.testing.assert_allclose(grad, 4 * 11 / 100, rtol=1e-6)

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_packed_text(self, number):
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, 9, 14)
        packed = ja.batches.pack([rng.integers(1, 50, n) for n in lengths], 10)
        losses = rng.normal(size=packed.tokens.shape).astype(np.float32)
        want = []
        for row, ids in zip(losses, packed.segment_ids, strict=True):
            targets = [row[1:][(ids[1:] == s) & (ids[:-1] == s)] for s in range(1, ids.max() + 1)]
            want += [t.astype(np.float64).mean() for t in targets if len(t)]

        def loss_fn(w, batch):
            losses, ids, mask = batch
            return ja.losses.sequence_mean(w * losses, ids, where=mask)

        batch = (losses[:, 1:], packed.segment_ids[:, 1:], packed.target_mask())
        f = jax.jit(ja.accumulate(loss_fn, num_microbatches=number))
        window = ja.finalize(f(jnp.float32(1), jax.tree.map(jnp.asarray, batch)))
        assert window.weight == len(want)
        np.testing.assert_allclose(window.loss, np.mean(want), rtol=1e-5)
        np.testing.assert_allclose(window.grads, np.mean(want), rtol=1e-5)

    def test_in_a_window_over_devices(self):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        x = jnp.array([[10.0, 1, 1, 1, 1]] * 8)
        ids = jnp.array([[1, 2, 2, 2, 2]] * 8)
        f = ja.value_and_grad(
            lambda w, b: ja.losses.sequence_mean(w * b[0], b[1]),
            num_microbatches=1,
            axis_name="data",
        )
        run = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
        assert jax.jit(run)(jnp.float32(0), (x, ids))[1] == 5.5

    def test_padding_and_masked_tokens(self):
        values = jnp.array([[1.0, 3.0, jnp.nan, jnp.inf]])
        ids = jnp.array([[7, 7, 0, 2]])
        where = jnp.array([[True, True, True, False]])
        loss = ja.losses.sequence_mean(values, ids, where=where)
        assert (loss.value, loss.weight) == (2, 1)
        grad = jax.grad(lambda v: ja.losses.sequence_mean(v, ids, where=where).value)(values)
        np.testing.assert_array_equal(grad, [[0.5, 0.5, 0, 0]])

    def test_refusals(self):
        x = jnp.ones((2, 3))
        with pytest.raises(ValueError, match="sequence_mean: `values` and `segment_ids` must both"):
            ja.losses.sequence_mean(x, jnp.ones(3, jnp.int32))
        with pytest.raises(TypeError, match="sequence_mean: `segment_ids` must be integers"):
            ja.losses.sequence_mean(x, x)


def test_case_60_two_models_with_their_own_windows_in_one_step():
    """Generator in two micro-batches, critic in one; the generator's loss splits no more."""
    params = {"generator": jnp.float32(2), "critic": jnp.float32(3)}
    x = jnp.arange(1.0, 7.0)

    def pairs(generator, x, critic):
        return ja.Sum(jnp.sum(critic * generator * x)), ja.Sum(jnp.sum((generator * x) ** 2))

    generated = ja.microbatch(pairs, num_microbatches=2)

    def generator_loss(generator, x, critic):
        total, squares = generated(generator, x, critic)
        return total**2 / squares + squares

    critic = ja.value_and_grad(
        lambda critic, x, generator: ja.mean((critic - generator * x) ** 2), num_microbatches=1
    )

    @jax.jit
    def step(params, x):
        return {
            "generator": jax.grad(generator_loss)(params["generator"], x, params["critic"]),
            "critic": critic(params["critic"], x, params["generator"])[1],
        }

    grads = step(params, x)
    s1, s2 = x.sum(), (x**2).sum()
    # The first term does not depend on the generator, the second is g**2 * s2.
    np.testing.assert_allclose(grads["generator"], 2 * 2 * s2, rtol=1e-5)
    np.testing.assert_allclose(grads["critic"], 2 * (3 - 2 * s1 / 6), rtol=1e-5)
