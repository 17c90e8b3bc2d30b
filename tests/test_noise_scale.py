"""The gradient noise scale: its exact value, its truth on a known problem, and what it costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from jax.sharding import PartitionSpec as P

import jaxaccum as ja

EPS = float(jnp.finfo(jnp.float32).eps)
# Each row is the gradient of one example, so a micro-batch's gradient is the sum of its rows.
CASE = jnp.array([[3.0, 0.0, 3.0], [0.0, 7.0, 7.0]])


def linear_loss(w, rows):
    """`w . x`, with the weight in the last column."""
    return ja.Mean((rows[:, :-1] @ w).sum(), rows[:, -1].sum())


def noise_of(groups):
    """The estimates in float64 from `(S_k, n_k)`, by the formula of the unequal-size variance."""
    groups = [(np.asarray(s, np.float64), float(n)) for s, n in groups if n]
    total = sum(s for s, _ in groups)
    weight = sum(n for _, n in groups)
    mean = total / weight
    trace = sum(n * np.sum((s / n - mean) ** 2) for s, n in groups) / (len(groups) - 1)
    return trace, np.sum(mean**2) - trace / weight


def groups_of(w, batch, **cut):
    """`(S_k, n_k)` of each micro-batch of `oracles.token_loss`."""
    rows = oracles.cut_rows(len(batch["y"]), **cut)
    answers = [oracles.token_answer(w, oracles.take(batch, r)) for r in rows]
    return [
        (np.append(a.grads["w"], a.grads["b"]) * a.weight, a.weight) for a in answers if a.weight
    ]


def assert_noise(noise, trace, square, *, scale):
    """Within float32 rounding of the sums that were subtracted, whose size is `scale`."""
    np.testing.assert_allclose(noise.trace, trace, rtol=0, atol=64 * EPS * scale)
    np.testing.assert_allclose(noise.grad_sq_norm, square, rtol=0, atol=64 * EPS * scale)
    np.testing.assert_allclose(noise.value, np.divide(noise.trace, noise.grad_sq_norm), rtol=EPS)


def test_case():
    sums = ja.accumulate(linear_loss, num_microbatches=2, noise_scale=True)(jnp.zeros(2), CASE)
    noise = ja.noise_scale(sums)
    assert (sums.noise.square, sums.noise.num_groups) == (10, 2)
    np.testing.assert_allclose(noise.trace, 4.2, rtol=2 * EPS)
    np.testing.assert_allclose(noise.grad_sq_norm, 0.16, rtol=8 * EPS)
    np.testing.assert_allclose(noise.value, 4.2 / 0.16, rtol=8 * EPS)


@pytest.mark.parametrize("cut", oracles.CUTS, ids=oracles.cut_name)
def test_ragged_weights_and_uneven_cuts(cut):
    params, batch = oracles.problem(3)
    groups = groups_of(params, batch, **cut)
    sums = jax.jit(ja.accumulate(oracles.token_loss, noise_scale=True, **cut))(params, batch)
    noise = ja.noise_scale(sums)
    if len(groups) < 2:
        assert np.isnan([*noise]).all()
    else:
        assert_noise(noise, *noise_of(groups), scale=float(sums.noise.square))


def test_the_sums_themselves_do_not_change():
    params, batch = oracles.problem(1)
    plain = ja.accumulate(oracles.token_loss, num_microbatches=3)(params, batch)
    with_noise = ja.accumulate(oracles.token_loss, num_microbatches=3, noise_scale=True)
    assert plain.noise is None
    oracles.assert_equal(with_noise(params, batch).grads, plain.grads)


def test_without_it_there_is_no_equation_more():
    params, batch = oracles.problem(1)

    def text(**options):
        f = ja.accumulate(oracles.token_loss, num_microbatches=3, **options)
        return str(jax.make_jaxpr(f)(params, batch))

    assert text() == text(noise_scale=False)
    # With it gradients are added the ordinary way, in other equations than in place.
    ordinary = {"accumulator": ja.accumulators.plain(in_place=False)}
    assert len(text(noise_scale=True, **ordinary)) > len(text(**ordinary))


def test_empty_microbatches_are_no_groups():
    empty = jnp.zeros((1, 3))
    batch = jnp.concatenate([CASE, empty, empty])
    f = ja.accumulate(linear_loss, num_microbatches=4, noise_scale=True)
    sums = f(jnp.zeros(2), batch)
    assert sums.noise.num_groups == 2
    np.testing.assert_allclose(ja.noise_scale(sums).trace, 4.2, rtol=2 * EPS)


@pytest.mark.parametrize("rows", [0, 1])
def test_fewer_than_two_groups_have_no_spread(rows):
    batch = jnp.concatenate([CASE[:rows], jnp.zeros((2 - rows, 3))])
    f = ja.accumulate(linear_loss, num_microbatches=2, noise_scale=True)
    assert np.isnan([*ja.noise_scale(f(jnp.zeros(2), batch))]).all()


def test_skipped_microbatches_take_their_part_with_them():
    bad = jnp.array([[jnp.nan, 1.0, 5.0]])
    f = ja.accumulate(linear_loss, num_microbatches=3, noise_scale=True, skip_nonfinite=True)
    sums = f(jnp.zeros(2), jnp.concatenate([CASE[:1], bad, CASE[1:]]))
    assert (sums.num_skipped, sums.noise.num_groups) == (1, 2)
    np.testing.assert_allclose(ja.noise_scale(sums).trace, 4.2, rtol=2 * EPS)


def test_a_dropped_window_leaves_nothing():
    f = ja.accumulate(linear_loss, num_microbatches=2, noise_scale=True, skip_nonfinite="window")
    good, bad = f(jnp.zeros(2), CASE), f(jnp.zeros(2), CASE * jnp.array([[1.0], [jnp.nan]]))
    assert np.isnan([*ja.noise_scale(bad)]).all()
    np.testing.assert_allclose(ja.noise_scale(ja.merge(bad, good)).trace, 4.2, rtol=2 * EPS)


def test_loss_scaling_does_not_reach_it():
    f = ja.accumulate(linear_loss, num_microbatches=2, noise_scale=True)
    sums = f(jnp.zeros(2), CASE, loss_scale=jnp.float32(1024))
    np.testing.assert_allclose(ja.noise_scale(sums).trace, 4.2, rtol=2 * EPS)


def test_num_real_counts_only_what_ran():
    f = ja.accumulate(linear_loss, num_microbatches=3, noise_scale=True)
    sums = f(jnp.zeros(2), jnp.concatenate([CASE, 9 * CASE[:1]]), num_real=jnp.int32(2))
    np.testing.assert_allclose(ja.noise_scale(sums).trace, 4.2, rtol=2 * EPS)


def test_merged_sums_are_one_window():
    params, batch = oracles.problem(5, rows=8)
    f = ja.accumulate(oracles.token_loss, microbatch_size=1, noise_scale=True)
    whole = f(params, batch)
    parts = [f(params, oracles.take(batch, r)) for r in (np.arange(3), np.arange(3, 8))]
    merged = ja.noise_scale(ja.merge(*parts))
    groups = groups_of(params, batch, microbatch_size=1)
    assert_noise(merged, *noise_of(groups), scale=float(whole.noise.square))
    assert_noise(merged, *ja.noise_scale(whole)[:2], scale=float(whole.noise.square))
    with pytest.raises(ValueError, match="merge"):
        ja.merge(parts[0], ja.accumulate(oracles.token_loss, microbatch_size=1)(params, batch))


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_devices_hold_groups_of_their_own(axis_type):
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    params, batch = oracles.problem(7, rows=16)
    params, batch = jax.tree.map(jnp.asarray, (params, batch))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(batch, P("data"))
        f = ja.accumulate(
            oracles.token_loss, num_microbatches=2, spmd_axis_name="data", noise_scale=True
        )
        sums = jax.jit(f)(params, sharded)
        noise = ja.noise_scale(sums)
    groups = []
    for device in range(4):
        own = oracles.take(batch, np.arange(4 * device, 4 * device + 4))
        groups += groups_of(params, own, num_microbatches=2)
    assert sums.noise.num_groups == len(groups)
    assert_noise(noise, *noise_of(groups), scale=float(sums.noise.square))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_one_reduction_more_scalars(check_vma):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    f = ja.accumulate(linear_loss, num_microbatches=1, axis_name="data", noise_scale=True)
    local = jax.shard_map(
        lambda w, rows: ja.noise_scale(f(w, rows)),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    with jax.set_mesh(mesh):
        w = jnp.zeros(66)  # so that the scalars are little beside one gradient
        rows = jax.device_put(jnp.concatenate([jnp.zeros((2, 64)), CASE], 1), P("data"))
        noise = jax.jit(local)(w, rows)
        report = ja.audit(local, w, rows)
    np.testing.assert_allclose(noise.trace, 4.2, rtol=2 * EPS)
    report.assert_deferred()


@pytest.mark.parametrize("reduction", ["defer", "scatter"])
def test_parameters_in_parts(reduction):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.zeros(2), P("data"))
        f = ja.accumulate(
            linear_loss,
            num_microbatches=1,
            spmd_axis_name="data",
            param_specs=P("data"),
            reduction=reduction,
            noise_scale=True,
        )
        noise = jax.jit(lambda w, rows: ja.noise_scale(f(w, rows)))(w, CASE)
    np.testing.assert_allclose(noise.trace, 4.2, rtol=2 * EPS)
    np.testing.assert_allclose(noise.grad_sq_norm, 0.16, rtol=8 * EPS)


def test_only_summed_gradients_of_parameters_count():
    def loss_fn(params, rows):
        return ja.Mean((rows[:, :-1] @ params["w"]).sum() + 5 * params["s"], rows[:, -1].sum())

    f = ja.accumulate(
        loss_fn,
        num_microbatches=2,
        argnums=(0,),
        grad_reducers=({"w": ja.Sum, "s": ja.Last},),
        noise_scale=True,
    )
    params = {"w": jnp.zeros(2), "s": jnp.float32(0)}
    np.testing.assert_allclose(ja.noise_scale(f(params, CASE)).trace, 4.2, rtol=2 * EPS)

    def constant_weight(w, rows):
        return ja.Mean((rows[:, :-1] @ w).sum(), jax.lax.stop_gradient(rows[:, -1].sum()))

    both = ja.accumulate(constant_weight, num_microbatches=2, argnums=(0, 1), noise_scale=True)
    noise = ja.noise_scale(both(jnp.zeros(2), CASE))
    np.testing.assert_allclose(noise.trace, 4.2, rtol=2 * EPS)


def test_narrow_gradients_are_squared_in_float32():
    def loss_fn(w, rows):
        return ja.mean((rows @ w).astype(jnp.float32))

    f = ja.accumulate(loss_fn, microbatch_size=1, noise_scale=True)
    rows = jnp.array([[1000.0], [3000.0]], jnp.float16)  # the squares overflow float16
    noise = ja.noise_scale(f(jnp.zeros(1, jnp.float16), rows))
    np.testing.assert_allclose(noise.trace, 2e6, rtol=2 * EPS)
    np.testing.assert_allclose(noise.grad_sq_norm, 3e6, rtol=2 * EPS)


def test_complex_parameters():
    def loss_fn(z, rows):
        return ja.Mean(jnp.real(rows @ z).sum(), rows.shape[0])

    f = ja.accumulate(loss_fn, microbatch_size=1, noise_scale=True)
    noise = ja.noise_scale(f(jnp.zeros(1, jnp.complex64), jnp.array([[1.0 + 2j], [3.0 - 2j]])))
    np.testing.assert_allclose(noise.trace, 10, rtol=2 * EPS)  # |(2, -4)|**2 / 2
    np.testing.assert_allclose(noise.grad_sq_norm, 4 - 5, rtol=4 * EPS)


TRUE_MEAN = np.array([0.5, -0.25, 0.0, 1.0])
TRUE_ROOT = np.array([[2.0, 0, 0, 0], [0.5, 1, 0, 0], [0, 0.3, 0.5, 0], [1, 0, 0, 3]])


@functools.cache
def estimates(num_windows=8000, num_microbatches=8):
    """Estimates from windows of Gaussian gradients with a known covariance and uneven weights."""
    rows = 32
    f = ja.accumulate(
        lambda w, b: ja.mean(b["x"] @ w, where=b["kept"]),
        num_microbatches=num_microbatches,
        noise_scale=True,
    )

    def window(key):
        k_x, k_kept = jax.random.split(key)
        x = TRUE_MEAN[None] + jax.random.normal(k_x, (rows, 4)) @ TRUE_ROOT.T
        kept = jax.random.bernoulli(k_kept, jnp.linspace(0.2, 1.0, rows))
        return ja.noise_scale(f(jnp.zeros(4), {"x": x, "kept": kept}))

    return jax.jit(jax.vmap(window))(jax.random.split(jax.random.key(0), num_windows))


def test_the_estimates_are_unbiased():
    noise = estimates()
    for values, true in ((noise.trace, np.sum(TRUE_ROOT**2)), (noise.grad_sq_norm, 1.3125)):
        values = np.asarray(values, np.float64)
        error = values.std() / len(values) ** 0.5
        assert error < 0.02 * true  # else the next line would say little
        assert abs(values.mean() - true) < 3 * error


def test_smoothing_finds_the_true_noise_scale():
    true = np.sum(TRUE_ROOT**2) / 1.3125
    noise = estimates()

    def step(tracker, one):
        tracker = ja.diagnostics.smooth_noise(tracker, one, decay=0.9995)
        return tracker, tracker.noise_scale.value

    _, values = jax.lax.scan(step, ja.diagnostics.noise_tracker(), noise)
    assert abs(values[-1] - true) < 0.1 * true
    # The mean of the quotients does not: single denominators come near zero.
    assert abs(np.mean(noise.value) - true) > 0.1 * true


def test_a_window_that_measured_nothing_leaves_the_tracker():
    start = ja.diagnostics.noise_tracker()
    assert np.isnan([*start.noise_scale]).all()
    known = ja.diagnostics.NoiseScale(*map(jnp.float32, (6.0, 2.0, 3.0)))
    unknown = ja.diagnostics.NoiseScale(*map(jnp.float32, (jnp.nan, jnp.nan, jnp.nan)))
    after = ja.diagnostics.smooth_noise(start, known, decay=0.5)
    same = ja.diagnostics.smooth_noise(after, unknown, decay=0.5)
    oracles.assert_equal(same, after)
    assert tuple(map(float, after.noise_scale)) == (6, 2, 3)
    with pytest.raises(ValueError, match="`decay`"):
        ja.diagnostics.smooth_noise(start, known, decay=1.0)


def test_train_step_passes_it_on():
    init, step = ja.train_step(
        linear_loss, optax.sgd(0.1), num_microbatches=2, donate=False, noise_scale=True
    )
    w = jnp.zeros(2)
    info = step(w, init(w), CASE)[2]
    np.testing.assert_allclose(info.noise_scale.trace, 4.2, rtol=2 * EPS)
    init, step = ja.train_step(linear_loss, optax.sgd(0.1), num_microbatches=2, donate=False)
    assert step(w, init(w), CASE)[2].noise_scale is None


def test_advice_in_numbers_and_words():
    noise = ja.diagnostics.NoiseScale(*map(jnp.float32, (4.2, 0.16, 26.25)))
    small = ja.diagnostics.batch_advice(noise, 10, num_microbatches=2)
    assert small.steps_factor == 3.625
    np.testing.assert_allclose(small.data_factor, 1 + 10 / 26.25)
    assert small.critical_num_microbatches == 5
    assert "More micro-batches" in str(small)
    assert "Fewer" in str(ja.diagnostics.batch_advice(noise, 100, num_microbatches=20))
    assert "balance" in str(ja.diagnostics.batch_advice(noise, 26, num_microbatches=5))
    assert "micro-batches" not in str(ja.diagnostics.batch_advice(noise, 26))
    negative = ja.diagnostics.NoiseScale(*map(jnp.float32, (4.2, -1.0, -4.2)))
    unknown = ja.diagnostics.batch_advice(negative, 10, num_microbatches=2)
    assert "not known" in str(unknown)
    assert unknown.critical_num_microbatches is None
    with pytest.raises(ValueError, match="`window_weight`"):
        ja.diagnostics.batch_advice(noise, 0)


def test_wrong_types_are_named():
    tracker, noise = (
        ja.diagnostics.noise_tracker(),
        ja.diagnostics.NoiseScale(*map(jnp.float32, (1, 1, 1))),
    )
    for swapped in ((noise, tracker), (tracker, None), (None, noise)):
        with pytest.raises(TypeError, match="expected a `NoiseTracker` and a `NoiseScale`"):
            ja.diagnostics.smooth_noise(*swapped)
    for decay in ("0.9", None, False):
        with pytest.raises(TypeError, match="`decay` must be a static number"):
            ja.diagnostics.smooth_noise(tracker, noise, decay=decay)
    with pytest.raises(TypeError, match="`noise` must be a `NoiseScale`"):
        ja.diagnostics.batch_advice(tracker, 1)
    for weight in ("1", None, True):
        with pytest.raises(TypeError, match="`window_weight` must be a static number"):
            ja.diagnostics.batch_advice(noise, weight)
    with pytest.raises(ValueError, match="positive and finite"):
        ja.diagnostics.batch_advice(noise, float("inf"))


def test_refusals():
    params, batch = oracles.problem(1)
    several = ja.accumulate(oracles.terms_loss, num_microbatches=1, noise_scale=True)
    with pytest.raises(ValueError, match="loss of one term, got 3"):
        several(params, batch)
    one = ja.accumulate(oracles.token_loss, num_microbatches=1, noise_scale=True)
    with pytest.raises(ValueError, match="undivided gradients"):
        one(params, batch, denominators=3.0)
    without = ja.accumulate(oracles.token_loss, num_microbatches=1)(params, batch)
    with pytest.raises(ValueError, match="noise_scale=True"):
        ja.noise_scale(without)
    with pytest.raises(TypeError, match="WindowSums"):
        ja.noise_scale(3.0)
    with pytest.raises(ValueError, match="`spmd_axis_name`"):
        ja.accumulate(
            linear_loss,
            num_microbatches=1,
            axis_name="data",
            grad_specs=P("data"),
            noise_scale=True,
        )
