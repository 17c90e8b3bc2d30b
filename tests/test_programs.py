"""The reader of programs: primitives that nobody knows, control flow, effects, custom rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

import jaxaccum as ja
from jaxaccum.core import labels, programs

opaque_p = jex.Primitive("opaque")  # the identity of its first input, but nothing says so
opaque_p.def_impl(lambda x, *rest: x)
opaque_p.def_abstract_eval(lambda x, *rest: x)
mlir.register_lowering(opaque_p, mlir.lower_fun(lambda x, *rest: x, multiple_results=False))
batching.primitive_batchers[opaque_p] = lambda xs, dims: (opaque_p.bind(*xs), dims[0])
ad.primitive_jvps[opaque_p] = lambda xs, ts: (opaque_p.bind(*xs), ad.instantiate_zeros(ts[0]))


@jax.custom_vjp
def counted(w, x):
    """A fused loss: a total that depends on `w`, and a count that does not."""
    return jnp.sum(w * x), jnp.sum(x > 0).astype(jnp.float32)


counted.defvjp(lambda w, x: (counted(w, x), x), lambda x, cts: (jnp.sum(cts[0] * x), None))


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))


@jax.custom_jvp
def stopped(x):
    return x


stopped.defjvp(lambda xs, ts: (xs[0], jnp.zeros_like(ts[0])))


def through_ref(w, x):
    ref = jax.new_ref(jnp.zeros(()))
    for value in (w, x.sum()):
        ref[...] += value
    return ref[...]


def through_ref_in_loop(w, x):
    ref = jax.new_ref(jnp.zeros(()))

    def body(read, x):
        read = read + ref[...]
        ref[...] = w * x
        return read, x

    return lax.scan(body, jnp.zeros(()), x)[0]


def shifted(w, x):
    """After three steps what went in last of the carry has come to its first place."""
    return lax.scan(lambda c, _: ((c[1], c[2], c[2]), None), (0.0, 0.0, w), x)[0][0]


def while_below(limit, step_fn, start):
    return lax.while_loop(lambda c: c < limit, step_fn, start)


def sorted_beside(w, x):
    return lax.sort((w * x, x), num_keys=1)[1].sum()


DEPENDS = {
    lambda w, x: opaque_p.bind(w): True,
    lambda w, x: opaque_p.bind(x.sum(), w): True,
    lambda w, x: opaque_p.bind(x.sum()): False,
    lambda w, x: lax.stop_gradient(w): False,
    lambda w, x: jax.jit(lax.stop_gradient)(w) + jnp.argmax(w * x).astype(jnp.float32): False,
    lambda w, x: jnp.sum(w * x > 0.5).astype(jnp.float32): False,
    lambda w, x: lax.cond(x[0] > 0, lambda w: 1.0, lambda w: w, w): True,
    lambda w, x: lax.cond(w > 0, lambda: 1.0, lambda: 2.0): False,
    lambda w, x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + w), (0, 0.0))[
        1
    ]: True,
    lambda w, x: lax.while_loop(lambda c: c[1] < w, lambda c: (c[0], c[1] + 1.0), (w, 0.0))[
        1
    ]: False,
    shifted: True,
    sorted_beside: False,
    lambda w, x: jax.checkpoint(jnp.sin)(w): True,
    lambda w, x: counted(w, x)[1]: False,
    lambda w, x: counted(w, x)[0]: True,
    lambda w, x: straight_through(w): True,
    lambda w, x: stopped(w): False,
    lambda w, x: jax.nn.relu(w): True,
    through_ref: True,
    through_ref_in_loop: True,
}


@pytest.mark.parametrize(("fn", "answer"), DEPENDS.items())
def test_what_has_a_derivative_in_the_parameters(fn, answer):
    program = programs.stage(fn, 1.0, jnp.arange(3.0))
    assert labels.moved(program, [True, False]) == [answer]


def test_a_weight_behind_an_unknown_primitive():
    """Of the parameters it may depend; of the batch alone it does not, whatever it is."""
    x = jnp.arange(1.0, 5.0)
    good = ja.value_and_grad(
        lambda w, x: ja.Mean(jnp.sum(w * x), opaque_p.bind(jnp.sum(x > 1.5))), num_microbatches=2
    )
    loss, grad = good(2.0, x)
    assert (loss, grad) == (20 / 3, 10 / 3)
    bad = ja.value_and_grad(
        lambda w, x: ja.Mean(jnp.sum(w * x), opaque_p.bind(w)), num_microbatches=2
    )
    with pytest.raises(ValueError, match="weight of `loss` has a gradient"):
        bad(2.0, x)


# Losses that were reduced over devices already


MESH = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def over_devices(loss_fn, *, check_vma=False):
    f = ja.value_and_grad(loss_fn, num_microbatches=1, axis_name="data")
    x = jnp.arange(1.0, 9.0)
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    return jax.shard_map(f, mesh=MESH, **specs)(jnp.float32(1), x)


def psum(x):
    return lax.psum(x, "data")


def in_scan(x):
    return lax.scan(lambda c, y: (c + psum(y), None), 0.0, x[None])[0]


def late_in_scan(x):
    return lax.scan(lambda c, _: ((c[1], psum(x)), None), (x, x), None, length=2)[0][0]


def written_to_a_ref(x):
    ref = jax.new_ref(jnp.zeros(()))
    ref[...] += psum(x)
    return ref[...]


REDUCED = [
    lambda x: opaque_p.bind(psum(x)),
    lambda x: 2.0 * opaque_p.bind(jnp.stack([psum(x), psum(x)])).sum() + x,
    in_scan,
    late_in_scan,
    lambda x: lax.cond(x > 0, psum, lambda x: x, x),
    lambda x: lax.cond(x > 0, lambda x: x, lambda x: jax.jit(psum)(x), x),
    lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, psum(x)), (0, x))[1],
    lambda x: jax.checkpoint(psum)(x),
    lambda x: jax.checkpoint(lambda x: lax.scan(lambda c, _: (psum(c), None), x, None, 1)[0])(x),
    lambda x: lax.optimization_barrier((x, psum(x)))[1],
    written_to_a_ref,
]


@pytest.mark.parametrize("reduced", REDUCED)
def test_a_reduced_loss_is_found_wherever_it_was_reduced(reduced):
    with pytest.raises(ValueError, match=r"takes a `psum.* of its total over the axis 'data'"):
        over_devices(lambda w, x: ja.Mean(reduced(jnp.sum(w * x)), x.shape[0]))


def test_a_loop_that_runs_hands_on_what_its_steps_return():
    over_devices(
        lambda w, x: ja.Mean(
            lax.scan(lambda c, _: (jnp.sum(w * x), None), psum(w), None, length=2)[0], x.shape[0]
        )
    )
    with pytest.raises(ValueError, match="local sum"):
        over_devices(
            lambda w, x: ja.Mean(while_below(-1.0, lambda c: jnp.sum(w * x), psum(w)), x.shape[0])
        )


def test_the_message_names_what_is_not_known():
    with pytest.raises(ValueError, match="takes a `psum` behind `opaque` of its weight"):
        over_devices(lambda w, x: ja.Mean(jnp.sum(w * x), opaque_p.bind(psum(jnp.sum(x > 0)))))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    "statistic",
    [
        jnp.tanh,
        lambda mean: lax.scan(lambda c, _: (jnp.tanh(c), None), mean, None, length=1)[0],
    ],
)
def test_a_statistic_of_all_devices_may_be_a_term(statistic, check_vma):
    """Each device returns it with the weight 1, so the mean over the devices is the statistic."""

    def loss_fn(w, x):
        return ja.Mean(statistic(lax.pmean(jnp.mean(w * x), "data") / 8), 1.0)

    got = over_devices(loss_fn, check_vma=check_vma)
    want = jax.value_and_grad(lambda w: jnp.tanh(w * 4.5 / 8))(1.0)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_kernel_may_use_a_statistic_of_all_devices():
    def loss_fn(w, x):
        return ja.mean(opaque_p.bind(w * x, lax.pmean(jnp.mean(x), "data")))

    assert_values(over_devices(loss_fn), (4.5, 4.5))


def assert_values(got, want):
    assert tuple(map(float, got)) == want


def total(w, x):
    return jnp.sum(w * x)


def combined(fn, *, check_vma):
    """An output of a `microbatch`, and the same beside a loss."""

    def loss_fn(w, x):
        return ja.mean(w * x), fn(w, x)

    g = ja.microbatch(fn, num_microbatches=1, axis_name="data")
    f = ja.value_and_grad(loss_fn, num_microbatches=1, axis_name="data", has_aux=True)
    specs = {"mesh": MESH, "in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    args = jnp.float32(1), jnp.arange(1.0, 9.0)
    aux_fn = jax.shard_map(lambda w, x: f(w, x)[0][1], **specs)
    return jax.jit(jax.shard_map(g, **specs)), jax.jit(aux_fn), args


COUNTED_TWICE = {
    lambda w, x: ja.Sum(psum(total(w, x))): "`output`, a `ja.Sum`, is",
    lambda w, x: {
        "n": ja.Sum(opaque_p.bind(jnp.tanh(psum(total(w, x)))))
    }: r"`output\['n'\]`, a `ja",
    lambda w, x: ja.Mean(jnp.tanh(psum(total(w, x))), jnp.sum(x > 2)): "the total of `output` is",
    lambda w, x: ja.Mean(total(w, x), psum(jnp.sum(x > 2))): "the weight of `output` is",
}
COUNTED_ONCE = {
    lambda w, x: ja.Sum(total(w, x) - lax.pmean(total(w, x), "data")): 0,
    lambda w, x: ja.Sum(jnp.float32(1)): 4,
    lambda w, x: ja.Mean(psum(total(w, x)), psum(jnp.sum(x > 2))): 6,
    lambda w, x: ja.Mean(lax.pmean(total(w, x), "data"), 1.0): 9,
    lambda w, x: ja.Last(psum(total(w, x))): 36,
    lambda w, x: ja.Max(psum(total(w, x))): 36,
}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(("fn", "message"), COUNTED_TWICE.items())
def test_outputs_that_would_count_once_for_each_device(fn, message, check_vma):
    *routes, args = combined(fn, check_vma=check_vma)
    for route in routes:
        with pytest.raises(ValueError, match=message + ".* the same on each device, as a `psum`"):
            route(*args)


@pytest.mark.parametrize(("fn", "value"), COUNTED_ONCE.items())
def test_outputs_that_may_hold_what_is_the_same_on_each_device(fn, value):
    *routes, args = combined(fn, check_vma=False)
    assert [float(route(*args)) for route in routes] == [value, value]


def test_a_function_of_a_reduced_total_needs_a_weight_like_it():
    """Over this device's own count it would be a device count too large."""
    with pytest.raises(ValueError, match=r"the total of `loss\['a'\]` is the same on each device"):
        over_devices(lambda w, x: {"a": ja.Mean(jnp.tanh(psum(total(w, x))), jnp.sum(x > 0))})


