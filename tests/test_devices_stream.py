"""Streaming over devices: local sums, one decision for all devices, the state between calls."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, PMAP, Setup, bits
from oracles import assert_equal
from routes import recorder

import jaxaccum as ja

SIZE = 3
BOTH = ("data", "model")
SETUPS = pytest.mark.parametrize(
    "setup",
    [
        Setup("A"),
        Setup("E", check_vma=False),
        Setup("EE", names=BOTH),
        Setup("AA", manual=True),
        PMAP,
    ],
    ids=str,
)
PARAMS = {"w": np.array([1.0, -0.0, 2.0], np.float32), "b": np.float32(-0.0)}


class Calls(NamedTuple):
    """Gradient sums and weights for each device and call, `[calls, devices, ...]`."""

    grads: Any
    weight: np.ndarray
    value: np.ndarray


def calls(number, devices, *, seed=0):
    """Small integers; every call has a weight of 16 on all devices together."""
    rng = np.random.default_rng(seed)
    grads = {
        "w": rng.integers(-8, 9, (number, devices, SIZE)).astype(np.float32),
        "b": rng.integers(-8, 9, (number, devices)).astype(np.float32),
    }
    weight = np.stack([rng.multinomial(16, np.ones(devices) / devices) for _ in range(number)])
    value = rng.integers(-8, 9, (number, devices)).astype(np.float32)
    return Calls(grads, weight.astype(np.int32), value)


def mean_grads(given, which):
    """The float64 mean gradient of the given calls."""
    weight = given.weight[which].sum()
    return jax.tree.map(lambda g: np.float64(g[which]).sum(axis=(0, 1)) / weight, given.grads)


class Stream:
    """A `multi_steps` loop on a setup: every call sees its own gradients on each device."""

    def __init__(self, setup, tx, *, donate=False, with_value=False):
        self.setup, self.traces = setup, 0

        def micro_step(params, state, given):
            self.traces += 1
            grads, weight, value = jax.tree.map(lambda x: x[0], given)
            extra = {"value": ja.Mean(value, weight)} if with_value else {}
            updates, state = tx.update(grads, state, params, weight=weight, **extra)
            return optax.apply_updates(params, updates), state

        def flush(params, state):
            updates, state = ja.flush(tx, state, params)
            return optax.apply_updates(params, updates), state

        donated = (0, 1) if donate else ()
        if setup is PMAP:
            self.init = jax.pmap(tx.init, axis_name="data")
            self.step = jax.pmap(micro_step, axis_name="data", donate_argnums=donated)
            self.flush = jax.pmap(flush, axis_name="data")
            return
        self.specs = ja.state_specs(jax.eval_shape(tx.init, PARAMS), setup.names)
        shard = functools.partial(
            jax.shard_map,
            mesh=setup.mesh,
            check_vma=setup.check_vma,
            axis_names=setup.manual_axes,
        )
        both, rows = (P(), self.specs), P(setup.names)
        self.init = jax.jit(shard(tx.init, in_specs=P(), out_specs=self.specs))
        mapped = shard(micro_step, in_specs=(*both, rows), out_specs=both)
        self.step = jax.jit(mapped, donate_argnums=donated)
        self.flush = jax.jit(shard(flush, in_specs=both, out_specs=both))

    def params(self):
        if self.setup is PMAP:
            copies = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * DEVICES), PARAMS)
            return jax.pmap(lambda x: x, axis_name="data")(copies)
        return self.setup.put(PARAMS, P())

    def start(self):
        params = self.params()
        return params, self.init(params)

    def rows(self, given, call):
        rows = jax.tree.map(lambda x: x[call], given)
        if self.setup is PMAP:
            return jax.tree.map(lambda x: x[:, None], rows)
        return self.setup.put(rows, P(self.setup.names))

    def run(self, given, params=None, state=None, which=None):
        if params is None:
            params, state = self.start()
        for call in range(len(given.weight)) if which is None else which:
            params, state = self.step(params, state, self.rows(given, call))
        return params, state

    def whole(self, tree):
        """What is the same on all devices, as one copy."""
        return jax.tree.map(lambda x: np.asarray(x)[0] if self.setup is PMAP else x, tree)


def sgd(every, setup, **options):
    return ja.multi_steps(optax.sgd(1.0), every, axis_name=setup.names, **options)


@functools.cache
def sgd_stream(setup, every=2, *, skip=False):
    """A stream with learning rate 1, compiled once for all tests that ask for the same."""
    return Stream(setup, sgd(every, setup, skip_nonfinite=skip))


# The window


@SETUPS
def test_the_optimizer_sees_the_mean_over_all_devices(setup):
    stream = sgd_stream(setup)
    given = calls(4, setup.number)
    params, state = stream.start()
    want = PARAMS
    for call in range(4):
        before = params
        params, state = stream.run(given, params, state, [call])
        one = stream.whole(state)
        closes = call % 2 == 1
        assert bool(ja.has_updated(one)) == closes
        assert (one.micro_step, one.optimizer_step) == ((call + 1) % 2, (call + 1) // 2)
        if closes:
            mean = mean_grads(given, [call - 1, call])
            want = jax.tree.map(lambda p, g: np.float64(p) - g, want, mean)
            assert_equal(stream.whole(params), want)
        else:
            jax.tree.map(
                lambda a, b: np.testing.assert_array_equal(bits2(a), bits2(b)), params, before
            )


def bits2(x):
    return bits(np.asarray(x)[None])


@SETUPS
def test_sums_stay_on_their_device_between_calls(setup):
    stream = sgd_stream(setup)
    given = calls(1, setup.number)
    _, state = stream.run(given)
    held = jax.tree.map(lambda x: np.asarray(x).reshape(setup.number, -1), state.grad_carry)
    want = jax.tree.map(lambda g: g.sum(axis=0).reshape(setup.number, -1), given.grads)
    assert_equal(held, want)
    assert_equal(state.weight_carry.total.reshape(-1), given.weight.sum(axis=0))


def test_compensated_sums_over_devices():
    setup = Setup("A")
    tx = sgd(2, setup, accumulator=ja.accumulators.compensated())
    given = calls(2, DEVICES)
    given.grads["b"][0, :] = 2.0**25
    given.grads["b"][1, :] = 1.0
    given.grads["b"][1, 0] = -8 * 2.0**25
    params, _ = Stream(setup, tx).run(given)
    assert_equal(params["b"], -7 / 32)


@pytest.mark.parametrize("setup", [Setup("A"), PMAP], ids=str)
def test_the_state_specs_name_what_differs_per_device(setup):
    tx = optax.chain(optax.identity(), sgd(2, setup))
    state = jax.eval_shape(tx.init, PARAMS)
    for name in ("data", BOTH):
        specs = ja.state_specs(state, name)
        assert jax.tree.structure(specs) == jax.tree.structure(state)
        local = jax.tree.leaves([specs[1].grad_carry, specs[1].weight_carry, specs[1].mean_args])
        assert set(local) == {P(name)}
        assert len(jax.tree.leaves(specs)) == len(local) + 8
        assert specs[1].micro_step == specs[1].updated == P()


# One decision for all devices


def drifting(setup, tx, given):
    """Parameters and state of each device after all calls, read from all devices."""

    def micro_step(carry, call):
        params, state = carry
        grads, weight, _ = jax.tree.map(lambda x: x[0], call)
        updates, state = tx.update(grads, state, params, weight=weight)
        return (optax.apply_updates(params, updates), state), None

    def whole_run(params, given):
        (params, state), _ = jax.lax.scan(micro_step, (params, tx.init(params)), given)
        state = state._replace(grad_carry=None, weight_carry=None, mean_args=None)
        return jax.tree.map(lambda x: x[None], (params, state))

    if setup is PMAP:
        mapped = jax.pmap(whole_run, axis_name="data", in_axes=(None, 1))
        out = mapped(PARAMS, jax.tree.map(lambda x: x[:, :, None], given))
        return jax.tree.map(lambda x: x[:, 0], out)
    spec = P(None, setup.names)
    mapped = jax.shard_map(
        whole_run,
        mesh=setup.mesh,
        in_specs=(P(), spec),
        out_specs=P(setup.names),
        check_vma=False,
    )
    return jax.jit(mapped)(PARAMS, setup.put(given, spec))


@pytest.mark.parametrize("every", [2, ja.until_weight(30)], ids=["count", "weight"])
@pytest.mark.parametrize("setup", [Setup("A", check_vma=False), PMAP], ids=str)
def test_case_19_a_nan_on_one_device_is_skipped_by_all(setup, every):
    given = calls(5, DEVICES)
    given.grads["w"][1, 3, 0] = np.nan
    given.grads["b"][2, 6] = np.inf
    tx = ja.multi_steps(optax.adam(0.1), every, axis_name="data", skip_nonfinite=True)
    params, state = drifting(setup, tx, given)
    for leaf in jax.tree.leaves((params, state)):
        assert (bits(leaf) == bits(leaf)[:1]).all()
        assert np.isfinite(leaf).all()
    assert (state.num_skipped[0], state.optimizer_step[0], state.micro_step[0]) == (2, 1, 1)
    clean = jax.tree.map(lambda x: x[[0, 3, 4]], given)
    expected = drifting(setup, tx, clean)
    assert_equal((params, state.inner_state), (expected[0], expected[1].inner_state))


@SETUPS
def test_a_skipped_micro_step_is_replaced_by_the_next(setup):
    stream = sgd_stream(setup, skip=True)
    given = calls(3, setup.number)
    given.grads["b"][1, setup.number - 1] = np.nan
    params, state = stream.run(given, which=[0, 1])
    one = stream.whole(state)
    assert (one.num_skipped, one.micro_step, one.updated) == (1, 1, False)
    params, _ = stream.run(given, params, state, [2])
    want = jax.tree.map(lambda p, g: np.float64(p) - g, PARAMS, mean_grads(given, [0, 2]))
    assert_equal(stream.whole(params), want)


@SETUPS
def test_a_window_closes_when_all_devices_hold_the_target_together(setup):
    stream = sgd_stream(setup, ja.until_weight(33))
    given = calls(4, setup.number)
    updated, (params, state) = [], stream.start()
    for call in range(4):
        params, state = stream.run(given, params, state, [call])
        updated.append(bool(stream.whole(state).updated))
    assert updated == [False, False, True, False]
    want = mean_grads(given, [0, 1, 2])
    for name, p in PARAMS.items():
        np.testing.assert_allclose(stream.whole(params)[name], p - want[name], rtol=0, atol=1e-6)


@SETUPS
def test_a_window_without_weight_is_dropped(setup):
    stream = sgd_stream(setup)
    given = calls(4, setup.number)
    given.weight[:2] = 0
    given.grads["w"][0] = np.nan
    params, state = stream.run(given, which=[0, 1])
    one = stream.whole(state)
    assert (one.num_empty, one.optimizer_step, one.micro_step, one.updated) == (1, 0, 0, False)
    assert_equal(stream.whole(params), PARAMS)
    params, state = stream.run(given, params, state, [2, 3])
    want = jax.tree.map(lambda p, g: np.float64(p) - g, PARAMS, mean_grads(given, [2, 3]))
    assert_equal(stream.whole(params), want)


@SETUPS
def test_one_device_without_weight_counts_for_nothing(setup):
    stream = sgd_stream(setup)
    given = calls(2, setup.number)
    given.weight[:] = 0
    given.weight[0, 1] = 4
    params, _ = stream.run(given)
    want = jax.tree.map(lambda p, g: np.float64(p) - g, PARAMS, mean_grads(given, [0, 1]))
    assert_equal(stream.whole(params), want)


@SETUPS
def test_flush_applies_what_all_devices_hold(setup):
    stream = sgd_stream(setup)
    given = calls(1, setup.number)
    params, state = stream.flush(*stream.run(given))
    one = stream.whole(state)
    assert (one.optimizer_step, one.micro_step, one.updated) == (1, 0, True)
    want = jax.tree.map(lambda p, g: np.float64(p) - g, PARAMS, mean_grads(given, [0]))
    assert_equal(stream.whole(params), want)
    again, state = stream.flush(params, state)
    assert_equal(again, params)
    assert not np.any(ja.has_updated(state))


# Extra arguments and chains


@SETUPS
def test_averaged_arguments_are_means_over_all_devices(setup):
    tx = ja.multi_steps(recorder(), 2, axis_name=setup.names)
    stream = Stream(setup, tx, with_value=True)
    given = calls(2, setup.number)
    _, state = stream.run(given)
    seen = stream.whole(state).inner_state
    assert_equal(seen.value, given.value.sum() / 32)
    assert_equal(seen.grads, mean_grads(given, [0, 1]))


@SETUPS
def test_a_stream_inside_a_chain(setup):
    tx = optax.chain(optax.scale(2.0), sgd(2, setup), optax.scale(0.5))
    stream = Stream(setup, tx)
    given = calls(2, setup.number)
    params, state = stream.run(given, which=[0])
    assert not stream.whole(ja.has_updated(state))
    params, state = stream.run(given, params, state, [1])
    assert stream.whole(ja.has_updated(state))
    want = jax.tree.map(lambda p, g: np.float64(p) - g, PARAMS, mean_grads(given, [0, 1]))
    assert_equal(stream.whole(params), want)


# The state between calls


def types(tree):
    return [(x.shape, x.dtype, x.weak_type) for x in map(jax.typeof, jax.tree.leaves(tree))]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("setup", [Setup("A"), Setup("EE", names=BOTH), PMAP], ids=str)
def test_the_state_keeps_its_type_and_nothing_recompiles(setup, skip):
    inner = optax.adamw(0.1)
    tx = ja.multi_steps(inner, 3, axis_name=setup.names, skip_nonfinite=skip)
    stream = Stream(setup, tx, with_value=True)
    given = calls(10, setup.number)
    params, state = stream.start()
    before = types((params, state))
    assert not any(weak for _, _, weak in before)
    for call in range(10):
        params, state = stream.run(given, params, state, [call])
        assert types((params, state)) == before
    assert stream.traces == 1


@pytest.mark.parametrize(
    "setup", [Setup("A"), Setup("E"), Setup("E", check_vma=False), PMAP], ids=str
)
def test_donated_states_are_taken_over(setup):
    tx = ja.multi_steps(optax.adam(0.1), 2, axis_name="data")
    given = calls(4, DEVICES)
    kept, taken = Stream(setup, tx), Stream(setup, tx, donate=True)
    want = kept.run(given)
    params, state = taken.start()
    for call in range(4):
        old = (params, state)
        params, state = taken.run(given, params, state, [call])
        for leaf in jax.tree.leaves((old[0], old[1].grad_carry, old[1].inner_state)):
            assert leaf.is_deleted()
    assert_equal((params, state), want)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("types_", ["A", "E"])
def test_states_made_in_different_places_are_alike(types_, check):
    setup = Setup(types_, check_vma=check)
    tx = sgd(2, setup)
    stream = Stream(setup, tx)
    params, inside = stream.start()
    with setup.active():
        states = [tx.init(params), jax.jit(tx.init)(params)]
        abstract = jax.eval_shape(tx.init, params)
    for state in [*states, abstract]:
        chex.assert_trees_all_equal_shapes_and_dtypes(inside, state)
    given = calls(2, DEVICES)
    want = stream.run(given)
    for state in states:
        assert_equal(state, inside)
        assert_equal(stream.run(given, params, state), want)


@pytest.mark.parametrize(
    "setup", [Setup("A"), Setup("E", check_vma=False), Setup("EE", names=BOTH)], ids=str
)
def test_a_scan_over_micro_steps(setup):
    tx = ja.multi_steps(optax.adam(0.1), 3, axis_name=setup.names, skip_nonfinite=True)
    given = calls(7, setup.number)
    given.grads["b"][4, 2] = np.nan

    def micro_step(carry, call):
        params, state = carry
        grads, weight, _ = jax.tree.map(lambda x: x[0], call)
        updates, state = tx.update(grads, state, params, weight=weight)
        return (optax.apply_updates(params, updates), state), state.updated

    def whole_run(params, given):
        (params, _), updated = jax.lax.scan(micro_step, (params, tx.init(params)), given)
        return params, updated

    f = setup.shard(whole_run, (P(), P(None, setup.names)), P())
    params, updated = f(PARAMS, setup.put(given, P(None, setup.names)))
    assert_equal(updated, np.array([0, 0, 1, 0, 0, 0, 1], bool))
    want = Stream(setup, tx).run(given)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, want)


def test_a_mesh_of_another_size_is_told_by_its_state():
    """A state made without a mesh holds one device's sums and is not taken for eight."""
    setup = Setup("A")
    tx = sgd(2, setup)
    stream = Stream(setup, tx)
    with pytest.raises(ValueError, match="evenly divisible"):
        stream.step(stream.params(), tx.init(PARAMS), stream.rows(calls(1, DEVICES), 0))


