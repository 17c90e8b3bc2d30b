"""Random combinations of a window's options: the float64 answer, or a refusal in our own words.

One bilinear loss, `a * s * x + v @ y` with weights `u` for its rows, is run with everything drawn:
the order of arguments, `argnums`, `batch_argnums`, the cut, terms, `denominators=`, reducers of
gradients and outputs, integer leaves, nans, skips, accumulators, dtypes, the route (one call,
halves merged or sent into a stream, devices on one axis or two). Numbers are small integers.
"""

import functools
import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxaccum as ja

FEW, MANY = 24, 500
OURS = re.compile(
    r"(accumulate|value_and_grad|merge|finalize|mean|Mean|denominators|multi_steps|flush): .*`",
    re.S,
)
CUT, MEANS = "xy", {"one": ("main",), "other": ("main", "other"), "penalty": ("main", "penalty")}


def combination(seed):
    """One draw of everything a call is made of."""
    rng = np.random.default_rng(seed)

    def pick(*options):
        return options[rng.integers(len(options))]

    c = types.SimpleNamespace(seed=seed)
    c.route = pick("call", "call", "halves", "halves", "shard_map", "shard_map", "pmap", "spmd")
    c.axes = pick(("data",), ("data", "replica")) if c.route in ("shard_map", "spmd") else ("data",)
    c.check_vma, c.explicit, c.jit = pick(True, False), pick(True, False), pick(True, False)
    c.devices = {"call": 1, "halves": 1}.get(c.route, pick(2, 4) if len(c.axes) == 1 else 4)
    c.rows = int(rng.integers(2, 8)) * (c.devices if c.devices > 1 else pick(1, 2))
    c.order = "".join(rng.permutation(list("wsxy")))
    c.y_is_cut = pick(True, True, False)
    cut = pick("xy", "yx") if c.y_is_cut else "x"
    c.batch_argnums = tuple(c.order.index(n) - pick(0, 4) for n in cut)
    if len(cut) == 1:
        c.batch_argnums = c.batch_argnums[0]
    c.asked = list(rng.permutation(list("wsxy"))[: rng.integers(1, 5)])
    if pick(True, False):
        c.asked = [n for n in c.asked if n in "ws"] or ["w"]
    argnums = tuple(c.order.index(n) - pick(0, 4) for n in c.asked)
    c.argnums = argnums[0] if len(argnums) == 1 and pick(True, False) else argnums
    own, halves = c.rows // c.devices, c.route == "halves"
    c.parts = [int(rng.integers(1, c.rows))] if halves else []
    most = min([own, *c.parts, *[c.rows - p for p in c.parts]])
    size = int(rng.integers(1, most + 1))
    c.cut = pick({"num_microbatches": size}, {"microbatch_size": size})
    c.terms, c.as_tuple = pick("one", "one", *MEANS), pick(True, False)
    given = {n: pick(1, 2, 5, 0.5, 4) for n in MEANS[c.terms]}
    c.given = given if pick(True, False) or (halves and c.terms != "one") else None
    if c.given and pick(True, False, False):  # traced, and then a zero has a meaning
        c.given = {n: jnp.float32(pick(d, d, 0)) for n, d in c.given.items()}
    c.maximum = pick(True, False)
    c.has_aux = pick(True, False)
    c.bad = int(rng.integers(c.rows)) if pick(True, False, False) else None
    c.skip = pick(False, False, True, "window")
    c.accumulator = pick(*[None] * 3, "plain", "compensated", "chunked", "stochastic")
    c.dtype = pick("float32", "float32", "bfloat16", "float16")
    c.loss_scale = pick(None, None, 8.0)
    c.num_real = pick(None, None, 0, 1, 2, "traced")
    c.scatter = c.route == "shard_map" and not set(c.asked) & set(CUT) and pick(True, False)
    c.reduction = pick("defer", "scatter") if c.scatter else "defer"
    c.unroll = pick(1, 1, 2, True)
    c.one_call = pick(True, False)  # `value_and_grad` instead of `accumulate` and `finalize`
    x = rng.integers(-3, 4, c.rows).astype(np.float32)
    if c.bad is not None:
        x[c.bad] = np.nan
    y = rng.integers(-3, 4, (c.rows if c.y_is_cut else 3, 4)).astype(np.float32)
    u = rng.integers(0, 3, c.rows).astype(pick(np.int32, np.float32))
    if c.bad is not None:
        u[c.bad] = 1  # a nan of weight zero adds nothing
    c.args = {
        "w": {
            "a": jnp.asarray(2, c.dtype),
            "n": np.array([2**24 + 1, -1], np.int32),
            "v": jnp.asarray(rng.integers(-2, 3, 4), c.dtype),
        },
        "s": jnp.asarray(3, c.dtype),
        "x": {"u": u, "x": x},
        "y": y,
    }
    whole = not set(c.asked) & set(CUT) and not c.maximum
    c.stream = halves and whole and pick(True, True, False)
    return c


