"""`ja.microbatch`: any function of window-wide sums, exact for every cut, with its derivative.

The oracle is the same function on the full batch in one pass, in float64.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxaccum as ja

ROWS, FEATURES, WIDTH = 24, 4, 3
CUTS = [
    *({"num_microbatches": k} for k in (1, 2, 5, 24)),
    *({"microbatch_size": s} for s in (7, 24)),
]
TOLERANCE = {"float32": 5e-6, "float64": 1e-12}


def problem(dtype="float64"):
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return draw(FEATURES, WIDTH), {"x": draw(ROWS, FEATURES), "y": draw(ROWS, WIDTH)}


def outputs(w, batch):
    """One output of every kind, all inexact."""
    hidden = jnp.tanh(batch["x"] @ w)
    return {
        "sum": ja.Sum(jnp.sum(hidden * batch["y"])),
        "mean": ja.mean(hidden**2, where=batch["y"] > 0),
        "max": ja.Max(jnp.max(hidden, axis=0)),
        "min": ja.Min(jnp.min(hidden)),
        "rows": ja.Concat(hidden),
        "vector": (ja.Sum(jnp.sum(hidden, axis=0)), ja.Sum(jnp.sum(batch["y"] > 0))),
    }


def objective(out):
    """A function of the outputs that is no sum over rows, with a contrastive part."""
    similar = jax.nn.log_softmax(out["rows"] @ out["rows"].T)
    vector, number = out["vector"]
    return (
        out["sum"] * out["mean"]
        + jnp.sum(out["max"] ** 2)
        + out["min"] * jnp.sum(vector**2) / number
        + jnp.sum(jnp.diag(similar))
    )


def plain(tree):
    marks = (ja.Mean, ja.Sum, ja.Max, ja.Min, ja.Concat, ja.Last)
    return jax.tree.map(lambda x: x.value, tree, is_leaf=lambda x: isinstance(x, marks))


def full(w, batch):
    return objective(plain(outputs(w, batch)))


def deviation(got, want):
    """The largest deviation of any leaf, relative to that leaf's largest entry."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)

    def one(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)

    return max(jax.tree.leaves(jax.tree.map(one, got, want)))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_equals_the_full_batch(cut, x64):
    w, batch = problem()
    want = jax.value_and_grad(full, (0, 1))(w, batch)
    g = ja.microbatch(outputs, argnums=(0, 1), **cut)
    got = jax.jit(jax.value_and_grad(lambda w, b: objective(g(w, b)), (0, 1)))(w, batch)
    assert deviation(got, want) < TOLERANCE["float64"]


def test_float32():
    w, batch = problem("float32")
    with jax.enable_x64(True):
        want = jax.value_and_grad(full, (0, 1))(*problem("float64"))
    g = ja.microbatch(outputs, argnums=(0, 1), num_microbatches=5)
    got = jax.jit(jax.value_and_grad(lambda w, b: objective(g(w, b)), (0, 1)))(w, batch)
    want = jax.tree.map(lambda x: np.asarray(x, np.float32), want)
    assert deviation(jax.tree.map(np.asarray, got), want) < TOLERANCE["float32"]


def _on_devices(w, batch, *, check_vma=True, types=AxisType.Auto):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(types,))
    g = ja.microbatch(outputs, num_microbatches=2, argnums=(0, 1), axis_name="data")
    step = jax.value_and_grad(lambda w, b: objective(g(w, b)), (0, 1))
    run = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=(P(), (P(), P("data"))),
        check_vma=check_vma,
    )
    return jax.jit(run)(w, batch)


@pytest.mark.parametrize("check_vma", [True, False])
def test_values_alone_in_a_shard_map_outside_of_jit(check_vma):
    g = ja.microbatch(
        lambda w, x: {"sum": ja.Sum(jnp.sum(w * x)), "max": ja.Max(jnp.max(w * x))},
        num_microbatches=2,
        axis_name="data",
    )
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    got = jax.shard_map(g, mesh=mesh, **specs)(jnp.float32(2), jnp.arange(8.0))
    assert got == {"sum": 56.0, "max": 14.0}


