"""Restarts: from bytes and from Orbax, over other devices, with other windows and optimizers."""

import dataclasses
import functools
import pathlib
import subprocess
import sys

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_stream import assert_same_bits

import jaxaccum as ja
from jaxaccum import interop
from jaxaccum.orbax import Checkpoints, Run

ROOT = pathlib.Path(__file__).parents[1]
ACCUMULATORS = {
    "plain": ja.accumulators.plain(),
    "compensated": ja.accumulators.compensated(),
    "stochastic": ja.accumulators.stochastic(),
    "chunked": ja.accumulators.chunked(every=2),
}
STREAMS = {
    name: functools.partial(ja.multi_steps, optax.adamw(0.1), 4, accumulator=kind)
    for name, kind in ACCUMULATORS.items()
} | {
    "until_weight": lambda: ja.multi_steps(optax.adamw(0.1), ja.until_weight(9)),
    "chain": lambda: optax.chain(
        optax.clip(9.0), ja.multi_steps(optax.masked(optax.adam(0.1), {"w": True, "b": False}), 4)
    ),
    "loss scale": lambda: ja.multi_steps(
        optax.sgd(0.1), 4, skip_nonfinite=True, loss_scale=ja.loss_scaling.dynamic()
    ),
}
QUICK = {"compensated", "chain"}
EACH = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in STREAMS]
STOP = 6  # in the middle of the second window


def parameters():
    return {"w": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "b": jnp.float32(1)}


def gradient(step):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), parameters())


def micro_steps(tx, params, state, steps):
    @jax.jit
    def micro_step(params, state, grads, weight, key):
        updates, state = tx.update(grads, state, params, weight=weight, key=key)
        return optax.apply_updates(params, updates), state

    for step in steps:
        key = jax.random.fold_in(jax.random.key(1), step)
        params, state = micro_step(params, state, gradient(step), 1 + step % 3, key)
    return params, state


# flax.serialization: bytes and state dicts.


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("form", ["bytes", "dict"])
def test_flax_restores_bit_for_bit(name, form):
    tx = STREAMS[name]()
    params = parameters()
    params, state = micro_steps(tx, params, tx.init(params), range(STOP))
    saved, fresh = (params, state), (parameters(), tx.init(parameters()))
    if form == "bytes":
        taken = flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(saved))
    else:
        taken = flax.serialization.from_state_dict(fresh, flax.serialization.to_state_dict(saved))
    assert_same_bits(taken, saved)
    assert jax.tree.structure(taken) == jax.tree.structure(saved)
    assert_same_bits(
        micro_steps(tx, *taken, range(STOP, 12)), micro_steps(tx, *saved, range(STOP, 12))
    )


def test_flax_restores_a_training_step():
    init, step = ja.train_step(
        lambda w, x: ja.mean((w - x) ** 2), optax.adam(0.1), num_microbatches=2, donate=False,
        skip_nonfinite="window", max_bad_windows=3, loss_scale=ja.loss_scaling.dynamic(),
    )  # fmt: skip
    w = jnp.float32(0)
    w, state, _ = step(w, init(w), jnp.array([1.0, 3.0]))
    w, state, _ = step(w, state, jnp.array([1.0, jnp.nan]))
    taken = flax.serialization.from_bytes(init(w), flax.serialization.to_bytes(state))
    assert_same_bits(taken, state)
    x = jnp.array([5.0, 6.0])
    assert_same_bits(step(w, taken, x), step(w, state, x))


# Orbax.


@pytest.mark.parametrize("name", EACH)
def test_orbax_restores_bit_for_bit(name, tmp_path):
    tx = STREAMS[name]()
    params = parameters()
    params, state = micro_steps(tx, params, tx.init(params), range(STOP))
    key = {"typed": jax.random.key(3), "raw": jax.random.PRNGKey(4)}
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest is None
        checkpoints.save(Run(params, state, key, micro_batches=STOP))
    like = Run(parameters(), tx.init(parameters()), jax.tree.map(jnp.zeros_like, key))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == STOP
        run = checkpoints.restore(like)
    assert run.micro_batches == STOP
    assert run.key["typed"].dtype == key["typed"].dtype
    assert jax.random.bits(run.key["typed"]) == jax.random.bits(key["typed"])
    assert_same_bits(run.key["raw"], key["raw"])
    assert_same_bits((run.params, run.state), (params, state))
    assert jax.tree.structure(run.state) == jax.tree.structure(state)
    assert_same_bits(
        micro_steps(tx, run.params, run.state, range(STOP, 12)),
        micro_steps(tx, params, state, range(STOP, 12)),
    )


