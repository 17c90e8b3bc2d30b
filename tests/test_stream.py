"""The streaming transformation: windows, weights, extra arguments, skipping, flushing, errors."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import assert_close, assert_equal

import jaxaccum as ja

PARAMS = {"w": np.array([1.0, -0.0, 2.0], np.float32), "b": np.float32(-0.0)}
IDENTITY = optax.identity()


def params_like(dtype=jnp.float32):
    """Fresh parameters, two of them minus zero."""
    return jax.tree.map(lambda x: jnp.array(x, dtype), PARAMS)


def integer_grads(number, like=PARAMS, *, seed=0, dtype=jnp.float32):
    """`number` gradient trees of small integers, whose float32 sums are exact."""
    rng = np.random.default_rng(seed)

    def draw(x):
        return jnp.array(rng.integers(-8, 9, np.shape(x)), dtype)

    return [jax.tree.map(draw, like) for _ in range(number)]


def mean_of(grads):
    """The float64 mean of gradient trees."""
    return jax.tree.map(lambda *g: np.mean(np.float64(g), axis=0), *grads)


def train(tx, params, grads, *, state=None, jit=True, **columns):
    """Parameters and state after the micro-steps; `columns` hold one extra argument for each."""
    update = jax.jit(tx.update) if jit else tx.update
    state = tx.init(params) if state is None else state
    for k, grad in enumerate(grads):
        updates, state = update(grad, state, params, **{n: c[k] for n, c in columns.items()})
        params = optax.apply_updates(params, updates)
    return params, state


def spy(received):
    """An inner transformation that records what each of its runs is given."""

    def update_fn(updates, state, params=None, **extra_args):
        jax.debug.callback(lambda **seen: received.append(seen), grad=updates, **extra_args)
        return updates, state

    return optax.GradientTransformationExtraArgs(IDENTITY.init, update_fn)


def assert_same_bits(got, want):
    """Equal structure, dtypes and bits: the sign of zero counts."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), got, want)


def bits(x):
    return np.frombuffer(np.asarray(x).tobytes(), np.uint8)


# The window.


@pytest.mark.parametrize("every", [2, 5])
def test_inner_runs_once_per_window_on_its_mean(every):
    received = []
    grads = integer_grads(3 * every)
    train(ja.multi_steps(spy(received), every), params_like(), grads)
    jax.effects_barrier()
    assert len(received) == 3
    for window, seen in enumerate(received):
        assert_equal(seen["grad"], mean_of(grads[window * every : (window + 1) * every]))


def test_inner_runs_once_per_window_in_a_scan():
    received = []
    tx = ja.multi_steps(spy(received), 3)

    def step(state, grad):
        return (tx.update(grad, state)[1], ja.has_updated(state))

    jax.lax.scan(step, tx.init(jnp.zeros(2)), jnp.ones((9, 2)))
    jax.effects_barrier()
    assert len(received) == 3


