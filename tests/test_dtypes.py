"""Floats of a byte and less, integers of less: JAX promotes them to nothing, a window sums them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import assert_equal

import jaxaccum as ja
from jaxaccum.core import dtypes

FLOATS = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3b11fnuz, jnp.float4_e2m1fn]
INTEGERS = [jnp.int4, jnp.uint4, jnp.int2]
PARAMS = {jnp.dtype(d).name: jnp.asarray([1, 0, 1], d) for d in FLOATS}


def linear(params, x):
    """The mean over rows of `x` times every parameter."""
    whole = sum(p.astype(jnp.float32) for p in params.values())
    return ja.mean((x[:, None] * whole[None, :]).sum(1))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=lambda d: jnp.dtype(d).name)
def test_means_of_narrow_numbers(dtype):
    x = jnp.asarray([1, 0, 1, 1], dtype)
    aux = {"sum": ja.Sum(x), "mean": ja.mean(x), "pair": ja.Mean(x[0], x[2]), "max": ja.Max(x)}
    f = ja.value_and_grad(lambda w, b: (ja.mean(w * b), aux), num_microbatches=3, has_aux=True)
    (_, got), _ = f(jnp.float32(1), jnp.ones(3))
    want = {"sum": [3, 0, 3, 3], "mean": 0.75, "pair": 1.0, "max": [1, 0, 1, 1]}
    assert_equal(jax.tree.map(lambda v: np.asarray(v, np.float32), got), want)
    assert ja.merge(ja.Mean(x[0], x[2]), ja.Mean(x[1], x[3])).value == 0.5
    assert ja.Mean.from_value(x[0], x[2]).total == 1


@pytest.mark.parametrize(
    "accumulator",
    [None, ja.accumulators.compensated(), ja.accumulators.chunked(every=2)],
    ids=["plain", "compensated", "chunked"],
)
@pytest.mark.parametrize("skip", [False, True, "window"])
def test_narrow_parameters(accumulator, skip):
    options = {"microbatch_size": 2, "accumulator": accumulator, "skip_nonfinite": skip}
    x = jnp.array(
        [1.0, 2.0] * 40
    )  # each micro-batch's 3 fits into every dtype, the sum 120 does not
    sums = ja.accumulate(linear, **options)(PARAMS, x)
    assert_equal(sums.grads, jax.tree.map(lambda p: np.full(3, 120, np.float32), PARAMS))
    _, grads = ja.value_and_grad(linear, **options)(PARAMS, x)
    assert_equal(grads, jax.tree.map(lambda p: np.full(3, 1.5).astype(p.dtype), PARAMS))


@pytest.mark.parametrize("optimizer", [optax.sgd(0.25), optax.adam(0.5)], ids=["sgd", "adam"])
def test_narrow_parameters_are_trained(optimizer):
    """The gradients 1 and 3 move every parameter by -0.5, in a step and in a stream."""
    x = jnp.array([1.0, 3.0])
    want = jax.tree.map(lambda p: np.array([0.5, -0.5, 0.5]).astype(p.dtype), PARAMS)
    init, step = ja.train_step(linear, optimizer, num_microbatches=2, donate=False)
    assert_equal(step(PARAMS, init(PARAMS), x)[0], want)
    tx = ja.multi_steps(optimizer, 2)
    state, f = tx.init(PARAMS), ja.value_and_grad(linear, num_microbatches=1)
    for row in x:
        updates, state = tx.update(f(PARAMS, row[None])[1], state, PARAMS)
    assert_equal(optax.apply_updates(PARAMS, updates), want)


def test_the_ends_of_a_range():
    for dtype in [*FLOATS, *INTEGERS, jnp.float8_e8m0fnu, jnp.bfloat16, jnp.uint32, jnp.bool_]:
        low, high = (jnp.asarray(end(dtype), dtype) for end in (dtypes.lowest, dtypes.highest))
        some = jnp.asarray([1, 1], dtype)
        assert_equal(jnp.maximum(some, low), some)
        assert_equal(jnp.minimum(some, high), some)


def test_common_dtypes():
    assert dtypes.promote(jnp.float8_e5m2, jnp.bfloat16) == jnp.float32
    assert dtypes.promote(jnp.ones(2, jnp.int4), jnp.ones(2, jnp.int8)) == jnp.int32
    assert dtypes.promote(jnp.bfloat16, 1.0) == jnp.bfloat16
    assert dtypes.promote(jnp.float32(1), jnp.int32) == jnp.float32
