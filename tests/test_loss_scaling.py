"""Loss scaling: float16 windows that neither vanish nor overflow, one change of scale a window."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxaccum as ja
from jaxaccum import loss_scaling

CUTS = [{"num_microbatches": 4}, {"microbatch_size": 3}]


def linear(w, x):
    """A loss whose gradient is made in float16."""
    return ja.mean(x * w)


def half(*values):
    return jnp.asarray(values, jnp.float16)


# The configuration and its state.


def test_the_scale_follows_its_law():
    scaling = loss_scaling.dynamic(
        initial=8.0, growth_interval=2, factor=2.0, minimum=2.0, maximum=16.0
    )
    state, got = scaling.init(), []
    for overflowed in [True, True, True, False, False, False, True, False, False, *[False] * 8]:
        state = jax.jit(scaling.update)(state, overflowed)
        got.append(float(state.scale))
    assert got[:9] == [4, 2, 2, 2, 4, 4, 2, 2, 4]
    assert got[9:] == [4, 8, 8, 16, 16, 16, 16, 16]


def test_a_static_scale_stays():
    scaling = loss_scaling.static(256)
    state = scaling.init()
    for overflowed in (True, False, True):
        state = scaling.update(state, overflowed)
    assert (state.scale, state.good_windows, state.overflowed) == (256, 0, False)


def test_types_of_the_state_never_change():
    for scaling in (loss_scaling.static(2.0), loss_scaling.dynamic()):
        kinds = [
            [(x.shape, x.dtype, jax.typeof(x).weak_type) for x in state]
            for state in (scaling.init(), scaling.update(scaling.init(), jnp.bool_(True)))
        ]
        assert kinds[0] == kinds[1] == [((), t, False) for t in (jnp.float32, jnp.int32, jnp.bool_)]


@pytest.mark.parametrize(
    ("call_fn", "message"),
    [
        (lambda: loss_scaling.static(3), "`scale` must be a power of two, got 3"),
        (lambda: loss_scaling.static(0), "power of two"),
        (lambda: loss_scaling.static(float("inf")), "power of two"),
        (lambda: loss_scaling.static("8"), "`scale` must be a number"),
        (lambda: loss_scaling.static(True), "`scale` must be a number"),
        (lambda: loss_scaling.dynamic(factor=1), "`factor` must be above 1"),
        (lambda: loss_scaling.dynamic(factor=1.5), "`factor` must be a power of two"),
        (lambda: loss_scaling.dynamic(growth_interval=0), "`growth_interval` must be at least 1"),
        (lambda: loss_scaling.dynamic(initial=0.5), "`initial` must be between"),
        (lambda: loss_scaling.dynamic(maximum=2.0), "`initial` must be between"),
    ],
)
def test_wrong_configurations_are_refused(call_fn, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call_fn()


@pytest.mark.parametrize("value", ["8", True, jnp.ones(2), 1j, jnp.bool_(True), loss_scaling])
def test_a_scale_must_be_a_real_scalar(value):
    f = ja.accumulate(linear, num_microbatches=2)
    with pytest.raises(TypeError, match="`loss_scale` must be a real scalar"):
        f(half(1), half(1, 2), loss_scale=value)


@pytest.mark.parametrize("value", [0, -2.0, float("nan"), float("inf")])
def test_a_scale_must_be_positive(value):
    f = ja.value_and_grad(linear, num_microbatches=2)
    with pytest.raises(ValueError, match="`loss_scale` must be above 0"):
        f(half(1)[0], half(1, 2), loss_scale=value)


# One window inside a step.


@pytest.mark.parametrize("cut", CUTS)
def test_what_vanishes_in_float16_is_kept(cut):
    """The derivative of each row, 2**-26, is below the smallest float16, 2**-24."""

    def tiny(w, x):
        return ja.mean((x * w) * half(2.0**-13)[0])

    w, x = half(1)[0], jnp.full(12, 2.0**-13, jnp.float16)
    f = jax.jit(ja.accumulate(tiny, **cut))
    assert f(w, x).grads == 0
    sums = f(w, x, loss_scale=2.0**15)
    assert sums.grads == 12 * 2.0**-26
    assert sums.grads.dtype == jnp.float32
    assert sums.loss == f(w, x).loss


@pytest.mark.parametrize("cut", CUTS)
def test_a_scale_below_one_makes_room(cut):
    """Undivided gradients of one micro-batch above 65504."""
    w, x = half(0)[0], jnp.full(12, 40000.0, jnp.float16)
    f = jax.jit(ja.accumulate(linear, **cut))
    assert not np.isfinite(f(w, x).grads)
    window = ja.finalize(f(w, x, loss_scale=2.0**-4))
    assert window.grads == 40000
    assert window.weight == 12


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scale", [2.0**-3, 1.0, 2.0**5])
def test_a_scale_that_fits_changes_no_bit(dtype, scale):
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.integers(-4, 5, 3), dtype)
    x = jnp.asarray(rng.integers(-8, 9, (10, 3)), dtype)
    f = jax.jit(ja.accumulate(lambda w, x: ja.mean((x @ w) ** 2 / 2), num_microbatches=4))
    plain, scaled = f(w, x), f(w, x, loss_scale=scale)
    np.testing.assert_array_equal(plain.grads, scaled.grads)
    assert (plain.loss, plain.weight) == (scaled.loss, scaled.weight)


def test_without_a_scale_the_program_is_the_same():
    f = ja.accumulate(linear, num_microbatches=4)
    plain = jax.make_jaxpr(f)(1.0, jnp.ones(8))
    none = jax.make_jaxpr(lambda w, x: f(w, x, loss_scale=None))(1.0, jnp.ones(8))
    assert str(plain) == str(none)


def test_a_traced_scale_does_not_recompile():
    traces = []

    def counted(w, x):
        traces.append(1)
        return linear(w, x)

    f = jax.jit(ja.value_and_grad(counted, num_microbatches=2))
    for scale in (1.0, 2.0, 1024.0):
        loss, grad = f(half(2)[0], half(1, 3), loss_scale=jnp.float32(scale))
        assert (loss, grad, grad.dtype) == (4, 2, jnp.float16)
    assert len(traces) == 1


def test_several_terms_are_scaled_together():
    def terms(w, x):
        return {"fit": ja.mean(x * w), "penalty": ja.Mean(w.astype(jnp.float32) ** 2, 1.0)}

    w, x = half(3)[0], half(1, 2, 3, 4, 5)
    f = jax.jit(ja.value_and_grad(terms, num_microbatches=2))
    loss, grad = f(w, x)
    scaled_loss, scaled_grad = f(w, x, loss_scale=64.0)
    assert loss == scaled_loss
    assert grad == scaled_grad == 9


def test_leaves_that_are_no_sums_are_not_unscaled():
    """Scaling state that travels as a gradient did not pass through the loss's cotangent."""

    @jax.custom_vjp
    def record(x, history):
        return x

    record.defvjp(lambda x, h: (x, h), lambda h, g: (g, jnp.maximum(h, 7.0)))

    def loss_fn(params, x):
        return ja.mean(record(params["w"] * x, params["history"]))

    params = {"w": jnp.float32(1), "history": jnp.float32(0)}
    reducers = {"w": ja.Sum, "history": ja.Max}
    f = ja.accumulate(loss_fn, num_microbatches=2, grad_reducers=reducers)
    sums = jax.jit(f)(params, jnp.ones(4), loss_scale=16.0)
    assert sums.grads == {"w": 4, "history": 7}


