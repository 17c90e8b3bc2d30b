"""The adapter for Flax Linen, with the words of the core; Equinox through its own filters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core
from flax.linen import fp8_ops
from jax.sharding import AxisType

import jaxaccum as ja
from jaxaccum import linen as ja_linen

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(1, 2, size=(12, 3)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=12), jnp.float32)
CUT = {"num_microbatches": 4}


def close(got, want, rtol=5e-6, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(4)(x)))[:, 0]


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        return nn.Dense(1)(nn.relu(nn.Dense(4)(x)))[:, 0]


def linen_state(model, tx=None, **options):
    variables = model.init(jax.random.key(0), X)
    tx = optax.adam(1e-2) if tx is None else tx
    return ja_linen.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx, **options)


class TestLinen:
    def test_plain_step_equals_the_full_batch(self):
        model = Plain()

        def loss_fn(variables, batch):
            return ja.mean((model.apply(variables, batch[0]) - batch[1]) ** 2)

        state = linen_state(model)
        params = jax.tree.map(jnp.copy, state.params)
        step = ja_linen.train_step(loss_fn, **CUT)
        opt_state = optax.adam(1e-2).init(params)
        for number in range(1, 3):
            state, info = step(state, (X, Y))
            grads = jax.grad(lambda p: loss_fn({"params": p}, (X, Y)).value)(params)
            updates, opt_state = optax.adam(1e-2).update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            assert state.step == number == info.optimizer_step
        close(state.params, params)
        assert state.collections == {}

    @pytest.mark.parametrize("how", ["whole", "collections", "returned"])
    def test_frozen_dicts(self, how):
        model, frozen = Normed(), how != "returned"
        variables = model.init(jax.random.key(0), X)
        freeze = core.freeze if how == "whole" else lambda v: {k: core.freeze(v[k]) for k in v}

        def loss_fn(variables, batch):
            out, updates = model.apply(variables, batch[0], mutable=["batch_stats"])
            updates = core.freeze(updates) if how == "returned" else updates
            return ja.mean((out - batch[1]) ** 2), updates

        step = ja_linen.train_step(loss_fn, model_state="pooled", donate=False, **CUT)
        results = []
        for given in (variables, freeze(variables) if frozen else variables):
            state = ja_linen.TrainState.create(
                apply_fn=model.apply, variables=given, tx=optax.adam(0.1)
            )
            for _ in range(2):
                state, _ = step(state, (X, Y))
            results.append(core.unfreeze((state.params, state.collections)[how == "collections"]))
        close(*results, rtol=0, atol=0)

    @pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning])
    def test_boxed_parameters_stay_boxed(self, box):
        class Boxed(nn.Module):
            @nn.compact
            def __call__(self, x):
                init = box(nn.initializers.lecun_normal(), (None, "model"))
                return nn.Dense(4, kernel_init=init)(x)

        def loss_fn(variables, x):
            return ja.mean(Boxed().apply(variables, x) ** 2)

        variables = Boxed().init(jax.random.key(0), X)
        plain = nn.unbox(variables)["params"]
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        grads = jax.grad(lambda p: loss_fn({"params": p}, X).value)(plain)
        for axes in ({}, {"spmd_axis_name": "data"}):
            state = ja_linen.TrainState.create(
                apply_fn=Boxed().apply, variables=variables, tx=optax.sgd(0.1)
            )
            step = ja_linen.train_step(loss_fn, num_microbatches=3, donate=False, **axes)
            with jax.set_mesh(mesh):
                new, _ = step(state, jax.device_put(X, jax.P("data")))
            assert jax.tree.structure(new) == jax.tree.structure(state)
            close(nn.unbox(new.params), jax.tree.map(lambda p, g: p - 0.1 * g, plain, grads))

    @pytest.mark.parametrize("policy", ["pooled", "sequential", "frozen"])
    def test_batch_statistics(self, policy):
        model = Normed()

        def loss_fn(variables, batch):
            out, updates = model.apply(variables, batch[0], mutable=["batch_stats"])
            return ja.mean((out - batch[1]) ** 2), updates

        state = linen_state(model)
        start = jax.tree.map(jnp.copy, state.variables)
        want = {
            "pooled": lambda: loss_fn(start, (X, Y))[1],
            "frozen": lambda: {"batch_stats": start["batch_stats"]},
        }
        if policy == "sequential":
            variables = start
            for micro_batch in ja.split((X, Y), **CUT):
                variables = variables | loss_fn(variables, micro_batch)[1]
            want = {"sequential": lambda: {"batch_stats": variables["batch_stats"]}}
        structure = jax.tree.structure(state)
        state, _ = ja_linen.train_step(loss_fn, model_state=policy, **CUT)(state, (X, Y))
        close(state.collections, want[policy]())
        assert jax.tree.structure(state) == structure

    def test_statistics_without_a_policy_are_refused_with_the_choices(self):
        model = Normed()
        step = ja_linen.train_step(lambda variables, batch: None, **CUT)
        with pytest.raises(
            ValueError, match=r"batch_stats.*\"sequential\".*\"pooled\".*\"frozen\""
        ):
            step(linen_state(model), (X, Y))

    def test_other_refusals(self):
        model = Normed()
        with pytest.raises(ValueError, match="must hold the collection `params`"):
            ja_linen.TrainState.create(apply_fn=model.apply, variables={}, tx=optax.sgd(1.0))
        step = ja_linen.train_step(lambda v, b: (ja.mean(b[0]), {"other": 1}), **CUT,
                                   model_state="pooled")  # fmt: skip
        with pytest.raises(ValueError, match="must return the collections that it changed"):
            step(linen_state(model), (X, Y))
        with pytest.raises(TypeError, match=r"`state` must be a `jaxaccum.linen.TrainState`"):
            step({}, (X, Y))

    def test_dropout_aux_and_loss_scale(self):
        class Dropped(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dropout(0.5, deterministic=False)(x)

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(1)(Dropped()(x))[:, 0]

        model = Net()
        scale = ja.loss_scaling.static(1024.0)
        variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
        state = ja_linen.TrainState.create(
            apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1), loss_scale=scale
        )

        def loss_fn(variables, batch, *, key):
            out = model.apply(variables, batch[0], rngs={"dropout": key})
            return ja.mean((out - batch[1]) ** 2), out == 0

        step = ja_linen.train_step(loss_fn, has_aux=True, loss_scale=scale, donate=False, **CUT)
        state, info = step(state, (X, Y), key=jax.random.key(3))
        again = step(state, (X, Y), key=jax.random.key(3))[1]
        other = step(state, (X, Y), key=jax.random.key(4))[1]
        assert info.aux.shape == (4, 3)
        assert info.updated
        assert again.loss != other.loss

    def test_step_counts_optimizer_steps_of_a_stream(self):
        model = Plain()

        def loss_fn(params, batch):
            return ja.mean((model.apply({"params": params}, batch[0]) - batch[1]) ** 2)

        state = linen_state(model, ja.multi_steps(optax.sgd(0.1), 2))
        start = jax.tree.map(jnp.copy, state.params)
        steps = []
        for micro_batch in ja.split((X, Y), **CUT):
            sums = ja.accumulate(loss_fn, num_microbatches=1)(state.params, micro_batch)
            state = jax.jit(
                lambda state, grads, weight: state.apply_gradients(grads=grads, weight=weight)
            )(state, sums.grads, sums.weight)
            steps.append(int(state.step))
        assert steps == [0, 1, 1, 2]
        assert not np.array_equal(jax.tree.leaves(state.params)[0], jax.tree.leaves(start)[0])

    def test_sums_and_the_open_window(self):
        def loss_fn(params, x):
            return ja.mean(params["w"] * x)

        state = ja_linen.TrainState.create(
            apply_fn=None, variables={"params": {"w": jnp.float32(0)}},
            tx=ja.multi_steps(optax.sgd(1.0), 2),
        )  # fmt: skip
        sums_fn = ja.accumulate(loss_fn, num_microbatches=1)
        for x in ([1.0, 2.0, 3.0], [1.0] * 7, [4.0, 4.0]):
            state = state.apply_gradients(grads=sums_fn(state.params, jnp.array(x)))
        assert state.step == 1
        np.testing.assert_allclose(state.params["w"], -1.3, rtol=1e-6)
        state = state.flush()
        np.testing.assert_allclose(state.params["w"], -5.3, rtol=1e-6)
        assert state.step == state.flush().step == 2

    def test_a_sum_is_not_taken_for_a_mean(self):
        state = linen_state(Plain())
        sums = ja.accumulate(lambda p, x: ja.mean(x), num_microbatches=1)(state.params, X)
        for given in ({"grads": sums}, {"grads": sums.grads, "weight": sums.weight}):
            with pytest.raises(TypeError, match="needs an optimizer that divides by the weight"):
                state.apply_gradients(**given)
        step = ja_linen.train_step(lambda v, x: ja.mean(x), **CUT)
        with pytest.raises(ValueError, match="one window would stand in another"):
            step(linen_state(Plain(), ja.multi_steps(optax.sgd(0.1), 2)), X)

    def test_an_optimizer_that_keeps_the_parameters_is_donated(self):
        step = ja_linen.train_step(lambda v, b: ja.mean(Plain().apply(v, b[0])), **CUT)
        state = linen_state(Plain(), optax.contrib.schedule_free_sgd(0.1))
        assert step(state, (X, Y))[1].updated

    @pytest.mark.filterwarnings("ignore:.*Fp8DotGeneralOp:DeprecationWarning")
    def test_fp8_scaling_state_is_overwritten_by_the_largest(self):
        class Fp8(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(1, dot_general_cls=fp8_ops.Fp8DotGeneralOp)(x)[:, 0]

        model = Fp8()

        def loss_fn(variables, batch):
            return ja.mean((model.apply(variables, batch[0]) - batch[1]) ** 2)

        state = linen_state(model, optax.sgd(0.1))
        name = ja_linen.OVERWRITE
        assert name in state.params
        start = jax.tree.map(jnp.copy, state.params)
        new, _ = ja_linen.train_step(loss_fn, **CUT)(state, (X, Y))
        parts = [
            jax.grad(lambda p, b=b: loss_fn(p, b).value)(start)[name]
            for b in ja.split((X, Y), **CUT)
        ]
        forward = {k for k in _paths(start[name]) if "output_grad" not in k}
        want = jax.tree.map(lambda *xs: np.max(np.stack(xs), axis=0), *parts)
        got, want = _paths(new.params[name]), _paths(want)
        for path in forward:  # those of the backward pass depend on the scale of the loss
            np.testing.assert_allclose(got[path], want[path], rtol=1e-6, err_msg=path)
        assert any(not np.array_equal(got[p], _paths(start[name])[p]) for p in got)


def _paths(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf, np.float32)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_equinox_models_through_partition():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, "scalar", 4, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, batch):
        out = jax.vmap(eqx.combine(params, static))(batch[0])
        return ja.mean((out - batch[1]) ** 2)

    loss, grads = jax.jit(ja.value_and_grad(loss_fn, num_microbatches=5))(params, (X, Y))
    want_loss, want = jax.value_and_grad(lambda p: loss_fn(p, (X, Y)).value)(params)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    close(grads, want)
    init, step = ja.train_step(loss_fn, optax.adam(1e-2), donate=False, **CUT)
    new, _, info = step(params, init(params), (X, Y))
    assert info.updated
    assert jnp.isfinite(jax.vmap(eqx.combine(new, static))(X)).all()