def test_params_and_inner_state_keep_their_bits_inside_a_window():
    tx = ja.multi_steps(optax.adamw(0.1), 4)
    params, state = train(tx, params_like(), integer_grads(4))
    held = params, state.inner_state
    for grad in integer_grads(3, seed=1):
        params, state = train(tx, params, [grad], state=state)
        assert_same_bits((params, state.inner_state), held)
        assert not ja.has_updated(state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_minus_zero_parameters_survive_until_the_window_closes(dtype):
    params = params_like(dtype)
    after, _ = train(ja.multi_steps(optax.sgd(1.0), 3), params, integer_grads(2, dtype=dtype))
    assert_same_bits(after, params)


@pytest.mark.parametrize("extra", [{}, {"weight": [3]}], ids=["means", "weighted"])
def test_sums_are_readable_while_the_window_is_open(extra):
    grads = integer_grads(1)
    _, state = train(ja.multi_steps(IDENTITY, 2), params_like(), grads, **extra)
    assert_same_bits(state.grad_sum, jax.tree.map(jnp.asarray, grads[0]))
    assert state.weight == (extra["weight"][0] if extra else 1)
    assert (state.micro_step, state.optimizer_step) == (1, 0)


def test_a_closed_window_is_reset():
    _, state = train(ja.multi_steps(optax.sgd(1.0), 2), params_like(), integer_grads(2))
    assert_same_bits(state.grad_sum, jax.tree.map(jnp.zeros_like, params_like()))
    assert (state.micro_step, state.optimizer_step, state.weight) == (0, 1, 0)
    assert ja.has_updated(state)


def test_normalize_false_hands_on_the_sums():
    tx = ja.multi_steps(optax.sgd(1.0), 3, normalize=False)
    params, _ = train(tx, jnp.float32(0), map(jnp.float32, (1, 2, 4)), weight=[5, 6, 7])
    assert params == -7


def test_every_may_follow_the_optimizer_step():
    tx = ja.multi_steps(optax.sgd(1.0), lambda step: jnp.where(step < 2, 1, 3))
    state, closed = tx.init(jnp.float32(0)), []
    for _ in range(8):
        _, state = tx.update(jnp.float32(1), state)
        closed.append(bool(ja.has_updated(state)))
    assert closed == [True, True, False, False, True, False, False, True]


def test_every_is_read_at_the_windows_start():
    """A window of two that closes without weight leaves the length of the next one alone."""
    tx = ja.multi_steps(optax.sgd(1.0), lambda step: 2 + step)
    _, state = train(tx, jnp.float32(0), [jnp.float32(1)] * 4, weight=[0, 0, 1, 1])
    assert (state.num_empty, state.optimizer_step, state.micro_step) == (1, 1, 0)


@pytest.mark.parametrize("extra", [{}, {"weight": [1, 3, 2, 2]}], ids=["means", "weighted"])
def test_eager_jit_and_scan_agree(extra):
    tx = ja.multi_steps(optax.sgd(0.5, momentum=0.5), 2)
    grads = integer_grads(4)

    def step(carry, inputs):
        params, state = carry
        grad, extra = inputs
        updates, state = tx.update(grad, state, params, **extra)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)
    columns = {name: jnp.array(column) for name, column in extra.items()}
    start = params_like(), tx.init(params_like())
    scanned, _ = jax.lax.scan(step, start, (stacked, columns))
    for jit in (True, False):
        assert_same_bits(train(tx, params_like(), grads, jit=jit, **extra), scanned)


def test_update_works_in_both_branches_of_a_cond():
    tx = ja.multi_steps(optax.adam(0.1), 2)
    params, state = params_like(), tx.init(params_like())
    (grad,) = integer_grads(1)

    @jax.jit
    def step(flag, state):
        still = jax.tree.map(jnp.zeros_like, params), state
        return jax.lax.cond(flag, lambda: tx.update(grad, state, params), lambda: still)

    assert step(True, state)[1].micro_step == 1
    assert step(False, state)[1].micro_step == 0


def test_vmap_runs_streams_side_by_side():
    tx = ja.multi_steps(optax.sgd(1.0), 2)
    params = jnp.zeros(3)
    state = jax.vmap(tx.init)(params)
    update = jax.jit(jax.vmap(lambda g, s, w: tx.update(g, s, weight=w)))
    grads, weights = np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.array([[1, 1, 2], [1, 2, 1]])
    for grad, weight in zip(grads, weights, strict=True):
        updates, state = update(grad, state, weight)
    assert_equal(updates, -grads.sum(0) / weights.sum(0))
    assert ja.has_updated(state).all()


def test_init_is_abstract():
    tx = ja.multi_steps(optax.adam(0.1), 2)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        jax.eval_shape(tx.init, PARAMS), tx.init(params_like())
    )


# A window of one micro-step.


@pytest.mark.parametrize("one", [1, np.int64(1), np.int32(1)], ids=["int", "int64", "int32"])
@pytest.mark.parametrize("inner", [optax.adamw(0.1), optax.sgd(0.1, momentum=0.9)])
def test_one_micro_step_is_the_plain_optimizer(one, inner):
    grads = [jax.tree.map(np.sin, g) for g in integer_grads(4)]
    plain, plain_state = train(inner, params_like(), grads)
    params, state = train(ja.multi_steps(inner, one), params_like(), grads)
    assert_same_bits(params, plain)
    assert_same_bits(state.inner_state, plain_state)
    assert jax.tree.leaves(state.grad_carry) == []
    assert state.optimizer_step == 4