def _spmd(w, batch, *, types):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(types,))
    with jax.set_mesh(mesh):
        g = ja.microbatch(outputs, num_microbatches=3, argnums=(0, 1), spmd_axis_name="data")
        sharded = jax.device_put(batch, P("data"))
        return jax.jit(jax.value_and_grad(lambda w, b: objective(g(w, b)), (0, 1)))(w, sharded)


ROUTES = {
    "checked": _on_devices,
    "unchecked": functools.partial(_on_devices, check_vma=False),
    "spmd auto": functools.partial(_spmd, types=AxisType.Auto),
    "spmd explicit": functools.partial(_spmd, types=AxisType.Explicit),
}


@pytest.mark.parametrize("route", ROUTES)
def test_devices(route, x64):
    w, batch = problem()
    want = jax.value_and_grad(full, (0, 1))(w, batch)
    assert deviation(ROUTES[route](w, batch), want) < TOLERANCE["float64"]


def test_columns_in_parts_over_another_explicit_axis():
    """Rows and stacks of outputs whose type says that they lie in parts over a model axis."""

    def columns(w, x):
        y = jnp.sin(x @ w)
        return {"rows": ja.Concat(y), "stack": jnp.sum(y, axis=0), "last": ja.Last(y[-1])}

    def loss(out):
        return jnp.sum(jnp.cumsum(out["rows"], axis=0) ** 2) + jnp.sum(out["last"])

    rng = np.random.default_rng(0)
    w, x = jnp.asarray(rng.normal(size=(3, 4))), jnp.asarray(rng.normal(size=(24, 3)))
    want = jax.grad(lambda w: loss({"rows": jnp.sin(x @ w), "last": jnp.sin(x @ w)[-1]}))(w)
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"))):
        g = ja.microbatch(columns, num_microbatches=3, spmd_axis_name="data")
        parts = jax.device_put(w, P(None, "model")), jax.device_put(x, P("data"))
        assert jax.jit(g)(*parts)["stack"].shape == (12, 4)
        got = jax.jit(jax.grad(lambda w, x: loss(g(w, x))))(*parts)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_pmap(x64):
    w, batch = problem()
    g = ja.microbatch(outputs, num_microbatches=2, axis_name="data")
    grad = jax.pmap(jax.grad(lambda w, b: objective(g(w, b))), axis_name="data", in_axes=(None, 0))(
        w, jax.tree.map(lambda x: x.reshape(8, 3, -1), batch)
    )
    want = jax.grad(full)(w, batch)
    for device in range(8):
        assert deviation(grad[device], want) < TOLERANCE["float64"]


