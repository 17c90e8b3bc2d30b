"""The last micro-batch outside of the loop: `overlap=True`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxaccum as ja

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
X = jnp.arange(64.0).reshape(16, 4) % 7 - 3
W = jnp.arange(4.0)


def loss_fn(w, x):
    y = x @ w
    return ja.mean(y), {"all": ja.Concat(y), "each": jnp.max(y), "last": ja.Last(y[0])}


@pytest.mark.parametrize(
    "cut", [{"num_microbatches": 4}, {"num_microbatches": 3}, {"microbatch_size": 16}], ids=str
)
@pytest.mark.parametrize("skip", [False, True, "window"])
def test_the_same_window(cut, skip):
    options = {"has_aux": True, "skip_nonfinite": skip, **cut}
    args = W, X.at[3].set(jnp.inf) if skip is True else X
    want = jax.jit(ja.accumulate(loss_fn, **options))(*args)
    got = jax.jit(ja.accumulate(loss_fn, overlap=True, **options))(*args)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_loop_is_one_shorter_and_threads_go_on():
    def stateful(w, x, *, model_state):
        return ja.mean(x @ w), model_state * 2 + x.sum()

    options = {"num_microbatches": 4, "model_state": "sequential"}
    fn = ja.value_and_grad(stateful, overlap=True, **options)
    want = ja.value_and_grad(stateful, **options)(W, X, model_state=jnp.float32(1))
    jax.tree.map(np.testing.assert_array_equal, fn(W, X, model_state=jnp.float32(1)), want)
    text = str(jax.make_jaxpr(fn)(W, X, model_state=jnp.float32(1)))
    assert "length=3" in text
    assert "length=4" not in text


def test_over_devices_and_in_a_step():
    with jax.set_mesh(MESH):
        for overlap in (False, True):
            init, step = ja.train_step(
                lambda w, x: ja.mean(x @ w),
                optax.sgd(1.0),
                num_microbatches=2,
                spmd_axis_name="data",
                overlap=overlap,
            )
            params, _, info = step(W + 0, init(W), X)
            np.testing.assert_array_equal(params, W - X.mean(0))
            np.testing.assert_array_equal(info.loss, (X @ W).mean())
        fn = ja.accumulate(
            lambda w, x: ja.mean(x @ w),
            num_microbatches=2,
            spmd_axis_name="data",
            overlap=True,
        )
        some = jax.jit(fn)(W, X, num_real=jnp.array([0, 1] * 4))  # no last one is known
        np.testing.assert_array_equal(some.grads, X[2::4].sum(0))


def test_a_refusal():
    with pytest.raises(TypeError, match="value_and_grad: `overlap` must be True or False"):
        ja.value_and_grad(loss_fn, num_microbatches=2, overlap=1)
