"""`ja.audit`: what compiled steps really do, and the reading of their text."""

import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxaccum as ja
from jaxaccum import __main__ as command
from jaxaccum.auditing import flow, frames, groups, hlo

K, ROWS, IN, OUT = 5, 16, 32, 4
EVERYWHERE = P()
GRADIENT = 4 * (IN * OUT + OUT)  # bytes, float32


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


DATA = mesh_of(data=8)
BOTH = mesh_of(data=4, model=2)


def struct(mesh, spec, *shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def params_of(mesh=DATA, w=EVERYWHERE, b=EVERYWHERE, dtype=jnp.float32):
    return {"w": struct(mesh, w, IN, OUT, dtype=dtype), "b": struct(mesh, b, OUT, dtype=dtype)}


def batch_of(mesh=DATA, dtype=jnp.float32):
    return struct(mesh, P(None, "data"), K, ROWS, IN, dtype=dtype)


def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"] + params["b"][None]) ** 2)


def grads(params, x):
    return jax.grad(loss)(params, x)


def varying(tree):
    return jax.tree.map(lambda x: lax.pcast(x, ("data",), to="varying"), tree)


def fold(params, batch):
    """The sum of the micro-batches' gradients, in a scan."""
    zeros = jax.tree.map(lambda p: p * 0, params)
    add = lambda c, x: (jax.tree.map(jnp.add, c, grads(params, x)), None)  # noqa: E731
    return lax.scan(add, zeros, batch)[0]


def mapped(fn, out=EVERYWHERE):
    return jax.shard_map(fn, mesh=DATA, in_specs=(P(), P(None, "data")), out_specs=out)


deferred = mapped(lambda p, x: lax.psum(fold(varying(p), x), "data"))
in_the_loop = mapped(fold)  # `jax.grad` sums over the devices in every micro-batch


def unrolled(params, batch):
    def local(params, batch):
        total = jax.tree.map(lambda p: p * 0, params)
        for k in range(K):
            g = lax.optimization_barrier(lax.psum(grads(varying(params), batch[k]), "data"))
            total = jax.tree.map(jnp.add, total, g)
        return total

    return mapped(local)(params, batch)


# Where reductions are, and how large


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["function", "jitted"])
def test_one_reduction_after_the_loop(wrap):
    report = ja.audit(wrap(deferred), params_of(), batch_of())
    assert (report.loop_bytes, report.outside_bytes) == (0, GRADIENT)
    assert report.reduced_gradients == report.outside_gradients == 1.0
    assert report.gradient_bytes == GRADIENT
    assert (report.num_devices, report.mesh, report.axis_name) == (8, {"data": 8}, ("data",))
    assert {c.kind for c in report.outside} == {"all-reduce"}
    assert all(c.axes == ("data",) and c.gradient_sized for c in report.outside)
    assert sorted(a for c in report.outside for a in c.arrays) == ["float32[32,4]", "float32[4]"]
    assert report.assert_deferred() is report
    assert report.warnings == ()


@pytest.mark.parametrize("step", [in_the_loop, fold], ids=["shard_map", "plain jit"])
def test_a_reduction_in_every_micro_batch(step):
    report = ja.audit(step, params_of(), batch_of())
    assert (report.loop_bytes, report.outside_bytes) == (K * GRADIENT, 0)
    assert report.loop_gradients == K
    assert all(c.gradient_sized and c.in_loop and c.trip_count == K for c in report.collectives)
    assert all(c.axes == ("data",) for c in report.collectives)
    with pytest.raises(AssertionError) as error:
        report.assert_deferred()
    for part in ("2.58 KiB", f"{K}.00 gradients", "while/body", "axis_name=", "data"):
        assert part in str(error.value)