def test_one_reduction_over_devices_and_none_in_a_loop():
    w, batch = problem("float32")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    g = ja.microbatch(
        lambda w, b: ja.Sum(jnp.sum(jnp.tanh(b["x"] @ w))), num_microbatches=3, axis_name="data"
    )
    step = jax.shard_map(
        jax.grad(lambda w, b: g(w, b) ** 2), mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    ja.audit(step, w, batch, min_bytes=1).assert_deferred()


def test_two_forwards_and_one_backward():
    calls = []

    @jax.custom_vjp
    def layer(x):
        jax.debug.callback(lambda: calls.append("forward"))
        return jnp.tanh(x)

    def forward(x):
        return layer(x), x

    def backward(x, ct):
        jax.debug.callback(lambda: calls.append("backward"))
        return (ct * (1 - jnp.tanh(x) ** 2),)

    layer.defvjp(forward, backward)
    w, batch = problem("float32")
    g = ja.microbatch(lambda w, b: ja.Sum(jnp.sum(layer(b["x"] @ w))), num_microbatches=6)
    jax.block_until_ready(jax.jit(jax.grad(lambda w: g(w, batch) ** 2))(w))
    jax.effects_barrier()
    assert calls.count("forward") == 2 * 6
    assert calls.count("backward") == 6


def test_the_users_function_is_traced_once_for_each_shape():
    traces = []

    def fn(w, x):
        traces.append(x.shape)
        return ja.Sum(jnp.sum(w * x))

    g = ja.microbatch(fn, num_microbatches=5)
    jax.jit(jax.grad(lambda w: g(w, jnp.ones(12)) ** 2))(1.0)
    assert traces == [(3,), (2,)]


def test_closed_over_values_have_derivatives(x64):
    w, batch = problem()
    g = lambda scale: ja.microbatch(  # noqa: E731
        lambda p, b: outputs(p * scale, b), num_microbatches=5
    )
    got = jax.grad(lambda scale: objective(g(scale)(w, batch)))(1.5)
    want = jax.grad(lambda scale: full(w * scale, batch))(1.5)
    np.testing.assert_allclose(got, want, rtol=1e-11)


def test_second_derivatives_vmap_and_remat(x64):
    w, batch = problem()
    g = ja.microbatch(outputs, num_microbatches=5)
    loss = lambda w: objective(g(w, batch))  # noqa: E731
    want = functools.partial(full, batch=batch)
    assert deviation(jax.jit(jax.jacfwd(jax.grad(loss)))(w), jax.hessian(want)(w)) < 1e-11
    pair = jnp.stack([w, 2 * w])
    got = jax.jit(jax.vmap(jax.grad(loss)))(pair)
    assert deviation(got, jax.vmap(jax.grad(want))(pair)) < 1e-12
    assert deviation(jax.jit(jax.grad(jax.checkpoint(loss)))(w), jax.grad(want)(w)) < 1e-12


def test_nested(x64):
    """A microbatch inside a microbatch, and inside a window."""
    w, batch = problem()
    inner = ja.microbatch(
        lambda w, b: ja.Sum(jnp.sum(jnp.tanh(b["x"] @ w), axis=0)), num_microbatches=2
    )
    outer = ja.microbatch(lambda w, b: ja.Sum(inner(w, b)), num_microbatches=3)
    got = jax.grad(lambda w: jnp.prod(outer(w, batch)))(w)
    want = jax.grad(lambda w: jnp.prod(jnp.sum(jnp.tanh(batch["x"] @ w), axis=0)))(w)
    assert deviation(got, want) < 1e-12

    def per_block(w, b):  # one block of rows is one example: a loss that does not split further
        return ja.Mean(jnp.prod(jnp.sum(jnp.tanh(b["x"] @ w), axis=0)), 1)

    def cut_block(w, b):
        return ja.Mean(jnp.prod(inner(w, b)), 1)

    a = ja.value_and_grad(per_block, num_microbatches=4)(w, batch)
    b = ja.value_and_grad(cut_block, num_microbatches=4)(w, batch)
    assert deviation(b, a) < 1e-12


def test_keys_are_replayed_bit_for_bit(x64):
    w, batch = problem()

    def fn(w, b, *, key):
        mask = jax.random.bernoulli(key, 0.5, (b["x"].shape[0], WIDTH))
        return ja.Sum(jnp.sum(jnp.tanh(b["x"] @ w) * mask, axis=0)), ja.Concat(mask)

    g = ja.microbatch(fn, num_microbatches=5)
    key = jax.random.key(7)
    masks = g(w, batch, key=key)[1]
    assert not np.array_equal(masks[0:5], masks[5:10])
    got = jax.grad(lambda w: jnp.prod(g(w, batch, key=key)[0]))(w)
    want = jax.grad(lambda w: jnp.prod(jnp.sum(jnp.tanh(batch["x"] @ w) * masks, axis=0)))(w)
    assert deviation(got, want) < 1e-12
    np.testing.assert_array_equal(masks, g(w, batch, key=key)[1])
    assert not np.array_equal(masks, g(w, batch, key=jax.random.key(8))[1])


@pytest.mark.parametrize("jitted", [False, True])
def test_num_real(jitted, x64):
    w, batch = problem()
    g = ja.microbatch(
        lambda w, b: (
            ja.Sum(jnp.sum(b["x"] @ w)),
            ja.Max(jnp.max(b["x"] @ w)),
            ja.Last(b["x"] @ w),
        ),
        num_microbatches=6,
    )

    def loss(w, real):
        total, largest, last = g(w, batch, num_real=real)
        return total * largest + jnp.sum(last**2)

    def want(w):
        kept = jnp.concatenate([batch["x"][k::6] for k in range(4)]) @ w
        return jnp.sum(kept) * jnp.max(kept) + jnp.sum((batch["x"][3::6] @ w) ** 2)

    got = jax.value_and_grad(loss)
    got = jax.jit(got)(w, 4) if jitted else got(w, jnp.int32(4))
    assert deviation(got, jax.value_and_grad(want)(w)) < 1e-12


def test_stacked_and_last_outputs(x64):
    w, batch = problem()

    def fn(w, b):
        value = jnp.sum(jnp.sin(b["x"] @ w), axis=0)
        return value, ja.Last(value)

    g = ja.microbatch(fn, num_microbatches=4)
    values = jnp.stack([fn(w, jax.tree.map(lambda x, k=k: x[k::4], batch))[0] for k in range(4)])
    stacked, last = g(w, batch)
    np.testing.assert_allclose(stacked, values, rtol=1e-14)
    np.testing.assert_array_equal(last, stacked[-1])

    def want(w):
        values = jnp.stack(
            [fn(w, jax.tree.map(lambda x, k=k: x[k::4], batch))[0] for k in range(4)]
        )
        return jnp.prod(values[:, 0]) + jnp.sum(values[-1] ** 2)

    def got(w):
        stacked, last = g(w, batch)
        return jnp.prod(stacked[:, 0]) + jnp.sum(last**2)

    assert deviation(jax.grad(got)(w), jax.grad(want)(w)) < 1e-12


def test_ties_share_the_gradient():
    g = ja.microbatch(lambda w, x: ja.Max(jnp.max(w * x)), num_microbatches=4)
    x = jnp.array([1.0, 3.0, 3.0, 2.0])
    assert jax.grad(lambda w: g(w, x))(2.0) == 3.0
    rows = ja.microbatch(lambda w, x: ja.Max(jnp.max(w * x)), num_microbatches=4, argnums=1)
    np.testing.assert_array_equal(jax.grad(lambda x: rows(2.0, x))(x), [0.0, 1.0, 1.0, 0.0])


def test_bfloat16_sums_in_float32():
    """CASES 49: a bfloat16 sum of ones stalls at 256."""
    g = ja.microbatch(lambda w, x: ja.Sum(jnp.sum(w * x)), num_microbatches=1000)
    w, x = jnp.bfloat16(1), jnp.ones(1000, jnp.bfloat16)
    assert g(w, x).dtype == jnp.float32
    assert g(w, x) == 1000
    grad = jax.grad(lambda w: g(w, x))(w)
    assert grad.dtype == jnp.bfloat16
    assert grad == 1000


def test_memory_is_that_of_one_micro_batch():
    w = jnp.zeros((16, 256))

    def fn(w, x):
        return ja.Sum(jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T)))

    def temporaries(num):
        g = ja.microbatch(fn, num_microbatches=num)
        step = jax.jit(jax.grad(lambda w, x: g(w, x) ** 2))
        return step.lower(w, jnp.ones((4096, 16))).compile().memory_analysis().temp_size_in_bytes

    one, many, more = temporaries(1), temporaries(16), temporaries(64)
    assert many < one / 8
    assert more < many


