"""Optax's own tests of `MultiSteps`, read from the installed package and run on `jaxaccum`."""

import importlib
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_shim
import pytest
from oracles import RTOL

upstream = importlib.import_module("optax.transforms._accumulation_test")


class AccumulationTest(upstream.AccumulationTest):
    """Every test of Optax's class, with `MultiSteps` replaced by the shim."""

    def setUp(self):
        super().setUp()
        replaced = unittest.mock.patch.object(
            upstream._accumulation, "MultiSteps", wraps=optax_shim.MultiSteps
        )
        self.made = replaced.start()
        self.addCleanup(replaced.stop)

    test_multi_steps_mixed_precision1 = pytest.mark.slow(
        upstream.AccumulationTest.test_multi_steps_mixed_precision1
    )

    def tearDown(self):
        if "multi_steps" in self._testMethodName:
            self.made.assert_called()
        super().tearDown()


def test_the_upstream_tests_are_all_collected():
    names = [name for name in dir(AccumulationTest) if name.startswith("test_multi_steps")]
    assert len(names) >= 7
    assert set(names) == {n for n in dir(upstream.AccumulationTest) if "test_multi_steps" in n}


@pytest.mark.parametrize("use_grad_mean", [True, False])
@pytest.mark.parametrize("every", [1, 4, lambda step: jnp.where(step < 1, 2, 3)])
def test_the_shim_trains_like_optax(every, use_grad_mean):
    params = {"w": jnp.linspace(-1.0, 1.0, 6), "b": jnp.float32(0.5)}
    rng = np.random.default_rng(0)
    grads = [jax.tree.map(lambda p: rng.uniform(0.5, 1.5, p.shape), params) for _ in range(8)]
    results = []
    for factory in (optax_shim.MultiSteps, optax.MultiSteps):
        tx = factory(optax.adamw(0.1), every, use_grad_mean=use_grad_mean)
        update, state, trained = jax.jit(tx.update), tx.init(params), params
        flags = []
        for grad in grads:
            updates, state = update(jax.tree.map(jnp.float32, grad), state, trained)
            trained = optax.apply_updates(trained, updates)
            flags.append(bool(tx.has_updated(state)))
        results.append((trained, state.inner_opt_state, flags))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=RTOL["float32"], atol=1e-7), *results
    )


def test_other_skip_functions_have_no_counterpart():
    with pytest.raises(NotImplementedError, match="No counterpart"):
        optax_shim.MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=optax.skip_large_updates)
