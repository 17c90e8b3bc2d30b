"""Properties: any cut, order, mask, weight and fault gives what float64 NumPy gives.

The shapes are few and the compiled windows are kept, so that only the data varies.
"""

import functools

import hypothesis
import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from oracles import (
    CUTS,
    FEATURES,
    ROWS,
    TOKENS,
    assert_close,
    assert_equal,
    cut_rows,
    problem,
    take,
    terms_answer,
    terms_loss,
    token_answer,
    token_loss,
)

import jaxaccum as ja

check = hypothesis.settings(deadline=None, max_examples=30, derandomize=True)

cuts = st.sampled_from(range(len(CUTS)))
losses = st.sampled_from([(token_loss, token_answer), (terms_loss, terms_answer)])
seeds = st.integers(0, 2**32 - 1)
orders = st.permutations(range(ROWS))
masks = npst.arrays(bool, (ROWS, TOKENS), elements=st.booleans())
weights = npst.arrays(np.float32, (ROWS, TOKENS), elements=st.sampled_from([0, 0.25, 1, 3, 1000]))
integers = functools.partial(npst.arrays, np.int64, elements=st.integers(-8, 8))


@functools.cache
def compiled(make, loss_fn, cut, **options):
    """One compiled window for each loss and cut."""
    return jax.jit(make(loss_fn, **CUTS[cut], **options))


def assert_window(sums, want):
    window = ja.finalize(sums)
    assert_close((window.loss, window.grads, window.weight), tuple(want))


@check
@hypothesis.given(losses, cuts, seeds, orders, masks, weights)
def test_any_cut_of_any_order(loss, cut, seed, order, mask, weight):
    params, batch = problem(seed)
    batch = take({**batch, "mask": mask, "weight": weight}, order)
    number = len(cut_rows(ROWS, **CUTS[cut]))
    sums = compiled(ja.accumulate, loss[0], cut)(params, batch)
    assert_window(sums, loss[1](params, batch, number))


@check
@hypothesis.given(cuts, integers((ROWS, TOKENS)), integers((ROWS, TOKENS)), integers((FEATURES,)))
def test_small_integers_in_any_cut_sum_bit_for_bit(cut, y, weight, w):
    """Sums of integers are the same numbers in every cut and every order, counts included."""
    _, batch = problem(0, integer=True)
    params = {"w": w.astype(np.float32), "b": np.float32(1)}
    batch = {**batch, "y": y.astype(np.float32), "weight": np.abs(weight)}

    error = batch["x"] @ params["w"] + 1 - batch["y"]
    slopes = batch["weight"] * 2 * error
    sums = compiled(ja.accumulate, weighted_loss, cut)(params, batch)
    assert_equal(sums.loss, np.sum(batch["weight"] * error**2))
    assert_equal(sums.grads, {"w": np.einsum("bt,btd->d", slopes, batch["x"]), "b": slopes.sum()})
    assert_equal(sums.weight, batch["weight"].sum())


def weighted_loss(params, batch):
    e = batch["x"] @ params["w"] + (params["b"] - batch["y"])
    return ja.mean(e * e, weights=batch["weight"])


@check
@hypothesis.given(losses, cuts, seeds, masks, st.data())
def test_num_real_is_the_window_of_the_first_micro_batches(loss, cut, seed, mask, data):
    params, batch = problem(seed)
    batch["mask"] = mask
    rows = cut_rows(ROWS, **CUTS[cut])
    number = data.draw(st.integers(1, len(rows)), label="num_real")
    sums = compiled(ja.accumulate, loss[0], cut)(params, batch, num_real=number)
    assert sums.num_microbatches == number
    assert_window(sums, loss[1](params, take(batch, np.concatenate(rows[:number])), number))


@check
@hypothesis.given(losses, cuts, seeds, masks, st.data())
def test_skipping_is_the_batch_without_the_bad_micro_batches(loss, cut, seed, mask, data):
    params, batch = problem(seed)
    batch["mask"], batch["weight"] = mask, batch["weight"] + 1
    rows = cut_rows(ROWS, **CUTS[cut])
    bad = data.draw(st.sets(st.sampled_from(range(len(rows)))), label="bad micro-batches")
    for k in bad:
        batch["x"][rows[k][-1], -1, 0] = np.nan
        batch["mask"][rows[k][-1], -1] = True
    kept = [row for k, row in enumerate(rows) if k not in bad]
    sums = compiled(ja.accumulate, loss[0], cut, skip_nonfinite=True)(params, batch)
    assert (sums.num_microbatches, sums.num_skipped) == (len(kept), len(bad))
    if kept:
        assert_window(sums, loss[1](params, take(batch, np.concatenate(kept)), len(kept)))
    else:
        window = ja.finalize(sums)
        assert np.isnan(window.loss)
        assert_equal(window.grads, jax.tree.map(np.zeros_like, params))
        assert not any(jax.tree.leaves(window.weight))


@check
@hypothesis.given(losses, cuts, seeds, st.lists(masks, min_size=2, max_size=4))
def test_merged_batches_are_one_batch(loss, cut, seed, many):
    params, _ = problem(seed)
    batches = [{**problem(seed + 1 + k)[1], "mask": mask} for k, mask in enumerate(many)]
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
    count = compiled(ja.denominators, loss[0], cut)
    shared = jax.tree.map(lambda *n: sum(n), *[count(params, batch) for batch in batches])
    given = {} if loss[0] is token_loss else {"denominators": shared}
    f = compiled(ja.accumulate, loss[0], cut)
    merged = functools.reduce(ja.merge, [f(params, batch, **given) for batch in batches])
    number = len(many) * len(cut_rows(ROWS, **CUTS[cut]))
    assert merged.num_microbatches == number
    assert_window(merged, loss[1](params, whole, number))


@check
@hypothesis.given(cuts, seeds, st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
def test_empty_rows_and_empty_windows(cut, seed, kept):
    params, batch = problem(seed)
    batch["mask"] = np.broadcast_to(np.array(kept)[:, None], (ROWS, TOKENS))
    batch["x"] = np.where(batch["mask"][..., None], batch["x"], 0)
    sums = compiled(ja.accumulate, token_loss, cut)(params, batch)
    assert_window(sums, token_answer(params, batch))
    loss, grads = compiled(ja.value_and_grad, token_loss, cut)(params, batch)
    assert np.isnan(loss) == (not any(kept))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@check
@hypothesis.given(cuts, orders)
def test_concatenated_rows_are_in_batch_order(cut, order):
    batch = np.asarray(order, np.float32)
    (_, rows), grad = compiled(ja.value_and_grad, numbered_loss, cut, has_aux=True, argnums=1)(
        jnp.float32(2), batch
    )
    assert_equal(rows, batch)
    assert_close(grad, 4 * batch / ROWS)


def numbered_loss(w, x):
    return ja.mean(w * x * x), ja.Concat(x)
