"""Which arguments are cut and which are differentiated, by position, on every route.

`loss(w, x, y)` is the mean of `(w * x - y)**2` over eight rows of small integers, so that every sum
and every quotient is exact; the answers are the formulas of the whole batch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxaccum as ja
from jaxaccum import linen as ja_linen
from jaxaccum import nnx as ja_nnx

W = np.float32(3)
X = np.array([1, -2, 3, 0, 2, 5, -1, 4], np.float32)
Y = np.array([2, 1, 0, -3, 4, 2, 2, -1], np.float32)
ERROR = W * X - Y
LOSS, OF_W = np.mean(ERROR**2), np.mean(2 * X * ERROR)
OF_X, OF_Y = 2 * W * ERROR / 8, -2 * ERROR / 8
CUTS = {"even": {"num_microbatches": 4}, "uneven": {"microbatch_size": 3}}
BOTH = {"batch_argnums": (1, 2)}
ASKED = {"argnums": (2, 0), **BOTH}
ANSWER = (LOSS, (OF_Y, OF_W))


def loss_fn(w, x, y):
    return ja.mean((w * x - y) ** 2)


def assert_same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, got), expected)


def mesh(kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])


def sharded(f, *, out, specs=None, check_vma=True):
    specs = specs or (P(), P("data"), P("data"))
    mapped = jax.shard_map(f, mesh=mesh(), in_specs=specs, out_specs=out, check_vma=check_vma)
    return jax.jit(mapped)


def by_pmap(cut):
    f = jax.pmap(
        ja.value_and_grad(loss_fn, axis_name="data", **ASKED, **cut),
        axis_name="data",
        in_axes=(None, 0, 0),
        devices=jax.devices()[:2],
    )
    loss, (of_y, of_w) = f(W, X.reshape(2, 4), Y.reshape(2, 4))
    return loss[0], (of_y.reshape(8), of_w[1])


def by_spmd(cut, kind=jax.sharding.AxisType.Auto):
    with jax.set_mesh(mesh(kind)):
        return jax.jit(ja.value_and_grad(loss_fn, spmd_axis_name="data", **ASKED, **cut))(W, X, Y)


def by_microbatch(cut, **options):
    def squares(w, x, y):
        return ja.mean((w * x - y) ** 2)

    f = ja.microbatch(squares, **BOTH, argnums=(0, 2), **cut, **options)
    loss, (of_w, of_y) = jax.value_and_grad(f, argnums=(0, 2))(W, X, Y)
    return loss, (of_y, of_w)


def by_microbatch_spmd(cut):
    with jax.set_mesh(mesh()):
        return by_microbatch(cut, spmd_axis_name="data")


ROUTES = {
    "value_and_grad": lambda cut: ja.value_and_grad(loss_fn, **ASKED, **cut)(W, X, Y),
    "shard_map": lambda cut: sharded(
        ja.value_and_grad(loss_fn, axis_name="data", **ASKED, **cut), out=(P(), (P("data"), P()))
    )(W, X, Y),
    "unchecked": lambda cut: sharded(
        ja.value_and_grad(loss_fn, axis_name="data", **ASKED, **cut),
        out=(P(), (P("data"), P())),
        check_vma=False,
    )(W, X, Y),
    "pmap": by_pmap,
    "spmd": by_spmd,
    "spmd, Explicit": functools.partial(by_spmd, kind=jax.sharding.AxisType.Explicit),
    "microbatch": by_microbatch,
    "microbatch, spmd": by_microbatch_spmd,
    "window axis": lambda cut: ja.window_axis.value_and_grad(loss_fn, **ASKED, num_microbatches=4)(
        W, X, Y
    ),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("route", ROUTES)
def test_61_two_cut_arguments(route, cut):
    assert_same(ROUTES[route](CUTS[cut]), ANSWER)


def test_key_and_num_real_with_two_cut_arguments():
    def noisy(w, x, y, *, key):
        return ja.mean((w * x - y) ** 2 + 0 * jax.random.normal(key))

    f = ja.value_and_grad(noisy, num_microbatches=4, **ASKED)
    first = np.arange(8) % 4 < 2  # the cut is strided
    loss, (of_y, of_w) = f(W, X, Y, key=jax.random.key(0), num_real=2)
    assert_same((loss, of_w), (np.mean(ERROR[first] ** 2), np.mean(2 * (X * ERROR)[first])))
    assert_same(of_y, np.where(first, -2 * ERROR / 4, 0))


def test_denominators_of_two_cut_arguments():
    def two_terms(w, x, y):
        return {"fit": loss_fn(w, x, y), "big": ja.mean(w * x, where=y > 0)}

    counts = ja.denominators(two_terms, num_microbatches=3, **BOTH)(W, X, Y)
    assert_same(counts, {"fit": 8, "big": int((Y > 0).sum())})


def step_of(loss=loss_fn, **options):
    return ja.train_step(loss, optax.sgd(1.0), donate=False, **{"num_microbatches": 3, **options})


def test_train_step_with_two_cut_arguments():
    init, step = step_of(**BOTH)
    new, _, info = step(W, init(W), X, Y)
    assert_same((info.loss, new), (LOSS, W - OF_W))


class Scale(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("w", lambda _: jnp.float32(W))


def test_linen_with_two_cut_arguments():
    model = Scale()
    state = ja_linen.TrainState.create(
        apply_fn=model.apply, variables=model.init(jax.random.key(0), X), tx=optax.sgd(1.0)
    )
    step = ja_linen.train_step(
        lambda variables, x, y: ja.mean((model.apply(variables, x) - y) ** 2),
        num_microbatches=3,
        donate=False,
        **BOTH,
    )
    new, info = step(state, X, Y)
    assert_same((info.loss, new.params["w"]), (LOSS, W - OF_W))


class Scaled(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.float32(W))
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.w[...] * x)


@pytest.mark.parametrize("cut", [(1, 2), (-1, 1)])
def test_nnx_with_two_cut_arguments(cut):
    f = ja_nnx.value_and_grad(nnx_loss, num_microbatches=3, batch_argnums=cut)
    loss, grads = f(Scaled(nnx.Rngs(0)), X, Y)
    assert_same((loss, grads["w"][...]), (LOSS, OF_W))
    optimizer = ja_nnx.Optimizer(model := Scaled(nnx.Rngs(0)), optax.sgd(1.0))
    step = ja_nnx.train_step(nnx_loss, num_microbatches=3, batch_argnums=cut)
    assert_same((step(model, optimizer, X, Y).loss, model.w[...]), (LOSS, W - OF_W))


def nnx_loss(model, x, y):
    return ja.mean((model(x) - y) ** 2)


@pytest.mark.parametrize("policy", [None, "pooled"])
def test_nnx_variables_are_no_rows(policy):
    norm = nnx.BatchNorm(8, use_running_average=True, rngs=nnx.Rngs(0))
    f = ja_nnx.value_and_grad(
        lambda model, x, norm: ja.mean(model(x) + 0 * norm.mean[0]),
        num_microbatches=2,
        model_state=policy,
    )
    assert f(Scaled(nnx.Rngs(0)), X, norm)[0] == np.mean(W * X)
    f = ja_nnx.value_and_grad(nnx_loss, num_microbatches=2)
    with pytest.raises(ValueError, match=r"argument 2 has 8 rows.*`batch_argnums=\(1, 2\)`"):
        f(Scaled(nnx.Rngs(0)), X, Y)


@pytest.mark.parametrize("size", [1, 3])
def test_per_example_with_two_cut_arguments(size):
    clipped = ja.per_example.clip(loss_fn, 8.0, **BOTH)
    _, grad = ja.value_and_grad(clipped, microbatch_size=size, **BOTH)(W, X, Y)
    assert_same(grad, np.mean(np.clip(2 * X * ERROR, -8, 8)))


def test_per_example_cuts_what_the_window_cuts():
    clipped = ja.per_example.clip(loss_fn, 8.0)
    with pytest.raises(
        ValueError, match=r"per_example\.clip: argument 2 .*`batch_argnums=\(1, 2\)`"
    ):
        ja.value_and_grad(clipped, num_microbatches=4, **BOTH)(W, X, Y)


def test_contrastive_with_two_cut_arguments():
    a, b = np.eye(4, dtype=np.float32), np.eye(4, 4, 1, dtype=np.float32)

    f = ja.losses.contrastive_fn(lambda w, a, b: (w * a, w * b), microbatch_size=3, **BOTH)
    got = jax.value_and_grad(f)(jnp.float32(2), a, b)
    full = jax.value_and_grad(lambda w: ja.losses.contrastive(w * a, w * b))(jnp.float32(2))
    np.testing.assert_allclose(got, full, rtol=1e-6)


def test_check_equivalence_with_two_cut_arguments():
    check = functools.partial(ja.check_equivalence, loss_fn, W, X, args=(Y,), num_microbatches=2)
    assert check(batch_argnums=(1, 2)).ok
    with pytest.raises(ValueError, match=r"check_equivalence: argument 2 has 8 rows"):
        check()


# What was not said


REFUSING = {
    "accumulate": lambda **cut: ja.accumulate(loss_fn, num_microbatches=2, **cut),
    "value_and_grad": lambda **cut: ja.value_and_grad(loss_fn, num_microbatches=1, **cut),
    "denominators": lambda **cut: ja.denominators(loss_fn, num_microbatches=2, **cut),
    "microbatch": lambda **cut: ja.microbatch(loss_fn, num_microbatches=2, **cut),
    "train_step": lambda **cut: lambda w, *args: step_of(**cut).step(w, step_of().init(w), *args),
}


@pytest.mark.parametrize("name", REFUSING)
def test_61_a_second_batch_argument_that_nothing_was_said_about(name):
    message = r"argument 2 has 8 rows.*`batch_argnums=\(1, 2\)` to cut.*`batch_argnums=1` to pass"
    with pytest.raises(ValueError, match=message):
        REFUSING[name]()(W, X, Y)
    REFUSING[name](batch_argnums=1)(W, X, 2.0)


def test_61_a_second_argument_passed_whole():
    def whole(w, x, table):
        return ja.Mean(jnp.sum(w * x) * jnp.sum(table), x.shape[0])

    f = ja.value_and_grad(whole, num_microbatches=4, batch_argnums=1)
    assert_same(f(W, X, Y), (np.mean(W * X) * Y.sum(), np.mean(X) * Y.sum()))


@pytest.mark.parametrize(
    "extra",
    [
        2.0,
        np.float32(2),
        jnp.float32(2),
        np.ones((4, 8), np.float32),
        {"rows": np.ones(8, np.float32), "other": np.float32(1)},
        None,
        jax.random.key(0),
        "text",
    ],
    ids=str,
)
def test_what_cannot_be_rows_is_no_second_batch(extra):
    f = ja.value_and_grad(lambda w, x, _: ja.mean(w * x), num_microbatches=2)
    assert_same(f(W, X, extra), (np.mean(W * X), np.mean(X)))


@pytest.mark.parametrize(
    "extra",
    [
        jax.random.split(jax.random.key(0), 8),
        np.zeros((8, 3)),
        {"a": np.zeros(8), "b": [np.zeros((8, 1), np.int8), None]},
        [np.zeros(8), "text", 1.5],
    ],
    ids=str,
)
def test_what_could_be_rows_is_refused(extra):
    f = ja.value_and_grad(lambda w, x, _: ja.mean(w * x), num_microbatches=2)
    with pytest.raises(ValueError, match="argument 2 has 8 rows"):
        f(W, X, extra)


def test_parameters_and_single_rows_are_not_taken_for_a_batch():
    f = ja.value_and_grad(lambda w, x: ja.mean(w.sum() * x), num_microbatches=2)
    assert_same(f(np.ones(2, np.float32), X[:2])[1], X[:2].mean() * np.ones(2))
    g = ja.value_and_grad(lambda w, x, y: ja.mean(w * x * y), num_microbatches=1)
    assert_same(g(W, X[:1], Y[:1]), (W * X[0] * Y[0], X[0] * Y[0]))


def test_the_batch_may_stand_anywhere():
    def loss(x, w, y):
        return loss_fn(w, x, y)

    f = ja.value_and_grad(loss, num_microbatches=3, argnums=(1, 0), batch_argnums=(-1, 0))
    assert_same(f(X, W, Y), (LOSS, (OF_W, OF_X)))
    # Parameters of the examples themselves.
    own = ja.value_and_grad(lambda z: ja.mean(z**2), num_microbatches=3, batch_argnums=0)
    assert_same(own(X), (np.mean(X**2), 2 * X / 8))


@pytest.mark.parametrize(
    ("factory", "options", "error", "message"),
    [
        (ja.accumulate, {"batch_argnums": 3}, ValueError, "argument 3, but `loss_fn` takes only 3"),
        (ja.microbatch, {"batch_argnums": (1, 1)}, ValueError, "each once"),
        (ja.denominators, {"batch_argnums": ()}, ValueError, "at least one"),
        (ja.value_and_grad, {"batch_argnums": "x"}, TypeError, "`batch_argnums` must be"),
        (ja.value_and_grad, {"batch_argnums": True}, TypeError, "`batch_argnums` must be"),
    ],
)
def test_batch_argnums_that_name_no_arguments(factory, options, error, message):
    with pytest.raises(error, match=message):
        factory(loss_fn, num_microbatches=2, **options)


def test_rows_must_agree_over_the_cut_arguments():
    f = ja.value_and_grad(loss_fn, num_microbatches=2, **BOTH)
    with pytest.raises(ValueError, match=r"`argument 1` \(float32\[8\]\) and `argument 2`"):
        f(W, X, Y[:4])
    with pytest.raises(ValueError, match="`batch_argnums` names argument 2, but only 2"):
        f(W, X)
    with pytest.raises(ValueError, match="train_step: `batch_argnums` must not name argument 0"):
        step_of(batch_argnums=(0, 1))


# The order of argnums


def product(w, x, s):
    return ja.mean(w * s * x)


@pytest.mark.parametrize(
    ("argnums", "reducers"),
    [
        ((0, 2), (ja.Sum, ja.Max)),
        ((2, 0), (ja.Max, ja.Sum)),
        ((-1, 0), (ja.Max, ja.Sum)),
        ((-1, 1, 0), (ja.Max, ja.Sum, ja.Sum)),
    ],
)
def test_65_reducers_follow_argnums(argnums, reducers):
    expected = {0: 3, 1: np.full(4, 2.5), 2: 80}
    f = ja.value_and_grad(product, num_microbatches=2, argnums=argnums, grad_reducers=reducers)
    args = np.float32(10), np.array([1, 2, 3, 6], np.float32), np.float32(1)
    assert_same(f(*args)[1], tuple(expected[p % 3] for p in argnums))


def test_65_reducers_follow_argnums_in_merged_and_spmd_sums():
    options = {"argnums": (2, 0), "grad_reducers": (ja.Max, ja.Sum), "microbatch_size": 1}
    f = ja.accumulate(product, **options)
    w, s, x = np.float32(10), np.float32(1), np.array([1, 2, 3, 6], np.float32)
    halves = ja.merge(f(w, x[:2], s), f(w, x[2:], s))
    with jax.set_mesh(mesh()):
        spread = jax.jit(ja.accumulate(product, spmd_axis_name="data", **options))(w, x, s)
    for sums in (halves, spread):
        assert_same(ja.finalize(sums).grads, (60, 3))


def test_65_reducers_of_the_batch():
    f = functools.partial(ja.value_and_grad, product, num_microbatches=2, argnums=1)
    args = np.float32(10), np.array([1, 2, 3, 6], np.float32), np.float32(1)
    assert_same(f(grad_reducers=ja.Sum)(*args)[1], np.full(4, 2.5))
    with pytest.raises(ValueError, match=r"`grad_reducers` names `ja\.Max` for the batch"):
        f(grad_reducers=ja.Max)(*args)
    with pytest.raises(ValueError, match="`grad_reducers` must be a tree prefix"):
        f(grad_reducers=(ja.Sum, ja.Sum))(*args)


TABLE = np.arange(8, dtype=np.float32).reshape(4, 2)


def looked_up(w, x, table):
    return ja.mean(w * x @ table.sum(axis=0, keepdims=True).T)


@pytest.mark.parametrize("reduction", ["defer", "scatter"])
@pytest.mark.parametrize("named", ["param_specs", "grad_specs"])
def test_65_specs_follow_argnums(named, reduction):
    x = np.arange(32, dtype=np.float32).reshape(16, 2)
    options = {
        "argnums": (-1, 0), "reduction": reduction, "num_microbatches": 2, named: (P("data"), P())
    }  # fmt: skip
    own = P("data") if named == "param_specs" else P()
    expected = (
        np.mean(W * x @ TABLE.sum(0)),
        (
            np.broadcast_to(W * x.mean(0), TABLE.shape),
            np.mean(x @ TABLE.sum(0)),
        ),
    )
    f = ja.value_and_grad(looked_up, axis_name="data", **options)
    manual = sharded(f, out=(P(), (P("data"), P())), specs=(P(), P("data"), own))
    assert_same(manual(W, x, TABLE), expected)
    with jax.set_mesh(mesh()):
        got = jax.jit(ja.value_and_grad(looked_up, spmd_axis_name="data", **options))(W, x, TABLE)
    assert_same(got, expected)
    assert got[1][0].sharding.spec[0] == "data"
    assert got[1][1].sharding.is_fully_replicated


def test_specs_of_the_batch():
    f = functools.partial(
        ja.value_and_grad, loss_fn, num_microbatches=2, spmd_axis_name="data", **ASKED
    )
    with jax.set_mesh(mesh()):
        assert_same(f(grad_specs=(P("data"), P()))(W, X, Y), ANSWER)
        with pytest.raises(ValueError, match="`grad_specs` splits the batch's gradient"):
            f(grad_specs=(P(None, "data"), P()))(W, X, Y)


# Batches that are no argument


def closure(params):
    return ja.mean(params * X)


@pytest.mark.parametrize(
    "factory",
    [
        lambda: ja.accumulate(closure, num_microbatches=2),
        lambda: ja.value_and_grad(functools.partial(loss_fn, x=X, y=Y), num_microbatches=2),
        lambda: ja.microbatch(closure, num_microbatches=2),
        lambda: ja.denominators(closure, num_microbatches=2),
        lambda: step_of(closure),
        lambda: ja_linen.train_step(closure, num_microbatches=2),
        lambda: ja_nnx.value_and_grad(closure, num_microbatches=2),
        lambda: ja_nnx.train_step(closure, num_microbatches=2),
        lambda: ja.per_example.clip(closure, 1.0),
        lambda: ja.losses.contrastive_fn(closure, num_microbatches=2),
        lambda: ja.check_equivalence(closure, W, X, num_microbatches=2),
        lambda: ja.value_and_grad(lambda *args: closure(args[0]), num_microbatches=2)(W),
        lambda: step_of(lambda *args: closure(args[0])).step(W, step_of().init(W)),
    ],
)
def test_80_a_closure_loss(factory):
    with pytest.raises(TypeError, match="the batch must be an argument of the loss"):
        factory()


def test_a_batch_of_keywords():
    inputs = {"x": X, "y": Y}
    init, step = step_of(**BOTH)
    for call in (
        lambda: ja.value_and_grad(loss_fn, num_microbatches=2)(W, **inputs),
        lambda: ja.microbatch(loss_fn, num_microbatches=2)(W, X, y=Y),
        lambda: ja_nnx.value_and_grad(loss_fn, num_microbatches=2)(Scaled(nnx.Rngs(0)), **inputs),
        lambda: step(W, init(W), **inputs),
    ):
        with pytest.raises(
            TypeError, match=r"passed by position, got the keywords .*`y`\. Pass .*tree"
        ):
            call()
    tree = ja.value_and_grad(lambda w, inputs: loss_fn(w, **inputs), num_microbatches=2)
    assert_same(tree(W, batch=inputs), (LOSS, OF_W))
