"""`train_step`: one window, one optimizer step, one record."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxaccum as ja


def loss_fn(params, batch):
    x, y, where = batch
    return ja.mean((x @ params["w"] + params["b"] - y) ** 2, where=where)


def problem(seed=0, rows=12):
    rng = np.random.default_rng(seed)
    params = {
        "w": jnp.asarray(rng.normal(size=3), jnp.float32),
        "b": jnp.float32(0.5),
    }
    where = rng.random(rows) < 0.7
    x, y = rng.normal(size=(rows, 3)), rng.normal(size=rows)
    return params, (x.astype(np.float32), y.astype(np.float32), where)


@pytest.mark.parametrize("cut", [{"num_microbatches": 5}, {"microbatch_size": 4}])
@pytest.mark.parametrize("optimizer", [optax.adamw(0.1), optax.sgd(0.1, momentum=0.9)])
def test_a_step_is_the_large_batch_step(cut, optimizer):
    chain = optax.chain(optax.clip_by_global_norm(0.1), optimizer)
    params, batch = problem()
    expected, expected_state = params, chain.init(params)
    init, step = ja.train_step(loss_fn, chain, donate=False, **cut)
    state = init(params)
    for seed in range(3):
        batch = problem(seed)[1]
        grads = jax.grad(lambda p, b=batch: loss_fn(p, b).value)(expected)
        updates, expected_state = chain.update(grads, expected_state, expected)
        norm = optax.tree.norm(grads)
        expected = optax.apply_updates(expected, updates)
        params, state, info = step(params, state, batch)
        np.testing.assert_allclose(info.grad_norm, norm, rtol=2e-6)
        assert info.weight == batch[2].sum()
        assert (info.optimizer_step, info.num_skipped, bool(info.updated)) == (seed + 1, 0, True)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.contrib.schedule_free_sgd(0.1)])
def test_donated_steps_run_on(optimizer):
    params, batch = problem()
    init, step = ja.train_step(loss_fn, optimizer, num_microbatches=3)
    state = init(params)
    before = jax.tree.map(jnp.copy, params)
    for _ in range(4):
        params, state, info = step(params, state, batch)
    assert info.optimizer_step == 4
    assert not np.array_equal(params["w"], before["w"])


def test_a_window_without_weight_changes_nothing():
    params, (x, y, where) = problem()
    init, step = ja.train_step(loss_fn, optax.adamw(0.1), num_microbatches=3, donate=False)
    state = init(params)
    after, after_state, info = step(params, state, (x, y, np.zeros_like(where)))
    assert not info.updated
    assert np.isnan(info.loss)
    assert (info.weight, info.grad_norm, info.optimizer_step) == (0, 0, 0)
    for a, b in zip(
        jax.tree.leaves((params, state)), jax.tree.leaves((after, after_state)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_tokens_are_counted_past_two_billion():
    init, step = ja.train_step(
        lambda w, x: ja.Mean(jnp.sum(w * x), jnp.int32(2**30 + 1)),
        optax.sgd(0.0),
        num_microbatches=1,
    )
    w = jnp.float32(1)
    state = init(w)
    for _ in range(5):
        w, state, info = step(w, state, jnp.ones(2))
    assert int(info.tokens_seen) == 5 * (2**30 + 1)


def test_skipped_micro_batches_are_reported():
    params, (x, y, where) = problem()
    x[4] = np.nan
    where[:] = True
    init, step = ja.train_step(
        loss_fn, optax.sgd(0.1), num_microbatches=12, skip_nonfinite=True, donate=False
    )
    new, _, info = step(params, init(params), (x, y, where))
    keep = np.arange(12) != 4
    clean = ja.train_step(loss_fn, optax.sgd(0.1), num_microbatches=11, donate=False)
    want, _, _ = clean.step(params, clean.init(params), (x[keep], y[keep], where[keep]))
    assert (info.num_skipped, info.num_microbatches, info.weight) == (1, 11, 11)
    np.testing.assert_allclose(new["w"], want["w"], rtol=2e-6)


def test_integer_parameters_are_left_alone():
    params = {"w": jnp.float32(2), "steps": jnp.int32(7)}
    init, step = ja.train_step(
        lambda p, x: ja.mean(p["w"] * x), optax.adam(0.1), num_microbatches=2
    )
    new, _, _ = step(params, init(params), jnp.ones(4))
    assert new["steps"] == 7
    assert new["steps"].dtype == jnp.int32
    assert new["w"] < 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_keep_their_dtype(dtype):
    w = jnp.ones(3, dtype)
    init, step = ja.train_step(lambda w, x: ja.mean(x @ w), optax.adamw(0.1), num_microbatches=2)
    state = init(w)
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for _ in range(2):
        w, state, _ = step(w, state, jnp.ones((4, 3), dtype))
    assert w.dtype == dtype
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == kinds


def test_the_optimizer_is_offered_the_windows_loss():
    plateau = optax.contrib.reduce_on_plateau(patience=1)
    init, step = ja.train_step(
        lambda w, x: ja.mean(w * x), optax.chain(optax.sgd(0.0), plateau), num_microbatches=2
    )
    w = jnp.float32(1)
    _, state, _ = step(w, init(w), jnp.array([1.0, 3.0]))
    assert optax.tree.get(state, "best_value") == 2


def test_several_terms_and_auxiliary_outputs():
    def several(w, x):
        return {"fit": ja.mean(w * x), "penalty": ja.Mean(w * w, 1.0)}, {"largest": ja.Max(x.max())}

    init, step = ja.train_step(several, optax.sgd(1.0), num_microbatches=2, has_aux=True)
    w = jnp.float32(3)
    w, _, info = step(w, init(w), jnp.array([1.0, 3.0, 2.0]))
    assert w == 3 - (2 + 6)
    assert info.aux == {"largest": 3}
    assert int(info.tokens_seen) == 3


def test_keys_and_real_micro_batches_reach_the_window():
    def noisy(w, x, key):
        return ja.mean(w * x * jax.random.uniform(key, x.shape))

    init, step = ja.train_step(noisy, optax.sgd(1.0), num_microbatches=4, donate=False)
    w, x = jnp.float32(0), jnp.ones(4)
    run = [step(w, init(w), x, key=jax.random.key(k), num_real=2)[0] for k in (0, 0, 1)]
    assert run[0] == run[1] != run[2]


@pytest.mark.parametrize(
    ("call_fn", "message"),
    [
        (lambda: ja.train_step(loss_fn, None, num_microbatches=1), "`optimizer` must be"),
        (lambda: ja.train_step(loss_fn, optax.sgd(1.0)), "exactly one of"),
        (
            lambda: ja.train_step(loss_fn, optax.sgd(1.0), num_microbatches=1, argnums=1),
            "`argnums` has no meaning here",
        ),
    ],
)
def test_wrong_arguments_are_refused_at_once(call_fn, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call_fn()


def test_a_window_that_was_made_already():
    """It brings its options with it; others are asked for where it was made."""
    params, batch = {"w": jnp.float32(1)}, jnp.array([1.0, 2.0, 3.0, jnp.nan])

    def loss_fn(params, x):
        return ja.mean(params["w"] * x), ja.Sum(x)

    options = {"num_microbatches": 4, "has_aux": True, "skip_nonfinite": True}
    made = ja.train_step(ja.accumulate(loss_fn, **options), optax.sgd(0.1), donate=False)
    plain = ja.train_step(loss_fn, optax.sgd(0.1), donate=False, **options)
    got, want = (step(params, init(params), batch) for init, step in (made, plain))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, got, want))
    assert got[2].num_skipped == 1
    window_fn = ja.accumulate(loss_fn, num_microbatches=2)
    with pytest.raises(TypeError, match=r"`unroll` is an option of the window.*`ja.accumulate`"):
        ja.train_step(window_fn, optax.sgd(0.1), unroll=2)
    with pytest.raises(ValueError, match="`max_bad_windows` counts windows that are left out"):
        ja.train_step(window_fn, optax.sgd(0.1), max_bad_windows=2)
    scale = ja.loss_scaling.static(8.0)
    with_scale = ja.train_step(
        ja.accumulate(loss_fn, num_microbatches=4, has_aux=True),
        optax.sgd(0.1),
        loss_scale=scale,
        donate=False,
    )
    _, state, _ = with_scale.step(params, with_scale.init(params), batch)
    assert state.num_dropped == 1