@pytest.mark.parametrize(("every", "branches"), [(1, False), (2, True)])
def test_one_micro_step_needs_no_cond(every, branches):
    tx = ja.multi_steps(optax.adam(0.1), every)
    program = jax.make_jaxpr(tx.update)(params_like(), tx.init(params_like()))
    assert ("cond[" in str(program)) is branches


def test_one_micro_step_may_be_weighted_and_skipped():
    tx = ja.multi_steps(optax.sgd(1.0), 1, skip_nonfinite=True)
    grads = map(jnp.float32, (6, np.nan, 7, 3))
    params, state = train(tx, jnp.float32(0), grads, weight=[3, 1, 7, 0])
    assert params == -3
    assert (state.optimizer_step, state.num_skipped, state.num_empty) == (2, 1, 1)


def test_flush_of_a_window_of_one_does_nothing():
    tx = ja.multi_steps(optax.sgd(1.0), 1)
    params, state = train(tx, jnp.float32(0), [jnp.float32(1)])
    updates, state = ja.flush(tx, state, params)
    assert updates == 0
    assert state.optimizer_step == 1


# Donation and types.


ALIASING = {
    "adamw": lambda: optax.adamw(0.1),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "schedule_free_adamw": lambda: optax.contrib.schedule_free_adamw(0.1),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
}


@pytest.mark.parametrize("name", ALIASING)
def test_params_and_state_can_be_donated(name):
    tx = ja.multi_steps(ALIASING[name](), 2)

    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    donating = jax.jit(step, donate_argnums=(0, 1))
    params, state = params_like(), tx.init(params_like())
    kept = params_like(), tx.init(params_like())
    state = tx.init(params)
    for grad in integer_grads(6):
        params, state = donating(params, state, grad)
        kept = jax.jit(step)(*kept, grad)
    assert_same_bits(raw((params, state)), raw(kept))


