"""`model_state=`: what a window does to state that the model keeps beside its parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracles import assert_equal

import jaxaccum as ja

MOMENTUM = 0.75
X = np.arange(0.0, 12.0, 2.0, dtype=np.float32)  # CASES 56: mean 5, variance 11.667
START = {"count": jnp.int32(3), "mean": jnp.float32(1), "var": jnp.float32(2)}


def batch_norm(w, x, *, model_state, momentum=MOMENTUM):
    """A scalar batch normalisation, written out."""
    mean, var = jnp.mean(x), jnp.mean((x - jnp.mean(x)) ** 2)
    new = {
        **model_state,
        "count": model_state["count"] + 1,
        "mean": momentum * model_state["mean"] + (1 - momentum) * mean,
        "var": momentum * model_state["var"] + (1 - momentum) * var,
    }
    return ja.mean(w * (x - mean)), new


def only(x):
    """A loss without momentum: the new state is the batch's own statistics."""
    return lambda w, x, *, model_state: batch_norm(w, x, model_state=model_state, momentum=0.0)


def window(policy, loss_fn=batch_norm, x=X, start=START, **options):
    f = ja.value_and_grad(loss_fn, model_state=policy, **options)
    (_, state), _ = jax.jit(f)(jnp.float32(1), jnp.asarray(x), model_state=start)
    return state


CUTS = [{"num_microbatches": 3}, {"num_microbatches": 4}, {"microbatch_size": 4}]


@pytest.mark.parametrize("cut", [*CUTS, {"num_microbatches": 1}], ids=str)
def test_case_56_pooled(cut):
    state = window("pooled", only(X), **cut)
    np.testing.assert_allclose(state["mean"], 5.0, rtol=1e-6)
    np.testing.assert_allclose(state["var"], 35 / 3, rtol=1e-6)
    assert state["count"] == 4  # one step for the window


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_pooled_with_momentum_equals_one_full_batch(cut):
    want = batch_norm(1.0, jnp.asarray(X), model_state=START)[1]
    got = window("pooled", **cut)
    for name in START:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
        assert got[name].dtype == START[name].dtype


def test_case_56_sequential():
    f = ja.split(jnp.asarray(X), num_microbatches=3)
    state = START
    for micro_batch in f:
        state = batch_norm(1.0, micro_batch, model_state=state)[1]
    got = window("sequential", num_microbatches=3)
    for name in START:
        np.testing.assert_allclose(got[name], state[name], rtol=1e-6)
    assert got["count"] == 6


def test_sequential_equals_a_loop_bit_for_bit_on_uneven_cuts():
    """Integers: every micro-batch adds its rows, doubled at each step."""

    def loss_fn(w, x, *, model_state):
        return ja.mean(w * x), {"sum": 2 * model_state["sum"] + jnp.sum(x)}

    start = {"sum": jnp.float32(0)}
    for size in (1, 2, 4, 5):
        want = 0.0
        for micro_batch in ja.split(jnp.asarray(X), microbatch_size=size):
            want = 2 * want + float(jnp.sum(micro_batch))
        assert window("sequential", loss_fn, start=start, microbatch_size=size)["sum"] == want


def test_frozen():
    state = window("frozen", num_microbatches=3)
    for name in START:
        assert state[name] == START[name]


@pytest.mark.parametrize("policy", ["sequential", "pooled", "frozen"])
def test_gradients_do_not_depend_on_the_policy(policy):
    f = ja.value_and_grad(batch_norm, num_microbatches=3, model_state=policy)
    (loss, _), grad = f(jnp.float32(1), jnp.asarray(X), model_state=START)
    plain = ja.value_and_grad(
        lambda w, x: batch_norm(w, x, model_state=START)[0], num_microbatches=3
    )
    want_loss, want_grad = plain(jnp.float32(1), jnp.asarray(X))
    np.testing.assert_array_equal(loss, want_loss)
    np.testing.assert_array_equal(grad, want_grad)


