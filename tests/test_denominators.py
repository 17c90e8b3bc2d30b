"""Denominators that are given: a term counts whatever its own weight is, on every route.

The toy model: one parameter `w`, a term is `w` times a sum of its data, so that its gradient is
that sum and at `w = 1` its total is, too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from meshes import PMAP, manual_setups, per_device
from oracles import assert_equal

import jaxaccum as ja

ONE = jnp.float32(1)
X, BOX = jnp.array([1.0, 2.0, 3.0, 7.0]), jnp.array([5.0, 8.0, 6.0, 7.0])
GIVEN = {"cls": 4, "box": 1}


def detection(w, batch):
    """Two terms, of which the second has no weight of its own."""
    x, box = batch
    return {"cls": ja.mean(w * x), "box": ja.Mean(w * jnp.sum(box), 0)}


def box_only(w, batch):
    return ja.Mean(w * jnp.sum(batch[1]), jnp.float32(0))


CASES = {  # the loss, its denominators, and what loss and gradient are
    "two terms": (detection, GIVEN, 29.25),
    "one term": (box_only, 1, 26.0),
    "one term of a tuple": (lambda w, batch: (box_only(w, batch),), (jnp.float32(2),), 13.0),
}
EACH = pytest.mark.parametrize(("loss_fn", "given", "want"), CASES.values(), ids=CASES)


def rows_of(rows):
    return X[jnp.array(rows)], BOX[jnp.array(rows)]


@pytest.mark.parametrize(
    ("parts", "skip"),
    [([[0, 1, 2, 3]], False), ([[0, 2, 3], [1]], True), ([[0], [1, 2, 3]], "window")],
    ids=str,
)
@EACH
def test_loss_and_gradient_agree(loss_fn, given, want, parts, skip):
    f = ja.accumulate(loss_fn, microbatch_size=2, skip_nonfinite=skip)
    sums = [f(ONE, rows_of(rows), denominators=given) for rows in parts]
    window = ja.finalize(functools.reduce(ja.merge, sums))
    assert_equal((window.loss, window.grads), (want, want))
    assert window.num_skipped == 0


@EACH
@pytest.mark.parametrize("setup", [*manual_setups(["A", "E"]), PMAP, "plain jit"], ids=str)
def test_loss_and_gradient_agree_over_devices(setup, loss_fn, given, want):
    batch = [np.concatenate([part, np.zeros(12, np.float32)]) for part in (X, BOX)]
    counted = jax.tree.map(lambda d: 4 * d, given)
    options = {"num_microbatches": 2, "skip_nonfinite": "window"}
    if setup == "plain jit":
        mesh = jax.make_mesh((8,), "data")
        with jax.set_mesh(mesh):
            f = ja.value_and_grad(loss_fn, spmd_axis_name="data", **options)
            out = jax.jit(f)(ONE, jax.device_put(batch, P("data")), denominators=counted)
    else:
        f = functools.partial(
            ja.value_and_grad(loss_fn, axis_name="data", **options), denominators=counted
        )
        if setup is PMAP:
            out = jax.pmap(f, axis_name="data", in_axes=(None, 0))(ONE, per_device(batch))
            out = jax.tree.map(lambda x: x[5], out)
        else:
            out = setup.shard(f, (P(), P("data")), P())(ONE, setup.put(batch, P("data")))
    assert_equal(out, (want / 4, want / 4))


@EACH
def test_a_step_steps_whatever_the_weight_is(loss_fn, given, want):
    init, step = ja.train_step(loss_fn, optax.sgd(1.0), num_microbatches=2)
    for denominators, empty in ((given, False), (None, loss_fn is not detection)):
        params, _, info = step(jnp.float32(1), init(ONE), (X, BOX), denominators=denominators)
        assert info.updated == (not empty)
        assert np.isnan(info.loss) == empty
        expected = 1 - want if denominators else 1 if empty else 1 - 3.25
        assert params == expected


def test_no_micro_batch_no_loss():
    """Also a window that was left out has neither loss nor gradient, and makes no step."""
    f = ja.value_and_grad(detection, num_microbatches=2)
    assert_equal(f(ONE, (X, BOX), denominators=GIVEN, num_real=0), (np.nan, 0.0))
    init, step = ja.train_step(detection, optax.sgd(1.0), num_microbatches=2, skip_nonfinite=True)
    params, _, info = step(jnp.float32(1), init(ONE), (X * jnp.nan, BOX), denominators=GIVEN)
    assert (params, info.updated, info.num_skipped) == (1, False, 2)
    assert np.isnan(info.loss)


@pytest.mark.parametrize(
    "zero", [0, 0.0, np.float32(0), jnp.int32(0), np.nan, np.inf, -1], ids=repr
)
def test_a_denominator_that_is_known_to_be_no_positive_number_is_refused(zero):
    one = ja.value_and_grad(box_only, num_microbatches=2)
    two = ja.accumulate(detection, num_microbatches=2)
    with pytest.raises(ValueError, match="value_and_grad: `denominators` must be finite and above"):
        one(ONE, (X, BOX), denominators=zero)
    with pytest.raises(ValueError, match=r"accumulate: `denominators\['box'\]` must be finite"):
        two(ONE, (X, BOX), denominators={"cls": 4, "box": zero})
    with pytest.raises(ValueError, match="`denominators` must be finite"):  # known while tracing
        jax.jit(lambda w: one(w, (X, BOX), denominators=zero))(ONE)
    with (
        jax.set_mesh(jax.make_mesh((4,), "data")),
        pytest.raises(ValueError, match="`denominators` must be finite"),
    ):
        ja.value_and_grad(box_only, num_microbatches=1, spmd_axis_name="data")(
            ONE, (X, BOX), denominators=zero
        )


@pytest.mark.parametrize(
    ("given", "loss", "grad"),
    [({"cls": 4, "box": 0}, 3.25, 3.25), ({"cls": 0, "box": 0}, np.nan, 0.0)],
    ids=["one", "all"],
)
def test_a_traced_zero_takes_its_term_out(given, loss, grad):
    f = jax.jit(ja.value_and_grad(detection, num_microbatches=2))
    assert_equal(f(ONE, (X, BOX), denominators=given), (loss, grad))
    init, step = ja.train_step(detection, optax.sgd(1.0), num_microbatches=2)
    params, _, info = step(jnp.float32(1), init(ONE), (X, BOX), denominators=given)
    assert (params, info.updated) == (1 - grad, grad != 0)


# Windows in which nothing counts.


def upstream(w, x):
    """Nothing is kept, and the derivative is 0 * inf: nan."""
    return ja.mean(jnp.where(x > 0, jnp.sqrt(w * x), 0), where=x > 0)


EMPTY = {
    "one term": (upstream, {}),
    "two terms": (lambda w, x: (upstream(w, x), 2 * upstream(w, x)), {}),
    "given": (upstream, {"denominators": jnp.float32(0)}),
    "two given": (
        lambda w, x: (upstream(w, x), upstream(w, x)),
        {"denominators": (jnp.int32(0), 0.0)},
    ),
}


@pytest.mark.parametrize("skip", [False, True, "window"])
@pytest.mark.parametrize(("loss_fn", "given"), EMPTY.values(), ids=EMPTY)
def test_nothing_counts_and_a_nan_is_upstream(loss_fn, given, skip):
    x, w = jnp.zeros(4), jnp.float32(1)
    assert np.isnan(jax.grad(lambda w: jax.tree.leaves(loss_fn(w, x))[0])(w))
    f = jax.jit(ja.value_and_grad(loss_fn, num_microbatches=2, skip_nonfinite=skip))
    assert_equal(f(w, x, **given), (np.nan, 0.0))
    if skip is False:
        init, step = ja.train_step(loss_fn, optax.sgd(1.0), num_microbatches=2)
        params, state, info = step(jnp.float32(1), init(w), x, **given)
        assert (params, info.updated, state.optimizer_step) == (1, False, 0)


def test_nothing_counts_over_devices():
    (setup,) = manual_setups(["A"])[:1]
    f = ja.accumulate(EMPTY["two terms"][0], num_microbatches=2, axis_name="data")
    sums = setup.shard(f, (P(), P("data")), P())(
        ONE, setup.put(np.zeros(16, np.float32), P("data"))
    )
    assert_equal(sums.grads, 0.0)
