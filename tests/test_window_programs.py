"""The programs that a window traces and compiles: how often, how large, and with what memory."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from oracles import ROWS, cut_name, cut_rows, problem, terms_loss, token_loss

import jaxaccum as ja
from jaxaccum.core import compat

LOSSES = pytest.mark.parametrize("loss_fn", [token_loss, terms_loss], ids=["one term", "terms"])


class Counted:
    """A loss function that counts how often it is traced and how often it is evaluated."""

    def __init__(self, loss_fn):
        self.loss_fn, self.traces, self.evaluations = loss_fn, 0, 0

    def __call__(self, params, batch):
        self.traces += 1
        jax.debug.callback(self.evaluate)
        return self.loss_fn(params, batch)

    def evaluate(self):
        self.evaluations += 1


def equations(jaxpr):
    """All equations of a jaxpr, those of inner programs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from equations(getattr(inner, "jaxpr", inner))


def primitives(fn, *args):
    """How often each primitive stands in the traced program."""
    return collections.Counter(
        eqn.primitive.name for eqn in equations(jax.make_jaxpr(fn)(*args).jaxpr)
    )


# Traces and evaluations


@LOSSES
@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}], ids=["plain", "skip"])
@pytest.mark.parametrize(
    ("cut", "shapes"),
    [
        ({"num_microbatches": 1}, 1),
        ({"num_microbatches": 7}, 1),
        ({"microbatch_size": 2}, 2),
        ({"num_microbatches": 3}, 2),
    ],
    ids=lambda value: cut_name(value) if isinstance(value, dict) else None,
)
def test_the_loss_is_traced_once_for_each_micro_batch_shape(loss_fn, options, cut, shapes):
    params, batch = problem(1)
    for make in (ja.value_and_grad, ja.accumulate):
        counted = Counted(loss_fn)
        jax.eval_shape(make(counted, **cut, **options), params, batch)
        assert counted.traces == shapes
    counted = Counted(loss_fn)
    jax.eval_shape(ja.denominators(counted, **cut), params, batch)
    assert counted.traces == shapes


@LOSSES
@pytest.mark.parametrize("cut", [{"num_microbatches": 1}, {"num_microbatches": 3}], ids=cut_name)
def test_the_loss_is_evaluated_once_for_each_micro_batch(loss_fn, cut):
    params, batch = problem(2)
    counted = Counted(loss_fn)
    f = jax.jit(ja.value_and_grad(counted, **cut))
    jax.block_until_ready(f(params, batch))
    jax.effects_barrier()
    assert counted.evaluations == len(cut_rows(ROWS, **cut))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_only_real_micro_batches_are_evaluated(number):
    params, batch = problem(2)
    counted = Counted(token_loss)
    f = jax.jit(ja.value_and_grad(counted, num_microbatches=3))
    jax.block_until_ready(f(params, batch, num_real=jnp.int32(number)))
    jax.effects_barrier()
    assert counted.evaluations == number


@LOSSES
def test_no_recompilation_for_another_num_real(loss_fn):
    params, batch = problem(3)
    counted = Counted(loss_fn)
    f = jax.jit(ja.value_and_grad(counted, num_microbatches=7))
    for number in range(8):
        f(params, batch, num_real=number)
    assert (counted.traces, f._cache_size()) == (1, 1)


# What is traced


def written(fn, *args):
    """How many equations are traced and lowered: a program that is called twice counts once."""
    seen, found = set(), 0
    queue = [jax.make_jaxpr(fn)(*args).jaxpr]
    while queue:
        jaxpr = queue.pop()
        if id(jaxpr) not in seen:
            seen.add(id(jaxpr))
            found += len(jaxpr.eqns)
            for eqn in jaxpr.eqns:
                queue += [getattr(p, "jaxpr", p) for p in jex.jaxprs_in_params(eqn.params)]
    return found


@pytest.mark.parametrize("skip", [False, True, "window"])
def test_a_leaf_more_adds_less_than_half_an_equation_to_its_gradient(skip):
    def total(params, batch):
        return jnp.sum(batch) * sum(jnp.sum(leaf * leaf) for leaf in params)

    def more(number):
        args = [jnp.ones((2, 3))] * number, jnp.ones((4, 3))
        f = ja.value_and_grad(
            lambda *args: ja.Mean(total(*args), 3), num_microbatches=4, skip_nonfinite=skip
        )
        return written(f, *args) - written(jax.value_and_grad(total), *args)

    assert more(224) - more(96) < 64


