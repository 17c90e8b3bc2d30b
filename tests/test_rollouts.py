"""Reinforcement learning batches: windows, shapes, the published means, exact for any split."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_examples import run

import jaxaccum as ja
from jaxaccum import rollouts

EPS = float(jnp.finfo(jnp.float32).eps)


def samples(number, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for i in range(number):
        prompt, length = rng.integers(1, 4), rng.integers(1, 12)
        made.append(
            rollouts.Rollout(
                rng.integers(1, 9, prompt + length),
                int(prompt),
                rng.uniform(-3, -1, length),
                float(rng.normal()),
                int(i % 3),
            )
        )
    return made


def completion(rollout):
    return len(rollout.tokens) - rollout.prompt_length


def test_windows_close_at_samples_or_tokens():
    made = samples(11)
    by_number = list(rollouts.close_windows(iter(made), num_samples=4))
    assert [len(w) for w in by_number] == [4, 4, 3]
    by_tokens = list(rollouts.close_windows(iter(made), num_tokens=15))
    for window in by_tokens[:-1]:
        sizes = [completion(r) for r in window]
        assert sum(sizes) >= 15 > sum(sizes[:-1])
    for windows in (by_number, by_tokens):
        kept = list(itertools.chain(*windows))
        assert all(a is b for a, b in zip(kept, made, strict=True))


def test_windows_read_no_further_than_they_need():
    read = []
    source = (read.append(i) or i for i in itertools.count())
    assert next(rollouts.close_windows(source, num_samples=3)) == [0, 1, 2]
    assert read == [0, 1, 2]


def test_padding_to_few_shapes():
    shapes = set()
    for number in range(1, 9):
        made = samples(number, seed=number)
        batch = rollouts.pad_rollouts(made, row_buckets=[4, 8], length_buckets=[8, 16])
        shapes.add(batch.tokens.shape)
        assert batch.real.sum() == number
        assert batch.mask.sum() == sum(map(completion, made))
        for row, rollout in enumerate(made):
            size = len(rollout.tokens)
            assert np.array_equal(batch.tokens[row, :size], rollout.tokens)
            targets = batch.tokens[row, 1:][batch.mask[row]]
            assert np.array_equal(targets, rollout.tokens[rollout.prompt_length :])
            got = batch.log_probs[row][batch.mask[row]]
            assert np.array_equal(got, rollout.log_probs.astype(np.float32))
    assert shapes <= {(4, 8), (4, 16), (8, 8), (8, 16)}


def test_advantages_are_relative_to_their_group():
    rewards = np.random.default_rng(0).normal(size=24)
    groups = rewards.reshape(6, 4)
    centred = groups - groups.mean(1, keepdims=True)
    got = rollouts.group_advantages(rewards, 4, scale=False)
    np.testing.assert_allclose(got, centred.ravel(), atol=8 * EPS)
    scaled = centred / (groups.std(1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(rollouts.group_advantages(rewards, 4), scaled.ravel(), atol=64 * EPS)
    assert rollouts.group_advantages(np.ones(4), 4).tolist() == [0.0] * 4


@pytest.mark.parametrize("reward", [0.1, -123.456, 1e6 + 0.3])
@pytest.mark.parametrize("size", [3, 6, 7])
def test_equal_rewards_give_no_advantage_where_their_mean_rounds(reward, size):
    assert rollouts.group_advantages([reward] * size, size).tolist() == [0.0] * size


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_the_clipped_loss_is_flat_where_it_is_clipped(advantage):
    log_ratio = jnp.log(jnp.array([[0.5, 0.9, 1.1, 1.25, 2.0]]))

    def total(log_probs):
        values = rollouts.clipped_loss(
            log_probs, jnp.zeros((1, 5)), advantages=jnp.array([advantage]), clip_high=0.28
        )
        return values.sum(), values

    slope, values = jax.grad(total, has_aux=True)(log_ratio)
    ratio = np.array([0.5, 0.9, 1.1, 1.25, 2.0])
    want = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    np.testing.assert_allclose(values[0], want, rtol=4 * EPS)
    clipped = ratio > 1.28 if advantage > 0 else ratio < 0.8
    np.testing.assert_allclose(slope[0], np.where(clipped, 0, -ratio * advantage), rtol=4 * EPS)


MEANS = {
    "sequence": (rollouts.sequence_mean, lambda s, n: np.mean(s / n)),
    "token": (rollouts.token_mean, lambda s, n: s.sum() / n.sum()),
    "constant": (
        lambda v, m: rollouts.constant_mean(v, m, length=16),
        lambda s, n: s.sum() / (16 * len(n)),
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_are_those_of_the_papers_for_any_split(name):
    mean_fn, formula = MEANS[name]
    made = samples(13, seed=4)
    batch = rollouts.pad_rollouts(made, row_buckets=[16], length_buckets=[16])

    def loss_fn(w, batch):
        # Where nothing is sampled stands a nan, which must not be seen.
        values = jnp.where(batch.mask, w * batch.log_probs, jnp.nan)
        return mean_fn(values, batch.mask)

    sums = np.array([r.log_probs.astype(np.float32).astype(np.float64).sum() for r in made])
    want = formula(sums, np.array([completion(r) for r in made], float))
    for cut in ({"num_microbatches": k} for k in (1, 2, 3, 7, 16)):
        loss, grad = ja.value_and_grad(loss_fn, **cut)(jnp.float32(2), batch)
        np.testing.assert_allclose(loss, 2 * want, rtol=16 * EPS)
        np.testing.assert_allclose(grad, want, rtol=16 * EPS)


def test_lag_over_a_window():
    made = samples(7)  # versions 0, 1, 2, 0, 1, 2, 0
    batch = rollouts.pad_rollouts(made, row_buckets=[8], length_buckets=[16])

    def loss_fn(w, batch, current):
        lag = rollouts.version_lag(batch.version, current, batch.mask)
        return rollouts.token_mean(w * batch.log_probs, batch.mask), lag

    f = jax.jit(ja.value_and_grad(loss_fn, num_microbatches=4, has_aux=True))
    (_, lag), _ = f(jnp.float32(1), batch, jnp.int32(5))
    assert (lag["min"], lag["max"]) == (3, 5)
    sizes = np.array([completion(r) for r in made])
    want = np.sum(sizes * [5 - r.version for r in made]) / sizes.sum()  # every token counts once
    np.testing.assert_allclose(lag["mean"], want, rtol=2 * EPS)


def test_refusals():
    with pytest.raises(ValueError, match="exactly one"):
        rollouts.close_windows([], num_samples=1, num_tokens=1)
    with pytest.raises(ValueError, match="at least 1"):
        rollouts.close_windows([], num_tokens=0)
    made = samples(3)
    with pytest.raises(ValueError, match="`row_buckets`"):
        rollouts.pad_rollouts(made, row_buckets=[2], length_buckets=[16])
    with pytest.raises(ValueError, match="`length_buckets`"):
        rollouts.pad_rollouts(made, row_buckets=[4], length_buckets=[2])
    with pytest.raises(ValueError, match="empty"):
        rollouts.pad_rollouts([], row_buckets=[4], length_buckets=[16])
    with pytest.raises(ValueError, match="rollout 0"):
        rollouts.pad_rollouts(
            [made[0]._replace(prompt_length=0)], row_buckets=[4], length_buckets=[16]
        )
    with pytest.raises(ValueError, match="whole groups of 4"):
        rollouts.group_advantages(np.ones(6), 4)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (4, 3)])
def test_the_clipped_loss_takes_one_advantage_for_each_row(shape):
    values = jnp.zeros((3, 4))
    with pytest.raises(ValueError, match="`advantages` one number for each row or token"):
        rollouts.clipped_loss(values, values, advantages=jnp.ones(shape))
    with pytest.raises(ValueError, match="`old_log_probs` must have one shape"):
        rollouts.clipped_loss(values, values[:, :1], advantages=jnp.ones(3))


@pytest.mark.parametrize("name", MEANS)
def test_means_take_a_boolean_mask_of_the_values_shape(name):
    values, mask = jnp.ones((3, 4)), jnp.ones((3, 4), bool)
    for wrong in (mask[:, :1], mask[:1], mask[:, :3], mask.astype(jnp.float32)):
        with pytest.raises(ValueError, match="`values` and `mask` must have one shape"):
            MEANS[name][0](values, wrong)


@pytest.mark.parametrize("length", [0, -1, float("nan"), "8", None, True])
def test_the_constant_length_is_a_positive_number(length):
    with pytest.raises((TypeError, ValueError), match="`length` must be"):
        rollouts.constant_mean(jnp.ones((2, 2)), jnp.ones((2, 2), bool), length=length)


@pytest.mark.slow  # `.ci/run` runs it by itself
def test_the_example_learns_and_does_not_depend_on_the_split(tmp_path):
    pytest.importorskip("tqdm")
    output = run("grpo.py", "--quick", cwd=tmp_path)
    assert "OK: the policy counts, and its gradient is the same for any split" in output
    (line,) = [line for line in output.splitlines() if line.startswith("mean reward")]
    first, last = (float(word) for word in line.split() if word[0].isdigit())
    assert first < 0.2
    assert last > 0.8


def test_an_answer_of_several_versions_with_a_tools_words_in_it():
    tokens = np.array([9, 1, 2, 3, 4])
    own = np.array([True, False, True, True])
    log_probs = np.array([-1.0, np.nan, -3.0, -4.0])  # nobody sampled the tool's token
    answer = rollouts.Rollout(tokens, 1, log_probs, np.array([1, 7, 2, -1]), np.array([3, 3, 4, 5]),
                              own)  # fmt: skip
    batch = rollouts.pad_rollouts([answer], row_buckets=[2], length_buckets=[6])
    assert batch.mask.tolist() == [[True, False, True, True, False], [False] * 5]
    assert batch.advantage.tolist() == [[1, 0, 2, -1, 0], [0] * 5]
    assert batch.version.tolist() == [[3, 0, 4, 5, 0], [0] * 5]
    assert batch.log_probs.tolist() == [[-1, 0, -3, -4, 0], [0] * 5]
    lag = rollouts.version_lag(batch.version, 5, batch.mask)
    assert (lag["min"].value, lag["max"].value, lag["mean"].value) == (0, 2, 1)
    for wrong, match in (
        ({"own": own[:2]}, "`own` of rollout 0"),
        ({"own": own.astype(int)}, "must be boolean"),
        ({"version": np.ones(3, int)}, "`version` of rollout 0"),
        ({"advantage": np.ones(5)}, "`advantage` of rollout 0"),
    ):
        with pytest.raises(ValueError, match=match):
            rollouts.pad_rollouts([answer._replace(**wrong)], row_buckets=[1], length_buckets=[6])


def test_an_off_policy_window_is_that_of_float64_for_any_split():
    """Truncated weights, a reference term with its own denominator, and the window's metrics."""
    made = samples(13, seed=5)
    batch = rollouts.pad_rollouts(made, row_buckets=[16], length_buckets=[16])
    rng = np.random.default_rng(1)
    reference = rng.uniform(-3, -1, batch.mask.shape).astype(np.float32)
    scale = np.float32(0.6)

    def loss_fn(w, data):
        batch, reference = data
        log_probs = w * batch.log_probs
        weights = rollouts.truncated_weights(log_probs, batch.log_probs, limit=1.5)
        objective = rollouts.token_mean(-weights * batch.advantage * log_probs, batch.mask)
        apart = rollouts.reference_divergence(log_probs, reference)
        loss = {"policy": objective, "reference": 0.1 * rollouts.sequence_mean(apart, batch.mask)}
        return loss, rollouts.mismatch(log_probs, batch.log_probs, mask=batch.mask)

    mask, old = batch.mask, batch.log_probs.astype(np.float64)
    new, ratio = scale * old, np.exp((scale - 1) * old)
    assert (ratio[mask] > 1.5).any()
    assert (ratio[mask] < 1.5).any()
    slope = -np.minimum(ratio, 1.5) * batch.advantage * old
    gap = reference - new
    apart = np.where(mask, np.exp(gap) - 1 - gap, 0)
    apart_slope = np.where(mask, (1 - np.exp(gap)) * old, 0)
    rows = mask.any(1)
    lengths = mask.sum(1)[rows]
    want = slope[mask].mean() + 0.1 * np.mean(apart_slope.sum(1)[rows] / lengths)
    want_loss = (slope * scale)[mask].mean() + 0.1 * np.mean(apart.sum(1)[rows] / lengths)
    for number in (1, 3, 16):
        f = ja.value_and_grad(loss_fn, num_microbatches=number, has_aux=True)
        (loss, seen), grad = f(scale, (batch, reference))
        np.testing.assert_allclose(loss, want_loss, rtol=64 * EPS)
        np.testing.assert_allclose(grad, want, rtol=64 * EPS)
        share = ratio[mask].mean() ** 2 / (ratio[mask] ** 2).mean()
        np.testing.assert_allclose(rollouts.effective_share(seen), share, rtol=32 * EPS)
        divergence = (ratio - 1 - (scale - 1) * old)[mask].mean()
        np.testing.assert_allclose(seen["divergence"], divergence, rtol=64 * EPS)


