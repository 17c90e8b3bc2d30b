"""Windows from a loader, constant shapes, packed rows, per-example keys."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxaccum as ja

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=40)


@pytest.mark.parametrize(("items", "size", "sizes"), [(7, 4, [4, 3]), (8, 4, [4, 4]), (0, 3, [])])
def test_windows_drop_nothing(items, size, sizes):
    found = list(ja.batches.windows(range(items), size))
    assert [len(window) for window in found] == sizes
    assert list(itertools.chain(*found)) == list(range(items))


def test_windows_read_only_as_far_as_they_return():
    loader = iter(range(10))
    next(ja.batches.windows(loader, 4))
    assert next(loader) == 4


@pytest.mark.parametrize("number", [0, -1, 2.5, "4", True])
def test_windows_refuse_a_bad_size_at_once(number):
    with pytest.raises((TypeError, ValueError), match="windows: `num_microbatches`"):
        ja.batches.windows([1], number)


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_padding_counts_for_nothing(make):
    batch = {"x": make([[1.0], [3.0]]), "y": make([1, 2])}
    padded, where = ja.pad_batch(batch, 5)
    assert jax.tree.map(np.shape, padded) == {"x": (5, 1), "y": (5,)}
    assert type(where) is type(batch["x"])
    assert jax.tree.map(lambda x: x.dtype, padded) == jax.tree.map(lambda x: x.dtype, batch)
    f = ja.value_and_grad(
        lambda w, b: ja.mean(w * b["x"][:, 0], where=b["where"]), num_microbatches=5
    )
    loss, grad = f(jnp.float32(2), {**padded, "where": where})
    assert (loss, grad) == (4, 2)


def test_padding_makes_no_nan_of_its_own():
    padded, where = ja.pad_batch(np.ones((1, 2), np.float32), 3)

    def loss_fn(w, batch):
        x, where = batch
        return ja.mean(w * x[:, 0] / jnp.linalg.norm(x, axis=1), where=where)

    f = ja.value_and_grad(loss_fn, num_microbatches=3)
    assert np.isfinite(f(jnp.float32(1), (padded, where))[1])


@pytest.mark.parametrize(
    ("batch", "rows", "message"),
    [
        (np.ones((3, 1)), 2, "3 rows, more than `num_rows`"),
        (np.ones((0, 1)), 2, "zero rows"),
        ({}, 2, "no leaves"),
        ((np.ones(2), np.ones(3)), 4, "same number of rows"),
    ],
)
def test_batches_that_cannot_be_padded_are_refused(batch, rows, message):
    with pytest.raises(ValueError, match=message):
        ja.pad_batch(batch, rows)


@given(lengths=LENGTHS, extra=st.integers(0, 5))
def test_packing_loses_and_mixes_nothing(lengths, extra):
    numbers = iter(range(1, 10_000))
    sequences = [[next(numbers) for _ in range(n)] for n in lengths]
    packed = ja.batches.pack(sequences, max(lengths) + extra, padding=0)
    found = []
    for tokens, segments, positions in zip(*packed, strict=True):
        for segment in range(1, segments.max() + 1):
            inside = segments == segment
            assert positions[inside].tolist() == list(range(inside.sum()))
            found.append(tokens[inside].tolist())
        assert (tokens[segments == 0] == 0).all()
    assert sorted(found) == sorted(sequences)


@given(lengths=LENGTHS)
def test_packing_is_first_fit(lengths):
    length, rows = max(lengths), []
    for n in lengths:
        row = next((i for i, free in enumerate(rows) if free >= n), len(rows))
        if row == len(rows):
            rows.append(length)
        rows[row] -= n
    packed = ja.batches.pack([np.ones(n, int) for n in lengths], length)
    assert [(ids == 0).sum() for ids in packed.segment_ids] == rows


def test_targets_are_the_next_tokens_of_the_same_sequence():
    """Two sequences of 5 tokens have 8 targets, packed into one row or not."""
    sequences = [range(1, 6), range(6, 11)]
    for length in (10, 5, 12):
        packed = ja.batches.pack(sequences, length)
        assert packed.target_mask().sum() == 8
    assert ja.batches.pack(sequences, 10).target_mask().tolist() == [
        [True] * 4 + [False] + [True] * 4
    ]


def test_long_sequences_are_refused_or_split():
    with pytest.raises(ValueError, match=r"`sequences\[1\]` has 5 tokens, more than `length`, 3"):
        ja.batches.pack([[1], range(5)], 3)
    packed = ja.batches.pack([[1], range(5)], 3, overlong="split")
    assert sorted(np.bincount(packed.segment_ids.ravel())[1:].tolist()) == [2, 4]
    assert packed.tokens[packed.segment_ids > 0].size == 6


@pytest.mark.parametrize(
    ("sequences", "message"),
    [([[1.5]], "token ids"), ([[[1]]], "flat sequence"), ([], "no tokens"), ([[]], "no tokens")],
)
def test_what_is_no_token_sequence_is_refused(sequences, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ja.batches.pack(sequences, 4)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_example_keys_do_not_depend_on_the_parts(make):
    key = make(3)
    whole = ja.batches.example_keys(key, 6)
    parts = [ja.batches.example_keys(key, 2), ja.batches.example_keys(key, 4, start=2)]
    assert jnp.array_equal(whole, jnp.concatenate(parts))
    draws = jax.vmap(lambda k: jax.random.bits(k))(whole)
    assert len(set(draws.tolist())) == 6