def small():
    tx = ja.multi_steps(optax.adam(0.1), 4)
    return tx, Run(parameters(), tx.init(parameters()), jax.random.key(0), micro_batches=3)


def test_orbax_keeps_the_last_ones(tmp_path):
    _, run = small()
    with Checkpoints(tmp_path, max_to_keep=2) as checkpoints:
        for position in (3, 5, 8):
            checkpoints.save(run._replace(micro_batches=position))
        with pytest.raises(ValueError, match="there is a checkpoint at 8"):
            checkpoints.save(run._replace(micro_batches=8))
        assert checkpoints.restore(run, micro_batches=5).micro_batches == 5
        with pytest.raises(FileNotFoundError, match=r"no checkpoint at micro-batch 3 .* \[5, 8\]"):
            checkpoints.restore(run, micro_batches=3)


def test_orbax_keeps_the_loaders_own_words(tmp_path):
    _, run = small()
    with Checkpoints(tmp_path) as checkpoints:
        words = {"parent_state": {"next_index": 6}, "remainder": (2, 14), "epoch": None}
        checkpoints.save(run._replace(loader=words))
        assert checkpoints.restore(run).loader == words | {"remainder": [2, 14]}
        with pytest.raises(TypeError, match="save: `loader` must be what JSON can hold"):
            checkpoints.save(run._replace(micro_batches=4, loader={"index": np.arange(2)}))
        assert checkpoints.latest == 3


def test_orbax_restores_from_abstract_values(tmp_path):
    _, run = small()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(run)
        abstract = jax.eval_shape(lambda: run._replace(micro_batches=0)[:3])
        again = checkpoints.restore(Run(*abstract))
    assert_same_bits((again.params, again.state), (run.params, run.state))


WRONG = {
    "shape": (
        lambda run: run._replace(params={**run.params, "b": jnp.ones(2)}),
        r"`\['params'\]\['b'\]` is float32\[\] in the checkpoint, float32\[2\] in `like`",
    ),
    "dtype": (
        lambda run: run._replace(params={**run.params, "w": jnp.zeros((2, 3))}),
        r"`\['params'\]\['w'\]` is bfloat16\[2,3\] in the checkpoint, float32\[2,3\]",
    ),
    "structure": (
        lambda run: run._replace(params={"w": run.params["w"]}),
        r"`\['params'\]\['b'\]` of the checkpoint has no place",
    ),
    "more": (
        lambda run: run._replace(params={**run.params, "c": jnp.ones(2)}),
        r"`\['params'\]\['c'\]` is not in the checkpoint",
    ),
    "optimizer": (
        lambda run: run._replace(state=ja.multi_steps(optax.sgd(0.1), 4).init(run.params)),
        "inner_state.* of the checkpoint has no place",
    ),
    "window of one": (
        lambda run: run._replace(state=ja.multi_steps(optax.adam(0.1), 1).init(run.params)),
        "grad_carry.* of the checkpoint has no place",
    ),
    "a raw key": (lambda run: run._replace(key=jax.random.PRNGKey(0)), r"`\['key'\]` is key<fry>"),
    "another key": (
        lambda run: run._replace(key=jax.random.key(0, impl="rbg")),
        r"is key<fry>\[\] in the checkpoint, key<rbg>\[\] in `like`",
    ),
    "no key": (lambda run: run._replace(key=None), r"`\['key'\]` of the checkpoint has no place"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_orbax_refuses_what_does_not_fit(wrong, tmp_path):
    _, run = small()
    change, message = WRONG[wrong]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(run)
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(change(run))


def test_orbax_refuses_what_is_no_run(tmp_path):
    _, run = small()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match="expected a `Run`"):
            checkpoints.save(run.params)
        with pytest.raises(TypeError, match="`micro_batches` must be a static integer"):
            checkpoints.save(run._replace(micro_batches=1.5))
        with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
            checkpoints.restore(run)
    with pytest.raises(TypeError, match="`max_to_keep`"):
        Checkpoints(tmp_path, max_to_keep="2")


def test_orbax_names_a_damaged_checkpoint_and_the_one_before(tmp_path):
    _, run = small()
    with Checkpoints(tmp_path) as checkpoints:
        for position in (3, 5):
            checkpoints.save(run._replace(micro_batches=position))
    notes = tmp_path / "5" / "notes" / "metadata"
    written = notes.read_bytes()
    for damage in (None, written[:99], written.replace(b'"shape": []', b'"shape": [1]')):
        if damage is None:
            notes.unlink()
        else:
            notes.write_bytes(damage)
        with Checkpoints(tmp_path) as checkpoints:
            with pytest.raises(ValueError, match=r"at micro-batch 5 .* cannot be read .*`micro_ba"):
                checkpoints.restore(run)
            assert checkpoints.restore(run, micro_batches=3).micro_batches == 3
    tree = tmp_path / "3" / "run" / "_METADATA"
    tree.write_bytes(tree.read_bytes()[:99])
    message = r"micro-batch 3 .* cannot be read .*none before it"
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=message):
        checkpoints.restore(run, micro_batches=3)


