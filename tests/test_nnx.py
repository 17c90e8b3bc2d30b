"""The adapter for Flax NNX: model objects, random streams, metrics, optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxaccum as ja
from jaxaccum import nnx as ja_nnx
from jaxaccum.orbax import Checkpoints, Run

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(1, 2, size=(12, 3)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=12), jnp.float32)
CUT = {"num_microbatches": 4}


def close(got, want, rtol=5e-6, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


def variables(model, kind=nnx.Param):
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, kind)))


class Model(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.norm = nnx.BatchNorm(3, momentum=0.9, rngs=rngs)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.first(self.norm(x)))))[:, 0]


class Linear(nnx.Module):
    """`w * x` for integers; a metric of the rows beside it."""

    def __init__(self, w=1.0, metric=nnx.metrics.Average):
        self.w = nnx.Param(jnp.float32(w))
        self.metric = metric()

    def __call__(self, x):
        self.metric.update(values=x)
        return self.w * x


def squares(model, batch):
    return ja.mean((model(batch[0]) - batch[1]) ** 2)


def plain(model, x):
    return ja.mean(model.w * x)


def measured(model, x):
    return ja.mean(model(x))


class TestValueAndGrad:
    @pytest.mark.parametrize("policy", ["pooled", "sequential", "frozen"])
    def test_statistics_are_updated_in_place(self, policy):
        model, reference = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
        start = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
        f = ja_nnx.value_and_grad(squares, model_state=policy, **CUT)
        loss, grads = nnx.jit(f)(model, (X, Y))
        if policy == "pooled":
            reference(X)
        elif policy == "sequential":
            for micro_batch in ja.split((X, Y), **CUT):
                reference(micro_batch[0])
        want = nnx.to_pure_dict(nnx.state(reference, nnx.BatchStat))
        close(
            nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)), want if policy != "frozen" else start
        )
        assert jnp.isfinite(loss)
        assert jax.tree.structure(grads) == jax.tree.structure(nnx.state(model, nnx.Param))

    def test_one_micro_batch_equals_nnx(self):
        model, reference = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
        f = ja_nnx.value_and_grad(squares, num_microbatches=1, model_state="sequential")
        loss, grads = f(model, (X, Y))
        want_loss, want = nnx.value_and_grad(lambda m: squares(m, (X, Y)).value)(reference)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
        close(grads, want)
        close(nnx.state(model, nnx.BatchStat), nnx.state(reference, nnx.BatchStat))

    def test_optimizer_and_stream(self):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, ja.multi_steps(optax.sgd(0.1), 2), wrt=nnx.Param)
        f = ja_nnx.value_and_grad(squares, model_state="pooled", **CUT)
        before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        changed = []
        for _ in range(2):
            _, grads = f(model, (X, Y))
            optimizer.update(model, grads, weight=1)
            after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            changed.append(not np.array_equal(after["out"]["kernel"], before["out"]["kernel"]))
        assert changed == [False, True]

    def test_dropout_differs_between_micro_batches_and_windows(self):
        model = Model(nnx.Rngs(0), rate=0.5)

        def loss_fn(model, batch):
            mask = model.dropout(jnp.ones((3, 64))) > 0
            return squares(model, batch), mask

        f = ja_nnx.value_and_grad(loss_fn, model_state="frozen", has_aux=True, **CUT)
        (_, first), _ = f(model, (X, Y))
        (_, second), _ = f(model, (X, Y))
        masks = [*np.asarray(first), *np.asarray(second)]
        for i in range(8):
            for j in range(i):
                assert not np.array_equal(masks[i], masks[j]), (i, j)
        again = Model(nnx.Rngs(0), rate=0.5)
        np.testing.assert_array_equal(f(again, (X, Y))[0][1], first)

    def test_changes_without_a_policy_are_refused(self):
        model = Model(nnx.Rngs(0))
        f = ja_nnx.value_and_grad(squares, **CUT)
        before = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
        with pytest.raises(ValueError, match=r"changes .*mean.*`model_state=`: \"sequential\""):
            f(model, (X, Y))
        close(nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)), before, rtol=0, atol=0)
        with pytest.raises(TypeError, match=r"must be an `nnx.Module`"):
            f({}, (X, Y))
        with pytest.raises(TypeError, match="the model holds its own state; say what becomes"):
            f(model, (X, Y), model_state="pooled")

    def test_a_model_without_state_needs_no_policy(self):
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        f = ja_nnx.value_and_grad(lambda m, b: ja.mean((m(b[0])[:, 0] - b[1]) ** 2), **CUT)
        loss, grads = f(model, (X, Y))
        want = nnx.grad(lambda m: jnp.mean((m(X)[:, 0] - Y) ** 2))(model)
        close(grads, want)
        assert jnp.isfinite(loss)

    def test_a_change_is_what_the_program_changes(self):
        """A remat in the model hands on every variable as an output of its own."""

        class Rematerialised(nnx.Module):
            def __init__(self):
                @nnx.split_rngs(splits=3)
                @nnx.vmap(in_axes=(0,), out_axes=0)
                def make(rngs):
                    return Model(rngs, rate=0.5)

                self.layers = make(nnx.Rngs(0))
                self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=nnx.Rngs(0))

            def __call__(self, x):
                @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
                @nnx.remat
                def apply(x, layer):
                    return x + layer.dropout(nnx.relu(layer.first(x)))[:, :3]

                return apply(nnx.remat(lambda norm, x: norm(x))(self.norm, x), self.layers)

        model = Rematerialised()
        f = ja_nnx.value_and_grad(lambda model, x: ja.mean(model(x) ** 2), **CUT)
        loss, grads = f(model, X)
        assert jnp.isfinite(loss)
        assert grads["layers"]["first"]["kernel"].shape == (3, 3, 4)
        np.testing.assert_array_equal(model.layers.dropout.rngs.count[...], [1, 1, 1])
        model.norm.use_running_average = False
        with pytest.raises(ValueError, match=r"`loss_fn` changes `norm.mean`, `norm.var` of"):
            f(model, X)

    def test_lost_changes_are_refused_by_name(self):
        def scales(model, x):
            model.w[...] = model.w * 2
            return plain(model, x)

        def makes(model, x):
            model.new = nnx.Param(x[0])
            return plain(model, x)

        model = Linear()
        for loss_fn, match in (
            (scales, r"`loss_fn` changes `w`, a parameter"),
            (makes, r"`loss_fn` makes `new`"),
        ):
            with pytest.raises(ValueError, match=match):
                ja_nnx.value_and_grad(loss_fn, **CUT)(model, Y)
        assert variables(model)["w"] == 1

    def test_frozen_parameters_stay_bit_for_bit(self):
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(
            nnx.BatchNorm(3, rngs=rngs), nnx.LoRALinear(3, 3, lora_rank=2, rngs=rngs)
        )
        before = variables(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
        optimizer = ja_nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.LoRAParam)
        step = ja_nnx.train_step(
            lambda m, x: ja.mean((m(x) - 1) ** 2), model_state="pooled", num_microbatches=5
        )
        for _ in range(2):
            assert step(model, optimizer, X).updated
        after = variables(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
        close(after, before, rtol=0, atol=0)
        with pytest.raises(ValueError, match=r"`wrt` must name .* argument 0 has none of"):
            ja_nnx.value_and_grad(plain, wrt=nnx.LoRAParam, **CUT)(Linear(), Y)

    @pytest.mark.filterwarnings("ignore:.*Module.sow:DeprecationWarning")
    def test_sown_values_are_dropped(self):
        class Sowing(Linear):
            def __call__(self, x):
                self.sow(nnx.Intermediate, "seen", x)
                return self.w * x

        model = Sowing()
        model(Y[:2])
        loss, grads = ja_nnx.value_and_grad(measured, **CUT)(model, Y)
        np.testing.assert_allclose([loss, grads["w"][...]], 2 * [Y.mean()], rtol=1e-5)
        assert len(model.seen.get_value()) == 1

    @pytest.mark.parametrize(
        "argnums",
        [
            nnx.DiffState(0, nnx.PathContains("kernel")),
            (nnx.DiffState(2, nnx.Param), 0),
            (3, 0),
            2,
            3,
        ],
    )
    def test_argnums_are_those_of_nnx(self, argnums):
        a, b = (nnx.Linear(3, 2, rngs=nnx.Rngs(i)) for i in range(2))

        def loss_fn(a, x, b, c):
            return ja.mean(a(x) * b(x) * c)

        args = (a, X, b, jnp.float32(2))
        got = ja_nnx.value_and_grad(loss_fn, argnums=argnums, **CUT)(*args)
        want = nnx.value_and_grad(lambda *args: loss_fn(*args).value, argnums=argnums)(*args)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        close(got, want)

    def test_mistakes_in_argnums(self):
        with pytest.raises(TypeError, match=r"Pass it as `argnums`"):
            ja_nnx.value_and_grad(plain, wrt=nnx.DiffState(0, nnx.Param), **CUT)
        with pytest.raises(ValueError, match="names argument 0 twice"):
            ja_nnx.value_and_grad(plain, argnums=(0, nnx.DiffState(0, nnx.Param)), **CUT)
        with pytest.raises(ValueError, match="only 2 positional arguments were given"):
            ja_nnx.value_and_grad(plain, argnums=2, **CUT)(Linear(), Y)
        with pytest.raises(ValueError, match="exactly one of"):
            ja_nnx.value_and_grad(plain)


class TestKeys:
    def test_a_key_reaches_the_loss_as_in_the_core(self):
        def of(params, x, *, key):
            return ja.mean(params.w * x), jax.random.key_data(key)

        got = ja_nnx.value_and_grad(of, has_aux=True, **CUT)(Linear(), Y, key=jax.random.key(3))
        want = ja.value_and_grad(
            lambda w, x, *, key: (ja.mean(w * x), jax.random.key_data(key)), has_aux=True, **CUT
        )(1.0, Y, key=jax.random.key(3))
        np.testing.assert_array_equal(got[0][1], want[0][1])
        optimizer = ja_nnx.Optimizer(model := Linear(), optax.sgd(0.1))
        info = ja_nnx.train_step(of, has_aux=True, **CUT)(
            model, optimizer, Y, key=jax.random.key(3)
        )
        np.testing.assert_array_equal(info.aux, want[0][1])

    def test_a_key_that_nothing_takes_is_refused(self):
        for model, loss_fn in ((Linear(), plain), (Model(nnx.Rngs(0), 0.5), squares)):
            with pytest.raises(TypeError, match=r"`key=` was given, but `loss_fn` takes no"):
                ja_nnx.accumulate(loss_fn, **CUT)(model, Y, key=jax.random.key(0))
        rounding = ja.accumulators.stochastic()
        f = ja_nnx.value_and_grad(plain, accumulator=rounding, **CUT)
        assert jnp.isfinite(f(Linear(), Y, key=jax.random.key(0))[0])

    @pytest.mark.parametrize("transform", [lambda f: f, nnx.jit])
    def test_rngs_arguments_are_forked(self, transform):
        def loss_fn(model, x, rngs):
            return plain(model, x), jax.random.key_data(rngs.dropout())

        f = transform(ja_nnx.value_and_grad(loss_fn, has_aux=True, **CUT))
        rngs = nnx.Rngs(dropout=1)
        keys = [f(Linear(), Y, rngs)[0][1] for _ in range(2)]
        assert len({tuple(map(int, key)) for key in np.concatenate(keys)}) == 8
        assert rngs.dropout.count[...] == 2
        again = f(Linear(), Y, nnx.Rngs(dropout=1))[0][1]
        np.testing.assert_array_equal(again, keys[0])

    def test_streams_differ_between_devices(self):
        def loss_fn(model, x, rngs):
            key = jax.random.key_data(rngs())
            return measured(model, x), ja.Concat(jnp.broadcast_to(key, (len(x), 2)))

        mesh = jax.make_mesh((4,), ("data",))
        model, rngs = Linear(2.0), nnx.Rngs(0)
        with jax.set_mesh(mesh):
            x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, jax.P("data")))
            f = nnx.jit(
                ja_nnx.value_and_grad(
                    loss_fn, has_aux=True, num_microbatches=2, spmd_axis_name="data"
                )
            )
            (loss, keys), grads = f(model, x, rngs)
        assert len({tuple(map(int, key)) for key in keys}) == 8
        assert (loss, grads["w"][...]) == (7.0, 3.5)
        assert (model.metric.total[...], model.metric.count[...]) == (28, 8)


class TestMetrics:
    @pytest.mark.parametrize("policy", [None, "sequential", "pooled", "frozen"])
    def test_a_metric_in_the_model_holds_all_rows(self, policy):
        model, x = Linear(), jnp.arange(8.0)
        f = ja_nnx.value_and_grad(measured, model_state=policy, num_microbatches=3)
        for windows in (1, 2):
            f(model, x)
            assert (model.metric.compute(), model.metric.count[...]) == (3.5, 8 * windows)
            assert model.metric.count[...].dtype == jnp.int32

    def test_a_step_and_what_it_leaves_out(self):
        model, x = Linear(), jnp.array([1.0, 2, 3, 4, 5, jnp.nan])
        optimizer = ja_nnx.Optimizer(model, optax.sgd(0.0))
        for skip in (True, "window"):  # the rows {1, 4} and {2, 5}; then none
            step = ja_nnx.train_step(measured, num_microbatches=3, skip_nonfinite=skip)
            step(model, optimizer, x)
            assert (model.metric.count[...], model.metric.compute()) == (4, 3)

    def test_those_that_do_not_add_up_are_refused_by_name(self):
        x = jnp.arange(8.0)
        for policy, axes in ("pooled", {}), ("sequential", {"spmd_axis_name": "data"}):
            f = ja_nnx.value_and_grad(measured, model_state=policy, num_microbatches=2, **axes)
            with (
                jax.set_mesh(jax.make_mesh((2,), ("data",))),
                pytest.raises(ValueError, match=r"`metric.count`.* metric whose .* do not add up"),
            ):
                f(Linear(metric=nnx.metrics.Welford), x)

        class Own(nnx.Module):
            def __init__(self):
                self.total = nnx.metrics.MetricState(jnp.float32(0))

            def update(self, values):
                self.total[...] += values.sum()

        with pytest.raises(ValueError, match=r"`metric.total`.* metric whose .* do not add up"):
            ja_nnx.accumulate(measured, model_state="pooled", **CUT)(Linear(metric=Own), x)
        model = Linear(metric=nnx.metrics.Welford)
        ja_nnx.value_and_grad(measured, model_state="sequential", num_microbatches=2)(model, x)
        np.testing.assert_allclose(model.metric.compute().standard_deviation, x.std(), rtol=1e-6)

    def test_metrics_as_an_argument(self):
        labels = jnp.arange(12) % 3
        model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
        want = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())

        def loss_fn(model, batch, metrics):
            logits = model(batch[0])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
            metrics.update(loss=losses, logits=logits, labels=batch[1])
            return ja.mean(losses)

        loss_fn(model, (X, labels), want)
        loss, _ = nnx.jit(ja_nnx.value_and_grad(loss_fn, num_microbatches=5))(
            model, (X, labels), metrics
        )
        close(metrics.compute(), want.compute())
        np.testing.assert_allclose(metrics.compute()["loss"], loss, rtol=1e-6)
        assert metrics.accuracy.count[...] == 12

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_inside_of_a_shard_map(self, check_vma):
        f = ja_nnx.value_and_grad(measured, axis_name="data", num_microbatches=2)
        run = nnx.shard_map(
            f,
            mesh=jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
            in_specs=(jax.P(), jax.P("data")),
            out_specs=jax.P(),
            check_vma=check_vma,
        )
        model = Linear()
        loss, grads = run(model, jnp.arange(8.0))
        assert (loss, grads["w"][...]) == (3.5, 3.5)
        assert (model.metric.compute(), model.metric.count[...]) == (3.5, 8)


class TestOptimizer:
    @pytest.mark.parametrize("summed", [False, True])
    def test_step_counts_optimizer_steps(self, summed):
        model = Linear()
        optimizer = ja_nnx.Optimizer(model, ja.multi_steps(optax.sgd(1.0), 2))
        f = ja_nnx.accumulate(plain, num_microbatches=2)
        steps = []
        for x in ([1.0, 2.0, 3.0], [1.0] * 7, [4.0, 4.0]):
            sums = f(model, jnp.array(x))
            if summed:
                optimizer.update(model, sums)
            else:
                optimizer.update(model, sums.grads, weight=sums.weight)
            steps.append(int(optimizer.step[...]))
        assert steps == [0, 1, 1]
        np.testing.assert_allclose(model.w[...], 1 - 1.3, rtol=1e-6)
        ja_nnx.flush(optimizer, model)
        np.testing.assert_allclose(model.w[...], 1 - 1.3 - 4, rtol=1e-6)
        ja_nnx.flush(optimizer, model)
        assert optimizer.step[...] == 2

    def test_sums_for_an_optimizer_that_does_not_divide_are_refused(self):
        model = Linear()
        optimizer = ja_nnx.Optimizer(model, optax.adam(1.0))
        sums = ja_nnx.accumulate(plain, **CUT)(model, Y)
        with pytest.raises(TypeError, match=r"`ja.WindowSums` needs an optimizer that divides"):
            optimizer.update(model, sums)
        with pytest.raises(TypeError, match=r"`weight=` needs an optimizer that divides"):
            optimizer.update(model, sums.grads, weight=3)
        optimizer.update(model, ja.finalize(sums).grads)
        assert optimizer.step[...] == 1
        with pytest.raises(ValueError, match="multi_steps"):
            ja_nnx.flush(optimizer, model)
        with pytest.raises(TypeError, match=r"`optimizer` must be an `nnx.Optimizer`"):
            ja_nnx.flush(model, optimizer)

    def test_sums_of_halves_merge(self):
        model, x = Linear(), jnp.arange(8.0)
        f = ja_nnx.accumulate(measured, num_microbatches=2)
        both = ja.finalize(ja.merge(f(model, x[:3]), f(model, x[3:])))
        assert (both.loss, both.grads["w"][...], both.weight) == (3.5, 3.5, 8)
        assert (model.metric.compute(), model.metric.count[...]) == (3.5, 8)

    def test_train_step_equals_nnx_on_the_full_batch(self):
        model, reference = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
        tx = optax.adam(1e-2)
        optimizer = ja_nnx.Optimizer(model, tx)
        plain_optimizer = nnx.Optimizer(reference, tx, wrt=nnx.Param)
        step = ja_nnx.train_step(squares, num_microbatches=1, model_state="pooled")
        for number in range(1, 4):
            info = step(model, optimizer, (X, Y))
            grads = nnx.grad(lambda m: squares(m, (X, Y)).value)(reference)
            plain_optimizer.update(reference, grads)
            assert optimizer.step[...] == number == info.optimizer_step
        close(nnx.state(model, (nnx.Param, nnx.BatchStat)),
              nnx.state(reference, (nnx.Param, nnx.BatchStat)), rtol=1e-4, atol=1e-5)  # fmt: skip
        assert info.tokens_seen == 36
        ja.check_healthy(optimizer)

    @pytest.mark.parametrize("route", ["step", "stream", "flush", "plain"])
    def test_no_bit_of_integers_changes(self, route):
        model = Linear()
        small = np.array([-128, -1, 0, 1, 100, 127], np.int8)
        model.small, model.large = nnx.Param(jnp.asarray(small)), nnx.Param(jnp.int32(2**24 + 1))
        tx = optax.adamw(0.1, weight_decay=0.1)
        every = {"stream": 2, "flush": 3}.get(route)
        optimizer = ja_nnx.Optimizer(model, ja.multi_steps(tx, every) if every else tx)
        step = ja_nnx.train_step(plain, **CUT)
        sums_fn = ja_nnx.accumulate(plain, **CUT)
        for _ in range(4):
            if route == "step":
                step(model, optimizer, Y)
            elif route == "plain":
                optimizer.update(model, ja.finalize(sums_fn(model, Y)).grads)
            else:
                optimizer.update(model, sums_fn(model, Y))
        if route == "flush":
            ja_nnx.flush(optimizer, model)
        assert optimizer.step[...] == (4 if every is None else 2)
        np.testing.assert_array_equal(model.small[...], small)
        assert (model.large[...], model.large[...].dtype) == (2**24 + 1, jnp.int32)
        assert model.w[...] != 1

    def test_a_window_that_is_left_out_is_no_step(self):
        model = Linear()
        scale = ja.loss_scaling.dynamic()
        optimizer = ja_nnx.Optimizer(model, optax.sgd(1.0), loss_scale=scale)
        step = ja_nnx.train_step(plain, loss_scale=scale, max_bad_windows=1, num_microbatches=2)
        info = step(model, optimizer, jnp.array([1.0, jnp.inf]))
        assert not info.updated
        assert (optimizer.step[...], model.w[...]) == (0, 1)
        with pytest.raises(FloatingPointError, match=r"`StepState` has diverged: 1 bad in a row"):
            ja.check_healthy(optimizer)

    def test_buffers_in_two_places_are_donated_once(self):
        model = Linear()
        model.other = nnx.Param(model.w[...])
        teacher = nnx.clone(model)
        teacher.w = nnx.Param(model.w[...])
        optimizer = ja_nnx.Optimizer(model, optax.contrib.schedule_free_sgd(0.1))

        def loss_fn(model, x, teacher):
            return ja.mean(model.w * x + model.other * x + teacher.w * x)

        step = ja_nnx.train_step(loss_fn, num_microbatches=2)
        assert step(model, optimizer, jnp.arange(4.0), teacher).updated
        assert teacher.w[...] == 1
        assert model.w[...] == model.other[...] != 1

    def test_steps_of_other_optimizers_are_refused(self):
        model, step = Linear(), ja_nnx.train_step(plain, **CUT)
        with pytest.raises(TypeError, match=r"must be a `jaxaccum.nnx.Optimizer`, got Optimizer"):
            step(model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param), Y)
        with pytest.raises(ValueError, match="one window would stand in another"):
            step(model, ja_nnx.Optimizer(model, ja.multi_steps(optax.sgd(1.0), 2)), Y)
        with pytest.raises(TypeError, match="Did you mean `num_microbatches`"):
            ja_nnx.train_step(plain, num_microbatch=2)

    def test_a_checkpoint_in_mid_window_goes_on_bit_for_bit(self, tmp_path):
        f = ja_nnx.accumulate(squares, num_microbatches=2, model_state="sequential")

        def fresh(seed):
            model = Model(nnx.Rngs(seed), rate=0.5)
            return model, ja_nnx.Optimizer(model, ja.multi_steps(optax.adam(0.1), 3))

        def go_on(model, optimizer, calls):
            for _ in range(calls):
                optimizer.update(model, f(model, (X, Y)))

        one, other = fresh(0), fresh(1)
        go_on(*one, 4)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(Run(*map(nnx.state, one), micro_batches=4))
            run = checkpoints.restore(Run(*map(nnx.state, other)))
        nnx.update(other[0], run.params)
        nnx.update(other[1], run.state)
        for pair in (one, other):
            go_on(*pair, 2)
        assert other[1].step[...] == 2
        same = jax.tree.map(
            lambda a, b: (a == b).all(), *(list(map(nnx.state, p)) for p in (one, other))
        )
        assert jax.tree.all(same)
