"""Per-example gradients, exact against `vmap(grad)` on the full batch; noise once per window."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxaccum as ja
from jaxaccum import norms

ROWS, FEATURES, WIDTH, CLIP = 24, 5, 3, 0.8
CUTS = [{"num_microbatches": 1}, {"num_microbatches": 5}, {"microbatch_size": 7}]
TOLERANCE = {"float32": 5e-6, "float64": 1e-12}


def problem(dtype="float64", *, padded=True):
    rng = np.random.default_rng(2)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    params = {"w": draw(FEATURES, WIDTH), "b": draw(WIDTH)}
    real = np.arange(ROWS) % 5 != 3 if padded else np.ones(ROWS, bool)
    return params, {"x": draw(ROWS, FEATURES), "y": draw(ROWS, WIDTH), "real": jnp.asarray(real)}


def row_losses(params, batch):
    error = jnp.tanh(batch["x"] @ params["w"] + params["b"][None]) - batch["y"]
    return jnp.sum(error**2, axis=1)


def loss_fn(params, batch):
    return ja.mean(row_losses(params, batch), where=batch["real"])


def per_example_grads(params, batch):
    """`[rows, ...]`, by `vmap(grad)` over the whole batch."""

    def one(params, row):
        return row_losses(params, jax.tree.map(lambda x: x[None], row))[0]

    return jax.vmap(jax.grad(one), in_axes=(None, 0))(params, batch)


@functools.cache
def answer(clip_norm=CLIP):
    """The sum of the clipped gradients of the real rows, in float64; and how many there are."""
    with jax.enable_x64(True):
        params, batch = problem()
        grads = jax.device_get(jax.jit(per_example_grads)(params, batch))
        real = np.flatnonzero(batch["real"])
    flat = [g.reshape(ROWS, -1) for g in jax.tree.leaves(grads)]
    norms = np.sqrt(sum((g**2).sum(axis=1) for g in flat))
    factors = np.minimum(1, clip_norm / norms)
    assert 2 < np.sum(factors[real] < 1) < len(real) - 2  # some are clipped, some are not
    sums = jax.tree.map(lambda g: np.tensordot(factors[real], g[real], axes=1), grads)
    return sums, len(real), norms


def deviation(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b)) for a, b in pairs)


@pytest.mark.parametrize(
    ("cut", "dtype"),
    [
        pytest.param(cut, dtype, marks=() if 5 in cut.values() else pytest.mark.slow)
        for cut in CUTS
        for dtype in TOLERANCE
    ],
    ids=str,
)
def test_clipped_sums(cut, dtype):
    sums, number, _ = answer()
    with jax.enable_x64(dtype == "float64"):
        f = jax.jit(ja.accumulate(ja.per_example.clip(loss_fn, CLIP), **cut))
        got = f(*problem(dtype))
        assert got.weight == number
        assert deviation(got.grads, sums) < TOLERANCE[dtype]
        window = ja.finalize(got)
        assert deviation(window.grads, jax.tree.map(lambda g: g / number, sums)) < TOLERANCE[dtype]
        params, batch = problem(dtype)
        want = np.mean(np.asarray(row_losses(params, batch))[np.flatnonzero(batch["real"])])
        np.testing.assert_allclose(window.loss, want, rtol=TOLERANCE[dtype])


def test_the_denominator_is_the_expected_batch(x64):
    """Poisson sampling: whatever was drawn, the sum is over the expected number."""
    sums, _, _ = answer()
    f = ja.value_and_grad(ja.per_example.clip(loss_fn, CLIP), num_microbatches=5)
    _, grads = jax.jit(f)(*problem(), denominators=32.0)
    assert deviation(grads, jax.tree.map(lambda g: g / 32, sums)) < 1e-12


def test_a_batch_of_padding_alone():
    params, batch = problem("float32")
    batch = {**batch, "real": jnp.zeros(ROWS, bool), "x": jnp.full((ROWS, FEATURES), jnp.nan)}
    f = jax.jit(ja.value_and_grad(ja.per_example.clip(loss_fn, CLIP), num_microbatches=2))
    _, grads = f(params, batch, denominators=32.0)
    assert all((g == 0).all() for g in jax.tree.leaves(grads))


def on_devices(params, batch, *, check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    f = ja.accumulate(ja.per_example.clip(loss_fn, CLIP), num_microbatches=2, axis_name="data")
    run = jax.shard_map(
        lambda p, b: (lambda s: (s.grads, s.weight))(f(p, b)),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    return jax.jit(run)(params, batch)


def spmd(params, batch, *, types):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(types,))
    clipped = ja.per_example.clip(loss_fn, CLIP)
    with jax.set_mesh(mesh):
        f = ja.accumulate(clipped, num_microbatches=2, spmd_axis_name="data")
        sums = jax.jit(f)(params, jax.device_put(batch, P("data")))
    return sums.grads, sums.weight


ROUTES = {
    "checked": functools.partial(on_devices, check_vma=True),
    "unchecked": functools.partial(on_devices, check_vma=False),
    "spmd auto": functools.partial(spmd, types=AxisType.Auto),
    "spmd explicit": functools.partial(spmd, types=AxisType.Explicit),
}


@pytest.mark.parametrize("route", ROUTES)
def test_devices(route, x64):
    sums, number, _ = answer()
    grads, weight = ROUTES[route](*problem())
    assert weight == number
    assert deviation(grads, sums) < 1e-12


def test_one_reduction_and_none_in_a_loop():
    params, batch = problem("float32")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    clipped = ja.per_example.clip(loss_fn, CLIP)
    f = ja.value_and_grad(clipped, num_microbatches=3, axis_name="data")
    run = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    ja.audit(run, params, batch, min_bytes=1).assert_deferred()


def test_equals_optax(x64):
    """Optax's aggregation without noise, and `micro_grad` with a clipping transformation."""
    params, batch = problem(padded=False)
    f = ja.value_and_grad(ja.per_example.clip(loss_fn, CLIP), num_microbatches=4)
    _, grads = jax.jit(f)(params, batch)
    aggregate = optax.contrib.differentially_private_aggregate(CLIP, 0.0, key=0)
    want, _ = aggregate.update(per_example_grads(params, batch), aggregate.init(params))
    assert deviation(grads, want) < 1e-12

    def clip_one(grads):
        scale = jnp.minimum(1, CLIP / optax.tree.norm(grads))
        return jax.tree.map(lambda g: g * scale, grads)

    micro = optax.microbatching.micro_grad(
        lambda p, b: jnp.sum(row_losses(p, b)), microbatch_size=6, transform_fn=clip_one
    )
    sums, _ = micro(params, batch)
    assert deviation(grads, jax.tree.map(lambda g: g / ROWS, sums)) < 1e-12


