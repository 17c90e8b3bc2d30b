"""The cases from public bug reports that concern devices; numbers as in the list.

The toy model: one parameter `w`, the loss of a token is `w * x`, so a token's gradient is its `x`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import PMAP, Setup, manual_setups, per_device
from oracles import assert_close, assert_equal

import jaxaccum as ja

W = jnp.float32(0)
REGIONS = [*manual_setups(["A", "E"]), PMAP]
IN_REGION = pytest.mark.parametrize("setup", REGIONS, ids=str)
# Eight devices with one row each unless said; `plain` is `spmd_axis_name` under `jit`.
PLAIN = "plain jit"
EVERYWHERE = pytest.mark.parametrize("setup", [*REGIONS, PLAIN], ids=str)


def token_mean(w, batch):
    """The mean of `w * x` over the kept tokens."""
    x, mask = batch
    return ja.mean(w * x, where=mask)


def ragged(*rows):
    """Rows of different length as `(x, mask)`, padded with empty rows to eight."""
    rows = [*rows, *[[]] * (8 - len(rows))]
    width = max(map(len, rows))
    x = np.array([[*row, *[0] * (width - len(row))] for row in rows], np.float32)
    return x, np.arange(width) < np.array([[len(row)] for row in rows])


def window(setup, batch, loss_fn=token_mean, *, w=W, **options):
    """`(loss, gradient)` with the rows of `batch` over eight devices."""
    options = {"num_microbatches": 1, **options}
    if setup == PLAIN:
        mesh = Setup("E")
        with mesh.active():
            f = jax.jit(ja.value_and_grad(loss_fn, spmd_axis_name="data", **options))
            return f(w, mesh.put(batch, P("data")))
    f = ja.value_and_grad(loss_fn, axis_name="data", **options)
    if setup is PMAP:
        out = jax.pmap(f, axis_name="data", in_axes=(None, 0))(w, per_device(batch))
        return jax.tree.map(lambda x: x[5], out)
    return setup.shard(f, (P(), P("data")), P())(w, setup.put(batch, P("data")))


# Denominators


ORDERS = np.array(list(itertools.permutations(range(8))), np.int8)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("types", ["A", "EE"])
def test_06_no_assignment_of_sequences_to_slots_changes_the_gradient(types, check):
    """Eight sequences of 1 to 8 tokens in all 40,320 orders, bit for bit.

    The slots are eight devices of one micro-batch, or four devices of two.
    """
    setup = Setup(types, check_vma=check, manual=len(types) == 2)
    x, mask = ragged(*[[length % 5 - 2] * length for length in range(1, 9)])
    f = ja.value_and_grad(token_mean, microbatch_size=1, axis_name="data")
    spec = P(None, "data")
    call = setup.shard(jax.vmap(f, in_axes=(None, 0)), (P(), (spec, spec)), P())
    loss, grads = call(W, setup.put((x[ORDERS], mask[ORDERS]), spec))
    want = np.sum(x * mask, dtype=np.float64) / 36
    assert_equal(loss, np.zeros(len(ORDERS)))
    assert len(np.unique(grads)) == 1
    assert_close(grads[0], want)


@pytest.mark.parametrize("skip", [False, True])
@EVERYWHERE
def test_19_one_device_with_a_nan(setup, skip):
    """Without skipping every device has the nan, with it every device has the mean of the rest."""
    batch = ragged([1, 2], [np.nan], [3, 6])
    loss, grad = window(setup, batch, w=jnp.float32(1), skip_nonfinite=skip)
    if skip:
        assert (loss, grad) == (3, 3)
    else:
        assert np.isnan(loss)
        assert np.isnan(grad)


def test_19_parameters_stay_identical_on_all_devices():
    """Each device's own copy, read from all of them where nothing checks that they agree."""
    train = ja.train_step(
        token_mean,
        optax.adam(0.1),
        num_microbatches=2,
        axis_name="data",
        skip_nonfinite=True,
        donate=False,
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 16, 5)).astype(np.float32)
    x[1, 3, 2] = np.nan
    mask = rng.random(x.shape) < 0.7
    mask[1, 3, 2] = True

    def steps(w, x, mask):
        state, skipped = train.init(w), []
        for step in range(3):
            w, state, info = train.step(w, state, (x[step], mask[step]))
            skipped.append(info.num_skipped)
        return jax.tree.map(lambda leaf: leaf[None], (w, state.inner_state, skipped))

    setup = Setup("A", check_vma=False)
    f = setup.shard(steps, (P(), P(None, "data"), P(None, "data")), P("data"))
    w, state, skipped = f(W, x, mask)
    for leaf in jax.tree.leaves((w, state)):
        assert np.isfinite(leaf).all()
        assert len(np.unique(leaf)) == 1
    assert_equal(np.array(skipped), np.repeat([[0], [1], [0]], 8, axis=1))