def test_orbax_refuses_a_file_in_the_place_of_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match=r"`directory` must be a folder.*file' is a f"):
            Checkpoints(path)


# Another number of devices.


def devices_step(tx, number):
    mesh = jax.make_mesh((number,), ("data",), devices=jax.devices()[:number],
                         axis_types=(jax.sharding.AxisType.Auto,))  # fmt: skip
    with jax.set_mesh(mesh):
        state = tx.init(jnp.zeros(3))
    specs = ja.state_specs(state, "data")

    def step(grads, weights, state):
        updates, state = tx.update(grads[0], state, jnp.zeros(3), weight=weights[0])
        return updates, state

    step = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(jax.P("data"), jax.P("data"), specs),
                      out_specs=(jax.P(), specs))
    )  # fmt: skip
    place = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    return jax.device_put(state, place), step, place


def rows(step, number):
    """Integer gradients and weights of eight units of data, on `number` devices."""
    rng = np.random.default_rng(step)
    grads, weights = rng.integers(-9, 9, (8, 3)), rng.integers(0, 5, 8)
    grads = grads.reshape(number, -1, 3).sum(1)
    return jnp.asarray(grads, jnp.float32), jnp.asarray(weights.reshape(number, -1).sum(1))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "through"),
    [
        ("plain", "memory"),
        ("compensated", "orbax"),
        pytest.param("plain", "orbax", marks=SLOW),
        pytest.param("compensated", "memory", marks=SLOW),
        pytest.param("chunked", "memory", marks=SLOW),
        pytest.param("chunked", "orbax", marks=SLOW),
    ],
)
def test_case_58_eight_devices_then_four_then_one(kind, through, tmp_path):
    tx = ja.multi_steps(
        optax.sgd(1.0), 4, axis_name="data", accumulator=ACCUMULATORS[kind], mean_args=()
    )
    state, step, _ = devices_step(tx, 8)
    for at, number in enumerate((8, 4, 1, 1)):
        if number != len(state.weight_carry.total):
            fresh, step, place = devices_step(tx, number)
            if through == "memory":
                state = jax.device_put(interop.reshape_devices(state, number), place)
            else:
                with Checkpoints(tmp_path) as checkpoints:
                    checkpoints.save(Run({}, state, micro_batches=at))
                    state = checkpoints.restore(Run({}, fresh)).state
            kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), s) for s in (state, fresh)]
            assert kinds[0] == kinds[1]
            assert state.micro_step == at
        updates, state = step(*rows(at, number), state)
    grads, weights = zip(*[rows(at, 1) for at in range(4)], strict=True)
    want = -sum(g[0] for g in grads) / float(sum(w[0] for w in weights))
    np.testing.assert_array_equal(updates, np.asarray(want, np.float32))
    assert (state.optimizer_step, state.micro_step) == (1, 0)