def test_one_forward_and_one_backward_for_each_example():
    calls = []

    @jax.custom_vjp
    def layer(x):
        jax.debug.callback(lambda x: calls.append("forward"), x)
        return jnp.tanh(x)

    def backward(x, ct):
        jax.debug.callback(lambda x: calls.append("backward"), x + ct)  # of each example
        return (ct * (1 - jnp.tanh(x) ** 2),)

    layer.defvjp(lambda x: (layer(x), x), backward)
    clipped = ja.per_example.clip(lambda w, b: ja.mean(layer(b["x"] @ w["w"])), CLIP)
    params, batch = problem("float32")
    f = jax.jit(ja.value_and_grad(clipped, num_microbatches=4))
    jax.block_until_ready(f(params, batch))
    jax.effects_barrier()
    assert (calls.count("forward"), calls.count("backward")) == (ROWS, ROWS)


def test_memory_is_that_of_one_micro_batch():
    params = {"w": jnp.zeros((256, 64)), "b": jnp.zeros(64)}
    batch = {"x": jnp.ones((64, 256)), "y": jnp.ones((64, 64)), "real": jnp.ones(64, bool)}
    clipped = ja.per_example.clip(loss_fn, CLIP)

    def temporaries(number):
        f = jax.jit(ja.value_and_grad(clipped, num_microbatches=number))
        return f.lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(16) < temporaries(1) / 4


