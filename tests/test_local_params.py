"""Parameters that are each device's own: experts and stages, `local_params`.

Two experts on a mesh `data` x `expert` of 2 x 2. An example's value is `shared . x * own`, with the
`own` of the expert on whose device it lies: the rows of the batch lie on the devices in order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxaccum as ja
from jaxaccum import norms

AXES = ("data", "expert")
SPECS = {"own": P("expert"), "shared": P()}
ROWS, FEATURES = 24, 4
BLOCK = ROWS // 4  # on one device, and so for one expert

EXPERT = np.arange(ROWS) // BLOCK % 2
KEPT = np.arange(ROWS) % 5 != 0


def mesh_of(kind):
    return jax.make_mesh((2, 2), AXES, axis_types=(kind,) * 2, devices=jax.devices()[:4])


def problem():
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 8, (ROWS, FEATURES)).astype(np.float32)
    params = {
        "own": jnp.array([2.0, -3.0]),
        "shared": jnp.asarray(rng.integers(-4, 4, FEATURES), jnp.float32),
    }
    return params, {"x": jnp.asarray(x), "kept": jnp.asarray(KEPT)}


def loss_fn(params, batch):
    return ja.mean(batch["x"] @ params["shared"] * params["own"][0], where=batch["kept"])


def terms_fn(params, batch):
    total = jnp.sum(batch["x"] @ params["shared"] * params["own"][0])
    return {"kept": loss_fn(params, batch), "all": ja.Mean(total, 2 * len(batch["x"]))}


def answer(params, batch, weights):
    """Loss and gradients of the mean with the weight of each row, in float64."""
    own, shared = (np.asarray(params[k], np.float64) for k in ("own", "shared"))
    x = np.asarray(batch["x"], np.float64)
    of_own = [np.sum(weights * (x @ shared) * (e == EXPERT)) for e in (0, 1)]
    grads = {"own": np.asarray(of_own), "shared": (weights * own[EXPERT]) @ x}
    return np.sum(weights * (x @ shared) * own[EXPERT]), grads


ONE_TERM = KEPT / KEPT.sum()
TERMS = ONE_TERM + 1 / (2 * ROWS)


def manual(fn, out_specs, *, check_vma=True, kind=AxisType.Auto):
    """`fn(params, batch)` on each device of a mesh."""
    mesh = mesh_of(kind)
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=(SPECS, P(AXES)), out_specs=out_specs, check_vma=check_vma
    )
    compiled = jax.jit(mapped)
    put = lambda tree, specs: jax.device_put(  # noqa: E731
        tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    )
    return lambda params, batch: compiled(put(params, SPECS), put(batch, P(AXES)))


def run(route, loss, params, batch, **options):
    """The loss and the gradients of a window, by a route."""
    call = options.pop("call", {})
    if route.startswith("spmd"):
        kind = AxisType.Explicit if route.endswith("E") else AxisType.Auto
        f = ja.value_and_grad(loss, spmd_axis_name=AXES, **options)
        with jax.set_mesh(mesh_of(kind)):
            return jax.jit(lambda p, b: f(p, b, **call))(params, batch)
    f = ja.value_and_grad(loss, axis_name=AXES, **options)
    kind = AxisType.Explicit if route.endswith("E") else AxisType.Auto
    mapped = manual(
        lambda p, b: f(p, b, **call), (P(), SPECS), check_vma="unchecked" not in route, kind=kind
    )
    return mapped(params, batch)


def check(got, want):
    loss, grads = got
    np.testing.assert_allclose(loss, want[0], rtol=2e-6)
    for name in SPECS:
        np.testing.assert_allclose(grads[name], want[1][name], rtol=2e-6)


ROUTES = pytest.mark.parametrize("route", ["checked", "unchecked", "checked E", "spmd", "spmd E"])
CHECKED = pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])


# The gradients


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("reduction", ["defer", "scatter"])
def test_each_expert_has_its_own_gradient_over_the_weight_of_all(check_vma, reduction):
    f = ja.value_and_grad(
        lambda w, x: ja.mean(w[0] * x),
        num_microbatches=1,
        axis_name=AXES,
        local_params=P("expert"),
        reduction=reduction,
    )
    mesh = jax.make_mesh((1, 2), AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
    mapped = jax.shard_map(
        f,
        mesh=mesh,
        in_specs=(P("expert"), P(AXES)),
        out_specs=(P(), P("expert")),
        check_vma=check_vma,
    )
    loss, grads = jax.jit(mapped)(jnp.ones(2), jnp.array([1.0, 10.0]))
    assert (float(loss), grads.tolist()) == (5.5, [0.5, 5.0])


def test_each_expert_has_its_own_gradient_in_pmap():
    f = ja.value_and_grad(
        lambda w, x: ja.mean(w * x), num_microbatches=1, axis_name="e", local_params=P("e")
    )
    loss, grads = jax.pmap(f, axis_name="e")(jnp.ones(2), jnp.array([[1.0], [10.0]]))
    assert (loss.tolist(), grads.tolist()) == ([5.5, 5.5], [0.5, 5.0])


@ROUTES
@pytest.mark.parametrize("cut", [{"num_microbatches": 2}, {"microbatch_size": 4}], ids=str)
def test_a_window_is_that_of_the_whole_batch(route, cut):
    params, batch = problem()
    for loss, weights in ((loss_fn, ONE_TERM), (terms_fn, TERMS)):
        got = run(route, loss, params, batch, local_params=SPECS, **cut)
        check(got, answer(params, batch, weights))


@pytest.mark.parametrize("route", ["checked", "unchecked", "spmd", "spmd E"])
@pytest.mark.parametrize("reduction", ["defer", "scatter"])
def test_local_and_sharded_parameters_stand_side_by_side(route, reduction):
    params, batch = problem()
    params["both"] = jnp.arange(16.0).reshape(2, 8)
    specs = SPECS | {"both": P("expert", "data")}
    options = {
        "param_specs": {"own": P(), "shared": P("data"), "both": P(None, "data")},
        "local_params": {"own": P("expert"), "shared": None, "both": P("expert")},
        "num_microbatches": 3,
        "reduction": reduction,
    }

    def loss(params, batch):
        assert params["both"].shape == (1, 8)
        assert params["shared"].shape == (FEATURES,)
        both = jnp.sum(params["both"])
        return ja.mean(batch["x"] @ params["shared"] * params["own"][0] + both, where=batch["kept"])

    lies = specs | {"shared": P("data")}
    if route.startswith("spmd"):
        _, grads = run(route, loss, params, batch, **options)
    else:
        f = ja.value_and_grad(loss, axis_name=AXES, **options)
        mapped = jax.shard_map(
            f,
            mesh=mesh_of(AxisType.Auto),
            in_specs=(lies, P(AXES)),
            out_specs=(P(), lies),
            check_vma=route == "checked",
        )
        _, grads = jax.jit(mapped)(params, batch)
    _, want = answer(params, batch, ONE_TERM)
    share = [np.sum(ONE_TERM * (e == EXPERT)) for e in (0, 1)]
    np.testing.assert_allclose(grads["own"], want["own"], rtol=2e-6)
    np.testing.assert_allclose(grads["shared"], want["shared"], rtol=2e-6)
    np.testing.assert_allclose(grads["both"], np.repeat(share, 8).reshape(2, 8), rtol=2e-6)


@pytest.mark.parametrize("route", ["checked", "unchecked", "spmd"])
def test_given_denominators_and_skipped_micro_batches(route):
    params, batch = problem()
    got = run(
        route, loss_fn, params, batch, num_microbatches=2, local_params=SPECS,
        call={"denominators": 5.0},
    )  # fmt: skip
    check(got, answer(params, batch, KEPT / 5))
    bad = 7  # in the second of the device's three micro-batches of two rows: rows 1 and 4 of it
    batch = batch | {"x": batch["x"].at[bad].set(jnp.nan)}
    left = KEPT & ~np.isin(np.arange(ROWS), [7, 10])
    got = run(
        route, loss_fn, params, batch, num_microbatches=3, local_params=SPECS, skip_nonfinite=True
    )
    clean = batch | {"x": batch["x"].at[bad].set(0.0)}
    check(got, answer(params, clean, left / left.sum()))
    _, grads = run(
        route, loss_fn, params, batch, num_microbatches=3, local_params=SPECS,
        skip_nonfinite="window",
    )  # fmt: skip
    for leaf in jax.tree.leaves(grads):
        np.testing.assert_array_equal(leaf, np.zeros(leaf.shape))


@CHECKED
def test_halves_merge_and_other_reducers_stay_on_their_devices(check_vma):
    params, batch = problem()
    f = ja.accumulate(loss_fn, num_microbatches=1, axis_name=AXES, local_params=SPECS)
    extreme = ja.value_and_grad(
        loss_fn,
        num_microbatches=3,
        axis_name=AXES,
        local_params=SPECS,
        grad_reducers={"own": ja.Max, "shared": ja.Sum},
    )

    def both(params, batch):
        first, second = (jax.tree.map(lambda x, s=s: x[s], batch) for s in (slice(2), slice(2, 6)))
        window = ja.finalize(ja.merge(f(params, first), f(params, second)))
        return window.loss, window.grads, extreme(params, batch)[1]["own"]

    mapped = manual(both, (P(), SPECS, P("expert")), check_vma=check_vma)
    loss, grads, largest = mapped(params, batch)
    check((loss, grads), answer(params, batch, ONE_TERM))
    shared, x = np.asarray(params["shared"]), np.asarray(batch["x"])
    values = (KEPT * (x @ shared)).reshape(2, 2, 2, 3)  # data, expert, two rows of each of three
    np.testing.assert_array_equal(largest, values.sum(2).max((0, 2)))


def test_the_noise_scale_takes_each_device_s_own_norm():
    params, batch = problem()
    f = ja.accumulate(
        loss_fn, num_microbatches=2, spmd_axis_name=AXES, local_params=SPECS, noise_scale=True
    )
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        noise = jax.jit(f)(params, batch).noise
    square = 0.0
    for device in range(4):
        for micro_batch in range(2):
            rows = np.arange(device * BLOCK, (device + 1) * BLOCK)[micro_batch::2]
            weights = KEPT * np.isin(np.arange(ROWS), rows)
            _, grads = answer(params, batch, weights)
            square += sum(np.sum(g**2) for g in grads.values()) / weights.sum()
    np.testing.assert_allclose(noise.square, square, rtol=1e-5)


@pytest.mark.parametrize("route", ["unchecked", "spmd"])
def test_over_the_window_s_own_axis(route):
    params, batch = problem()

    def meeting(params, batch):
        values = batch["x"] @ params["shared"] * params["own"][0]
        return ja.mean(values - jax.lax.pmean(jnp.sum(params["own"]), "window"))

    options = {"num_microbatches": 2, "local_params": SPECS}
    if route == "spmd":
        f = ja.window_axis.value_and_grad(meeting, spmd_axis_name=AXES, **options)
        with jax.set_mesh(mesh_of(AxisType.Auto)):
            _, grads = jax.jit(f)(params, batch)
    else:
        f = ja.window_axis.value_and_grad(meeting, axis_name=AXES, **options)
        _, grads = manual(f, (P(), SPECS), check_vma=False)(params, batch)
    _, want = answer(params, batch, np.ones(ROWS) / ROWS)
    np.testing.assert_allclose(grads["own"], want["own"] - 0.5, rtol=2e-6)
    np.testing.assert_allclose(grads["shared"], want["shared"], rtol=2e-6)


# Steps and streams


@pytest.mark.parametrize("route", ["checked", "unchecked", "spmd"])
def test_a_step_moves_each_expert_by_its_own_gradient(route):
    params, batch = problem()
    options = {"num_microbatches": 2, "local_params": SPECS, "donate": False}
    if route == "spmd":
        init, step = ja.train_step(loss_fn, optax.sgd(0.5), spmd_axis_name=AXES, **options)
        with jax.set_mesh(mesh_of(AxisType.Auto)):
            new, _, info = step(params, init(params), batch)
        loss = info.loss
    else:
        init, step = ja.train_step(loss_fn, optax.sgd(0.5), axis_name=AXES, **options)

        def stepped(params, batch):
            new, _, info = step(params, init(params), batch)
            return info.loss, new

        mapped = manual(stepped, (P(), SPECS), check_vma=route == "checked")
        loss, new = mapped(params, batch)
    grads = jax.tree.map(lambda old, new: (old - new) / 0.5, params, new)
    want = answer(params, batch, ONE_TERM)
    np.testing.assert_allclose(loss, want[0], rtol=2e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5), grads, want[1])


@CHECKED
def test_the_norm_of_a_step_and_clipping_by_it_are_those_of_the_whole(check_vma):
    """A parameter of each kind on eight devices: an expert's own, in parts, shared."""
    rng, axes = np.random.default_rng(1), ("data", "expert")
    params = {
        "own": rng.normal(size=(2, 3)),
        "parts": rng.normal(size=(8, 3)),
        "all": np.ones((1, 3)),
    }
    params = jax.tree.map(jnp.float32, params)
    batch = jnp.asarray(rng.normal(size=(16, 3)), jnp.float32)
    lies = {"own": P("expert"), "parts": P(axes), "all": P()}

    def rows(params, own, x):
        return jnp.sum(x * params["all"] * own + params["parts"].sum(0, keepdims=True), axis=1) ** 2

    def updated(tx):
        init, step = ja.train_step(
            lambda params, x: ja.mean(rows(params, params["own"], x)),
            optax.chain(tx, optax.sgd(1.0)),
            num_microbatches=2,
            axis_name=axes,
            local_params=lies | {"parts": None},
            param_specs=lies | {"own": None},
            donate=False,
        )

        def stepped(params, x):
            new, _, info = step(params, init(params), x)
            return new, info.grad_norm

        return jax.jit(
            jax.shard_map(
                stepped,
                mesh=jax.make_mesh((4, 2), axes, axis_types=(AxisType.Auto,) * 2),
                in_specs=(lies, P(axes)),
                out_specs=(lies, P()),
                check_vma=check_vma,
            )
        )(params, batch)

    of_row = np.arange(16) // 2 % 2
    grads = jax.grad(lambda p: jnp.mean(rows(p, p["own"][of_row], batch)))(params)
    want = optax.tree.norm(grads)
    new, norm = updated(norms.clip_by_global_norm(0.5, lies))
    np.testing.assert_allclose(norm, want, rtol=2e-6)
    for name, grad in grads.items():
        moved = params[name] - new[name]
        np.testing.assert_allclose(moved, grad * 0.5 / want, rtol=2e-6, atol=5e-7)
    if check_vma:  # only types tell it
        words = r"`params\['all'\]` differs over \['data', 'expert'\].*`jaxaccum.norms.clip_by"
        with pytest.raises(ValueError, match=words):
            updated(optax.clip_by_global_norm(0.5))


