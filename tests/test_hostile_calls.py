"""Every public function with arguments that are wrong in structure, shape, dtype or kind.

Each call must raise `TypeError` or `ValueError`, in a message that begins with the function's own
name and holds the argument in backticks.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxaccum as ja

ROWS, W = jnp.arange(1.0, 5.0), jnp.float32(1)
PARAMS = {"a": jnp.ones(3), "b": W}
SGD = optax.sgd(1.0)


class Odd:
    """Neither an array nor a tree."""


def loss_fn(w, x):
    return ja.mean(w * x)


def window(loss_fn=loss_fn, w=W, x=ROWS, **options):
    named = {n: options.pop(n) for n in ("key", "num_real", "denominators") if n in options}
    return ja.value_and_grad(loss_fn, **{"num_microbatches": 2, **options})(w, x, **named)


def returning(loss):
    return window(lambda w, x: loss)


def with_aux(aux_fn, x=ROWS):
    return window(lambda w, x: (ja.mean(w * x), aux_fn(w, x)), x=x, has_aux=True)


def sums(aux=None):
    has_aux = aux is not None
    function = (lambda w, x: (loss_fn(w, x), aux)) if has_aux else loss_fn
    return ja.accumulate(function, num_microbatches=2, has_aux=has_aux)(W, ROWS)


def by_size(short, long):
    """Outputs that differ between the micro-batches of 3 and of 2 rows."""
    return with_aux(lambda w, x: long if len(x) == 3 else short, x=jnp.ones(5))


def stream(every=2, inner=SGD, **options):
    return ja.multi_steps(inner, every, **options)


def update(grad=W, *, like=W, tx=None, state=lambda s: s, params=W, **named):
    tx = stream() if tx is None else tx
    return tx.update(grad, state(tx.init(like)), params, **named)


def step(optimizer=SGD, w=W, state=None, x=ROWS):
    init, step_fn = ja.train_step(loss_fn, optimizer, num_microbatches=2, donate=False)
    return step_fn(w, init(w) if state is None else state, x)


def multi(params=W, inner=SGD):
    return optax.MultiSteps(inner, 2).init(params)


def inner_state(step=0, state=None, tx=None):
    tx = stream() if tx is None else tx
    return ja.interop.from_inner_state(tx, SGD.init(W) if state is None else state, W,
                                       optimizer_step=step)  # fmt: skip


KEY = jax.random.key(0)
TEXTS, OBJECTS = np.array(["a"] * 4), np.array([None] * 4)
DATES = np.array(["2020-01-01"] * 4, "datetime64[D]")
STOCHASTIC = ja.accumulators.stochastic()

CALLS = {
    "accumulate": {
        "no function": lambda: ja.accumulate(None, num_microbatches=2),
        "no cut": lambda: ja.accumulate(loss_fn),
        "both cuts": lambda: ja.accumulate(loss_fn, num_microbatches=2, microbatch_size=2),
        "cut a text": lambda: ja.accumulate(loss_fn, num_microbatches="2"),
        "cut zero": lambda: ja.accumulate(loss_fn, microbatch_size=0),
        "cut true": lambda: ja.accumulate(loss_fn, num_microbatches=True),
        "an accumulator class": lambda: ja.accumulate(
            loss_fn, num_microbatches=2, accumulator=ja.accumulators.plain
        ),
        "an unknown reduction": lambda: ja.accumulate(
            loss_fn, num_microbatches=2, reduction="mean"
        ),
        "unroll a text": lambda: ja.accumulate(loss_fn, num_microbatches=2, unroll="all"),
        "unroll negative": lambda: ja.accumulate(loss_fn, num_microbatches=2, unroll=-3),
    },
    "value_and_grad": {
        "argnums a text": lambda: window(argnums="params"),
        "argnums too large": lambda: window(argnums=7),
        "argnums twice": lambda: window(argnums=(0, 0)),
        "reducers that are none": lambda: window(grad_reducers={"a": 3}),
        "specs that are none": lambda: window(param_specs="data"),
        "batch None": lambda: window(x=None),
        "batch without leaves": lambda: window(x={}),
        "batch a number": lambda: window(x=3.0),
        "batch of numbers": lambda: window(x=[1.0, 2.0]),
        "batch without rows": lambda: window(x=jnp.zeros((0, 3))),
        "batch of different rows": lambda: window(x={"a": ROWS, "b": jnp.ones(3)}),
        "batch too short": lambda: window(x=ROWS[:1]),
        "batch a text": lambda: window(x="abc"),
        "batch an object": lambda: window(x=Odd()),
        "batch of texts": lambda: window(x=TEXTS),
        "batch of objects": lambda: window(x=OBJECTS),
        "batch of dates": lambda: window(x=DATES),
        "parameters a text": lambda: window(w="a"),
        "parameters an object": lambda: window(w=Odd()),
        "parameters of objects": lambda: window(w=OBJECTS),
        "loss a number": lambda: returning(1.0),
        "loss None": lambda: returning(None),
        "loss a text": lambda: returning("a"),
        "loss without terms": lambda: returning({}),
        "loss partly a number": lambda: returning({"a": ja.Mean(W, 1), "b": 1.0}),
        "loss a mark": lambda: returning(ja.Sum(W)),
        "total None": lambda: returning(ja.Mean(None, 1)),
        "total complex": lambda: returning(ja.Mean(1j * W, 1)),
        "total an integer": lambda: returning(ja.Mean(3, 1)),
        "total a mean": lambda: returning(ja.Mean(ja.Mean(W, 1), 1)),
        "weight None": lambda: returning(ja.Mean(W, None)),
        "weight a text": lambda: returning(ja.Mean(W, "3")),
        "weight complex": lambda: returning(ja.Mean(W, 1j)),
        "weight a vector": lambda: returning(ja.Mean(W, jnp.ones(2))),
        "weight from the parameters": lambda: window(lambda w, x: ja.Mean(w, w)),
        "aux missing": lambda: window(has_aux=True),
        "aux not announced": lambda: window(lambda w, x: (loss_fn(w, x), x)),
        "aux a text": lambda: with_aux(lambda w, x: {"a": "s"}),
        "aux a key": lambda: with_aux(lambda w, x: KEY),
        "aux a key summed": lambda: with_aux(lambda w, x: ja.Sum(KEY)),
        "aux a text summed": lambda: with_aux(lambda w, x: ja.Sum("a")),
        "aux complex maximum": lambda: with_aux(lambda w, x: ja.Max(1j * w)),
        "aux complex minimum": lambda: with_aux(lambda w, x: {"a": ja.Min(1j * w)}),
        "aux mark of a mark": lambda: with_aux(lambda w, x: ja.Sum(ja.Max(w))),
        "aux concat a scalar": lambda: with_aux(lambda w, x: ja.Concat(w)),
        "aux concat other rows": lambda: with_aux(lambda w, x: ja.Concat(jnp.ones(7))),
        "aux other structure": lambda: by_size({"a": W}, {"b": W}),
        "aux other mark": lambda: by_size(ja.Sum(W), ja.Max(W)),
        "aux other dtype": lambda: by_size(W, jnp.int32(1)),
        "aux other shape": lambda: by_size(ja.Sum(W), ja.Sum(jnp.ones(2))),
        "loss other terms": lambda: window(
            lambda w, x: loss_fn(w, x) if len(x) == 3 else {"a": loss_fn(w, x)}, x=jnp.ones(5)
        ),
        "num_real a text": lambda: window(num_real="2"),
        "num_real negative": lambda: window(num_real=-1),
        "num_real too large": lambda: window(num_real=9),
        "num_real a float": lambda: window(num_real=jnp.float32(1)),
        "num_real a vector": lambda: window(num_real=jnp.ones(2, jnp.int32)),
        "key a number": lambda: window(key=0),
        "no key to round": lambda: window(accumulator=STOCHASTIC),
        "denominators of other terms": lambda: window(denominators=(1, 2)),
        "denominators a vector": lambda: window(denominators=jnp.ones(2)),
        "denominators complex": lambda: window(denominators=1j),
        "an axis nobody binds": lambda: window(axis_name="data"),
        "an axis without a mesh": lambda: window(spmd_axis_name="data"),
    },
    "denominators": {
        "no function": lambda: ja.denominators(None, num_microbatches=2),
        "batch None": lambda: ja.denominators(loss_fn, num_microbatches=2)(W, None),
    },
    "merge": {
        "None": lambda: ja.merge(sums(), None),
        "a mean and sums": lambda: ja.merge(sums(), ja.Mean(1.0, 1)),
        "means of other shapes": lambda: ja.merge(ja.Mean(jnp.ones(2), 1), ja.Mean(jnp.ones(5), 1)),
        "other marks": lambda: ja.merge(sums(ja.Sum(W)), sums(ja.Max(W))),
        "other shapes": lambda: ja.merge(sums(ja.Sum(W)), sums(ja.Sum(jnp.ones(3)))),
        "other shapes stacked": lambda: ja.merge(sums(W), sums(jnp.ones(3))),
        "aux and none": lambda: ja.merge(sums(W), sums()),
    },
    "finalize": {
        "None": lambda: ja.finalize(None),
        "twice": lambda: ja.finalize(ja.finalize(sums())),
    },
    "mean": {
        "None": lambda: ja.mean(None),
        "a text": lambda: ja.mean("a"),
        "ragged": lambda: ja.mean([[1], [1, 2]]),
        "a tree": lambda: ja.mean({"a": 1}),
        "a key": lambda: ja.mean(KEY),
        "complex": lambda: ja.mean(1j * ROWS),
        "where not boolean": lambda: ja.mean(ROWS, where=ROWS),
        "where of other shape": lambda: ja.mean(ROWS, where=jnp.ones(3, bool)),
        "weights of other shape": lambda: ja.mean(ROWS, weights=jnp.ones(3)),
        "weights a text": lambda: ja.mean(ROWS, weights="a"),
        "weights complex": lambda: ja.mean(ROWS, weights=1j * ROWS),
    },
    "Mean": {
        "value of None": lambda: ja.Mean(None, 1).value,
        "value of a text": lambda: ja.Mean(1, "a").value,
        "value of other shapes": lambda: ja.Mean(jnp.ones(3), jnp.ones(2)).value,
        "addition": lambda: ja.Mean(1.0, 1) + ja.Mean(1.0, 1),
        "from None": lambda: ja.Mean.from_value(None, 1),
    },
    "multi_steps": {
        "no optimizer": lambda: ja.multi_steps(None, 2),
        "every None": lambda: stream(None),
        "every zero": lambda: stream(0),
        "every a list": lambda: stream([2]),
        "every a function to a float": lambda: update(tx=stream(lambda step: 2.0)),
        "every a function to a text": lambda: update(tx=stream(lambda step: "2")),
        "every a function to None": lambda: update(tx=stream(lambda step: None)),
        "until zero": lambda: stream(ja.until_weight(0)),
        "until a text": lambda: stream(ja.until_weight("5")),
        "until nan": lambda: stream(ja.until_weight(float("nan"))),
        "until a function to a text": lambda: update(tx=stream(ja.until_weight(lambda step: "5"))),
        "mean_args a text": lambda: stream(mean_args="value"),
        "axis a number": lambda: stream(axis_name=3),
        "an axis nobody binds": lambda: update(tx=stream(axis_name="data")),
        "init of a text": lambda: stream().init("a"),
        "init of an object": lambda: stream().init(Odd()),
        "init of texts": lambda: stream().init(TEXTS),
        "init of objects": lambda: stream().init(OBJECTS),
        "gradient a text": lambda: update("a"),
        "gradient an object": lambda: update(Odd()),
        "gradient of other structure": lambda: update([W], like=PARAMS, params=PARAMS),
        "gradient of other shape": lambda: update(
            {"a": jnp.ones(2), "b": W}, like=PARAMS, params=PARAMS
        ),
        "gradient of integers": lambda: update(jnp.int32(1)),
        "gradient complex": lambda: update(1j * W),
        "a weight beside sums": lambda: update(sums(), weight=3),
        "state None": lambda: update(state=lambda s: None),
        "state of the optimizer": lambda: update(state=lambda s: s.inner_state),
        "state of other parameters": lambda: update(state=lambda s: stream().init(PARAMS)),
        "state without a counter": lambda: update(state=lambda s: s._replace(micro_step=None)),
        "state with a vector": lambda: update(
            state=lambda s: s._replace(micro_step=jnp.zeros(3, jnp.int32))
        ),
        "state with a float": lambda: update(state=lambda s: s._replace(micro_step=W)),
        "state without a weight": lambda: update(state=lambda s: s._replace(weight_carry=None)),
        "params of other structure": lambda: update(
            PARAMS, like=PARAMS, params={"a": W}, tx=stream(inner=optax.adamw(1.0))
        ),
        "params of other shape": lambda: update(
            PARAMS, like=PARAMS, params={"a": W, "b": W}, tx=stream(inner=optax.adamw(1.0))
        ),
        "weight a text": lambda: update(weight="3"),
        "weight a vector": lambda: update(weight=jnp.ones(3)),
        "weight complex": lambda: update(weight=1j),
        "weight a mean": lambda: update(weight=ja.Mean(1.0, 1.0)),
        "weight a tree": lambda: update(weight={"a": 1}),
        "value a mean of None": lambda: update(value=ja.Mean(None, 1)),
        "value a mean of text": lambda: update(value=ja.Mean("a", 1)),
        "value a complex mean": lambda: update(value=ja.Mean(1j, 1)),
        "value a mean of vectors": lambda: update(value=ja.Mean(jnp.ones(3), 1)),
        "a mean not announced": lambda: update(loss=ja.Mean(1.0, 1)),
        "flush a text": lambda: update(flush="yes"),
        "no key to round": lambda: update(tx=stream(accumulator=STOCHASTIC)),
        "key a number": lambda: update(tx=stream(accumulator=STOCHASTIC), key=3),
    },
    "flush": {
        "no transformation": lambda: ja.flush(None, stream().init(W), W),
        "no window": lambda: ja.flush(SGD, SGD.init(W)),
        "no parameters": lambda: ja.flush(stream(1), stream(1).init(W)),
    },
    "has_updated": {
        "None": lambda: ja.has_updated(None),
        "no window": lambda: ja.has_updated(SGD.init(W)),
        "two windows": lambda: ja.has_updated((stream().init(W), stream().init(W))),
    },
    "state_specs": {
        "axis None": lambda: ja.state_specs(stream().init(W), None),
        "axis a number": lambda: ja.state_specs(stream().init(W), 3),
    },
    "train_step": {
        "no optimizer": lambda: ja.train_step(loss_fn, None, num_microbatches=2),
        "an unknown option": lambda: ja.train_step(loss_fn, SGD, microbatches=2),
        "argnums": lambda: ja.train_step(loss_fn, SGD, num_microbatches=2, argnums=1),
        "an accumulating optimizer": lambda: step(stream()),
        "parameters a text": lambda: ja.train_step(loss_fn, SGD, num_microbatches=2).init("a"),
        "lookahead parameters": lambda: step(w=optax.LookaheadParams.init_synced(W)),
        "state of the optimizer": lambda: step(state=SGD.init(W)),
        "state of other parameters": lambda: step(
            optax.adam(1.0), state=step(optax.adam(1.0), w=jnp.ones((1,)))[1]
        ),
        "state of another optimizer": lambda: step(optax.adam(1.0), state=step()[1]),
    },
    "windows": {
        "a number": lambda: ja.batches.windows(3, 2),
        "of zero": lambda: ja.batches.windows([1], 0),
    },
    "pad_batch": {
        "None": lambda: ja.pad_batch(None, 3),
        "too long": lambda: ja.pad_batch(np.ones(4), 3),
        "rows a text": lambda: ja.pad_batch(np.ones(4), "5"),
        "a number": lambda: ja.pad_batch(3.0, 3),
        "texts": lambda: ja.pad_batch(TEXTS, 5),
        "no rows": lambda: ja.pad_batch(np.ones((0, 2)), 3),
    },
    "pack": {
        "None": lambda: ja.batches.pack(None, 3),
        "a number": lambda: ja.batches.pack(3, 3),
        "texts": lambda: ja.batches.pack(["ab"], 3),
        "nested": lambda: ja.batches.pack([[[1, 2]]], 3),
        "ragged": lambda: ja.batches.pack([[[1], [1, 2]]], 3),
        "None inside": lambda: ja.batches.pack([None], 3),
        "too long": lambda: ja.batches.pack([[1, 2]], 1),
        "a token past int32": lambda: ja.batches.pack([[2**40]], 3),
        "length a text": lambda: ja.batches.pack([[1]], "3"),
        "padding a text": lambda: ja.batches.pack([[1]], 3, padding="a"),
        "padding a fraction": lambda: ja.batches.pack([[1]], 3, padding=1.5),
        "an unknown policy": lambda: ja.batches.pack([[1]], 3, overlong="drop"),
        "nothing": lambda: ja.batches.pack([], 3),
    },
    "split": {
        "None": lambda: ja.split(None, num_microbatches=2),
        "no cut": lambda: ja.split(ROWS),
        "too many": lambda: ja.split(ROWS, num_microbatches=9),
        "a text": lambda: ja.split("abcd", num_microbatches=2),
        "a fraction": lambda: ja.split(ROWS, num_microbatches=2.0),
        "an object": lambda: ja.split(Odd(), num_microbatches=2),
    },
    "example_keys": {
        "key a number": lambda: ja.batches.example_keys(0, 3),
        "size a text": lambda: ja.batches.example_keys(KEY, "3"),
        "start a text": lambda: ja.batches.example_keys(KEY, 3, start="a"),
        "start a vector": lambda: ja.batches.example_keys(KEY, 3, start=jnp.ones(2, int)),
        "start a fraction": lambda: ja.batches.example_keys(KEY, 3, start=1.5),
    },
    "from_optax": {
        "None": lambda: ja.interop.from_optax(stream(), None, W),
        "other parameters": lambda: ja.interop.from_optax(stream(), multi(), PARAMS),
        "other shapes": lambda: ja.interop.from_optax(stream(), multi(jnp.ones(2)), jnp.ones(3)),
    },
    "from_inner_state": {
        "no transformation": lambda: ja.interop.from_optax(None, multi(), W),
        "a plain optimizer": lambda: inner_state(tx=SGD),
        "another optimizer": lambda: inner_state(state=optax.adam(1.0).init(W)),
        "step a text": lambda: inner_state("a"),
        "step a fraction": lambda: inner_state(1.5),
    },
    "to_optax": {"None": lambda: ja.interop.to_optax(stream(), None, W)},
    "accumulators.plain": {
        "integers": lambda: ja.accumulators.plain(dtype=jnp.int32),
        "a text": lambda: ja.accumulators.plain(dtype="abc"),
        "None": lambda: ja.accumulators.plain(dtype=None),
        "narrow": lambda: ja.accumulators.plain(dtype=jnp.bfloat16),
    },
    "accumulators.stochastic": {"float32": lambda: ja.accumulators.stochastic(dtype=jnp.float32)},
    "accumulators.chunked": {
        "zero": lambda: ja.accumulators.chunked(every=0),
        "a text": lambda: ja.accumulators.chunked(every="3"),
    },
    "accumulators.read": {"a text": lambda: ja.accumulators.read("a")},
    "audit": {"no function": lambda: ja.audit("a")},
}


@pytest.mark.parametrize(
    ("function", "case"), [(name, case) for name, cases in CALLS.items() for case in cases]
)
def test_the_message_is_ours(function, case):
    with pytest.raises((TypeError, ValueError)) as caught:
        CALLS[function][case]()
    message = str(caught.value)
    speakers = {function, "accumulate"} if function == "value_and_grad" else {function}
    assert message.partition(":")[0] in speakers, message
    assert re.search(r"`[^`]+`", message), message
