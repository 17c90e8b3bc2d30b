"""Windows over devices: every route is the full batch; outputs, keys, unequal work, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bilinear import (
    CUTS,
    ROWS,
    SCENARIOS,
    answer,
    build,
    error,
    problem,
    scenario,
    terms_loss,
    token_loss,
)
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, PMAP, Setup, manual_setups, one_result, per_device, pmapped
from oracles import assert_equal, cut_rows, full_batch
from routes import ROUTES

import jaxaccum as ja

BOTH = ("data", "model")
ROWS_EACH = ROWS // DEVICES


# Every route on every mesh


# On jax 0.10 a mesh with one Auto and one Explicit axis drops the sharding of what `shard_map`
# returns, so a state that is carried between calls changes its type; a stream needs one kind.
_MIXED = ("AE",)


def case(route, setup, loss_fn=token_loss, cut="even", *, skip=False):
    name = f"{route}-{setup}-{loss_fn.__name__}-{cut}{'-skip' if skip else ''}"
    return pytest.param((route, setup, loss_fn, cut, skip), id=name)


def chosen_cases():
    """One of each kind: every route, mesh type, use of the model axis, cut and loss."""
    unchecked = functools.partial(Setup, check_vma=False)
    return [
        case("value_and_grad", Setup("A"), skip=True, cut="uneven"),
        case("value_and_grad", unchecked("E"), terms_loss),
        case("value_and_grad", Setup("AA"), terms_loss, skip=True),
        case("value_and_grad", unchecked("EE"), cut="uneven"),
        case("value_and_grad", Setup("AE")),
        case("value_and_grad", unchecked("AA", manual=True), skip=True),
        case("value_and_grad", Setup("EE", names=BOTH)),
        case("value_and_grad", PMAP, terms_loss, skip=True, cut="uneven"),
        case("merge", Setup("E"), terms_loss, cut="uneven"),
        case("merge", unchecked("AA"), skip=True),
        case("merge", PMAP),
        case("stream", Setup("A"), skip=True),
        case("stream", unchecked("EE"), cut="uneven"),
        case("stream", Setup("AA")),
        case("stream", Setup("AA", manual=True)),
        case("stream", unchecked("EE", names=BOTH)),
        case("stream", PMAP, skip=True),
        case("plain jit", Setup("A"), terms_loss, skip=True, cut="uneven"),
        case("plain jit", Setup("EE"), skip=True),
        case("plain jit", Setup("E", context=False)),
        case("plain jit", Setup("AA", names=BOTH)),
        case("train_step", Setup("E"), skip=True, cut="uneven"),
        case("train_step", Setup("AA"), terms_loss),
        case("train_step", Setup("EE")),
    ]


def all_cases():
    """Every route on every mesh with every cut and loss."""
    in_region = [
        *manual_setups(["A", "E", "AA", "EE", "AE", "EA"]),
        *manual_setups(["AA", "EE"], manual=(True,)),
        *(Setup(t, names=BOTH, check_vma=c) for t in ("AA", "EE") for c in (True, False)),
        PMAP,
    ]
    plain = [
        *(Setup(t) for t in ("A", "E", "AA", "EE", "AE", "EA")),
        *(Setup(t, names=BOTH) for t in ("AA", "EE")),
        *(Setup(t, context=False) for t in ("E", "EE")),
    ]
    for route, kind in ROUTES.items():
        if route == "scatter":  # a part of `up` has no row for each device; see test_sharding.py
            continue
        for setup in in_region if kind.in_region else plain:
            if route in ("stream", "flush") and setup.types in _MIXED:
                continue
            for loss_fn in (token_loss, terms_loss) if kind.several_terms else (token_loss,):
                for cut in CUTS:
                    # Denominators that were given beforehand cannot leave out what is bad.
                    skips = (
                        (False,)
                        if route in ("merge", "into") and loss_fn is terms_loss
                        else (False, True)
                    )
                    for skip in skips:
                        yield case(route, setup, loss_fn, cut, skip=skip)


def check_route(chosen):
    """The gradient within 1e-6 of its norm, the loss within 1e-6; integers bit for bit."""
    route, setup, loss_fn, cut, skip = chosen
    run = build(route, setup, loss_fn, cut, skip=skip)
    for name in SCENARIOS if skip else SCENARIOS[:-1]:
        for integer in (False, True):
            params, batch, kept = scenario(name, run, integer=integer)
            loss, grads, weight = answer(loss_fn, params, batch, kept)
            got = run.call(params, batch)
            if loss_fn is token_loss and got.weight is not None:
                assert got.weight == weight, name
            if loss_fn is token_loss and integer:
                assert_equal((got.loss, got.grads), (loss, grads))
            distance = jax.tree.map(lambda a, b: np.float64(a) - b, got.grads, grads)
            assert norm(distance) <= 1e-6 * norm(grads), name
            assert abs(got.loss - loss) <= 1e-6 * abs(loss), name


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize("chosen", chosen_cases())
def test_a_route_equals_the_full_batch(chosen):
    check_route(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", list(all_cases()))
def test_every_route_on_every_mesh_equals_the_full_batch(chosen):
    check_route(chosen)


def test_the_mesh_of_arguments_on_auto_axes():
    """Outside of `jit` it is read from the arrays, inside from their types."""
    params, batch = problem(1, integer=True)
    want = answer(token_loss, params, batch, np.arange(ROWS))[:2]
    f = ja.value_and_grad(token_loss, num_microbatches=4, spmd_axis_name="data")
    args = Setup("A").place(params, batch)
    assert_equal(f(*args), want)
    assert_equal(jax.jit(f)(*args), want)


def test_a_model_axis_inside_the_loss():
    """A tensor-parallel model written by hand: parts of the hidden layer meet in a psum."""

    def loss_fn(params, batch):
        hidden = batch["x"] @ params["up"]
        out = jax.lax.psum(jnp.einsum("bth,h->bt", hidden, params["down"]), "model")
        return ja.mean((out - batch["y"]) ** 2, where=batch["mask"])

    params, batch = problem(1, integer=True)
    specs = {"up": P(None, "model"), "down": P("model")}
    for types in ("AA", "EE"):
        setup = Setup(types, manual=True)
        f = ja.value_and_grad(loss_fn, num_microbatches=4, axis_name="data")
        call = setup.shard(f, (specs, P("data")), (P(), specs))
        got = call(jax.tree.map(setup.put, params, specs), setup.put(batch, P("data")))
        assert_equal(got, answer(token_loss, params, batch, np.arange(ROWS))[:2])


def test_a_psum_over_the_model_axis_is_not_refused_unchecked():
    def loss_fn(params, batch):
        return ja.Mean(jax.lax.pmean(token_loss(params, batch).total, "model"), 1.0)

    setup = Setup("AA", manual=True, check_vma=False)
    f = ja.value_and_grad(loss_fn, num_microbatches=4, axis_name="data")
    setup.each(f)(*problem(1))


# Auxiliary outputs


AUX_SETUPS = pytest.mark.parametrize(
    "setup", [Setup("A"), Setup("E", check_vma=False), PMAP, Setup("E", names=("data",))], ids=str
)


def with_outputs(w, batch):
    """Every reducer, with values that show which rows went in."""
    x = batch["x"]
    aux = {
        "mean": ja.Mean(jnp.sum(batch["n"] * x), jnp.sum(batch["n"])),
        "sum": ja.Sum(jnp.sum(x)),
        "max": ja.Max(jnp.max(x).astype(jnp.bfloat16)),
        "any": ja.Max(jnp.any(x > 60)),
        "min": ja.Min(jnp.min(x.astype(jnp.int32))),
        "last": ja.Last(x[0].astype(jnp.bfloat16)),
        "rows": ja.Concat(2 * x),
        "stack": jnp.sum(x),
    }
    return ja.mean(w * x), aux


LOCAL_OUTPUTS = ("rows", "stack")


def run_with_outputs(setup, num_real=None):
    """The aux outputs of `with_outputs` over rows 0 to 63; local outputs in device order."""
    batch = {"x": np.arange(ROWS, dtype=np.float32), "n": 1 + np.arange(ROWS) % 3}
    if num_real is not None:
        batch["real"] = np.repeat(np.int32(num_real), ROWS_EACH)
    options = {"num_microbatches": 4, "has_aux": True}
    w = jnp.float32(1)
    if setup.names == ("data",):
        f = jax.jit(ja.value_and_grad(with_outputs, spmd_axis_name="data", **options))
        real = batch.pop("real", None)
        with setup.active():
            (_, aux), _ = f(w, batch, num_real=None if real is None else real[::ROWS_EACH])
        return aux
    f = ja.value_and_grad(with_outputs, axis_name="data", **options)

    def step(w, batch):
        real = {"num_real": batch["real"][0]} if "real" in batch else {}
        return f(w, batch, **real)[0][1]

    if setup is PMAP:
        aux = pmapped(step)(w, batch)
        return {
            k: v.reshape(-1) if k in LOCAL_OUTPUTS else one_result(lambda x: x)(v)
            for k, v in aux.items()
        }
    specs = {
        k: P("data") if k in LOCAL_OUTPUTS else P()
        for k in ("mean", "sum", "max", "any", "min", "last", "rows", "stack")
    }
    return setup.shard(step, (P(), P("data")), specs)(w, setup.put(batch, P("data")))


def micro_batches():
    """The rows of every micro-batch, device by device."""
    return [
        device * ROWS_EACH + rows
        for device in range(DEVICES)
        for rows in cut_rows(ROWS_EACH, num_microbatches=4)
    ]


@AUX_SETUPS
def test_outputs_are_combined_by_what_they_are(setup):
    aux = run_with_outputs(setup)
    x, n = np.arange(64.0), 1 + np.arange(64) % 3
    assert {k: v.dtype.name for k, v in aux.items()} == {
        "mean": "float32",
        "sum": "float32",
        "max": "bfloat16",
        "any": "bool",
        "min": "int32",
        "last": "bfloat16",
        "rows": "float32",
        "stack": "float32",
    }
    np.testing.assert_allclose(aux["mean"], np.sum(n * x) / n.sum(), rtol=1e-6)
    assert (aux["sum"], aux["max"], aux["any"], aux["min"]) == (x.sum(), 63, True, 0)
    assert aux["last"] == micro_batches()[-1][0]
    assert_equal(aux["rows"], 2 * x)
    assert_equal(aux["stack"], np.array([rows.sum() for rows in micro_batches()]))


@AUX_SETUPS
def test_the_last_device_that_ran_anything_has_the_last_micro_batch(setup):
    real = [4, 1, 0, 3, 4, 2, 3, 0]
    aux = run_with_outputs(setup, real)
    ran = [rows for i, rows in enumerate(micro_batches()) if i % 4 < real[i // 4]]
    rows = np.concatenate(ran)
    assert aux["last"] == jnp.bfloat16(ran[-1][0])
    assert (aux["sum"], aux["min"]) == (rows.sum(), rows.min())
    assert aux["max"] == jnp.bfloat16(rows.max())
    stack = np.asarray(aux["stack"]).reshape(DEVICES, 4)
    for device, number in enumerate(real):
        want = [rows.sum() for rows in micro_batches()[4 * device :][:number]]
        assert_equal(stack[device, :number], np.array(want))


# Gradients of the batch, and gradients that are no sums


@pytest.mark.parametrize("plain", [True, False], ids=["plain jit", "shard_map"])
@pytest.mark.parametrize("setup", [Setup("E"), Setup("AA")], ids=str)
def test_gradients_of_the_batch_come_back_in_its_order(setup, plain):
    params, batch = problem(7)
    del batch["mask"]

    def loss_fn(params, batch):
        # Which tokens count is told by the inputs, so that every leaf of the batch has a gradient.
        return token_loss(params, {**batch, "mask": batch["x"][..., 0] > 1})

    options = {"num_microbatches": 3, "argnums": (0, 1)}
    args = setup.place(params, batch)
    if plain:
        with setup.active():
            f = jax.jit(ja.value_and_grad(loss_fn, spmd_axis_name="data", **options))
            got = f(*args)
    else:
        f = ja.value_and_grad(loss_fn, axis_name="data", **options)
        got = setup.shard(f, (P(), P("data")), (P(), (P(), P("data"))))(*args)
    want = full_batch(loss_fn, params, batch, argnums=(0, 1))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * norm(b))


def scaled_loss(params, batch):
    """A mean with a scale whose gradient is the largest input of the micro-batch."""
    largest = jax.lax.stop_gradient(jnp.max(batch["x"]))
    loss = token_loss(params["model"], batch)
    return ja.Mean(loss.total + params["scale"] * largest, loss.weight)


@pytest.mark.parametrize("setup", [Setup("A"), PMAP, Setup("E", names=("data",))], ids=str)
def test_gradients_that_are_not_sums(setup):
    model, batch = problem(8, integer=True)
    batch["x"][37, 2, 1] = 5
    params = {"model": model, "scale": np.float32(0)}
    options = {"num_microbatches": 4, "grad_reducers": {"model": ja.Sum, "scale": ja.Max}}
    if setup.names == ("data",):
        with setup.active():
            _, grads = jax.jit(ja.value_and_grad(scaled_loss, spmd_axis_name="data", **options))(
                params, batch
            )
    else:
        f = ja.value_and_grad(scaled_loss, axis_name="data", **options)
        if setup is PMAP:
            _, grads = setup.each(f)(params, batch)
        else:
            _, grads = setup.shard(f, (P(), P("data")), P())(params, setup.put(batch, P("data")))
    assert grads["scale"] == 5
    assert_equal(grads["model"], answer(token_loss, model, batch, np.arange(ROWS))[1])


# Unequal work


NUM_REAL = [
    [4, 4, 4, 4, 4, 4, 4, 4],
    [4, 2, 0, 1, 3, 4, 0, 1],
    [0, 0, 0, 0, 0, 0, 0, 1],
]


@functools.cache
def unequal(setup):
    options = {"num_microbatches": 4}
    if setup.names == ("data",):
        f = jax.jit(ja.value_and_grad(token_loss, spmd_axis_name="data", **options))

        def plain(params, batch, real):
            with setup.active():
                return f(params, batch, num_real=jnp.asarray(real, jnp.int32))

        return plain
    f = ja.value_and_grad(token_loss, axis_name="data", **options)
    call = setup.each(lambda params, given: f(params, given[0], num_real=given[1][0]))
    return lambda params, batch, real: call(params, (batch, np.repeat(np.int32(real), ROWS_EACH)))


@pytest.mark.parametrize("real", NUM_REAL, ids=str)
@AUX_SETUPS
def test_devices_may_run_different_numbers_of_micro_batches(setup, real):
    params, batch = problem(9, integer=True)
    rows = [r for i, r in enumerate(micro_batches()) if i % 4 < real[i // 4]]
    loss, grads, weight = answer(token_loss, params, batch, np.concatenate(rows))
    got = unequal(setup)(params, batch, real)
    exact = weight & (weight - 1) == 0
    if exact:
        assert_equal(got, (loss, grads))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves((loss, grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * norm(b))


@AUX_SETUPS
def test_no_micro_batch_at_all(setup):
    params, batch = problem(9)
    loss, grads = unequal(setup)(params, batch, [0] * DEVICES)
    assert np.isnan(loss)
    assert_equal(grads, jax.tree.map(np.zeros_like, params))


# Keys


def draw_loss(w, batch, *, key):
    return ja.mean(w * batch), jax.random.bits(key)


@functools.cache
def drawn(setup):
    options = {"num_microbatches": 4, "has_aux": True}
    if setup.names == ("data",):
        f = jax.jit(ja.value_and_grad(draw_loss, spmd_axis_name="data", **options))

        def plain(batch, key):
            with setup.active():
                return np.asarray(f(jnp.float32(1), batch, key=key)[0][1])

        return plain
    f = ja.value_and_grad(draw_loss, axis_name="data", **options)
    if setup is PMAP:
        call = jax.pmap(
            lambda batch, key: f(jnp.float32(1), batch, key=key)[0][1],
            axis_name="data",
            in_axes=(0, None),
        )
        return lambda batch, key: np.asarray(call(per_device(batch), key)).reshape(-1)
    call = setup.shard(
        lambda batch, key: f(jnp.float32(1), batch, key=key)[0][1], (P("data"), P()), P("data")
    )
    return lambda batch, key: np.asarray(call(setup.put(batch, P("data")), key))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
@AUX_SETUPS
def test_keys_differ_between_devices_and_micro_batches(setup, make_key):
    batch = np.ones(ROWS, np.float32)
    draws = drawn(setup)(batch, make_key(0))
    assert len(np.unique(draws)) == DEVICES * 4
    assert_equal(drawn(setup)(batch, make_key(0)), draws)
    assert not np.isin(drawn(setup)(batch, make_key(1)), draws).any()
    assert_equal(drawn(Setup("A"))(batch, make_key(0)), draws)


# Refusals


def total_summed(collective, params, batch):
    loss = token_loss(params, batch)
    return ja.Mean(collective(loss.total, "data"), loss.weight)


def weight_summed(collective, params, batch):
    loss = token_loss(params, batch)
    return ja.Mean(loss.total, collective(loss.weight.astype(jnp.float32), "data"))


def inside_jit(collective, params, batch):
    return jax.jit(functools.partial(total_summed, collective))(params, batch)


def inside_custom_vjp(collective, params, batch):
    @jax.custom_vjp
    def total(params):
        return collective(token_loss(params, batch).total, "data")

    def forward(params):
        return jax.vjp(lambda p: token_loss(p, batch).total, params)

    total.defvjp(lambda p: (total(p), forward(p)[1]), lambda pull, ct: pull(ct))
    return ja.Mean(total(params), 16)


def scaled_after(collective, params, batch):
    return ja.Mean(-0.5 * collective(token_loss(params, batch).total, "data") / 8 + 1.0, 16)


def one_of_the_terms(collective, params, batch):
    return {
        "good": token_loss(params, batch),
        "bad": total_summed(collective, params, batch),
    }


REDUCED = [
    total_summed,
    weight_summed,
    inside_jit,
    inside_custom_vjp,
    scaled_after,
    one_of_the_terms,
]


@pytest.mark.parametrize("collective", [jax.lax.psum, jax.lax.pmean])
@pytest.mark.parametrize("loss_fn", REDUCED)
@pytest.mark.parametrize("setup", [Setup("A"), Setup("E", check_vma=False), PMAP], ids=str)
def test_a_loss_that_was_already_reduced_is_refused(setup, loss_fn, collective):
    f = ja.value_and_grad(
        functools.partial(loss_fn, collective), num_microbatches=4, axis_name="data"
    )
    with pytest.raises(ValueError, match=r"psum.* over the axis 'data'.*local sum"):
        setup.each(f)(*problem(1))


def test_a_reduced_loss_is_refused_under_plain_jit():
    setup = Setup("A")
    loss_fn = functools.partial(total_summed, jax.lax.psum)
    with setup.active(), pytest.raises(ValueError, match="local sum"):
        jax.jit(ja.value_and_grad(loss_fn, num_microbatches=4, spmd_axis_name="data"))(
            *setup.place(*problem(1))
        )


def test_a_loss_reduced_over_one_of_two_axes_is_refused():
    setup = Setup("AA", names=BOTH)
    loss_fn = functools.partial(total_summed, jax.lax.psum)
    with pytest.raises(ValueError, match="local sum"):
        setup.each(ja.value_and_grad(loss_fn, num_microbatches=4, axis_name=BOTH))(*problem(1))


def centred_loss(params, batch, *, average):
    """Errors minus their mean over the devices: synchronised batch statistics."""
    e = error(params, batch)
    return ja.mean((e - average(jnp.mean(e))) ** 2)


@pytest.mark.parametrize("setup", [Setup("A"), Setup("E", check_vma=False), PMAP], ids=str)
def test_statistics_that_are_synchronised_inside_the_model_are_exact(setup):
    params, batch = problem(2)

    def loss_fn(params, batch):
        return centred_loss(params, batch, average=lambda x: jax.lax.pmean(x, "data"))

    got = setup.each(ja.value_and_grad(loss_fn, num_microbatches=1, axis_name="data"))(
        params, batch
    )
    want = full_batch(functools.partial(centred_loss, average=lambda x: x), params, batch)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    distance = jax.tree.map(lambda a, b: np.float64(a) - b, got[1], want[1])
    assert norm(distance) <= 1e-6 * norm(want[1])


ENTRY_POINTS = pytest.mark.parametrize("make", [ja.value_and_grad, ja.accumulate])


@ENTRY_POINTS
def test_an_axis_that_is_not_bound_is_refused(make):
    f = make(token_loss, num_microbatches=4, axis_name="data")
    with pytest.raises(ValueError, match=r"'data', which is not bound.*`spmd_axis_name='data'`"):
        f(*problem(1))


@ENTRY_POINTS
def test_both_kinds_of_axis_are_refused(make):
    with pytest.raises(ValueError, match="pass one of them"):
        make(token_loss, num_microbatches=4, axis_name="data", spmd_axis_name="data")(*problem(1))


@ENTRY_POINTS
@pytest.mark.parametrize("value", [3, ("data", 1), (), {"data"}])
@pytest.mark.parametrize("name", ["axis_name", "spmd_axis_name"])
def test_names_of_the_wrong_type_are_refused(make, name, value):
    with pytest.raises(TypeError, match=f"`{name}` must be the name of a mesh axis"):
        make(token_loss, num_microbatches=4, **{name: value})(*problem(1))


@pytest.mark.parametrize("name", ["axis_name", "spmd_axis_name"])
def test_an_axis_named_twice_is_refused(name):
    with pytest.raises(ValueError, match="names an axis twice"):
        ja.value_and_grad(token_loss, num_microbatches=4, **{name: ("data", "data")})


def test_rows_that_do_not_divide_by_the_devices_are_refused():
    f = ja.value_and_grad(token_loss, num_microbatches=4, spmd_axis_name="data")
    with Setup("A").active(), pytest.raises(ValueError, match=r"63 rows.*8 devices.*pad_batch"):
        jax.jit(f)(*problem(1, rows=63))


def test_more_micro_batches_than_rows_of_a_device_are_refused():
    f = ja.value_and_grad(token_loss, num_microbatches=9, spmd_axis_name="data")
    with Setup("A").active(), pytest.raises(ValueError, match="only 8 rows"):
        jax.jit(f)(*problem(1))


@pytest.mark.parametrize("jit", [True, False])
def test_a_missing_mesh_is_refused(jit):
    f = ja.value_and_grad(token_loss, num_microbatches=4, spmd_axis_name="data")
    with pytest.raises(ValueError, match=r"no mesh with the axes.*jax\.set_mesh"):
        (jax.jit(f) if jit else f)(*problem(1))


def test_a_mesh_without_the_axis_is_refused():
    f = ja.value_and_grad(token_loss, num_microbatches=4, spmd_axis_name="rows")
    with Setup("A").active(), pytest.raises(ValueError, match="no mesh with the axes"):
        jax.jit(f)(*problem(1))


def test_a_vector_of_num_real_needs_one_number_for_each_device():
    f = ja.value_and_grad(token_loss, num_microbatches=4, spmd_axis_name="data")
    with Setup("A").active(), pytest.raises(ValueError, match="one number for each of the 8"):
        jax.jit(f)(*problem(1), num_real=jnp.ones(7, jnp.int32))


def test_the_axes_of_a_stream_are_checked():
    with pytest.raises(TypeError, match="`axis_name` must be the name of a mesh axis"):
        ja.multi_steps(optax.sgd(1.0), 2, axis_name=3)
    tx = ja.multi_steps(optax.sgd(1.0), 2, axis_name="data")
    w = jnp.float32(0)
    with pytest.raises(ValueError, match="'data', which is not bound"):
        tx.update(w, tx.init(w), w)
