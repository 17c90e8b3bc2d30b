"""Inputs that a user gets wrong, and numbers that are not finite where few expect them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxaccum as ja

ROWS = jnp.arange(1.0, 5.0)


SGD = optax.sgd(1.0)


def product(w, x):
    return ja.mean(w * x)


def called(every):
    """One call of a stream with this length of its windows."""
    tx = ja.multi_steps(SGD, every)
    return tx.update(jnp.float32(1), tx.init(jnp.float32(0)), weight=1)


def test_a_nan_weight_is_skipped_with_its_micro_batch_only():
    def loss_fn(w, x):
        weight = jnp.where(x[0] == 2, jnp.nan, 1.0)
        return {"a": ja.Mean(jnp.sum(w * x), weight), "b": ja.mean(w * x)}

    f = ja.accumulate(loss_fn, num_microbatches=4, skip_nonfinite=True)
    window = ja.finalize(jax.jit(f)(jnp.float32(1), ROWS))
    np.testing.assert_allclose((window.loss, window.grads), 16 / 3, rtol=2e-6)
    assert (window.num_microbatches, window.num_skipped) == (3, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_ends_with_its_window(bad):
    tx = ja.multi_steps(optax.sgd(1.0), ja.until_weight(2))
    w = jnp.float32(1)
    _, state = tx.update(w, tx.init(w), w, weight=bad)
    assert ja.has_updated(state)
    updates, state = tx.update(jnp.float32(4), state, w, weight=2)
    assert updates == -2


def test_a_length_below_one_that_is_not_known_counts_as_one():
    tx = ja.multi_steps(optax.sgd(1.0), lambda step: 2 - 2 * step)
    state, update = tx.init(jnp.float32(0)), jax.jit(tx.update)
    for closed in (False, True, True, True):
        _, state = update(jnp.float32(1), state)
        assert ja.has_updated(state) == closed
    with pytest.raises(ValueError, match="above 0, got -4"):
        tx.update(jnp.float32(1), state)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_read_as_they_are(bad):
    tx = ja.multi_steps(optax.sgd(1.0), 4)
    w = jnp.float32(1)
    _, state = tx.update(w, tx.init(w), w, weight=bad)
    np.testing.assert_equal(float(state.weight), bad)


def test_a_nan_in_an_averaged_argument_is_skipped():
    tx = ja.multi_steps(optax.sgd(1.0), 2, skip_nonfinite=True)
    w = jnp.float32(1)
    _, state = tx.update(w, tx.init(w), w, value=ja.Mean(np.nan, 1))
    assert (state.num_skipped, state.micro_step) == (1, 0)


def test_debug_nans_is_silent_for_several_terms_outside_jit():
    def loss_fn(w, x):
        return product(w, x), product(w, x * x)

    with jax.debug_nans(True):
        loss, _ = ja.value_and_grad(loss_fn, num_microbatches=2)(jnp.float32(1), ROWS)
        counts = ja.denominators(loss_fn, num_microbatches=2)(jnp.float32(1), ROWS)
        f = ja.accumulate(loss_fn, num_microbatches=2)
        sums = f(jnp.float32(1), ROWS, denominators=counts)
        assert ja.finalize(ja.merge(sums, sums)).loss == 2 * loss


def test_two_streams_in_one_optimizer_are_flushed_together():
    streams = {"x": ja.multi_steps(optax.sgd(1.0), 2), "y": ja.multi_steps(optax.sgd(1.0), 3)}
    tx = optax.multi_transform(streams, {"a": "x", "b": "y"})
    params = {"a": jnp.float32(0), "b": jnp.float32(0)}
    grads = {"a": jnp.float32(1), "b": jnp.float32(2)}
    _, state = tx.update(grads, tx.init(params), params)
    updates, state = ja.flush(tx, state, params)
    assert updates == {"a": -1, "b": -2}
    assert ja.flush(tx, state, params)[0] == {"a": 0, "b": 0}


def window(loss_fn=product, w=1.0, x=ROWS, **options):
    keywords = {name: options.pop(name) for name in ("key", "num_real") if name in options}
    return ja.value_and_grad(loss_fn, **{"num_microbatches": 2, **options})(w, x, **keywords)


def sums_of(loss_fn, w):
    return ja.accumulate(loss_fn, num_microbatches=2)(w, ROWS)


def stream(every=2, **options):
    return ja.multi_steps(optax.sgd(1.0), every, **options)


def stepped_twice():
    """A donating step whose state is passed a second time."""
    init, step = ja.train_step(product, SGD, num_microbatches=2)
    state = init(jnp.float32(1))
    step(jnp.float32(1), state, ROWS)
    return step(jnp.float32(1), state, ROWS)


REFUSED = {
    "a Boolean as denominator": (
        lambda: ja.value_and_grad(product, num_microbatches=2)(
            jnp.float32(1), ROWS, denominators=True
        ),
        "value_and_grad: `denominators` must be a number, got True",
    ),
    "a state that was taken over": (stepped_twice, r"the buffer of `state\.\w+.*` is gone.*donate"),
    "the state of a chain for a part of it": (
        lambda: stream().update(
            jnp.float32(1), optax.chain(optax.identity(), stream()).init(jnp.float32(1))
        ),
        r"multi_steps: `state` must come from `init`, got tuple.*`state\[1\]`",
    ),
    "specs of an optax.MultiSteps": (
        lambda: ja.state_specs((optax.MultiSteps(SGD, 2).init(jnp.float32(1)),), "data"),
        "state_specs: `state` must come from a `ja.multi_steps`, got MultiStepsState of Optax",
    ),
    "a closed-over batch in a step": (
        lambda: ja.train_step(lambda w: product(w, ROWS), SGD, num_microbatches=2),
        "train_step: the batch must be an argument of the loss",
    ),
    "texts in aux": (
        lambda: window(lambda w, x: (product(w, x), {"a": "text"}), has_aux=True),
        r"value_and_grad: `aux\['a'\]` must be an array",
    ),
    "texts in the batch": (
        lambda: window(x={"id": np.array(["a"] * 4), "x": ROWS}),
        r"value_and_grad: `batch\['id'\]` must be an array of numbers",
    ),
    "a number as key": (lambda: window(key=0), "`key` must be one PRNG key, got 0"),
    "several keys": (
        lambda: window(key=jax.random.split(jax.random.key(0))),
        "`key` must be one PRNG key",
    ),
    "a number as key of examples": (
        lambda: ja.batches.example_keys(0, 3),
        "example_keys: `key` must be",
    ),
    "a key for a loss that takes none": (
        lambda: window(key=jax.random.key(0)),
        "`loss_fn` takes no keyword `key`",
    ),
    "texts as denominators": (
        lambda: ja.accumulate(product, num_microbatches=2)(1.0, ROWS, denominators="3"),
        "accumulate: `denominators` must be an array",
    ),
    "a number added to a mean": (lambda: 1.0 + ja.mean(ROWS), "has no weight"),
    "an array added to a mean": (lambda: ja.mean(ROWS) + ROWS[0], "side by side"),
    "merged sums of different shape": (
        lambda: ja.merge(
            sums_of(product, jnp.float32(1)),
            sums_of(lambda w, x: ja.mean(w[0] * x), jnp.ones(2)),
        ),
        r"merge: `a.grads` is float32\[\], expected the shape \(2,\)",
    ),
    "an accumulating optimizer in a step": (
        lambda: ja.train_step(product, stream(), num_microbatches=1).init(jnp.ones(2)),
        "train_step: `optimizer` holds a `ja.multi_steps`",
    ),
    "flush without sum or parameters": (
        lambda: ja.flush(stream(1), stream(1).init(jnp.float32(1))),
        "flush: `params` are needed",
    ),
    "sums as updates": (
        lambda: stream().update(sums_of(product, 1.0), stream().init(1.0), weight=4),
        "`weight` must not be given",
    ),
    "a half window": (
        lambda: stream(2.5),
        r"a function of the optimizer step, or `ja.until_weight",
    ),
    "until_weight without target": (lambda: stream(ja.until_weight), "without its target"),
    "a number as mean_args": (lambda: stream(mean_args=3), "`mean_args` must be a tuple"),
    "a number as axis": (lambda: window(axis_name=3), "`axis_name` must be the name"),
    "no gradient for an array": (
        lambda: stream().update(None, stream().init(jnp.ones(3)), jnp.ones(3)),
        "`updates` is None, but the parameter has a gradient",
    ),
    "no gradient for one array": (
        lambda: stream().update({"a": None}, stream().init({"a": jnp.ones(3)})),
        r"`updates\['a'\]` is None",
    ),
    "no gradient in a window of one": (
        lambda: stream(1).update(None, stream(1).init(jnp.ones(3))),
        "`updates` is None",
    ),
    "a schedule of no length": (lambda: called(lambda step: 0), "`every`.* above 0, got 0"),
    "a schedule of negative length": (lambda: called(lambda step: -step - 1), "`every`.*got -1"),
    "a compiled schedule of no length": (
        lambda: jax.jit(lambda: called(lambda step: jnp.int32(0)))(),
        "`every`.*got 0",
    ),
    "a schedule of no weight": (
        lambda: called(ja.until_weight(lambda step: 0.0)),
        "`until_weight`.*got 0.0",
    ),
    "a window of Optax in a stream": (
        lambda: ja.multi_steps(optax.MultiSteps(SGD, 2), 2),
        "`inner` holds an `optax.MultiSteps`, so that one window would stand in another",
    ),
    "a transformation of it in a stream": (
        lambda: ja.multi_steps(optax.MultiSteps(SGD, 2).gradient_transformation(), 2),
        "`inner` holds an `optax.MultiSteps`",
    ),
    "a window of Optax in a chain in a stream": (
        lambda: ja.multi_steps(
            optax.chain(optax.MultiSteps(SGD, 2).gradient_transformation()), 2
        ).init(jnp.ones(2)),
        "multi_steps: `inner` holds an `optax.MultiSteps`",
    ),
    "a stream in a stream": (
        lambda: ja.multi_steps(stream(), 2),
        "`inner` holds a `ja.multi_steps`",
    ),
    "a stream in a chain in a stream": (
        lambda: ja.multi_steps(optax.chain(SGD, stream()), 2).init(jnp.ones(2)),
        "`inner` holds a `ja.multi_steps`",
    ),
    "a window of Optax in a step": (
        lambda: ja.train_step(product, optax.MultiSteps(SGD, 2), num_microbatches=1),
        "train_step: `optimizer` holds an `optax.MultiSteps`",
    ),
    "the name in Optax": (
        lambda: ja.multi_steps(SGD, every_k_schedule=4),
        "multi_steps: `every_k_schedule` is no keyword of this function. Pass `every`",
    ),
    "a state of Optax": (
        lambda: stream().update(1.0, optax.MultiSteps(SGD, 2).init(1.0), 1.0),
        "got MultiStepsState of Optax.*`ja.interop.from_optax",
    ),
    "a chain's state": (
        lambda: stream().update(1.0, optax.chain(SGD, SGD).init(1.0), 1.0),
        "`ja.interop.from_optax",
    ),
    "a state of Optax to flush": (
        lambda: ja.flush(stream(), optax.MultiSteps(SGD, 2).init(1.0), 1.0),
        "`ja.interop.from_optax",
    ),
    "a state of Optax to ask": (
        lambda: ja.has_updated(optax.MultiSteps(SGD, 2).init(1.0)),
        "has_updated: .*`ja.interop.from_optax",
    ),
    "a state of Optax in a step": (
        lambda: ja.train_step(product, SGD, num_microbatches=1).step(
            1.0, optax.MultiSteps(SGD, 2).init(1.0), ROWS
        ),
        "train_step: `state` must come from `init`.*`ja.interop.from_optax",
    ),
    "two kinds of axes": (
        lambda: window(axis_name="a", spmd_axis_name="b"),
        "pass one of them",
    ),
}


@pytest.mark.parametrize(("call_fn", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_input_is_refused_in_our_words(call_fn, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call_fn()