def raw(tree):
    """The tree with random keys as their data."""

    def is_key(x):
        return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def test_lookahead_wraps_the_stream():
    tx = optax.lookahead(ja.multi_steps(optax.sgd(1.0), 2), sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams(jnp.float32(0), jnp.float32(0))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = tx.update(jnp.float32(1), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(4):
        params, state = step(params, state)
    # Each window moves the fast parameter by -1, and the synchronisation halves that.
    assert (params.fast, params.slow) == (-1, -1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_updates_have_the_dtype_the_inner_optimizer_gives(dtype):
    inner = optax.adam(0.5)
    params = params_like(dtype)
    (grad,) = integer_grads(1, dtype=dtype)
    want, _ = inner.update(grad, inner.init(params), params)
    tx = ja.multi_steps(inner, 2)
    state = tx.init(params)
    for _ in range(2):
        got, state = jax.jit(tx.update)(grad, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(got, want)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_wide_gradients_stay_wide(dtype, x64):
    factor = 1 + 2**-40 + (2**-45 * 1j if dtype == "complex128" else 0)
    params = jnp.zeros(2, dtype)
    grads = [jnp.full(2, factor * k, dtype) for k in (1, 3)]
    params, state = train(ja.multi_steps(optax.sgd(1.0), 2), params, grads)
    assert state.grad_sum.dtype == dtype
    np.testing.assert_array_equal(params, np.full(2, -2 * factor, dtype))


def test_the_optimizer_sees_the_mean_in_the_accumulators_precision():
    """The mean of 256 and 257 is no bfloat16 number, but the optimizer must see it."""
    received = []
    grads = [jnp.bfloat16(256), jnp.bfloat16(258), jnp.bfloat16(258), jnp.bfloat16(258)]
    train(ja.multi_steps(spy(received), 4), jnp.bfloat16(0), grads)
    jax.effects_barrier()
    assert received[0]["grad"] == 257.5
    assert received[0]["grad"].dtype == np.float32


def test_the_weights_dtype_is_fixed_at_init():
    tx = ja.multi_steps(optax.sgd(1.0), 2)
    params = jnp.float32(0)
    state = tx.init(params)
    with jax.enable_x64(True):
        _, after = tx.update(params, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


# Trees.


def test_integer_parameters_have_no_gradient():
    params = {"w": jnp.float32(1), "steps": jnp.arange(3)}
    grads = jax.grad(lambda p: 4 * p["w"], allow_int=True)(params)
    assert grads["steps"].dtype == jax.dtypes.float0
    tx = ja.multi_steps(optax.adam(0.5), 2)
    assert tx.init(params).grad_sum["steps"] is None
    after, state = train(tx, params, [grads, grads])
    assert_same_bits(after["steps"], params["steps"])
    plain, _ = train(optax.adam(0.5), params["w"], [grads["w"]])
    assert_same_bits(after["w"], plain)
    assert state.optimizer_step == 1


def test_none_leaves_pass_through():
    params = {"w": jnp.ones(2), "frozen": None}
    after, state = train(ja.multi_steps(optax.sgd(1.0), 2), params, [params, params])
    assert after["frozen"] is None
    assert state.grad_sum["frozen"] is None
    assert_equal(after["w"], np.zeros(2))


def test_an_empty_tree_still_counts():
    _, state = train(ja.multi_steps(optax.adam(0.1), 2, skip_nonfinite=True), {}, [{}, {}])
    assert (state.optimizer_step, state.micro_step) == (1, 0)


# Weights.


@pytest.mark.parametrize(
    "weights",
    [
        [2**24, 1, 1],
        [2**31 - 1, 2**31 - 1, 1, 1],
        [2**24 + 1, 2**23 + 1, 2**22 + 1],
        [2**31 - 1, 0.25, 0.5],
        [0.1] * 3 + [2**20],
    ],
)
@pytest.mark.parametrize("kind", [float, np.float64, int, np.int64])
def test_weights_add_up_exactly(weights, kind):
    if kind in (int, np.int64) and any(w != int(w) for w in weights):
        weights = [int(w) for w in weights]
    tx = ja.multi_steps(IDENTITY, len(weights) + 1)
    state = tx.init(jnp.float32(0))
    for weight in weights:
        _, state = tx.update(jnp.float32(0), state, weight=kind(weight))
    assert state.weight == pytest.approx(float(sum(weights)), rel=2**-47, abs=0)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "float16", "bool"])
@pytest.mark.parametrize("jit", [False, True])
def test_array_weights_of_any_real_dtype(dtype, jit):
    largest = 1 if dtype == "bool" else jnp.iinfo(dtype).max if "int" in dtype else 2048
    tx = ja.multi_steps(IDENTITY, 3)
    update = jax.jit(tx.update) if jit else tx.update
    state = tx.init(jnp.float32(0))
    for weight in (jnp.asarray(largest, dtype), np.asarray(1, dtype)):
        _, state = update(jnp.float32(0), state, weight=weight)
    assert state.weight == float(largest) + 1


def test_a_large_window_divides_by_what_it_holds():
    weights = [2**24, 1, 1, 2**24 - 2]
    tx = ja.multi_steps(optax.sgd(1.0), 4, accumulator=ja.accumulators.compensated())
    params, _ = train(tx, jnp.float32(0), [jnp.float32(w) for w in weights], weight=weights)
    assert params == -1


# Windows that close by weight.


@pytest.mark.parametrize(
    ("target", "weights", "closed"),
    [
        (5, [3, 1, 4, 5, 2], [0, 0, 1, 1, 0]),
        (0.75, [0.5, 0.25, 0.5, 0.5], [0, 1, 0, 1]),
        (2**24 + 1, [2**24, 1, 2**24, 0, 1], [0, 1, 0, 0, 1]),
        (2**31 + 1, [2**31 - 1, 1, 1, 2**31 - 1], [0, 0, 1, 0]),
        (lambda step: jnp.where(step == 0, 2, 4), [1, 1, 1, 2, 1], [0, 1, 0, 0, 1]),
        (lambda step: 2.5 + step, [2, 1, 3, 1], [0, 1, 0, 1]),
        (np.int64(3), [3, 2], [1, 0]),
        (jnp.float32(2.5), [2, 1], [0, 1]),
    ],
    ids=["int", "float", "past 2**24", "past 2**31", "traced", "growing", "numpy", "jax"],
)
@pytest.mark.parametrize("jit", [False, True])
def test_until_weight_closes_when_the_target_is_held(target, weights, closed, jit):
    tx = ja.multi_steps(IDENTITY, ja.until_weight(target))
    update = jax.jit(tx.update) if jit else tx.update
    state, seen = tx.init(jnp.float32(0)), []
    for weight in weights:
        _, state = update(jnp.float32(0), state, weight=weight)
        seen.append(int(ja.has_updated(state)))
    assert seen == closed


# Extra arguments.


def test_mean_args_are_averaged_and_others_forwarded():
    received = []
    tx = ja.multi_steps(spy(received), 2, mean_args=("value", "accuracy"))
    values = [ja.Mean(6.0, 3), ja.Mean(7.0, 7), ja.Mean(1.0, 2), ja.Mean(1.0, 2)]
    accuracies = [ja.Mean(1, 4), ja.Mean(3, 4), ja.Mean(0, 1), ja.Mean(0, 0)]
    flags = [0, 1, 2, 3]
    grads = [jnp.float32(1)] * 4
    train(tx, jnp.float32(0), grads, value=values, accuracy=accuracies, flag=flags)
    jax.effects_barrier()
    assert_equal([r["value"] for r in received], [1.3, 0.5])
    assert_equal([r["accuracy"] for r in received], [0.5, 0.0])
    assert [int(r["flag"]) for r in received] == [1, 3]


def test_a_plain_value_is_forwarded_as_it_is():
    received = []
    train(ja.multi_steps(spy(received), 2), jnp.float32(0), [jnp.float32(1)] * 2, value=[5.0, 7.0])
    jax.effects_barrier()
    assert [float(r["value"]) for r in received] == [7.0]


@pytest.mark.parametrize("every", [1, 4])
def test_a_window_of_any_length_hands_over_the_value(every):
    received = []
    values = [ja.Mean(2.0, 4)] * every
    train(
        ja.multi_steps(spy(received), every), jnp.float32(0), [jnp.float32(1)] * every, value=values
    )
    jax.effects_barrier()
    assert [float(r["value"]) for r in received] == [0.5]


def labelled(inner):
    return optax.multi_transform({"a": inner}, {"w": "a", "b": "a"})


WRAPPERS = {
    "chain": lambda tx: optax.chain(optax.clip(100.0), tx, optax.scale(1.0)),
    "named_chain": lambda tx: optax.named_chain(("stream", tx)),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": True}),
    "multi_transform": labelled,
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda unused: tx)(unused=1.0),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapper_outside_lets_weights_and_arguments_through(wrap):
    received = []
    tx = wrap(ja.multi_steps(spy(received), 2))
    grads = [jax.tree.map(lambda x: np.full_like(x, k), PARAMS) for k in (6, 7)]
    values = [ja.Mean(6.0, 3), ja.Mean(7.0, 7)]
    params, state = train(tx, params_like(), grads, weight=[3, 7], value=values, tag=[1, 2])
    jax.effects_barrier()
    (seen,) = received
    assert_close(params["w"], np.float64(PARAMS["w"]) + 1.3)
    assert_equal((seen["value"], seen["tag"]), (1.3, 2))
    assert ja.has_updated(state)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapper_inside_lets_arguments_through(wrap):
    received = []
    tx = ja.multi_steps(wrap(spy(received)), 2)
    values = [ja.Mean(6.0, 3), ja.Mean(7.0, 7)]
    _, state = train(tx, params_like(), integer_grads(2), weight=[3, 7], value=values, tag=[1, 2])
    jax.effects_barrier()
    (seen,) = received
    assert_equal((seen["value"], seen["tag"]), (1.3, 2))
    assert ja.has_updated(state)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_flush_reaches_the_stream_through_a_wrapper(wrap):
    tx = wrap(ja.multi_steps(optax.sgd(1.0), 4))
    grads = [jax.tree.map(lambda x: np.full_like(x, k), PARAMS) for k in (2, 4)]
    params, state = train(tx, params_like(), grads)
    updates, state = jax.jit(lambda s, p: ja.flush(tx, s, p))(state, params)
    assert_equal(updates, jax.tree.map(lambda x: np.full_like(x, -3), PARAMS))
    assert ja.has_updated(state)


def count_evaluations(tx, grads, params, target):
    """How often a line search evaluates its loss, and the parameters it ends at."""
    calls = []

    def value_fn(w):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.sum((w - target) ** 2)

    update = jax.jit(lambda g, s, p, **extra: tx.update(g, s, p, value_fn=value_fn, **extra))
    state = tx.init(params)
    for grad, value in grads:
        updates, state = update(grad, state, params, value=value, grad=grad)
        params = optax.apply_updates(params, updates)
    jax.effects_barrier()
    return len(calls), params


LINE_SEARCHES = {
    "backtracking": lambda: optax.scale_by_backtracking_linesearch(max_backtracking_steps=20),
    "zoom": lambda: optax.scale_by_zoom_linesearch(max_linesearch_steps=20),
}


@pytest.mark.parametrize(
    ("search", "every"), [("backtracking", 2), ("backtracking", 8), ("zoom", 4)]
)
def test_a_line_search_sees_the_window_and_runs_as_often_as_without(search, every):
    """The micro-batches' gradients and losses differ; their means are the large batch's."""
    inner = optax.chain(optax.sgd(4.0), LINE_SEARCHES[search]())
    params, target = jnp.zeros(2), jnp.array([1.0, -3.0])
    grad, value = -2 * target, jnp.sum(target**2)
    shifts = np.arange(every, dtype=np.float32) - np.float32((every - 1) / 2)
    micro = [(grad + s, ja.Mean(value + s, 1.0)) for s in shifts]
    number, want = count_evaluations(inner, [(grad, value)], params, target)
    assert number > 1
    got_number, got = count_evaluations(ja.multi_steps(inner, every), micro, params, target)
    assert got_number == number
    assert_equal(got, np.float64(want))


def test_grad_args_can_be_named():
    received = []
    tx = ja.multi_steps(spy(received), 2, grad_args=("gradient",))
    grads = [jnp.float32(2), jnp.float32(4)]
    train(tx, jnp.float32(0), grads, gradient=grads)
    jax.effects_barrier()
    assert [float(r["gradient"]) for r in received] == [3.0]


# Skipping and empty windows.


BAD = {"nan": (np.nan, 1), "inf": (np.inf, 1), "minus inf": (-np.inf, 1), "weight": (1, np.nan)}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_skipped_micro_step_is_replaced_by_the_next(bad, position):
    rows = [(1, 1), (2, 2), (6, 3)]
    rows.insert(position, BAD[bad])
    grads, weights = zip(*[(jnp.float32(g), jnp.float32(w)) for g, w in rows], strict=True)
    tx = ja.multi_steps(optax.sgd(1.0), 3, skip_nonfinite=True)
    params, state = train(tx, jnp.float32(0), grads, weight=weights)
    assert params == -1.5
    assert (state.num_skipped, state.optimizer_step, state.micro_step) == (1, 1, 0)


def test_a_skip_takes_its_extra_means_with_it():
    received = []
    tx = ja.multi_steps(spy(received), 2, skip_nonfinite=True)
    values = [ja.Mean(6.0, 3), ja.Mean(np.nan, 1), ja.Mean(7.0, 7)]
    train(tx, jnp.float32(0), map(jnp.float32, (1, np.inf, 1)), value=values)
    jax.effects_barrier()
    assert_equal([r["value"] for r in received], [1.3])


def test_skips_are_counted_over_the_lifetime():
    tx = ja.multi_steps(optax.sgd(1.0), 2, skip_nonfinite=True)
    _, state = train(tx, jnp.float32(0), map(jnp.float32, [np.nan, 1, np.nan, 1] * 3))
    assert (state.num_skipped, state.optimizer_step) == (6, 3)


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf])
def test_a_python_weight_may_be_bad_too(weight):
    tx = ja.multi_steps(optax.sgd(1.0), 2, skip_nonfinite=True)
    state = tx.init(jnp.float32(0))
    _, state = tx.update(jnp.float32(1), state, weight=weight)
    assert (state.num_skipped, state.micro_step) == (1, 0)


def test_a_window_without_weight_runs_no_optimizer_step():
    tx = ja.multi_steps(optax.adam(0.1), 2)
    params, state = train(tx, params_like(), integer_grads(2))
    held = params, state.inner_state
    nans = [jax.tree.map(lambda x: np.full_like(x, np.nan), PARAMS)] * 2
    params, state = train(tx, params, nans, state=state, weight=[0, 0])
    assert_same_bits((params, state.inner_state), held)
    assert (state.num_empty, state.optimizer_step, state.micro_step) == (1, 1, 0)
    assert not ja.has_updated(state)
    assert_same_bits(state.grad_sum, jax.tree.map(jnp.zeros_like, params))


# Flushing.


@pytest.mark.parametrize("jit", [False, True])
def test_flush_divides_by_what_the_window_holds(jit):
    received = []
    tx = ja.multi_steps(optax.chain(spy(received), optax.sgd(1.0)), 8)
    values = [ja.Mean(6.0, 3), ja.Mean(7.0, 7)]
    grads = [jnp.float32(6), jnp.float32(7)]
    params, state = train(tx, jnp.float32(0), grads, weight=[3, 7], value=values)

    def flush(s, p):
        return ja.flush(tx, s, p)

    updates, state = (jax.jit(flush) if jit else flush)(state, params)
    jax.effects_barrier()
    assert updates == np.float32(-1.3)
    assert_equal([r["value"] for r in received], [1.3])
    assert (state.micro_step, state.optimizer_step, state.weight) == (0, 1, 0)
    assert ja.has_updated(state)


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}], ids=["plain", "skipping"])
def test_flush_of_an_empty_window_changes_nothing(options):
    tx = ja.multi_steps(optax.adam(0.1), 2, **options)
    params, state = train(tx, params_like(), integer_grads(2))
    updates, after = jax.jit(lambda s, p: ja.flush(tx, s, p))(state, params)
    assert_same_bits(optax.apply_updates(params, updates), params)
    assert_same_bits(after._replace(updated=state.updated), state)
    assert not ja.has_updated(after)