def test_a_reduce_scatter_in_the_loop():
    def local(params, batch):
        def add(total, x):
            g = jax.grad(loss)(varying(params), x)["w"]
            return total + lax.psum_scatter(g, "data", tiled=True), None

        zeros = lax.pcast(jnp.zeros((IN // 8, OUT)), ("data",), to="varying")
        return lax.scan(add, zeros, batch)[0]

    report = ja.audit(mapped(local, P("data")), params_of(), batch_of())
    (scatter,) = report.collectives
    assert (scatter.kind, scatter.arrays) == ("reduce-scatter", ("float32[32,4]",))
    assert (scatter.bytes, scatter.total_bytes) == (4 * IN * OUT, K * 4 * IN * OUT)
    assert scatter.gradient_sized
    assert [(s.dtype, s.shape, s.parameter) for s in report.loop_sums] == [
        ("float32", (IN // 8, OUT), "params['w']")
    ]
    with pytest.raises(AssertionError, match="reduce-scatter"):
        report.assert_deferred()
    assert report.assert_deferred(kinds=("all-gather",)) is report


def test_an_unrolled_loop_reduces_more_than_one_gradient():
    report = ja.audit(unrolled, params_of(), batch_of())
    assert report.in_loops == ()
    assert report.outside_bytes == K * GRADIENT
    with pytest.raises(AssertionError, match=r"5\.00 outside"):
        report.assert_deferred()
    assert report.assert_deferred(max_gradients=5) is report
    assert report.assert_deferred(max_gradients=None) is report


def test_nested_loops_multiply():
    def step(params, batch):
        total = lax.scan(lambda c, x: (c + fold(params, x)["w"], None), params["w"] * 0, batch)
        return total[0]

    report = ja.audit(
        step, {"w": params_of()["w"], "b": params_of()["b"]},
        struct(DATA, P(None, None, "data"), 3, K, ROWS, IN),
    )  # fmt: skip
    in_both = [c for c in report.in_loops if len(c.loops) == 2]
    assert {c.loops for c in in_both} == {(3, K)}
    assert sum(c.total_bytes for c in in_both) == 3 * K * 4 * IN * OUT


def test_a_loop_of_unknown_length():
    def step(params, batch, n):
        def local(params, batch, n):
            add = lambda k, c: jax.tree.map(  # noqa: E731
                lambda c, g: c * 0.5 + g, c, lax.psum(grads(varying(params), batch[k]), "data")
            )
            return lax.fori_loop(0, n, add, jax.tree.map(jnp.zeros_like, params))

        specs = (P(), P(None, "data"), P())
        return jax.shard_map(local, mesh=DATA, in_specs=specs, out_specs=P())(params, batch, n)

    report = ja.audit(step, params_of(), batch_of(), jnp.int32(K))
    assert {c.trip_count for c in report.in_loops} == {None}
    assert report.loop_bytes == GRADIENT  # counted once
    assert "x ? (counted once)" in str(report)
    with pytest.raises(AssertionError):
        report.assert_deferred()


def test_scalars_in_a_loop_are_no_gradient():
    def local(params, batch):
        def add(carry, x):
            total, metric = carry
            value = lax.psum(jnp.stack([jnp.sum(x), jnp.max(x)]), "data")
            value *= lax.psum(jnp.min(x), "data")
            return (jax.tree.map(jnp.add, total, grads(params, x)), metric * 0.9 + value), None

        params = varying(params)
        zeros = jax.tree.map(lambda p: p * 0, params), jnp.zeros(2)
        total, metric = lax.scan(add, zeros, batch)[0]
        return lax.psum(total, "data"), metric

    report = ja.audit(mapped(local, (P(), P())), params_of(), batch_of())
    assert report.loop_bytes == K * 3 * 4
    assert report.outside_bytes == GRADIENT
    # The single number counts for nothing, the two for what they weigh.
    assert report.loop_gradients == pytest.approx(K * 8 / GRADIENT)
    report.assert_deferred()
    with pytest.raises(AssertionError):
        ja.audit(mapped(local, (P(), P())), params_of(), batch_of(), min_bytes=8).assert_deferred()


# Axes


def test_tensor_parallel_activations_do_not_count():
    params, batch = params_of(BOTH, w=P("model", None)), batch_of(BOTH)
    report = ja.audit(fold, params, batch)
    part = 4 * (IN * OUT // 2 + OUT)
    assert (report.gradient_bytes, report.axis_name) == (part, ("data",))
    (activation,) = [c for c in report.in_loops if c.axes == ("model",)]
    assert activation.bytes == 4 * ROWS // 4 * OUT
    assert not activation.counts
    assert not activation.gradient_sized
    over_data = [c for c in report.in_loops if c.axes == ("data",)]
    assert sum(c.total_bytes for c in over_data) == K * part
    assert report.loop_gradients == K
    with pytest.raises(AssertionError):
        report.assert_deferred()
    on_model = ja.audit(fold, params, batch, axis_name="model", min_bytes=10**6)
    assert on_model.assert_deferred() is on_model


def test_axis_name_limits_what_counts():
    report = ja.audit(fold, params_of(BOTH), batch_of(BOTH), axis_name=("model",))
    assert report.loop_bytes == K * GRADIENT
    assert report.loop_gradients == 0
    report.assert_deferred()
    with pytest.raises(ValueError, match=r"`axis_name` names the axis 'seq'"):
        ja.audit(fold, params_of(BOTH), batch_of(BOTH), axis_name="seq")


def test_the_reduction_of_sharded_parameters_is_whole_over_the_data_axis():
    params = params_of(w=P("data"))
    report = ja.audit(fold, params, batch_of())
    assert report.gradient_bytes == GRADIENT
    gathers = [c for c in report.collectives if c.kind == "all-gather"]
    assert {c.moves for c in gathers} == {("params['w']",)}
    assert {c.bytes for c in gathers} == {4 * IN * OUT}
    assert report.moved_rows == ()


MESH = mesh_of(a=2, b=2, c=2)
AXES = ["a", "b", "c", ("a", "b"), ("a", "c"), ("c", "b"), ("c", "a", "b")]


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "collective-permute", "all-to-all"])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_axes_of_every_kind(kind, axes):
    names = (axes,) if isinstance(axes, str) else axes
    if kind == "collective-permute":  # in another order a permutation means something else
        names = axes = tuple(sorted(names))
    size = 2 ** len(names)

    def local(x):
        if kind == "all-reduce":
            return lax.psum(x, axes)
        if kind == "all-gather":
            return lax.all_gather(x, axes, tiled=True)
        if kind == "all-to-all":
            return lax.all_to_all(x, axes, 0, 1, tiled=True)
        return lax.ppermute(x, axes, [(i, (i + 1) % size) for i in range(size)])

    whole = P(("a", "b", "c"))
    f = jax.shard_map(local, mesh=MESH, in_specs=whole, out_specs=whole, check_vma=False)
    report = ja.audit(f, struct(MESH, whole, 64, 8))
    (op,) = report.collectives
    assert op.kind == kind
    assert op.axes == tuple(sorted(names))
    assert op.bytes == 4 * 8 * 8 * (size if kind == "all-gather" else 1)
    assert report.axis_name is None  # the only argument is the parameters


def test_devices_in_another_order():
    order = np.array(jax.devices())[[0, 2, 1, 3, 4, 6, 5, 7]].reshape(4, 2)
    mesh = jax.sharding.Mesh(order, ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    for spec, axis in ((P("d"), "d"), (P(None, "m"), "m")):
        report = ja.audit(lambda x: jnp.sum(x), struct(mesh, spec, 8, 4))
        assert {c.axes for c in report.collectives} == {(axis,)}


def test_groups_of_one_device_move_nothing():
    mesh = mesh_of(data=1, model=8)
    f = jax.shard_map(
        lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )  # fmt: skip
    report = ja.audit(f, struct(mesh, P("data"), 8, 4))
    assert report.outside_bytes == 0
    assert not any(c.gradient_sized for c in report.collectives)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[4,2]<=[2,2,2]T(2,0,1)", [[0, 2], [4, 6], [1, 3], [5, 7]]),
        ("mesh['a'=4,'b'=2] {'a'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=4,'b'=2] {'b'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=4,'b'=2] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(1)2}", None),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}", None),
        ("something new", None),
        ("mesh['a'=8] {'unknown'}", None),
    ],
)
def test_replica_groups(text, expected):
    assert groups.replica_groups(text, 8) == expected


def test_axes_of_groups():
    mesh = {"a": 2, "b": 2, "one": 1, "c": 2}
    assert groups.axes_of([[0, 4], [1, 5]], mesh) == ("a",)
    assert groups.axes_of([[0, 7]], mesh) == ("a", "b", "c")
    assert groups.axes_of([[0], [1]], mesh) == ()
    assert groups.axes_of([[0, 8]], mesh) is None
    assert groups.axes_of(None, mesh) is None
    assert groups.axes_of([[0, 1]], None) is None


# Branches


def closing(count, total):
    """A reduction in the branch that closes a window."""
    reduced = lambda: lax.psum(total, "data")  # noqa: E731
    kept = lambda: jax.tree.map(jnp.zeros_like, total)  # noqa: E731
    return lax.cond(count == 2, reduced, kept)


def test_a_reduction_in_a_branch_outside_of_loops():
    def local(params, batch, count):
        return closing(count, jax.tree.map(lambda g: g * 2, grads(varying(params), batch)))

    step = jax.shard_map(
        local, mesh=DATA, in_specs=(P(), P("data"), P()), out_specs=P(), check_vma=False
    )
    report = ja.audit(step, params_of(), struct(DATA, P("data"), ROWS, IN), jnp.int32(0))
    assert report.outside_bytes == GRADIENT
    assert all(c.in_branch and not c.branch_in_loop for c in report.collectives)
    assert "in a branch" in str(report)
    report.assert_deferred()


@pytest.mark.parametrize("loop_in_branch", [False, True])
def test_a_reduction_in_a_branch_and_a_loop(loop_in_branch):
    def local(params, batch, count):
        def step(total, x):
            g = grads(params, x)
            g = lax.psum(g, "data") if loop_in_branch else closing(total["b"][0], g)
            return jax.tree.map(lambda c, g: c * 0.5 + g, total, g), None

        params = varying(params)
        zeros = jax.tree.map(lambda p: p * 0, params)
        scan = lambda: lax.scan(step, zeros, batch)[0]  # noqa: E731
        return lax.cond(count == 2, scan, lambda: zeros) if loop_in_branch else scan()

    step = jax.shard_map(
        local, mesh=DATA, in_specs=(P(), P(None, "data"), P()), out_specs=P(), check_vma=False
    )
    report = ja.audit(step, params_of(), batch_of(), jnp.int32(0))
    assert report.loop_bytes == K * GRADIENT
    assert all(c.in_branch and c.branch_in_loop != loop_in_branch for c in report.in_loops)
    with pytest.raises(AssertionError) as error:
        report.assert_deferred()
    assert ("allow_branches=True" in str(error.value)) != loop_in_branch
    if loop_in_branch:
        with pytest.raises(AssertionError):
            report.assert_deferred(allow_branches=True)
    else:
        report.assert_deferred(allow_branches=True)


def test_multi_steps_reduces_in_its_closing_branch():
    tx = ja.multi_steps(optax.sgd(1.0), K, axis_name="data")
    params = jax.tree.map(lambda p: jnp.ones(p.shape), params_of())
    with jax.set_mesh(DATA):
        state = tx.init(params)
    specs = ja.state_specs(state, "data")

    def local(params, state, x):
        return tx.update(grads(params, x), state, params)

    step = jax.shard_map(
        local, mesh=DATA, in_specs=(P(), specs, P("data")), out_specs=(P(), specs), check_vma=False
    )
    report = ja.audit(step, params, state, struct(DATA, P("data"), ROWS, IN))
    large = [c for c in report.collectives if c.gradient_sized]
    assert large
    assert all(c.in_branch and not c.in_loop for c in large)
    assert GRADIENT <= report.outside_bytes <= GRADIENT + 32  # and scalars
    report.assert_deferred()


def test_a_window_of_this_library_is_deferred():
    f = ja.value_and_grad(
        lambda p, x: ja.mean(jnp.tanh(x @ p["w"] + p["b"][None])),
        num_microbatches=2, axis_name="data",
    )  # fmt: skip
    step = jax.shard_map(f, mesh=DATA, in_specs=(P(), P("data")), out_specs=P())
    report = ja.audit(step, params_of(), struct(DATA, P("data"), ROWS, IN))
    assert report.loop_bytes == 0
    assert 1 <= report.reduced_gradients <= 1.05
    assert {s.dtype for s in report.loop_sums} == {"float32"}
    report.assert_deferred()


# Rows, sums, donation, memory


def test_a_batch_cut_across_its_shards_moves_rows():
    def step(params, batch):
        return fold(params, batch.reshape(K, ROWS, IN))

    report = ja.audit(step, params_of(), struct(DATA, P("data"), K * ROWS, IN))
    assert report.moved_rows
    assert all("batch" in c.moves for c in report.moved_rows)
    assert sum(c.total_bytes for c in report.moved_rows) >= 4 * K * ROWS * IN
    assert not any(c.gradient_sized for c in report.moved_rows)
    assert "rows of the batch move" in str(report)


def test_a_batch_cut_along_its_shards_moves_none():
    assert ja.audit(fold, params_of(), batch_of()).moved_rows == ()
    assert ja.audit(deferred, params_of(), batch_of()).moved_rows == ()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_dtype_of_what_a_loop_sums(dtype):
    report = ja.audit(fold, params_of(dtype=dtype), batch_of(dtype=dtype))
    assert {(s.dtype, s.shape, s.parameter, s.trip_count) for s in report.loop_sums} == {
        (jnp.dtype(dtype).name, (IN, OUT), "params['w']", K),
        (jnp.dtype(dtype).name, (OUT,), "params['b']", K),
    }
    low = dtype == jnp.bfloat16
    assert all(s.low_precision == low for s in report.loop_sums)
    assert any("less than float32" in w for w in report.warnings) == low
    assert report.gradient_bytes == GRADIENT  # sums are reduced in float32


def test_what_a_loop_only_passes_on_or_stacks_is_no_sum():
    def step(params, batch):  # the outputs are stacked into an array of the shape of `params`
        return lax.scan(lambda c, x: (c + jnp.sum(x), jnp.sin(x)), 0.0, batch)[1] + params

    report = ja.audit(step, jnp.ones((8, 3)), jnp.ones((8, 3)))
    assert report.loop_sums == ()


def test_donation():
    def step(params, unused, batch, scale):
        return jax.tree.map(lambda p, g: p - g, params, fold(params, batch)), scale[:1]

    args = params_of(), jnp.ones(7), batch_of(), jnp.ones(3)
    kept = ja.audit(step, *args)
    assert kept.donated == ()
    report = ja.audit(jax.jit(step, donate_argnums=(0, 1, 3)), *args)
    found = {d.argument: (d.bytes, d.aliased, d.used) for d in report.donated}
    assert found == {
        "params['b']": (4 * OUT, True, True),
        "params['w']": (4 * IN * OUT, True, True),
        "args[1]": (28, False, False),
        "scale": (12, False, True),
    }
    assert report.memory.aliased == GRADIENT
    assert kept.memory.aliased == 0
    assert report.memory.arguments == kept.memory.arguments
    text = "donated: 4 buffer(s), 568 B; not reused: 2"
    assert text in str(report)
    assert sum("was donated, but" in w for w in report.warnings) == 2


def test_memory_is_what_the_compiler_says():
    compiled = jax.jit(fold).lower(params_of(), batch_of()).compile()
    memory, stats = ja.audit(compiled).memory, compiled.memory_analysis()
    assert memory.arguments == GRADIENT + 4 * K * ROWS // 8 * IN
    assert memory.temporaries == stats.temp_size_in_bytes > 0
    assert memory.peak == (
        stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    )


# What is given


def test_lowered_and_compiled_steps_give_the_same_report():
    report = ja.audit(fold, params_of(), batch_of())
    lowered = jax.jit(fold).lower(params_of(), batch_of())
    assert ja.audit(lowered) == ja.audit(lowered.compile()) == report


def test_arrays_keywords_and_pmap():
    params = jax.tree.map(lambda p: jnp.ones(p.shape), params_of())
    batch = jnp.ones((K, ROWS, IN))
    report = ja.audit(jax.jit(deferred), params, batch)
    assert (report.outside_bytes, report.axis_name) == (GRADIENT, ("data",))
    alone = ja.audit(fold, params=params, batch=batch)
    assert (alone.collectives, alone.num_devices, alone.mesh) == ((), 1, None)
    assert alone.gradient_bytes == GRADIENT
    alone.assert_deferred()
    by_pmap = jax.pmap(lambda p, x: lax.psum(fold(p, x), "i"), axis_name="i", in_axes=(None, 0))
    report = ja.audit(by_pmap, params, jnp.ones((8, K, 2, IN)))
    assert report.outside_bytes == GRADIENT
    report.assert_deferred()


@pytest.mark.parametrize("how", ["params item", "gradient_like"])
def test_the_gradient_of_a_larger_state(how):
    params = params_of()
    moments = {"w": params["w"], "b": params["b"]}

    def step(state, batch):
        g = fold(state[first], batch)
        return jax.tree.map(jnp.add, state[first], g), jax.tree.map(jnp.add, state["moments"], g)

    if how == "params item":
        first = "params"
        report = ja.audit(step, {"params": params, "moments": moments}, batch_of())
    else:
        first = "model"
        state = {"model": params, "moments": moments}
        report = ja.audit(step, state, batch_of(), gradient_like=params)
        assert ja.audit(step, state, batch_of()).gradient_bytes == 2 * GRADIENT
    assert report.gradient_bytes == GRADIENT
    assert report.axis_name == ("data",)
    assert report.loop_gradients == K


def test_keys_and_integers_are_no_parameters():
    def step(key, batch):
        return jax.random.normal(key, batch.shape) * batch

    report = ja.audit(step, jax.random.key(0), jnp.ones(3))
    assert report.gradient_bytes == 0
    with pytest.raises(ValueError, match="gradient_like"):
        report.assert_deferred()
    report = ja.audit(jax.jit(step, donate_argnums=0), jax.random.key(0), jnp.ones(3))
    assert [d.argument for d in report.donated] == ["key"]


def test_static_mistakes():
    compiled = jax.jit(jnp.sin).lower(1.0).compile()
    with pytest.raises(TypeError, match="compiled for its arguments already"):
        ja.audit(compiled, 1.0)
    with pytest.raises(TypeError, match="`fn` must be a function"):
        ja.audit(3)
    with pytest.raises(TypeError, match="`axis_name`"):
        ja.audit(jnp.sin, 1.0, axis_name=3)
    with pytest.raises(ValueError, match="`min_bytes`"):
        ja.audit(jnp.sin, 1.0, min_bytes=0)


# The report


def test_as_dict_is_json():
    report = ja.audit(jax.jit(fold, donate_argnums=0), params_of(), batch_of())
    plain = report.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["loop_bytes"] == K * GRADIENT
    assert plain["collectives"][0]["trip_count"] == K
    assert plain["memory"]["peak"] == report.memory.peak
    assert plain["donated"][0]["argument"] == "params['b']"
    empty = ja.audit(lambda n: n + 1, jnp.int32(3)).as_dict()
    assert empty["loop_gradients"] is None
    json.dumps(empty, allow_nan=False)


def test_the_table():
    text = str(ja.audit(fold, params_of(), batch_of()))
    for part in (
        "8 device(s), mesh data=8, axes that count: data",
        f"one gradient: {GRADIENT} B",
        f"collectives in loops: 2.58 KiB a call, {K}.00 gradients reduced",
        "collectives outside: 0 B a call",
        "all-reduce",
        "over data  float32[",
        f"x {K}",
        "loop-carried sums: 2",
        "memory: peak",
        "warnings:",
    ):
        assert part in text
    assert not any(line.endswith(" ") for line in text.splitlines())


# The reading of text that this machine's compiler does not write


ASYNC = """
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {1,0}: (3, {}, must-alias) }, entry_computation_layout={(f32[4]{0})->f32[4]{0}}, replica_count=2, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b), metadata={op_name="calls=%fused, body=%nothing \\"quoted\\""}
}

%wrapped (p: bf16[8,4]) -> bf16[1,4] {
  %p = bf16[8,4]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %rs = bf16[1,4]{1,0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

%body (c: (s32[], f32[4,4], bf16[8,4])) -> (s32[], f32[4,4], bf16[8,4]) {
  %c = (s32[]{:T(128)}, f32[4,4]{1,0:T(8,128)S(1)}, /*index=2*/bf16[8,4]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  %copy = s32[]{:T(128)S(6)} copy(%i)
  %one = s32[] constant(1)
  %next = s32[] add(%copy, %one)
  %x = f32[4,4]{1,0:T(8,128)} get-tuple-element(%c), index=1
  %w = bf16[8,4]{1,0} get-tuple-element(%c), index=2
  %start = ((f32[4,4]{1,0}), (f32[32,4]{1,0})) all-gather-start(%x), replica_groups={}, dimensions={0}
  %done = f32[32,4]{1,0} all-gather-done(%start)
  %sent = (f32[4,4]{1,0}, f32[4,4]{1,0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0},{2,2}}
  %got = f32[4,4]{1,0} collective-permute-done(%sent)
  %rs-start = ((bf16[8,4]{1,0}), bf16[1,4]{1,0}, u32[]) async-start(%w), calls=%wrapped
  %rs-done = bf16[1,4]{1,0} async-done(%rs-start)
  ROOT %out = (s32[], f32[4,4]{1,0}, bf16[8,4]{1,0}) tuple(%next, %got, %w)
}

%condition (c.1: (s32[], f32[4,4], bf16[8,4])) -> pred[] {
  %c.1 = (s32[], f32[4,4]{1,0}, bf16[8,4]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%c.1), index=0
  %n = s32[] constant(7)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (x.1: f32[4,4], w.1: bf16[8,4]) -> f32[4,4] {
  %x.1 = f32[4,4]{1,0} parameter(0), metadata={op_name="x"}
  %w.1 = bf16[8,4]{1,0} parameter(1)
  %zero = s32[] constant(2)
  %init = (s32[], f32[4,4]{1,0}, bf16[8,4]{1,0}) tuple(%zero, %x.1, %w.1)
  %loop = (s32[], f32[4,4]{1,0}, bf16[8,4]{1,0}) while(%init), condition=%condition, body=%body, metadata={op_name="jit(step)/while"}
  %r = f32[4,4]{1,0} get-tuple-element(%loop), index=1
  %ar = (f32[4,4]{1,0}, f8e4m3fn[3]{0}) all-reduce-start(%r, %q), to_apply=%add, channel_id=1
  %unknown = f32[4,4]{1,0} some-new-thing(%ar), note={"a": ")}, b=%c"}
  ROOT %end = f32[4,4]{1,0} get-tuple-element(%ar), index=0
}
"""  # noqa: E501


def test_parsing_asynchronous_operations_and_tiled_layouts():
    program = hlo.parse(ASYNC)
    assert (program.name, program.num_devices) == ("jit_step", 8)
    assert program.aliased == {1, 3}
    assert program.entry.parameters[0].op_name == "x"
    assert program.computations["add"].root.op_name == 'calls=%fused, body=%nothing "quoted"'
    assert not program.computations["add"].root.called
    found = {
        op.kind: (frame.loops, op.arrays, groups.groups_of(op, 8))
        for frame, op in frames.walk(program)
        if op.kind
    }
    names = {op.kind: frame.op_name for frame, op in frames.walk(program) if op.kind}
    assert names["reduce-scatter"] == names["all-gather"] == "jit(step)/while"
    assert names["all-reduce"] == ""
    everyone, four, flag = [list(range(8))], hlo.Array("f32", (4, 4)), hlo.Array("u32", ())
    assert found == {
        "all-gather": ((5,), (four, hlo.Array("f32", (32, 4))), everyone),
        "collective-permute": ((5,), (four, four, flag, flag), [[0, 1], [1, 0]]),
        "reduce-scatter": ((5,), (hlo.Array("bf16", (1, 4)),), everyone),
        "all-reduce": ((), (four, hlo.Array("f8e4m3fn", (3,))), everyone),
    }


def test_where_values_come_from_and_go_to():
    program = hlo.parse(ASYNC)
    read = flow.Flow(program)
    found = {op.kind: (frame.computation.name, op) for frame, op in frames.walk(program) if op.kind}
    nodes = {kind: flow.Node(home, op.operands[0]) for kind, (home, op) in found.items()}
    # `x` is replaced in every iteration, `w` is passed on into the wrapped computation.
    origins = {kind: read.sources(node, moved=True) for kind, node in nodes.items()}
    assert origins == {
        "all-gather": {0},  # by a copy of itself
        "collective-permute": {0},
        "reduce-scatter": {1},
        "all-reduce": {0},
    }
    reached, _, _ = read.reach(flow.Node("body", "sent", 1))
    assert {flow.Node("body", "got"), flow.Node("main", "r"), flow.Node("body", "x")} <= {*reached}
    # It only permutes what it carries, and the weights stay: nothing is summed.
    assert not any(read.is_sum("body", number) for number in range(3))


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "name"),
    [
        ("f32", (3, 2), 24, "float32[3,2]"),
        ("bf16", (3,), 6, "bfloat16[3]"),
        ("pred", (), 1, "bool[]"),
        ("s4", (3,), 2, "int4[3]"),
        ("u8", (0, 5), 0, "uint8[0,5]"),
        ("c128", (2,), 32, "complex128[2]"),
        ("f8e4m3fn", (16,), 16, "float8_e4m3fn[16]"),
        ("token", (), 0, "token[]"),
    ],
)
def test_types(dtype, shape, size, name):
    array = hlo.Array(dtype, shape)
    assert (array.bytes, str(array)) == (size, name)
    assert array.inexact == (name[:2] in ("fl", "bf", "co"))
    text = f"{dtype}[{','.join(map(str, shape))}]{{0:T(8,128)(2,1)S(1)}}"
    assert hlo.arrays(f"({text}, {text})") == (array, array)


