"""Faults have a defined and recorded result: what is not finite, and counts that do not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxaccum as ja

LARGEST = 2**31 - 1
LOST = -(2**31)
NAN = float("nan")


def linear(w, x):
    return ja.mean(w * x)


def strided(*values):
    """One row for each micro-batch, as float32."""
    return jnp.asarray(values, jnp.float32)


def constant_weight(weight):
    """One gradient unit and `weight` for each micro-batch of one row."""

    def loss_fn(w, x):
        return ja.Mean(jnp.sum(w * x), jnp.asarray(weight))

    return loss_fn


# Counts that do not fit.


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_scans_count_is_exact_or_lost(number):
    loss_fn = constant_weight(np.int32(2**30 - 1))
    sums = jax.jit(ja.accumulate(loss_fn, num_microbatches=number))(1.0, jnp.ones(number))
    window = ja.finalize(sums)
    total = number * (2**30 - 1)
    if total <= LARGEST:
        assert int(window.weight) == total
        assert np.isfinite(window.loss)
    else:
        assert int(window.weight) == LOST
        assert np.isnan(window.loss)
        assert np.isnan(window.grads)


def test_a_lost_count_stays_lost():
    """Wrapped once more it would look like an honest count again."""
    loss_fn = constant_weight(np.int32(2**30))
    sums = jax.jit(ja.accumulate(loss_fn, num_microbatches=8))(1.0, jnp.ones(8))
    assert int(sums.weight) == LOST
    one = ja.accumulate(loss_fn, num_microbatches=1)(1.0, jnp.ones(1))
    assert int(ja.merge(one, sums).weight) == LOST
    assert np.isnan(ja.finalize(ja.merge(sums, one)).loss)


def test_merged_counts_are_exact_or_lost():
    one = ja.accumulate(constant_weight(np.int32(2**30)), num_microbatches=1)(1.0, jnp.ones(1))
    rest = ja.accumulate(constant_weight(np.int32(2**30 - 1)), num_microbatches=1)
    assert int(ja.merge(one, rest(1.0, jnp.ones(1))).weight) == LARGEST
    assert int(ja.merge(one, one).weight) == LOST


@pytest.mark.parametrize(("a", "b", "lost"), [
    (2**30, 2**30 - 1, False), (2**30, 2**30, True), (-(2**30), -(2**30) - 1, True),
    (LARGEST, -1, False), (LOST, 5, True),
])  # fmt: skip
def test_means_add_up_or_are_lost(a, b, lost):
    mean = ja.merge(ja.Mean(1.0, jnp.int32(a)), ja.Mean(1.0, jnp.int32(b)))
    assert int(mean.weight) == (LOST if lost else a + b)
    assert bool(np.isnan(mean.value)) == lost


def test_unsigned_counts_are_lost_at_their_largest():
    mean = ja.merge(ja.Mean(1.0, jnp.uint32(2**31)), ja.Mean(1.0, jnp.uint32(2**31 - 2)))
    assert int(mean.weight) == 2**32 - 2
    mean = ja.merge(mean, ja.Mean(1.0, jnp.uint32(5)))
    assert int(mean.weight) == 2**32 - 1
    assert np.isnan(mean.value)


def test_the_mean_of_integer_weights_is_exact_or_lost():
    fits = ja.mean(jnp.ones(2), weights=jnp.array([2**30, 2**30 - 1]))
    assert int(fits.weight) == LARGEST
    for number in (2, 4, 6):
        wrapped = ja.mean(jnp.ones(number), weights=jnp.full(number, 2**30))
        assert int(wrapped.weight) == LOST
        assert np.isnan(wrapped.value)


@pytest.mark.parametrize("weight", [2**28 - 1, 2**28, 2**29, 2**30])
def test_counts_over_devices_are_exact_or_lost(weight):
    """Eight times 2**29 wraps to an innocent zero."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    f = ja.accumulate(constant_weight(np.int32(weight)), num_microbatches=1, axis_name="data")
    sums = jax.jit(
        jax.shard_map(lambda x: f(1.0, x), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    )(jnp.ones(8))
    assert int(sums.weight) == (8 * weight if 8 * weight <= LARGEST else LOST)
    assert sums.num_microbatches == 8
    assert bool(np.isfinite(ja.finalize(sums).loss)) == (8 * weight <= LARGEST)


def test_lost_denominators_give_nan():
    def terms(w, x):
        return {"a": ja.Mean(jnp.sum(w * x), jnp.int32(2**30)), "b": ja.mean(x * w)}

    loss, grad = jax.jit(ja.value_and_grad(terms, num_microbatches=4))(1.0, jnp.ones(4))
    assert np.isnan(loss)
    assert np.isnan(grad)


def test_float_weights_go_on_past_the_largest_count():
    loss_fn = constant_weight(np.float32(2**30))
    window = ja.finalize(ja.accumulate(loss_fn, num_microbatches=8)(1.0, jnp.ones(8)))
    assert window.weight == 2.0**33
    assert window.grads == 8 / 2.0**33


def test_a_lost_count_spoils_a_stream_visibly():
    tx = ja.multi_steps(optax.sgd(1.0), 2)
    _, state = tx.update(jnp.float32(1), tx.init(jnp.float32(0)), weight=jnp.int32(LOST))
    assert np.isnan(state.weight)
    tx = ja.multi_steps(optax.sgd(1.0), 2, skip_nonfinite=True)
    _, state = tx.update(jnp.float32(1), tx.init(jnp.float32(0)), weight=jnp.int32(LOST))
    assert (state.num_skipped, state.micro_step, state.weight) == (1, 0, 0)


# Windows that are left out, inside a step.


BAD = {"nan": NAN, "inf": float("inf"), "minus inf": -float("inf")}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("cut", [{"num_microbatches": 4}, {"microbatch_size": 1}])
def test_a_bad_window_is_dropped(bad, cut):
    f = jax.jit(ja.accumulate(linear, skip_nonfinite="window", **cut))
    sums = f(1.0, strided(1, bad, 3, 5))
    assert (sums.grads, sums.loss, sums.weight) == (0, 0, 0)
    assert (sums.num_microbatches, sums.num_skipped) == (0, 4)
    window = ja.finalize(sums)
    assert np.isnan(window.loss)
    assert window.grads == 0


def test_a_good_window_is_what_it_was():
    x = strided(1, 2, 3, 6)
    plain = ja.accumulate(linear, num_microbatches=4)(1.0, x)
    kept = ja.accumulate(linear, num_microbatches=4, skip_nonfinite="window")(1.0, x)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(kept), strict=True):
        assert (a.dtype, a) == (b.dtype, b)