@pytest.mark.parametrize("cut", [{"num_microbatches": 7}, {"microbatch_size": 2}], ids=cut_name)
def test_the_counting_pass_is_stripped_of_the_model(cut):
    params, batch = problem(4)
    assert primitives(terms_loss, params, batch)["dot_general"] == 1
    assert primitives(ja.denominators(terms_loss, **cut), params, batch)["dot_general"] == 0


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_the_counting_pass_is_stripped_through_wrappers(wrap):
    params, batch = problem(4)
    d = ja.denominators(wrap(terms_loss), num_microbatches=7)
    assert primitives(d, params, batch)["dot_general"] == 0


def test_the_counting_pass_drops_what_only_a_callback_reads():
    def loss_fn(params, batch):
        loss = terms_loss(params, batch)
        jax.debug.print("{}", loss["token"].value)
        return loss

    params, batch = problem(4)
    d = ja.denominators(loss_fn, num_microbatches=7)
    assert primitives(d, params, batch)["dot_general"] == 0


def test_several_terms_cost_one_forward_and_one_backward():
    params, batch = problem(4)
    counts = [
        primitives(ja.value_and_grad(fn, num_microbatches=7), params, batch)["dot_general"]
        for fn in (token_loss, terms_loss)
    ]
    assert counts == [2, 2]


@LOSSES
@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}], ids=["plain", "skip"])
def test_the_traced_program_does_not_grow_with_the_window(loss_fn, options):
    sizes = []
    for number in (2, 64):
        f = ja.value_and_grad(loss_fn, num_microbatches=number, **options)
        sizes.append(sum(primitives(f, *problem(5, 64)).values()))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_are_carried_in_float32(dtype):
    def loss_fn(w, x):
        return ja.mean(x @ w)

    w, x = jnp.ones(5, dtype), jnp.ones((4, 5), dtype)
    jaxpr = jax.make_jaxpr(ja.value_and_grad(loss_fn, num_microbatches=4))(w, x)
    (scan,) = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "scan"]
    carries = scan.outvars[: compat.scan_sizes(scan.params)[1]]
    sums = [carry.aval.dtype for carry in carries if carry.aval.shape == (5,)]
    assert sums == [jnp.float32]


# What is compiled


@LOSSES
def test_a_window_of_one_compiles_without_a_loop(loss_fn):
    params, batch = problem(6)
    for cut in ({"num_microbatches": 1}, {"microbatch_size": ROWS}):
        f = ja.value_and_grad(loss_fn, **cut)
        assert primitives(f, params, batch).keys().isdisjoint({"scan", "while"})
        assert " while(" not in jax.jit(f).lower(params, batch).compile().as_text()


def test_a_window_of_many_compiles_to_one_loop():
    params, batch = problem(6, 8)
    text = jax.jit(ja.value_and_grad(token_loss, num_microbatches=4)).lower(params, batch)
    assert text.compile().as_text().count(" while(") == 1


def temporaries(number, rows=32, width=128):
    """Temporary bytes of a compiled window with micro-batches of `rows` rows."""

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return ja.mean(x * x)

    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 4
    batch = jax.ShapeDtypeStruct((number * rows, width), jnp.float32)
    f = jax.jit(ja.value_and_grad(loss_fn, num_microbatches=number))
    return f.lower(params, batch).compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_window():
    two = temporaries(2)
    assert temporaries(8) <= 1.02 * two
    assert temporaries(64) <= 1.02 * two


def test_memory_is_that_of_one_micro_batch():
    """The activations of sixteen times the rows in one pass are many times larger."""
    assert temporaries(1, rows=32 * 16) > 3 * temporaries(16)


@LOSSES
def test_no_transfer_to_the_host(loss_fn):
    params, batch = jax.device_put(problem(7))
    f = jax.jit(ja.value_and_grad(loss_fn, num_microbatches=3, skip_nonfinite=True))
    f(params, batch)
    with jax.transfer_guard("disallow"):
        loss, _ = f(params, batch)
    assert np.isfinite(loss)