# The loss, and the float64 answer


def loss_of(c):
    def loss_fn(*args, key=None):
        w, s, batch, y = (dict(zip(c.order, args, strict=True))[n] for n in "wsxy")
        a, v, s = (jnp.asarray(p, jnp.float32) for p in (w["a"], w["v"], s))
        x, u = batch["x"], jax.lax.stop_gradient(batch["u"])
        if c.y_is_cut:  # a loop over `v`, whose gradient is then added in place
            of_y, _ = jax.lax.scan(lambda s, r: (s + r[0] * r[1], None), 0 * y[:, 0], (v, y.T))
        else:
            of_y = jnp.sum(v[None] * y)
        r = a * s * x + of_y
        terms = {"main": ja.mean(r, weights=u)}
        if c.terms == "other":
            terms["other"] = ja.mean(a * x, where=x > 0)
        if c.terms == "penalty":
            terms["penalty"] = ja.Mean(a * a, 1.0)
        loss = tuple(terms.values()) if c.as_tuple else terms
        loss = terms["main"] if c.terms == "one" else loss
        if not c.has_aux:
            return loss
        aux = {"max": ja.Max(x.max()), "min": ja.Min(x.min()), "sum": ja.Sum(x.sum())}
        aux |= {"mean": ja.mean(r, weights=u), "last": ja.Last(x.sum())}
        if c.devices == 1:
            aux |= {"rows": ja.Concat(x), "each": x.sum()}
        return loss, aux

    return loss_fn


def cuts(c, rows):
    """The micro-batches of these rows: the longer ones first, each block cut strided."""
    if "num_microbatches" in c.cut:
        number = c.cut["num_microbatches"]
        size, longer = divmod(len(rows), number)
        blocks = [(longer, size + 1), (number - longer, size)]
    else:
        size = min(c.cut["microbatch_size"], len(rows))
        number, rest = divmod(len(rows), size)
        blocks = [(number, size), (1, rest)]
    found, at = [], 0
    for n, length in blocks:
        block = rows[at : at + n * length]
        at += n * length
        found += [block[k::n] for k in range(n) if length]
    return found


def number_real(c, number):
    return {"traced": max(number - 1, 0)}.get(c.num_real, c.num_real)


def micro_step(c, rows):
    """Totals, weights and gradients by term of one micro-batch, in float64."""
    w, s, batch, y = (c.args[n] for n in "wsxy")
    a, s, v = np.float64(w["a"]), np.float64(s), np.float64(w["v"])
    x, u = np.float64(batch["x"])[rows], np.float64(batch["u"])[rows]
    y = np.float64(y)[rows] if c.y_is_cut else np.float64(y).sum(0)[None].repeat(len(rows), 0)
    r = a * s * x + y @ v
    of_y = u[:, None] * v if c.y_is_cut else (u.sum() * v)[None].repeat(3, 0)
    main = {"a": s * x @ u, "v": u @ y, "s": a * x @ u, "x": a * s * u, "y": of_y}
    none = {n: np.zeros_like(g) for n, g in main.items()}
    step = {"main": (r @ u, u.sum(), main)}
    kept = x > 0
    if c.terms == "other":  # a nan at a dropped place meets 0 in the multiply's derivative
        other = none | {"a": (x * kept).sum(), "x": a * kept}
        step["other"] = (a * x[kept].sum(), kept.sum(), other)
    if c.terms == "penalty":
        step["penalty"] = (a * a, 1.0, none | {"a": 2 * a})
    return step, (x, r @ u, u.sum())