@pytest.mark.parametrize("manual", [True, False], ids=["manual", "automatic"])
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("types", ["AA", "EE"])
def test_22_only_the_data_axis_is_summed(types, check, manual):
    """A mesh of two by two: parameters and rows are the same along the other axis."""
    kinds = Setup(types).mesh.axis_types
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds, devices=jax.devices()[:4])
    f = ja.accumulate(token_mean, num_microbatches=2, axis_name="data")

    def step(w, batch):
        window = ja.finalize(f(w, batch))
        return window.loss, window.grads, window.weight

    call = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check,
        axis_names={"data", "model"} if manual else {"data"},
    )
    rows = jax.device_put(ragged([1, 2, 3], [1] * 7), NamedSharding(mesh, P("data")))
    assert_close(jax.jit(call)(jnp.float32(1), rows), (1.3, 1.3, 10))


@pytest.mark.parametrize("setup", manual_setups(["A", "E"]), ids=str)
def test_23_one_sequence_over_context_parallel_devices(setup):
    """Rows are whole on every device, tokens are not: 1, 2, 3, 4 and padding over eight devices."""
    x = np.array([[1, 2, 3, 4, 0, 0, 0, 0]], np.float32)
    f = ja.value_and_grad(token_mean, num_microbatches=1, axis_name="data")
    spec = P(None, "data")
    call = setup.shard(f, (P(), (spec, spec)), P())
    assert call(W, setup.put((x, x > 0), spec))[1] == 2.5


def test_23_rows_and_tokens_over_two_axes():
    setup = Setup("AA", names=("data", "model"))
    x = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
    mask = x % 3 > 0
    f = ja.value_and_grad(token_mean, num_microbatches=2, axis_name=("data", "model"))
    spec = P("data", "model")
    call = setup.shard(f, (P(), (spec, spec)), P())
    assert call(W, setup.put((x, mask), spec))[1] == np.mean(x[mask], dtype=np.float64)


@pytest.mark.parametrize("setup", [Setup("A"), Setup("E", check_vma=False), PMAP], ids=str)
def test_26_unequal_numbers_of_micro_batches(setup):
    """Device `d` runs `d` of its seven micro-batches."""
    x = np.arange(8 * 7, dtype=np.float32).reshape(8 * 7, 1)
    real = np.repeat(np.arange(8, dtype=np.int32), 7)
    f = ja.value_and_grad(lambda w, x: ja.mean(w * x), microbatch_size=1, axis_name="data")

    def step(w, batch):
        return f(w, batch[0], num_real=batch[1][0])

    if setup is PMAP:
        call = jax.pmap(step, axis_name="data", in_axes=(None, 0))
        grad = call(W, per_device((x, real)))[1][0]
    else:
        grad = setup.shard(step, (P(), P("data")), P())(W, setup.put((x, real), P("data")))[1]
    ran = [7 * device + k for device in range(8) for k in range(device)]
    assert_close(grad, np.mean(ran))


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("types", ["AA", "EE"])
def test_27_the_sum_is_not_a_device_count_too_large(types, check):
    """Four devices: 132 for the library. The naive psum gives 528 where replication is checked."""
    setup = Setup(types, check_vma=check, manual=True)
    x = np.arange(1, 9, dtype=np.float32) + 12
    spec = (P(), P("data"))

    def naive(w, x):
        return jax.lax.psum(jax.grad(lambda w: jnp.sum(w * x))(w), "data")

    f = ja.accumulate(lambda w, x: ja.mean(w * x), num_microbatches=2, axis_name="data")
    rows = setup.put(x, P("data"))
    assert x.sum() == 132
    assert setup.shard(lambda w, x: f(w, x).grads, spec, P())(W, rows) == 132
    assert setup.shard(naive, spec, P())(W, rows) == (528 if check else 132)


