"""Parameters in parts, one layer made whole at a time: `whole_params=False` and `ja.gather`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxaccum as ja

FLAT = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
HSDP = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((2, 4), ("replica", "data"))
BESIDE = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = jnp.arange(128.0).reshape(16, 8) % 5 - 2
PARAMS = {
    "layers": jnp.arange(3 * 8 * 8.0).reshape(3, 8, 8) % 3 - 1,  # scanned, split in dimension 1
    "bias": jnp.arange(8.0) % 2,  # whole
    "head": jnp.arange(8.0) % 4 - 1,
}
SPECS = {"layers": P(None, "data"), "bias": None, "head": P("data")}


def loss_with(gather_fn):
    def loss_fn(params, x):
        @jax.checkpoint
        def layer(h, w):
            return h @ gather_fn(w, P("data")) + params["bias"][None], None

        h, _ = jax.lax.scan(layer, x, params["layers"])
        head = gather_fn(params["head"], P("data"))
        return ja.Mean(jnp.sum(h * head[None], where=x > 0), jnp.sum(x > 0))

    return loss_fn


WHOLE = loss_with(lambda w, spec: w)
PARTS = loss_with(ja.gather)
EXPECTED = jax.value_and_grad(lambda p: WHOLE(p, X).value)(PARAMS)


def check(got):
    np.testing.assert_allclose(got[0], EXPECTED[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got[1], EXPECTED[1])


def mapped(mesh, names, check_vma, fn):
    return jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=(jax.tree.map(lambda s: s or P(), SPECS, is_leaf=lambda s: s is None), P(names)),
        out_specs=(P(), jax.tree.map(lambda s: s or P(), SPECS, is_leaf=lambda s: s is None)),
        axis_names=set(names),
        check_vma=check_vma,
    )


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", ["data", "replica and data", "beside an automatic axis"])
def test_layer_by_layer_in_a_manual_region(name, check_vma):
    mesh = {"data": FLAT, "replica and data": HSDP}.get(name, BESIDE)
    names = ("replica", "data") if mesh is HSDP else ("data",)
    f = ja.value_and_grad(
        PARTS, num_microbatches=2, axis_name=names, param_specs=SPECS, whole_params=False
    )
    step = jax.jit(mapped(mesh, names, check_vma, f))
    check(step(PARAMS, X))
    if mesh is HSDP:  # over the replicas each sum is reduced once, behind the loop
        ja.audit(step, PARAMS, X, axis_name="replica").assert_deferred()


@pytest.mark.parametrize("mesh", [HSDP, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("reduction", ["defer", "scatter"])
def test_layer_by_layer_under_plain_jit(mesh, reduction):
    names = ("replica", "data")
    f = ja.value_and_grad(
        PARTS,
        num_microbatches=2,
        spmd_axis_name=names,
        param_specs=SPECS,
        whole_params=False,
        reduction=reduction,
    )
    with jax.set_mesh(mesh):
        got = jax.jit(f)(PARAMS, X)
    check(got)
    assert got[1]["head"].sharding.shard_shape((8,)) == (2,)


def test_beside_a_constraint_over_the_windows_axis():
    def loss_fn(params, x):
        x = jax.lax.with_sharding_constraint(x, P("data"))
        return PARTS(params, x)

    f = ja.value_and_grad(
        loss_fn, num_microbatches=2, spmd_axis_name="data", param_specs=SPECS, whole_params=False
    )
    with jax.set_mesh(FLAT):
        check(jax.jit(f)(PARAMS, X))


def test_pmap():
    f = ja.value_and_grad(
        lambda w, x: ja.mean(x @ ja.gather(w, P("data"))),
        num_microbatches=2,
        axis_name="data",
        param_specs=P("data"),
        whole_params=False,
    )
    w = jnp.arange(8.0)
    loss, grads = jax.pmap(f, "data")(w[:, None], X.reshape(8, 2, 8))
    np.testing.assert_array_equal(grads.ravel(), X.mean(0))
    np.testing.assert_array_equal(loss, np.full(8, np.mean(X @ w)))


def test_a_training_step_terms_and_skipping():
    def loss_fn(params, x):
        head = ja.gather(params["head"], P("data"))
        empty = ja.mean(x @ head, where=x[:, 0] > 9)
        return PARTS(params, x), ja.Mean(jnp.sum(head * head), 1.0), empty

    x = X.at[3].set(jnp.nan)
    step = ja.train_step(
        loss_fn,
        optax.sgd(1.0),
        num_microbatches=2,
        spmd_axis_name="data",
        param_specs=SPECS,
        whole_params=False,
        skip_nonfinite=True,
    )
    with jax.set_mesh(FLAT):
        params, _, info = step.step(jax.tree.map(jnp.copy, PARAMS), step.init(PARAMS), x)
    kept = X[::2]  # of each device's two rows the first, as one of the second ones is bad

    def mean(params):
        return WHOLE(params, kept).value + jnp.sum(params["head"] ** 2) / 1.0

    want = jax.grad(mean)(PARAMS)
    np.testing.assert_array_equal(info.num_skipped, 8)
    for new, old, grad in zip(*map(jax.tree.leaves, (params, PARAMS, want)), strict=True):
        np.testing.assert_allclose(new, old - grad, rtol=1e-6, atol=1e-6)


def test_dtypes_of_the_whole_and_of_the_way_back():
    seen = []

    def loss_fn(w, x):
        whole, kept = ja.gather(
            (w, jnp.arange(1)), P("data"), dtype=jnp.bfloat16, reduce_dtype=jnp.float32
        )
        seen.append((whole.dtype, kept.dtype))
        return ja.mean(x.astype(jnp.bfloat16) @ whole)

    f = ja.value_and_grad(
        loss_fn,
        num_microbatches=2,
        spmd_axis_name="data",
        param_specs=P("data"),
        whole_params=False,
    )
    with jax.set_mesh(FLAT):
        text = jax.jit(f).lower(jnp.ones(8), X).as_text()
        _, grads = jax.jit(f)(jnp.ones(8), X)
    assert seen[0] == (jnp.bfloat16, jnp.int32)
    assert grads.dtype == jnp.float32
    gathers = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
    assert any("bf16" in line for line in gathers)
    np.testing.assert_array_equal(grads, X.mean(0))


def test_left_to_the_compiler_where_no_axis_is_manual():
    with jax.set_mesh(FLAT):
        whole = jax.jit(lambda w: ja.gather(w, P("data"), dtype=jnp.bfloat16))(jnp.arange(8.0))
    assert whole.shape == (8,)
    assert whole.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("fn", "error", "said"),
    [
        (
            lambda: ja.gather(X, P("nowhere")),
            ValueError,
            "gather: `specs` names the axis 'nowhere'",
        ),
        (lambda: ja.gather(X, ("data",)), ValueError, "gather: `specs` must be a tree prefix"),
        (lambda: ja.gather(X, "data"), TypeError, "gather: the leaves of `specs`"),
        (lambda: ja.gather(X, P(), dtype=jnp.int32), TypeError, "gather: `dtype` must be a float"),
        (lambda: ja.gather(X, P(), reduce_dtype="no"), TypeError, "gather: `reduce_dtype` must be"),
    ],
)
def test_misuse_of_gather(fn, error, said):
    with pytest.raises(error, match=said):
        fn()


def test_misuse_of_whole_params():
    make = lambda **options: ja.accumulate(PARTS, num_microbatches=2, **options)  # noqa: E731
    with pytest.raises(ValueError, match="`whole_params=False` hands"):
        make(spmd_axis_name="data", whole_params=False)
    with pytest.raises(TypeError, match="`whole_params` must be True or False"):
        make(spmd_axis_name="data", whole_params=0, param_specs=SPECS)
    with pytest.raises(ValueError, match="`noise_scale=True` needs"):
        make(spmd_axis_name="data", whole_params=False, param_specs=SPECS, noise_scale=True)
    f = make(spmd_axis_name="data", whole_params=False, param_specs=SPECS)
    with jax.set_mesh(FLAT), pytest.raises(ValueError, match="`num_real` differs per device"):
        jax.jit(f)(PARAMS, X, num_real=jnp.ones(8, jnp.int32))
    deep = ja.accumulate(
        lambda w, x: ja.mean(x @ ja.gather(w, P(None, "data"))),
        num_microbatches=2,
        spmd_axis_name="data",
        param_specs=P("data"),
        whole_params=False,
    )
    with jax.set_mesh(FLAT), pytest.raises(ValueError, match="splits dimension 1 of a part"):
        jax.jit(deep)(jnp.ones(8), X)