def test_off_policy_functions_check_shapes():
    one, other = jnp.zeros((2, 3)), jnp.zeros((2, 1))
    for call in (
        lambda: rollouts.truncated_weights(one, other),
        lambda: rollouts.mismatch(one, other, mask=one > 0),
        lambda: rollouts.reference_divergence(one[0], one[0]),
    ):
        with pytest.raises(ValueError, match=r"must have one shape \[rows, tokens\]"):
            call()
    with pytest.raises(ValueError, match="`limit` must be positive"):
        rollouts.truncated_weights(one, one, limit=0)


def test_the_gradient_is_exact_for_any_split_over_uneven_devices():
    """Devices and micro-batches hold from no token to many; float64 against the whole in one."""
    made = samples(13, seed=6)
    batch = rollouts.pad_rollouts(made, row_buckets=[16], length_buckets=[16])

    def loss_fn(w, batch):
        log_probs = jax.nn.log_softmax(w[batch.tokens[:, :-1]])
        log_probs = jnp.take_along_axis(log_probs, batch.tokens[:, 1:, None], 2)[..., 0]
        weights = rollouts.truncated_weights(log_probs, batch.log_probs, limit=1.5)
        apart = rollouts.reference_divergence(log_probs, batch.log_probs)
        return {
            "policy": rollouts.token_mean(-weights * batch.advantage * log_probs, batch.mask),
            "reference": 0.1 * rollouts.sequence_mean(apart, batch.mask),
        }

    with jax.enable_x64(True):
        batch = batch._replace(
            log_probs=batch.log_probs.astype(np.float64),
            advantage=batch.advantage.astype(np.float64),
        )
        w = jnp.asarray(np.random.default_rng(0).normal(size=(9, 9)))
        whole = jax.grad(lambda w: sum(term.value for term in loss_fn(w, batch).values()))(w)
        assert whole.dtype == jnp.float64
        mesh = jax.make_mesh((8,), ("data",))
        with jax.set_mesh(mesh):
            sharded = jax.device_put(batch, jax.P("data"))
            for number in (1, 2):
                f = ja.value_and_grad(loss_fn, num_microbatches=number, spmd_axis_name="data")
                _, grad = jax.jit(f)(w, sharded)
                np.testing.assert_allclose(grad, whole, atol=5e-10)
        _, grad = ja.value_and_grad(loss_fn, num_microbatches=5)(w, batch)
        np.testing.assert_allclose(grad, whole, atol=5e-10)