@pytest.mark.parametrize("skip", [False, True, "window"])
@CHECKED
def test_a_stream_keeps_each_expert_s_sum_apart(check_vma, skip):
    params, batch = problem()
    tx = ja.multi_steps(
        optax.chain(optax.trace(0.5), optax.sgd(0.5)),
        2,
        axis_name=AXES,
        local_params=SPECS,
        skip_nonfinite=skip,
    )
    sums_fn = ja.accumulate(loss_fn, num_microbatches=1)
    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh):
        state = tx.init(params)
    specs = ja.state_specs(state, AXES, local_params=SPECS)
    assert specs.inner_state[0].trace == {"own": P("expert"), "shared": P()}

    def update(params, state, batch):
        updates, state = tx.update(sums_fn(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.jit(
        jax.shard_map(
            update,
            mesh=mesh,
            in_specs=(SPECS, specs, P(AXES)),
            out_specs=(SPECS, specs),
            check_vma=check_vma,
        )
    )
    halves = [
        jax.tree.map(lambda x, k=k: x.reshape(4, BLOCK, -1)[:, k::2].reshape(12, -1), batch)
        for k in (0, 1)
    ]
    new = params
    for half in halves:
        half = half | {"kept": half["kept"][:, 0]}
        new, state = mapped(new, state, half)
    grads = jax.tree.map(lambda old, new: (old - new) / 0.5, params, new)
    _, want = answer(params, batch, ONE_TERM)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5), grads, want)
    assert (int(state.optimizer_step), int(state.micro_step)) == (1, 0)