def answer(c):
    """`(loss, grads, aux, scale)`: what the window must give, and the size of what was added."""
    steps, rows_of, bad = [], [], []
    everything = np.arange(c.rows)
    shards = np.split(everything, c.parts or c.devices)
    for shard in shards:
        found = cuts(c, shard)
        for rows in found[: number_real(c, len(found))]:
            steps.append(micro_step(c, rows))
            rows_of.append(rows)
            bad.append(c.bad is not None and c.bad in rows)
    if c.route == "halves" and c.skip == "window":  # each half is a window of its own
        first = [rows[0] < c.parts[0] for rows in rows_of]
        lost = {half for half, b in zip(first, bad, strict=True) if b}
        kept = [half not in lost for half in first]
    elif c.skip:
        kept = [not (any(bad) if c.skip == "window" else b) for b in bad]
    else:
        kept = [True] * len(bad)
    names = MEANS[c.terms]
    sure = [s for s, k in zip(steps, kept) if k]
    total = {t: sum((s[0][t][0] for s in sure), 0.0) for t in names}
    weight = {t: sum((s[0][t][1] for s in sure), 0.0) for t in names}
    by = {t: float(c.given[t]) if c.given else weight[t] for t in names}
    over = {t: 1 / by[t] if by[t] else 0.0 for t in names}
    counts = bool(sure) if c.given else any(weight.values())
    loss = sum(total[t] * over[t] for t in names if by[t]) if counts else np.nan
    shape = micro_step(c, everything[:1])[0]["main"][2]
    undivided = c.terms == "one" and not c.given
    grads, scale = {}, {}
    for n in ("a", "v", "s", "y", "x"):
        each = [np.zeros_like(s[0]["main"][2][n]) for s in sure]
        for t in names:
            if undivided or by[t]:
                factor = 1 if undivided else over[t]
                each = [e + s[0][t][2][n] * factor for e, s in zip(each, sure, strict=True)]
        end = over["main"] if undivided else 1.0
        if n == "x" or (n == "y" and c.y_is_cut):
            whole = np.zeros((c.rows, *np.shape(shape[n])[1:]))
            ran = [rows for rows, k in zip(rows_of, kept, strict=True) if k]
            for rows, e in zip(ran, each, strict=True):
                whole[rows] = e
            grads[n], scale[n] = whole * end, np.abs(whole * end)
        elif n == "s" and c.maximum:
            # What is no sum is never unscaled: it may not have passed through the cotangent.
            each = [e * (c.loss_scale or 1) for e in each]
            grads[n] = np.max(each, axis=0) if each else None
            scale[n] = np.max(np.abs(each), axis=0) if each else None
        else:
            grads[n] = sum(each, np.zeros_like(shape[n])) * end
            scale[n] = sum(map(np.abs, each), np.zeros_like(shape[n])) * end
    aux = {}
    if c.has_aux and sure:
        x = [s[1][0] for s in sure]
        sums = np.array([e.sum() for e in x])
        pooled, of = sum(s[1][1] for s in sure), sum(s[1][2] for s in sure)
        aux = {"max": np.concatenate(x).max(), "min": np.concatenate(x).min(), "sum": sums.sum()}
        aux |= {"mean": pooled / of if of else np.nan, "last": sums[-1]}
        if c.devices == 1 and len(steps) == len(sure) and c.num_real is None:
            aux |= {"rows": np.float64(c.args["x"]["x"]), "each": sums}
    return loss, grads, aux, scale


# What the library gives


def accumulators(name):
    return {
        None: lambda: None,
        "plain": lambda: ja.accumulators.plain(in_place=True),
        "compensated": ja.accumulators.compensated,
        "chunked": lambda: ja.accumulators.chunked(every=2),
        "stochastic": ja.accumulators.stochastic,
    }[name]()


def without_integers(grads):
    return jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, grads)


def specs_of(c, whole):
    """A spec for each argument asked for; `whole` is the one of parameters in parts."""
    by_name = {"w": {"a": P(), "n": P(), "v": whole}, "s": P(), "x": P(c.axes)}
    by_name["y"] = P(c.axes) if c.y_is_cut else P()
    found = tuple(by_name[n] for n in c.asked)
    return found if isinstance(c.argnums, tuple) else found[0]


def given(c):
    """The denominators in the structure of the loss."""
    if c.given is None:
        return None
    values = c.given if not c.as_tuple else tuple(c.given.values())
    return c.given["main"] if c.terms == "one" else values


