"""How `multi_steps` and `train_step` hand over to optimizers that are particular about it.

That every optimizer of Optax equals itself on the window's mean gradient is tested in
`test_interop_matrix.py`.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from interop_matrix import adversary, loss
from jax.sharding import PartitionSpec as P
from optax import contrib
from test_stream import assert_same_bits, train

import jaxaccum as ja

NARROW = {
    "novograd": lambda: optax.novograd(0.125),
    "galore": lambda: contrib.galore(0.125, rank=2),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.125)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.125), 3),
}


def narrow_params():
    return {"w": jnp.arange(12, dtype=jnp.bfloat16).reshape(4, 3) / 8, "b": jnp.ones(3)}


# One precision.


def dtypes_seen(tx, params, grads):
    """The dtypes of gradients, state and parameters in the runs that a spy around `tx` sees."""
    seen = []

    def update_fn(updates, state, params=None, **extra):
        seen.append([x.dtype for x in jax.tree.leaves((updates, state, params))])
        return tx.update(updates, state, params, **extra)

    stream = ja.multi_steps(optax.GradientTransformationExtraArgs(tx.init, update_fn), 2)
    train(stream, params, grads)
    return seen


def test_an_optimizer_that_promotes_sees_parameters_and_state_as_they_are():
    params = jnp.ones(3, jnp.bfloat16)
    *_, last = dtypes_seen(optax.trace(0.5), params, [params, params])
    assert last == [jnp.float32, jnp.bfloat16, jnp.bfloat16]


def test_an_optimizer_that_refuses_to_mix_dtypes_sees_float32():
    def update_fn(updates, state, params=None):
        del params
        return jax.lax.add(updates, state), jax.lax.add(updates, state)

    strict = optax.GradientTransformation(jnp.zeros_like, update_fn)
    params = jnp.ones(3, jnp.bfloat16)
    *_, last = dtypes_seen(strict, params, [params, params])
    assert last == [jnp.float32] * 3
    after, state = train(ja.multi_steps(strict, 2), params, [params, 3 * params])
    assert_same_bits(after, jnp.full(3, 3, jnp.bfloat16))
    assert_same_bits(state.inner_state, jnp.full(3, 2, jnp.bfloat16))


def test_gradients_as_narrow_as_the_parameters_are_handed_over_untouched():
    params = jnp.ones(3, jnp.bfloat16)
    stream = ja.multi_steps(optax.novograd(0.125), 1)
    after, state = train(stream, params, [params])
    plain = train(optax.novograd(0.125), params, [params])
    assert_same_bits((after, state.inner_state), plain)


@pytest.mark.parametrize("name", NARROW)
def test_train_step_in_one_precision(name):
    def loss_fn(params, x):
        return ja.mean(x @ params["w"] + params["b"][None, :])

    init, step = ja.train_step(loss_fn, NARROW[name](), num_microbatches=3)
    params = narrow_params()
    types = jax.tree.map(jnp.result_type, (params, init(params)))
    batch = jnp.ones((7, 4))
    state = init(params)
    for _ in range(2):
        params, state, info = step(params, state, batch)
    assert jax.tree.map(jnp.result_type, (params, state)) == types
    assert info.optimizer_step == 2
    chex.assert_tree_all_finite((params, state))


def test_one_precision_over_devices():
    """Eight devices with the same gradient make the step of one."""
    mesh = jax.make_mesh((8,), ("data",))
    tx = ja.multi_steps(optax.novograd(0.125), 2, axis_name="data")
    params = narrow_params()
    rng = np.random.default_rng(0)
    grads = [
        jax.tree.map(lambda x: jnp.asarray(rng.integers(-8, 9, x.shape), x.dtype), params)
        for _ in range(4)
    ]
    specs = ja.state_specs(jax.eval_shape(tx.init, params), "data")

    def micro_step(params, state, grad):
        grad = jax.tree.map(lambda g: jax.lax.pcast(g, "data", to="varying"), grad)
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    init = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs))
    step = jax.jit(
        jax.shard_map(micro_step, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs))
    )
    got, state = params, init(params)
    for grad in grads:
        got, state = step(got, state, grad)
    alone = train(ja.multi_steps(optax.novograd(0.125), 2), params, grads)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        (got, state.inner_state), (alone[0], alone[1].inner_state)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(alone[0]), strict=True):
        rtol = 4 * float(jnp.finfo(a.dtype).eps)
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=rtol)


def test_an_error_of_the_optimizer_comes_through_as_it_is():
    params = jnp.ones(3, jnp.bfloat16)
    tx = ja.multi_steps(contrib.momo(), 2)
    with pytest.raises(TypeError, match="required keyword-only argument: 'value'"):
        tx.update(params, tx.init(params), params)


# What wraps in one place only.


def test_lookahead_inside_syncs_by_windows_and_flushes():
    tx = ja.multi_steps(optax.lookahead(optax.sgd(1.0), sync_period=2, slow_step_size=0.5), 2)
    params, state = train(
        tx, optax.LookaheadParams.init_synced(jnp.float32(0)), [jnp.float32(g) for g in (1, 3, 5)]
    )
    assert params == optax.LookaheadParams(-2, 0)
    updates, state = ja.flush(tx, state, params)
    assert optax.apply_updates(params, updates) == optax.LookaheadParams(-3.5, -3.5)
    assert state.optimizer_step == 2


def test_sam_takes_two_windows_in_turn():
    """The adversarial step, then the step at the perturbed place, which goes back first."""
    tx = ja.multi_steps(contrib.sam(optax.sgd(1.0), optax.sgd(0.5)), 2)
    one, state = train(tx, jnp.float32(1), [jnp.float32(2), jnp.float32(6)])
    assert one == 1 + 0.5 * 4  # uphill
    two, state = train(tx, one, [jnp.float32(1), jnp.float32(3)], state=state)
    assert two == 1 - 2
    assert state.optimizer_step == 2
    _, state = train(tx, two, [jnp.float32(1)], state=state)
    updates, state = ja.flush(tx, state, two)  # offers a `value`, which SAM does not take
    assert (updates, state.optimizer_step) == (0.5, 3)


def test_opaque_sam_evaluates_its_gradient_once_per_window():
    evaluations = []

    def grad_fn(params, step):
        jax.debug.callback(lambda: evaluations.append(step))
        return jax.grad(loss)(params)

    tx = ja.multi_steps(contrib.sam(optax.sgd(0.125), adversary(), opaque_mode=True), 3)
    params = jnp.zeros(2)
    state = tx.init(params)
    for _ in range(6):
        updates, state = tx.update(jnp.ones(2), state, params, grad_fn=grad_fn)
        params = optax.apply_updates(params, updates)
    jax.effects_barrier()
    assert len(evaluations) == 2


@pytest.mark.parametrize("nested", [False, True])
def test_train_step_with_an_optimizer_that_takes_no_extra_arguments(nested):
    sam = contrib.sam(optax.sgd(1.0), optax.sgd(0.5))
    init, step = ja.train_step(
        lambda w, x: ja.mean(w * x), optax.chain(sam) if nested else sam, num_microbatches=2
    )
    w = jnp.float32(1)
    state = init(w)
    for x in ([2.0, 6.0], [1.0, 3.0]):
        w, state, _ = step(w, state, jnp.array(x))
    assert w == 1 - 2


def test_plateau_around_a_window_judges_micro_batches():
    """The same wrapper in both places: only inside it sees the window's mean loss."""

    def not_better(tx, state_of, value_of):
        state, w = tx.init(jnp.float32(0)), jnp.float32(0)
        for value in (1.0, 9.0, 1.0, 9.0):
            _, state = tx.update(jnp.float32(1), state, w, value=value_of(value))
        return state_of(state).plateau_count

    plateau = contrib.reduce_on_plateau(patience=5)
    inside = ja.multi_steps(optax.chain(optax.sgd(1.0), plateau), 2)
    around = optax.chain(ja.multi_steps(optax.sgd(1.0), 2), plateau)
    assert not_better(inside, lambda s: s.inner_state[1], lambda v: ja.Mean(v, 1)) == 1
    assert not_better(around, lambda s: s[1], jnp.float32) == 3


class Traced:
    """An optimizer that counts how often its update is traced."""

    def __init__(self, inner):
        self.inner, self.traces = inner, 0

    def init(self, params):
        return self.inner.init(params)

    def update(self, updates, state, params=None, **extra_args):
        self.traces += 1
        return self.inner.update(updates, state, params, **extra_args)


@pytest.mark.parametrize("skip", [False, True, "window"])
def test_an_optimizer_is_traced_once_for_a_step_and_for_a_call_of_a_stream(skip):
    params = {"w": jnp.ones(3), "weakly typed": jnp.full(3, 1.0)}
    inner = Traced(optax.with_extra_args_support(optax.adam(0.1)))
    init, step = ja.train_step(
        lambda p, x: ja.mean(x @ p["w"]), inner, num_microbatches=2, skip_nonfinite=skip
    )
    jax.eval_shape(step, params, init(params), jnp.ones((4, 3)))
    assert inner.traces == 1
    inner.traces = 0
    tx = ja.multi_steps(inner, 2, skip_nonfinite=skip)
    jax.eval_shape(tx.update, params, tx.init(params), params)
    assert inner.traces == 1