def test_a_stream_in_pmap_and_its_flush():
    tx = ja.multi_steps(optax.sgd(1.0), 4, axis_name="e", local_params={"own": P("e"), "all": P()})
    sums_fn = ja.accumulate(lambda p, x: ja.mean(p["own"] * p["all"] * x), num_microbatches=1)

    def both(params, x):
        state = tx.init(params)
        updates, state = tx.update(sums_fn(params, x), state, params)
        updates, _ = ja.flush(tx, state, params)
        return optax.apply_updates(params, updates)

    params = {"own": jnp.array([1.0, 2.0]), "all": jnp.ones(2)}
    new = jax.pmap(both, axis_name="e")(params, jnp.array([[1.0], [10.0]]))
    assert new["own"].tolist() == [0.5, -3.0]
    assert new["all"].tolist() == [1 - 21 / 2] * 2


# Losses that do not split


@pytest.mark.parametrize("route", ["checked", "unchecked", "spmd"])
def test_what_is_combined_has_each_expert_s_own_gradient(route):
    params, batch = problem()

    def fn(params, batch):
        values = batch["x"] @ params["shared"] * params["own"][0]
        return ja.mean(values, where=batch["kept"])

    options = {"num_microbatches": 2, "local_params": SPECS}

    def squared(g, params, batch):
        return g(params, batch) ** 2

    if route == "spmd":
        g = ja.microbatch(fn, spmd_axis_name=AXES, **options)
        with jax.set_mesh(mesh_of(AxisType.Auto)):
            grads = jax.jit(jax.grad(functools.partial(squared, g)))(params, batch)
    else:
        g = ja.microbatch(fn, axis_name=AXES, **options)
        mapped = manual(
            jax.grad(functools.partial(squared, g)), SPECS, check_vma=route == "checked"
        )
        grads = mapped(params, batch)
    loss, want = answer(params, batch, ONE_TERM)
    for name in SPECS:
        np.testing.assert_allclose(grads[name], 2 * loss * want[name], rtol=1e-5)


