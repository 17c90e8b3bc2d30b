"""`WindowSums` as what a stream takes: their weight and their skips come with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from oracles import assert_equal
from test_stream import assert_same_bits

import jaxaccum as ja

SGD = optax.sgd(1.0)
W = jnp.float32(0)
SIX_OVER_THREE, SEVEN_OVER_SEVEN = jnp.array([1.0, 2.0, 3.0]), jnp.ones(7)


def product(w, x):
    return ja.mean(w * x)


def terms(w, x):
    return {"first": ja.mean(w * x[:, 0]), "second": ja.mean(w * x[:, 1], where=x[:, 1] > 0)}


def sums_of(x, loss_fn=product, *, w=W, num_microbatches=1, denominators=None, **options):
    f = ja.accumulate(loss_fn, num_microbatches=num_microbatches, **options)
    return f(w, jnp.asarray(x), denominators=denominators)


def run(tx, calls, *, state=None, params=W):
    state = tx.init(params) if state is None else state
    for call in calls:
        updates, state = tx.update(call, state, params)
    return updates, state


@pytest.mark.parametrize("every", [2, ja.until_weight(10)], ids=["count", "weight"])
def test_case_68_sums_carry_their_weight(every):
    tx = ja.multi_steps(SGD, every)
    calls = [sums_of(SIX_OVER_THREE), sums_of(SEVEN_OVER_SEVEN)]
    got = run(tx, calls)
    raw = tx.init(W)
    for sums in calls:
        updates, raw = tx.update(sums.grads, raw, W, weight=sums.weight)
    assert got[0] == np.float32(-1.3)
    assert_same_bits(got, (updates, raw))


def test_one_call_is_one_micro_step_however_many_micro_batches_it_holds():
    _, state = run(ja.multi_steps(SGD, 2), [sums_of(SEVEN_OVER_SEVEN, num_microbatches=3)])
    assert (state.micro_step, state.weight) == (1, 7)


def test_a_weight_beside_sums_is_refused():
    tx = ja.multi_steps(SGD, 2)
    with pytest.raises(TypeError, match="`weight` must not be given, got 3"):
        tx.update(sums_of(SIX_OVER_THREE), tx.init(W), W, weight=3)


def test_the_window_of_one_takes_them_too():
    updates, state = run(ja.multi_steps(SGD, 1), [sums_of(SIX_OVER_THREE)])
    assert (updates, state.optimizer_step) == (-2, 1)
    _, state = run(ja.multi_steps(SGD, 1), [sums_of(jnp.ones(3), lambda w, x: ja.Mean(w, 0))])
    assert (state.optimizer_step, state.num_empty) == (0, 1)


# Skips.


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}, {"skip_nonfinite": "window"}])
def test_skips_join_those_of_the_state(options):
    """A call of which nothing is left is replaced by the next one, as a skipped micro-step is."""
    sums_fn = functools.partial(sums_of, num_microbatches=2, skip_nonfinite=True)
    calls = [[1.0, np.nan], [np.nan, np.nan], [3.0, 5.0]]
    tx = ja.multi_steps(SGD, 2, **options)
    _, state = run(tx, map(sums_fn, calls[:2]))
    assert (state.num_skipped, state.micro_step, state.weight) == (3, 1, 1)
    updates, state = run(tx, [sums_fn(calls[2])], state=state)
    assert (updates, state.num_skipped, state.optimizer_step) == (-3, 3, 1)


def test_an_overflow_in_the_sums_shrinks_the_scale():
    scaling = ja.loss_scaling.dynamic(initial=16.0)
    tx = ja.multi_steps(SGD, 2, loss_scale=scaling)
    sums_fn = functools.partial(sums_of, num_microbatches=2, skip_nonfinite=True)
    _, state = run(tx, [sums_fn([1.0, np.inf])])
    assert state.loss_scale.scale == 16  # constant inside a window
    _, state = run(tx, [sums_fn([1.0, 1.0])], state=state)
    assert (state.loss_scale.scale, state.optimizer_step) == (8, 1)
    _, state = run(tx, [sums_fn([np.inf, np.inf])], state=state)  # a window that never begins
    assert (state.loss_scale.scale, state.micro_step) == (4, 0)


# Sums that do not add up over calls.


def test_terms_over_their_own_denominators_are_refused():
    with pytest.raises(ValueError, match=r"`ja.denominators`.*`normalize=False`"):
        run(ja.multi_steps(SGD, 2, normalize=False), [sums_of(jnp.ones((2, 2)), terms)])


def test_terms_over_given_denominators_are_not_divided_again():
    x = jnp.array([[1.0, 5.0], [2.0, 0.0], [3.0, 0.0], [6.0, 0.0]])
    found = ja.denominators(terms, num_microbatches=1)(W, x)
    calls = [sums_of(rows, terms, denominators=found) for rows in (x[:2], x[2:])]
    with pytest.raises(ValueError, match="must not be divided again"):
        run(ja.multi_steps(SGD, 2), calls)
    updates, state = run(ja.multi_steps(SGD, ja.until_weight(4), normalize=False), calls)
    assert (updates, state.optimizer_step) == (-8, 1)


def test_given_denominators_count_whatever_the_weight_is():
    calls = [sums_of([26.0], lambda w, x: ja.Mean(w * x[0], 0), denominators=1)] * 2
    updates, state = run(ja.multi_steps(SGD, 2, normalize=False), calls)
    assert (updates, state.optimizer_step, state.num_empty) == (-52, 1, 0)


def test_leaves_that_are_no_sums_are_refused():
    params = {"w": W, "scale": W}
    sums = sums_of(
        jnp.ones(2),
        lambda p, x: ja.mean(p["w"] * x * p["scale"]),
        w=params,
        grad_reducers={"w": ja.Sum, "scale": ja.Max},
    )
    tx = ja.multi_steps(SGD, 2)
    with pytest.raises(ValueError, match="combines otherwise than by"):
        tx.update(sums, tx.init(params), params)


@pytest.mark.parametrize(
    "before", [optax.clip(100.0), optax.scale(0.5), optax.scale_by_learning_rate(0.1)]
)
def test_sums_that_were_changed_on_the_way_are_refused(before):
    tx = optax.chain(before, ja.multi_steps(SGD, 2))
    with pytest.raises(TypeError, match="a transformation before `multi_steps` changed the sums"):
        tx.update(sums_of(jnp.full(512, 2.0)), tx.init(W), W)


def test_wrappers_that_hand_them_on_let_them_through():
    tx = optax.inject_hyperparams(lambda a: ja.multi_steps(optax.sgd(a), 2))(a=1.0)
    tx = optax.chain(optax.identity(), optax.named_chain(("stream", tx)), optax.scale(1.0))
    updates, state = run(tx, [sums_of(SIX_OVER_THREE), sums_of(SEVEN_OVER_SEVEN)])
    assert updates == np.float32(-1.3)
    assert ja.has_updated(state)


# Over devices.


@pytest.mark.parametrize("check", [True, False])
def test_every_device_takes_the_same_decision(check):
    """One device's micro-batch is lost in the first call, all of them in the second."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = ja.multi_steps(SGD, 2, axis_name="data")
    rows = np.array([[1.0, np.nan], [np.nan, np.nan], [4.0, 7.0]], np.float32)
    params = {"w": W, "n": jnp.int32(16_777_217)}
    state = jax.tree.map(
        lambda x, spec: jnp.broadcast_to(x, (2, *x.shape[1:])) if spec else x,
        tx.init(params),
        ja.state_specs(tx.init(params), "data"),
    )
    specs = ja.state_specs(state, "data")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), specs, P("data")),
        out_specs=(P(), specs),
        check_vma=check,
    )
    def step(params, state, x):
        f = ja.accumulate(lambda p, x: product(p["w"], x), num_microbatches=1, skip_nonfinite=True)
        updates, state = tx.update(f(params, x), state, params)
        return optax.apply_updates(params, updates), state

    seen = []
    for row in rows:
        params, state = step(params, state, row)
        seen.append((int(state.micro_step), int(state.num_skipped), float(params["w"])))
    assert seen == [(1, 1, 0.0), (1, 3, 0.0), (0, 3, -4.0)]
    assert params["n"] == 16_777_217
    assert_equal(state.optimizer_step, 1)