@pytest.mark.parametrize("setup", [Setup("A", check_vma=False), PMAP], ids=str)
def test_29_a_psum_inside_the_loss_is_caught(setup):
    """Otherwise the gradient would be eight times too large, without a sign."""

    def reduced(w, batch):
        loss = token_mean(w, batch)
        return ja.Mean(jax.lax.psum(loss.total, "data"), loss.weight)

    with pytest.raises(ValueError, match="once more for each device"):
        window(setup, ragged([1] * 5), reduced)


# Metrics and state


def dropout(w, x, *, key):
    """Drops half of the entries; the mask comes out as it was used."""
    mask = jax.random.bernoulli(key, 0.5, x.shape)
    return ja.mean(w * x, where=mask), ja.Concat(mask)


@functools.cache
def dropped(setup):
    options = {"num_microbatches": 4, "has_aux": True}
    if setup == PLAIN:
        mesh = Setup("E")
        f = jax.jit(ja.value_and_grad(dropout, spmd_axis_name="data", **options))

        def plain(w, x, key):
            with mesh.active():
                (loss, mask), grad = f(w, mesh.put(x, P("data")), key=key)
            return loss, mask, grad

        return plain
    f = ja.value_and_grad(dropout, axis_name="data", **options)

    def step(w, x, key):
        (loss, mask), grad = f(w, x, key=key)
        return loss, mask, grad

    if setup is PMAP:
        call = jax.pmap(step, axis_name="data", in_axes=(None, 0, None))

        def mapped(w, x, key):
            loss, mask, grad = call(w, per_device(x), key)
            return loss[0], mask.reshape(x.shape), grad[0]

        return mapped
    sharded = setup.shard(step, (P(), P("data"), P()), (P(), P("data"), P()))
    return lambda w, x, key: sharded(w, setup.put(x, P("data")), key)


@EVERYWHERE
def test_55_masks_differ_between_micro_batches_and_devices(setup):
    x = np.random.default_rng(0).integers(-8, 9, (64, 32)).astype(np.float32)
    key = jax.random.key(3)
    loss, mask, grad = dropped(setup)(W, x, key)
    rows = np.asarray(mask)
    assert len(np.unique(rows, axis=0)) == 64
    assert_close(grad, np.mean(x[rows], dtype=np.float64))
    assert_equal(dropped(setup)(W, x, key), (loss, mask, grad))
    assert (np.asarray(dropped(setup)(W, x, jax.random.key(4))[1]) != rows).any()


def example_dropout(w, batch):
    """Drops half of the entries of each example by a key of its own."""
    shape = batch["x"].shape[1:]
    mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, shape))(batch["key"])
    return ja.mean(w * batch["x"], where=mask), ja.Concat(mask)


@pytest.mark.parametrize("types", ["A", "EE"])
def test_55_keys_of_examples_depend_neither_on_the_cut_nor_on_the_devices(types):
    x = np.random.default_rng(1).integers(-8, 9, (64, 5)).astype(np.float32)
    batch = {"x": x, "key": ja.batches.example_keys(jax.random.key(7), 64)}
    whole = ja.value_and_grad(example_dropout, has_aux=True, num_microbatches=1)
    (_, mask), grad = jax.jit(whole)(W, batch)
    for number in (1, 3):
        setup = Setup(types)
        f = ja.value_and_grad(
            example_dropout, has_aux=True, num_microbatches=number, spmd_axis_name="data"
        )
        with setup.active():
            (_, got_mask), got = jax.jit(f)(W, setup.put(batch, P("data")))
        assert_equal((got_mask, got), (mask, grad))


@IN_REGION
def test_60_two_models_have_their_own_windows(setup):
    """A generator of two micro-steps and a critic of one, in one step over all devices."""
    txs = {
        "generator": ja.multi_steps(optax.sgd(1.0), 2, axis_name="data"),
        "critic": ja.multi_steps(optax.sgd(1.0), 1, axis_name="data"),
    }
    params = dict.fromkeys(txs, W)

    def init(params):
        return {name: tx.init(params[name]) for name, tx in txs.items()}

    def step(params, states, batch):
        params, states = dict(params), dict(states)
        for name, tx in txs.items():
            sums = ja.accumulate(token_mean, num_microbatches=1)(params[name], batch[name])
            update, states[name] = tx.update(
                sums.grads, states[name], params[name], weight=sums.weight
            )
            params[name] += update
        return params, states

    def rows(x, count):
        return ragged(*[[x] * (count + device % 2) for device in range(8)])

    batches = [
        {"generator": rows(1.0, 1), "critic": rows(2.0, 2)},
        {"generator": rows(5.0, 3), "critic": rows(4.0, 1)},
    ]
    if setup is PMAP:
        params = jax.tree.map(lambda x: jnp.stack([x] * 8), params)
        states = jax.pmap(init, axis_name="data")(params)
        call = jax.pmap(step, axis_name="data")
        place = per_device
    else:
        specs = ja.state_specs(jax.eval_shape(init, params), "data")
        states = setup.shard(init, P(), specs)(params)
        call = setup.shard(step, (P(), specs, P("data")), (P(), specs))
        place = functools.partial(setup.put, spec=P("data"))
    seen = []
    for batch in batches:
        params, states = call(params, states, place(batch))
        seen.append({name: np.ravel(p)[0] for name, p in params.items()})
    # The generator's window: 12 tokens of 1 and 28 tokens of 5.
    assert_close(seen[0], {"generator": 0.0, "critic": -2.0})
    assert_close(seen[1], {"generator": -(12 + 28 * 5) / 40, "critic": -6.0})