# What is refused


def test_a_parameter_that_differs_for_no_known_reason_is_refused():
    params, batch = problem()
    words = (
        r"`params\['own'\]` differs over \['expert'\].*`local_params=P\('expert'\)`.*`param_spec"
    )
    for options in ({}, {"local_params": {"own": P("data"), "shared": P()}}):
        with pytest.raises(ValueError, match=words):
            run("checked", loss_fn, params, batch, num_microbatches=2, **options)
    tx = ja.multi_steps(optax.sgd(1.0), 2, axis_name=AXES)
    sums_fn = ja.accumulate(loss_fn, num_microbatches=1)

    def update(params, batch):
        return tx.update(sums_fn(params, batch), tx.init(params), params)[0]

    with pytest.raises(ValueError, match=r"multi_steps: `params\['own'\]` differs over"):
        manual(update, SPECS)(params, batch)
    # Weights are counted whatever the parameters are.
    d = ja.denominators(loss_fn, num_microbatches=2, axis_name=AXES)
    assert int(manual(d, P())(params, batch)) == KEPT.sum()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"param_specs": {"own": P("expert"), "shared": P()}, "local_params": SPECS},
            ValueError,
            r"`params\['own'\]` is split over \['expert'\]",
        ),
        ({"local_params": P("exprt")}, ValueError, r"names the axis 'exprt'.*'data', 'expert'"),
        ({"local_params": "expert"}, TypeError, "`local_params` must be `PartitionSpec`s"),
        (
            {"local_params": {"own": P("expert")}},
            ValueError,
            "`local_params` must be a tree prefix",
        ),
        ({"local_params": SPECS, "noise_scale": True}, ValueError, "needs whole gradient sums"),
    ],
)
def test_options_that_contradict_are_refused(options, error, words):
    params, batch = problem()

    def sums(params, batch):
        f = ja.accumulate(loss_fn, num_microbatches=2, axis_name=AXES, **options)
        return f(params, batch).loss

    with pytest.raises(error, match=words):
        manual(sums, P())(params, batch)


@pytest.mark.parametrize("name", ["param_specs", "grad_specs", "local_params"])
@pytest.mark.parametrize(
    "make",
    [ja.accumulate, ja.value_and_grad, ja.window_axis.accumulate, ja.train_step],
    ids=lambda make: f"{make.__module__}.{make.__name__}",
)
def test_places_over_no_axis_are_refused(make, name):
    args = [loss_fn, optax.sgd(1.0)] if make is ja.train_step else [loss_fn]
    with pytest.raises(ValueError, match=f"`{name}` says how parameters lie .*`spmd_axis_name`"):
        make(*args, num_microbatches=2, **{name: P("data")})


def test_local_parameters_over_no_axis_are_refused():
    for make in (
        lambda: ja.microbatch(loss_fn, num_microbatches=2, local_params=SPECS),
        lambda: ja.multi_steps(optax.sgd(1.0), 2, local_params=SPECS),
    ):
        with pytest.raises(ValueError, match="`local_params` says how parameters lie"):
            make()