@pytest.mark.parametrize("size", [1, 3])
def test_gradients_of_the_rows_are_unscaled_too(size):
    x = half(1, 2, 3, 4)
    f = ja.value_and_grad(linear, microbatch_size=size, argnums=(0, 1))
    _, (_, grad) = jax.jit(f)(half(2)[0], x, loss_scale=512.0)
    np.testing.assert_array_equal(grad, np.full(4, 0.5))


def overflowing(scale):
    """Four micro-batches; the second overflows from the scale 2**10 on."""
    w, x = half(0)[0], half(1, 1, 128, 128, 2, 2, 3, 3)
    f = ja.accumulate(linear, num_microbatches=4, skip_nonfinite=True)
    return ja.finalize(jax.jit(f)(w, strided(x, 4), loss_scale=scale))


def strided(x, num):
    """Rows in the order in which consecutive pairs are the micro-batches."""
    return x.reshape(num, -1).T.reshape(-1)


def test_an_overflowed_micro_batch_leaves_with_its_tokens():
    window = overflowing(2.0**10)
    assert (window.num_skipped, window.num_microbatches, window.weight) == (1, 3, 6)
    assert window.grads == 2
    assert overflowing(2.0).num_skipped == 0
    assert overflowing(2.0).grads == (2 + 256 + 4 + 6) / 8


