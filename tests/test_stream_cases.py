"""CASES.md, as far as the stream is concerned; each test is named by its case's number."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import OPTIMIZED, assert_close, assert_equal
from test_stream import assert_same_bits, spy, train

import jaxaccum as ja

SGD = optax.sgd(1.0)
ZERO = jnp.float32(0)


def scalars(*values):
    return [jnp.float32(v) for v in values]


def handed_over(tx_of, params, grads, **columns):
    """What the inner optimizer received in each of its runs."""
    received = []
    _, state = train(tx_of(spy(received)), params, grads, **columns)
    jax.effects_barrier()
    return received, state


# Denominators: (gradient sums, weights, the mean gradient of each window).


@pytest.mark.parametrize(
    ("every", "sums", "weights", "means"),
    [
        pytest.param(2, (6, 7), (3, 7), [1.3], id="1"),
        pytest.param(2, (5, 5, 5, 5), (5, 5, 5, 5), [1, 1], id="7"),
    ],
)
def test_denominators(every, sums, weights, means):
    received, _ = handed_over(
        lambda inner: ja.multi_steps(inner, every), ZERO, scalars(*sums), weight=weights
    )
    assert_equal([r["grad"] for r in received], means)


def test_case_13_all_tokens_masked():
    tx = ja.multi_steps(optax.adamw(0.1), 2)
    params, state = jnp.array([1.0, -0.0]), tx.init(jnp.zeros(2))
    held = params, state.inner_state
    params, state = train(tx, params, [jnp.zeros(2)] * 2, state=state, weight=[0, 0])
    assert_same_bits((params, state.inner_state), held)
    assert (state.num_empty, state.optimizer_step) == (1, 0)


def test_case_15_means_become_sums_by_selection():
    means = [ja.Mean.from_value(jnp.float32(np.nan), 0), ja.Mean.from_value(jnp.float32(1), 7)]
    params, _ = train(
        ja.multi_steps(SGD, 2), ZERO, [m.total for m in means], weight=[m.weight for m in means]
    )
    assert params == -1


def test_case_16_a_masked_nan_reaches_neither_value_nor_gradient():
    x = jnp.array([[1.0, jnp.nan, 3.0], [jnp.inf, 5.0, 7.0]])

    def loss_fn(w, row):
        # The mask at the source keeps 0 * nan out of the derivative of the multiply.
        kept = jnp.where(jnp.isfinite(row), row, 0.0)
        loss = ja.mean(w * kept, where=jnp.isfinite(row))
        return loss.total, loss

    grads, losses = zip(*[jax.grad(loss_fn, has_aux=True)(jnp.float32(2), r) for r in x])
    received, _ = handed_over(
        lambda inner: ja.multi_steps(inner, 2),
        ZERO,
        grads,
        weight=[loss.weight for loss in losses],
        value=losses,
    )
    assert_equal([(r["grad"], r["value"]) for r in received], [(4, 8)])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["gradient", "weight", "value"])
def test_case_17_the_window_after_a_bad_one_is_fresh(bad, where):
    def tx_of(inner):
        return ja.multi_steps(inner, 2)

    good = {"grads": scalars(1, 3), "weight": scalars(2, 5), "value": [ja.Mean(1.0, 2)] * 2}
    first = dict(good)
    if where == "gradient":
        first["grads"] = scalars(bad, 1)
    elif where == "weight":
        first["weight"] = scalars(1, bad)
    else:
        first["value"] = [ja.Mean(bad, 1.0), ja.Mean(1.0, 1.0)]
    both = {name: first[name] + good[name] for name in good}
    fresh, fresh_state = handed_over(tx_of, ZERO, **good)
    later, state = handed_over(tx_of, ZERO, **both)
    assert_same_bits(later[-1], fresh[-1])
    assert_same_bits(state._replace(optimizer_step=fresh_state.optimizer_step), fresh_state)


def test_case_18_a_bad_micro_batch_is_replaced_by_the_next():
    tx = ja.multi_steps(SGD, 4, skip_nonfinite=True)
    params, state = train(tx, ZERO, scalars(1, np.nan, 3, 5))
    assert (params, state.micro_step, state.weight, state.num_skipped) == (0, 3, 3, 1)
    params, state = train(tx, params, scalars(7), state=state)
    assert params == -4
    assert state.optimizer_step == 1


# Boundaries.


@pytest.mark.parametrize(
    ("grads", "weights", "mean"), [((2, 4), (1, 1), 3.0), ((6, 7), (3, 7), 1.3)]
)
def test_case_31_flush_of_a_partial_window(grads, weights, mean):
    tx = ja.multi_steps(SGD, 4)
    params, state = train(tx, ZERO, scalars(*grads), weight=weights)
    updates, state = ja.flush(tx, state, params)
    assert_equal(updates, -mean)
    assert ja.has_updated(state)


def test_case_32_the_tail_is_divided_by_its_own_length():
    tx = ja.multi_steps(SGD, 4)
    params, state = train(tx, ZERO, scalars(*[1] * 4, 2, 2, 5))
    updates, state = ja.flush(tx, state, params)
    assert (params, updates, state.optimizer_step) == (-1, -3, 2)


def test_case_33_too_few_micro_batches_change_nothing():
    start = jnp.array([0.5, -0.0])
    params, state = train(ja.multi_steps(SGD, 4), start, [jnp.ones(2)] * 3)
    assert_same_bits(params, start)
    assert (state.micro_step, state.optimizer_step) == (3, 0)
    assert not ja.has_updated(state)


@pytest.mark.parametrize("every", [1, 3, 4])
def test_case_34_updates_come_after_every_kth_micro_step(every):
    tx = ja.multi_steps(SGD, every)
    params, state, moved = ZERO, tx.init(ZERO), []
    for step in range(1, 13):
        before = params
        params, state = train(tx, params, scalars(1), state=state)
        moved.append(bool(params != before))
        assert moved[-1] == bool(ja.has_updated(state)) == (step % every == 0)


def test_case_35_nothing_leaks_into_the_next_epoch():
    tx = ja.multi_steps(SGD, 4)
    _, state = train(tx, ZERO, scalars(100, 100, 100))
    _, state = ja.flush(tx, state, ZERO)
    assert (state.grad_sum, state.weight, state.micro_step) == (0, 0, 0)
    params, _ = train(tx, ZERO, scalars(1, 2, 3, 4), state=state)
    assert params == -2.5


@pytest.mark.parametrize(
    ("every", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), ("4", TypeError)]
)
def test_case_37_bad_window_lengths_are_refused(every, error):
    with pytest.raises(error, match=r"multi_steps: `every`"):
        ja.multi_steps(SGD, every)


@pytest.mark.parametrize("every", [np.int8(2), np.int64(2), np.array(2), jnp.int32(2)])
def test_case_37_integers_of_any_kind_are_accepted(every):
    params, _ = train(ja.multi_steps(SGD, every), ZERO, scalars(1, 3))
    assert params == -2


@pytest.mark.parametrize("finish", ["update", "flush"])
def test_case_38_the_window_length_may_change_at_a_restart(finish):
    _, state = train(ja.multi_steps(SGD, 8), ZERO, scalars(1, 2, 3, 4, 5, 6))
    tx = ja.multi_steps(SGD, 4)
    if finish == "flush":
        updates, state = ja.flush(tx, state, ZERO)
    else:
        updates, state = tx.update(jnp.float32(7), state)
    assert updates == {"flush": -3.5, "update": -4}[finish]
    assert (state.micro_step, state.optimizer_step) == (0, 1)


@pytest.mark.parametrize("start", [(), (1, 1)], ids=["at the start", "after a window"])
def test_case_39_has_updated_is_false_after_a_skip(start):
    tx = ja.multi_steps(SGD, 2, skip_nonfinite=True)
    _, state = train(tx, ZERO, scalars(*start, np.nan))
    assert (state.micro_step, state.num_skipped) == (0, 1)
    assert not ja.has_updated(state)


# Schedules and optimizers.


def test_case_40_schedules_count_optimizer_steps():
    inner = optax.sgd(lambda step: 1.0 / (1 + step))
    params, _ = train(ja.multi_steps(inner, 4), ZERO, scalars(*[1] * 8))
    assert params == -1.5


def test_case_41_adam_is_frozen_inside_a_window():
    tx = ja.multi_steps(optax.adam(0.1), 4)
    params, state = train(tx, jnp.ones(2), [jnp.full(2, float(k)) for k in range(4)])
    held = state.inner_state
    for _ in range(3):
        params, state = train(tx, params, [jnp.full(2, 9.0)], state=state)
        assert_same_bits(state.inner_state, held)
    _plain, plain_state = train(optax.adam(0.1), jnp.ones(2), [jnp.full(2, 1.5)])
    _, after = train(tx, jnp.ones(2), [jnp.full(2, float(k)) for k in range(4)])
    assert_same_bits(after.inner_state, plain_state)


def parameter_ema(decay):
    """The last member of a chain: averages what the parameters become, from the first on."""

    def update_fn(updates, state, params=None):
        new = optax.apply_updates(params, updates)
        started, average = state
        return updates, (
            jnp.bool_(True),
            jnp.where(started, decay * average + (1 - decay) * new, new),
        )

    return optax.GradientTransformation(lambda p: (jnp.bool_(False), jnp.zeros_like(p)), update_fn)


def test_case_42_an_average_of_parameters_counts_windows():
    tx = ja.multi_steps(optax.chain(SGD, parameter_ema(0.5)), 4)
    params, state = train(tx, ZERO, scalars(*[1] * 12))
    assert params == -3
    assert state.inner_state[-1][1] == -2.25


NONLINEAR = {
    "muon": lambda: optax.contrib.muon(0.5),
    "sign": lambda: optax.chain(optax.scale_by_sign(), optax.scale(-0.5)),
    "lion": lambda: optax.lion(0.5),
    "normalize": lambda: optax.chain(optax.contrib.normalize(), optax.scale(-0.5)),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_case_43_nonlinear_transformations_see_one_gradient_per_window(name):
    grads = [jnp.array([[3.0, -1.0], [0.0, 2.0]]), jnp.array([[1.0, 3.0], [2.0, -6.0]])]
    received = []
    tx = ja.multi_steps(optax.chain(spy(received), NONLINEAR[name]()), 2)
    params, _ = train(tx, jnp.ones((2, 2)), grads * 2)
    jax.effects_barrier()
    assert len(received) == 2
    plain, _ = train(NONLINEAR[name](), jnp.ones((2, 2)), [(grads[0] + grads[1]) / 2] * 2)
    assert_close(params, np.float64(plain))


def test_case_44_a_plateau_is_judged_by_the_windows_mean_loss():
    """The window's losses are 3, 2, 7; the last micro-batches' are 9, 5, 1."""
    received = []
    inner = optax.chain(SGD, optax.contrib.reduce_on_plateau(patience=5), spy(received))
    values = [ja.Mean(v, 1.0) for v in (-3.0, 9.0, -1.0, 5.0, 13.0, 1.0)]
    _, state = train(ja.multi_steps(inner, 2), ZERO, scalars(*[1] * 6), value=values)
    jax.effects_barrier()
    assert [float(r["value"]) for r in received] == [3, 2, 7]
    plateau = state.inner_state[1]
    assert (plateau.best_value, plateau.plateau_count) == (2, 1)


def test_case_45_clipping_sees_the_large_batch():
    tx = ja.multi_steps(optax.chain(optax.clip_by_global_norm(1.0), SGD), 2)
    params, _ = train(tx, jnp.zeros(2), [jnp.array([2.0, 0.0]), jnp.array([0.0, 2.0])])
    assert_close(params, -np.full(2, np.sqrt(0.5)))


def test_case_46_noise_is_added_once_per_window():
    def inner():
        return optax.add_noise(0.25, 0.0, key=1)

    noise, _ = train(inner(), jnp.zeros(512), [jnp.zeros(512)])
    assert abs(np.std(noise) - 0.5) < 5 * 0.5 / np.sqrt(2 * 512)
    for every in (1, 8):
        params, _ = train(ja.multi_steps(inner(), every), jnp.zeros(512), [jnp.zeros(512)] * every)
        assert_same_bits(params, noise)


@pytest.mark.parametrize("nesting", ["inside", "outside"])
def test_case_47_constant_hyperparameters_agree_inside_and_outside(nesting):
    def factory(learning_rate):
        return optax.adam(learning_rate)

    if nesting == "inside":
        tx = ja.multi_steps(optax.inject_hyperparams(factory)(0.5), 2)
    else:
        tx = optax.inject_hyperparams(
            lambda learning_rate: ja.multi_steps(factory(learning_rate), 2)
        )(0.5)
    params, _ = train(tx, ZERO, scalars(1, 2, 3, 4))
    plain, _ = train(optax.adam(0.5), ZERO, scalars(1.5, 3.5))
    assert_close(params, np.float64(plain))


def test_case_47_an_injected_schedule_counts_the_calls_of_what_it_wraps():
    """Inside, calls are optimizer steps; outside they are micro-steps."""

    def schedule(count):
        return 1.0 / (1 + count)

    inside = ja.multi_steps(optax.inject_hyperparams(optax.sgd)(schedule), 4)
    outside = optax.inject_hyperparams(
        lambda learning_rate: ja.multi_steps(optax.sgd(learning_rate), 4)
    )
    grads = scalars(*[1] * 8)
    assert train(inside, ZERO, grads)[0] == -1.5
    assert train(outside(schedule), ZERO, grads)[0] == -(1 / 4 + 1 / 8)
    assert train(outside(lambda count: schedule(count // 4)), ZERO, grads)[0] == -1.5


FROZEN = {
    "masked": lambda tx: optax.masked(tx, {"w": True, "frozen": False}),
    "multi_transform": lambda tx: optax.multi_transform(
        {"train": tx, "freeze": optax.set_to_zero()}, {"w": "train", "frozen": "freeze"}
    ),
}


@pytest.mark.parametrize("name", FROZEN)
def test_case_48_frozen_parameters_get_no_sum(name):
    tx = FROZEN[name](ja.multi_steps(optax.adam(0.1), 2))
    params = {"w": jnp.ones(2), "frozen": jnp.ones(1000)}
    state = tx.init(params)
    assert max(np.size(x) for x in jax.tree.leaves(state)) == 2
    _, after = train(tx, params, [params, params])
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


# Precision.


def sums_handed_over(grads, dtype, **options):
    """Both the sum and the mean of a stream of gradients, scanned in one compiled loop."""
    results = []
    for normalize in (False, True):
        received = []
        tx = ja.multi_steps(spy(received), len(grads), normalize=normalize, **options)
        params = jnp.zeros(np.shape(grads)[1:], dtype)

        def step(state, grad):
            return (tx.update(grad, state, params)[1], None)

        jax.jit(lambda xs: jax.lax.scan(step, tx.init(params), xs), compiler_options=OPTIMIZED)(
            jnp.asarray(grads, dtype)
        )
        jax.effects_barrier()
        results.append(received[0]["grad"])
    return results


def test_case_49_a_thousand_bfloat16_ones():
    total, mean = sums_handed_over(np.ones(1000), jnp.bfloat16)
    assert (total, mean) == (1000, 1)


def test_case_49_two_thousand_bfloat16_gradients():
    grads = np.random.default_rng(0).uniform(0.5, 1.5, (2048, 16)).astype(jnp.bfloat16)
    total, mean = sums_handed_over(grads, jnp.bfloat16)
    want = np.sum(grads, axis=0, dtype=np.float64)
    np.testing.assert_allclose(total, want, rtol=1e-6)
    np.testing.assert_allclose(mean, want / 2048, rtol=1e-6)


def test_case_50_float16_sums_neither_overflow_nor_vanish():
    large, mean = sums_handed_over(np.full(4, 20000.0), jnp.float16)
    assert (large, mean) == (80000, 20000)
    small = np.float64(np.float16(2e-5))
    tiny, mean = sums_handed_over(np.full(1000, small), jnp.float16)
    # A running mean in float16 would add 2e-8, which is zero there.
    np.testing.assert_allclose([tiny, mean], [1000 * small, small], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "float64"])
def test_case_51_wide_gradients_keep_their_parts(dtype):
    parts = np.array([1 + 2**-20, 3 - 2**-20, 2.5])
    grads = parts if dtype == "float64" else parts * (1 - 2j)
    with jax.enable_x64(dtype != "complex64"):
        total, mean = sums_handed_over(grads, dtype)
    assert total.dtype == mean.dtype == dtype
    np.testing.assert_array_equal(total, np.sum(grads))
    np.testing.assert_allclose(mean, np.mean(grads), rtol=2 * np.finfo(dtype).eps)


def test_case_51_float32_gradients_stay_float32_beside_wide_ones(x64):
    total, mean = sums_handed_over(np.ones(2), jnp.float32)
    assert total.dtype == mean.dtype == np.float32


def test_case_52_the_residual_of_a_compensated_sum_survives_the_compiler():
    """A plain float32 sum stays at 1, since 1 + 2**-25 rounds to 1."""
    grads = np.array([1.0] + [2.0**-25] * 1023)
    exact = 1 + 1023 * 2.0**-25
    plain, _ = sums_handed_over(grads, jnp.float32)
    total, _ = sums_handed_over(grads, jnp.float32, accumulator=ja.accumulators.compensated())
    assert plain == 1
    assert total == np.float32(exact)
    tx = ja.multi_steps(SGD, 2048, accumulator=ja.accumulators.compensated())
    _, state = train(tx, ZERO, scalars(*grads))
    assert np.float64(state.grad_carry.total) + np.float64(state.grad_carry.error) == exact


def test_case_53_a_window_holds_more_than_two_to_the_31_tokens():
    target = 2**33 + 5
    tx = ja.multi_steps(SGD, ja.until_weight(target))
    _, state = train(tx, ZERO, scalars(*[1] * 5), weight=[2**31 - 1] * 4 + [8])
    assert (state.weight, state.optimizer_step) == (2**33 + 4, 0)
    _, state = train(tx, ZERO, scalars(1), state=state, weight=[1])
    assert (state.weight, state.optimizer_step) == (0, 1)


# Metrics and state.


def test_case_54_the_logged_loss_is_the_windows():
    received, _ = handed_over(
        lambda inner: ja.multi_steps(inner, 2),
        ZERO,
        scalars(6, 7),
        weight=[3, 7],
        value=[ja.Mean(6.0, 3), ja.Mean(7.0, 7)],
    )
    assert_equal(received[0]["value"], 1.3)


def test_case_60_two_models_have_their_own_windows():
    """A generator of window 2 and a critic of window 1, stepped in one compiled function."""
    streams = {"generator": ja.multi_steps(SGD, 2), "critic": ja.multi_steps(SGD, 1)}
    params = dict.fromkeys(streams, ZERO)
    states = {name: tx.init(ZERO) for name, tx in streams.items()}

    @jax.jit
    def step(params, states):
        pairs = {n: tx.update(jnp.float32(1), states[n], params[n]) for n, tx in streams.items()}
        params = {n: optax.apply_updates(params[n], pairs[n][0]) for n in streams}
        return params, {n: pairs[n][1] for n in streams}

    for _ in range(5):
        params, states = step(params, states)
    assert params == {"generator": -2, "critic": -5}
    assert (states["generator"].optimizer_step, states["critic"].optimizer_step) == (2, 5)


def test_case_60_two_windows_in_one_transformation():
    tx = optax.multi_transform(
        {"generator": ja.multi_steps(SGD, 2), "critic": ja.multi_steps(SGD, 1)},
        {"g": "generator", "c": "critic"},
    )
    params, _ = train(tx, {"g": ZERO, "c": ZERO}, [{"g": jnp.float32(1), "c": jnp.float32(1)}] * 5)
    assert params == {"g": -2, "c": -5}