def open_state(tx, totals, weights):
    """The state of several devices, each with one micro-step in its window."""
    states = [
        tx.update(jnp.float32(t), tx.init(jnp.float32(0)), weight=w)[1]
        for t, w in zip(totals, weights, strict=True)
    ]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
    local = {n: getattr(stacked, n) for n in ("weight_carry", "grad_carry", "mean_args")}
    return states[0]._replace(**local)


def test_growing_and_shrinking_keep_every_sum():
    tx = ja.multi_steps(optax.sgd(1.0), 4, accumulator=ja.accumulators.compensated())
    totals, weights = [2.0**24, 1.0, 1.0, 1.0, 5.0], [2**24, 1, 1, 1, 5]
    state = open_state(tx, totals, weights)
    for number in (3, 8, 2, 1):
        state = interop.reshape_devices(state, number)
        assert len(state.weight_carry.total) == number
        held = state.grad_carry
        assert sum(np.float64(x) for x in [*held.total, *held.error]) == sum(totals)
        assert sum(state.weight) == sum(weights)
    state = interop.reshape_devices(state, None)
    assert (state.weight, np.ndim(state.grad_carry.total)) == (sum(weights), 0)
    updates, _ = ja.flush(tx, state)
    assert updates == -1


def test_a_stream_without_devices_gets_some():
    tx = ja.multi_steps(optax.sgd(1.0), 4)
    _, state = tx.update(jnp.float32(6), tx.init(jnp.float32(0)), weight=3)
    state = interop.reshape_devices((state, optax.EmptyState()), 4)[0]
    np.testing.assert_array_equal(state.grad_carry, [6, 0, 0, 0])
    np.testing.assert_array_equal(state.weight, [3, 0, 0, 0])


def test_wrong_device_counts_are_refused():
    state = ja.multi_steps(optax.sgd(1.0), 4).init(jnp.float32(0))
    with pytest.raises(ValueError, match="`num_devices` must be at least 1"):
        interop.reshape_devices(state, 0)
    with pytest.raises(TypeError, match="`num_devices` must be a static integer"):
        interop.reshape_devices(state, 2.0)
    with pytest.raises(ValueError, match="holds no `multi_steps` state"):
        interop.reshape_devices(optax.sgd(1.0).init(jnp.float32(0)), 2)


# Another window.


def feed(tx, state, values):
    updates = None
    for value in values:
        updates, state = tx.update(jnp.float32(value), state, jnp.float32(0))
    return updates, state


def test_case_38_a_shorter_window_closes_at_once_with_its_true_mean():
    longer, shorter = (ja.multi_steps(optax.sgd(1.0), every) for every in (8, 4))
    _, state = feed(longer, longer.init(jnp.float32(0)), [1, 2, 3, 4, 5, 6])
    updates, state = feed(shorter, state, [14])
    assert updates == -35 / 7
    assert (state.optimizer_step, state.micro_step) == (1, 0)
    updates, _ = feed(shorter, state, [1, 1, 1, 5])
    assert updates == -2


def test_case_38_or_is_flushed_first():
    longer, shorter = (ja.multi_steps(optax.sgd(1.0), every) for every in (8, 4))
    _, state = feed(longer, longer.init(jnp.float32(0)), [1, 2, 3, 4, 5, 6])
    updates, state = ja.flush(shorter, state, jnp.float32(0))
    assert updates == -3.5
    assert state.micro_step == 0


def test_a_longer_window_goes_on():
    shorter, longer = (ja.multi_steps(optax.sgd(1.0), every) for every in (4, 8))
    _, state = feed(shorter, shorter.init(jnp.float32(0)), [1, 2, 3])
    updates, state = feed(longer, state, [4, 5, 6, 7, 8])
    assert updates == -4.5
    assert state.optimizer_step == 1