def test_weights_may_depend_on_parameters(x64):
    """What `ja.value_and_grad` refuses: a mean whose weight has a gradient."""
    w, batch = problem()

    def fn(w, b):
        hidden = b["x"] @ w
        return ja.mean(jnp.tanh(hidden), weights=jax.nn.sigmoid(hidden))

    g = ja.microbatch(fn, num_microbatches=5)
    got = jax.value_and_grad(lambda w: g(w, batch))(w)
    want = jax.value_and_grad(lambda w: fn(w, batch).value)(w)
    assert deviation(got, want) < 1e-12


class TestRefusals:
    def test_differentiating_outside_argnums(self):
        g = ja.microbatch(lambda w, x, c: ja.Sum(jnp.sum(w * x) * c), num_microbatches=2)
        x = jnp.ones(4)
        with pytest.raises(ValueError, match=r"microbatch: the batch, argument 1.*`argnums`"):
            jax.grad(lambda x: g(1.0, x, 1.0))(x)
        with pytest.raises(ValueError, match=r"microbatch: an argument.*`argnums`"):
            jax.grad(lambda c: g(1.0, x, c))(1.0)
        assert jax.grad(lambda c: g(c, x, jax.lax.stop_gradient(c)))(2.0) == 8.0

    def test_static_mistakes(self):
        fn = lambda w, x: ja.Sum(jnp.sum(w * x))  # noqa: E731
        with pytest.raises(TypeError, match="microbatch: `fn` must be a function"):
            ja.microbatch(3, num_microbatches=2)
        with pytest.raises(ValueError, match="microbatch: exactly one of"):
            ja.microbatch(fn)
        with pytest.raises(ValueError, match="microbatch: `axis_name`, got 'a', is for code"):
            ja.microbatch(fn, num_microbatches=2, axis_name="a", spmd_axis_name="a")
        with pytest.raises(ValueError, match="microbatch: `num_microbatches` is 5"):
            ja.microbatch(fn, num_microbatches=5)(1.0, jnp.ones(4))
        with pytest.raises(ValueError, match="microbatch: `batch` has zero rows"):
            ja.microbatch(fn, num_microbatches=1)(1.0, jnp.ones(0))
        with pytest.raises(ValueError, match=r"microbatch: `outputs.*marked `ja.Concat`"):
            ja.microbatch(lambda w, x: ja.Concat(jnp.sum(x)), num_microbatches=2)(1.0, jnp.ones(4))
        with pytest.raises(TypeError, match="microbatch: `fn` returned no arrays"):
            ja.microbatch(lambda w, x: None, num_microbatches=2)(1.0, jnp.ones(4))
        with pytest.raises(TypeError, match="microbatch: `key=` was given"):
            ja.microbatch(fn, num_microbatches=2)(1.0, jnp.ones(4), key=jax.random.key(0))
        with pytest.raises(ValueError, match=r"which is not bound here"):
            ja.microbatch(fn, num_microbatches=2, axis_name="data")(1.0, jnp.ones(4))
        with pytest.raises(TypeError, match=r"microbatch: `outputs.*must be an array"):
            ja.microbatch(lambda w, x: "text", num_microbatches=2)(1.0, jnp.ones(4))

    @pytest.mark.parametrize("odd", [ja.Max, lambda x: ja.Sum(x[None])], ids=["mark", "shape"])
    def test_outputs_that_depend_on_the_size(self, odd):
        fn = lambda w, x: (ja.Sum if x.shape[0] == 2 else odd)(w * jnp.sum(x))  # noqa: E731
        with pytest.raises(ValueError, match=r"^microbatch: .* for another"):
            ja.microbatch(fn, num_microbatches=2)(1.0, jnp.ones(5))


def test_strict_promotion_with_64_bit_types(x64):
    w, batch = problem("float32")
    g = ja.microbatch(outputs, num_microbatches=5)
    with jax.numpy_dtype_promotion("strict"):
        assert jax.grad(lambda w: g(w, batch)["sum"])(w).dtype == jnp.float32
