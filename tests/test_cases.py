"""Every numeric case of a window on every route: two of them for each case, or with -m slow all.

Cases of other kinds (streams over several windows, programs, refusals, memory) have tests of their
own, which hold the case's number in their names or stand in `ELSEWHERE`.
"""

import contextlib
import pathlib
import re
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
    "into": Way("into", LOCAL),
    "stream": Way("stream", LOCAL),
    "flush": Way("flush", LOCAL),
    "step": Way("train_step", LOCAL, by_number=True),
    "checked": Way("value_and_grad", Setup("E")),
    "unchecked": Way("value_and_grad", Setup("A", check_vma=False), by_number=True),
    "pmap": Way("value_and_grad", PMAP),
    "merged over devices": Way("merge", Setup("A")),
    "into over devices": Way("into", Setup("E", check_vma=False)),
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


ELSEWHERE = {
    7: "test_stream_cases.py::test_denominators",
    12: "test_window_programs.py::test_memory_does_not_grow_with_the_window",
    28: "test_planning.py::test_sequences_on_devices",
    30: "test_sharding.py::test_scattered_sums_take_less_memory",
    59: "test_memory.py::test_the_window_stays_the_same",
    63: "test_leaves.py::test_a_step_changes_no_bit_of_them",
    64: "test_leaves.py::test_a_stream_changes_no_bit_of_them",
    67: "test_interop.py::test_what_each_old_micro_step_held_is_said",
    71: "test_accumulators.py::test_derivatives_are_those_of_the_unrounded_sum",
    74: "test_nnx.py::test_a_metric_in_the_model_holds_all_rows",
    75: "test_hostile.py::test_wrong_input_is_refused_in_our_words",
    76: "test_local_params.py::test_each_expert_has_its_own_gradient_over_the_weight_of_all",
    77: "test_audit_programs.py::test_programs_that_reduce_too_often",
    82: "test_nnx.py::test_a_key_reaches_the_loss_as_in_the_core",
    83: "test_equivalence.py::test_neighbours_of_which_no_micro_batch_holds_two",
    84: "test_window_programs.py::test_a_leaf_more_adds_less_than_half_an_equation_to_its_gradient",
}


def test_every_case_has_a_test():
    texts = {
        path.name: path.read_text() for path in pathlib.Path(__file__).parent.glob("test_*.py")
    }
    numbered = re.findall(r"def test_(?:case_)?0*(\d+)_", "".join(texts.values()))
    found = {*map(int, numbered), *(int(name.split()[0]) for name in PROBLEMS)}
    for number, place in ELSEWHERE.items():
        name, test = place.split("::")
        if f"def {test}(" in texts[name]:
            found.add(number)
    assert found >= set(range(1, 85))