# What a program does beside its results


def two_terms(w, x, number):
    return ja.mean(w * x), ja.Mean(w * w, number)


def test_a_count_that_is_kept_in_a_ref_is_counted():
    """The counting pass leaves out what only prints, not what writes."""

    def loss_fn(w, x):
        ref = jax.new_ref(jnp.zeros((), jnp.int32))
        ref[...] += jnp.sum(x > 1.5)
        return two_terms(w, x, ref[...])

    assert ja.denominators(loss_fn, num_microbatches=2)(1.0, jnp.arange(4.0)) == (4, 2)


def printing(x):
    jax.debug.print("seen {}", x)
    return x


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda fn: lambda x: lax.scan(lambda c, _: (fn(c), None), x, None, length=1)[0],
        lambda fn: lambda x: lax.cond(x > 0, fn, lambda x: x, x),
        lambda fn: jax.jit(jax.jit(fn)),
    ],
    ids=["jit", "checkpoint", "scan", "cond", "jit in jit"],
)
def test_a_micro_batch_prints_once(wrap, capsys):
    """What is counted before the fold is counted in silence, however deep it prints."""

    def loss_fn(w, x):
        return two_terms(w, x, wrap(printing)(x.sum()))

    loss, _ = jax.jit(ja.value_and_grad(loss_fn, num_microbatches=2))(1.0, jnp.arange(1.0, 5.0))
    jax.effects_barrier()
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "seen 4.0", "seen 6.0"]
    np.testing.assert_allclose(loss, 2.5 + 2 / 10, rtol=1e-6)


# Over the window's axis


def test_an_unknown_primitive_between_collectives():
    """It has a gradient, and is not run again where its result can be kept."""

    def loss_fn(w, x):
        h = opaque_p.bind(w * x)
        return ja.mean((h - lax.pmean(h.mean(), "window")) ** 2)

    def full(w, x):
        return jnp.mean((w * x - jnp.mean(w * x)) ** 2)

    f = ja.window_axis.value_and_grad(loss_fn, num_microbatches=4)
    x = jnp.arange(8.0)
    np.testing.assert_allclose(f(2.0, x), jax.value_and_grad(full)(2.0, x), rtol=1e-6)


# Cost


def test_reading_a_program_of_many_leaves_is_linear():
    """A program twice as long is walked through twice as many equations, not four times."""

    def visits(number):
        seen = []

        def rule(eqn, found):
            seen.append(eqn)
            return labels.joined(eqn, found)

        def fn(*xs):
            return jax.jit(lambda *xs: functools.reduce(jnp.add, xs))(*xs)

        program = programs.stage(fn, *[1.0] * number)
        labels.follow(program.closed, [None] * number, rule)
        return len(seen)

    assert visits(400) <= 2.1 * visits(200)
