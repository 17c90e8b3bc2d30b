"""The dtype in which sums of gradients travel between devices: `reduce_dtype=`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxaccum as ja

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
BESIDE = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = jnp.arange(16 * 64.0).reshape(16, 64) / 64
W = jnp.ones(64)
HALF = {"reduce_dtype": jnp.bfloat16}


def loss_fn(w, x):
    return ja.Mean(jnp.sum(x @ w), 257 * len(x))


def rounded(devices, dtype=jnp.bfloat16):
    """The window's sum where each device's own is rounded, as float64 would sum them."""
    own = np.asarray(X, np.float64).reshape(devices, -1, 64).sum(1)
    return np.asarray(own.astype(np.float32).astype(dtype), np.float64).sum(0)


def travelling(text):
    """The dtypes of vectors that are reduced in a lowered program."""
    bodies = re.findall(r"(?:all_reduce|reduce_scatter)\".*?->\s*(\S+)", text, re.DOTALL)
    return {re.search(r"tensor<(?:\d+x)+(\w+)>", body)[1] for body in bodies if "x" in body}


@pytest.mark.parametrize("mesh", [MESH, BESIDE], ids=["alone", "beside an automatic axis"])
@pytest.mark.parametrize("specs", [None, P("data")], ids=["whole", "parts"])
@pytest.mark.parametrize("reduction", ["defer", "scatter"])
def test_sums_travel_in_half_and_weights_do_not(mesh, specs, reduction):
    f = ja.accumulate(
        loss_fn,
        num_microbatches=1,
        spmd_axis_name="data",
        grad_specs=specs,
        reduction=reduction,
        **HALF,
    )
    with jax.set_mesh(mesh):
        text = jax.jit(f).lower(W, X).as_text()
        sums = jax.jit(f)(W, X)
    assert (sums.weight, sums.weight.dtype) == (257 * 16, jnp.int32)
    assert sums.grads.dtype == jnp.float32
    np.testing.assert_allclose(sums.grads, rounded(mesh.shape["data"]), rtol=2**-7)
    np.testing.assert_array_equal(sums.loss, jnp.sum(X))
    if mesh is MESH:
        assert travelling(text) == {"bf16"}


def test_the_default_is_float32_and_wider_sums_stay_wide():
    for w, x, dtype in ((W, X, "f32"), (W.astype(jnp.bfloat16), X.astype(jnp.bfloat16), "f32")):
        f = ja.accumulate(loss_fn, num_microbatches=2, spmd_axis_name="data")
        with jax.set_mesh(MESH):
            assert travelling(jax.jit(f).lower(w, x).as_text()) == {dtype}
    with jax.enable_x64(True), jax.set_mesh(MESH):
        f = ja.accumulate(loss_fn, num_microbatches=2, spmd_axis_name="data")
        w, x = (jnp.asarray(np.asarray(a), jnp.float64) for a in (W, X))
        assert travelling(jax.jit(f).lower(w, x).as_text()) == {"f64"}
        wide = ja.accumulate(
            loss_fn, num_microbatches=2, spmd_axis_name="data", reduce_dtype=jnp.float64
        )
        assert travelling(jax.jit(wide).lower(W, X).as_text()) == {"f64"}
        assert jax.jit(wide)(W, X).grads.dtype == jnp.float32


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_a_stream_meets_in_half(check_vma):
    tx = ja.multi_steps(optax.sgd(1.0), 2, axis_name="data", **HALF)
    sums_fn = ja.accumulate(loss_fn, num_microbatches=1)
    state = tx.init(W)
    specs = ja.state_specs(state, "data")

    def update(w, state, x):
        return tx.update(sums_fn(w, x), state, w)

    mapped = jax.jit(
        jax.shard_map(
            update,
            mesh=MESH,
            in_specs=(P(), specs, P("data")),
            out_specs=(P(), specs),
            check_vma=check_vma,
        )
    )
    with jax.set_mesh(MESH):
        state = tx.init(W)
        assert travelling(mapped.lower(W, state, X).as_text()) == {"bf16"}
        for rows in (X, X):
            updates, state = mapped(W, state, rows)
    np.testing.assert_allclose(updates, -2 * rounded(8) / (2 * 257 * 16), rtol=2**-7)


def test_a_training_step_and_the_windows_axis():
    with jax.set_mesh(MESH):
        step = ja.train_step(
            loss_fn, optax.sgd(1.0), num_microbatches=2, spmd_axis_name="data", **HALF
        )
        params, _, _ = step.step(W + 0, step.init(W), X)
        f = ja.window_axis.accumulate(loss_fn, num_microbatches=2, spmd_axis_name="data", **HALF)
        assert travelling(jax.jit(f).lower(W, X).as_text()) == {"bf16"}
        sums = jax.jit(f)(W, X)
    np.testing.assert_allclose(params, W - rounded(8) / (257 * 16), rtol=2**-7)
    np.testing.assert_array_equal(sums.weight, 257 * 16)


@pytest.mark.parametrize("make", [ja.accumulate, ja.value_and_grad])
def test_refusals(make):
    with pytest.raises(TypeError, match="`reduce_dtype` must be a floating dtype"):
        make(loss_fn, num_microbatches=2, spmd_axis_name="data", reduce_dtype=jnp.int32)
    with pytest.raises(ValueError, match="`reduce_dtype` bfloat16 is that of the reduction over"):
        make(loss_fn, num_microbatches=2, **HALF)
    with pytest.raises(ValueError, match=r"multi_steps: `reduce_dtype` bfloat16 is that"):
        ja.multi_steps(optax.sgd(1.0), 2, **HALF)
