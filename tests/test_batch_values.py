"""What a batch may hold, and what is refused with the reason before JAX raises inside."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export
from jax.experimental import sparse

import jaxaccum as ja
from jaxaccum import linen

X = np.arange(8, dtype=np.float32)


def loss_fn(w, x):
    return ja.mean(w * x)


ROUTES = {
    "accumulate": ja.accumulate(loss_fn, num_microbatches=2),
    "value_and_grad": ja.value_and_grad(loss_fn, num_microbatches=2),
    "denominators": ja.denominators(loss_fn, num_microbatches=2),
    "microbatch": ja.microbatch(loss_fn, num_microbatches=2),
    "per_example": ja.value_and_grad(ja.per_example.clip(loss_fn, 1.0), num_microbatches=2),
    "check_equivalence": functools.partial(ja.check_equivalence, loss_fn, num_microbatches=2),
    "split": lambda _, x: ja.split(x, num_microbatches=2),
    "pad_batch": lambda _, x: ja.pad_batch(x, 16),
}
UNUSABLE = {
    "masked": (np.ma.masked_array(X, X > 3), r"masked array.*`ja\.mean\(\.\.\., where=\.\.\.\)`"),
    "long double": (X.astype(np.longdouble), r"wider than any type of JAX.*astype\(\"float64\"\)"),
    "long complex": (X.astype(np.clongdouble), r"wider than any.*astype\(\"complex128\"\)"),
    "struct": (jax.ShapeDtypeStruct((8,), np.float32), r"description without values.*eval_shape"),
    "aval": (jax.typeof(X), r"description without values"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
@pytest.mark.parametrize("route", ROUTES)
def test_arrays_of_which_jax_knows_nothing(route, kind):
    value, message = UNUSABLE[kind]
    with pytest.raises(TypeError, match=rf"^\w+: `batch\['x'\]` is .*{message}"):
        ROUTES[route](2.0, {"x": value})


@pytest.mark.parametrize("kind", ["masked", "long double", "struct"])
def test_parameters_of_which_jax_knows_nothing(kind):
    value, message = UNUSABLE[kind]
    for f in (ROUTES["accumulate"], ROUTES["microbatch"]):
        with pytest.raises(TypeError, match=rf"`argument\[0\]\['w'\]` is .*{message}"):
            f({"w": value}, X[:4])


# Objects made of arrays


@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    size: int


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Named:
    """An array with named axes, which unflattening does not check."""

    array: Any
    axes: tuple[Axis, ...]

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes, children):
        return cls(children[0], axes)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Sized:
    """A node that accepts arrays of one shape only."""

    data: Any

    def __post_init__(self):
        if isinstance(self.data, jax.Array) and self.data.shape != (8,):
            raise ValueError("eight entries are needed")

    def tree_flatten(self):
        return (self.data,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Images:
    """A node with a static shape that is no array's."""

    pixels: Any
    shape: tuple[int, ...] = (2, 2)

    def tree_flatten(self):
        return (self.pixels,), self.shape

    @classmethod
    def tree_unflatten(cls, shape, children):
        return cls(*children, shape)


def named(**sizes):
    return Named(
        jnp.ones(tuple(sizes.values())), tuple(Axis(name, size) for name, size in sizes.items())
    )


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (named(batch=8), r"`Named` that says it has the shape \(8,\) where its arrays have 4 rows"),
        (named(time=4, batch=8), r"`Named` .* \(4, 8\) where its arrays have 2 rows"),
        (Sized(jnp.asarray(X)), "`Sized`, which does not accept the rows .*eight entries"),
        (
            sparse.BCOO.fromdense(np.ones((4, 2))),
            r"`BCOO` .* \(4, 2\) where its arrays have 8 rows",
        ),
        (sparse.BCOO.fromdense(np.eye(4)), r"`BCOO` .* \(4, 4\) where its arrays have 2 rows"),
    ],
)
@pytest.mark.parametrize("route", ["value_and_grad", "microbatch", "per_example", "split"])
def test_nodes_that_do_not_follow_the_cut(route, batch, reason):
    with pytest.raises(TypeError, match=rf"the batch holds a {reason}.*[Pp]lain arrays"):
        ROUTES[route](2.0, {"a": batch})


def test_nodes_that_follow_the_cut():
    expected = np.mean(2 * X), np.mean(X)
    for batch, read in (
        (Images(X), lambda b: b.pixels),
        (nnx.Param(jnp.asarray(X)), lambda b: b[...]),
    ):
        f = ja.value_and_grad(lambda w, b, read=read: loss_fn(w, read(b)), num_microbatches=3)
        np.testing.assert_array_equal(f(2.0, batch), expected)


def test_named_parameters_pass_through():
    f = ja.value_and_grad(lambda w, x: ja.mean(w.array.sum() * x), num_microbatches=3)
    grad = f(named(out=8), X)[1]
    assert grad.axes == (Axis("out", 8),)
    np.testing.assert_array_equal(grad.array, np.full(8, X.mean()))


# Symbolic sizes