def test_flush_of_a_window_without_weight_counts_it_as_empty():
    tx = ja.multi_steps(optax.sgd(1.0), 4)
    params, state = train(tx, jnp.float32(0), [jnp.float32(1)], weight=[0])
    updates, state = ja.flush(tx, state, params)
    assert updates == 0
    assert not ja.has_updated(state)
    assert (state.num_empty, state.optimizer_step, state.micro_step) == (1, 0, 0)


def test_flush_needs_no_params():
    tx = ja.multi_steps(optax.sgd(1.0), 4)
    _, state = train(tx, params_like(), integer_grads(2))
    updates, _ = ja.flush(tx, state)
    assert_equal(updates, jax.tree.map(np.negative, mean_of(integer_grads(2))))


# Messages.


@pytest.mark.parametrize("every", [0, -1])
def test_every_below_one_is_refused(every):
    with pytest.raises(ValueError, match=f"`every` must be at least 1, got {every}"):
        ja.multi_steps(optax.sgd(1.0), every)


@pytest.mark.parametrize("every", [2.5, "4", True, None, np.float64(2)])
def test_every_that_is_no_integer_is_refused(every):
    with pytest.raises(TypeError, match=r"`every` must be a static integer"):
        ja.multi_steps(optax.sgd(1.0), every)