def test_text_without_an_entry():
    with pytest.raises(ValueError, match="entry computation"):
        hlo.parse("module @jit_f {}")


# The command


EXAMPLE = """
    import jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P

    def good():
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        batch = jax.ShapeDtypeStruct((5, 16, 32), jnp.float32,
                                     sharding=NamedSharding(mesh, P(None, "data")))
        params = jax.ShapeDtypeStruct((32, 4), jnp.float32, sharding=NamedSharding(mesh, P()))
        def step(params, batch):
            grad = jax.grad(lambda p, x: jnp.sum((x @ p) ** 2))
            return jax.lax.scan(lambda c, x: (c + grad(params, x), None), params * 0, batch)[0]
        return step, (params, batch)

    def keywords():
        step, (params, batch) = good()
        return step, [params], {"batch": batch}

    def bad():
        return 3

    def needs(number):
        return good()

    constant = 3
"""


@pytest.fixture
def example(tmp_path, monkeypatch):
    (tmp_path / "audited_example.py").write_text(textwrap.dedent(EXAMPLE))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("audited_example", None)


@pytest.mark.parametrize("function", ["good", "keywords"])
def test_command(example, capsys, function):
    assert command.main(["audit", f"audited_example:{function}"]) == 0
    assert "collectives in loops: 2.5 KiB a call, 5.00 gradients" in capsys.readouterr().out
    assert command.main(["audit", f"audited_example:{function}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loop_bytes"] == 2560
    assert command.main(["audit", f"audited_example:{function}", "--assert-deferred"]) == 1
    assert "5.00 gradients are reduced in loops" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("audited_example", "expected `module:function`"),
        ("no_such_module:f", "no module 'no_such_module'"),
        ("audited_example:missing", "has no 'missing'"),
        ("audited_example:constant", "must be a function"),
        ("audited_example:bad", "must return (fn, args)"),
        ("audited_example:needs", "must need no arguments"),
    ],
)
def test_command_mistakes(example, capsys, target, message):
    assert command.main(["audit", target]) == 2
    assert message in capsys.readouterr().err


def test_command_in_a_process_of_its_own(example):
    run = subprocess.run(
        [sys.executable, "-m", "jaxaccum", "audit", "audited_example:good",
         "--devices", "8", "--json", "--axis-name", "data"],
        cwd=example, capture_output=True, text=True, check=True,
        env={**{k: v for k, v in __import__("os").environ.items() if k != "XLA_FLAGS"},
             "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )  # fmt: skip
    report = json.loads(run.stdout)
    assert (report["num_devices"], report["loop_bytes"]) == (8, 2560)