def test_terms_and_frozen_leaves(x64):
    """Several terms are one loss of the example; integer leaves have no gradient."""
    params, batch = problem()
    params = {**params, "steps": jnp.int32(3)}

    def terms(params, batch):
        penalty = jnp.sum(params["w"] ** 2)
        return {"fit": loss_fn(params, batch), "penalty": 0.1 * ja.Mean(penalty, 1.0)}

    f = ja.accumulate(ja.per_example.clip(terms, 1e9), num_microbatches=5)
    sums = jax.jit(f)(params, batch)
    assert sums.weight == ROWS  # the penalty counts for rows of padding as well

    def whole(moving):
        kept = jnp.where(batch["real"], row_losses(moving, batch), 0)
        return jnp.sum(kept) + ROWS * 0.1 * jnp.sum(moving["w"] ** 2)

    want = jax.grad(whole)({k: params[k] for k in "wb"})
    assert deviation({k: sums.grads[k] for k in "wb"}, want) < 1e-12
    assert sums.grads["steps"].dtype == jax.dtypes.float0


def test_several_differentiated_arguments(x64):
    params, batch = problem()

    def two(w, batch, b):
        return loss_fn({"w": w, "b": b}, batch)

    clipped = ja.per_example.clip(two, CLIP, argnums=(0, 2))
    f = ja.accumulate(clipped, num_microbatches=5, argnums=(0, 2))
    sums = jax.jit(f)(params["w"], batch, params["b"])
    assert deviation({"w": sums.grads[0], "b": sums.grads[1]}, answer()[0]) < 1e-12


def test_auxiliary_outputs_and_metrics(x64):
    params, batch = problem()

    def with_aux(params, batch):
        losses = row_losses(params, batch)
        aux = {
            "loss": jnp.sum(losses),  # a number for each example
            "sum": ja.Sum(jnp.sum(losses)),
            "mean": ja.mean(losses, where=batch["real"]),
            "max": ja.Max(jnp.max(losses)),
            "rows": ja.Concat(losses),
        }
        return ja.mean(losses, where=batch["real"]), aux

    clipped = ja.per_example.clip(with_aux, CLIP, has_aux=True, metrics_fn=optax.tree.norm)
    f = ja.value_and_grad(clipped, num_microbatches=5, has_aux=True)
    (loss, (aux, norms)), grads = jax.jit(f)(params, batch)
    losses = np.asarray(row_losses(params, batch))
    real = np.flatnonzero(batch["real"])
    np.testing.assert_allclose(aux["rows"], losses, rtol=1e-12)
    np.testing.assert_allclose(aux["loss"], losses, rtol=1e-12)
    np.testing.assert_allclose(aux["sum"], losses.sum(), rtol=1e-12)
    np.testing.assert_allclose(aux["max"], losses.max(), rtol=1e-12)
    np.testing.assert_allclose((aux["mean"], loss), [losses[real].mean()] * 2, rtol=1e-12)
    np.testing.assert_allclose(norms[real], answer()[2][real], rtol=1e-12)
    assert deviation(grads, jax.tree.map(lambda g: g / len(real), answer()[0])) < 1e-12


def test_transform(x64):
    params, batch = problem()
    squared = ja.per_example.transform(loss_fn, lambda g: jax.tree.map(jnp.square, g))
    sums = jax.jit(ja.accumulate(squared, num_microbatches=5))(params, batch)
    real = np.flatnonzero(batch["real"])
    want = jax.tree.map(lambda g: np.sum(g[real] ** 2, axis=0), per_example_grads(params, batch))
    assert deviation(sums.grads, want) < 1e-12
    ones = ja.per_example.transform(loss_fn, lambda g: jax.tree.map(jnp.ones_like, g))
    sums = jax.jit(ja.accumulate(ones, num_microbatches=5))(params, batch)
    np.testing.assert_array_equal(sums.grads["b"], [len(real)] * WIDTH)


