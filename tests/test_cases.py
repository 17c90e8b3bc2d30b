"""Every numeric case of a window on every route: two of them for each case, or with -m slow all."""

import contextlib
from typing import NamedTuple

import jax
import numpy as np
import pytest
from meshes import LOCAL, PMAP, Setup
from oracles import assert_close, assert_equal
from problems import PROBLEMS
from routes import ROUTES

ONE_ROW = {"microbatch_size": 1}


class Way(NamedTuple):
    """A route on a setup; `by_number` cuts into as many micro-batches as a device has rows."""

    route: str
    setup: Setup
    by_number: bool = False


WAYS = {
    "by number": Way("value_and_grad", LOCAL, by_number=True),
    "by size": Way("value_and_grad", LOCAL),
    "merged": Way("merge", LOCAL),
    "stream": Way("stream", LOCAL),
    "flush": Way("flush", LOCAL),
    "step": Way("train_step", LOCAL, by_number=True),
    "checked": Way("value_and_grad", Setup("E")),
    "unchecked": Way("value_and_grad", Setup("A", check_vma=False), by_number=True),
    "pmap": Way("value_and_grad", PMAP),
    "merged over devices": Way("merge", Setup("A")),
    "stream over devices": Way("stream", Setup("E")),
    "stream, unchecked": Way("stream", Setup("A", check_vma=False)),
    "stream in pmap": Way("stream", PMAP),
    "flush over devices": Way("flush", Setup("A")),
    "spmd": Way("plain jit", Setup("E")),
    "step, spmd": Way("train_step", Setup("A"), by_number=True),
    "scatter": Way("scatter", Setup("A")),
    "scatter, unchecked": Way("scatter", Setup("E", check_vma=False)),
}


def takes(way, problem):
    """Whether the route can run the problem.

    Reduce-scattered gradients share their micro-steps: all devices skip alike, and an accumulator
    sees the devices' rounded sum.
    """
    route = WAYS[way].route
    if route == "scatter" and problem.options:
        return False
    return ROUTES[route].several_terms or not (problem.several or problem.given)


def cases():
    """Each problem with the next two routes in turn by default, the others marked as slow."""
    used = dict.fromkeys(WAYS, 0)
    for name, problem in PROBLEMS.items():
        possible = [way for way in WAYS if takes(way, problem)]
        chosen = sorted(possible, key=lambda way: used[way])[:2]
        for way in possible:
            quick = way in chosen
            used[way] += quick
            yield pytest.param(
                name, way, id=f"{name}-{way}", marks=() if quick else pytest.mark.slow
            )


@pytest.mark.parametrize(("name", "way"), list(cases()))
def test_a_case_has_its_answer(name, way):
    problem, (route, setup, by_number) = PROBLEMS[name], WAYS[way]
    chosen = ROUTES[route]
    rows = len(jax.tree.leaves(problem.batch)[0]) // setup.number // chosen.parts
    cut = {"num_microbatches": rows} if by_number else ONE_ROW
    doubled = problem.dtype == "float64"
    with jax.enable_x64(True) if doubled else contextlib.nullcontext():
        call = chosen.make(
            setup,
            problem.loss_fn,
            {**cut, **(problem.options or {})},
            given=problem.given,
            several_terms=problem.several,
        )
        got = jax.tree.map(np.asarray, call(problem.params, problem.batch))
    if problem.weight is not None and got.weight is not None:
        assert got.weight == problem.weight
    check = assert_equal if problem.exact else assert_close
    check((got.loss, got.grads), (problem.loss, np.full(8, problem.grad)))
