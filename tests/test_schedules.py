"""Schedules in tokens, examples, epochs, micro-steps; ramps; hyperparameters of other batches."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxaccum as ja

PEAK, WARM_UP, DECAY = 3e-3, 40.0, 200.0  # in units of one micro-batch's tokens, below


def intended(tokens, unit=1.0):
    """Warm-up and cosine decay in tokens, in float64."""
    x = tokens / unit
    if x < WARM_UP:
        return PEAK * x / WARM_UP
    progress = min(1.0, (x - WARM_UP) / (DECAY - WARM_UP))
    return PEAK * 0.5 * (1 + math.cos(math.pi * progress))


def schedule_of(unit=1.0):
    """The same from Optax, in tokens."""
    return optax.warmup_cosine_decay_schedule(0.0, PEAK, WARM_UP * unit, DECAY * unit, 0.0)


def learning_rates(schedule, every, micro_steps):
    """The learning rate of each optimizer step, and how many micro-steps had run before it."""
    tx = ja.multi_steps(optax.sgd(schedule), every)

    def micro_step(state, _):
        updates, state = tx.update(jnp.float32(1), state, jnp.float32(0))
        return state, (-updates, ja.has_updated(state))

    state = tx.init(jnp.float32(0))
    _, (rates, updated) = jax.lax.scan(micro_step, state, None, length=micro_steps)
    ends = np.flatnonzero(updated) + 1
    return np.asarray(rates)[ends - 1], [0, *ends[:-1].tolist()]


# Through multi_steps: what the optimizer uses is what was meant for the tokens that it has seen


@pytest.mark.parametrize("every", [1, 2, 5, 16])
@pytest.mark.parametrize("tokens", [1, 1000, 16_777_216, 100_000_000])
def test_the_learning_rate_is_that_of_the_tokens_seen(every, tokens):
    schedule = ja.schedules.by_tokens(schedule_of(tokens), tokens_per_step=every * tokens)
    rates, before = learning_rates(schedule, every, 240)
    assert len(rates) == 240 // every
    expected = [intended(n * tokens, tokens) for n in before]
    np.testing.assert_allclose(rates, expected, rtol=2e-5, atol=PEAK * 2e-7)


RAMPS = [
    ja.schedules.ramp([1, 2, 4, 8], steps=[5, 10, 20]),
    ja.schedules.ramp([1, 3, 6, 12], over=90),
    ja.schedules.ramp(range(2, 17, 2), amounts=[20, 30, 50, 51, 80, 120, 130]),
]


@pytest.mark.parametrize("ramp", RAMPS)
@pytest.mark.parametrize("tokens", [1000, 100_000_000])
def test_a_ramp_keeps_the_schedule_in_tokens(ramp, tokens):
    schedule = ja.schedules.by_tokens(schedule_of(tokens), tokens_per_step=ramp.times(tokens))
    rates, before = learning_rates(schedule, ramp, 240)
    windows = np.diff(before)
    assert sorted(windows) == windows.tolist()
    assert set(ramp.values[:-1]) <= set(windows.tolist())
    expected = [intended(n * tokens, tokens) for n in before]
    np.testing.assert_allclose(rates, expected, rtol=2e-5, atol=PEAK * 2e-7)


def test_warm_up_and_decay_stay_where_they_are_when_the_window_changes():
    per_token = {}
    for every in (2, 8):
        schedule = ja.schedules.by_tokens(schedule_of(64), tokens_per_step=64 * every)
        rates, before = learning_rates(schedule, every, 240)
        per_token[every] = dict(zip(before, rates.tolist(), strict=True))
    assert {n: per_token[2][n] for n in per_token[8]} == per_token[8]
    # A schedule of optimizer steps, left as it is, does move.
    rates, before = learning_rates(schedule_of(1), 8, 240)
    assert dict(zip(before, rates.tolist(), strict=True)) != per_token[8]


def test_a_schedule_of_micro_steps():
    """Learning rates 1, 1/2, 1/3, … of a run without accumulation, in windows of 4."""
    schedule = ja.schedules.by_micro_steps(lambda n: 1 / (1 + n), every=4)
    rates, before = learning_rates(schedule, 4, 12)
    assert before == [0, 4, 8]
    np.testing.assert_allclose(rates, [1, 1 / 5, 1 / 9], rtol=1e-6)


def test_rewindow_moves_a_schedule_of_optimizer_steps_to_other_windows():
    old = schedule_of(1)  # of steps of 256 examples
    for new in (64, 256, 1024):
        moved = ja.schedules.rewindow(old, old=256, new=new)
        for step in range(0, 240 * 256 // new, 3):
            expected = intended(step * new / 256)
            np.testing.assert_allclose(moved(step), expected, rtol=2e-5, atol=PEAK * 2e-7)
    growing = ja.schedules.rewindow(old, old=256, new=ja.schedules.ramp([128, 512], steps=[100]))
    assert float(growing(100)) == pytest.approx(intended(50), rel=1e-6)
    assert float(growing(110)) == pytest.approx(intended(70), rel=1e-5)


G = 1e9
OPTAX = {
    "constant": optax.constant_schedule(0.3),
    "linear": optax.linear_schedule(0.0, 1.0, 8 * G),
    "polynomial": optax.polynomial_schedule(1.0, 0.1, 2, 8 * G, 3 * G),
    "cosine": optax.cosine_decay_schedule(1.0, 9 * G),
    "exponential": optax.exponential_decay(1.0, 3 * G, 0.5, staircase=True),
    "piecewise": optax.piecewise_constant_schedule(1.0, {3 * G: 0.5, 6 * G: 0.5}),
    "interpolate": optax.piecewise_interpolate_schedule("cosine", 1.0, {3 * G: 0.5, 6 * G: 0.5}),
    "warm-up, constant": optax.warmup_constant_schedule(0.0, 1.0, 5 * G),
    "warm-up, cosine": optax.warmup_cosine_decay_schedule(0.0, 1.0, 3 * G, 9 * G),
    "warm-up, exponential": optax.warmup_exponential_decay_schedule(0.0, 1.0, 3 * G, 2 * G, 0.5),
    "joined": optax.join_schedules(
        [optax.linear_schedule(0.0, 1.0, 4 * G), optax.cosine_decay_schedule(1.0, 5 * G)], [4 * G]
    ),
    "restarts": optax.sgdr_schedule(
        [
            {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": G, "decay_steps": 4 * G},
            {"init_value": 0.1, "peak_value": 0.5, "warmup_steps": G, "decay_steps": 5 * G},
        ]
    ),
    # One-cycle schedules round their boundaries to ints: count in larger units.
    "one cycle": lambda tokens: optax.cosine_onecycle_schedule(9000, 1.0)(tokens / 1e6),
}


@pytest.mark.parametrize("name", OPTAX)
def test_every_schedule_of_optax_takes_tokens_past_2_to_the_31(name):
    schedule = jax.jit(ja.schedules.by_tokens(OPTAX[name], tokens_per_step=500_000_000))
    for step in range(25):
        assert schedule(step) == jax.jit(OPTAX[name])(jnp.float32(step * 500_000_000))


# Exact counts


@settings(max_examples=60, deadline=None)
@given(
    step=st.integers(0, 2**31 - 1),
    per_step=st.integers(1, 2**31 - 1),
)
def test_counts_are_exact_and_rounded_once(step, per_step):
    step = min(step, 2**48 // per_step)
    seen = ja.schedules.by_tokens(lambda tokens: tokens, tokens_per_step=per_step)
    expected = np.float32(step * per_step)  # Python's own product
    assert seen(step) == expected
    assert _jitted(per_step)(step) == expected


def _jitted(per_step):
    return jax.jit(ja.schedules.by_tokens(lambda tokens: tokens, tokens_per_step=per_step))


@pytest.mark.parametrize("per_step", [1, 255, 256, 65_537, 524_288, 4_000_037, 2**31 - 1])
def test_counts_under_jit(per_step):
    steps = np.unique([0, 1, 2, 255, 65_535, 65_536, 2**24 + 1, 2**31 - 1])
    steps = steps[steps * per_step <= 2**48].astype(np.int32)
    got = jax.jit(jax.vmap(_jitted(per_step)))(steps)
    np.testing.assert_array_equal(got, (steps.astype(object) * per_step).astype(np.float32))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_counts_of_a_ramp(data):
    held = data.draw(st.lists(st.integers(1, 1000), min_size=0, max_size=5))
    values = data.draw(
        st.lists(st.integers(1, 2**31 - 1), min_size=len(held) + 1, max_size=len(held) + 1)
    )
    ramp = ja.schedules.ramp(values, steps=list(itertools.accumulate(held)))
    step = data.draw(st.integers(0, sum(held) + 50))
    per_step = [v for v, n in zip(values, [*held, 51]) for _ in range(n)]
    assert int(ramp(step)) == per_step[step]
    assert ja.schedules.amount_at(step, per_step=ramp) == sum(per_step[:step])
    seen = ja.schedules.by_examples(lambda amount: amount, examples_per_step=ramp)
    assert seen(jnp.int32(step)) == np.float32(sum(per_step[:step]))
    assert seen(step) == np.float32(sum(per_step[:step]))


def test_a_boundary_past_2_to_the_31_is_met_at_its_step():
    drop = optax.piecewise_constant_schedule(1.0, {3_000_000_000.0: 0.5})
    schedule = jax.jit(ja.schedules.by_tokens(drop, tokens_per_step=500_000))
    assert [float(schedule(n)) for n in (0, 5999, 6000, 6001)] == [1.0, 1.0, 0.5, 0.5]


def test_double_precision_where_it_is_enabled(x64):
    seen = jax.jit(ja.schedules.by_tokens(lambda tokens: tokens, tokens_per_step=4_000_037))
    assert seen(30_000_001).dtype == jnp.float64
    assert int(seen(30_000_001)) == 30_000_001 * 4_000_037


def test_whole_epochs_are_whole():
    """1,281,167 examples, in windows that divide them: past 2**24 float32 alone would miss some."""
    per_step = 29 * 151  # 1,281,167 is not prime
    epoch = per_step * 293
    epochs = jax.jit(
        ja.schedules.by_epochs(
            lambda epochs: epochs, examples_per_epoch=epoch, examples_per_step=per_step
        )
    )
    for number in (1, 3, 30, 89, 300, 1000):
        assert epochs(293 * number) == number
        assert epochs(293 * number - 1) < number
    assert float(epochs(293 * 90 + 100)) == pytest.approx(90 + 100 / 293, rel=1e-6)


# Ramps


def test_ramp_by_amounts_changes_at_the_first_step_that_has_seen_them():
    ramp = ja.schedules.ramp([4, 8, 16], amounts=[100, 1000], units=10)
    # Steps of 40 until at least 100 (120), then of 80 until at least 1000 (1000).
    assert ramp.starts == (0, 3, 14)
    assert [ja.schedules.amount_at(s, per_step=ramp.times(10)) for s in ramp.starts] == [
        0, 120, 1000,
    ]  # fmt: skip


def test_a_ramp_holds_its_first_value_before_the_start():
    assert int(ja.schedules.ramp([1, 2, 4], steps=[2, 4])(-1)) == 1


@pytest.mark.parametrize("decay", ["0.9", None, True])
def test_a_decay_is_a_number(decay):
    with pytest.raises(TypeError, match="`decay` must be a static number"):
        ja.schedules.half_life(decay, old=1, new=2)


def test_ramp_over_an_amount_gives_each_value_the_same_share():
    """From 16 to 64 rows in steps of 16 over 960 examples: 320 each."""
    ramp = ja.schedules.ramp(range(16, 65, 16), over=960)
    assert ramp.values == (16, 32, 48, 64)
    assert ramp.starts == (0, 20, 30, 37)
    assert ja.schedules.ramp([7], over=100) == ja.schedules.Ramp((0,), (7,))


def test_ramp_leaves_out_values_whose_share_is_over_before_they_begin():
    ramp = ja.schedules.ramp([100, 2, 3], amounts=[50, 90])
    assert (ramp.starts, ramp.values) == ((0, 1), (100, 3))


def test_ramp_as_a_target_weight():
    target = ja.schedules.ramp([2, 5], steps=[2])
    tx = ja.multi_steps(optax.sgd(1.0), ja.until_weight(target))
    state, closed = tx.init(jnp.float32(0)), []
    for _ in range(14):
        _, state = tx.update(jnp.float32(1), state, weight=1)
        closed.append(bool(ja.has_updated(state)))
    assert np.flatnonzero(closed).tolist() == [1, 3, 8, 13]


def test_ramp_as_num_real_of_a_step():
    ramp = ja.schedules.ramp([1, 2, 4], steps=[1, 2])
    init, step = ja.train_step(
        lambda w, x: ja.mean(w * x), optax.sgd(0.0), num_microbatches=max(ramp.values)
    )
    w = jnp.float32(0)
    state, weights = init(w), []
    for _ in range(4):
        w, state, info = step(w, state, jnp.ones(8), num_real=ramp(state.optimizer_step))
        weights.append(int(info.weight))
    assert weights == [2, 4, 8, 8]
    assert step._cache_size() == 1  # no recompilation


def test_tabulate_is_the_function():
    fn = lambda step: jnp.where(step < 7, 2, 3) + step // 12  # noqa: E731
    ramp = ja.schedules.tabulate(fn, 50)
    assert [int(ramp(n)) for n in range(50)] == [int(fn(n)) for n in range(50)]
    assert int(ramp(1000)) == ramp.values[-1]
    assert ramp.starts == (0, 7, 12, 24, 36, 48)
    assert ja.schedules.tabulate(lambda step: 3, 10) == ja.schedules.Ramp((0,), (3,))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.ramp([], over=1), ValueError, "at least one value"),
        (lambda s: s.ramp([1, 0], over=1), ValueError, "`values` must be at least 1"),
        (lambda s: s.ramp([1, 2.0], over=1), TypeError, "`values` must be a static integer"),
        (lambda s: s.ramp([1, 2]), ValueError, "exactly one of `steps`"),
        (lambda s: s.ramp([1, 2], over=1, steps=[1]), ValueError, "got `steps` and `over`"),
        (lambda s: s.ramp([1, 2], steps=[1, 2]), ValueError, "must hold 1 growing"),
        (lambda s: s.ramp([1, 2, 3], amounts=[5, 5]), ValueError, "`amounts` must hold 2 growing"),
        (lambda s: s.ramp([1, 2], over=1).times(2**31), ValueError, "below 2**31"),
        (lambda s: s.ramp([1, 2], over=2**32), ValueError, "below 2**31"),
        (lambda s: s.tabulate(lambda n: n / 2, 4), TypeError, "must return an integer scalar"),
        (lambda s: s.tabulate(lambda n: n, 4), ValueError, "must be at least 1"),
        (lambda s: s.by_tokens(3, tokens_per_step=1), TypeError, "`schedule_fn` must be a func"),
        (lambda s: s.by_tokens(abs, tokens_per_step=1.5), TypeError, "`tokens_per_step`"),
        (lambda s: s.by_tokens(abs, tokens_per_step=abs), TypeError, "`tabulate` makes one"),
        (lambda s: s.by_examples(abs, examples_per_step=0), ValueError, "`examples_per_step`"),
        (lambda s: s.by_micro_steps(abs, every=True), TypeError, "`every`"),
        (lambda s: s.amount_at(-1, per_step=3), ValueError, "`optimizer_step`"),
        (lambda s: s.steps_at(1.0, per_step=3), TypeError, "`amount`"),
    ],
)
def test_arguments(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(ja.schedules)


# Back


@settings(max_examples=100, deadline=None)
@given(
    amount=st.integers(0, 10**6),
    values=st.lists(st.integers(1, 1000), min_size=3, max_size=3),
)
def test_steps_and_amounts_undo_each_other(amount, values):
    for per_step in (values[0], ja.schedules.ramp(values, steps=[3, 50])):
        step = ja.schedules.steps_at(amount, per_step=per_step)
        seen = ja.schedules.amount_at(step, per_step=per_step)
        assert seen >= amount
        if step:
            assert ja.schedules.amount_at(step - 1, per_step=per_step) < amount
        assert ja.schedules.steps_at(seen, per_step=per_step) == step


def test_in_units_undoes_by_tokens_where_a_step_begins():
    per_step = ja.schedules.ramp([64, 256], steps=[9])
    by_steps = ja.schedules.by_tokens(schedule_of(64), tokens_per_step=per_step)
    back = ja.schedules.in_units(by_steps, per_step=per_step)
    for step in range(30):
        tokens = ja.schedules.amount_at(step, per_step=per_step)
        assert back(tokens) == by_steps(step)
        assert back(tokens + 1) == by_steps(step)
        np.testing.assert_allclose(back(tokens), intended(tokens, 64), rtol=2e-5, atol=1e-9)


# Hyperparameters of another batch size


def test_rules():
    s = ja.schedules
    assert s.linear_scaling(0.1, old=256, new=64) == 0.025
    assert s.square_root_scaling(0.1, old=256, new=64) == 0.05
    assert s.linear_scaling(0.1, old=256, new=256) == 0.1


@pytest.mark.parametrize(("name", "power"), [("linear_scaling", 1), ("square_root_scaling", 0.5)])
def test_rules_for_schedules_and_ramps(name, power):
    rule = getattr(ja.schedules, name)
    base = optax.linear_schedule(1.0, 0.0, 100)
    np.testing.assert_allclose(rule(base, old=4, new=16)(25), 0.75 * 4**power, rtol=1e-6)
    ramp = ja.schedules.ramp([4, 16, 36], steps=[10, 20])
    for scale, fixed in ((rule(0.1, old=4, new=ramp), 0.1), (rule(base, old=4, new=ramp), None)):
        for step in (0, 9, 10, 19, 20, 50):
            rate = fixed if fixed else 1 - step / 100
            expected = rate * (int(ramp(step)) / 4) ** power
            np.testing.assert_allclose(jax.jit(scale)(step), expected, rtol=1e-6)


@pytest.mark.parametrize("new", [128, 256, 1024])
def test_adam_scaling_keeps_the_averaging_time_in_examples(new):
    scaled = ja.schedules.adam_scaling(1e-3, old=256, new=new, b1=0.9, b2=0.95, eps=1e-8)
    k = new / 256
    assert (1 - scaled.b1) / k == pytest.approx(0.1)
    assert (1 - scaled.b2) / k == pytest.approx(0.05)
    assert scaled.learning_rate == pytest.approx(1e-3 * math.sqrt(k))
    assert scaled.eps * math.sqrt(k) == pytest.approx(1e-8)
    assert optax.adam(**scaled._asdict()).init(jnp.ones(2))


@pytest.mark.parametrize(("old", "new"), [(512, 4), (4, 512), (8, 8)])
def test_half_life_is_the_same_in_tokens(old, new):
    def tokens(decay, size):
        return size * math.log(0.5) / math.log(decay)

    scaled = ja.schedules.half_life(0.95, old=old, new=new)
    assert tokens(scaled, new) == pytest.approx(tokens(0.95, old), rel=1e-2)
    ramp = ja.schedules.ramp([old, new], steps=[1])
    assert float(ja.schedules.half_life(0.95, old=old, new=ramp)(1)) == pytest.approx(
        scaled, rel=2 * max(1, new / old) * 2.0**-23
    )


def test_half_life_reaches_the_optimizer():
    ramp = ja.schedules.ramp([1, 2], steps=[1])
    b2 = ja.schedules.half_life(0.9, old=1, new=ramp)
    tx = ja.multi_steps(optax.inject_hyperparams(optax.adam)(0.1, b2=b2), ramp)
    w = jnp.float32(0)
    state, seen = tx.init(w), []
    for _ in range(3):
        _, state = jax.jit(tx.update)(jnp.float32(1), state, w)
        if ja.has_updated(state):
            seen.append(float(state.inner_state.hyperparams["b2"]))
    np.testing.assert_allclose(seen, [0.9, 0.81], rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.adam_scaling(1, old=1, new=20), "`b1`, 0.9, would become -1"),
        (lambda s: s.adam_scaling(1, old=1, new=2, b2=1.0), "`b2` must be in [0, 1), got 1.0"),
        (lambda s: s.half_life(1.5, old=1, new=2), "`decay` must be in [0, 1)"),
        (lambda s: s.linear_scaling(1.0, old=0, new=2), "`old` must be at least 1"),
    ],
)
def test_rules_refuse(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(ja.schedules)


@pytest.mark.parametrize(
    "name", ["linear_scaling", "square_root_scaling", "adam_scaling", "half_life"]
)
def test_each_rule_names_its_source_and_when_it_does_not_hold(name):
    doc = getattr(ja.schedules, name).__doc__
    assert re.search(r'References:\n(.|\n)*"[A-Z]', doc)
    assert re.search(r"not\s+hold", doc)
    assert re.search(r", 20\d\d\.", doc)
