"""States from and to Optax, in the middle of a window too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxaccum as ja
from jaxaccum import interop

INNER = {"sgd": lambda: optax.sgd(1.0), "adamw": lambda: optax.adamw(0.1)}
PARAMS = {"w": jnp.arange(3.0), "b": jnp.float32(1)}


def gradients(number):
    rng = np.random.default_rng(number)
    return jax.tree.map(lambda x: jnp.asarray(rng.integers(-9, 9, x.shape), jnp.float32), PARAMS)


def run(update_fn, state, params, steps):
    for step in steps:
        updates, state = update_fn(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("inner", "at"),
    [
        pytest.param(
            INNER[name],
            at,
            id=f"{name}-{at}",
            marks=[pytest.mark.slow] if name == "adamw" and at != 2 else [],
        )
        for name in INNER
        for at in (0, 2, 4, 7)
    ],
)
@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
def test_optax_state_continues_where_it_was(inner, at, mean):
    theirs = optax.MultiSteps(inner(), 4, use_grad_mean=mean)
    ours = ja.multi_steps(inner(), 4, normalize=mean)
    params, state = run(theirs.update, theirs.init(PARAMS), PARAMS, range(at))
    want, _ = run(theirs.update, state, params, range(at, 12))
    taken = interop.from_optax(ours, state, params, use_grad_mean=mean)
    assert bool(ja.has_updated(taken)) == bool(theirs.has_updated(state))
    assert int(taken.weight) == at % 4
    got, end = run(ours.update, taken, params, range(at, 12))
    assert_close(got, want)
    assert end.optimizer_step == 3


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("at", [0, 3, 4])
def test_our_state_continues_in_optax(inner, at):
    theirs, ours = optax.MultiSteps(inner(), 4), ja.multi_steps(inner(), 4)
    params, state = run(ours.update, ours.init(PARAMS), PARAMS, range(at))
    want, _ = run(ours.update, state, params, range(at, 8))
    got, _ = run(theirs.update, interop.to_optax(ours, state, params), params, range(at, 8))
    assert_close(got, want)


def test_unequal_weights_cannot_go_to_optax():
    tx = ja.multi_steps(optax.sgd(1.0), 4)
    _, state = tx.update(gradients(0), tx.init(PARAMS), PARAMS, weight=3)
    with pytest.raises(ValueError, match="1 micro-steps of the weight 3"):
        interop.to_optax(tx, state, PARAMS)


def test_accumulation_is_taken_up_in_a_running_optimizer():
    plain = optax.adamw(0.1)
    tx = ja.multi_steps(optax.adamw(0.1), 2)
    params, inner_state = run(plain.update, plain.init(PARAMS), PARAMS, range(3))
    state = interop.from_inner_state(tx, inner_state, params, optimizer_step=3)
    new, state = run(tx.update, state, params, [5, 5])
    want, want_state = run(plain.update, inner_state, params, [5])
    assert_close((new, state.inner_state), (want, want_state))
    assert state.optimizer_step == 4


def test_the_taken_state_owns_its_buffers():
    plain, tx = optax.adam(0.1), ja.multi_steps(optax.adam(0.1), 2)
    inner_state = plain.init(PARAMS)
    state = interop.from_inner_state(tx, inner_state, PARAMS)
    jax.jit(lambda s: s, donate_argnums=0)(state)
    assert optax.tree.get(inner_state, "mu")["b"] == 0


@pytest.mark.parametrize("accumulator", [None, ja.accumulators.compensated()])
def test_every_accumulator_takes_over(accumulator):
    theirs = optax.MultiSteps(optax.sgd(1.0), 4)
    ours = ja.multi_steps(optax.sgd(1.0), 4, accumulator=accumulator)
    params, state = run(theirs.update, theirs.init(PARAMS), PARAMS, range(3))
    want, _ = run(theirs.update, state, params, [3])
    got, _ = run(ours.update, interop.from_optax(ours, state, params), params, [3])
    assert_close(got, want)


def test_wrong_states_are_refused():
    tx = ja.multi_steps(optax.adam(0.1), 2)
    with pytest.raises(TypeError, match=r"must be an `optax.MultiStepsState`"):
        interop.from_optax(tx, optax.adam(0.1).init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="inner_state"):
        interop.from_inner_state(tx, optax.sgd(0.1).init(PARAMS), PARAMS)
    with pytest.raises(TypeError, match="must be a `MultiStepsState`"):
        interop.to_optax(tx, optax.adam(0.1).init(PARAMS), PARAMS)
    with pytest.raises(TypeError, match=r"`tx` must be a `ja.multi_steps`"):
        interop.from_inner_state(optax.adam(0.1), optax.adam(0.1).init(PARAMS), PARAMS)


@pytest.mark.parametrize("use_grad_mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("weight", [512, np.int64(512), jnp.int32(512), 0.5])
def test_what_each_old_micro_step_held_is_said(weight, use_grad_mean):
    """Case 67: a run is taken over after two of four micro-batches of as many tokens each."""
    micro_means = [1.0, 3.0, 5.0, 11.0]
    theirs = optax.MultiSteps(optax.sgd(1.0), 4, use_grad_mean=use_grad_mean)
    tx = ja.multi_steps(optax.sgd(1.0), 4)
    params = jnp.float32(0)
    old = theirs.init(params)
    for mean in micro_means[:2]:
        grad = jnp.float32(mean if use_grad_mean else mean * np.float32(weight))
        _, old = theirs.update(grad, old, params)
    state = interop.from_optax(tx, old, params, weight, use_grad_mean=use_grad_mean)
    assert state.weight == 2 * np.float64(weight)
    for mean in micro_means[2:]:
        sums = jnp.float32(mean) * np.float32(weight)
        updates, state = tx.update(sums, state, params, weight=weight)
    assert updates == -5


def test_the_weight_of_old_micro_steps_is_exact():
    theirs, tx = optax.MultiSteps(optax.sgd(1.0), 4), ja.multi_steps(optax.sgd(1.0), 4)
    old = theirs.init(jnp.float32(0))._replace(mini_step=jnp.int32(3))
    assert interop.from_optax(tx, old, jnp.float32(0), 2**24 + 1).weight == 3 * (2**24 + 1)


def test_old_micro_steps_of_unknown_weight_take_no_weight_beside_them():
    """Counted as 1 beside one of 512 tokens they would be next to nothing."""
    theirs, tx = optax.MultiSteps(optax.sgd(1.0), 4), ja.multi_steps(optax.sgd(1.0), 4)
    params = jnp.float32(0)
    old = theirs.update(jnp.float32(1), theirs.init(params), params)[1]
    state = interop.from_optax(tx, old, params)
    with pytest.raises(TypeError, match=r"from_optax\(tx, state, params, weight=...\)"):
        jax.jit(tx.update)(jnp.float32(1), state, params, weight=512)
    _, state = jax.lax.scan(lambda s, g: (tx.update(g, s)[1], None), state, jnp.ones(3))[::-1]
    closed = interop.from_optax(tx, theirs.init(params), params)
    _, closed = tx.update(jnp.float32(1), closed, params, weight=512)
    assert closed.weight == 512


def test_what_cannot_be_taken_over_is_refused():
    theirs, one = optax.MultiSteps(optax.sgd(1.0), 4), ja.multi_steps(optax.sgd(1.0), 1)
    params = jnp.float32(0)
    old = theirs.update(jnp.float32(1), theirs.init(params), params)[1]
    with pytest.raises(ValueError, match="holds an open window"):
        interop.from_optax(one, old, params)
    for weight in (0, -1, np.nan):
        with pytest.raises(ValueError, match="`weight` must be above 0"):
            interop.from_optax(ja.multi_steps(optax.sgd(1.0), 4), old, params, weight)


def test_leaves_without_a_gradient_are_taken_over():
    params = {"w": jnp.float32(0), "n": None}
    theirs, tx = optax.MultiSteps(optax.sgd(1.0), 2), ja.multi_steps(optax.sgd(1.0), 2)
    grads = {"w": jnp.float32(2), "n": None}
    old = theirs.update(grads, theirs.init(params), params)[1]
    state = interop.from_optax(tx, old, params | {"n": jnp.int32(3)})
    updates, _ = tx.update(grads, state, params)
    assert updates["w"] == -2
    back, _ = theirs.update(grads, interop.to_optax(tx, state, params), params)
    assert back["w"] == -2