@pytest.mark.parametrize("returned", [2.5, jnp.ones(2, jnp.int32)], ids=["float", "vector"])
def test_every_must_return_an_integer_scalar(returned):
    tx = ja.multi_steps(optax.sgd(1.0), lambda step: returned)
    with pytest.raises(TypeError, match="must return an integer scalar"):
        tx.update(jnp.float32(1), tx.init(jnp.float32(0)))


@pytest.mark.parametrize("target", [0, -1, np.nan])
def test_until_weight_needs_a_positive_target(target):
    with pytest.raises(ValueError, match=r"`until_weight` needs a target above 0"):
        ja.multi_steps(optax.sgd(1.0), ja.until_weight(target))


def test_until_weight_names_a_target_that_is_no_number():
    with pytest.raises(TypeError, match=r"multi_steps: .*until_weight"):
        ja.multi_steps(optax.sgd(1.0), ja.until_weight("4"))


def test_until_weight_without_a_target_is_refused():
    with pytest.raises(TypeError, match="`every`"):
        ja.multi_steps(optax.sgd(1.0), ja.until_weight)


def test_inner_must_be_a_transformation():
    with pytest.raises(TypeError, match=r"`inner` must be an `optax.GradientTransformation`"):
        ja.multi_steps(0.1, 4)