def result(c):
    """`(loss, grads by argument, aux)` of the library."""
    options = {"argnums": c.argnums, "batch_argnums": c.batch_argnums, **c.cut}
    options |= {"has_aux": c.has_aux, "skip_nonfinite": c.skip, "unroll": c.unroll}
    options |= {"accumulator": accumulators(c.accumulator)}
    if c.maximum and "s" in c.asked:
        marks = tuple(ja.Max if n == "s" else ja.Sum for n in c.asked)
        options["grad_reducers"] = marks if isinstance(c.argnums, tuple) else marks[0]
    if c.scatter:
        options |= {"grad_specs": specs_of(c, P(c.axes[0])), "reduction": c.reduction}
    if c.route in ("shard_map", "pmap"):
        options["axis_name"] = c.axes if len(c.axes) > 1 else c.axes[0]
    if c.route == "spmd":
        options["spmd_axis_name"] = c.axes if len(c.axes) > 1 else c.axes[0]
    entry = ja.value_and_grad if c.one_call and c.route != "halves" else ja.accumulate
    f = entry(loss_of(c), **options)
    number = len(cuts(c, np.arange(c.rows // c.devices)))

    def call(*args, number=number):
        keywords = {"denominators": given(c), "loss_scale": c.loss_scale}
        keywords["num_real"] = number_real(c, number)
        if c.num_real == "traced":
            keywords["num_real"] = jnp.int32(keywords["num_real"])
        if c.accumulator == "stochastic":
            keywords["key"] = jax.random.key(c.seed)
        return f(*args, **keywords)

    def read(out):
        if entry is ja.value_and_grad:
            (loss, aux), grads = out if c.has_aux else ((out[0], {}), out[1])
        else:
            window = ja.finalize(out)
            loss, grads, aux = window.loss, window.grads, window.aux if c.has_aux else {}
        return loss, without_integers(grads), aux

    args = [c.args[n] for n in c.order]
    whole = {"w": P(), "s": P(), "x": P(c.axes), "y": P(c.axes) if c.y_is_cut else P()}
    in_specs = tuple(whole[n] for n in c.order)
    if c.route == "call":
        return read((jax.jit(call) if c.jit else call)(*args))
    if c.route == "halves":
        sums, at = [], [0, *c.parts, c.rows]
        for low, high in itertools.pairwise(at):
            rows = slice(low, high)
            part = [
                a if whole[n] == P() else jax.tree.map(lambda leaf: leaf[rows], a)
                for n, a in zip(c.order, args, strict=True)
            ]
            of_part = functools.partial(call, number=len(cuts(c, np.arange(high - low))))
            sums.append((jax.jit(of_part) if c.jit else of_part)(*part))
        loss, grads, aux = read(ja.merge(*sums))
        return loss, streamed(c, sums) if c.stream else grads, aux
    if c.route == "pmap":
        return over_pmap(c, lambda *a: read(call(*a)), args, [whole[n] != P() for n in c.order])
    return over_mesh(c, lambda *a: read(call(*a)), args, in_specs)


def streamed(c, sums):
    """What a stream steps by that takes these sums, as a gradient; integers keep every bit."""
    params = tuple(c.args[n] for n in c.asked)
    params = params if isinstance(c.argnums, tuple) else params[0]
    # Over their denominators already, they are not divided again.
    normalize = sums[0].denominators is None
    tx = ja.multi_steps(optax.sgd(1.0), len(sums), normalize=normalize)
    state = tx.init(params)
    for part in sums:
        updates, state = tx.update(part, state, params)
    if not ja.has_updated(state):  # a call of which nothing is left is replaced by the next one
        updates, state = ja.flush(tx, state, params)
    after = optax.apply_updates(params, updates)
    for x, y in zip(*map(jax.tree.leaves, (params, after)), strict=True):
        assert x.dtype == y.dtype
        assert jnp.issubdtype(x.dtype, jnp.inexact) or np.array_equal(x, y)
    return jax.tree.map(lambda u: -u, updates)


def over_pmap(c, run, args, is_cut):
    """`run` over devices with `pmap`; the rows' gradients are put together."""

    def split(leaf):
        return np.reshape(leaf, (c.devices, -1, *np.shape(leaf)[1:]))

    def joined(grad, name):
        rows = name in CUT and is_cut[c.order.index(name)]
        return jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]) if rows else g[-1], grad)

    parts = [jax.tree.map(split, a) if k else a for a, k in zip(args, is_cut, strict=True)]
    in_axes = tuple(0 if k else None for k in is_cut)
    devices = jax.devices()[: c.devices]
    loss, grads, aux = jax.pmap(run, axis_name="data", in_axes=in_axes, devices=devices)(*parts)
    if isinstance(c.argnums, tuple):
        grads = tuple(map(joined, grads, c.asked))
    else:
        grads = joined(grads, c.asked[0])
    return loss[0], grads, jax.tree.map(lambda x: x[0], aux)