def test_counted_statistics():
    """Padding: micro-batches of {0, 2, padding, padding} and {4, 6, 8, 10}."""

    def loss_fn(w, batch, *, model_state):
        x, real = batch
        number = jnp.sum(real)
        mean = jnp.sum(x * real) / number
        var = jnp.sum((x - mean) ** 2 * real) / number
        return ja.mean(w * x, where=real), ja.Counted({"mean": mean, "var": var}, number)

    x = jnp.array([0.0, 4.0, 2.0, 6.0, 0.0, 8.0, 0.0, 10.0, 0.0, 0.0, 0.0, 0.0])
    real = jnp.array([1, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0], bool)
    start = {"mean": jnp.float32(7), "var": jnp.float32(9)}
    f = ja.accumulate(loss_fn, num_microbatches=2, model_state="pooled")
    state = ja.finalize(f(1.0, (x[:8], real[:8]), model_state=start)).model_state
    np.testing.assert_allclose(state["mean"], 5.0, rtol=1e-6)
    np.testing.assert_allclose(state["var"], 35 / 3, rtol=1e-6)
    # A micro-batch of padding alone: its statistics are nan, its count is zero.
    padded = ja.accumulate(loss_fn, microbatch_size=4, model_state="pooled")
    order = np.array([0, 2, 1, 3, 5, 7, 4, 6, 8, 9, 10, 11])
    state = ja.finalize(padded(1.0, (x[order], real[order]), model_state=start)).model_state
    np.testing.assert_allclose(state["var"], 35 / 3, rtol=1e-6)
    nothing = padded(1.0, (x, jnp.zeros(12, bool)), model_state=start)
    for name in start:
        assert ja.finalize(nothing).model_state[name] == start[name]


def test_pooled_sums_merge():
    f = ja.accumulate(only(X), num_microbatches=1, model_state="pooled")
    a, b = (f(1.0, jnp.asarray(x), model_state=START) for x in (X[:2], X[2:]))
    state = ja.finalize(ja.merge(a, b)).model_state
    np.testing.assert_allclose(state["mean"], 5.0, rtol=1e-6)
    np.testing.assert_allclose(state["var"], 35 / 3, rtol=1e-6)
    f = ja.accumulate(batch_norm, num_microbatches=1, model_state="sequential")
    a, b = (f(1.0, jnp.asarray(x), model_state=START) for x in (X[:2], X[2:]))
    with pytest.raises(ValueError, match="merge: the sums hold two model states"):
        ja.merge(a, b)


@pytest.mark.parametrize("policy", ["sequential", "pooled"])
@pytest.mark.parametrize("route", ["checked", "unchecked", "spmd auto", "spmd explicit"])
def test_devices(policy, route):
    start = START | {"frozen": {"mean": jnp.float32(0.1), "var": jnp.float32(0.7)}}
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(3, 2, 48), jnp.float32)
    w = jnp.float32(1)
    kind = AxisType.Explicit if "explicit" in route else AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    options = {"num_microbatches": 3, "model_state": policy}
    if route.startswith("spmd"):
        with jax.set_mesh(mesh):
            f = ja.value_and_grad(batch_norm, spmd_axis_name="data", **options)
            (_, got), _ = jax.jit(f)(w, jax.device_put(x, P("data")), model_state=start)
    else:
        f = ja.value_and_grad(batch_norm, axis_name="data", **options)
        run = jax.shard_map(
            lambda w, x, s: f(w, x, model_state=s)[0][1],
            mesh=mesh,
            in_specs=(P(), P("data"), P()),
            out_specs=P(),
            check_vma=route == "checked",
        )
        got = jax.jit(run)(w, x, start)
    if policy == "pooled":
        want = batch_norm(w, x, model_state=start)[1]
    else:  # the mean over devices
        parts = [
            window("sequential", x=np.asarray(part), num_microbatches=3)
            for part in np.split(np.asarray(x), 8)
        ]
        want = jax.tree.map(lambda *xs: np.mean(np.stack(xs)), *parts)
    for name in START:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-6)
    assert got["frozen"] == start["frozen"]  # not one bit of what does not change


