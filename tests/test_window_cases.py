"""The cases from public bug reports that concern a window inside a step; numbers as in the list.

The toy model: one parameter `w`, the loss of a token is `w * x`, so a token's gradient is its `x`.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import OPTIMIZED, assert_close, assert_equal, problem, token_answer, token_loss

import jaxaccum as ja

W = jnp.float32(0)


def token_mean(w, batch):
    """The mean of `w * x` over the kept tokens."""
    x, mask = batch
    return ja.mean(w * x, where=mask)


def ragged(*rows):
    """Rows of different length as `(x, mask)`."""
    width = max(map(len, rows))
    x = np.array([[*row, *[0] * (width - len(row))] for row in rows], np.float32)
    return x, np.arange(width) < np.array([[len(row)] for row in rows])


def window(loss_fn, batch, *, w=W, **options):
    """The compiled and divided window, one row in each micro-batch unless said."""
    options = options if "num_microbatches" in options else {"microbatch_size": 1, **options}
    return ja.finalize(jax.jit(ja.accumulate(loss_fn, **options))(w, batch))


def rounded(w, x):
    """`w * x` as a sum of weight one for each row: one gradient a micro-batch."""
    return ja.Mean(jnp.sum(w * x), x.shape[0])


# Denominators


def test_03_a_loss_without_a_count_is_refused():
    with pytest.raises(TypeError, match=r"ja\.mean"):
        window(lambda w, x: jnp.mean(w * x), np.ones(2, np.float32))


@pytest.mark.parametrize("number", [2, 4])
def test_06_no_assignment_of_sequences_to_slots_changes_the_gradient(number):
    """Eight sequences of 1 to 8 tokens in all 40,320 orders, bit for bit."""
    x, mask = map(jnp.asarray, ragged(*[[length % 5 - 2] * length for length in range(1, 9)]))
    orders = np.array(list(itertools.permutations(range(8))), np.int8)
    f = ja.accumulate(token_mean, num_microbatches=number)
    result = jax.jit(jax.vmap(lambda order: f(W, (x[order], mask[order]))))(orders)
    assert_equal(result.grads, np.full(len(orders), np.sum(x * mask)))
    assert_equal(result.weight, np.full(len(orders), 36))


# Empty and non-finite


@pytest.mark.parametrize("skip", [False, True])
def test_17_a_nan_does_not_outlive_its_window(skip):
    f = jax.jit(ja.value_and_grad(token_loss, num_microbatches=3, skip_nonfinite=skip))
    params, clean = problem(17)
    fresh = f(params, clean)
    _, dirty = problem(18)
    dirty["x"][:, 0] = np.nan
    dirty["mask"][:, 0] = True
    assert np.isnan(f(params, dirty)[0])
    assert_equal(f(params, clean), fresh)


def test_18_skipping_shortens_the_window():
    x = np.array([1, np.nan, 3, 5], np.float32)
    result = window(rounded, x, skip_nonfinite=True, w=jnp.float32(1))
    assert_equal((result.loss, result.grads, result.weight), (3.0, 3.0, 3))
    assert (result.num_microbatches, result.num_skipped) == (3, 1)


# Boundaries


def test_36_a_batch_cut_in_the_step_is_one_update():
    params, batch = problem(36)
    tx = optax.adam(0.5)
    state = tx.init(params)
    _, grads = jax.jit(ja.value_and_grad(token_loss, num_microbatches=4))(params, batch)
    updates, state = tx.update(grads, state)
    want, _ = tx.update(token_answer(params, batch).grads, tx.init(params))
    assert_close(updates, want)
    assert optax.tree.get(state, "count") == 1


# Precision


def test_49_bfloat16_gradients_against_float64():
    x = jax.random.normal(jax.random.key(49), (2048, 16), jnp.bfloat16) + 1

    def loss_fn(w, x):
        return ja.Mean(jnp.sum(w[None] * x, dtype=jnp.float32), 1)

    sums = jax.jit(ja.accumulate(loss_fn, num_microbatches=2048))(jnp.zeros(16, jnp.bfloat16), x)
    want = np.asarray(x, np.float64).sum(axis=0)
    assert np.max(np.abs(sums.grads - want) / np.abs(want)) < 1e-6


@pytest.mark.parametrize("compensated", [False, True])
def test_52_the_residual_of_a_compensated_sum(compensated):
    """float32 sums of 0.1 drift away from the exact sum; the compensated one is its rounding."""
    x = np.full(20000, 0.1, np.float32)
    accumulator = ja.accumulators.compensated() if compensated else ja.accumulators.plain()
    f = ja.accumulate(rounded, num_microbatches=20000, accumulator=accumulator)
    f = jax.jit(f, compiler_options=OPTIMIZED)
    exact = x.astype(np.float64).sum()
    equal = np.float32(exact) == f(W, x).grads
    assert equal == compensated


# Metrics and state


def masks(key, rows, width=16):
    return jax.random.bernoulli(key, 0.5, (rows, width))


def test_55_dropout_masks_differ_and_repeat():
    def loss_fn(w, x, *, key):
        mask = masks(key, len(x))
        return ja.mean(w * x[:, None] * mask), ja.Concat(mask)

    f = jax.jit(ja.value_and_grad(loss_fn, num_microbatches=4, has_aux=True))
    x = jnp.ones(4)
    (_, first), grad = f(W, x, key=jax.random.key(0))
    (_, second), again = f(W, x, key=jax.random.key(0))
    (_, other), _ = f(W, x, key=jax.random.key(1))
    assert len({row.tobytes() for row in np.asarray(first)}) == 4
    assert_equal((first, grad), (second, again))
    assert not np.array_equal(first, other)


def test_55_keys_for_each_example_do_not_depend_on_the_cut():
    def loss_fn(w, batch):
        mask = jax.vmap(lambda key: masks(key, 1)[0])(batch["key"])
        return ja.mean(w * batch["x"][:, None] * mask), ja.Concat(mask)

    batch = {"x": jnp.arange(7.0), "key": ja.batches.example_keys(jax.random.key(0), 7)}
    results = [
        jax.jit(ja.accumulate(loss_fn, has_aux=True, **cut))(W, batch)
        for cut in ({"num_microbatches": 1}, {"num_microbatches": 3}, {"microbatch_size": 2})
    ]
    for result in results[1:]:
        assert_equal((result.aux.value, result.grads), (results[0].aux.value, results[0].grads))
    assert len({row.tobytes() for row in np.asarray(results[0].aux.value)}) == 7