def test_examples_that_are_not_finite():
    params, batch = problem("float32", padded=False)
    bad = {**batch, "y": batch["y"].at[3].set(jnp.nan)}
    good = {**batch, "real": batch["real"].at[3].set(False)}
    skipping = ja.per_example.clip(loss_fn, CLIP, skip_nonfinite=True)
    a = jax.jit(ja.accumulate(skipping, num_microbatches=4))(params, bad)
    b = jax.jit(ja.accumulate(skipping, num_microbatches=4))(params, good)
    assert a.weight == b.weight == ROWS - 1
    assert deviation(a.grads, b.grads) == 0
    plain = ja.per_example.clip(loss_fn, CLIP)
    c = jax.jit(ja.accumulate(plain, num_microbatches=4))(params, bad)
    assert np.isnan(c.grads["b"]).all()


def dropout_loss(params, batch, *, key=None):
    keys = batch["key"] if key is None else jax.random.split(key, len(batch["x"]))
    mask = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (FEATURES,)))(keys)
    return loss_fn(params, {**batch, "x": batch["x"] * mask})


def test_dropout_keys():
    """Case 55: keys in the batch do not depend on the cut; the call's key makes rows differ."""
    params, batch = problem("float32")
    batch["key"] = ja.batches.example_keys(jax.random.key(1), ROWS)
    f = lambda k: ja.accumulate(ja.per_example.clip(dropout_loss, CLIP), num_microbatches=k)  # noqa: E731
    a, b = (jax.jit(f(k))(params, batch).grads for k in (1, 5))
    assert deviation(a, b) < TOLERANCE["float32"]

    same_rows = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), batch)
    same_rows.pop("key")
    metrics = ja.per_example.clip(dropout_loss, CLIP, metrics_fn=lambda g: g["w"])
    run = jax.jit(ja.accumulate(metrics, num_microbatches=2, has_aux=True))
    masks = np.asarray(run(params, same_rows, key=jax.random.key(3)).aux.value) != 0
    assert len(np.unique(masks.reshape(ROWS, -1), axis=0)) > 8
    again = np.asarray(run(params, same_rows, key=jax.random.key(3)).aux.value) != 0
    np.testing.assert_array_equal(masks, again)


def test_bfloat16_parameters():
    params, batch = problem("float32")
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    f = jax.jit(ja.value_and_grad(ja.per_example.clip(loss_fn, CLIP), num_microbatches=4))
    _, grads = f(narrow, {**batch, "x": batch["x"].astype(jnp.bfloat16)})
    assert all(g.dtype == jnp.bfloat16 for g in jax.tree.leaves(grads))
    want = jax.tree.map(lambda g: g / answer()[1], answer()[0])
    assert deviation(jax.tree.map(np.float32, grads), want) < 0.05


# Noise.

NOISE = {"noise_multiplier": 1.5, "clip_norm": CLIP, "denominator": 32.0}
STD = 1.5 * CLIP / 32


