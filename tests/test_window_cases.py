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


def test_01_the_mean_is_over_tokens_not_over_micro_batches():
    assert_close(window(token_mean, ragged([1, 2, 3], [1] * 7)).grads, 1.3)


def test_02_means_are_averaged_never_summed():
    def loss_fn(w, x):
        return ja.Mean.from_value(jnp.mean(w * x), x.size)

    assert_equal(window(loss_fn, np.array([[1, 3], [3, 5]], np.float32)).grads, 3.0)


def test_03_a_loss_without_a_count_is_refused():
    with pytest.raises(TypeError, match=r"ja\.mean"):
        window(lambda w, x: jnp.mean(w * x), np.ones(2, np.float32))


def test_04_the_count_is_of_what_the_loss_multiplies():
    """Five labels a row are four targets after the causal shift."""

    def loss_fn(w, labels):
        return ja.mean(w * labels[:, 1:], where=labels[:, 1:] >= 0)

    result = window(loss_fn, np.ones((2, 5), np.float32))
    assert (result.weight, result.grads) == (8, 1)


def test_05_sums_over_different_counts():
    result = window(token_mean, ragged([1] * 10, [3] * 20))
    assert_close(result.grads, 70 / 30)


@pytest.mark.parametrize("number", [2, 4])
def test_06_no_assignment_of_sequences_to_slots_changes_the_gradient(number):
    """Eight sequences of 1 to 8 tokens in all 40,320 orders, bit for bit."""
    x, mask = map(jnp.asarray, ragged(*[[length % 5 - 2] * length for length in range(1, 9)]))
    orders = np.array(list(itertools.permutations(range(8))), np.int8)
    f = ja.accumulate(token_mean, num_microbatches=number)
    result = jax.jit(jax.vmap(lambda order: f(W, (x[order], mask[order]))))(orders)
    assert_equal(result.grads, np.full(len(orders), np.sum(x * mask)))
    assert_equal(result.weight, np.full(len(orders), 36))


@pytest.mark.parametrize("number", [1, 2, 4])
def test_08_no_term_changes_with_the_window(number):
    def loss_fn(w, x):
        return {"main": ja.mean((w + 1) * x), "auxiliary": 0.1 * ja.mean((2 * w + 2) * x)}

    result = window(loss_fn, np.ones(4, np.float32), num_microbatches=number)
    assert_close((result.loss, result.grads), (1.2, 1.2))


def test_08_a_penalty_is_counted_once():
    def loss_fn(w, x):
        return ja.mean(w * x), ja.Mean(w * w, 1.0)

    for number in (1, 2, 4):
        result = window(loss_fn, np.ones(4, np.float32), w=jnp.float32(3), num_microbatches=number)
        assert_close((result.loss, result.grads), (3.0 + 9.0, 1.0 + 6.0))


def test_09_sequences_of_a_packed_row():
    x = np.array([[10, 1, 1, 1, 1]] * 2, np.float32)
    segments = np.array([[0, 1, 1, 1, 1]] * 2)

    def sequence_mean(w, batch):
        x, segments = batch
        member = segments[:, :, None] == jnp.arange(2)[None, None]
        sums = jnp.sum(jnp.where(member, (w * x)[:, :, None], 0), axis=1)
        return ja.mean(ja.Mean(sums, jnp.sum(member, axis=1)).value)

    def row_mean(w, batch):
        return ja.mean(jnp.mean(w * batch[0], axis=1))

    assert_equal(window(sequence_mean, (x, segments)).grads, 5.5)
    assert_close(window(row_mean, (x, segments)).grads, 2.8)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_10_a_constant_denominator(number):
    x = np.array([1, 2, 3, 44], np.float32)
    f = jax.jit(ja.value_and_grad(token_mean, num_microbatches=number))
    loss, grad = f(jnp.float32(2), (x, x > 0), denominators=100.0)
    assert_close((loss, grad), (1.0, 0.5))


def test_11_an_uneven_split():
    assert_equal(window(token_mean, ragged([1] * 4, [0] * 60)).grads, 0.0625)


# Empty and non-finite


@pytest.mark.parametrize("number", [1, 2, 4])
def test_13_all_tokens_masked(number):
    x = np.full((4, 3), np.nan, np.float32)
    result = window(token_mean, (x, np.zeros((4, 3), bool)), num_microbatches=number)
    assert (result.grads, result.weight) == (0, 0)
    assert np.isnan(result.loss)
    update, _ = optax.sgd(1.0).update(result.grads, optax.sgd(1.0).init(W))
    assert update == 0


def test_14_an_empty_micro_batch():
    result = window(token_mean, ragged([], [1] * 7), w=jnp.float32(1))
    assert (result.loss, result.grads, result.weight) == (1, 1, 7)