# Extremes


NARROW = [
    jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e4m3b11fnuz, jnp.float8_e5m2,
    jnp.float8_e8m0fnu, jnp.float4_e2m1fn, jnp.int4, jnp.uint4, jnp.int8, jnp.uint8,
    jnp.int16, jnp.uint32, jnp.bool_,
]  # fmt: skip


def extremes_loss(w, batch):
    """Extremes of a batch with a nan, and of one without in many dtypes; w is a gradient too."""
    holed, whole = batch

    def kept(mark, x):
        return mark(jnp.max(x) if mark is ja.Max else jnp.min(x))

    aux = {mark.__name__: kept(mark, holed) for mark in (ja.Max, ja.Min)}
    for mark in (ja.Max, ja.Min):
        narrow = {jnp.dtype(d).name: mark(kept(mark, whole).value.astype(d)) for d in NARROW}
        aux[f"narrow {mark.__name__}"] = narrow
    safe = jnp.where(jnp.isnan(holed), 0.0, holed)
    return ja.Mean(w[0] * jnp.max(holed) + w[1] * jnp.min(holed) + w[2] * safe.sum(), 1), aux


@EVERYWHERE
def test_70_a_nan_stays_in_extremes_and_narrow_dtypes_have_them(setup):
    """One nan among eight devices, in outputs and in gradients that are extremes."""
    holed = np.arange(16, dtype=np.float32)
    holed[5] = np.nan
    whole = np.array([1, 3, 1, 1, 1, 5, 1, 2] * 2, np.float32)
    w = [jnp.float32(1)] * 3
    options = {"has_aux": True, "grad_reducers": [ja.Max, ja.Min, ja.Sum], "num_microbatches": 2}
    (_, aux), grads = window(setup, (holed, whole), extremes_loss, w=w, **options)
    assert np.isnan([aux["Max"], aux["Min"], grads[0], grads[1]]).all()
    assert grads[2] == 115 / 16
    for name, value in (("Max", 5), ("Min", 1)):
        got = aux[f"narrow {name}"]
        assert_equal(got, {d: np.asarray(value, np.float32).astype(d) for d in got})
        assert all(x.dtype == d for d, x in got.items())


@IN_REGION
def test_70_the_extremes_of_devices_without_micro_batches(setup):
    """Four devices hold nothing, whose extreme is the end of the dtype's range."""
    x = np.array([7, 3, 5, 4, 6, 9, 8, 1], np.float32)

    def call(w, x, number):
        options = {"num_microbatches": 1, "has_aux": True, "axis_name": "data"}

        def loss_fn(w, x):
            narrow = x[0].astype(jnp.float8_e4m3fn)
            return ja.mean(w * x), (ja.Max(narrow), ja.Min(narrow), ja.Last(narrow))

        return ja.value_and_grad(loss_fn, **options)(w, x, num_real=number[0])

    number = np.array([1, 1, 0, 1, 0, 0, 1, 0], np.int32)
    if setup is PMAP:
        out = jax.pmap(call, axis_name="data", in_axes=(None, 0, 0))
        (_, aux), _ = jax.tree.map(lambda x: x[5], out(W, *per_device((x, number))))
    else:
        run = setup.shard(call, (P(), P("data"), P("data")), P())
        (_, aux), _ = run(W, *setup.put((x, number), P("data")))
    assert_equal([np.float32(value) for value in aux], [8.0, 3.0, 8.0])