@pytest.mark.parametrize("value", [True, np.True_])
def test_the_name_of_the_first_policy(value):
    f = ja.accumulate(linear, num_microbatches=4, skip_nonfinite=value)
    window = ja.finalize(f(1.0, strided(1, NAN, 3, 5)))
    assert (window.grads, window.num_skipped, window.num_microbatches) == (3, 1, 3)


@pytest.mark.parametrize("value", ["micro_batch", "windows", 2, None, "yes", np.ones(2)], ids=str)
def test_other_policies_are_refused(value):
    message = "`skip_nonfinite` must be False, True"
    for factory in (ja.accumulate, ja.value_and_grad):
        with pytest.raises(ValueError, match=message):
            factory(linear, num_microbatches=1, skip_nonfinite=value)
    for factory in (ja.multi_steps, lambda tx, n, **kw: ja.train_step(linear, tx, **kw)):
        with pytest.raises(ValueError, match=message):
            factory(optax.sgd(1.0), 2, skip_nonfinite=value)


def test_a_dropped_window_takes_its_carried_outputs_with_it():
    def loss_fn(w, x):
        aux = {"sum": ja.Sum(x.sum()), "max": ja.Max(x.max()), "mean": ja.mean(x), "all": x.sum()}
        return ja.mean(w * x), aux

    f = ja.accumulate(loss_fn, num_microbatches=3, has_aux=True, skip_nonfinite="window")
    x = strided(1, 2, NAN)
    aux = ja.finalize(jax.jit(f)(1.0, x)).aux
    empty = ja.accumulate(loss_fn, num_microbatches=3, has_aux=True)
    want = ja.finalize(jax.jit(empty)(1.0, x, num_real=0)).aux
    assert (aux["sum"], aux["max"]) == (want["sum"], want["max"]) == (0, -np.inf)
    assert np.isnan(aux["mean"])
    np.testing.assert_array_equal(aux["all"], x)


