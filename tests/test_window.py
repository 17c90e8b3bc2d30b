"""One window inside a step: cuts, arguments, dtypes, options, composition and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import (
    CUTS,
    FEATURES,
    ROWS,
    assert_close,
    assert_equal,
    constant,
    cut_name,
    cut_rows,
    error,
    full_batch,
    problem,
    take,
    terms_answer,
    terms_loss,
    token_answer,
    token_loss,
    wide,
)

import jaxaccum as ja

LOSSES = [(token_loss, token_answer), (terms_loss, terms_answer)]
LOSS_IDS = ["one term", "terms"]
FEW_CUTS = pytest.mark.parametrize(
    "cut", [{"num_microbatches": 3}, {"microbatch_size": 2}], ids=cut_name
)


def product(w, x):
    """The mean of `w * x`: the gradient is the mean of `x`."""
    return ja.mean(w * x)


# Cuts


@pytest.mark.parametrize("cut", CUTS, ids=cut_name)
@pytest.mark.parametrize(("loss_fn", "answer_fn"), LOSSES, ids=LOSS_IDS)
def test_every_cut_equals_the_full_batch(loss_fn, answer_fn, cut):
    params, batch = problem(1)
    window = ja.finalize(jax.jit(ja.accumulate(loss_fn, **cut))(params, batch))
    number = len(cut_rows(ROWS, **cut))
    want = answer_fn(params, batch, number)
    assert_close((window.loss, window.grads, window.weight), tuple(want))
    assert window.num_microbatches == number
    assert window.num_skipped == 0
    assert window.aux is None


@FEW_CUTS
def test_small_integers_sum_bit_for_bit(cut):
    params, batch = problem(2, integer=True)
    want = token_answer(params, batch)
    sums = jax.jit(ja.accumulate(token_loss, **cut))(params, batch)
    n = want.weight
    undivided = jax.tree.map(lambda x: np.rint(x * n), (want.loss, want.grads))
    assert_equal((sums.loss, sums.grads), undivided)
    assert_equal(sums.weight, n)
    assert sums.weight.dtype == jnp.int32


@pytest.mark.parametrize("weight", [3, 7, 17])
@pytest.mark.parametrize("number", [1, 2])
def test_the_quotient_is_rounded_once(number, weight):
    """XLA alone would multiply an array by the reciprocal of a scalar: one unit off."""

    def loss_fn(w, x):
        return ja.Mean(jnp.sum(w[None] * x), jnp.float32(weight / number))

    w, x = np.zeros(99, np.float32), np.tile(np.arange(99, dtype=np.float32), (number, 1))
    f = ja.value_and_grad(loss_fn, num_microbatches=number)
    for call_fn in (f, jax.jit(f)):
        assert_equal(call_fn(w, x)[1], number * np.arange(99) / weight)


@pytest.mark.parametrize("cut", [{"num_microbatches": 3}, {"microbatch_size": 7}], ids=cut_name)
@pytest.mark.parametrize(("loss_fn", "answer_fn"), LOSSES, ids=LOSS_IDS)
def test_float64(x64, loss_fn, answer_fn, cut):
    params, batch = wide(problem(3))
    want = answer_fn(params, batch)
    loss, grads = jax.jit(ja.value_and_grad(loss_fn, **cut))(params, batch)
    assert loss.dtype == grads["w"].dtype == jnp.float64
    assert_close((loss, grads), (want.loss, want.grads))


def test_eager_equals_jit():
    params, batch = problem(4, integer=True)
    f = ja.value_and_grad(token_loss, num_microbatches=3)
    assert_equal(f(params, batch), jax.jit(f)(params, batch))


@pytest.mark.parametrize("cut", CUTS, ids=cut_name)
def test_split_lists_the_micro_batches_in_order(cut):
    batch = {"x": np.arange(ROWS), "y": np.arange(2 * ROWS).reshape(ROWS, 2)}
    pieces = ja.split(batch, **cut)
    rows = cut_rows(ROWS, **cut)
    assert len(pieces) == len(rows)
    for piece, index in zip(pieces, rows, strict=True):
        assert_equal(piece, take(batch, index))


@pytest.mark.parametrize("number", [np.int64(3), np.int8(3), jnp.int32(3)])
def test_integers_of_other_libraries_are_accepted(number):
    f = ja.value_and_grad(product, num_microbatches=number)
    assert_equal(f(jnp.float32(1), jnp.arange(6.0)), (2.5, 2.5))


@pytest.mark.parametrize("unroll", [2, True])
def test_unroll_changes_nothing(unroll):
    params, batch = problem(5)
    want = token_answer(params, batch)
    f = ja.value_and_grad(token_loss, num_microbatches=5, unroll=unroll)
    assert_close(jax.jit(f)(params, batch), (want.loss, want.grads))


@pytest.mark.parametrize(
    "accumulator",
    [ja.accumulators.plain(), ja.accumulators.compensated()],
    ids=["plain", "compensated"],
)
def test_accumulators_read_as_one_float32_array(accumulator):
    params, batch = problem(6)
    want = token_answer(params, batch)
    window = ja.finalize(
        ja.accumulate(token_loss, num_microbatches=5, accumulator=accumulator)(params, batch)
    )
    assert_close((window.loss, window.grads), (want.loss, want.grads))


def test_the_compensated_sum_keeps_what_float32_loses():
    """1 + 4096 terms of 2**-25 each: float32 rounds every single one away."""
    x = np.full(4097, 2.0**-25, np.float32)
    x[0] = 1
    f = ja.accumulate(product, num_microbatches=4097, accumulator=ja.accumulators.compensated())
    assert_equal(jax.jit(f)(jnp.float32(0), x).grads, 1 + 2.0**-13)


def test_a_wider_accumulator(x64):
    f = ja.accumulate(
        product, num_microbatches=2, accumulator=ja.accumulators.plain(dtype=jnp.float64)
    )
    x = np.array([1, 2.0**-30], np.float32)
    sums = f(jnp.float32(0), x)
    assert sums.grads.dtype == jnp.float64
    assert_equal(sums.grads, 1 + 2.0**-30)


# Arguments


def scaled(params, batch, scale, shift):
    e = error(params, batch) * scale + shift
    return ja.mean(e * e, weights=constant(batch["weight"]))


@pytest.mark.parametrize("argnums", [0, 1, 2, -1, -2, (0,), (2, 0), (0, 1), (1,), [0, 3]])
def test_argnums(argnums):
    args = (*problem(7), np.float32(1.25), np.float32(0.5))
    # Gradients of masks are float0, as from `jax.grad(..., allow_int=True)`.
    got = jax.jit(ja.value_and_grad(scaled, num_microbatches=3, argnums=argnums))(*args)
    numbers = tuple(argnums) if isinstance(argnums, list) else argnums
    loss, grads = full_batch(scaled, *args, argnums=numbers)
    assert jax.tree.structure(got[1]) == jax.tree.structure(grads)
    assert_close(got, (loss, grads))


@FEW_CUTS
@pytest.mark.parametrize("loss_fn", [token_loss, terms_loss], ids=LOSS_IDS)
def test_the_gradient_of_the_rows_is_in_batch_order(loss_fn, cut):
    params, batch = problem(8)
    f = jax.jit(ja.value_and_grad(loss_fn, argnums=(0, 1), **cut))
    assert_close(f(params, batch), full_batch(loss_fn, params, batch, argnums=(0, 1)))


def test_leaves_without_a_gradient():
    params = {"w": jnp.float32(2), "table": jnp.arange(3), "flag": np.True_, "absent": None}

    def loss_fn(p, x):
        return ja.mean(p["w"] * x * p["table"][1] * jnp.where(p["flag"], 1.0, 0.0))

    f = ja.value_and_grad(loss_fn, num_microbatches=2)
    for call in (f, jax.jit(f)):
        loss, grads = call(params, jnp.array([1.0, 3.0]))
        assert (loss, grads["w"]) == (4, 2)
        assert grads["absent"] is None
        assert grads["table"].dtype == grads["flag"].dtype == jax.dtypes.float0
        assert grads["table"].shape == (3,)
    assert jax.tree.structure(grads) == jax.tree.structure(params)


def test_frozen_leaves_have_a_zero_gradient():
    def loss_fn(p, x):
        return ja.mean(p["w"] * jax.lax.stop_gradient(p["frozen"]) * x)

    params = {"w": jnp.float32(1), "frozen": jnp.ones(()), "unused": jnp.ones(3)}
    _, grads = ja.value_and_grad(loss_fn, num_microbatches=2)(params, jnp.array([1.0, 3.0]))
    assert_equal(grads, {"w": 2.0, "frozen": 0.0, "unused": np.zeros(3)})


def test_leaves_without_a_gradient_beside_terms_and_skipping():
    def loss_fn(params, x):
        return {"a": product(params["w"], x), "b": ja.Mean(params["w"], 1.0)}

    f = ja.value_and_grad(loss_fn, num_microbatches=2, skip_nonfinite=True)
    params = {"w": jnp.float32(2), "table": jnp.arange(3), "absent": None}
    _, grads = jax.jit(f)(params, jnp.array([1.0, 3.0]))
    assert grads["w"] == 3
    assert grads["table"].dtype == jax.dtypes.float0


def test_no_parameters():
    f = ja.value_and_grad(lambda params, x: ja.mean(x), num_microbatches=2)
    assert_equal(f({}, jnp.array([1.0, 3.0])), (2.0, {}))


def test_python_scalars_as_parameters():
    loss, grad = ja.value_and_grad(product, num_microbatches=2)(2.0, jnp.array([1.0, 3.0]))
    assert (loss, grad, grad.dtype) == (4, 2, jnp.float32)


def test_other_arguments_pass_through_whole():
    def loss_fn(w, x, table, scale):
        assert table.shape == (5,)
        return ja.mean(w * x * table.sum() * scale)

    f = ja.value_and_grad(loss_fn, num_microbatches=2)
    assert_equal(f(jnp.float32(1), jnp.ones(4), jnp.arange(5.0), 0.5), (5.0, 5.0))


def test_batches_of_any_tree():
    def loss_fn(w, batch):
        return ja.mean(w * batch[0] * batch[1]["x"])

    batch = (np.arange(4.0, dtype=np.float32), {"x": jnp.ones(4), "absent": None})
    f = ja.value_and_grad(loss_fn, microbatch_size=3)
    assert_equal(f(jnp.float32(2), batch), (3.0, 1.5))


# Dtypes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_sums_are_wide_and_gradients_have_the_parameters_dtype(dtype):
    w = jnp.full(2, 2, dtype)
    x = jnp.array([[1, 2], [3, 4], [5, 6]], jnp.dtype(dtype))

    def loss_fn(w, x):
        return ja.mean(jnp.real(w * x))

    sums = ja.accumulate(loss_fn, num_microbatches=3)(w[None], x)
    wide = jnp.complex64 if dtype == "complex64" else jnp.float32
    assert (sums.grads.dtype, sums.loss.dtype) == (wide, jnp.float32)
    assert ja.finalize(sums).grads.dtype == wide
    loss, grads = ja.value_and_grad(loss_fn, num_microbatches=3)(w[None], x)
    assert (grads.dtype, loss.dtype) == (jnp.dtype(dtype), jnp.float32)
    assert_equal((loss, grads), (7.0, np.array([[1.5, 2.0]])))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_64_bit_parameters_stay_wide(x64, dtype):
    w, x = jnp.ones((), dtype), jnp.array([1, 1e-12], dtype)

    def loss_fn(w, x):
        return ja.mean(jnp.real(w * x))

    loss, grad = ja.value_and_grad(loss_fn, num_microbatches=2)(w, x)
    assert (loss.dtype, grad.dtype) == (jnp.float64, jnp.dtype(dtype))
    assert_close((loss, grad), ((1 + 1e-12) / 2, (1 + 1e-12) / 2))


def test_each_parameter_keeps_its_own_dtype():
    params = {"a": jnp.bfloat16(1), "b": jnp.float32(1), "c": jnp.float16(1)}

    def loss_fn(p, x):
        return ja.mean(x * (p["a"].astype(x.dtype) + p["b"] + p["c"].astype(x.dtype)))

    _, grads = ja.value_and_grad(loss_fn, num_microbatches=2)(params, jnp.ones(4))
    assert jax.tree.map(lambda g: g.dtype, grads) == jax.tree.map(lambda p: p.dtype, params)


def test_a_narrow_total_is_summed_in_float32():
    def loss_fn(w, x):
        return ja.Mean(jnp.sum(w * x), jnp.bfloat16(1))

    sums = ja.accumulate(loss_fn, num_microbatches=300)(jnp.bfloat16(1), jnp.ones(300, "bfloat16"))
    assert_equal((sums.loss, sums.weight, sums.grads), (300.0, 300.0, 300.0))


# Keys


def test_every_micro_batch_has_its_own_key():
    def loss_fn(w, x, *, key):
        return ja.mean(w * x), {"key": jax.random.key_data(key)}

    f = ja.value_and_grad(loss_fn, num_microbatches=3, has_aux=True)
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        (_, aux), _ = f(jnp.float32(1), jnp.ones(7), key=key)
        (_, again), _ = jax.jit(f)(jnp.float32(1), jnp.ones(7), key=key)
        assert len({tuple(k) for k in np.asarray(aux["key"]).tolist()}) == 3
        assert_equal(aux, again)
    (_, other), _ = f(jnp.float32(1), jnp.ones(7), key=jax.random.key(1))
    assert not np.array_equal(aux["key"], other["key"])


def test_without_a_key_the_loss_gets_none():
    assert_equal(ja.value_and_grad(product, num_microbatches=1)(1.0, jnp.ones(2)), (1.0, 1.0))


# A part of the window


@pytest.mark.parametrize("cut", [{"num_microbatches": 4}, {"microbatch_size": 2}], ids=cut_name)
@pytest.mark.parametrize(("loss_fn", "answer_fn"), LOSSES, ids=LOSS_IDS)
def test_num_real_runs_the_first_micro_batches(loss_fn, answer_fn, cut):
    params, batch = problem(9)
    rows = cut_rows(ROWS, **cut)
    f = jax.jit(ja.accumulate(loss_fn, **cut))
    for number in range(1, len(rows) + 1):
        window = ja.finalize(f(params, batch, num_real=number))
        want = answer_fn(params, take(batch, np.concatenate(rows[:number])), number)
        assert_close((window.loss, window.grads, window.weight), tuple(want))
        assert window.num_microbatches == number


@pytest.mark.parametrize("number", [0, np.int64(0), jnp.int32(0)])
def test_num_real_of_zero_is_an_empty_window(number):
    params, batch = problem(9)
    for loss_fn in (token_loss, terms_loss):
        sums = ja.accumulate(loss_fn, num_microbatches=3)(params, batch, num_real=number)
        window = ja.finalize(sums)
        assert np.isnan(window.loss)
        assert_equal(window.grads, jax.tree.map(np.zeros_like, params))
        assert not any(jax.tree.leaves(window.weight))
        assert window.num_microbatches == 0


@pytest.mark.parametrize(
    ("number", "exception"),
    [
        (4, ValueError),
        (-1, ValueError),
        (1.0, TypeError),
        (True, TypeError),
        (jnp.ones(1, int), TypeError),
    ],
)
def test_num_real_refuses(number, exception):
    f = ja.value_and_grad(product, num_microbatches=3)
    with pytest.raises(exception, match="num_real"):
        f(jnp.float32(1), jnp.ones(6), num_real=number)


# Skipping


@pytest.mark.parametrize(
    ("cut", "bad"), [({"num_microbatches": 3}, np.nan), ({"microbatch_size": 2}, np.inf)]
)
@pytest.mark.parametrize(("loss_fn", "answer_fn"), LOSSES, ids=LOSS_IDS)
def test_skipping_equals_the_batch_without_those_rows(loss_fn, answer_fn, cut, bad):
    params, batch = problem(10)
    batch["mask"][:] = True
    rows = cut_rows(ROWS, **cut)
    batch["x"][rows[1][0], 0, 0] = bad
    window = ja.finalize(jax.jit(ja.accumulate(loss_fn, skip_nonfinite=True, **cut))(params, batch))
    kept = np.concatenate([r for k, r in enumerate(rows) if k != 1])
    want = answer_fn(params, take(batch, kept), len(rows) - 1)
    assert_close((window.loss, window.grads, window.weight), tuple(want))
    assert (window.num_microbatches, window.num_skipped) == (len(rows) - 1, 1)


def test_without_skipping_a_nan_is_seen():
    params, batch = problem(10)
    batch["x"][0] = np.nan
    batch["mask"][0] = True
    loss, grads = ja.value_and_grad(token_loss, num_microbatches=3)(params, batch)
    assert np.isnan(loss)
    assert np.isnan(grads["w"]).all()


@pytest.mark.parametrize("loss_fn", [token_loss, terms_loss], ids=LOSS_IDS)
def test_a_window_of_bad_micro_batches_is_empty(loss_fn):
    params, batch = problem(10)
    batch["x"][:] = np.nan
    batch["mask"][:] = True
    f = ja.accumulate(loss_fn, num_microbatches=3, skip_nonfinite=True)
    window = ja.finalize(jax.jit(f)(params, batch))
    assert np.isnan(window.loss)
    assert_equal(window.grads, jax.tree.map(np.zeros_like, params))
    assert (window.num_microbatches, window.num_skipped) == (0, 3)
    assert not any(jax.tree.leaves(window.weight))


def test_a_gradient_that_is_not_finite_is_skipped_as_well():
    """The loss of row 0 is 0, its gradient infinite."""

    def loss_fn(w, x):
        return ja.Mean(jnp.sum(jnp.sqrt(w * x)), 1.0)

    f = ja.value_and_grad(loss_fn, num_microbatches=2, skip_nonfinite=True)
    assert_equal(f(jnp.float32(0.25), jnp.array([0.0, 4.0])), (1.0, 2.0))
    _, grad = ja.value_and_grad(loss_fn, num_microbatches=2, skip_nonfinite=True)(
        jnp.float32(0), jnp.array([1.0, 4.0])
    )
    assert grad == 0


def test_skipping_and_num_real_together():
    x = jnp.array([1.0, jnp.nan, 3.0, 50.0])
    for terms in (product, lambda w, x: {"a": product(w, x), "b": ja.Mean(0.0 * w, 1.0)}):
        f = ja.accumulate(terms, num_microbatches=4, skip_nonfinite=True)
        sums = f(jnp.float32(1), x, num_real=3)
        assert_equal(ja.finalize(sums).grads, 2.0)
        assert (sums.num_microbatches, sums.num_skipped) == (2, 1)


def test_a_skipped_micro_batch_leaves_no_gradient_in_its_rows():
    x = jnp.array([1.0, jnp.nan, 3.0, 5.0])
    f = ja.value_and_grad(product, num_microbatches=4, argnums=1, skip_nonfinite=True)
    assert_close(f(jnp.float32(3), x), (9.0, np.array([1.0, 0.0, 1.0, 1.0])))


# Several batches


def test_sums_of_one_term_merge():
    params, batch = problem(11, 10)
    parts = [take(batch, rows) for rows in ([0, 1, 2, 3], [4], [5, 6, 7, 8, 9])]
    sums = [ja.accumulate(token_loss, microbatch_size=2)(params, part) for part in parts]
    window = ja.finalize(functools.reduce(ja.merge, sums))
    assert_close((window.loss, window.grads, window.weight), tuple(token_answer(params, batch)))
    assert window.num_microbatches == 6


def test_sums_of_several_terms_merge_over_shared_denominators():
    params, batch = problem(12, 9)
    parts = [take(batch, rows) for rows in ([0, 1, 2, 3, 4], [5, 6], [7, 8])]

    @jax.jit
    def step(params, parts):
        count = ja.denominators(terms_loss, num_microbatches=2)
        shared = jax.tree.map(lambda *n: sum(n), *[count(params, part) for part in parts])
        f = ja.accumulate(terms_loss, num_microbatches=2)
        sums = [f(params, part, denominators=shared) for part in parts]
        return ja.finalize(functools.reduce(ja.merge, sums))

    window = step(params, parts)
    assert_close((window.loss, window.grads, window.weight), tuple(terms_answer(params, batch, 6)))


def test_merging_sums_without_shared_denominators_is_refused():
    params, batch = problem(13)
    f = jax.jit(ja.accumulate(terms_loss, num_microbatches=2))
    own = f(params, batch)
    with pytest.raises(ValueError, match="denominators"):
        ja.merge(own, own)
    d = jax.jit(ja.denominators(terms_loss, num_microbatches=2))(params, batch)
    given = f(params, batch, denominators=d)
    with pytest.raises(ValueError, match="denominators"):
        ja.merge(given, own)
    other = f(params, batch, denominators=jax.tree.map(lambda x: x + 1, d))
    with pytest.raises(ValueError, match="different `denominators=`"):
        ja.merge(given, other)
    traced = ja.finalize(jax.jit(ja.merge)(given, other))
    assert np.isnan(traced.loss)
    assert all(np.isnan(g).all() for g in jax.tree.leaves(traced.grads))


def test_merging_different_things_is_refused():
    f = ja.accumulate(product, num_microbatches=1)
    a = f(jnp.float32(1), jnp.ones(2))
    b = f({"w": jnp.float32(1)}["w"], jnp.ones(2))
    assert ja.merge(a, b).weight == 4
    with pytest.raises(TypeError, match="WindowSums"):
        ja.merge(a, 1.0)
    with pytest.raises(TypeError, match="WindowSums"):
        ja.finalize(a.grads)
    tree = ja.accumulate(lambda p, x: product(p["w"], x), num_microbatches=1)
    with pytest.raises(ValueError, match="different structures"):
        ja.merge(a, tree({"w": jnp.float32(1)}, jnp.ones(2)))


@FEW_CUTS
def test_denominators_count_the_weights(cut):
    params, batch = problem(14)
    d = jax.jit(ja.denominators(terms_loss, **cut))(params, batch)
    assert_equal(d, terms_answer(params, batch, len(cut_rows(ROWS, **cut))).weight)
    assert d["sequence"].dtype == jnp.int32


def test_given_denominators_replace_the_windows_own():
    f = ja.value_and_grad(lambda w, x: {"a": product(w, x)}, num_microbatches=2)
    assert_equal(f(jnp.float32(2), jnp.ones(4), denominators={"a": 16}), (0.5, 0.25))


@pytest.mark.parametrize("given", [{"a": 1, "b": 1}, 1, [1], {"a": jnp.ones(2)}])
def test_denominators_of_the_wrong_form_are_refused(given):
    f = ja.value_and_grad(lambda w, x: {"a": product(w, x)}, num_microbatches=2)
    with pytest.raises(ValueError, match="`denominators` must"):
        f(jnp.float32(2), jnp.ones(4), denominators=given)


# Empty windows


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("skip", [False, True])
def test_a_window_without_weight(number, skip):
    params, batch = problem(15)
    batch["mask"][:] = False
    f = ja.accumulate(token_loss, num_microbatches=number, skip_nonfinite=skip)
    window = ja.finalize(jax.jit(f)(params, batch))
    assert np.isnan(window.loss)
    assert window.weight == 0
    assert_equal(window.grads, jax.tree.map(np.zeros_like, params))


def test_an_empty_term_adds_nothing():
    params, batch = problem(15)
    batch["mask"][:] = False
    loss, grads = ja.value_and_grad(terms_loss, num_microbatches=3)(params, batch)
    want = terms_answer(params, batch)
    assert_close((loss, grads), (want.loss, want.grads))
    assert want.weight == {"token": 0, "sequence": 0, "penalty": 1}


def test_the_loss_is_nan_only_when_every_term_is_empty():
    def loss_fn(w, x):
        return (ja.mean(w * x, x > 9), ja.Mean(w, 0))

    loss, grad = ja.value_and_grad(loss_fn, num_microbatches=2)(jnp.float32(2), jnp.ones(4))
    assert np.isnan(loss)
    assert grad == 0


# Composition


@pytest.mark.parametrize(("loss_fn", "answer_fn"), LOSSES, ids=LOSS_IDS)
def test_vmap_over_parameters_and_batches(loss_fn, answer_fn):
    problems = [problem(seed) for seed in (16, 17)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *problems)
    f = ja.value_and_grad(loss_fn, num_microbatches=3)
    loss, grads = jax.jit(jax.vmap(f))(*stacked)
    answers = [answer_fn(*p) for p in problems]
    assert_close((loss, grads), jax.tree.map(lambda *x: np.stack(x), *[a[:2] for a in answers]))


@jax.custom_vjp
def half_gradient(x):
    return x


half_gradient.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


@jax.custom_jvp
def double_gradient(x):
    return x


double_gradient.defjvp(lambda primals, tangents: (primals[0], 2 * tangents[0]))


@pytest.mark.parametrize(
    ("wrap", "factor"),
    [
        (jax.jit, 1),
        (jax.checkpoint, 1),
        (functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable), 1),
        (lambda fn: lambda p, b: fn(jax.tree.map(half_gradient, p), b), 0.5),
        (lambda fn: lambda p, b: fn(jax.tree.map(double_gradient, p), b), 2),
        (
            lambda fn: jax.checkpoint(jax.jit(lambda p, b: fn(jax.tree.map(half_gradient, p), b))),
            0.5,
        ),
    ],
    ids=["jit", "checkpoint", "policy", "custom_vjp", "custom_jvp", "nested"],
)
@pytest.mark.parametrize(("loss_fn", "answer_fn"), LOSSES, ids=LOSS_IDS)
def test_transformations_inside_the_loss(loss_fn, answer_fn, wrap, factor):
    params, batch = problem(18)
    want = answer_fn(params, batch)
    got = jax.jit(ja.value_and_grad(wrap(loss_fn), num_microbatches=3))(params, batch)
    assert_close(got, (want.loss, jax.tree.map(lambda g: factor * g, want.grads)))


def test_control_flow_inside_the_loss():
    def loss_fn(w, x):
        def step(carry, row):
            total, count = carry
            value = jax.lax.cond(row > 0, lambda: w * row, lambda: 0.0 * w)
            return (total + value, count + (row > 0)), None

        (total, count), _ = jax.lax.scan(step, (0.0, 0), x)
        return {"mean": ja.Mean(total, count), "all": product(w, x)}

    x = jnp.array([1.0, -2.0, 3.0, 8.0])
    f = ja.value_and_grad(loss_fn, num_microbatches=2)
    assert_close(f(jnp.float32(2), x), (8.0 + 5.0, 4.0 + 2.5))


@pytest.mark.parametrize("loss_fn", [token_loss, terms_loss], ids=LOSS_IDS)
def test_the_window_is_differentiable(loss_fn):
    params, batch = problem(19)
    f = ja.value_and_grad(loss_fn, num_microbatches=3)
    _, grads = full_batch(loss_fn, params, batch)
    assert_close(jax.jit(jax.grad(lambda p: f(p, batch)[0]))(params), grads)

    def norm(gradient_fn, params, batch):
        return ja.Mean(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient_fn(params, batch))), 1)

    def one_pass(params, batch):
        def value(params):
            terms = jax.tree.leaves(
                loss_fn(params, batch), is_leaf=lambda x: isinstance(x, ja.Mean)
            )
            return sum(t.total / t.weight for t in terms)

        return jax.grad(value)(params)

    second = jax.jit(jax.grad(lambda p: norm(lambda p, b: f(p, b)[1], p, batch).total))(params)
    _, want = full_batch(functools.partial(norm, one_pass), params, batch)
    assert_close(second, want)


def test_abstract_evaluation():
    params, batch = problem(20)
    f = ja.value_and_grad(terms_loss, num_microbatches=3)
    shapes = jax.eval_shape(f, params, batch)
    got = f(params, batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), got
    )
    assert jax.make_jaxpr(f)(params, batch).out_avals[0].shape == ()


def test_vmap_over_num_real_and_keys():
    def loss_fn(w, x, *, key):
        return ja.mean(w * x + 0.0 * jax.random.normal(key))

    f = ja.value_and_grad(loss_fn, num_microbatches=3)
    keys = jax.random.split(jax.random.key(0), 3)
    loss, grad = jax.vmap(
        lambda number, key: f(jnp.float32(1), jnp.arange(3.0), num_real=number, key=key)
    )(jnp.arange(1, 4), keys)
    assert_equal((loss, grad), (np.array([0.0, 0.5, 1.0]),) * 2)


def test_library_operations_inside_several_terms():
    """Custom derivatives, solvers, sorts and loops pass through the counting pass."""

    def loss_fn(params, batch):
        e, w = error(params, batch), params["w"]
        logits = batch["x"] * w[None, None]
        matrix = jnp.eye(FEATURES) + 0.1 * jnp.outer(w, w)
        return {
            "gelu": ja.mean(jax.nn.gelu(e), batch["mask"]),
            "entropy": ja.mean(
                optax.softmax_cross_entropy_with_integer_labels(
                    logits, jnp.argmax(batch["x"], axis=-1)
                )
            ),
            "sorted": ja.mean(jax.lax.top_k(jnp.sort(e, axis=1), 2)[0]),
            "mapped": ja.mean(jax.lax.map(lambda row: jnp.tanh(row).sum(), e)),
            "solved": ja.Mean(jnp.linalg.solve(matrix, w).sum(), 1),
        }

    params, batch = problem(24)
    f = jax.jit(ja.value_and_grad(loss_fn, num_microbatches=3))
    assert_close(f(params, batch), full_batch(loss_fn, params, batch))


def test_closing_over_traced_values():
    @jax.jit
    def step(w, x, scale):
        f = ja.value_and_grad(lambda w, x: ja.mean(scale * w * x), num_microbatches=2)
        return f(w, x)

    assert_equal(step(jnp.float32(1), jnp.arange(4.0), 2.0), (3.0, 3.0))


def test_inside_an_outer_scan():
    def step(w, x):
        loss, grad = ja.value_and_grad(product, num_microbatches=2)(w, x)
        return w - grad, loss

    w, losses = jax.jit(lambda w, xs: jax.lax.scan(step, w, xs))(jnp.float32(1), jnp.ones((3, 4)))
    assert_equal((w, losses), (-2.0, np.array([1.0, 0.0, -1.0])))


def test_strict_dtype_promotion():
    params, batch = problem(21)

    def loss_fn(params, batch):
        e = error(params, batch)
        penalty = jnp.sum(params["w"].astype(jnp.float16))
        return ja.mean(e * e, batch["mask"]), ja.Mean(penalty, 1)

    with jax.numpy_dtype_promotion("strict"):
        for options in ({}, {"skip_nonfinite": True}):
            f = ja.value_and_grad(loss_fn, num_microbatches=3, **options)
            loss, grads = jax.eval_shape(functools.partial(f, num_real=2), params, batch)
            assert loss.dtype == grads["w"].dtype == jnp.float32


def test_no_tracer_leaks():
    params, batch = problem(22)
    f = ja.value_and_grad(terms_loss, num_microbatches=3, skip_nonfinite=True)
    with jax.checking_leaks():
        shapes = jax.eval_shape(f, params, batch)
    assert shapes[0].shape == ()


@pytest.mark.parametrize("empty", ["micro-batch", "term"])
def test_debug_nans_is_silent_while_something_counts(empty):
    params, batch = problem(23)
    batch["mask"][:] = True
    batch["mask"][cut_rows(ROWS, num_microbatches=3)[0] if empty == "micro-batch" else ...] = False
    f = jax.jit(ja.value_and_grad(terms_loss, num_microbatches=3))
    with jax.debug_nans(True):
        assert np.isfinite(f(params, batch)[0])


@pytest.mark.parametrize(
    "call_fn",
    [
        lambda: ja.Mean(jnp.float32(4), 2).value,
        lambda: ja.value_and_grad(product, num_microbatches=2)(jnp.float32(2), jnp.ones(4))[0],
    ],
    ids=["Mean.value", "value_and_grad"],
)
def test_debug_nans_is_silent_outside_jit(call_fn):
    with jax.debug_nans(True):
        assert call_fn() == 2


def test_debug_nans_reports_an_empty_window():
    f = jax.jit(ja.value_and_grad(product, num_microbatches=2))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.block_until_ready(f(jnp.float32(1), jnp.ones(4), num_real=0))


# Refusals


def call(loss_fn, **options):
    """One window of `loss_fn(w, x)` over four rows."""
    f = ja.value_and_grad(loss_fn, **{"num_microbatches": 2, **options})
    return f(jnp.float32(1), jnp.arange(4.0))


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda w, x: jnp.mean(w * x), r"ja\.mean"),
        (lambda w, x: jnp.mean(w * x), r"float32\[\]"),
        (lambda w, x: (jnp.mean(w * x), jnp.max(x)), "has_aux"),
        (lambda w, x: (product(w, x), jnp.max(x)), "has_aux=True"),
        (lambda w, x: {"a": product(w, x), "b": jnp.mean(x)}, r"loss\['b'\]"),
        (lambda w, x: None, r"ja\.mean"),
        (lambda w, x: {}, r"ja\.mean"),
        (lambda w, x: 1.0, "float"),
        (lambda w, x: ja.Sum(w), r"ja\.Mean"),
        (lambda w, x: ja.Mean(w * x, 1), "total .* real floating scalar"),
        (lambda w, x: ja.Mean(jnp.int32(1), 1), "total .* real floating scalar"),
        (lambda w, x: ja.Mean(w, x), "weight .* real scalar"),
        (lambda w, x: ja.Mean(w, jnp.complex64(1)), "weight .* real scalar"),
    ],
)
def test_losses_that_are_not_means_are_refused(loss_fn, message):
    with pytest.raises(TypeError, match=message):
        call(loss_fn)


@pytest.mark.parametrize("loss_fn", [product, lambda w, x: (product(w, x), 1, 2)])
def test_has_aux_needs_a_pair(loss_fn):
    with pytest.raises(TypeError, match=r"has_aux.*\(loss, aux\)"):
        call(loss_fn, has_aux=True)


def sigmoid_weight(w, x):
    weight = jax.nn.sigmoid(w * x)
    return jnp.sum(weight * x), jnp.sum(weight)


@jax.custom_vjp
def custom_sum(w, x):
    return jnp.sum(w * x)


custom_sum.defvjp(lambda w, x: (jnp.sum(w * x), x), lambda x, g: (g * jnp.sum(x), g * x))


def looped(w, x):
    return jax.lax.scan(lambda c, row: (c + w * row, None), 0.0 * w, x)[0]


DEPENDENT = {
    "plain": lambda w, x: ja.Mean(*sigmoid_weight(w, x)),
    "jit": lambda w, x: ja.Mean(*jax.jit(sigmoid_weight)(w, x)),
    "checkpoint": lambda w, x: ja.Mean(*jax.checkpoint(sigmoid_weight)(w, x)),
    "custom_vjp": lambda w, x: ja.Mean(jnp.sum(w * x), custom_sum(w, x)),
    "scan": lambda w, x: ja.Mean(jnp.sum(w * x), looped(w, x)),
    "cond": lambda w, x: ja.Mean(w, jax.lax.cond(x[0] > 0, lambda: w, lambda: 1.0)),
    "one of several": lambda w, x: {"a": product(w, x), "b": ja.Mean(w, w)},
}


@pytest.mark.parametrize("loss_fn", DEPENDENT.values(), ids=DEPENDENT)
@pytest.mark.parametrize("skip", [False, True])
def test_weights_that_depend_on_the_parameters_are_refused(loss_fn, skip):
    with pytest.raises(ValueError, match=r"stop_gradient.*ja\.microbatch"):
        call(loss_fn, skip_nonfinite=skip)
    with pytest.raises(ValueError, match="weight of `loss"):
        call(jax.jit(loss_fn))
    with pytest.raises(ValueError, match=r"^denominators: the weight of `loss"):
        ja.denominators(loss_fn, num_microbatches=2)(jnp.float32(1), jnp.arange(4.0))


def test_a_weight_that_depends_on_the_rows_is_refused_where_they_are_differentiated():
    def loss_fn(w, x):
        return ja.mean(w * x, weights=x)

    assert np.isfinite(call(loss_fn)[0])
    with pytest.raises(ValueError, match="weight of `loss"):
        call(loss_fn, argnums=1)


@jax.custom_vjp
def coupled(w, x):
    return jnp.sum(w * x), jnp.sum(x > 0)


coupled.defvjp(lambda w, x: (coupled(w, x), x), lambda x, g: (g[0] * jnp.sum(x), g[0] * x))

CONSTANT = {
    "stop_gradient": lambda w, x: ja.mean(w * x, weights=jax.lax.stop_gradient(w * x)),
    "comparison": lambda w, x: ja.mean(w * x, where=w * x > 0),
    "argmax": lambda w, x: ja.Mean(jnp.sum(w * x), jnp.argmax(w * x) + 1),
    "rounding": lambda w, x: ja.mean(w * x, weights=(w * x).astype(jnp.int32)),
    "custom_vjp": lambda w, x: ja.Mean(*coupled(w, x)),
    "checkpointed stop_gradient": jax.checkpoint(
        lambda w, x: ja.mean(w * x, weights=jax.lax.stop_gradient(jnp.exp(w) * x))
    ),
}


@pytest.mark.parametrize("loss_fn", CONSTANT.values(), ids=CONSTANT)
def test_weights_that_only_look_dependent_are_accepted(loss_fn):
    for fn in (loss_fn, lambda w, x: {"a": loss_fn(w, x), "b": product(w, x)}):
        f = ja.value_and_grad(fn, microbatch_size=3)
        assert jax.eval_shape(f, jnp.float32(1), jnp.arange(4.0))[0].shape == ()


FACTORIES = {
    "accumulate": functools.partial(ja.accumulate, product),
    "value_and_grad": functools.partial(ja.value_and_grad, product),
    "denominators": functools.partial(ja.denominators, product),
    "split": functools.partial(ja.split, np.arange(4)),
}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize(
    ("cut", "exception", "message"),
    [
        ({}, ValueError, "exactly one of .*num_microbatches.*microbatch_size.*none"),
        ({"num_microbatches": 2, "microbatch_size": 2}, ValueError, "exactly one of"),
        ({"num_microbatches": 0}, ValueError, "`num_microbatches` must be at least 1, got 0"),
        ({"num_microbatches": -1}, ValueError, "`num_microbatches` must be at least 1, got -1"),
        ({"num_microbatches": 2.5}, TypeError, "`num_microbatches` must be .*integer, got 2.5"),
        ({"num_microbatches": "4"}, TypeError, "`num_microbatches` must be .*integer, got '4'"),
        ({"num_microbatches": True}, TypeError, "`num_microbatches` must be .*integer, got True"),
        ({"microbatch_size": 0}, ValueError, "`microbatch_size` must be at least 1, got 0"),
        ({"microbatch_size": 2.0}, TypeError, "`microbatch_size` must be .*integer, got 2.0"),
    ],
)
def test_cuts_that_are_refused_when_the_function_is_made(name, cut, exception, message):
    with pytest.raises(exception, match=f"^{name}: {message}"):
        FACTORIES[name](**cut)


@pytest.mark.parametrize("name", [n for n in FACTORIES if n != "split"])
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.ones(3, np.float32), "`num_microbatches` is 4, but the batch has only 3 rows"),
        (
            {"a": np.ones(4), "b": np.ones((5, 2))},
            r"same number of rows.*batch\['a'\].*batch\['b'\]",
        ),
        (np.ones((0, 2), np.float32), "zero rows"),
        ({"a": np.ones(4), "b": np.float32(1)}, r"axis 0.*batch\['b'\].*`\*args`"),
        ({}, "no leaves"),
    ],
)
def test_batches_that_cannot_be_cut(name, batch, message):
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        FACTORIES[name](num_microbatches=4)(jnp.float32(1), batch)
    with pytest.raises(ValueError, match=f"^split: .*{message}"):
        ja.split(batch, num_microbatches=4)


@pytest.mark.parametrize(
    ("options", "exception", "message"),
    [
        ({"argnums": 2}, ValueError, "`argnums` names argument 2, but only 2"),
        ({"argnums": (0, 0)}, ValueError, "`argnums` must name .* once"),
        ({"argnums": (0, -2)}, ValueError, "`argnums` must name .* once"),
        ({"argnums": ()}, ValueError, "`argnums` must name at least one"),
        ({"argnums": 0.5}, TypeError, "`argnums` must be .*integer"),
        ({"argnums": -3}, ValueError, "`argnums`"),
        ({"accumulator": jnp.float32}, TypeError, "`accumulator` must come from"),
    ],
)
def test_options_that_are_refused(options, exception, message):
    with pytest.raises(exception, match=message):
        call(product, **options)


def test_the_loss_must_be_a_function():
    with pytest.raises(TypeError, match="`loss_fn` must be a function"):
        ja.value_and_grad(1.0, num_microbatches=1)


def test_parameters_must_be_arrays():
    f = ja.value_and_grad(lambda p, x: product(p["w"], x), num_microbatches=1)
    with pytest.raises(TypeError, match=r"\['name'\].* must be an array.*str"):
        f({"w": jnp.float32(1), "name": "layer"}, jnp.ones(2))


@pytest.mark.parametrize(
    ("dtype", "exception"),
    [(jnp.bfloat16, ValueError), (jnp.int32, TypeError), ("nonsense", TypeError)],
)
def test_accumulators_refuse_narrow_and_unknown_dtypes(dtype, exception):
    with pytest.raises(exception, match="`dtype` must be"):
        ja.accumulators.plain(dtype=dtype)
