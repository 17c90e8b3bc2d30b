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
    mean = ja.Mean(1.0, jnp.int32(a)) + ja.Mean(1.0, jnp.int32(b))
    assert int(mean.weight) == (LOST if lost else a + b)
    assert bool(np.isnan(mean.value)) == lost


def test_unsigned_counts_are_lost_at_their_largest():
    mean = ja.Mean(1.0, jnp.uint32(2**31)) + ja.Mean(1.0, jnp.uint32(2**31 - 2))
    assert int(mean.weight) == 2**32 - 2
    mean = mean + ja.Mean(1.0, jnp.uint32(5))
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


@pytest.mark.parametrize("value", [True, np.True_, "micro_batch"])
def test_the_name_of_the_first_policy(value):
    f = ja.accumulate(linear, num_microbatches=4, skip_nonfinite=value)
    window = ja.finalize(f(1.0, strided(1, NAN, 3, 5)))
    assert (window.grads, window.num_skipped, window.num_microbatches) == (3, 1, 3)


@pytest.mark.parametrize("value", ["windows", 2, None, "yes"])
def test_other_policies_are_refused(value):
    message = "`skip_nonfinite` must be False, True"
    with pytest.raises(ValueError, match=message):
        ja.accumulate(linear, num_microbatches=1, skip_nonfinite=value)


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