def test_accumulator_must_be_one():
    with pytest.raises(TypeError, match=r"`accumulator` must come from `ja.accumulators`"):
        ja.multi_steps(optax.sgd(1.0), 4, accumulator=jnp.float32)


def test_mean_args_given_as_a_string_are_refused():
    with pytest.raises(TypeError, match="mean_args"):
        ja.multi_steps(optax.sgd(1.0), 4, mean_args="value")


@pytest.mark.parametrize("weight", ["3", [1], (1,), np.ones(2), jnp.ones(1), 1j, jnp.complex64(1)])
def test_a_weight_that_is_no_real_scalar_is_refused(weight):
    tx = ja.multi_steps(optax.sgd(1.0), 2)
    with pytest.raises(TypeError, match=r"`weight` must be a real scalar"):
        tx.update(jnp.float32(1), tx.init(jnp.float32(0)), weight=weight)


@pytest.mark.parametrize("every", [1, 2])
def test_a_foreign_state_is_refused(every):
    tx = ja.multi_steps(optax.sgd(1.0), every)
    with pytest.raises(TypeError, match=r"`state` must come from `init`"):
        tx.update(jnp.float32(1), optax.sgd(1.0).init(jnp.float32(0)))


@pytest.mark.parametrize("every", [1, 2])
def test_gradients_of_another_structure_are_refused(every):
    tx = ja.multi_steps(optax.sgd(1.0), every)
    with pytest.raises(ValueError, match=r"multi_steps: `updates` has the tree structure"):
        tx.update({"w": jnp.ones(3)}, tx.init(params_like()))