@functools.cache
def noise_of(number, route=None):
    """Noisy minus clean gradient of a window of 40,000 parameters, with one key."""
    batch = {"x": jnp.ones((8, 200)), "y": jnp.ones((8, 200)), "real": jnp.ones(8, bool)}
    params = {"w": jnp.zeros((200, 200)), "b": jnp.zeros(200)}
    clipped = ja.per_example.clip(loss_fn, CLIP)

    def step(params, batch, **options):
        f = ja.value_and_grad(clipped, num_microbatches=number, **options)
        clean = f(params, batch, denominators=32.0)[1]
        return clean, ja.per_example.add_noise(clean, jax.random.key(5), **NOISE)

    if route is None:
        clean, noisy = jax.jit(step)(params, batch)
    else:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        run = jax.shard_map(
            lambda p, b: jax.tree.map(lambda x: x[None], step(p, b, axis_name="data")),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            check_vma=route,
        )
        clean, noisy = jax.jit(run)(params, batch)
        for leaf in jax.tree.leaves(noisy):  # the same on each device
            np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
        clean, noisy = jax.tree.map(lambda x: x[0], (clean, noisy))
    return np.asarray(noisy["w"], np.float64) - np.asarray(clean["w"], np.float64)


@pytest.mark.parametrize(
    ("number", "route"),
    [
        (8, None),
        (1, True),
        *[pytest.param(*x, marks=pytest.mark.slow) for x in [(2, None), (1, False)]],
    ],
)
def test_case_46_the_noise_depends_on_neither_cut_nor_devices(number, route):
    draw = noise_of(number, route)
    # The standard deviation of 40,000 normal numbers is known to 1 / sqrt(80,000).
    assert abs(draw.std() / STD - 1) < 5 / np.sqrt(2 * draw.size)
    assert abs(draw.mean()) < 5 * STD / np.sqrt(draw.size)
    np.testing.assert_allclose(draw, noise_of(1), atol=1e-6)


def test_noise_in_a_stream_and_in_a_step():
    """Once per window under `multi_steps`, new in each; the same scale in `train_step`."""
    params = jnp.zeros(20_000)
    tx = ja.multi_steps(
        optax.chain(ja.per_example.noise(jax.random.key(0), **NOISE), optax.sgd(1.0)), 4
    )
    state = tx.init(params)
    update = jax.jit(tx.update)
    windows = []
    for number in range(8):
        updates, state = update(jnp.zeros(20_000), state, params)
        if number % 4 == 3:
            windows.append(np.asarray(updates))
        else:
            assert not updates.any()
    assert state.inner_state[0].optimizer_step == 2
    for draw in windows:
        assert abs(draw.std() / STD - 1) < 5 / np.sqrt(2 * draw.size)
    assert abs(np.corrcoef(*windows)[0, 1]) < 5 / np.sqrt(20_000)

    clipped = ja.per_example.clip(lambda w, x: ja.mean(0 * w[0] * x), CLIP)
    noisy = optax.chain(ja.per_example.noise(jax.random.key(0), **NOISE), optax.sgd(1.0))
    for number in (1, 4):
        init, step = ja.train_step(clipped, noisy, num_microbatches=number, donate=False)
        moved, _, _ = step(params, init(params), jnp.ones(4))
        np.testing.assert_allclose(moved, windows[0], atol=1e-7)


def private():
    """A private optimizer on three parameters, and what it makes of three empty draws."""
    tx = optax.chain(ja.per_example.noise(jax.random.key(1), **NOISE), optax.sgd(1.0, momentum=0.5))
    params = jnp.array([1.0, -0.0, 3.0])
    state, seen = tx.init(params), []
    for _ in range(3):
        updates, state = tx.update(jnp.zeros(3), state, params)
        params = optax.apply_updates(params, updates)
        seen.append(np.asarray(params))
    return tx, seen


