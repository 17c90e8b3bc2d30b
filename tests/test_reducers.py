"""How auxiliary outputs, and gradients that are not sums, are combined over a window."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import (
    CUTS,
    FEATURES,
    ROWS,
    assert_close,
    assert_equal,
    cut_name,
    cut_rows,
    error,
    problem,
    take,
    token_answer,
    token_loss,
)

import jaxaccum as ja


def outputs_loss(params, batch):
    """The token loss, and one auxiliary output for every reducer."""
    e = error(params, batch)
    aux = {
        "mean": ja.mean(e, where=batch["mask"]),
        "sum": ja.Sum({"error": jnp.sum(e), "tokens": jnp.sum(batch["mask"])}),
        "max": ja.Max(jnp.max(e, axis=(0, 1))),
        "min": (ja.Min(jnp.min(batch["x"], axis=(0, 1))),),
        "last": ja.Last(batch["y"][-1]),
        "rows": ja.Concat({"error": jnp.sum(e, axis=1), "x": batch["x"]}),
        "bare": jnp.sum(batch["x"], axis=(0, 1)),
        "none": None,
    }
    return token_loss(params, batch), aux


def outputs_answer(params, batch, cut):
    e = error(params, batch)
    rows = cut_rows(ROWS, **cut)
    return {
        "mean": e[batch["mask"]].mean(),
        "sum": {"error": e.sum(), "tokens": batch["mask"].sum()},
        "max": e.max(),
        "min": (batch["x"].min(axis=(0, 1)),),
        "last": batch["y"][rows[-1][-1]],
        "rows": {"error": e.sum(axis=1), "x": batch["x"]},
        "bare": np.stack([batch["x"][index].sum(axis=(0, 1)) for index in rows]),
        "none": None,
    }


@pytest.mark.parametrize("cut", CUTS, ids=cut_name)
def test_every_reducer_in_every_cut(cut):
    params, batch = problem(1, integer=True)
    f = jax.jit(ja.value_and_grad(outputs_loss, has_aux=True, **cut))
    (loss, aux), grads = f(params, batch)
    assert_equal(aux, outputs_answer(params, batch, cut))
    want = token_answer(params, batch)
    assert_close((loss, grads), (want.loss, want.grads))
    assert aux["sum"]["tokens"].dtype == jnp.int32


def test_sums_keep_the_marks_so_that_they_merge():
    params, batch = problem(2, integer=True)
    parts = [take(batch, rows) for rows in ([0, 1, 2], [3, 4, 5, 6])]
    f = ja.accumulate(outputs_loss, num_microbatches=1, has_aux=True)
    sums = [jax.jit(f)(params, part) for part in parts]
    assert isinstance(sums[0].aux["mean"], ja.Mean)
    assert isinstance(sums[0].aux["rows"], ja.Concat)
    merged = ja.finalize(ja.merge(*sums)).aux
    bare = [part["x"].sum(axis=(0, 1)) for part in parts]
    want = outputs_answer(params, batch, {"num_microbatches": 1})
    assert_equal(merged, {**want, "bare": np.stack(bare)})


@pytest.mark.parametrize("cut", [{"num_microbatches": 3}, {"microbatch_size": 2}], ids=cut_name)
def test_skipped_micro_batches_leave_the_carried_outputs(cut):
    params, batch = problem(3)
    batch["mask"][:] = True
    rows = cut_rows(ROWS, **cut)
    batch["x"][rows[-1]] = np.nan
    f = jax.jit(ja.value_and_grad(outputs_loss, has_aux=True, skip_nonfinite=True, **cut))
    (_, aux), _ = f(params, batch)
    kept = take(batch, np.concatenate(rows[:-1]))
    e = error(params, kept)
    got = {name: aux[name] for name in ("mean", "sum", "max", "min", "last")}
    want = {
        "mean": e.mean(dtype=np.float64),
        "sum": {"error": e.sum(dtype=np.float64), "tokens": e.size},
        "max": e.max(),
        "min": (kept["x"].min(axis=(0, 1)),),
        "last": batch["y"][rows[-2][-1]],
    }
    assert_close(got, want)
    # What is stacked or concatenated is kept as it came.
    assert np.isnan(aux["bare"]).all(axis=1).tolist() == [False] * (len(rows) - 1) + [True]
    assert np.isnan(aux["rows"]["error"]).tolist() == [row in rows[-1] for row in range(ROWS)]


def test_num_real_leaves_the_outputs_of_what_does_not_run():
    def loss_fn(w, x):
        e = w * x
        return ja.mean(e), {"max": ja.Max(e.max()), "last": ja.Last(e[0]), "bare": e[0]}

    f = jax.jit(ja.value_and_grad(loss_fn, num_microbatches=3, has_aux=True))
    x = jnp.array([1.0, 5.0, 9.0])
    (_, aux), _ = f(jnp.float32(1), x, num_real=2)
    assert (aux["max"], aux["last"]) == (5, 5)
    assert_equal(aux["bare"][:2], [1.0, 5.0])
    (_, aux), _ = f(jnp.float32(1), x, num_real=0)
    assert (aux["max"], aux["last"]) == (-np.inf, 0)


@pytest.mark.parametrize(
    ("mark", "dtype", "result", "value"),
    [
        (ja.Sum, jnp.bfloat16, jnp.float32, 300),
        (ja.Sum, jnp.float16, jnp.float32, 300),
        (ja.Sum, jnp.int8, jnp.int32, 300),
        (ja.Sum, jnp.bool_, jnp.int32, 300),
        (ja.Sum, jnp.complex64, jnp.complex64, 300),
        (ja.Sum, jnp.float8_e5m2, jnp.float32, 300),
        (ja.Sum, jnp.int4, jnp.int32, 300),
        (ja.Max, jnp.float8_e4m3fn, jnp.float8_e4m3fn, 1),
        (ja.Min, jnp.float4_e2m1fn, jnp.float4_e2m1fn, 1),
        (ja.Max, jnp.bfloat16, jnp.bfloat16, 1),
        (ja.Max, jnp.int8, jnp.int8, 1),
        (ja.Min, jnp.bool_, jnp.bool_, 1),
        (ja.Min, jnp.uint8, jnp.uint8, 1),
        (ja.Last, jnp.float16, jnp.float16, 1),
        (ja.Last, jnp.bool_, jnp.bool_, 1),
    ],
)
def test_dtypes(mark, dtype, result, value):
    def loss_fn(w, x):
        return ja.mean(w * x), mark(jnp.ones((), dtype))

    f = ja.value_and_grad(loss_fn, num_microbatches=300, has_aux=True)
    (_, aux), _ = jax.jit(f)(jnp.float32(1), jnp.ones(300))
    assert (aux.dtype, aux) == (result, value)


@pytest.mark.parametrize("mark", [ja.Max, ja.Min])
def test_an_extreme_nan_stays(mark):
    f = ja.value_and_grad(
        lambda w, x: (ja.mean(w * x), mark(x[0])), num_microbatches=3, has_aux=True
    )
    (_, aux), _ = f(jnp.float32(1), jnp.array([1.0, jnp.nan, 3.0]))
    assert np.isnan(aux)


def test_extremes_of_negative_numbers_do_not_meet_zero():
    def loss_fn(w, x):
        return ja.mean(w * x), (ja.Max(x[0]), ja.Max(x[0].astype(int)), ja.Min(-x[0].astype(int)))

    f = ja.value_and_grad(loss_fn, num_microbatches=2, has_aux=True)
    (_, aux), _ = f(jnp.float32(1), jnp.array([-5.0, -3.0]))
    assert aux == (-3, -3, 3)


def test_aux_stands_beside_several_terms():
    def loss_fn(w, x):
        return (ja.mean(w * x), ja.Mean(w, 1.0)), {"rows": ja.Concat(w * x)}

    f = ja.value_and_grad(loss_fn, num_microbatches=2, has_aux=True)
    (loss, aux), grad = jax.jit(f)(jnp.float32(2), jnp.arange(5.0))
    assert_close((loss, grad), (6.0, 3.0))
    assert_equal(aux["rows"], 2 * np.arange(5.0))


def test_aux_alone_carries_no_gradient():
    def loss_fn(w, x):
        return ja.mean(w * x), w**3

    f = ja.value_and_grad(loss_fn, num_microbatches=2, has_aux=True)
    assert f(jnp.float32(2), jnp.ones(4))[1] == 1


@pytest.mark.parametrize(
    ("aux_fn", "message"),
    [
        (lambda x: ja.Concat(jnp.sum(x)), r"`aux` is marked `ja.Concat`.*2 rows.*float32\[\]"),
        (lambda x: {"a": ja.Concat(jnp.ones((3, 2)))}, r"aux\['a'\].*2 rows.*float32\[3,2\]"),
        (lambda x: ja.Concat((x, x.T)), r"2 rows.*float32\[3,2\]"),
    ],
)
def test_concat_must_hold_the_rows(aux_fn, message):
    f = ja.value_and_grad(
        lambda w, x: (ja.mean(w * x), aux_fn(x)), num_microbatches=3, has_aux=True
    )
    with pytest.raises(ValueError, match=message):
        f(jnp.float32(1), jnp.ones((6, 3)))


def test_bare_rows_of_different_length_are_refused():
    f = ja.value_and_grad(
        lambda w, x: (ja.mean(w * x), {"rows": x}), microbatch_size=2, has_aux=True
    )
    with pytest.raises(ValueError, match=r"rows.*float32\[2\].*float32\[1\].*ja\.Concat"):
        f(jnp.float32(1), jnp.ones(5))


def test_outputs_of_different_structure_are_refused():
    def loss_fn(w, x):
        return ja.mean(w * x), {"a": x[0]} if len(x) == 2 else [x[0]]

    f = ja.value_and_grad(loss_fn, microbatch_size=2, has_aux=True)
    with pytest.raises(ValueError, match=r"structure.*size of micro-batch"):
        f(jnp.float32(1), jnp.ones(5))


# Gradients that are not sums


@jax.custom_vjp
def scaled_product(w, amax, x):
    """A product whose `gradient` for `amax` is the new largest magnitude, as in FP8 layers."""
    return w * x


scaled_product.defvjp(
    lambda w, amax, x: (w * x, (w, x)),
    lambda res, g: (jnp.sum(g * res[1]), jnp.max(jnp.abs(res[1])), g * res[0]),
)

SCALES = {"w": np.float32(2), "amax": np.float32(0)}


def fp8_loss(params, x):
    return ja.mean(scaled_product(params["w"], params["amax"], x))


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("cut", [{"num_microbatches": 2}, {"microbatch_size": 2}], ids=cut_name)
def test_gradient_reducers(cut, terms):
    def loss_fn(params, x):
        return fp8_loss(params, x) if terms == 1 else {"a": fp8_loss(params, x)}

    f = ja.value_and_grad(loss_fn, grad_reducers={"w": ja.Sum, "amax": ja.Max}, **cut)
    loss, grads = jax.jit(f)(SCALES, jnp.array([1.0, -7.0, 2.0, 3.0, 6.0]))
    assert_close((loss, grads), (2.0, {"w": 1.0, "amax": 7.0}))
    assert grads["amax"] == 7


def test_gradient_reducers_merge_and_skip():
    f = ja.accumulate(
        fp8_loss,
        num_microbatches=2,
        skip_nonfinite=True,
        grad_reducers={"w": ja.Sum, "amax": ja.Max},
    )
    parts = [jnp.array([1.0, -9.0]), jnp.array([4.0, jnp.inf])]
    grads = ja.finalize(functools.reduce(ja.merge, [f(SCALES, part) for part in parts])).grads
    assert grads["amax"] == 9
    assert_close(grads["w"], -4 / 3)


@pytest.mark.parametrize(
    ("mark", "value"), [(ja.Max, 3.0), (ja.Min, -1.0), (ja.Last, 2.0), (ja.Sum, 4 / 3)]
)
def test_each_gradient_reducer(mark, value):
    f = ja.value_and_grad(lambda w, x: ja.mean(w[None] * x), num_microbatches=3, grad_reducers=mark)
    _, grad = f(jnp.zeros(FEATURES), jnp.outer(jnp.array([3.0, -1.0, 2.0]), jnp.ones(FEATURES)))
    # One weight for each of the three features.
    assert_close(grad, np.full(FEATURES, value / (FEATURES if mark is ja.Sum else 1)))


def test_gradient_reducers_are_a_prefix():
    params = {"layer": {"a": jnp.float32(1), "b": jnp.int32(1), "c": None}, "w": jnp.float32(1)}

    def loss_fn(params, x):
        return ja.mean((params["layer"]["a"] + params["w"]) * x)

    f = ja.value_and_grad(loss_fn, num_microbatches=2, grad_reducers={"layer": ja.Max, "w": ja.Sum})
    _, grads = f(params, jnp.array([1.0, 3.0]))
    assert (grads["layer"]["a"], grads["w"]) == (3, 2)
    assert grads["layer"]["b"].dtype == jax.dtypes.float0


@pytest.mark.parametrize(
    ("reducers", "exception"),
    [
        ({"w": ja.Sum, "amax": ja.Concat}, TypeError),
        ({"w": ja.Sum, "amax": "max"}, TypeError),
        ({"w": ja.Sum, "amax": ja.Max(1.0)}, ValueError),
        ({"w": ja.Sum}, ValueError),
        ({"w": ja.Sum, "max": ja.Max}, ValueError),
    ],
)
def test_gradient_reducers_that_are_refused(reducers, exception):
    f = ja.value_and_grad(fp8_loss, num_microbatches=2, grad_reducers=reducers)
    with pytest.raises(exception, match=r"`grad_reducers` must be"):
        f(SCALES, jnp.ones(4))


@pytest.mark.parametrize("mark", [ja.Max, ja.Min])
def test_extremes_of_complex_gradients_are_refused(mark):
    f = ja.value_and_grad(
        lambda w, x: ja.mean(jnp.abs(w * x) ** 2), num_microbatches=1, grad_reducers=mark
    )
    with pytest.raises(TypeError, match=r"`grad_reducers` must be .* complex64\[\]"):
        f(jnp.complex64(1), jnp.ones(2))


def test_what_did_not_run_is_not_the_last_of_merged_sums():
    """A half without micro-batches adds nothing: the last value is the one before it."""

    def loss_fn(w, x, *, model_state):
        return ja.mean(w * x), (ja.Last({"sum": x.sum()}), {"steps": model_state["steps"] + 1})

    options = {"has_aux": True, "grad_reducers": ja.Last, "model_state": "pooled"}
    f = ja.accumulate(loss_fn, num_microbatches=1, skip_nonfinite=True, **options)
    state = {"steps": jnp.int32(4)}
    ran = f(jnp.float32(1), jnp.array([2.0, 3.0]), model_state=state)
    skipped = f(jnp.float32(1), jnp.array([np.nan, 3.0]), model_state=state)
    not_run = f(jnp.float32(1), jnp.array([7.0, 3.0]), num_real=0, model_state=state)
    for order in ((ran, skipped), (not_run, ran), (ran, not_run, skipped)):
        window = ja.finalize(ja.merge(*order))
        assert (window.aux, window.grads, window.model_state["steps"]) == ({"sum": 5}, 5, 5)