def test_15_the_mean_of_an_empty_micro_batch():
    def loss_fn(w, batch):
        x, mask = batch
        return ja.Mean.from_value(jnp.mean(w * x, where=mask), jnp.sum(mask))

    result = window(loss_fn, ragged([], [1] * 7), w=jnp.float32(1))
    assert_equal((result.loss, result.weight), (1.0, 7))


@pytest.mark.parametrize("hole", [np.nan, np.inf])
def test_16_a_masked_position_is_not_seen(hole):
    """Masked after the loss for values that fail, at the source for a multiply that fails."""

    def per_token(w, batch):
        x, mask = batch
        return ja.mean(w + x, where=mask)

    def at_the_source(w, batch):
        x, mask = batch
        return ja.mean(w * jnp.where(mask, x, 1), where=mask)

    x = np.array([[1, hole], [3, 5]], np.float32)
    mask = np.isfinite(x)
    result = window(per_token, (x, mask))
    assert_equal((result.loss, result.grads), (3.0, 1.0))
    result = window(at_the_source, (x, mask), w=jnp.float32(1))
    assert_equal((result.loss, result.grads), (3.0, 3.0))


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


def test_49_a_thousand_bfloat16_gradients_of_one():
    result = ja.accumulate(rounded, num_microbatches=1000)(
        jnp.bfloat16(0), jnp.ones(1000, "bfloat16")
    )
    assert_equal(result.grads, 1000.0)


def test_49_bfloat16_gradients_against_float64():
    x = jax.random.normal(jax.random.key(49), (2048, 16), jnp.bfloat16) + 1

    def loss_fn(w, x):
        return ja.Mean(jnp.sum(w[None] * x, dtype=jnp.float32), 1)

    sums = jax.jit(ja.accumulate(loss_fn, num_microbatches=2048))(jnp.zeros(16, jnp.bfloat16), x)
    want = np.asarray(x, np.float64).sum(axis=0)
    assert np.max(np.abs(sums.grads - want) / np.abs(want)) < 1e-6


def test_50_float16_sums_do_not_overflow():
    result = window(rounded, np.full(4, 20000, np.float16), w=jnp.float16(0))
    assert_equal(result.grads, 20000.0)
    sums = ja.accumulate(rounded, num_microbatches=4)(jnp.float16(0), jnp.full(4, 20000, "float16"))
    assert_equal(sums.grads, 80000.0)


def test_50_float16_gradients_do_not_vanish():
    """A thousandth of each gradient would be 2e-8, zero in float16."""
    x = np.full(1000, 2e-5, np.float16)
    assert np.float16(2e-5 / 1000) == 0
    assert_close(window(rounded, x, w=jnp.float16(0)).grads, np.float64(x[0]))


def test_51_complex64_keeps_its_imaginary_part():
    def loss_fn(w, x):
        return ja.mean(jnp.real(w * x))

    x = np.array([1 + 2j, 3 - 5j, 2 + 1j], np.complex64)
    w = jnp.complex64(1 + 1j)
    _, grad = jax.jit(ja.value_and_grad(loss_fn, num_microbatches=3))(w, x)
    assert grad.dtype == jnp.complex64
    assert_close(grad, jax.grad(lambda w: jnp.mean(jnp.real(w * x)))(w))
    assert_close(grad, x.mean())


def test_51_float64_keeps_its_precision(x64):
    x = np.array([1, 1e-14, 2], np.float64)
    result = window(rounded, x, w=jnp.float64(1))
    assert result.grads.dtype == jnp.float64
    assert_close((result.loss, result.grads), (x.sum() / 3, x.sum() / 3))
    assert result.grads != 1.0


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


def test_53_single_tokens_count_past_two_to_the_24():
    def loss_fn(w, count):
        return ja.Mean(w * 1.0, jnp.sum(count))

    counts = np.array([2**24, 1, 1, 1], np.int32)
    assert window(loss_fn, counts).weight == 2**24 + 3


# Metrics and state


def test_54_the_logged_loss_is_the_windows_mean():
    assert_close(window(token_mean, ragged([1, 2, 3], [1] * 7), w=jnp.float32(1)).loss, 1.3)


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

    batch = {"x": jnp.arange(7.0), "key": ja.example_keys(jax.random.key(0), 7)}
    results = [
        jax.jit(ja.accumulate(loss_fn, has_aux=True, **cut))(W, batch)
        for cut in ({"num_microbatches": 1}, {"num_microbatches": 3}, {"microbatch_size": 2})
    ]
    for result in results[1:]:
        assert_equal((result.aux.value, result.grads), (results[0].aux.value, results[0].grads))
    assert len({row.tobytes() for row in np.asarray(results[0].aux.value)}) == 7
