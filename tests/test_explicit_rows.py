"""Explicit axes: rows typed as split, parameters in parts beside them, an Auto axis beside one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxaccum as ja

EXPLICIT = jax.make_mesh((4, 2), ("data", "model"))
MIXED = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
X = jnp.arange(64.0).reshape(16, 4) % 7 - 3
W = jnp.arange(4.0)


@pytest.mark.parametrize(
    "cut", [{"num_microbatches": k} for k in (3, 4, 8)] + [{"microbatch_size": 5}], ids=str
)
def test_rows_typed_as_split_may_be_cut_unevenly(cut):
    f = ja.value_and_grad(lambda w, x: ja.mean(x @ w), **cut)
    with jax.set_mesh(EXPLICIT):
        loss, grads = jax.jit(f)(W, jax.device_put(X, P("data")))
    np.testing.assert_allclose(loss, (X @ W).mean(), rtol=1e-6)
    np.testing.assert_allclose(grads, X.mean(0), rtol=1e-6)


@pytest.mark.parametrize("spec", [P(), P("data"), P("model")], ids=str)
def test_gradients_of_rows_beside_parameters_in_parts(spec):
    def one(w, x):
        return ja.mean(x @ w)

    def clipped(w, x):
        return ja.accumulate(ja.per_example.clip(one, 2.0), num_microbatches=2)(w, x).grads

    want = clipped(W, X)
    with jax.set_mesh(EXPLICIT):
        w = jax.device_put(W, spec)
        got = jax.jit(clipped)(w, jax.device_put(X, P("data")))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_stream_beside_an_explicit_axis_is_called_again():
    tx = ja.multi_steps(optax.adam(1.0), 2, axis_name="data")
    sums_fn = ja.accumulate(lambda w, x: ja.mean(x @ w), num_microbatches=2)
    alone = ja.multi_steps(optax.adam(1.0), 2)
    own = alone.init(W)
    with jax.set_mesh(MIXED):
        w = jax.device_put(W, P("model"))
        state = tx.init(w)
        specs = ja.state_specs(state, "data")
        step = jax.jit(
            jax.shard_map(
                lambda w, state, x: tx.update(sums_fn(w, x), state, w),
                in_specs=(P(), specs, P("data")),
                out_specs=(P(), specs),
                axis_names={"data"},
            )
        )
        for _ in range(4):
            updates, state = step(w, state, X)
    for _ in range(4):
        expected, own = alone.update(sums_fn(W, X), own, W)
    np.testing.assert_allclose(updates, expected, rtol=1e-6)
    assert state.optimizer_step == 2