def test_a_dropped_window_of_several_terms():
    def terms(w, x):
        return {"fit": ja.mean(w * x), "penalty": ja.Mean(w * w, 1.0)}

    f = jax.jit(ja.accumulate(terms, num_microbatches=2, skip_nonfinite="window"))
    sums = f(2.0, strided(1, NAN))
    window = ja.finalize(sums)
    assert (window.grads, window.weight) == (0, {"fit": 0, "penalty": 0})
    assert np.isnan(window.loss)
    assert ja.finalize(f(2.0, strided(1, 3))).grads == 2 + 4


def test_a_dropped_window_of_row_gradients():
    f = ja.value_and_grad(linear, num_microbatches=2, argnums=(0, 1), skip_nonfinite="window")
    _, (grad, rows) = jax.jit(f)(jnp.float32(2), strided(1, NAN))
    assert grad == 0
    np.testing.assert_array_equal(rows, [0, 0])


@pytest.mark.parametrize("axis", ["axis_name", "spmd_axis_name"])
@pytest.mark.parametrize("reduction", ["defer", "scatter"])
def test_one_devices_nan_drops_the_window_everywhere(axis, reduction):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    options = {axis: "data", "reduction": reduction, "grad_specs": jax.P("data")}
    f = ja.accumulate(
        lambda w, x: ja.mean(x @ w), num_microbatches=2, skip_nonfinite="window", **options
    )
    x = np.ones((8, 4), np.float32)
    for bad in (False, True):
        x[5, 0] = np.nan if bad else 1
        rows = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        if axis == "axis_name":
            grads_spec = dataclasses.replace(
                jax.eval_shape(ja.accumulate(lambda w, x: ja.mean(x @ w), num_microbatches=2),
                               jnp.ones(4), x),
            )  # fmt: skip
            specs = jax.tree.map(lambda _: jax.P(), grads_spec)
            specs = dataclasses.replace(specs, grads=jax.P("data"))
            g = jax.shard_map(
                f, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=specs, check_vma=True
            )
            sums = jax.jit(g)(jnp.ones(4), rows)
        else:
            with jax.set_mesh(mesh):
                sums = jax.jit(f)(jnp.ones(4), rows)
        np.testing.assert_array_equal(sums.grads, np.full(4, 0 if bad else 8))
        want = (0, 0, 8) if bad else (8, 8, 0)
        assert (sums.weight, sums.num_microbatches, sums.num_skipped) == want


# Windows that are dropped, over many calls.


def feed(tx, values, *, state=None, params=None, jit=True, **named):
    """Streams gradients; returns the parameters, the state, and every state on the way."""
    params = jnp.float32(0) if params is None else params
    state = tx.init(params) if state is None else state
    update = jax.jit(tx.update) if jit else tx.update
    states = []
    for value in values:
        updates, state = update(jnp.float32(value), state, params, **named)
        params = optax.apply_updates(params, updates)
        states.append(state)
    return params, state, states


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize("kind", [None, ja.accumulators.compensated(), ja.accumulators.chunked()])
def test_a_streams_bad_window_is_dropped(bad, position, kind):
    tx = ja.multi_steps(optax.adam(0.5), 3, skip_nonfinite="window", accumulator=kind)
    values = [1, 2, 3]
    values[position] = bad
    params, state, _ = feed(tx, values)
    fresh = tx.init(jnp.float32(0))
    assert params == 0
    assert (state.num_dropped, state.num_skipped, state.num_bad_in_row) == (1, 3, 1)
    assert (state.optimizer_step, state.num_empty, state.micro_step) == (0, 0, 0)
    assert not ja.has_updated(state)
    # The window after it is that of a run that never saw the bad one.
    after, state, _ = feed(tx, [4, 5, 9], state=state)
    want, clean, _ = feed(tx, [4, 5, 9], state=fresh)
    assert after == want
    assert (state.num_bad_in_row, state.num_dropped, state.optimizer_step) == (0, 1, 1)
    for a, b in zip(jax.tree.leaves(state.inner_state), jax.tree.leaves(clean.inner_state)):
        assert a == b