@pytest.mark.parametrize("axis", ["axis_name", "spmd_axis_name"])
def test_scales_over_devices(axis):
    mesh = jax.make_mesh((4,), ("data",))
    w, x = half(1)[0], jnp.full(16, 2.0**-13, jnp.float16)

    def tiny(w, x):
        return ja.mean((x * w) * half(2.0**-13)[0])

    f = ja.accumulate(tiny, num_microbatches=2, **{axis: "data"})
    rows = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    if axis == "axis_name":
        f = jax.shard_map(
            lambda w, x, s, g=f: g(w, x, loss_scale=s),
            mesh=mesh,
            in_specs=(jax.P(), jax.P("data"), jax.P()),
            out_specs=jax.P(),
        )
        sums = jax.jit(f)(w, rows, jnp.float32(2.0**15))
    else:
        with jax.set_mesh(mesh):
            sums = jax.jit(lambda w, x: f(w, x, loss_scale=2.0**15))(w, rows)
    assert sums.grads == 16 * 2.0**-26


def test_unscale_leaves_integers_alone():
    grads = {"w": half(8, 16), "steps": jnp.int32(3), "none": None}
    true = loss_scaling.unscale(grads, loss_scaling.static(4).init())
    np.testing.assert_array_equal(true["w"], [2, 4])
    assert true["w"].dtype == jnp.float32
    assert (true["steps"], true["none"]) == (3, None)


# A training step.


def train(batches, *, policy=False, rate=1.0, **scaling):
    init, step = ja.train_step(
        linear,
        optax.sgd(rate),
        num_microbatches=4,
        skip_nonfinite=policy,
        loss_scale=loss_scaling.dynamic(**scaling),
    )
    w = half(0)[0]
    state, infos = init(w), []
    for batch in batches:
        w, state, info = step(w, state, strided(half(*batch), 4))
        infos.append(info)
    return w, state, infos


GOOD = [1, 1, 2, 2, 3, 3, 4, 4]
ONE_BAD = [1, 1, 64, 64, 2, 2, 3, 3]  # from the scale 2**9 on: (64 + 64) * 2**9 > 65504
ALL_LARGE = [64] * 8


@pytest.mark.parametrize("policy", [False, True, "window"])
def test_case_20_the_scale_halves_once_per_window(policy):
    options = {"initial": 2.0**9, "growth_interval": 2}
    w, state, infos = train([GOOD, ONE_BAD, ALL_LARGE, GOOD, GOOD, GOOD], policy=policy, **options)
    assert [float(i.loss_scale) for i in infos] == [512, 512, 256, 256, 512, 512]
    assert [bool(i.overflowed) for i in infos] == [False, True, False, False, False, False]
    # Twice 64 * 256 fits; a skipped micro-batch leaves with its tokens.
    assert [int(i.num_skipped) for i in infos] == [0, 1 if policy is True else 4, 0, 0, 0, 0]
    second = np.float16(-2.5 - 2) if policy is True else np.float16(-2.5)
    assert w == second - 64 - 3 * 2.5
    assert (state.loss_scale.scale, state.loss_scale.good_windows) == (1024, 0)


def test_a_scaled_run_equals_an_unscaled_one():
    w, state, _ = train([GOOD] * 3, initial=2.0**8)
    init, step = ja.train_step(linear, optax.sgd(1.0), num_microbatches=4)
    plain = half(0)[0]
    plain_state = init(plain)
    for _ in range(3):
        plain, plain_state, info = step(plain, plain_state, strided(half(*GOOD), 4))
    assert w == plain
    assert (info.loss_scale, info.overflowed) == (None, None)
    assert plain_state.loss_scale is None
    kinds = [jax.tree.map(lambda x: x.dtype, s.inner_state) for s in (state, plain_state)]
    assert kinds[0] == kinds[1]


def test_a_scale_below_one_is_found():
    """One micro-batch's undivided gradient, 2 * 40000, does not fit into float16."""
    batches = [[40000.0] * 8] * 6
    w, state, infos = train(batches, rate=2.0**-20, initial=2.0, minimum=2.0**-14)
    assert [bool(i.updated) for i in infos] == [False] * 2 + [True] * 4
    assert [float(i.loss_scale) for i in infos] == [2, 1] + [0.5] * 4
    assert float(infos[-1].grad_norm) == 40000
    assert state.optimizer_step == 4
    assert np.isclose(w, -4 * 40000 / 2**20, rtol=4 * 2.0**-11)


