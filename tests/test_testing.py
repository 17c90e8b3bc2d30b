"""The assertions for users' own tests: they pass on what is right and name what is wrong."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import problem, terms_loss, token_loss

import jaxaccum as ja
from jaxaccum import testing


def same(loss_fn=token_loss, seed=0, **options):
    testing.assert_same_window(loss_fn, *problem(seed), **options)


@pytest.mark.parametrize("loss_fn", [token_loss, terms_loss])
def test_a_right_loss_passes(loss_fn):
    same(loss_fn)
    same(loss_fn, cuts=[1, np.int32(7), {"microbatch_size": 4}])


def test_options_and_other_arguments_reach_the_window():
    def loss_fn(w, x, y, scale):
        return ja.mean(scale * (w * x - y) ** 2), ja.Max(jnp.max(x))

    x = jnp.arange(1.0, 6.0)
    testing.assert_same_window(
        loss_fn, jnp.float32(2), x, -x, jnp.float32(3), batch_argnums=(1, 2), has_aux=True
    )
    # The gradient of the rows is compared in batch order.
    testing.assert_same_window(
        lambda w, x: ja.mean((w * x) ** 2), jnp.float32(2), x, argnums=(0, 1)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_parameters_have_their_own_tolerance(dtype):
    params, batch = problem(3)
    narrow = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    testing.assert_same_window(token_loss, narrow, batch)


def test_empty_windows_and_missing_parameters():
    params, batch = problem(0)
    testing.assert_same_window(token_loss, params, {**batch, "mask": batch["mask"] & False})
    testing.assert_same_window(lambda p, x: ja.mean(x), {}, jnp.arange(4.0))


def of_a_row(params, batch):
    """A mean of means: each micro-batch counts one."""
    mean = token_loss(params, batch)
    return ja.Mean(mean.value, 1)


def of_the_first(params, batch):
    """The gradient depends on the cut, the loss does not."""
    loss = token_loss(params, batch)
    scale = 1 + 0 * params["b"] + jnp.float32(batch["x"].shape[0])
    return ja.Mean(
        loss.total + scale * (params["b"] - jax.lax.stop_gradient(params["b"])), loss.weight
    )


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (of_a_row, r"num_microbatches=3: the loss is \d.*full batch's is \d"),
        (of_the_first, r"num_microbatches=3: the gradient \['b'\] is \d"),
    ],
)
def test_a_wrong_loss_is_refused_by_cut_and_leaf(loss_fn, words):
    with pytest.raises(AssertionError, match=words):
        same(loss_fn, cuts=(3,))


def test_the_cause_is_named():
    with pytest.raises(AssertionError) as error:
        same(of_a_row)
    report = ja.check_equivalence(of_a_row, *problem(0), num_microbatches=2)
    assert not report.ok
    assert str(error.value).endswith(str(report))


def test_tolerances_can_be_chosen():
    same(of_a_row, rtol=10.0)
    same(of_a_row, atol=1e3)
    with pytest.raises(AssertionError):
        same(of_a_row, rtol=0.0, atol=1e-3)


@pytest.mark.parametrize(
    ("cuts", "error", "words"),
    [
        ((), ValueError, "at least one cut"),
        (("4",), TypeError, "`cuts`"),
        ((2.5,), TypeError, "`cuts`"),
        (({"number": 4},), TypeError, "number"),
        ((9,), ValueError, "9"),
    ],
)
def test_cuts_that_are_refused(cuts, error, words):
    with pytest.raises(error, match=words):
        same(cuts=cuts)


BATCHES = [jnp.ones(4), jnp.zeros(4), jnp.ones(4)]


def test_a_stable_step():
    tx = ja.train_step(
        lambda w, x: ja.mean((w - x) ** 2), optax.adam(0.5), num_microbatches=2, donate=False
    )
    w = jnp.float32(0)
    got = testing.assert_stable_step(tx.step, w, tx.init(w), BATCHES)
    want = w, tx.init(w)
    for batch in BATCHES:
        want = tx.step(*want, batch)[:2]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)


@pytest.mark.parametrize(
    "step_fn",
    [
        lambda w, s, x: (w, s.astype(jnp.bfloat16)),
        lambda w, s, x: (w, (s, s)),
        lambda w, s, x: (jnp.stack([w, w]), s),
    ],
    ids=["dtype", "structure", "shape"],
)
def test_a_step_that_changes_what_it_carries(step_fn):
    with pytest.raises(AssertionError):
        testing.assert_stable_step(step_fn, jnp.float32(0), jnp.float32(0), BATCHES)


def test_a_step_that_is_traced_again():
    batches = [jnp.ones(4), jnp.ones(5)]
    with pytest.raises(AssertionError, match="traced"):
        testing.assert_stable_step(lambda w, s, x: (w, s), jnp.float32(0), jnp.float32(0), batches)


def test_without_chex(monkeypatch):
    monkeypatch.setitem(sys.modules, "chex", None)
    same()
    with pytest.raises(ModuleNotFoundError, match="pip install chex"):
        testing.assert_stable_step(lambda w, s, x: (w, s), jnp.float32(0), jnp.float32(0), BATCHES)
