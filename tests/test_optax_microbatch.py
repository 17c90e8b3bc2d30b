"""Optax's own tests of `microbatch`, read from the installed package and run on `ja.microbatch`.

The shim spells `optax.microbatch` with the library's marks. What it does not run:

- `test_raises_on_invalid_microbatches` expects a batch that does not divide to be refused; here it
  is computed exactly, which `test_a_batch_that_does_not_divide` checks instead.
- `optax.microbatching.reshape_batch_axis`, `Accumulator` objects with functions of their own, and
  the sums in the output's own dtype have no counterpart: the shim casts float32 sums back, only so
  that `test_correct_dtype_returned` has what it asks for.
"""

import importlib
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxaccum as ja

upstream = importlib.import_module("optax.microbatching._microbatching_test")
Type = optax.microbatching.AccumulationType


def microbatch(
    fun,
    argnums,
    microbatch_size,
    accumulator=Type.SUM,
    *,
    argnames=(),
    in_axes=0,
    num_real_microbatches=None,
):
    """`optax.microbatch` on `ja.microbatch`: marks for accumulation types."""
    if microbatch_size is None:
        return fun
    argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    argnames = (argnames,) if isinstance(argnames, str) else tuple(argnames)
    cut = [*argnums, *argnames]
    axes = [in_axes] * len(cut) if isinstance(in_axes, int) else list(in_axes)
    moved = lambda tree, a, b: jax.tree.map(lambda x: jnp.moveaxis(x, a, b), tree)  # noqa: E731

    def shimmed(*args, **kwargs):
        given = dict(enumerate(args)) | kwargs
        batch = {str(n): moved(given[n], axis, 0) for n, axis in zip(cut, axes, strict=True)}
        whole = {n: x for n, x in given.items() if n not in cut}
        out_types = {}

        def fn(_, batch, rest):
            named = {n: moved(batch[str(n)], 0, a) for n, a in zip(cut, axes, strict=True)}
            named |= dict(zip(whole, rest, strict=True))
            out = fun(*[named.pop(i) for i in range(len(args))], **named)
            out_types["tree"] = jax.eval_shape(lambda: out)
            rows = jax.tree.leaves(batch)[0].shape[0]
            return jax.tree.map(lambda a, x: _marked(a, x, rows), accumulator, out)

        combined = ja.microbatch(fn, microbatch_size=microbatch_size)(
            (), batch, list(whole.values()), num_real=num_real_microbatches
        )
        return jax.tree.map(_like, out_types["tree"], combined)

    return shimmed


def _marked(accumulation, out, rows):
    """Every leaf of `out` in the mark of one accumulation type."""
    if not isinstance(accumulation, Type):
        raise NotImplementedError(f"No counterpart of {accumulation}.")

    def mark(x):
        if accumulation is Type.SUM:
            return ja.Sum(x)
        if accumulation is Type.CONCAT:  # a stack where axis 0 does not hold the rows
            return ja.Concat(x) if x.shape[0] == rows else x
        return ja.Mean(x, 1)  # every micro-batch weighs the same

    return jax.tree.map(mark, out)


def _like(one, combined):
    """`combined` in the output's own dtype, a stack in Optax's order of rows."""
    if combined.ndim > len(one.shape):
        combined = combined.reshape(-1, *one.shape[1:], order="F")
    return combined.astype(one.dtype)


LEFT_OUT = {"test_raises_on_invalid_microbatches"}


class MicrobatchingTest(upstream.MicrobatchingTest):
    """Every test of Optax's class, with `microbatch` replaced by the shim."""

    test_raises_on_invalid_microbatches = None

    def setUp(self):
        super().setUp()
        np.random.seed(0)  # the upstream tests draw from the global state
        replaced = unittest.mock.patch.object(
            upstream.microbatching, "microbatch", wraps=microbatch
        )
        self.made = replaced.start()
        self.addCleanup(replaced.stop)

    def tearDown(self):
        self.made.assert_called()
        super().tearDown()


def test_the_upstream_tests_are_all_collected():
    theirs = {n for n in dir(upstream.MicrobatchingTest) if n.startswith("test")}
    ours = {n for n in dir(MicrobatchingTest) if n.startswith("test")}
    assert ours == theirs
    assert len(theirs) >= 39
    assert {n for n in ours if getattr(MicrobatchingTest, n) is None} == LEFT_OUT


def test_a_batch_that_does_not_divide():
    x = jnp.arange(10.0)
    sums, rows = microbatch(lambda x: (x.sum(), x * 2), 0, 3, (Type.SUM, Type.CONCAT))(x)
    assert sums == 45
    np.testing.assert_array_equal(rows, 2 * x)
    with pytest.raises(ValueError, match="divisible"):
        optax.microbatch(jnp.sum, 0, 3)(x)


@pytest.mark.parametrize("kind", [Type.SUM, Type.MEAN, Type.RUNNING_MEAN, Type.CONCAT])
def test_the_shim_equals_optax_in_value_and_derivative(kind):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, 3), (12, 5)))

    def loss(make):
        def fn(w):  # what is closed over is differentiated
            out = make(lambda x: jnp.tanh(x @ w), 0, 4, kind)(x)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(fn, has_aux=True))(w)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        loss(microbatch),
        loss(optax.microbatch),
    )


def test_accumulators_of_ones_own_have_no_counterpart():
    own = optax.microbatching.Accumulator(*[lambda *x: x[0]] * 4)
    with pytest.raises(NotImplementedError, match="No counterpart"):
        microbatch(jnp.sum, 0, 2, own)(jnp.ones(4))