def test_a_state_without_a_scale_is_refused():
    init, _ = ja.train_step(linear, optax.sgd(1.0), num_microbatches=2)
    _, step = ja.train_step(
        linear, optax.sgd(1.0), num_microbatches=2, loss_scale=loss_scaling.dynamic()
    )
    w = jnp.float32(0)
    with pytest.raises(ValueError, match="differ in whether they have a `loss_scale`"):
        step(w, init(w), jnp.ones(4))


# A stream.


def stream(batches, *, policy=False, every=4, jit=True, **scaling):
    tx = ja.multi_steps(
        optax.sgd(1.0), every, skip_nonfinite=policy, loss_scale=loss_scaling.dynamic(**scaling)
    )
    sums_fn = ja.accumulate(linear, num_microbatches=1)

    def micro_step(params, state, batch):
        sums = sums_fn(params, batch, loss_scale=state.loss_scale.scale)
        updates, state = tx.update(sums.grads, state, params, weight=sums.weight)
        return optax.apply_updates(params, updates), state

    micro_step = jax.jit(micro_step) if jit else micro_step
    w = half(0)[0]
    state, scales = tx.init(w), []
    for batch in batches:
        scales.append(float(state.loss_scale.scale))
        w, state = micro_step(w, state, half(batch, batch))
    return w, state, scales


@pytest.mark.parametrize("policy", [False, "window"])
def test_a_streams_scale_is_constant_inside_a_window(policy):
    options = {"initial": 2.0**9, "growth_interval": 2}
    w, state, scales = stream([1, 64, 64, 3, *[1, 2, 3, 4] * 2, 1], policy=policy, **options)
    assert scales == [512] * 4 + [256] * 8 + [512]
    assert (w, state.num_dropped, state.optimizer_step) == (-5, 1, 2)


def test_a_streams_skipped_micro_step_is_replaced():
    options = {"initial": 2.0**9, "growth_interval": 9}
    w, state, scales = stream([1, 64, 64, 3, 2, 2, 1], policy=True, every=4, **options)
    assert scales == [512] * 6 + [256]
    assert (w, state.num_skipped, state.optimizer_step) == (-2, 2, 1)


def test_a_window_that_never_begins_changes_its_scale():
    """Otherwise a first scale that is too large would skip every micro-step for ever."""
    options = {"initial": 2.0**11, "growth_interval": 9}
    w, state, scales = stream([64] * 8, policy=True, every=2, **options)
    assert scales == [2048, 2048, 1024, 1024, 512, 512, 256, 256]
    assert (w, state.num_skipped, state.optimizer_step) == (-64, 6, 1)


def test_gradients_by_hand_are_unscaled_by_hand():
    tx = ja.multi_steps(optax.sgd(1.0), 2, loss_scale=loss_scaling.static(2.0**10))
    w = half(1)[0]
    state = tx.init(w)
    for value in (2.0**-20, 3 * 2.0**-20):
        x = half(value)[0]
        scaled = jax.grad(lambda w, s, x=x: (w * x) * s.astype(jnp.float16))
        grads = scaled(w, state.loss_scale.scale)
        updates, state = tx.update(loss_scaling.unscale(grads, state.loss_scale), state, w)
    assert updates == -(2.0**-19)
    assert state.loss_scale.scale == 2.0**10


def test_a_streams_state_without_a_scale_is_refused():
    plain = ja.multi_steps(optax.sgd(1.0), 2)
    scaled = ja.multi_steps(optax.sgd(1.0), 2, loss_scale=loss_scaling.dynamic())
    w = jnp.float32(0)
    with pytest.raises(ValueError, match="made without `loss_scale`"):
        scaled.update(w, plain.init(w))
    with pytest.raises(ValueError, match="made with `loss_scale`"):
        plain.update(w, scaled.init(w))


@pytest.mark.parametrize("factory", [ja.accumulate, ja.value_and_grad, ja.window_axis.accumulate])
def test_a_scale_belongs_to_the_call(factory):
    with pytest.raises(TypeError, match=r"`loss_scale` is a keyword of the call.*loss_scale=\.\."):
        factory(linear, num_microbatches=2, loss_scale=2.0)
    with pytest.raises(TypeError, match=r"`unroll` is a keyword of where the function is made"):
        factory(linear, num_microbatches=2)(half(2)[0], half(1, 3), unroll=2)
    with pytest.raises(TypeError, match=r"train_step: `key` is a keyword of the call"):
        ja.train_step(linear, optax.sgd(1.0), num_microbatches=2, key=None)
    with pytest.raises(TypeError, match="`nonsense` is none of its options"):
        factory(linear, num_microbatches=2, nonsense=2)