def private_loss(w, x):
    return ja.mean(w.sum() * x, where=x > 0)


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({}, {}),
        ({"skip_nonfinite": "window", "max_bad_windows": 9}, {}),
        ({"normalize": False}, {"denominators": 32.0}),
        ({"every": 1}, {}),
    ],
    ids=["weighted", "skipping", "expected size", "one"],
)
def test_case_69_an_empty_draw_steps_in_a_stream(options, made):
    """Nothing sampled in either call of a window: noise on the zero gradient, as without it."""
    inner, want = private()
    every = options.get("every", 2)
    tx = ja.multi_steps(inner, **{"every": every, **options})
    f = ja.accumulate(ja.per_example.clip(private_loss, CLIP), num_microbatches=2)
    params = jnp.array([1.0, -0.0, 3.0])
    state = tx.init(params)
    for number, end in enumerate(want):
        for _ in range(every):
            updates, state = tx.update(f(params, jnp.zeros(4), **made), state, params)
            params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(params, end)
        assert ja.has_updated(state)
        assert (state.optimizer_step, state.num_empty) == (number + 1, 0)
    updates, after = ja.flush(tx, state, params)  # no window is open: no noise
    assert not ja.has_updated(after)
    np.testing.assert_array_equal(optax.apply_updates(params, updates), params)


@pytest.mark.parametrize("made", [{}, {"denominators": 32.0}], ids=["weighted", "expected size"])
def test_case_69_an_empty_draw_steps_in_a_step(made):
    inner, want = private()
    clipped = ja.per_example.clip(private_loss, CLIP)
    init, step = ja.train_step(clipped, inner, num_microbatches=2, donate=False)
    params = jnp.array([1.0, -0.0, 3.0])
    state = init(params)
    for end in want:
        params, state, info = step(params, state, jnp.zeros(4), **made)
        np.testing.assert_array_equal(params, end)
        assert info.updated
    assert state.optimizer_step == 3


@pytest.mark.parametrize("route", ["stream", "step"])
def test_a_private_window_that_is_left_out_steps_too(route):
    """As on a zero gradient; it is counted as left out all the same."""
    inner, want = private()
    params, bad = jnp.array([1.0, -0.0, 3.0]), jnp.array([1.0, jnp.inf, 1.0, 1.0])
    options = {"skip_nonfinite": "window", "max_bad_windows": 2}
    if route == "step":
        init, step = ja.train_step(private_loss, inner, num_microbatches=2, donate=False, **options)
        state = init(params)
        for end in want[:2]:
            params, state, _ = step(params, state, bad)
            np.testing.assert_array_equal(params, end)
    else:
        tx = ja.multi_steps(inner, 2, **options)
        state = tx.init(params)
        for end in want[:2]:
            for weight in (1, 2):
                updates, state = tx.update(jnp.full(3, jnp.inf), state, params, weight=weight)
                params = optax.apply_updates(params, updates)
            np.testing.assert_array_equal(params, end)
    assert (state.num_dropped, state.num_bad_in_row, state.optimizer_step) == (2, 2, 2)
    assert state.diverged


def test_noise_keeps_types():
    grads = {
        "a": jnp.zeros(4, jnp.bfloat16),
        "n": jnp.int32(3),
        "c": jnp.zeros(9000, jnp.complex64),
    }
    noisy = ja.per_example.add_noise(grads, jax.random.key(0), noise_multiplier=2.0, clip_norm=1.0)
    assert jax.tree.map(lambda x: x.dtype, noisy) == jax.tree.map(lambda x: x.dtype, grads)
    assert noisy["n"] == 3
    for part in (noisy["c"].real, noisy["c"].imag):
        assert abs(np.std(part) / 2 - 1) < 5 / np.sqrt(2 * 9000)
    same = {"x": jnp.zeros(100), "y": jnp.zeros(100)}
    two = ja.per_example.add_noise(same, jax.random.key(0), noise_multiplier=1.0, clip_norm=1.0)
    assert not np.allclose(two["x"], two["y"])


