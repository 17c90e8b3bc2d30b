"""`Mean` and `mean`: the algebra, the division, the masks and their derivatives."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import assert_close, assert_equal

import jaxaccum as ja

SCALARS = {
    "python": 3.0,
    "python int": 3,
    "numpy float32": np.float32(3),
    "numpy float64": np.float64(3),
    "numpy int64": np.int64(3),
    "numpy array": np.array(3, np.float32),
    "jax": jnp.float32(3),
}


def test_merge_pools_totals_and_weights():
    merged = ja.merge(ja.Mean(jnp.float32(6), 3), ja.Mean(jnp.float32(7), 7))
    assert (merged.total, merged.weight) == (13, 10)
    assert_close(merged.value, 1.3)
    three = ja.merge(ja.Mean(1.0, 1), ja.Mean(2.0, 1), ja.Mean(6.0, 2))
    assert (three.total, three.weight, three.value) == (9, 4, 2.25)


@pytest.mark.parametrize("scalar", SCALARS.values(), ids=SCALARS)
def test_scalars_scale_the_total_from_both_sides(scalar):
    mean = ja.Mean(jnp.float32(4), 2)
    for scaled in (scalar * mean, mean * scalar):
        assert isinstance(scaled, ja.Mean)
        assert (scaled.total, scaled.weight, scaled.value) == (12, 2, 6)


@pytest.mark.parametrize("scalar", SCALARS.values(), ids=SCALARS)
def test_scaling_inside_jit_keeps_float32(scalar):
    scaled = jax.jit(lambda total: scalar * ja.Mean(total, 2))(jnp.float32(4))
    assert scaled.total.dtype == jnp.float32
    assert scaled.value == 6


def test_division_and_sign():
    assert (-ja.Mean(4.0, 2) / 2).value == -1


@pytest.mark.parametrize(
    "operation",
    [
        lambda m: m * m,
        lambda m: m / m,
        lambda m: 1.0 / m,
        lambda m: m * None,
        lambda m: "x" * ja.Mean(2, 1),
        lambda m: [2.0] * m,
    ],
)
def test_operations_without_meaning_are_refused(operation):
    with pytest.raises(TypeError):
        operation(ja.Mean(1.0, 2))


ADDITIONS = {
    "means": lambda m: m + 0.5 * m,
    "difference": lambda m: m - m,
    "sum": lambda m: sum([m, m]),
    "sum from a mean": lambda m: sum([m], m),
    "numpy sum": lambda m: np.sum([m, m]),
    "reduce": lambda m: functools.reduce(operator.add, (m, m)),
    "in place": lambda m: operator.iadd(m, m),
    "a number": lambda m: m + 0.0,
    "to a number": lambda m: 1 + m,
    "less a number": lambda m: m - 1.0,
    "from a number": lambda m: 1.0 - m,
    "numpy scalar": lambda m: np.float32(1) + m,
    "numpy array": lambda m: np.ones(2) - m,
    "jax scalar": lambda m: jnp.float32(1) + m,
    "traced": lambda m: jax.jit(lambda x: x - m)(1.0),
}


@pytest.mark.parametrize("operation", ADDITIONS.values(), ids=ADDITIONS)
def test_addition_is_refused_with_both_remedies(operation):
    with pytest.raises(TypeError, match=r"side by side .*\(a, b\).*`ja.merge\(a, b\)` pools"):
        operation(ja.Mean(1.0, 2))


def test_two_losses_side_by_side_are_the_sum_of_their_means():
    a, b = jnp.array([1.0, 2.0]), jnp.array([3.0, 5.0, 7.0])

    def loss_fn(w, rows):
        return ja.mean(w * a[rows]), 0.5 * ja.mean(w * b)

    with pytest.raises(TypeError, match="side by side"):
        ja.value_and_grad(lambda w, rows: sum(loss_fn(w, rows)), num_microbatches=1)(
            1.0, jnp.arange(2)
        )
    loss, grad = ja.value_and_grad(loss_fn, num_microbatches=2)(jnp.float32(2), jnp.arange(2))
    assert (loss, grad) == (2 * (1.5 + 2.5), 4)


@pytest.mark.parametrize("other", [1.0, None, "window sums", (1, 2)], ids=str)
def test_merge_of_unlike_things_is_refused(other):
    mean = ja.Mean(1.0, 2)
    if other == "window sums":
        other = ja.accumulate(lambda w, x: ja.mean(w * x), num_microbatches=1)(1.0, jnp.ones(2))
    for parts in ((mean, other), (other, mean), (mean, mean, other)):
        with pytest.raises(TypeError, match="merge: `a` and `b` must be"):
            ja.merge(*parts)


def test_value_is_nan_without_weight_and_elementwise_otherwise():
    assert_equal(ja.Mean(jnp.array([1.0, 5.0]), jnp.array([0, 2])).value, [np.nan, 2.5])
    assert_equal(ja.Mean(jnp.array([2, 5]), 2).value, [1.0, 2.5])


def test_value_and_its_derivative_select():
    value, grad = jax.value_and_grad(lambda t: jnp.nan_to_num(ja.Mean(t, 0).value))(jnp.nan)
    assert (value, grad) == (0, 0)


def test_a_mean_is_a_pytree_of_two_leaves():
    mean = ja.Mean(jnp.float32(1), jnp.int32(2))
    assert len(jax.tree.leaves(mean)) == 2
    doubled = jax.jit(lambda m: jax.tree.map(lambda x: 2 * x, m))(mean)
    assert isinstance(doubled, ja.Mean)
    assert (doubled.total, doubled.weight) == (2, 4)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(mean)]
    assert paths == [".total", ".weight"]


@pytest.mark.parametrize(
    "part",
    [np.int8(100), np.uint8(200), np.True_, jnp.bfloat16(256), jnp.float16(60000), jnp.int4(7)],
    ids=lambda part: part.dtype.name,
)
def test_narrow_parts_merge_in_a_wide_dtype(part):
    merged = ja.merge(ja.Mean(part, part), ja.Mean(part, part), ja.Mean(part, part))
    assert (merged.total, merged.weight, merged.value) == (3 * int(part), 3 * int(part), 1)


def test_integer_weights_merge_exactly_past_two_to_the_24():
    merged = ja.merge(ja.Mean(0.0, jnp.int32(2**24)), ja.Mean(0.0, jnp.int32(1)))
    assert merged.weight == 2**24 + 1
    assert merged.weight.dtype == jnp.int32


def test_narrow_totals_and_weights_divide_in_float32():
    value = ja.Mean(jnp.bfloat16(1), jnp.bfloat16(3)).value
    assert value.dtype == jnp.float32
    assert_close(value, 1 / 3)


@pytest.mark.parametrize("weight", [3, np.int32(3), jnp.float32(3)])
def test_from_value_multiplies(weight):
    mean = ja.Mean.from_value(jnp.float32(2), weight)
    assert (mean.total, mean.weight) == (6, 3)


def test_from_value_selects_where_nothing_was_counted():
    mean = ja.Mean.from_value(jnp.array([jnp.nan, 2.0]), jnp.array([0, 4]))
    assert_equal(mean.total, [0.0, 8.0])
    value, grad = jax.value_and_grad(lambda v: ja.Mean.from_value(v, 0).total)(jnp.nan)
    assert (value, grad) == (0, 0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_mean_equals_numpy(shape, masked, weighted):
    rng = np.random.default_rng(0)
    values = rng.uniform(1, 2, shape).astype(np.float32)
    where = rng.random(shape) < 0.6 if masked else None
    weights = rng.uniform(1, 2, shape).astype(np.float32) if weighted else None
    mean = jax.jit(lambda v: ja.mean(v, where, weights=weights))(values)
    factor = np.ones(shape) * (1 if weights is None else weights.astype(np.float64))
    factor = factor * (True if where is None else where)
    want = ((values.astype(np.float64) * factor).sum(), factor.sum())
    assert_close((mean.total, mean.weight), want)
    assert mean.total.shape == mean.weight.shape == ()
    assert mean.weight.dtype == (jnp.float32 if weighted else jnp.int32)


def test_masks_and_weights_broadcast_over_dimensions_of_one():
    values = jnp.arange(6.0).reshape(2, 3)
    assert_equal(ja.mean(values, jnp.array([[True], [False]])), ja.Mean(3.0, 3))
    assert_equal(ja.mean(values, weights=jnp.array([[1, 0, 2]])), ja.Mean(3.0 + 14.0, 6))
    assert_equal(ja.mean(values, jnp.array(True)), ja.Mean(15.0, 6))


@pytest.mark.parametrize(
    ("values", "weights", "total", "weight"),
    [
        (jnp.bfloat16, None, jnp.float32, jnp.int32),
        (jnp.float16, jnp.float16, jnp.float32, jnp.float32),
        (jnp.float32, jnp.int8, jnp.float32, jnp.int32),
        (jnp.float32, jnp.bool_, jnp.float32, jnp.int32),
        (jnp.float32, jnp.uint32, jnp.float32, jnp.uint32),
        (jnp.int32, None, jnp.float32, jnp.int32),
        (jnp.bool_, None, jnp.float32, jnp.int32),
        (jnp.float8_e4m3fn, jnp.float4_e2m1fn, jnp.float32, jnp.float32),
        (jnp.float4_e2m1fn, jnp.int4, jnp.float32, jnp.int32),
        (jnp.uint4, None, jnp.float32, jnp.int32),
    ],
)
@pytest.mark.parametrize("promotion", ["standard", "strict"])
def test_mean_dtypes(values, weights, total, weight, promotion):
    with jax.numpy_dtype_promotion(promotion):
        w = None if weights is None else jnp.ones(300, weights)
        mean = ja.mean(jnp.ones(300, values), jnp.ones(300, jnp.bool_), weights=w)
    assert (mean.total.dtype, mean.weight.dtype) == (total, weight)
    assert (mean.total, mean.weight) == (300, 300)


def test_mean_keeps_float64(x64):
    mean = ja.mean(jnp.ones(3, jnp.float64), weights=jnp.full(3, 1e-9, jnp.float64))
    assert mean.total.dtype == mean.weight.dtype == jnp.float64
    assert_close(mean.weight, 3e-9)


@pytest.mark.parametrize("hole", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "dropped",
    [
        {"where": np.array([True, False])},
        {"weights": np.array([1.0, 0.0], np.float32)},
        {"where": np.array([True, False]), "weights": np.array([1.0, np.nan], np.float32)},
    ],
    ids=["where", "zero weight", "both"],
)
def test_what_is_dropped_reaches_neither_value_nor_derivative(hole, dropped):
    values = jnp.array([2.0, hole])
    mean = ja.mean(values, **dropped)
    assert (mean.total, mean.weight) == (2, 1)
    assert_equal(jax.grad(lambda v: ja.mean(v, **dropped).total)(values), [1.0, 0.0])
    assert_equal(jax.jacfwd(lambda v: ja.mean(v, **dropped).total)(values), [1.0, 0.0])


def test_an_empty_selection_has_weight_zero():
    mean = ja.mean(jnp.full(3, jnp.nan), jnp.zeros(3, bool))
    assert (mean.total, mean.weight) == (0, 0)


def test_mean_maps():
    means = jax.vmap(ja.mean)(jnp.arange(6.0).reshape(2, 3))
    assert_equal(means.value, [1.0, 4.0])


@pytest.mark.parametrize(
    ("arguments", "exception", "message"),
    [
        ({"values": jnp.ones(2, jnp.complex64)}, TypeError, "`values` must be real"),
        ({"values": "loss"}, TypeError, "`values` must be an array"),
        ({"values": None}, TypeError, "`values` must be an array"),
        ({"where": jnp.ones(2)}, TypeError, "`where` must be boolean"),
        ({"where": jnp.ones(3, bool)}, ValueError, r"`where` must have the shape .*\(3,\)"),
        ({"weights": jnp.ones((2, 1))}, ValueError, r"`weights` must have the shape .*\(2, 1\)"),
        ({"values": jnp.ones((2, 2)), "where": jnp.ones(2, bool)}, ValueError, "`where`"),
    ],
)
def test_mean_refuses(arguments, exception, message):
    with pytest.raises(exception, match=message):
        ja.mean(**{"values": jnp.ones(2), **arguments})
