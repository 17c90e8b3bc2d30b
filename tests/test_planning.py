"""`plan_window`: the arithmetic of a window, its refusals, its table."""

import dataclasses
import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxaccum as ja
from jaxaccum.core.text import bytes_text, columns, parse_bytes

GPT2 = {"tokens_per_step": 524_288, "sequence_length": 2_048, "sequences_per_microbatch": 4}


@pytest.mark.parametrize(("devices", "number"), [(1, 64), (8, 8), (64, 1)])
def test_tokens_to_micro_batches(devices, number):
    plan = ja.plan_window(**GPT2, data_parallel=devices)
    assert plan.num_microbatches == number
    assert (plan.sequences_per_step, plan.tokens_per_step) == (256, 524_288)
    assert (plan.tokens_per_microbatch, plan.sequences_per_microbatch) == (8_192, 4)
    assert plan.sequences_per_device == 256 // devices


def test_sequences_on_devices():
    plan = ja.plan_window(sequences_per_step=48, sequences_per_microbatch=4, data_parallel=4)
    assert (plan.num_microbatches, plan.tokens_per_step, plan.tokens_per_microbatch) == (
        3, None, None,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"multiple of 20 .* got 48.*targets are 40 .* and 60 "):
        ja.plan_window(sequences_per_step=48, sequences_per_microbatch=4, data_parallel=5)


def test_examples():
    plan = ja.plan_window(examples_per_step=48, examples_per_microbatch=4)
    assert plan == ja.plan_window(sequences_per_step=48, sequences_per_microbatch=4)
    assert (plan.examples_per_step, plan.examples_per_microbatch) == (48, 4)
    with_tokens = ja.plan_window(
        examples_per_step=48, examples_per_microbatch=4, sequence_length=10
    )
    assert (with_tokens.tokens_per_step, with_tokens.tokens_per_microbatch) == (480, 40)


@settings(deadline=None)
@given(
    target=st.integers(1, 10_000),
    length=st.integers(1, 40),
    size=st.integers(1, 12),
    devices=st.integers(1, 12),
)
def test_exact_or_refused_with_targets_that_work(target, length, size, devices):
    def plan(tokens):
        return ja.plan_window(
            tokens_per_step=tokens,
            sequence_length=length,
            sequences_per_microbatch=size,
            data_parallel=devices,
        )

    try:
        made = plan(target)
    except ValueError as error:
        nearest = re.search(r"nearest targets? (?:is|are) (.*)\.$", str(error))[1]
        offered = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) \(", nearest)]
        assert len(offered) == 2 if target > length * size * devices else len(offered) == 1
        assert all(plan(tokens).tokens_per_step == tokens for tokens in offered)
        assert offered[-1] > target
        assert all(below < target for below in offered[:-1])
        assert all(  # none is nearer
            b - a == length * size * devices for a, b in itertools.pairwise(offered)
        )
    else:
        assert made.num_microbatches * devices * size * length == target
        assert made.tokens_per_step == target


@pytest.mark.parametrize("name", ["data_parallel", *GPT2])
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-4, ValueError), (True, TypeError), (2.0, TypeError),
                         ("4", TypeError)]
)  # fmt: skip
def test_arguments(name, value, error):
    with pytest.raises(error, match=f"plan_window: `{name}`"):
        ja.plan_window(**(GPT2 | {name: value}))


@pytest.mark.parametrize("cast", [np.int32, np.int64, jnp.int32])
def test_integers_of_other_kinds(cast):
    plan = ja.plan_window(**{name: cast(value) for name, value in GPT2.items()})
    assert plan == ja.plan_window(**GPT2)
    assert all(type(v) in (int, type(None)) for v in plan.as_dict().values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of `tokens_per_step` and `sequences_per_step` and `examples_per_step`"),
        (GPT2 | {"sequences_per_step": 256}, "got `tokens_per_step` and `sequences_per_step`"),
        (GPT2 | {"examples_per_microbatch": 4}, "exactly one of `sequences_per_microbatch`"),
        ({"sequences_per_step": 8}, "exactly one of `sequences_per_microbatch`"),
        (GPT2 | {"sequence_length": None}, "`sequence_length` is needed"),
    ],
)
def test_one_target_and_one_size(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ja.plan_window(**arguments)


def test_plan_is_frozen_and_prints_as_a_table():
    plan = ja.plan_window(**GPT2, data_parallel=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_microbatches = 1
    lines = [line.split() for line in str(plan).splitlines()]
    assert lines[2] == ["tokens", "524,288", "65,536", "8,192"]
    assert lines[3] == ["sequences", "256", "32", "4"]
    assert lines[4] == ["micro-batches", "64", "8", "1"]
    examples = ja.plan_window(examples_per_step=6, examples_per_microbatch=2)
    assert [line.split()[0] for line in str(examples).splitlines()[2:]] == [
        "examples", "micro-batches",
    ]  # fmt: skip


def test_plan_is_the_window_that_runs():
    plan = ja.plan_window(sequences_per_step=12, sequences_per_microbatch=3)
    rows = []
    f = ja.accumulate(
        lambda w, x: rows.append(x.shape[0]) or ja.mean(w * x),
        num_microbatches=plan.num_microbatches,
    )
    sums = f(1.0, jnp.arange(12.0))
    assert set(rows) == {plan.sequences_per_microbatch}
    assert sums.num_microbatches == plan.num_microbatches == 4


# Bytes and tables as text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16GiB", 16 * 2**30),
        ("80 GB", 80 * 10**9),
        ("4096", 4096),
        ("1.5mib", 3 * 2**19),
        ("7B", 7),
    ],
)
def test_parse_bytes(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "GiB", "-1", "16 pounds", "0", "0.0GiB", "nan"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ValueError, match="expected"):
        parse_bytes(text)


@pytest.mark.parametrize("number", [1, 999, 1023, 1024, 10**6, 2**30, 7 * 10**12, 2**60])
def test_bytes_text_reads_back_to_three_digits(number):
    assert parse_bytes(bytes_text(number)) == pytest.approx(number, rel=0.006)


def test_columns_are_aligned():
    assert columns([("a", "bb"), ("100", "2")]) == ["  a  bb", "100   2"]