def test_a_bad_weight_or_mean_drops_the_window_too():
    tx = ja.multi_steps(optax.sgd(1.0), 2, skip_nonfinite="window")
    state = tx.init(jnp.float32(0))
    for named in ({"weight": NAN}, {}, {"value": ja.Mean(NAN, 1)}, {"value": ja.Mean(1.0, 1)}):
        updates, state = tx.update(jnp.float32(1), state, jnp.float32(0), **named)
        assert updates == 0
    assert (state.num_dropped, state.optimizer_step) == (2, 0)


def test_flush_drops_a_bad_window():
    tx = ja.multi_steps(optax.sgd(1.0), 4, skip_nonfinite="window")
    _, state, _ = feed(tx, [1, NAN])
    updates, state = jax.jit(lambda s, p: ja.flush(tx, s, p))(state, jnp.float32(0))
    assert updates == 0
    assert (state.num_dropped, state.micro_step, state.optimizer_step) == (1, 0, 0)


def test_dropping_costs_nothing_between_windows():
    """All that looks for what is not finite stands in the branch that closes a window."""
    tx = ja.multi_steps(optax.sgd(1.0), 4, skip_nonfinite="window")
    params = jnp.ones((3, 3))
    program = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    assert "is_finite" in str(program)
    shapes = [e.outvars[0].aval.shape for e in program.eqns if e.primitive.name == "is_finite"]
    assert (3, 3) not in shapes


def test_diverged_after_windows_in_a_row():
    tx = ja.multi_steps(optax.sgd(1.0), 2, skip_nonfinite="window", max_bad_windows=2)
    values = [NAN, 1, 1, 1, 1, NAN, NAN, NAN, 1, 1, 1, 1]
    params, state, states = feed(tx, values)
    assert [int(s.num_bad_in_row) for s in states] == [0, 1, 1, 0, 0, 1, 1, 2, 2, 2, 2, 2]
    assert [bool(s.diverged) for s in states] == [False] * 7 + [True] * 5
    assert (params, state.optimizer_step, state.num_dropped) == (-1, 1, 5)
    with pytest.raises(FloatingPointError, match=r"diverged: 2 bad in a row, 5 windows dropped"):
        ja.check_healthy({"state": (state,)})
    ja.check_healthy(states[3])


def test_diverged_after_micro_steps_that_would_have_made_windows():
    """Where micro-steps are skipped, a run of nothing but nan closes no window at all."""
    tx = ja.multi_steps(optax.sgd(1.0), 3, skip_nonfinite=True, max_bad_windows=2)
    _, state, states = feed(tx, [1, *[NAN] * 5, 1, *[NAN] * 6, 1, 1, 1])
    assert [int(s.num_bad_in_row) for s in states[:8]] == [0, 1, 2, 3, 4, 5, 0, 1]
    assert [bool(s.diverged) for s in states].index(True) == 12
    assert (state.optimizer_step, state.num_skipped) == (0, 11)
    assert state.diverged


def test_with_a_target_each_skipped_micro_step_is_a_bad_window():
    tx = ja.multi_steps(optax.sgd(1.0), ja.until_weight(3), skip_nonfinite=True, max_bad_windows=2)
    _, state, _ = feed(tx, [NAN, 1, NAN])
    assert not state.diverged
    _, state, _ = feed(tx, [NAN], state=state)
    assert state.diverged


