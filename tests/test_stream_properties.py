"""Properties of the stream over generated micro-steps, against a plain Python model."""

import fractions
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_equal

import jaxaccum as ja

PROFILE = settings(deadline=None, max_examples=60, derandomize=True)

# Sums of a few of these are exact in float32, and so is their quotient by a power of two.
GRADS = st.integers(-64, 64)
WEIGHTS = st.sampled_from([0, 1, 1, 2, 4])
MICRO_STEPS = st.lists(
    st.one_of(
        st.tuples(GRADS, WEIGHTS),
        st.tuples(st.sampled_from([np.nan, np.inf, -np.inf]), WEIGHTS),
        st.just("flush"),
    ),
    max_size=24,
)


class Model:
    """What the stream means, one exact Python number at a time."""

    def __init__(self, every):
        self.every = every
        self.open, self.steps, self.skipped, self.empty = [], 0, 0, 0

    def update(self, grad, weight):
        if not np.isfinite(grad):
            self.skipped += 1
            return 0
        self.open.append((grad, weight))
        return self.close() if len(self.open) >= self.every else 0

    def close(self):
        sums, weights = (sum(column) for column in zip(*self.open, strict=True))
        self.open = []
        if not weights:
            self.empty += 1
            return 0
        self.steps += 1
        return np.float32(sums) / np.float32(weights)

    def flush(self):
        return self.close() if self.open else 0

    def fields(self):
        sums = [sum(column) for column in zip(*self.open, strict=True)] or [0, 0]
        return (len(self.open), self.steps, self.skipped, self.empty, *sums)


@functools.cache
def compiled(every):
    """The stream that returns its mean gradient as the update, and its compiled functions."""
    tx = ja.multi_steps(optax.identity(), every, skip_nonfinite=True)
    return tx.init(jnp.float32(0)), jax.jit(tx.update), jax.jit(functools.partial(ja.flush, tx))


@PROFILE
@given(MICRO_STEPS, st.sampled_from([2, 3, 5]))
def test_the_stream_follows_the_model(micro_steps, every):
    model, (state, update, flush) = Model(every), compiled(every)
    for micro_step in micro_steps:
        before = model.steps
        if micro_step == "flush":
            want, (got, state) = model.flush(), flush(state)
        else:
            grad, weight = micro_step
            want = model.update(grad, weight)
            got, state = update(jnp.float32(grad), state, weight=jnp.float32(weight))
        assert got == want
        assert bool(ja.has_updated(state)) == (model.steps > before)
        counts = (state.micro_step, state.optimizer_step, state.num_skipped, state.num_empty)
        assert (*map(int, counts), state.grad_sum, state.weight) == model.fields()


@functools.cache
def open_window(kind):
    """A window that never closes: its state holds the exact weight."""
    every = 1 << 20 if kind == "sum" else ja.until_weight(2**24 + 1)
    tx = ja.multi_steps(optax.identity(), every)
    return tx.init(jnp.float32(0)), jax.jit(tx.update)


@PROFILE
@given(st.lists(st.integers(0, 2**31 - 1), max_size=30))
def test_integer_weights_add_up_exactly(weights):
    state, update = open_window("sum")
    for weight in weights:
        _, state = update(jnp.float32(0), state, weight=jnp.int32(weight))
    assert state.weight == sum(weights)


@PROFILE
@given(st.lists(st.integers(0, 2**24 - 1), max_size=30))
def test_fractional_weights_add_up_exactly(numerators):
    state, update = open_window("sum")
    for numerator in numerators:
        _, state = update(jnp.float32(0), state, weight=jnp.float32(numerator / 1024))
    assert fractions.Fraction(float(state.weight)) == fractions.Fraction(sum(numerators), 1024)


@PROFILE
@given(st.lists(st.integers(0, 2**24), min_size=1, max_size=30))
def test_until_weight_closes_exactly_at_its_target(weights):
    state, update = open_window("target")
    held = 0
    for weight in weights:
        _, state = update(jnp.float32(0), state, weight=jnp.int32(weight))
        held += weight
        assert bool(ja.has_updated(state)) == (held >= 2**24 + 1)
        held = 0 if held >= 2**24 + 1 else held
        assert state.weight == held


@PROFILE
@given(st.permutations([(3, 1), (-5, 2), (7, 0), (64, 4), (1, 1)]))
def test_the_order_inside_a_window_does_not_matter(rows):
    state, update, _ = compiled(5)
    for grad, weight in rows:
        mean, state = update(jnp.float32(grad), state, weight=jnp.float32(weight))
    assert mean == 8.75


@PROFILE
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_a_schedule_of_window_lengths_is_followed(lengths):
    state, update = scheduled()
    table = jnp.array((lengths + [9] * 6)[:6], jnp.int32)
    for length in lengths:
        for position in range(1, length + 1):
            mean, state = update(jnp.float32(position), state, table)
            assert bool(ja.has_updated(state)) == (position == length)
        assert_equal(mean, (length + 1) / 2)


@functools.cache
def scheduled():
    """A stream whose window lengths come from a table, compiled once for all tables."""

    def update(grad, state, table):
        return ja.multi_steps(optax.identity(), lambda step: table[step]).update(grad, state)

    return ja.multi_steps(optax.identity(), 2).init(jnp.float32(0)), jax.jit(update)
