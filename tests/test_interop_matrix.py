"""The tables of docs/interop.md are what the code does, and leave no optimizer of Optax out."""

import inspect

import interop_matrix
import jax.numpy as jnp
import optax
import pytest
from interop_matrix import COLUMNS, KINDS, LEFT_OUT, ROWS, cell, mark
from optax import contrib

import jaxaccum as ja

PAGE = interop_matrix.read_page()

# One of each kind for every run; the whole matrix is marked slow.
QUICK = [
    *(("adamw", column) for column in COLUMNS),
    *((row, "bfloat16") for row in ("adafactor", "novograd", "mechanize")),
    *((row, "mixed") for row in ("lbfgs", "galore", "momo")),
    ("muon", "float32"),
    ("sam", "in backtracking"),
    ("schedule_free", "around partition"),
]

# Transformations that are no optimizers: wrappers, and what needs arguments of its own.
WRAPPERS = {
    "apply_if_finite", "chain", "conditionally_mask", "conditionally_transform", "flatten",
    "freeze", "inject_hyperparams", "inject_stateful_hyperparams", "lookahead", "masked",
    "measure_with_ema", "multi_transform", "named_chain", "partition", "selective_transform",
    "snapshot", "split_real_and_imaginary", "with_extra_args_support",
}  # fmt: skip
NOT_ALONE = {
    "apply_every": "another accumulation, which counts micro-steps",
    "identity": "nothing",
    "set_to_zero": "nothing",
    "stateless": "takes a function",
    "stateless_with_tree_map": "takes a function",
    "differentially_private_aggregate": "takes per-example gradients",
    "dpsgd": "takes per-example gradients",
    "optimistic_adam": "deprecated",
    "scale_by_distance_over_gradients": "promotes ranks, which this suite forbids; dog is a row",
    "scale_by_muon": "takes matrices only; muon is a row",
}
GIVEN = {
    "adaptive_grad_clip": {"clipping": 0.1},
    "add_noise": {"eta": 0.1, "gamma": 0.5, "key": 0},
    "clip": {"max_delta": 0.5},
    "clip_by_block_rms": {"threshold": 0.5},
    "clip_by_global_norm": {"max_norm": 0.5},
    "ema": {"decay": 0.5},
    "scale": {"step_size": 0.5},
    "scale_by_backtracking_linesearch": {"max_backtracking_steps": 5},
    "scale_by_galore": {"rank": 2},
    "scale_by_learning_rate": {"learning_rate": 0.5},
    "scale_by_madgrad": {"learning_rate": 0.5},
    "scale_by_rprop": {"learning_rate": 0.5},
    "scale_by_schedule": {"step_size_fn": lambda step: 1 / (1 + step)},
    "scale_by_zoom_linesearch": {"max_linesearch_steps": 5},
    "trace": {"decay": 0.5},
}
NEEDS = {
    "scale_by_backtracking_linesearch": {"value", "grad", "value_fn"},
    "scale_by_zoom_linesearch": {"value", "grad", "value_fn"},
    "scale_by_polyak": {"value"},
}


def transformations():
    """Every public factory of `optax` and `optax.contrib` that returns a transformation."""
    for module in (optax, contrib):
        for name, factory in vars(module).items():
            if inspect.isfunction(factory) and not name.startswith("_"):
                returned = str(inspect.signature(factory).return_annotation)
                if "GradientTransformation" in returned:
                    yield name, factory


PIECES = {
    name: factory
    for name, factory in transformations()
    if name not in ROWS.keys() | WRAPPERS | NOT_ALONE.keys()
}


def test_every_transformation_of_optax_is_named():
    """A new release's additions get a row, or a reason here why they have none."""
    assert not LEFT_OUT.keys() & ROWS.keys()
    needs_more = {
        name
        for name, factory in PIECES.items()
        for p in inspect.signature(factory).parameters.values()
        if p.default is p.empty and p.name not in GIVEN.get(name, {})
    }
    assert not needs_more
    assert len(ROWS) >= 49
    assert len(PIECES) >= 40


def test_the_page_has_every_row_and_column():
    assert list(PAGE) == list(ROWS)
    assert all(list(marks) == COLUMNS for marks in PAGE.values())
    assert all(PAGE[row][kind] == "=" for row in ROWS for kind in KINDS)
    assert not [row for row, marks in PAGE.items() if "r" in marks.values()]


@pytest.mark.parametrize(("row", "column"), QUICK)
def test_cell(row, column):
    assert mark(cell(row, column)) == PAGE[row][column]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_row(row):
    answers = {column: cell(row, column) for column in COLUMNS}
    assert {column: mark(answer) for column, answer in answers.items()} == PAGE[row], answers


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PIECES)
def test_transformation_that_is_no_optimizer(name, kind, monkeypatch):
    made = lambda: PIECES[name](**GIVEN.get(name, {}))  # noqa: E731 - made anew for each run
    monkeypatch.setitem(ROWS, name, (made, NEEDS.get(name, ())))
    assert cell(name, kind) == "equal"


def test_per_example_gradients_are_refused():
    params = jnp.zeros(3)
    tx = ja.multi_steps(contrib.differentially_private_aggregate(1.0, 0.0, key=0), 2)
    with pytest.raises(ValueError, match=r"multi_steps: `updates` is float32\[8,3\]"):
        tx.update(jnp.ones((8, 3)), tx.init(params), params)