# Refusals


def loss(params, x):
    return jnp.sum(params["w"] * x) + params["b"]


@pytest.mark.parametrize("types_", ["A", "E"])
def test_gradients_that_were_reduced_are_refused(types_):
    setup = Setup(types_)
    tx = sgd(2, setup)
    specs = ja.state_specs(jax.eval_shape(tx.init, PARAMS), "data")

    def automatic(params, state, x):
        return tx.update(jax.grad(loss)(params, x[0]), state, params)[1]

    def by_hand(params, state, x):
        local = jax.lax.pcast(params, "data", to="varying")
        grads = jax.lax.psum(jax.grad(loss)(local, x[0]), "data")
        return tx.update(grads, state, params)[1]

    params, state = Stream(setup, tx).start()
    x = setup.put(np.ones((DEVICES, SIZE), np.float32), P("data"))
    for reduced in (automatic, by_hand):
        with pytest.raises(
            TypeError, match=r"same on all devices.*reduced already.*ja\.accumulate"
        ):
            setup.shard(reduced, (P(), specs, P("data")), specs)(params, state, x)


def test_local_gradients_of_cast_parameters_are_accepted():
    setup = Setup("A")
    tx = sgd(1, setup)

    def step(params, x):
        grads = jax.grad(loss)(jax.lax.pcast(params, "data", to="varying"), x[0])
        return tx.update(grads, tx.init(params), params)[0]

    x = np.arange(DEVICES * SIZE, dtype=np.float32).reshape(DEVICES, SIZE)
    updates = setup.shard(step, (P(), P("data")), P())(PARAMS, setup.put(x, P("data")))
    assert_equal(updates, {"w": -x.mean(axis=0), "b": -1.0})


@pytest.mark.parametrize(
    "every",
    [2, lambda step: jnp.where(step < 3, 2, 4), ja.until_weight(lambda step: 1.0 + step)],
    ids=["int", "function", "weight"],
)
def test_the_first_window_is_checked_where_only_some_axes_are_manual(every):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    tx = ja.multi_steps(optax.sgd(1.0), every, axis_name="data")
    init = jax.shard_map(
        lambda w: tx.init(w).micro_step,
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        assert jax.jit(init)(jnp.ones(2)) == 0
