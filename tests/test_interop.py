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
    taken = interop.from_optax(ours, params, state, use_grad_mean=mean)
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
    got, _ = run(theirs.update, interop.to_optax(state), params, range(at, 8))
    assert_close(got, want)


def test_unequal_weights_cannot_go_to_optax():
    tx = ja.multi_steps(optax.sgd(1.0), 4)
    _, state = tx.update(gradients(0), tx.init(PARAMS), PARAMS, weight=3)
    with pytest.raises(ValueError, match="1 micro-steps of the weight 3"):
        interop.to_optax(state)


def test_accumulation_is_taken_up_in_a_running_optimizer():
    plain = optax.adamw(0.1)
    tx = ja.multi_steps(optax.adamw(0.1), 2)
    params, inner_state = run(plain.update, plain.init(PARAMS), PARAMS, range(3))
    state = interop.from_inner_state(tx, params, inner_state, optimizer_step=3)
    new, state = run(tx.update, state, params, [5, 5])
    want, want_state = run(plain.update, inner_state, params, [5])
    assert_close((new, state.inner_state), (want, want_state))
    assert state.optimizer_step == 4


def test_the_taken_state_owns_its_buffers():
    plain, tx = optax.adam(0.1), ja.multi_steps(optax.adam(0.1), 2)
    inner_state = plain.init(PARAMS)
    state = interop.from_inner_state(tx, PARAMS, inner_state)
    jax.jit(lambda s: s, donate_argnums=0)(state)
    assert optax.tree.get(inner_state, "mu")["b"] == 0


@pytest.mark.parametrize("accumulator", [None, ja.accumulators.compensated()])
def test_every_accumulator_takes_over(accumulator):
    theirs = optax.MultiSteps(optax.sgd(1.0), 4)
    ours = ja.multi_steps(optax.sgd(1.0), 4, accumulator=accumulator)
    params, state = run(theirs.update, theirs.init(PARAMS), PARAMS, range(3))
    want, _ = run(theirs.update, state, params, [3])
    got, _ = run(ours.update, interop.from_optax(ours, params, state), params, [3])
    assert_close(got, want)


def test_wrong_states_are_refused():
    tx = ja.multi_steps(optax.adam(0.1), 2)
    with pytest.raises(TypeError, match=r"must be an `optax.MultiStepsState`"):
        interop.from_optax(tx, PARAMS, optax.adam(0.1).init(PARAMS))
    with pytest.raises(ValueError, match="inner_state"):
        interop.from_inner_state(tx, PARAMS, optax.sgd(0.1).init(PARAMS))
    with pytest.raises(TypeError, match="must be a `MultiStepsState`"):
        interop.to_optax(optax.adam(0.1).init(PARAMS))
    with pytest.raises(TypeError, match=r"`tx` must be a `ja.multi_steps`"):
        interop.from_inner_state(optax.adam(0.1), PARAMS, optax.adam(0.1).init(PARAMS))