def test_after_divergence_nothing_changes_the_parameters():
    tx = ja.multi_steps(optax.adam(0.5), 2, skip_nonfinite="window", max_bad_windows=1)
    _, state, _ = feed(tx, [NAN, 1])
    held = jax.tree.map(np.asarray, state.inner_state)
    params, state, _ = feed(tx, [1, 2, 3], state=state)
    updates, state = ja.flush(tx, state, params)
    assert (params, updates) == (0, 0)
    for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(state.inner_state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (state.num_dropped, state.num_skipped, state.num_empty) == (3, 2, 0)


@pytest.mark.parametrize("make", [
    lambda **o: ja.multi_steps(optax.sgd(1.0), 2, **o),
    lambda **o: ja.train_step(linear, optax.sgd(1.0), num_microbatches=1, **o),
])  # fmt: skip
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bad_windows": 2}, "Pass `skip_nonfinite="),
        ({"max_bad_windows": 0, "skip_nonfinite": True}, "`max_bad_windows` must be at least 1"),
        ({"max_bad_windows": 1.5, "skip_nonfinite": True}, "`max_bad_windows` must be a static"),
        ({"skip_nonfinite": "all"}, "`skip_nonfinite` must be"),
        ({"loss_scale": 1024.0}, r"`loss_scale` must come from `ja.loss_scaling`"),
    ],
)
def test_wrong_options_are_refused(make, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(**options)


@pytest.mark.parametrize("policy", [True, "window"])
def test_all_devices_decide_alike(policy):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = ja.multi_steps(
        optax.sgd(1.0), 2, axis_name="data", skip_nonfinite=policy, max_bad_windows=1
    )
    with jax.set_mesh(mesh):
        state = tx.init(jnp.float32(0))
    specs = ja.state_specs(state, "data")

    def step(grads, state):
        updates, state = tx.update(grads[0], state, jnp.float32(0))
        return updates, state

    step = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(jax.P("data"), specs), out_specs=(jax.P(), specs))
    )
    rows = [[1, 2, 3, 4], [1, 1, NAN, 1], [5, 5, 5, 5], [1, 1, 1, 1]]
    seen = []
    for row in rows:
        updates, state = step(jnp.asarray(row, jnp.float32), state)
        seen.append(float(updates))
    if policy == "window":
        assert seen == [0, 0, 0, 0]
        assert (state.num_dropped, state.diverged, state.optimizer_step) == (2, True, 0)
    else:
        assert seen == [0, 0, -(10 + 20) / 8, 0]
        assert (state.num_skipped, state.diverged, state.micro_step) == (1, False, 1)


@pytest.mark.parametrize("policy", [True, "window"])
def test_devices_with_windows_of_their_own(policy):
    """Inside `shard_map` without `axis_name` each device decides for itself."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = ja.multi_steps(optax.sgd(1.0), 2, skip_nonfinite=policy, max_bad_windows=2)

    def run(grads):
        state = tx.init(grads[0])
        for _ in range(2):
            updates, state = tx.update(grads[0], state, grads[0])
        return updates[None]

    run = jax.shard_map(run, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    updates = jax.jit(run)(strided(1, 2, NAN, 4))
    np.testing.assert_array_equal(updates, [-1, -2, 0, -4])


# What a training step records.


def nan_step(**options):
    init, step = ja.train_step(linear, optax.sgd(1.0), num_microbatches=2, donate=False, **options)
    w = jnp.float32(0)
    return w, init(w), step


@pytest.mark.parametrize("policy", [True, "window"])
def test_a_training_step_counts_its_bad_windows(policy):
    w, state, step = nan_step(skip_nonfinite=policy, max_bad_windows=2)
    windows = [(1, 3), (NAN, NAN), (2, 2), (NAN, NAN), (NAN, NAN), (1, 1)]
    infos = []
    for window in windows:
        w, state, info = step(w, state, strided(*window))
        infos.append(info)
    assert [int(i.num_bad_in_row) for i in infos] == [0, 1, 0, 1, 2, 2]
    assert [bool(i.updated) for i in infos] == [True, False, True, False, False, False]
    assert (w, state.optimizer_step, state.num_dropped, state.num_skipped) == (-4, 2, 4, 6)
    assert [bool(i.diverged) for i in infos] == [False] * 4 + [True] * 2
    ja.check_healthy(infos[1])
    for record in (infos[4], infos[5], state, [state, infos[0]]):
        with pytest.raises(FloatingPointError, match="has diverged: 2 bad in a row"):
            ja.check_healthy(record)


def test_one_bad_micro_batch_drops_a_step_or_shortens_it():
    w, state, step = nan_step(skip_nonfinite="window")
    after, _, info = step(w, state, strided(5, NAN))
    assert (after, info.num_skipped, info.num_dropped, info.updated) == (0, 2, 1, False)
    w, state, step = nan_step(skip_nonfinite=True)
    after, _, info = step(w, state, strided(5, NAN))
    assert (after, info.num_skipped, info.num_dropped, info.updated) == (-5, 1, 0, True)


def test_without_a_policy_the_record_tells():
    w, state, step = nan_step()
    _, _, info = step(w, state, strided(5, NAN))
    with pytest.raises(FloatingPointError, match=r"`loss` of `StepInfo` is nan, and nothing"):
        ja.check_healthy(info)
    _, _, info = step(w, state, strided(5, 1))
    ja.check_healthy(info)


def test_check_healthy_of_windows():
    f = ja.accumulate(linear, num_microbatches=2, skip_nonfinite=True)
    window = ja.finalize(f(1.0, strided(1, NAN)))
    ja.check_healthy(window)
    ja.check_healthy(window, max_skipped=1)
    with pytest.raises(FloatingPointError, match="more than 0 micro-batches left out: 1 skipped"):
        ja.check_healthy(window, max_skipped=0)
    empty = ja.finalize(f(1.0, strided(NAN, NAN)))
    ja.check_healthy(empty)  # nothing was counted, so its loss is nan by definition
    lost = ja.accumulate(constant_weight(np.int32(2**30)), num_microbatches=2)
    with pytest.raises(FloatingPointError, match="did not fit into int32"):
        ja.check_healthy(ja.finalize(lost(1.0, strided(1, 1))))


def test_check_healthy_needs_something_to_check():
    with pytest.raises(ValueError, match="`record` must hold a `StepInfo`"):
        ja.check_healthy({"loss": 1.0})
    with pytest.raises(TypeError, match="is traced"):
        jax.jit(ja.check_healthy)(ja.multi_steps(optax.sgd(1.0), 2).init(1.0))


# Two smaller gaps.


def spy(received):
    def update(updates, state, params=None, **extra):
        received.append(extra)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)


def test_a_mean_that_the_closing_call_leaves_out_is_forwarded():
    received = []
    tx = ja.multi_steps(spy(received), 2)
    state = tx.init(jnp.float32(0))
    _, state = tx.update(jnp.float32(1), state, value=ja.Mean(6.0, 3))
    _, state = tx.update(jnp.float32(1), state)
    plain = ja.multi_steps(
        optax.GradientTransformationExtraArgs(
            lambda p: jnp.float32(0), lambda g, s, p=None, *, value=0.0, **_: (g, s + value)
        ),
        2,
    )
    state = plain.init(jnp.float32(0))
    _, state = plain.update(jnp.float32(1), state, value=ja.Mean(6.0, 3))
    _, state = plain.update(jnp.float32(1), state)
    assert state.inner_state == 2
    assert "value" in received[-1]


def test_a_full_counter_stays():
    tx = ja.multi_steps(optax.sgd(1.0), ja.until_weight(2.0**40), skip_nonfinite=True)
    state = tx.init(jnp.float32(0))
    full = jnp.int32(LARGEST)
    state = state._replace(micro_step=full, num_skipped=full, num_bad_in_row=full)
    _, state, _ = feed(tx, [1, NAN], state=state)
    assert (state.micro_step, state.num_skipped) == (LARGEST, LARGEST)


@pytest.mark.parametrize("whole", [False, True], ids=["the model", "the whole loss"])
def test_case_57_rematerialisation_counts_nothing_twice(whole):
    """A second forward pass adds no weight, no auxiliary sum, no micro-batch and no skip."""

    def model(w, x):
        return jnp.sin(w * x)

    def counted(model_fn):
        def loss_fn(w, x):
            aux = {"rows": ja.Sum(jnp.int32(len(x))), "value": ja.mean(x)}
            return ja.mean(model_fn(w, x)), aux

        return loss_fn

    options = {"num_microbatches": 4, "has_aux": True, "skip_nonfinite": True}
    x = strided(1, 2, 3, NAN, 5, 6, 7, 8)
    plain = jax.jit(ja.accumulate(counted(model), **options))(1.0, x)
    remat = jax.checkpoint(counted(model)) if whole else counted(jax.checkpoint(model))
    got = jax.jit(ja.accumulate(remat, **options))(1.0, x)
    assert (got.weight, got.num_microbatches, got.num_skipped) == (6, 3, 1)
    assert (got.aux["rows"].value, got.aux["value"].weight) == (6, 6)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
