"""Sums that are added inside the backward pass: the same values, one gradient less of memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from oracles import same

import jaxaccum as ja

# Newer ones write the backward pass of a loss in another form, which is not read yet.
only_jax_0_10 = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="on this JAX gradients are added the ordinary way"
)
LAYERS, WIDTH = 3, 4
CUT = {"num_microbatches": 3}
RNG = np.random.default_rng(0)


def integers(*shape, dtype=np.float32):
    return RNG.integers(-2, 3, shape).astype(dtype)


# `w` and `b` are read layer by layer, `e` twice, `n` is no float, `h` has sums wider than itself.
PARAMS = {
    "w": integers(LAYERS, WIDTH, WIDTH),
    "b": integers(LAYERS, WIDTH),
    "e": integers(WIDTH, WIDTH),
    "h": jnp.asarray(integers(LAYERS, WIDTH), jnp.bfloat16),
}
ROWS = integers(8, WIDTH)
IN_PLACE = ("w", "b")


def total(p, x):
    def layer(y, here):
        w, b, h = here
        y = y @ w + (b + h.astype(jnp.float32))[None]
        return y - 2 * jnp.round(y / 3), None  # small integers stay small

    y, _ = jax.lax.scan(jax.checkpoint(layer), x @ p["e"], (p["w"], p["b"], p["h"]))
    return jnp.sum(y * (x @ p["e"]))


def loss_fn(p, x):
    return ja.Mean(total(p, x), x.shape[0])


def plain(in_place):
    return ja.accumulators.plain(in_place=in_place)


def writes(fn, *args):
    """How many sums a function adds in place: the buffers that it makes."""
    return str(jax.make_jaxpr(fn)(*args)).count("= new_ref[")


def pair(make_fn=ja.accumulate, fn=loss_fn, **options):
    """The function in place, and the one that adds whole gradients."""
    options = CUT | options
    return tuple(make_fn(fn, accumulator=plain(i), **options) for i in (None, False))


def check(*args, jit=True, around=lambda f: f, **options):
    here, there = map(around, pair(**options))
    same((jax.jit(here) if jit else here)(*args), (jax.jit(there) if jit else there)(*args))


@only_jax_0_10
def test_what_a_loop_reads_in_its_own_dtype_is_added_in_place():
    here, there = pair()
    assert writes(here, PARAMS, ROWS) == len(IN_PLACE)
    assert writes(there, PARAMS, ROWS) == 0
    same(jax.jit(here)(PARAMS, ROWS), jax.jit(there)(PARAMS, ROWS))


OPTIONS = {
    "value_and_grad": {"make_fn": ja.value_and_grad},
    "rows": {"num_microbatches": None, "microbatch_size": 3},
    "one row": {"num_microbatches": None, "microbatch_size": 7},
    "eager": {"jit": False},
    "window": {"skip_nonfinite": "window"},
    "unrolled": {"unroll": True},
    "integer parameter": {"n": np.int32([3])},
    "maximum": {"grad_reducers": {"w": ja.Max, "b": ja.Sum, "e": ja.Last, "h": ja.Sum}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_same_values(options):
    options = dict(options)
    params = PARAMS | ({"n": options.pop("n")} if "n" in options else {})
    check(params, ROWS, **options)


@pytest.mark.parametrize("call", [{"num_real": 2}, {"num_real": 0}, {"loss_scale": 8.0}], ids=str)
def test_the_same_values_with_keywords(call):
    traced = {name: jnp.asarray(value) for name, value in call.items()}
    here, there = pair()
    got = jax.jit(here)(PARAMS, ROWS, **traced)
    same(got, jax.jit(there)(PARAMS, ROWS, **traced))
    same(got, here(PARAMS, ROWS, **call))


def test_terms_aux_keys_and_state():
    def rich_fn(p, x, *, key, model_state):
        x = x * jax.random.bernoulli(key, 0.5, x.shape)
        loss = {"fit": loss_fn(p, x), "penalty": ja.Mean(jnp.sum(p["w"] ** 2), 1.0)}
        aux = {"sum": ja.Sum(x.sum()), "rows": ja.Concat(x), "each": x.max()}
        return loss, (aux, model_state + x.sum())

    for policy in ("sequential", "pooled"):
        call = {"key": jax.random.key(1), "model_state": jnp.float32(3)}
        call["denominators"] = {"fit": 8, "penalty": 4}
        check(
            PARAMS,
            ROWS,
            fn=rich_fn,
            has_aux=True,
            model_state=policy,
            around=lambda f, call=call: functools.partial(f, **call),
        )


@only_jax_0_10
def test_into_goes_on_in_place():
    here, there = pair()
    first = there(PARAMS, ROWS)
    going = jax.jit(lambda p, x, sums: here(p, x, into=sums))
    same(going(PARAMS, ROWS + 1, first), ja.merge(first, there(PARAMS, ROWS + 1)))
    assert writes(going, PARAMS, ROWS, first) == len(IN_PLACE)
    scaled = jax.jit(lambda p, x, sums: here(p, x, into=sums, loss_scale=4.0))
    same(scaled(PARAMS, ROWS + 1, first), ja.merge(first, there(PARAMS, ROWS + 1)))


def test_a_window_that_is_not_finite_is_left_out_whole():
    bad = ROWS.copy()
    bad[3] = np.nan
    check(PARAMS, bad, skip_nonfinite="window")


# Losses whose loops JAX would write to the wrong place


def rows_of_both(p, x):  # the first rows depend on parameters, and are written as values
    h = jnp.stack([x @ p["e"]] * LAYERS)
    y, _ = jax.lax.scan(lambda y, r: (y @ r[1] + 2 * r[0], None), x, (h, p["w"]))
    return ja.Mean(jnp.sum(y), x.shape[0])


def constants_of_both(p, x):
    h = x @ p["e"]
    y, _ = jax.lax.scan(lambda y, _: (2 * h + y @ p["w"][0], None), x, None, length=2)
    return ja.Mean(jnp.sum(y), x.shape[0])


def by_a_branch(p, x):
    def layer(y, r):
        return jax.lax.cond(
            y[0, 0] > 0, lambda: y @ r[0] + r[1][None], lambda: y - r[1][None]
        ), None

    y, _ = jax.lax.scan(layer, x, (p["w"], p["b"]))
    return ja.Mean(jnp.sum(y), x.shape[0])


def within_loops(p, x):
    def inner(y, r):
        return y @ r[1] + r[0][None], None

    def outer(y, _):
        y, _ = jax.lax.scan(inner, y, (p["b"] * 2, p["w"]))
        return y - 2 * jnp.round(y / 3), None

    y, _ = jax.lax.scan(outer, x, None, length=2)
    return ja.Mean(jnp.sum(y), x.shape[0])


def in_slices(p, x):
    y = x @ p["w"][1] + p["b"][::2].sum(0)[None] + p["b"][::-1][0][None]
    y += jax.lax.fori_loop(0, LAYERS, lambda i, y: y @ p["w"][i], y)
    return ja.Mean(jnp.sum(y + p["b"][jnp.array([2, 2])].sum(0)[None]), x.shape[0])


@pytest.mark.parametrize(
    "fn", [rows_of_both, constants_of_both, by_a_branch, within_loops, in_slices]
)
@pytest.mark.parametrize("in_place", [None, True])
def test_loops_that_read_other_values_too(fn, in_place):
    params = {name: PARAMS[name] for name in ("w", "b", "e")}
    here = ja.accumulate(fn, accumulator=plain(in_place), **CUT)
    want = ja.accumulate(fn, accumulator=plain(False), **CUT)(params, ROWS)
    if in_place:
        with pytest.raises(ValueError, match="where JAX may add it to the wrong sum"):
            here(params, ROWS)
    else:
        same(jax.jit(here)(params, ROWS), want)


# Under the transformations of JAX


def squares(f):
    def meta(p, x):
        kept = {k: v for k, v in f(p, x).grads.items() if k != "h"}
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(kept))

    return meta


AROUND = {
    "vmap of rows": lambda f: lambda p, x: jax.vmap(f, (None, 0))(p, jnp.stack([x, x + 1])),
    "vmap of parameters": lambda f: (
        lambda p, x: jax.vmap(f, (0, None))(jax.tree.map(lambda v: jnp.stack([v, v + 1]), p), x)
    ),
    "vmap of jit": lambda f: lambda p, x: jax.vmap(jax.jit(f), (None, 0))(p, jnp.stack([x, x + 1])),
    "grad": lambda f: jax.grad(squares(f)),
    "grad of jit": lambda f: jax.grad(squares(jax.jit(f))),
    "grad of checkpoint": lambda f: jax.grad(squares(jax.checkpoint(f))),
    "checkpoint": jax.checkpoint,
    "jvp": lambda f: lambda p, x: jax.jvp(lambda x: squares(f)(p, x), (x,), (x + 1,)),
    "jvp of sums": lambda f: (
        lambda p, x: [
            g
            for g in jax.tree.leaves(jax.jvp(lambda x: f(p, x), (x,), (x,)))
            if g.dtype != jax.dtypes.float0
        ]
    ),
    "linearize": lambda f: lambda p, x: jax.linearize(lambda x: squares(f)(p, x), x)[1](x),
    "vmap of grad": lambda f: (
        lambda p, x: jax.vmap(jax.grad(squares(f)), (None, 0))(p, jnp.stack([x, x + 1]))
    ),
    "scan": lambda f: lambda p, x: jax.lax.scan(lambda c, x: (c, f(p, x)), 0, jnp.stack([x, x]))[1],
    "cond": lambda f: lambda p, x: jax.lax.cond(x[0, 0] > 9, f, lambda p, x: f(p, x + 1), p, x),
    "while": lambda f: lambda p, x: jax.lax.fori_loop(0, 2, lambda i, s: f(p, x), f(p, x)),
}


def untyped(sums):
    return jax.tree.map(jnp.asarray, sums)


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_under_transformations(around):
    params = {k: v for k, v in PARAMS.items() if k != "h"} | {"h": jnp.asarray(PARAMS["h"])}
    check(params, ROWS, around=lambda f: around(lambda p, x: untyped(f(p, x))))


def test_a_vmap_that_has_a_name():
    def meeting_fn(p, x):
        return ja.Mean(total(p, x) * jax.lax.psum(x[0, 0], "both"), x.shape[0])

    for jit in (jax.jit, lambda f: f):
        check(
            PARAMS,
            np.stack([ROWS, ROWS + 1]),
            fn=meeting_fn,
            around=lambda f: jax.vmap(
                jit(lambda p, x: untyped(f(p, x))), (None, 0), axis_name="both"
            ),
        )


def test_in_debug_modes():
    for mode in (jax.debug_nans(True), jax.checking_leaks(), jax.disable_jit()):
        with mode:
            check(PARAMS, ROWS)


def test_a_loss_may_call_the_host():
    seen = []

    def telling_fn(p, x):
        jax.debug.callback(lambda s: seen.append(float(s)), x.sum())
        return loss_fn(p, x)

    check(PARAMS, ROWS, fn=telling_fn)
    jax.effects_barrier()
    assert len(seen) == 6


# Over devices

MESH = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "in parts"])
def test_in_shard_map(check_vma, parts, jit):
    specs = {"w": P(None, None, "data"), "b": P(), "e": P(), "h": P()} if parts else P()
    options = {"param_specs": specs} if parts else {}

    def mapped(f):
        g = jax.shard_map(
            lambda p, x: f(p, x).grads,
            mesh=MESH,
            in_specs=(specs, P("data")),
            out_specs=specs,
            check_vma=check_vma,
        )
        return jit(g)

    rows = integers(16, WIDTH)
    check(PARAMS, rows, jit=False, around=mapped, axis_name="data", **options)


def test_in_pmap_and_under_plain_jit():
    rows = integers(16, WIDTH)
    check(
        PARAMS,
        rows.reshape(4, 4, WIDTH),
        jit=False,
        around=lambda f: jax.pmap(
            lambda p, x: untyped(f(p, x)),
            axis_name="data",
            in_axes=(None, 0),
            devices=jax.devices()[:4],
        ),
        axis_name="data",
    )
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(kind,))):
            check(PARAMS, rows, spmd_axis_name="data")


def test_sums_that_stay_on_their_device():
    def mapped(f):
        return jax.shard_map(
            lambda p, x: jax.tree.map(lambda g: g[None], f(p, x).grads),
            mesh=MESH,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
        )

    check(PARAMS, integers(16, WIDTH), around=mapped)


# Steps


def test_a_training_step_with_donated_parameters():
    results = []
    for in_place in (None, False):
        init, step = ja.train_step(loss_fn, optax.sgd(0.5), accumulator=plain(in_place), **CUT)
        params = jax.tree.map(jnp.array, PARAMS)
        run = jax.jit(step, donate_argnums=(0, 1))
        results.append(run(params, init(params), ROWS)[0])
    same(*results)


# Memory


def layered_fn(p, x):
    y, _ = jax.lax.scan(jax.checkpoint(lambda y, w: (jnp.tanh(y @ w), None)), x, p)
    return ja.mean(y)


def temporaries(in_place, number=4):
    f = ja.accumulate(layered_fn, num_microbatches=number, accumulator=plain(in_place))
    args = jnp.ones((8, 64, 64)), jnp.ones((number, 64))
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes / (
        8 * 64 * 64 * 4
    )


@only_jax_0_10
def test_no_gradient_of_a_micro_batch_is_there_as_a_whole():
    here, there = temporaries(None), temporaries(False)
    assert there > 0.9
    assert here < 0.35 * there
    assert abs(temporaries(None, 32) - here) < 0.02


# Refusals


REFUSED = {
    "skips": ({"skip_nonfinite": True}, "`skip_nonfinite=True` must see"),
    "noise": ({"noise_scale": True}, "`noise_scale=True` needs"),
    "rows": ({"argnums": (0, 1)}, "rows of the batch"),
    "reducer": (
        {"grad_reducers": {"w": ja.Max, "b": ja.Sum, "e": ja.Sum, "h": ja.Sum}},
        r"`params\['w'\]` in place: its accumulator or reducer is not a plain sum",
    ),
    "narrow": ({}, r"`params\['h'\]` in place: it is bfloat16, its sum float32"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_true_refuses_with_the_reason(options, message):
    params = PARAMS if options == {} else PARAMS | {"h": np.float32(PARAMS["h"])}
    f = ja.accumulate(loss_fn, accumulator=plain(True), **(CUT | options))
    with pytest.raises(
        ValueError, match=rf"accumulate: `accumulators.plain\(in_place=True\)`.*{message}"
    ):
        f(params, ROWS)


@only_jax_0_10
def test_true_adds_everything_in_place():
    params = PARAMS | {"h": np.float32(PARAMS["h"])}
    f = ja.accumulate(loss_fn, accumulator=plain(True), **CUT)
    assert writes(f, params, ROWS) == 4
    same(jax.jit(f)(params, ROWS), ja.accumulate(loss_fn, **CUT)(params, ROWS))


def test_in_place_is_none_true_or_false():
    with pytest.raises(TypeError, match=r"accumulators.plain: `in_place` must be"):
        plain("yes")


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: ja.multi_steps(optax.sgd(1.0), 2, **o),
        lambda **o: ja.microbatch(lambda p, x: ja.Sum(x), num_microbatches=2, **o),
        lambda **o: ja.window_axis.accumulate(loss_fn, num_microbatches=2, **o),
    ],
    ids=["multi_steps", "microbatch", "window_axis"],
)
def test_true_is_refused_where_no_gradient_is_added_in_a_backward_pass(make):
    make(accumulator=plain(None))
    with pytest.raises(ValueError, match=r"`accumulators.plain\(in_place=True\)` cannot be here"):
        make(accumulator=plain(True))