@pytest.mark.parametrize("flush", [False, True])
def test_a_window_of_one_takes_over_what_is_held(flush):
    """Without a buffer of its own it must not pass the open window by."""
    longer, one = ja.multi_steps(optax.sgd(1.0), 4), ja.multi_steps(optax.sgd(1.0), 1)
    _, state = feed(longer, longer.init(jnp.float32(0)), [1, 2, 3])
    if flush:
        updates, state = ja.flush(one, state, jnp.float32(0))
        assert updates == -2
    else:
        updates, state = feed(one, state, [6])
        assert updates == -3
    assert (state.optimizer_step, state.micro_step, state.weight) == (1, 0, 0)
    updates, state = feed(one, state, [5])
    assert (updates, state.optimizer_step) == (-5, 2)


def test_a_state_without_sums_cannot_accumulate():
    longer, one = ja.multi_steps(optax.sgd(1.0), 4), ja.multi_steps(optax.sgd(1.0), 1)
    _, state = feed(one, one.init(jnp.float32(0)), [1])
    with pytest.raises(ValueError, match="was made for windows of one micro-step"):
        feed(longer, state, [1])
    state = interop.from_inner_state(
        longer, state.inner_state, jnp.float32(0), optimizer_step=state.optimizer_step
    )
    updates, state = feed(longer, state, [1, 2, 3, 6])
    assert (updates, state.optimizer_step) == (-3, 2)


# From other optimizers, through a checkpoint.


def test_a_plain_optimizer_is_upgraded(tmp_path):
    plain, tx = optax.adam(0.1), ja.multi_steps(optax.adam(0.1), 2)
    params = {"w": jnp.arange(3.0)}
    grads = {"w": jnp.ones(3)}
    inner = plain.init(params)
    for _ in range(3):
        updates, inner = plain.update(grads, inner, params)
        params = optax.apply_updates(params, updates)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(Run(params, inner, micro_batches=3))
        old = checkpoints.restore(Run(params, plain.init(params)))
    state = interop.from_inner_state(tx, old.state, old.params, optimizer_step=3)
    for _ in range(2):
        updates, state = tx.update(grads, state, old.params)
    want, want_state = plain.update(grads, inner, params)
    assert_same_bits((updates, state.inner_state), (want, want_state))


def test_an_open_optax_window_is_upgraded(tmp_path):
    theirs, tx = optax.MultiSteps(optax.sgd(1.0), 4), ja.multi_steps(optax.sgd(1.0), 4)
    params = jnp.float32(0)
    old = theirs.init(params)
    for grad in (1.0, 2.0, 3.0):
        _, old = theirs.update(jnp.float32(grad), old, params)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(Run(params, old, micro_batches=3))
        again = checkpoints.restore(Run(params, theirs.init(params)))
    state = interop.from_optax(tx, again.state, params)
    updates, state = tx.update(jnp.float32(6), state, params)
    assert (updates, state.optimizer_step) == (-3, 1)


# The whole thing.


def test_the_example_ends_with_the_same_bits(tmp_path):
    command = [sys.executable, ROOT / "examples" / "restart.py", "--micro-batches", "21"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stdout + out.stderr
    assert "OK: the interrupted run ends with the same bits" in out.stdout
    assert out.stdout.count("begins at micro-batch") == 5


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "kill_restart.py", "--kills", "3"]
    command += ["--micro-batches", "240"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stdout + out.stderr
    assert "3 kills" in out.stdout
    assert "OK: the killed run ends with the same bits" in out.stdout


def test_no_field_of_a_run_changes_its_meaning():
    """Checkpoints hold the names and their order."""
    assert Run._fields == ("params", "state", "key", "micro_batches", "loader")
    assert dataclasses.fields(ja.loss_scaling.LossScale)[0].name == "initial"
    assert ja.loss_scaling.LossScaleState._fields == ("scale", "good_windows", "overflowed")
    assert ja.training.StepState._fields[-2:] == ("ledger", "model_state")
