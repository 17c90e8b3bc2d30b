"""Inputs that a user gets wrong, and numbers that are not finite where few expect them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxaccum as ja

ROWS = jnp.arange(1.0, 5.0)


def product(w, x):
    return ja.mean(w * x)


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


REFUSED = {
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
    "a number as key of examples": (lambda: ja.example_keys(0, 3), "example_keys: `key` must be"),
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
        r"merge: `b.grads` is float32\[2\]",
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
        lambda: stream().update(sums_of(product, 1.0), stream().init(1.0)),
        "pass `sums.grads`",
    ),
    "a half window": (
        lambda: stream(2.5),
        r"a function of the optimizer step, or `ja.until_weight",
    ),
    "until_weight without target": (lambda: stream(ja.until_weight), "without its target"),
    "a number as mean_args": (lambda: stream(mean_args=3), "`mean_args` must be a tuple"),
    "a number as axis": (lambda: window(axis_name=3), "`axis_name` must be the name"),
    "two kinds of axes": (
        lambda: window(axis_name="a", spmd_axis_name="b"),
        "pass one of them",
    ),
}


@pytest.mark.parametrize(("call_fn", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_input_is_refused_in_our_words(call_fn, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call_fn()