@pytest.mark.parametrize("cut", ["num_microbatches", "microbatch_size"])
@pytest.mark.parametrize("make", [ja.value_and_grad, ja.microbatch])
def test_a_symbolic_number_of_rows(make, cut):
    f = make(loss_fn, **{cut: 4})

    def exported(text):
        (rows,) = export.symbolic_shape(text)
        shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((), (rows,))]
        return export.export(jax.jit(f))(*shapes)

    program = exported("4*n")
    for rows in (4, 12):
        x = np.arange(rows, dtype=np.float32)
        np.testing.assert_array_equal(program.call(np.float32(2), x), f(2.0, x))
    with pytest.raises(ValueError, match=rf"symbolic number of rows n.*`{cut}`, 4.*\"4\*n\""):
        exported("n")


# Parameters that hold nothing


NOTHING = {
    "plain": ja.value_and_grad(lambda p, x: ja.mean(x), num_microbatches=3),
    "skipping": ja.value_and_grad(lambda p, x: ja.mean(x), num_microbatches=3, skip_nonfinite=True),
    "terms": ja.value_and_grad(lambda p, x: (ja.mean(x), ja.Mean(0.0, 1)), num_microbatches=3),
    "per_example": ja.value_and_grad(
        ja.per_example.clip(lambda p, x: ja.mean(x), 1.0), num_microbatches=3
    ),
    "window axis": ja.window_axis.value_and_grad(
        lambda p, x: ja.mean(x + 0 * jax.lax.pmean(jnp.mean(x), "window")), num_microbatches=2
    ),
}


@pytest.mark.parametrize("kind", NOTHING)
@pytest.mark.parametrize("params", [{}, None, 3], ids=str)
def test_parameters_without_a_gradient(kind, params):
    loss, grads = NOTHING[kind](params, X)
    assert loss == 3.5
    assert jax.tree.structure(grads) == jax.tree.structure(params)


def test_a_step_and_a_combination_without_parameters():
    init, step = ja.train_step(lambda p, x: ja.mean(x), optax.adam(0.1), num_microbatches=2)
    params, _, info = step({}, init({}), X)
    assert params == {}
    assert info.loss == 3.5
    combined = ja.microbatch(lambda p, x: ja.mean(x), num_microbatches=2)
    assert jax.value_and_grad(combined)({}, X) == (3.5, {})


# Buffers that a step takes over


def donating(params, batch, **options):
    """A step that takes over its parameters, on new ones."""
    init, step = ja.train_step(
        lambda p, x: ja.mean(p["a"].sum() * x), optax.adam(0.1), num_microbatches=2, **options
    )
    return step(params, init(params), batch)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (lambda w: ({"a": w, "b": w}, X), r"`params\['a'\]` and `params\['b'\]`"),
        (lambda w: ({"a": w, "b": jax.device_put(w)}, X), r"`params\['a'\]` and `params\['b'\]`"),
        (lambda w: ({"a": w}, w), r"`params\['a'\]` and `batch`"),
    ],
)
def test_81_a_buffer_that_comes_twice(other, names):
    w = jnp.asarray(X)
    params, batch = other(w)
    with pytest.raises(ValueError, match=rf"^train_step: {names} share one buffer.*`donate=False`"):
        donating(params, batch)
    assert not w.is_deleted()
    new, _, _ = donating(params, batch, donate=False)
    assert not np.array_equal(new["a"], w)


def test_a_loss_scale_belongs_where_a_step_is_made():
    init, step = ja.train_step(lambda p, x: ja.mean(p * x), optax.sgd(0.1), num_microbatches=2)
    with pytest.raises(TypeError, match="train_step: `loss_scale` comes with the step's state"):
        step(jnp.float32(1), init(jnp.float32(1)), X, loss_scale=2.0)


def test_81_a_buffer_that_comes_twice_in_a_linen_state():
    w = jnp.ones(2)
    state = linen.TrainState.create(
        apply_fn=None, variables={"params": {"a": w, "b": w}}, tx=optax.sgd(1.0)
    )
    step = linen.train_step(lambda v, x: ja.mean(v["params"]["a"].sum() * x), num_microbatches=2)
    message = r"^linen\.train_step: `state\.params\['a'\]` and `state\.params\['b'\]` share"
    with pytest.raises(ValueError, match=message):
        step(state, X)


@pytest.mark.parametrize("kind", ["masked", "long double", "struct"])
def test_a_step_names_the_argument_that_jax_refuses(kind):
    value, message = UNUSABLE[kind]
    with pytest.raises(TypeError, match=rf"^train_step: `batch\['x'\]` is .*{message}"):
        donating({"a": jnp.ones(3)}, {"x": value})


def test_a_step_hands_on_the_loss_functions_own_errors():
    with pytest.raises(TypeError, match="unsupported operand"):
        donating({"a": jnp.ones(3)}, {"x": X})


def test_a_step_is_a_jitted_function_in_all_else():
    init, step = ja.train_step(loss_fn, optax.sgd(1.0), num_microbatches=2)
    lowered = step.lower(np.float32(2), init(np.float32(2)), X)
    assert "while" in lowered.as_text()
