"""Leaves without a gradient and frozen ones: on every route not one bit of them changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from oracles import assert_close
from test_stream import bits, raw

import jaxaccum as ja
from jaxaccum import linen
from jaxaccum import nnx as ja_nnx

WINDOWS = 10
ROWS = jnp.array([1.0, 2.0, 3.0, 6.0])


def others(frozen=True):
    """What must not change: large integers, raw and typed keys, frozen minus zeros."""
    held = {
        "small": jnp.array([-128, -1, 0, 1, 100, 127], jnp.int8),
        "large": jnp.int32(16_777_217),
        "raw": jax.random.PRNGKey(7) + np.uint32(2**31 + 1),
        "flags": jnp.array([True, False]),
        "key": jax.random.key(3),
    }
    return held | {"frozen": jnp.array([1.0, -0.0, 3.0])} if frozen else held


def params():
    return {"w": jnp.array([1.0, -2.0]), **others()}


def loss_fn(p, x):
    return ja.mean((p["w"].sum() + p["frozen"].sum()) * x)


def adamw():
    return optax.adamw(0.1, weight_decay=0.5)


def optimizer():
    """AdamW with decay on all but the frozen leaf, which gets zeros."""
    labels = {name: "freeze" if name == "frozen" else "train" for name in params()}
    return optax.partition({"train": adamw(), "freeze": optax.set_to_zero()}, labels)


SAME = optax.stateless(lambda updates, p: updates)


def everywhere(value):
    return dict.fromkeys(params(), value)


# Around the window and inside it.
STREAMS = {
    "stream": lambda: ja.multi_steps(optimizer(), 2),
    "one": lambda: ja.multi_steps(optimizer(), 1),
    "skipping": lambda: ja.multi_steps(optimizer(), 2, skip_nonfinite="window"),
    "compensated": lambda: ja.multi_steps(
        optimizer(), 2, accumulator=ja.accumulators.compensated()
    ),
    "chain around": lambda: optax.chain(optax.identity(), ja.multi_steps(optimizer(), 2), SAME),
    "partition around": lambda: optax.partition(
        {"all": ja.multi_steps(optimizer(), 2)}, everywhere("all")
    ),
    "masked around": lambda: optax.masked(ja.multi_steps(optimizer(), 2), everywhere(True)),
    "masked inside": lambda: ja.multi_steps(
        optax.chain(
            adamw(),
            optax.masked(optax.set_to_zero(), lambda tree: {n: n == "frozen" for n in tree}),
        ),
        2,
    ),
}


def assert_unchanged(after):
    for name, want in raw(others("frozen" in after)).items():
        got = raw(after[name])
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(bits(got), bits(want), err_msg=name)


def plain(number):
    """What the optimizer alone makes of the trained leaf."""
    w, tx = params()["w"], adamw()
    state = tx.init(w)
    for _ in range(number):
        updates, state = tx.update(jnp.full(2, 3.0), state, w)
        w = optax.apply_updates(w, updates)
    return np.float64(w)


@pytest.mark.parametrize(
    ("route", "given"), [(r, "gradients") for r in STREAMS] + [("stream", "sums"), ("one", "sums")]
)
def test_a_stream_changes_no_bit_of_them(route, given):
    """Cases 63 and 64, in every call: idle ones, those that close a window, and a flush."""
    tx = STREAMS[route]()
    sums_fn = ja.accumulate(loss_fn, num_microbatches=1)

    @jax.jit
    def step(p, state):
        sums = sums_fn(p, ROWS)
        extra = {} if given == "sums" else {"weight": sums.weight}
        updates, state = tx.update(sums if given == "sums" else sums.grads, state, p, **extra)
        return optax.apply_updates(p, updates), state

    @jax.jit
    def flush(p, state):
        updates, state = ja.flush(tx, state, p)
        return optax.apply_updates(p, updates), state

    p, state = params(), tx.init(params())
    for _ in range(WINDOWS if route == "one" else 2 * WINDOWS - 1):
        p, state = step(p, state)
        assert_unchanged(p)
    p, state = flush(p, state)
    assert_unchanged(p)
    assert_close(p["w"], plain(WINDOWS))


def test_the_inner_optimizer_never_sees_them():
    seen = []

    def update_fn(updates, state, p=None):
        seen.append((updates, p))
        return updates, state

    inner = optax.GradientTransformation(lambda p: seen.append((p, p)), update_fn)
    tx = ja.multi_steps(inner, 2)
    grads = jax.grad(lambda p: loss_fn(p, ROWS).value, allow_int=True)(params())
    jax.eval_shape(tx.update, grads, tx.init(params()), params())
    assert {n for trees in seen for tree in trees for n in tree if tree[n] is not None} == {
        "w",
        "frozen",
    }


def test_a_line_search_evaluates_the_loss_with_them():
    search = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))
    tx = ja.multi_steps(search, 2)

    def value_fn(p):
        return jnp.sum((p["w"] - p["large"].astype(jnp.float32)) ** 2)

    p = {"w": jnp.zeros(2), "large": jnp.int32(3)}
    state = tx.init(p)
    for _ in range(2):
        value, grads = jax.value_and_grad(value_fn, allow_int=True)(p)
        extra = {"value": ja.Mean(value, 1.0), "grad": grads, "value_fn": value_fn}
        updates, state = tx.update(grads, state, p, **extra)
    after = optax.apply_updates(p, updates)
    assert after["large"] == 3
    assert value_fn(after) < value_fn(p)


@pytest.mark.parametrize("wrap", [optax.identity, lambda: optax.clip(100.0)])
def test_zeros_in_the_place_of_their_gradients_are_no_gradients(wrap):
    """Some wrappers compare what comes back with what went in, others make floats of both."""
    p = {"w": jnp.ones(2), "small": jnp.array([-128, 127], jnp.int8)}
    grads = {"w": jnp.ones(2), "small": jnp.zeros(2, jnp.int8)}
    tx = optax.chain(wrap(), ja.multi_steps(adamw(), 2))
    identity = wrap is optax.identity
    tx = optax.apply_if_finite(tx, 3) if identity else optax.chain(tx, optax.scale(1.0))
    state = tx.init(p)
    for _ in range(2):
        updates, state = tx.update(grads, state, p)
        p = optax.apply_updates(p, updates)
    updates, state = ja.flush(tx, state, p)
    p = optax.apply_updates(p, updates)
    np.testing.assert_array_equal(p["small"], [-128, 127])
    assert p["w"][0] < 1


def test_none_comes_back_for_none():
    """As gradients of partitioned modules have it, whose own `apply_updates` skips `None`."""
    p = {"w": jnp.ones(2), "large": jnp.int32(3), "not trained": jnp.ones(2)}
    tx = ja.multi_steps(adamw(), 2)
    state = tx.init(p | {"not trained": None})
    grads = {"w": jnp.ones(2), "large": None, "not trained": None}
    for _ in range(2):
        updates, state = tx.update(grads, state, p)
        assert (updates["large"], updates["not trained"]) == (None, None)


# A step, and the adapters.


def test_a_step_changes_no_bit_of_them():
    init, step = ja.train_step(loss_fn, optimizer(), num_microbatches=2, donate=False)
    p, state = params(), init(params())
    for _ in range(WINDOWS):
        p, state, _ = step(p, state, ROWS)
        assert_unchanged(p)
    assert_close(p["w"], plain(WINDOWS))


class Holder(nn.Module):
    """One trained parameter beside those that have no gradient."""

    @nn.compact
    def __call__(self, x):
        for name, value in others(frozen=False).items():
            self.param(name, lambda _, value=value: value)
        return self.param("w", lambda _: params()["w"]).sum() * x


def linen_loss(variables, x):
    return ja.mean(Holder().apply(variables, x))


LINEN = {
    "step": (adamw, lambda: linen.train_step(linen_loss, num_microbatches=2, donate=False)),
    "plain gradients": (adamw, lambda: applied(lambda sums: {"grads": sums.grads})),
    "chain": (
        lambda: optax.chain(optax.clip_by_global_norm(1e3), ja.multi_steps(adamw(), 1)),
        lambda: applied(lambda sums: {"grads": sums.grads, "weight": sums.weight}),
    ),
    "sums": (lambda: ja.multi_steps(adamw(), 1), lambda: applied(lambda sums: {"grads": sums})),
}


def applied(arguments):
    """A step by `apply_gradients`."""
    sums_fn = ja.accumulate(lambda p, x: linen_loss({"params": p}, x), num_microbatches=2)

    @jax.jit
    def step(state, x):
        sums = sums_fn(state.params, x)
        if set(arguments(sums)) == {"grads"} and isinstance(arguments(sums)["grads"], dict):
            return state.apply_gradients(grads=ja.finalize(sums).grads), None
        return state.apply_gradients(**arguments(sums)), None

    return step


@pytest.mark.parametrize("route", LINEN)
def test_linen_changes_no_bit_of_them(route):
    tx, step = (make() for make in LINEN[route])
    variables = Holder().init(jax.random.key(0), ROWS)
    state = linen.TrainState.create(apply_fn=Holder().apply, variables=variables, tx=tx)
    for _ in range(WINDOWS):
        state, _ = step(state, ROWS)
        assert_unchanged(state.params)
    assert state.step == WINDOWS
    assert_close(state.params["w"], plain(WINDOWS))


@pytest.mark.parametrize("route", ["step", "plain gradients", "sums", "the optimizer of Flax"])
def test_nnx_changes_no_bit_of_them(route):
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(params()["w"])
            self.small = nnx.Param(others()["small"])
            self.large = nnx.Param(others()["large"])

    def model_loss(model, x):
        return ja.mean(model.w[...].sum() * x)

    streams = route in ("sums", "the optimizer of Flax")
    tx = ja.multi_steps(adamw(), 2) if streams else adamw()
    model = Model()
    make = nnx.Optimizer if route == "the optimizer of Flax" else ja_nnx.Optimizer
    optimizer = make(model, tx, wrt=nnx.Param)
    step = ja_nnx.train_step(model_loss, num_microbatches=2, donate=False)
    f = ja_nnx.accumulate(model_loss, num_microbatches=2)
    for _ in range(6 if streams else 3):
        if route == "step":
            step(model, optimizer, ROWS)
        else:
            sums = f(model, ROWS)
            optimizer.update(model, sums if route == "sums" else ja.finalize(sums).grads)
    np.testing.assert_array_equal(model.small[...], others()["small"])
    assert model.large[...] == 16_777_217
    assert_close(model.w[...], plain(3))