def test_skipped_micro_batches_leave_no_trace():
    x = np.array([0.0, 4.0, np.nan, 2.0, 6.0, 1.0], np.float32)
    for policy in ("sequential", "pooled"):
        got = window(policy, x=x, num_microbatches=3, skip_nonfinite=True)
        kept = np.array([0.0, 4.0, 2.0, 6.0], np.float32)
        want = window(policy, x=kept, num_microbatches=2)
        assert got["count"] == want["count"]
        for name in ("mean", "var"):
            np.testing.assert_allclose(got[name], want[name], rtol=1e-6)


def test_several_terms_num_real_and_aux():
    def loss_fn(w, x, *, model_state, key):
        loss, new = batch_norm(w, x, model_state=model_state)
        both = {"fit": loss, "penalty": ja.Mean(w * w, 1.0)}
        return both, ({"rows": ja.Concat(x), "draw": jax.random.uniform(key)}, new)

    for skip in (False, True):
        f = ja.value_and_grad(
            loss_fn,
            num_microbatches=3,
            model_state="sequential",
            has_aux=True,
            skip_nonfinite=skip,
        )
        (_, (aux, state)), _ = f(1.0, jnp.asarray(X), model_state=START, key=jax.random.key(0))
        np.testing.assert_array_equal(aux["rows"], X)
        assert state["count"] == 6
        (_, (_, state)), _ = f(
            1.0, jnp.asarray(X), model_state=START, key=jax.random.key(0), num_real=2
        )
        assert state["count"] == 5