def over_mesh(c, run, args, in_specs):
    """`run` in `shard_map`, or under plain `jit` with the rows split over the mesh."""
    kind = jax.sharding.AxisType.Explicit if c.explicit else jax.sharding.AxisType.Auto
    shape = (c.devices,) if len(c.axes) == 1 else (2, 2)
    mesh = jax.make_mesh(
        shape, c.axes, axis_types=(kind,) * len(c.axes), devices=jax.devices()[: c.devices]
    )
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(a, jax.sharding.NamedSharding(mesh, s))
            for a, s in zip(args, in_specs, strict=True)
        ]
        if c.route == "spmd":
            return jax.jit(run)(*args)
        grad_specs = specs_of(c, P(c.axes[0]) if c.scatter else P())
        return jax.jit(
            jax.shard_map(
                run,
                mesh=mesh,
                in_specs=in_specs,
                out_specs=(P(), grad_specs, P()),
                check_vma=c.check_vma,
            )
        )(*args)


EPS = {None: 2.0**-23, "chunked": 2.0**-8, "stochastic": 2.0**-7}


def compare(c, got):
    """Raises where a number is wrong."""
    loss, grads, aux = got
    want_loss, want, want_aux, scale = answer(c)
    np.testing.assert_allclose(np.float64(loss), want_loss, rtol=1e-5, atol=1e-5, err_msg="loss")
    eps = max(EPS.get(c.accumulator, 2.0**-23), float(jnp.finfo(c.dtype).eps))
    grads = grads if isinstance(c.argnums, tuple) else (grads,)
    for name, grad in zip(c.asked, grads, strict=True):
        if name == "w":
            leaves = [("a", grad["a"]), ("v", grad["v"])]
        else:
            leaves = [(name, grad["x"] if name == "x" else grad)]
        for leaf, g in leaves:
            cut = leaf == "x" or (leaf == "y" and c.y_is_cut)
            if want[leaf] is None or (cut and (c.bad is not None or c.num_real is not None)):
                continue  # the rows of a micro-batch that did not run are as they came
            error = np.abs(np.float64(g) - want[leaf])
            nan = np.isnan(want[leaf])
            # What cancels in float64 is rounded here: relative to the leaf, and to small integers.
            size = 1 + np.max(np.nan_to_num(scale[leaf]))
            assert np.shape(g) == np.shape(want[leaf]), (leaf, np.shape(g))
            right = np.where(nan, np.isnan(np.float64(g)), error <= 8 * eps * size)
            assert np.all(right), (f"gradient of {leaf}", g, want[leaf])
    for name, value in want_aux.items():
        np.testing.assert_allclose(np.float64(aux[name]), value, rtol=1e-6, atol=1e-6, err_msg=name)


def verdict(seed):
    """`("right" | "refused" | "wrong" | "internal", what)` of one combination."""
    c = combination(seed)
    try:
        got = result(c)
    except (TypeError, ValueError) as error:
        return ("refused" if OURS.match(str(error)) else "internal"), repr(error)
    except Exception as error:
        return "internal", repr(error)
    try:
        compare(c, got)
    except AssertionError as error:
        return "wrong", str(error)
    return "right", ""


@pytest.mark.parametrize(
    "seeds", [range(FEW), pytest.param(range(FEW, MANY), marks=pytest.mark.slow)], ids=len
)
def test_options(seeds):
    verdicts = {seed: verdict(seed) for seed in seeds}
    assert not {s: v for s, v in verdicts.items() if v[0] in ("wrong", "internal")}
    assert sum(v[0] == "right" for v in verdicts.values()) > len(seeds) // 2
