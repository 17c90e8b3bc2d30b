"""Sharding constraints and `shard_map`s in a loss whose window is reduced over the same mesh."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxaccum as ja
import jaxaccum.nnx

AUTO = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
MIXED = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
EXPLICIT = jax.make_mesh((4, 2), ("data", "model"))
THREE = jax.make_mesh((2, 2, 2), ("data", "seq", "model"), axis_types=(AxisType.Auto,) * 3)
X = jnp.arange(64.0).reshape(16, 4) % 7 - 3
W = jnp.arange(16.0).reshape(4, 4) % 5 - 2


def squares(y):
    return ja.mean(y * y)


def by_rows(y):
    return constrain(y, P("data"))


def scanned(w, x):
    def layer(y, _):
        return constrain(2 * y, P("data", None)), None

    return jax.lax.scan(jax.checkpoint(layer), x @ w, None, length=2)[0] / 4


def branches(w, x):
    y = x @ w
    return jax.lax.cond(y[0, 0] > 1e6, lambda: 0 * y, lambda: by_rows(y))


@jax.custom_vjp
def doubled(y):
    return by_rows(2 * y)


doubled.defvjp(lambda y: (by_rows(2 * y), None), lambda _, g: (by_rows(2 * g),))


@jax.custom_jvp
def halved(y):
    return by_rows(y / 2)


halved.defjvp(lambda y, t: (by_rows(y[0] / 2), by_rows(t[0] / 2)))


def mapped(axis_names):
    def model(w, x):
        product = jax.shard_map(
            lambda x, w: x @ w,
            in_specs=(P(), P(None, "model")),
            out_specs=P(None, "model"),
            axis_names=axis_names,
        )
        return product(x, w)

    return model


MODELS = {
    "spec": lambda w, x: by_rows(x @ w),
    "two axes": lambda w, x: constrain(x @ w, P(("data", "model"), None)),
    "beside another": lambda w, x: constrain(constrain(x @ w, P("data", "model")), P(None, None)),
    "a sharding": lambda w, x: constrain(x @ w, NamedSharding(AUTO, P("data"))),
    "the parameters": lambda w, x: x @ constrain(w, P(None, "data")),
    "scan of remat": scanned,
    "jit": lambda w, x: jax.nn.relu(jax.jit(by_rows)(x @ w)) - jax.nn.relu(-(x @ w)),
    "cond": branches,
    "custom derivatives": lambda w, x: halved(doubled(x @ w)),
    "shard_map": mapped({"model"}),
    "shard_map of all axes": mapped({"data", "model"}),
    "shard_map and spec": lambda w, x: by_rows(mapped({"model"})(w, x)),
}


def expected():
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((X @ w) ** 2))(W)
    return loss, grads


@pytest.mark.parametrize("name", MODELS)
def test_case_78_an_auto_mesh(name):
    loss, grads = expected()
    fn = jax.jit(
        ja.value_and_grad(
            lambda w, x: squares(MODELS[name](w, x)), num_microbatches=2, spmd_axis_name="data"
        )
    )
    with jax.set_mesh(AUTO):
        got = fn(W, X)
        ja.audit(fn, W, X, axis_name="data").assert_deferred()
    np.testing.assert_array_equal(got[0], loss)
    np.testing.assert_array_equal(got[1], grads)


@pytest.mark.parametrize("name", ["spec", "shard_map"])
def test_parameters_may_lie_over_another_explicit_axis(name):
    loss, grads = expected()
    fn = ja.value_and_grad(
        lambda w, x: squares(MODELS[name](w, x)), num_microbatches=2, spmd_axis_name="data"
    )
    with jax.set_mesh(MIXED):
        got = jax.jit(fn)(jax.device_put(W, P(None, "model")), X)
    assert jax.typeof(got[1]).sharding.spec == P(None, "model")
    np.testing.assert_array_equal(got[0], loss)
    np.testing.assert_array_equal(got[1], grads)


def test_rows_over_two_axes():
    loss, grads = expected()
    fn = ja.value_and_grad(
        lambda w, x: squares(constrain(x @ w, P("data", "model"))),
        num_microbatches=2,
        spmd_axis_name=("data", "seq"),
        param_specs=P("seq"),
    )
    with jax.set_mesh(THREE):
        got = jax.jit(fn)(W, jax.device_put(X, P(("data", "seq"))))
    assert got[1].sharding.spec[0] == "seq"
    np.testing.assert_array_equal(got[0], loss)
    np.testing.assert_array_equal(got[1], grads)


def test_a_devices_own_parameters():
    """Each of two groups of devices has a factor of its own, after `("seq", "data")`."""
    weights = jnp.array([1.0, 2.0, 3.0, 4.0])
    fn = ja.accumulate(
        lambda w, x: ja.Mean(jnp.sum(constrain(w["own"] * x * w["all"], P("data"))), len(x)),
        num_microbatches=2,
        spmd_axis_name=("data", "seq"),
        local_params={"own": P(("seq", "data")), "all": None},
    )
    with jax.set_mesh(THREE):
        sums = jax.jit(fn)({"own": weights, "all": jnp.float32(2)}, jnp.arange(16.0))
    rows = np.arange(16.0).reshape(2, 2, 4).sum(-1)  # [data, seq]
    np.testing.assert_array_equal(sums.grads["own"], 2 * rows.T.ravel())
    np.testing.assert_array_equal(sums.grads["all"], np.sum(rows.T.ravel() * np.asarray(weights)))
    assert sums.weight == 16


def test_options_hold_in_groups_of_rows():
    def loss_fn(w, x, *, key):
        y = by_rows(x @ w)
        return (squares(y), ja.mean(y, where=x > 0)), {
            "y": ja.Concat(y),
            "key": jax.random.uniform(key),
        }

    fn = ja.accumulate(
        loss_fn, microbatch_size=3, has_aux=True, spmd_axis_name="data", skip_nonfinite=True
    )
    x = X.at[5].set(jnp.nan)
    with jax.set_mesh(AUTO):
        sums = jax.jit(fn)(W, x, key=jax.random.key(0), num_real=jnp.array([2, 2, 2, 1]))
        window = ja.finalize(sums)
    kept = np.r_[0:4, 7:15]  # rows 4 to 7 are a device's; its first micro-batch is 4, 5, 6
    y, mask = np.asarray(X @ W)[kept], np.asarray(X)[kept] > 0
    np.testing.assert_allclose(window.loss, np.mean(y**2) + y[mask].mean(), rtol=1e-6)
    assert (window.num_skipped, window.num_microbatches) == (1, 6)
    np.testing.assert_array_equal(np.asarray(window.aux["y"])[kept], y)
    assert len(np.unique(window.aux["key"])) == 8  # that of the last micro-batch, which is not run


def test_microbatch_a_training_step_and_a_stream():
    def total(w, x):
        return ja.Sum(jnp.sum(by_rows(x @ w) ** 2)), ja.Concat(by_rows(x @ w)[:, 0])

    def combined(w):
        own = ja.microbatch(total, num_microbatches=2, spmd_axis_name="data")
        squared, first = own(w, X)
        return squared + jnp.sum(first * jnp.arange(16.0))

    def loss_fn(w, x):
        return squares(by_rows(x @ w))

    with jax.set_mesh(AUTO):
        got = jax.jit(jax.value_and_grad(combined))(W)
        step = ja.train_step(loss_fn, optax.sgd(1.0), num_microbatches=2, spmd_axis_name="data")
        params, _, info = step.step(W + 0, step.init(W), X)
    want = jax.value_and_grad(
        lambda w: jnp.sum((X @ w) ** 2) + jnp.sum((X @ w)[:, 0] * jnp.arange(16.0))
    )(W)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    loss, grads = expected()
    np.testing.assert_array_equal(info.loss, loss)
    np.testing.assert_array_equal(params, W - grads)


@pytest.mark.parametrize("model_state", [None, "pooled"])
def test_an_nnx_model(model_state):
    model = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = W
    fn = jaxaccum.nnx.value_and_grad(
        lambda m, x: squares(by_rows(m(x))),
        num_microbatches=2,
        spmd_axis_name="data",
        model_state=model_state,
    )
    with jax.set_mesh(AUTO):
        loss, grads = nnx.jit(fn)(model, X)
    np.testing.assert_array_equal(loss, expected()[0])
    np.testing.assert_array_equal(jax.tree.leaves(grads)[0], expected()[1])


def test_logical_axes_and_boxed_parameters_of_flax():
    kernel_init = nn.with_logical_partitioning(nn.initializers.ones, ("rows", "features"))
    model = nn.Dense(4, use_bias=False, kernel_init=kernel_init)

    def loss_fn(params, x):
        return squares(nn.with_logical_constraint(model.apply(params, x), ("rows", "features")))

    rules = (("rows", "data"), ("features", None))
    fn = ja.value_and_grad(loss_fn, num_microbatches=2, spmd_axis_name="data")
    with jax.set_mesh(AUTO), nn.logical_axis_rules(rules):
        boxed = jax.tree.map(lambda _: W, model.init(jax.random.key(0), X))
        loss, grads = jax.jit(fn)(boxed, X)
    want = expected()
    np.testing.assert_array_equal(loss, want[0])
    np.testing.assert_array_equal(grads["params"]["kernel"].value, want[1])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            lambda w, x: jnp.einsum("ij,jk->ik", x, w, out_sharding=P("data", "model")),
            r"`dot_general` .*test_constraints.*P\(None, 'model'\)",
        ),
        (lambda w, x: jax.sharding.reshard(x @ w, P("data")), "`reshard` .*test_constraints"),
        (lambda w, x: by_rows(x @ w), "names an axis"),
    ],
    ids=["out_sharding", "reshard", "constraint"],
)
def test_case_78_an_explicit_mesh_says_what_to_write(model, said):
    fn = ja.value_and_grad(
        lambda w, x: squares(model(w, x)), num_microbatches=2, spmd_axis_name="data"
    )
    with jax.set_mesh(EXPLICIT), pytest.raises(ValueError, match=f"value_and_grad.*{said}"):
        jax.jit(fn)(W, jax.device_put(X, P("data")))


def test_a_map_over_the_windows_own_axis_is_refused():
    def loss_fn(w, x):
        f = jax.shard_map(jnp.sin, in_specs=P("data"), out_specs=P("data"))
        return squares(f(jnp.tile(by_rows(x @ w), (4, 1))))

    fn = ja.value_and_grad(loss_fn, num_microbatches=2, spmd_axis_name="data")
    with jax.set_mesh(AUTO), pytest.raises(ValueError, match="holds a `shard_map` whose specs"):
        jax.jit(fn)(W, X)


def test_other_errors_stay_what_they_are():
    fn = ja.value_and_grad(
        lambda w, x: squares(jnp.reshape(x @ w, (3, -1))), num_microbatches=2, spmd_axis_name="data"
    )
    for mesh in (AUTO, EXPLICIT):
        with jax.set_mesh(mesh), pytest.raises(TypeError, match="reshape"):
            jax.jit(fn)(W, X)
