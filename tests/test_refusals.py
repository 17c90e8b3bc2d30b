"""Combinations of options that are refused: one table, which the documentation shows."""

import inspect
import re
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxaccum as ja
from jaxaccum.window.refusals import TABLE

PAGE = Path(__file__).parents[1] / "docs" / "refusals.md"
W, X = jnp.float32(1), jnp.ones(4)
CUT = {"num_microbatches": 2}


def linear(w, x):
    return ja.mean(w * x)


def two_terms(w, x):
    return linear(w, x), ja.Mean(w, 1.0)


def moving(w, x, *, model_state):
    return linear(w, x), model_state


FACTORIES = {
    "both cuts": (CUT | {"microbatch_size": 2}, "`microbatch_size` is needed, got 2 and 2"),
    "no cut": ({}, "`microbatch_size` is needed, got none"),
    "two kinds of axes": (CUT | {"axis_name": "a", "spmd_axis_name": "b"}, "'a'.* 'b', for plain"),
    "places without axes": (
        CUT | {"local_params": P("a")},
        "`local_params` says .* there are none",
    ),
    "noise of parts": (
        CUT | {"noise_scale": True, "axis_name": "a", "grad_specs": P("a")},
        "'a', with `grad_specs` leaves each device a part",
    ),
}
STEPS = {
    "a limit of nothing": (
        lambda named: ja.train_step(linear, optax.sgd(1.0), **CUT, **named),
        lambda named: ja.multi_steps(optax.sgd(1.0), 2, **named),
    ),
}
OVER_AXIS = {
    "a skip over the window's axis": {"skip_nonfinite": True},
    "one name for two axes": {"axis_name": "window"},
}
CALLS = {
    "noise of divided gradients": lambda: ja.accumulate(linear, noise_scale=True, **CUT)(
        W, X, denominators=4.0
    ),
    "noise of several terms": lambda: ja.accumulate(two_terms, noise_scale=True, **CUT)(W, X),
    "a state without a policy": lambda: ja.accumulate(linear, **CUT)(W, X, model_state=W),
    "a policy without a state": lambda: ja.accumulate(moving, model_state="frozen", **CUT)(W, X),
    "rounding without a key": lambda: ja.accumulate(
        linear, accumulator=ja.accumulators.stochastic(), **CUT
    )(W, X),
}
# These need several devices: test_sharding.py, test_local_params.py.
ON_DEVICES = {"scatter of unequal windows", "parts that differ", "parts of its own"}


def remedy(name):
    return re.escape(TABLE[name].remedy.partition("{")[0])


def test_every_combination_has_its_case():
    assert {*FACTORIES, *STEPS, *OVER_AXIS, *CALLS} | ON_DEVICES == TABLE.keys()
    assert len(TABLE) <= 20


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize(
    "factory", [ja.accumulate, ja.window_axis.accumulate, ja.microbatch, ja.denominators]
)
def test_a_factory_refuses(factory, name):
    options, message = FACTORIES[name]
    if not options.keys() <= inspect.signature(factory).parameters.keys():
        pytest.skip("it has no such option")
    with pytest.raises(TABLE[name].kind, match=f"{message}.*{remedy(name)}"):
        factory(linear, **options)


@pytest.mark.parametrize("name", OVER_AXIS)
def test_a_window_whose_micro_batches_meet_refuses(name):
    with pytest.raises(TABLE[name].kind, match=f"window_axis.accumulate: .*{remedy(name)}"):
        ja.window_axis.accumulate(linear, **CUT, **OVER_AXIS[name])


@pytest.mark.parametrize("number", [0, 1])
def test_a_limit_needs_something_to_leave_out(number):
    name = "a limit of nothing"
    make = STEPS[name][number]
    with pytest.raises(TABLE[name].kind, match=f"none is.*{remedy(name)}"):
        make({"max_bad_windows": 3})
    make({"max_bad_windows": 3, "loss_scale": ja.loss_scaling.dynamic()})


@pytest.mark.parametrize("name", CALLS)
def test_a_call_refuses(name):
    with pytest.raises(TABLE[name].kind, match=f"accumulate: .*{remedy(name)}"):
        CALLS[name]()


def test_the_documentation_shows_the_table():
    rows = [f"| {r.options} | {r.reason} | {r.remedy} |" for r in TABLE.values()]
    shown = re.sub(r"\{(\w+?)(!r)?\}", r"…", "\n".join(rows))
    assert shown in PAGE.read_text()
