"""A window that goes on from given sums: `accumulate(...)(..., into=sums)`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from oracles import same

import jaxaccum as ja

PARAMS = {"w": np.float32([1, 2, 3]), "b": np.float32(2), "n": np.int32([7])}
ROWS = np.arange(24, dtype=np.float32).reshape(8, 3) % 5 - 1
CUT = {"num_microbatches": 3}


def loss_fn(p, x):
    return ja.mean(p["b"] * (x @ p["w"]) ** 2, where=x[:, 0] < 3)


def rich_fn(p, x):
    aux = {"max": ja.Max(x.max()), "last": ja.Last(x[0]), "rows": ja.Concat(x), "each": x.sum()}
    return loss_fn(p, x), aux | {"mean": ja.mean(x), "sum": ja.Sum(x.sum())}


def terms_fn(p, x):
    return {"fit": loss_fn(p, x), "penalty": ja.Mean(p["b"] ** 2, 1.0)}


def check(f, params=PARAMS, rows=ROWS, jit=True, **call):
    """`into=` gives what `merge` does, bit for bit: all numbers are small integers."""
    f = functools.partial(f, **call)
    first = f(params, rows[:3])
    into = (jax.jit if jit else lambda g: g)(lambda p, x, sums: f(p, x, into=sums))
    same(into(params, rows[3:], first), ja.merge(first, f(params, rows[3:])))


OPTIONS = {
    "plain": {},
    "one micro-batch": {"num_microbatches": 1},
    "skip": {"skip_nonfinite": True},
    "window": {"skip_nonfinite": "window"},
    "compensated": {"accumulator": ja.accumulators.compensated()},
    "chunked": {"accumulator": ja.accumulators.chunked()},
    "reducers": {"grad_reducers": {"w": ja.Max, "b": ja.Sum, "n": ja.Sum}},
    "noise": {"noise_scale": True},
    "unrolled": {"unroll": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_into_is_merge(options):
    check(ja.accumulate(loss_fn, **(CUT | options)))


def test_into_combines_outputs_by_their_reducers():
    check(ja.accumulate(rich_fn, has_aux=True, **CUT))


@pytest.mark.parametrize("given", [(4, 2, False), (4, 2, True), (0, 0, True)], ids=str)
def test_into_goes_on_over_given_denominators(given):
    f = ja.accumulate(terms_fn, **CUT)
    *given, traced = given
    given = dict(zip(("fit", "penalty"), given, strict=True))
    if traced:
        given = jax.tree.map(jnp.float32, given)
        f_jit = jax.jit(lambda p, x, d, sums: f(p, x, denominators=d, into=sums))
        plain = jax.jit(lambda p, x, d: f(p, x, denominators=d))
        first, second = plain(PARAMS, ROWS[:3], given), plain(PARAMS, ROWS[3:], given)
        same(f_jit(PARAMS, ROWS[3:], given, first), jax.jit(ja.merge)(first, second))
    else:
        check(f, denominators=given)


@pytest.mark.parametrize("number", [0, 2])
def test_into_with_fewer_micro_batches(number):
    check(ja.accumulate(terms_fn, **CUT), num_real=number, denominators={"fit": 4, "penalty": 2})
    check(ja.accumulate(loss_fn, **CUT), num_real=number)


@pytest.mark.parametrize("skip", [True, "window"])
def test_a_bad_window_leaves_given_sums_as_they_are(skip):
    f = ja.accumulate(loss_fn, skip_nonfinite=skip, **CUT)
    first, bad = f(PARAMS, ROWS), np.full_like(ROWS, np.nan)
    got = f(PARAMS, bad, into=first)
    same(got.grads, first.grads)
    assert (int(got.num_skipped), int(got.num_microbatches)) == (3, 3)


def test_into_with_a_loss_scale_a_key_and_a_pooled_state():
    check(ja.accumulate(loss_fn, **CUT), loss_scale=8.0)

    def keyed_fn(p, x, *, key, model_state):
        return loss_fn(p, x + jax.random.bernoulli(key)), {"mean": model_state["mean"] + x.sum()}

    f = ja.accumulate(keyed_fn, model_state="pooled", **CUT)
    check(f, key=jax.random.key(3), model_state={"mean": jnp.float32(2)}, jit=False)
    f = ja.accumulate(keyed_fn, model_state="sequential", **CUT)
    call = {"key": jax.random.key(3), "model_state": {"mean": jnp.float32(2)}}
    with pytest.raises(ValueError, match="accumulate: the sums hold two model states"):
        f(PARAMS, ROWS, into=f(PARAMS, ROWS, **call), **call)


def test_into_is_a_carry_of_a_scan():
    f = ja.accumulate(loss_fn, **CUT)
    pieces = np.stack([ROWS, ROWS + 1, ROWS + 2])
    params = {"w": PARAMS["w"], "b": PARAMS["b"]}
    start = jax.tree.map(jnp.asarray, f(params, ROWS))
    run = lambda sums, x: (f(params, x, into=sums), None)  # noqa: E731
    got, _ = jax.jit(lambda s, xs: jax.lax.scan(run, s, xs))(start, pieces)
    want = ja.merge(start, *[f(params, x) for x in pieces])
    same(got, jax.tree.map(jnp.asarray, want))


MESH = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_given_sums_count_once_over_devices(check_vma):
    params = {"w": PARAMS["w"], "b": PARAMS["b"]}
    f = ja.accumulate(loss_fn, num_microbatches=2, axis_name="data")
    mapped = functools.partial(jax.shard_map, mesh=MESH, out_specs=P(), check_vma=check_vma)
    plain = jax.jit(mapped(f, in_specs=(P(), P("data"))))
    going = jax.jit(mapped(lambda p, x, sums: f(p, x, into=sums), in_specs=(P(), P("data"), P())))
    first = plain(params, ROWS)
    same(going(params, ROWS + 1, first), ja.merge(first, plain(params, ROWS + 1)))


def test_sums_that_stay_on_their_device_go_on_there():
    params = {"w": PARAMS["w"], "b": PARAMS["b"]}
    f = ja.accumulate(loss_fn, num_microbatches=2)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data"))
    def both(params, x):
        first, more = f(params, x), x + 1
        pair = f(params, more, into=first), ja.merge(first, f(params, more))
        return jax.tree.map(lambda v: jnp.asarray(v)[None] + 0 * x[0, 0].astype(v.dtype), pair)

    same(*both(params, ROWS))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_into_under_plain_jit_over_devices(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    f = ja.accumulate(rich_fn, has_aux=True, num_microbatches=2, spmd_axis_name="data")
    params = {"w": PARAMS["w"], "b": PARAMS["b"]}
    with jax.set_mesh(mesh):
        g = jax.jit(f)
        first = g(params, ROWS)
        want = ja.merge(first, g(params, ROWS + 1))
        same(jax.jit(lambda p, x, s: f(p, x, into=s))(params, ROWS + 1, first), want)


@pytest.mark.parametrize("reduction", ["defer", "scatter"])
def test_into_in_parts(reduction):
    params = {"w": np.float32([1, 2, 3, 4])}
    rows = np.arange(64, dtype=np.float32).reshape(16, 4) % 3
    f = ja.accumulate(
        lambda p, x: ja.mean(x @ p["w"]),
        num_microbatches=2,
        axis_name="data",
        param_specs=P("data"),
        reduction=reduction,
    )

    def both(params, x):
        first = f(params, x)
        got, want = f(params, x + 1, into=first), ja.merge(first, f(params, x + 1))
        return (got.grads, got.weight), (want.grads, want.weight)

    specs = ({"w": P("data")}, P())
    mapped = jax.shard_map(
        both, mesh=MESH, in_specs=(P("data"), P("data")), out_specs=(specs, specs)
    )
    same(*jax.jit(mapped)(params, rows))


def test_over_the_windows_own_axis():
    def meeting_fn(p, x):
        return ja.mean(p["b"] * (x - jax.lax.psum(jnp.sum(x), "window")))

    check(ja.window_axis.accumulate(meeting_fn, num_microbatches=1), jit=False)


def test_donated_sums_are_added_in_place():
    f = ja.accumulate(lambda w, x: ja.mean(x @ w), num_microbatches=2)
    w, x = jnp.ones((1024, 64)), jnp.ones((4, 1024))
    step = jax.jit(lambda w, x, s: f(w, x, into=s), donate_argnums=2)
    memory = step.lower(w, x, f(w, x)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= w.nbytes
    assert memory.temp_size_in_bytes < 2 * w.nbytes  # the gradient, no second sum


# Refusals


REFUSED = {
    "kind": (lambda s: {"w": 1}, TypeError, "`into` must be `WindowSums`"),
    "dtype": (
        lambda s: ja.accumulate(loss_fn, accumulator=ja.accumulators.chunked(), **CUT)(
            {"w": np.float32([1, 2]), "b": PARAMS["b"], "n": PARAMS["n"]}, ROWS[:, :2]
        ),
        ValueError,
        r"`into.grads\['w'\]` is .*, expected the shape \(3,\)",
    ),
    "tree": (
        lambda s: ja.accumulate(lambda p, x: ja.mean(p * x), **CUT)(2.0, ROWS),
        ValueError,
        "`into.grads` has the tree structure",
    ),
    "noise": (
        lambda s: ja.accumulate(loss_fn, noise_scale=True, **CUT)(PARAMS, ROWS),
        ValueError,
        "`into` and `the sums of this call` have different structures",
    ),
    "weight": (
        lambda s: ja.accumulate(lambda p, x: ja.mean(x @ p["w"], weights=x[:, 0]), **CUT)(
            PARAMS, ROWS
        ),
        ValueError,
        r"`into.weight` is .*, expected the dtype int32",
    ),
    "terms": (
        lambda s: ja.accumulate(loss_fn, **CUT)(PARAMS, ROWS, denominators=3),
        ValueError,
        "a loss of several terms merges only if",
    ),
}


@pytest.mark.parametrize(("made", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_match_is_refused(made, error, message):
    f = ja.accumulate(loss_fn, **CUT)
    with pytest.raises(error, match=f"accumulate: .*{message}"):
        f(PARAMS, ROWS, into=made(None))


def test_only_undivided_sums_go_on():
    with pytest.raises(TypeError, match="value_and_grad: `into` is no keyword of this call"):
        ja.value_and_grad(loss_fn, **CUT)(PARAMS, ROWS, into=None)
    with pytest.raises(TypeError, match="`into` is a keyword of the call"):
        ja.accumulate(loss_fn, into=None, **CUT)
