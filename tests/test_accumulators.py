"""How a sum is carried: error, memory, randomness, device reduction."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxaccum as ja

KINDS = {
    "plain": ja.accumulators.plain(),
    "compensated": ja.accumulators.compensated(),
    "stochastic": ja.accumulators.stochastic(),
    "chunked": ja.accumulators.chunked(every=4),
}
# The largest relative error of a sum of 64 float32 values of one sign.
ERRORS = {"plain": 64 * 2**-24, "compensated": 2**-23, "stochastic": 0.05, "chunked": 4 * 2**-8}
each = pytest.mark.parametrize("kind", KINDS)


def loss_fn(w, x):
    return ja.mean(x @ w)


def rows(number=64, width=5):
    rng = np.random.default_rng(0)
    return rng.uniform(0.5, 1.5, (number, width)).astype(np.float32)


def window(kind, x, w=None, **options):
    f = ja.accumulate(loss_fn, accumulator=KINDS[kind], **options)
    w = jnp.zeros(x.shape[1]) if w is None else w
    key = {"key": jax.random.key(0)} if kind == "stochastic" else {}
    return jax.jit(lambda w, x: f(w, x, **key))(w, x)


@each
@pytest.mark.parametrize("cut", [{"num_microbatches": 64}, {"microbatch_size": 5}])
def test_sums_are_near_and_read_in_float32(kind, cut):
    x = rows()
    sums = window(kind, x, **cut)
    assert sums.grads.dtype == jnp.float32
    want = x.astype(np.float64).sum(0)
    np.testing.assert_allclose(sums.grads, want, rtol=ERRORS[kind])


@each
def test_streams_are_near_and_read_in_float32(kind):
    x = rows(32)
    tx = ja.multi_steps(optax.sgd(1.0), 32, accumulator=KINDS[kind])
    w = jnp.zeros(5)
    state = tx.init(w)
    kinds = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]

    def step(state, inputs):
        grad, number = inputs
        key = {"key": jax.random.fold_in(jax.random.key(1), number)} if kind == "stochastic" else {}
        updates, state = tx.update(grad, state, w, **key)
        return state, (updates, state.grad_sum)

    state, (updates, sums) = jax.jit(lambda s: jax.lax.scan(step, s, (x, jnp.arange(32))))(state)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)] == kinds
    assert sums.dtype == updates.dtype == jnp.float32
    running = np.cumsum(x.astype(np.float64), 0)
    np.testing.assert_allclose(sums[:-1], running[:-1], rtol=ERRORS[kind])
    np.testing.assert_allclose(-updates[-1], running[-1] / 32, rtol=ERRORS[kind])
    assert (sums[-1] == 0).all()


@pytest.mark.parametrize("kind", ["stochastic", "chunked"])
def test_a_thousand_ones_do_not_stall(kind):
    """A plain bfloat16 sum stops at 256."""
    sums = window(
        kind, jnp.ones((1000, 50), jnp.bfloat16), jnp.zeros(50, jnp.bfloat16), num_microbatches=1000
    )
    np.testing.assert_allclose(sums.grads.mean(), 1000, rtol=0.01)


def test_stochastic_rounding_is_unbiased():
    """1 + 2**-10 lies an eighth of the way between two bfloat16 numbers."""
    x = jnp.full((1, 4096), 1 + 2**-10, jnp.float32)
    sums = window("stochastic", jnp.concatenate([x, jnp.zeros_like(x)]), num_microbatches=2)
    assert set(np.unique(sums.grads)) == {1, 1 + 2**-7}
    share = float((sums.grads > 1).mean())
    assert abs(share - 1 / 8) < 5 * np.sqrt(1 / 8 * 7 / 8 / 4096)


def test_stochastic_rounding_repeats_with_its_key_only():
    x = rows()
    f = jax.jit(ja.accumulate(loss_fn, num_microbatches=64, accumulator=KINDS["stochastic"]))
    w = jnp.zeros(5)
    first, again, other = (f(w, x, key=jax.random.key(k)).grads for k in (0, 0, 1))
    assert jnp.array_equal(first, again)
    assert not jnp.array_equal(first, other)


def test_stochastic_rounding_needs_a_key():
    with pytest.raises(ValueError, match=r"accumulate: the accumulator .* needs `key=`"):
        ja.accumulate(loss_fn, num_microbatches=2, accumulator=KINDS["stochastic"])(
            jnp.zeros(5), rows()
        )
    tx = ja.multi_steps(optax.sgd(1.0), 2, accumulator=KINDS["stochastic"])
    with pytest.raises(ValueError, match=r"multi_steps: the accumulator .* needs `key=`"):
        tx.update(jnp.zeros(5), tx.init(jnp.zeros(5)))


@pytest.mark.parametrize(("kind", "size"), [("plain", 4), ("compensated", 8), ("stochastic", 2)])
def test_bytes_of_a_stream(kind, size):
    state = ja.multi_steps(optax.sgd(1.0), 8, accumulator=KINDS[kind]).init(jnp.zeros(1000))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state.grad_carry)) == 1000 * size


@each
def test_wide_gradients_stay_wide(kind, x64):
    x = rows().astype(np.float64)
    sums = window(kind, x, jnp.zeros(5, jnp.float64), num_microbatches=64)
    assert sums.grads.dtype == jnp.float64
    np.testing.assert_allclose(sums.grads, x.sum(0), rtol=1e-13)


@each
def test_devices_meet_in_float32(kind):
    x = rows()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    f = ja.accumulate(loss_fn, num_microbatches=4, accumulator=KINDS[kind], axis_name="data")
    key = {"key": jax.random.key(0)} if kind == "stochastic" else {}
    step = jax.shard_map(
        lambda w, x: f(w, x, **key).grads, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    grads = jax.jit(step)(jnp.zeros(5), x)
    np.testing.assert_allclose(grads, x.astype(np.float64).sum(0), rtol=ERRORS[kind])


@each
@pytest.mark.parametrize("route", ["accumulate", "multi_steps"])
def test_skipping_over_devices(kind, route):
    """Case 79: one nan, in a window where each device skips alone and in a stream where all do."""
    x, gone = rows(), [19]
    x[19] = np.nan
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    options = {"accumulator": KINDS[kind], "axis_name": "data", "skip_nonfinite": True}

    def grads(w, x):
        key = {"key": jax.random.key(0)} if kind == "stochastic" else {}
        if route == "accumulate":
            return ja.accumulate(loss_fn, num_microbatches=8, **options)(w, x, **key).grads
        tx = ja.multi_steps(optax.sgd(1.0), 7, normalize=False, **options)
        state = tx.init(w)

        def step(state, row):
            updates, state = tx.update(row, state, w, weight=1, **key)
            return state, updates

        return -jax.lax.scan(step, state, x)[1].sum(0)

    step = jax.shard_map(grads, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    if route == "multi_steps":  # the micro-step of the nan is left out on every device
        gone = np.arange(3, 64, 8)
    want = np.delete(x, gone, 0).astype(np.float64).sum(0)
    np.testing.assert_allclose(jax.jit(step)(jnp.zeros(5), x), want, rtol=ERRORS[kind])


@each
def test_skipping_and_uneven_cuts(kind):
    x = rows(10)
    x[3] = np.nan
    sums = window(kind, x, num_microbatches=10, skip_nonfinite=True)
    np.testing.assert_allclose(sums.grads, np.delete(x, 3, 0).sum(0), rtol=ERRORS[kind])
    assert sums.num_skipped == 1


# Derivatives of what a window returns


@each
def test_derivatives_are_those_of_the_unrounded_sum(kind):
    """The mean of (w x)**3 for x from 0 to 5 has the derivatives 112.5, 225, 225, 0 at w = 1."""
    x = jnp.arange(6.0)
    f = ja.value_and_grad(
        lambda w, x: ja.mean((w * x) ** 3), num_microbatches=4, accumulator=KINDS[kind]
    )
    key = {"key": jax.random.key(0)} if kind == "stochastic" else {}

    def grad(w):
        return f(w, x, **key)[1]

    def product(w):  # its second derivative holds the gradient's value, first and second derivative
        return w * grad(w)

    def derivatives(w):
        return {
            "reverse": jax.grad(grad)(w),
            "forward": jax.jvp(grad, (w,), (jnp.ones_like(w),))[1],
            "second": jax.grad(jax.grad(grad))(w),
            "hessian": jax.hessian(product)(w),
            "reverse twice": jax.grad(jax.grad(product))(w),
        }

    want = {"reverse": 225, "forward": 225, "second": 225, "hessian": 675, "reverse twice": 675}
    got = jax.jit(derivatives)(jnp.float32(1))
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=min(ERRORS[kind], 2**-7), err_msg=name)


@pytest.mark.parametrize("kind", ["stochastic", "chunked"])
def test_derivatives_of_streams_and_of_microbatch(kind):
    key = {"key": jax.random.key(0)} if kind == "stochastic" else {}
    tx = ja.multi_steps(optax.sgd(1.0), 2, accumulator=KINDS[kind])

    def update(w):
        state = tx.init(w)
        for x in (2.0, 4.0):
            updates, state = tx.update(x * w**2, state, w, **key)
        return -updates

    def combined(w):
        g = ja.microbatch(
            lambda w, x: ja.mean((w * x) ** 2), num_microbatches=3, accumulator=KINDS[kind]
        )
        return g(w, jnp.arange(6.0), **key)

    np.testing.assert_allclose(jax.grad(update)(jnp.float32(1)), 6, rtol=2**-7)
    np.testing.assert_allclose(jax.grad(jax.grad(combined))(jnp.float32(1)), 110 / 6, rtol=2**-7)


@pytest.mark.parametrize(
    ("call_fn", "message"),
    [
        (lambda: ja.accumulators.plain(dtype=jnp.bfloat16), "float32 or wider"),
        (lambda: ja.accumulators.plain(dtype=int), "floating dtype"),
        (lambda: ja.accumulators.stochastic(dtype=jnp.float16), "must be bfloat16"),
        (lambda: ja.accumulators.chunked(dtype="no dtype"), "floating dtype"),
        (lambda: ja.accumulators.chunked(every=0), "`every` must be at least 1"),
    ],
)
def test_wrong_options_are_refused(call_fn, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call_fn()