class Net(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        norm = nn.remat(nn.BatchNorm) if self.remat else nn.BatchNorm
        for layer in range(2):
            x = nn.Dense(4, name=f"dense{layer}")(x)
            x = nn.relu(norm(use_running_average=False, momentum=0.9, name=f"norm{layer}")(x))
        return nn.Dense(1, name="out")(x)[:, 0]


@pytest.mark.parametrize("remat", [False, True])
def test_flax_batch_norm_and_rematerialisation(remat):
    """CASES 57: a rematerialised layer does not update its statistics twice."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(12, 3)), jnp.float32)
    y = jnp.asarray(rng.normal(size=12), jnp.float32)
    model = Net(remat)
    variables = model.init(jax.random.key(0), x)
    params, stats = variables["params"], variables["batch_stats"]

    def loss_fn(params, batch, *, model_state):
        x, y = batch
        out, new = model.apply(
            {"params": params, "batch_stats": model_state}, x, mutable=["batch_stats"]
        )
        return ja.mean((out - y) ** 2), new["batch_stats"]

    f = jax.jit(ja.value_and_grad(loss_fn, num_microbatches=3, model_state="sequential"))
    (_, got), _ = f(params, (x, y), model_state=stats)
    want = stats
    for micro_batch in ja.split((x, y), num_microbatches=3):
        want = loss_fn(params, micro_batch, model_state=want)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), got, want)
    # Pooled: the first layer's input does not depend on the cut, so its statistics are exact.
    f = jax.jit(ja.value_and_grad(loss_fn, num_microbatches=3, model_state="pooled"))
    (_, got), _ = f(params, (x, y), model_state=stats)
    want = loss_fn(params, (x, y), model_state=stats)[1]
    for name in ("mean", "var"):
        np.testing.assert_allclose(got["norm0"][name], want["norm0"][name], rtol=5e-6, atol=1e-7)


def test_evaluation_mode_stays():
    """A model that uses its running statistics: the derivative is one, and nothing changes."""

    def loss_fn(w, x, *, model_state):
        return ja.mean(w * (x - model_state["mean"])), model_state

    start = {name: value / 7 for name, value in START.items()}
    got = window("pooled", loss_fn, start=start, num_microbatches=3)
    assert got == start


class TestRefusals:
    def test_policy_and_state_belong_together(self):
        with pytest.raises(ValueError, match='accumulate: `model_state` must be "sequential"'):
            ja.accumulate(batch_norm, num_microbatches=2, model_state="average")
        with pytest.raises(TypeError, match=r'value_and_grad: a model state was given.*"pooled"'):
            ja.value_and_grad(batch_norm, num_microbatches=2)(1.0, jnp.ones(4), model_state=START)
        f = ja.value_and_grad(batch_norm, num_microbatches=2, model_state="pooled")
        with pytest.raises(TypeError, match="needs the state itself"):
            f(1.0, jnp.ones(4))

    def test_what_the_loss_function_returns(self):
        def call(loss_fn, **options):
            options = {"num_microbatches": 2, "model_state": "sequential"} | options
            return ja.value_and_grad(loss_fn, **options)(1.0, jnp.ones(4), model_state=START)

        with pytest.raises(TypeError, match=r"must return `\(loss, state\)`"):
            call(lambda w, x, *, model_state: ja.mean(w * x))
        with pytest.raises(TypeError, match=r"must return `\(loss, \(aux, state\)\)`"):
            call(lambda w, x, *, model_state: (ja.mean(w * x), model_state), has_aux=True)
        with pytest.raises(ValueError, match="`model_state` has the tree structure"):
            call(lambda w, x, *, model_state: (ja.mean(w * x), model_state["mean"]))
        with pytest.raises(ValueError, match=r"`model_state\['mean'\]` is float32\[1\]"):
            call(
                lambda w, x, *, model_state: (
                    ja.mean(w * x),
                    model_state | {"mean": jnp.ones(1, jnp.float32)},
                )
            )

    def test_a_variance_that_is_no_exponential_average(self):
        def loss_fn(w, x, *, model_state):
            new = model_state | {"var": model_state["var"] * jnp.mean(x)}
            return ja.mean(w * x), new

        with pytest.raises(ValueError, match="exponential averages of a batch's own"):
            window("pooled", loss_fn, num_microbatches=3)


@pytest.mark.parametrize("policy", ["sequential", "pooled"])
def test_a_dropped_window_leaves_the_state(policy):
    x = np.array([0.0, 4.0, np.nan, 2.0, 6.0, 1.0], np.float32)
    got = window(policy, x=x, num_microbatches=3, skip_nonfinite="window")
    for name in START:
        assert got[name] == START[name]
        assert got[name].dtype == START[name].dtype


def running(w, x, *, model_state):
    """A loss that is finite whatever the state is; a negative row makes a nan in the state alone.

    The mask and the maximum hold infinities for good, which are no fault.
    """
    norm = jnp.where(x[0] < 0, jnp.nan, jnp.mean(x))
    state = {
        "mean": 0.5 * model_state["mean"] + 0.5 * norm,
        "mask": model_state["mask"],
        "highest": jnp.maximum(model_state["highest"], x[0]),
    }
    return ja.mean(w * x), state


RUNNING = {
    "mean": jnp.float32(1),
    "mask": jnp.array([0, -jnp.inf]),
    "highest": jnp.float32(-jnp.inf),
}


@pytest.mark.parametrize("policy", ["sequential", "pooled"])
@pytest.mark.parametrize("skip", [True, "window"])
def test_case_72_a_nan_in_the_new_state_alone(policy, skip):
    """Without it nothing is left out; a step keeps its state, too, and counts what it lost."""
    options = {"num_microbatches": 3, "model_state": policy, "skip_nonfinite": skip}
    x = jnp.array([4.0, 2.0, 6.0])
    f = jax.jit(ja.accumulate(running, **options))
    sums = f(jnp.float32(1), x, model_state=RUNNING)
    assert (sums.num_skipped, sums.grads) == (0, 12)
    bad = x.at[1].set(-2.0)
    init, step = ja.train_step(running, optax.sgd(1.0), donate=False, **options)
    w, state, info = step(jnp.float32(1), init(jnp.float32(1), RUNNING), bad)
    got = state.model_state
    if skip == "window":
        assert (w, info.num_skipped, info.num_dropped) == (1, 3, 1)
        assert_equal(got, RUNNING)
    else:
        assert (w, info.num_skipped, info.num_dropped) == (1 - 5, 1, 0)
        want = 0.5 * (0.5 * 1 + 0.5 * 4) + 0.5 * 6 if policy == "sequential" else 0.5 + 0.5 * 5
        assert got["mean"] == want
    assert np.isfinite(got["mean"])
    frozen = ja.accumulate(running, **{**options, "model_state": "frozen"})
    assert frozen(jnp.float32(1), bad, model_state=RUNNING).num_skipped == 0


@pytest.mark.parametrize("policy", ["sequential", "pooled"])
def test_case_72_over_devices(policy):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    f = ja.accumulate(
        running, num_microbatches=2, model_state=policy, skip_nonfinite="window",
        spmd_axis_name="data",
    )  # fmt: skip
    x = np.arange(1, 9, dtype=np.float32)
    with jax.set_mesh(mesh):
        for bad, skipped in ((x, 0), (np.where(x == 6, -6, x), 8)):
            window = ja.finalize(
                jax.jit(f)(jnp.float32(1), jax.device_put(bad, P("data")), model_state=RUNNING)
            )
            assert window.num_skipped == skipped
            assert np.isfinite(window.model_state["mean"])


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize(("policy", "steps"), [("sequential", 3), ("pooled", 1), ("frozen", 0)])
def test_a_random_key_in_the_state(policy, steps, make):
    def noisy(w, x, *, model_state):
        key, own = jax.random.split(model_state["key"])
        new = {"key": key, "mean": model_state["mean"] + 1}
        return ja.mean(w * x + jax.random.normal(own, x.shape)), new

    want = make(0)
    for _ in range(steps):
        want, _ = jax.random.split(want)
    start = {"key": make(0), "mean": jnp.float32(0)}
    init, step = ja.train_step(
        noisy,
        optax.sgd(0.1),
        num_microbatches=3,
        model_state=policy,
        skip_nonfinite="window",
        donate=False,
    )
    _, state, _ = step(jnp.float32(1), init(jnp.float32(1), start), jnp.asarray(X))
    got = state.model_state
    assert got["key"].dtype == want.dtype
    np.testing.assert_array_equal(jax.random.key_data(got["key"]), jax.random.key_data(want))
    assert got["mean"] == steps


@pytest.mark.parametrize("offset", [0.0, 100.0, 1e4])
@pytest.mark.parametrize("devices", [1, 8])
def test_data_far_from_the_old_mean_keep_their_variance(offset, devices):
    x = (np.random.default_rng(5).normal(size=64) + offset).astype(np.float32)
    start = {"count": jnp.int32(0), "mean": jnp.float32(0), "var": jnp.float32(1)}
    if devices == 1:
        got = window("pooled", only(x), x=x, start=start, num_microbatches=4)
    else:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        with jax.set_mesh(mesh):
            got = window(
                "pooled", only(x), x=x, start=start, num_microbatches=4, spmd_axis_name="data"
            )
    np.testing.assert_allclose(got["mean"], np.mean(x, dtype=np.float64), rtol=1e-6)
    # Each micro-batch's float32 mean is rounded by half an eps of the offset, and the distances
    # between the means, which are below one, by as much.
    rtol = 2e-6 + np.finfo(np.float32).eps * offset
    np.testing.assert_allclose(got["var"], np.var(x, dtype=np.float64), rtol=rtol)


@pytest.mark.parametrize("policy", ["sequential", "pooled", "frozen"])
@pytest.mark.parametrize(("start", "factor"), [(1, 1.5), (True, 0.5), (1.0, 1j)], ids=str)
def test_a_new_state_that_the_old_dtype_cannot_hold_is_refused(policy, start, factor):
    def loss_fn(w, x, model_state):
        return ja.mean(w * x), {"n": model_state["n"] * factor}

    f = ja.value_and_grad(loss_fn, num_microbatches=2, model_state=policy)
    with pytest.raises(TypeError, match=r"`model_state\['n'\]` is .*came in as .*cannot hold it"):
        f(1.0, jnp.ones(4), model_state={"n": jnp.asarray(start)})