class TestRefusals:
    def test_static_mistakes(self):
        clip = ja.per_example.clip
        with pytest.raises(TypeError, match=r"per_example.clip: `loss_fn` must be a function"):
            clip(3, 1.0)
        with pytest.raises(ValueError, match=r"per_example.clip: `clip_norm` must be positive"):
            clip(loss_fn, 0.0)
        for number in ("1", None, np.ones(2), 1j):
            for name, make in (
                ("clip_norm", lambda n: clip(loss_fn, n)),
                ("max_norm", norms.clip_by_global_norm),
            ):
                with pytest.raises(TypeError, match=f"`{name}` must be a positive number, got"):
                    make(number)
        scale = {"noise_multiplier": 1.0, "clip_norm": 1.0, "denominator": 1.0}
        for name in scale:
            with pytest.raises(ValueError, match=f"per_example.noise: `{name}` must be positive"):
                ja.per_example.noise(jax.random.key(0), **(scale | {name: -1.0}))
        with pytest.raises(TypeError, match=r"per_example.transform: `transform_fn` must be"):
            ja.per_example.transform(loss_fn, 1.0)
        with pytest.raises(TypeError, match=r"per_example.clip: the loss function must return"):
            clip(lambda w, x: jnp.sum(w * x), 1.0)(1.0, jnp.ones(3))
        with pytest.raises(
            ValueError, match=r"per_example.clip: `argnums` must not name the batch"
        ):
            clip(lambda w, x: ja.mean(w * x), 1.0, argnums=(0, 1))(1.0, jnp.ones(3))
        bad = ja.per_example.transform(lambda w, x: ja.mean(w * x), lambda g: (g, g))
        with pytest.raises(ValueError, match=r"per_example.transform: `transform_fn\(grads\)`"):
            bad(1.0, jnp.ones(3))
        for make in (
            lambda: ja.per_example.add_noise({}, None, noise_multiplier=1.0, clip_norm=1.0),
            lambda: ja.per_example.noise(None, noise_multiplier=1.0, clip_norm=1.0),
            lambda: ja.per_example.noise(3, noise_multiplier=1.0, clip_norm=1.0),
        ):
            with pytest.raises(TypeError, match="`key` must be one PRNG key"):
                make()

    def test_a_key_that_nothing_takes(self):
        f = ja.accumulate(ja.per_example.clip(loss_fn, CLIP), num_microbatches=2)
        with pytest.raises(TypeError, match="accumulate: `key=` was given"):
            f(*problem("float32"), key=jax.random.key(0))

    @pytest.mark.parametrize("jitted", [False, True])
    def test_differentiating_something_else(self, jitted):
        clipped = ja.per_example.clip(lambda w, x, c: ja.mean(c * w * x), 1.0)
        wrap = jax.jit if jitted else lambda f: f
        x = jnp.ones(4)
        with pytest.raises(ValueError, match="per_example: something that is not in `argnums`"):
            wrap(ja.value_and_grad(clipped, num_microbatches=2, argnums=2))(1.0, x, 2.0)
        with pytest.raises(ValueError, match="per_example: something that is not in `argnums`"):
            wrap(jax.grad(lambda c: clipped(1.0, x, c).value))(1.0)
        f = ja.value_and_grad(clipped, num_microbatches=2)
        assert wrap(f)(1.0, x, 2.0)[1] == 1


@pytest.mark.parametrize(
    "options",
    [
        {"accumulator": ja.accumulators.compensated()},
        {"skip_nonfinite": True},
        {"unroll": 2},
        {"spmd_axis_name": "data", "grad_specs": {"w": P(None, "data"), "b": P()}},
        {
            "spmd_axis_name": "data",
            "reduction": "scatter",
            "grad_specs": {"w": P(None, "data"), "b": P()},
        },
    ],
    ids=["compensated", "skipping", "unrolled", "parts", "scatter"],
)
def test_everything_that_a_window_offers(options, x64):
    """The clipped loss is a loss function like any other; sums in parts are clipped whole."""
    params, batch = problem()
    mesh = jax.make_mesh((3,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    with jax.set_mesh(mesh):
        f = ja.accumulate(ja.per_example.clip(loss_fn, CLIP), num_microbatches=4, **options)
        sums = jax.jit(f)(params, jax.device_put(batch, P("data")))
    assert sums.weight == answer()[1]
    assert deviation(ja.accumulators.read(sums.grads), answer()[0]) < 1e-12