def test_a_gradient_of_another_shape_is_refused_by_its_path():
    tx = ja.multi_steps(optax.sgd(1.0), 2)
    with pytest.raises(ValueError, match=r"`updates\['w'\]` is float32\[4\].*shape \(3,\)"):
        tx.update({"w": jnp.ones(4), "b": jnp.float32(0)}, tx.init(params_like()))


@pytest.mark.parametrize(
    "grad",
    [
        pytest.param(np.int32(1), id="integer"),
        pytest.param(np.complex64(1), id="complex"),
    ],
)
def test_a_gradient_that_the_sum_cannot_hold_is_refused(grad):
    """An integer gradient is dropped in silence, a complex one changes the state's dtype."""
    tx = ja.multi_steps(optax.sgd(1.0), 2)
    with pytest.raises((TypeError, ValueError), match=r"multi_steps: `updates"):
        tx.update(grad, tx.init(jnp.float32(0)))


def test_a_mean_that_mean_args_does_not_name_is_refused():
    tx = ja.multi_steps(optax.sgd(1.0), 2)
    with pytest.raises(TypeError, match=r"`loss` is a `ja.Mean`, but `mean_args` names only"):
        tx.update(jnp.float32(1), tx.init(jnp.float32(0)), loss=ja.Mean(1.0, 2))


def test_a_mean_of_vectors_is_refused():
    tx = ja.multi_steps(optax.sgd(1.0), 2)
    with pytest.raises(ValueError, match=r"`value` must be a `ja.Mean` of scalars"):
        tx.update(jnp.float32(1), tx.init(jnp.float32(0)), value=ja.Mean(jnp.ones(2), 2))


def test_parameters_that_are_no_arrays_are_refused():
    with pytest.raises(TypeError, match=r"`params\['name'\]` must be an array"):
        ja.multi_steps(optax.sgd(1.0), 2).init({"name": "w"})


@pytest.mark.parametrize("function", [ja.has_updated, lambda s: ja.flush(optax.sgd(1.0), s)])
@pytest.mark.parametrize("number", [0, 2])
def test_a_state_with_no_stream_or_several_is_refused(function, number):
    streams = [ja.multi_steps(optax.sgd(1.0), 2) for _ in range(number)]
    state = optax.chain(optax.identity(), *streams).init(jnp.float32(0))
    with pytest.raises(ValueError, match=f"found {number}"):
        function(state)
