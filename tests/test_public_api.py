"""The public names: what exists, with which keywords, and documented how."""

import dataclasses
import importlib
import inspect
import itertools
import operator
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxaccum as ja
import jaxaccum.testing

ROOT = Path(__file__).parents[1]
LARGEST_NAMESPACE = 45

WINDOW = ["num_microbatches", "microbatch_size", "argnums", "batch_argnums", "has_aux"]
FOLD = [*WINDOW, "axis_name", "spmd_axis_name", "reduction", "accumulator", "skip_nonfinite"]

# The contract: name, positional parameters, keyword-only parameters that must be among the others.
# A capital name is a class, its parameters are its fields. New names get a row here.
CONTRACT = {
    "accumulate": (["loss_fn"], FOLD),
    "value_and_grad": (["loss_fn"], FOLD),
    "denominators": (["loss_fn"], WINDOW),
    "microbatch": (["fn"], [*WINDOW[:-1], "axis_name"]),
    "finalize": (["sums"], []),
    "noise_scale": (["sums"], []),
    "check_equivalence": (["loss_fn", "params", "batch"], ["num_microbatches", "batch_argnums"]),
    "merge": (["a", "b"], []),
    "multi_steps": (
        ["inner", "every"],
        [
            "axis_name",
            "accumulator",
            "skip_nonfinite",
            "max_bad_windows",
            "loss_scale",
            "mean_args",
        ],
    ),
    "until_weight": (["target"], []),
    "has_updated": (["state"], []),
    "state_specs": (["state", "axis_name"], []),
    "flush": (["tx", "state", "params"], []),
    "train_step": (["loss_fn", "optimizer"], ["max_bad_windows", "loss_scale"]),
    "check_healthy": (["record"], ["max_skipped"]),
    "batches.example_keys": (["key", "batch_size"], []),
    "split": (["batch"], ["num_microbatches", "microbatch_size"]),
    "pad_batch": (["batch", "num_rows"], []),
    "batches.pack": (["sequences", "length"], []),
    "batches.windows": (["iterable", "num_microbatches"], []),
    "audit": (["fn"], ["axis_name", "gradient_like", "min_bytes"]),
    "plan_window": (
        [],
        ["tokens_per_step", "sequence_length", "sequences_per_microbatch", "data_parallel"],
    ),
    "fit_microbatch": (["make_step"], ["limit_bytes", "examples_per_step"]),
    "mean": (["values", "where"], ["weights"]),
    "Mean": (["total", "weight"], []),
    "Sum": (["value"], []),
    "Max": (["value"], []),
    "Min": (["value"], []),
    "Last": (["value"], []),
    "Concat": (["value"], []),
    "Counted": (["state", "count"], []),
}
# Fields that the contract fixes; properties count.
FIELDS = {
    "Window": ["loss", "grads", "aux", "weight", "num_microbatches", "num_skipped"],
    "WindowSums": ["grads", "loss", "weight"],
    "MultiStepsState": [
        "micro_step", "optimizer_step", "grad_sum", "weight", "num_skipped", "inner_state",
        "num_dropped", "num_bad_in_row", "diverged", "loss_scale",
    ],
    "training.StepState": [
        "num_skipped", "num_dropped", "num_bad_in_row", "diverged", "loss_scale",
    ],
    "training.StepInfo": [
        "loss", "weight", "grad_norm", "num_microbatches", "num_skipped", "updated", "diverged",
        "loss_scale", "overflowed", "tokens_seen",
    ],
    "Mean": ["total", "weight", "value"],
    "WindowPlan": [
        "num_microbatches", "sequences_per_step", "tokens_per_step", "tokens_per_microbatch",
    ],
}  # fmt: skip
SUBMODULES = {
    "batches": ["PackedBatch", "example_keys", "pack", "pad_batch", "windows"],
    "training": ["StepInfo", "StepState", "TrainStep", "train_step"],
    "accumulators": ["plain", "compensated", "stochastic", "chunked"],
    "loss_scaling": ["static", "dynamic", "unscale"],
    "interop": ["from_optax", "to_optax", "from_inner_state", "reshape_devices"],
    "reporting": ["scalars", "summary", "plot"],
    "schedules": [
        "by_tokens",
        "by_examples",
        "by_epochs",
        "by_micro_steps",
        "in_units",
        "rewindow",
        "ramp",
        "tabulate",
        "amount_at",
        "steps_at",
        "linear_scaling",
        "square_root_scaling",
        "adam_scaling",
        "half_life",
    ],
    "diagnostics": ["NoiseScale", "smooth_noise", "batch_advice"],
    "testing": ["assert_same_window", "assert_stable_step"],
    "rollouts": [
        "close_windows",
        "pad_rollouts",
        "sequence_mean",
        "token_mean",
        "constant_mean",
        "truncated_weights",
        "mismatch",
        "effective_share",
        "reference_divergence",
    ],
    "losses": [
        "contrastive",
        "contrastive_fn",
        "routing",
        "load_balance",
        "overlap",
        "dice",
        "f_score",
        "sequence_mean",
    ],
    "window_axis": ["accumulate", "value_and_grad", "denominators"],
    "per_example": ["clip", "transform", "add_noise", "noise"],
}
# Public modules that are imported by their own name.
BY_NAME = [
    "auditing",
    "health",
    "linen",
    "multihost",
    "nnx",
    "norms",
    "orbax",
    "planning",
    "typing",
]
# What each function that a factory returns must accept.
RETURNED = {
    "accumulate": ["key", "num_real", "denominators", "loss_scale", "model_state", "into"],
    "value_and_grad": ["key", "num_real", "denominators", "loss_scale", "model_state"],
    "denominators": ["key", "num_real", "model_state"],
    "microbatch": ["key", "num_real"],
}


def members(module):
    """The public functions and classes of a module, by name."""
    return {
        name: thing
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(thing) or inspect.isclass(thing))
        and thing.__module__.startswith("jaxaccum")
    }


def public():
    yield from members(ja).items()
    for module in SUBMODULES:
        submodule = getattr(ja, module)
        names = getattr(submodule, "__all__", members(submodule))
        for name, thing in members(submodule).items():
            if name in names and thing.__module__.startswith(submodule.__name__):
                yield f"{module}.{name}", thing


PUBLIC = dict(public())
FUNCTIONS = {n: t for n, t in PUBLIC.items() if inspect.isfunction(t)}
CLASSES = {n: t for n, t in PUBLIC.items() if inspect.isclass(t)}


def section(thing, title):
    """The names that a docstring's section documents; `None` without that section."""
    doc = inspect.cleandoc(thing.__doc__)
    found = re.search(rf"^{title}:\n((?:  .*\n?|\n)*)", doc, re.MULTILINE)
    return found and re.findall(r"^  \**(\w+):", found[1], re.MULTILINE)


def fields(cls):
    """The fields of a named tuple or dataclass, those of its bases included."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return list(getattr(cls, "_fields", ()))


def test_root_namespace_is_small():
    names = [name for name in dir(ja) if not name.startswith("_")]
    assert sorted(names) == sorted(ja.__all__) == names
    assert len(names) <= LARGEST_NAMESPACE
    assert all(hasattr(ja, name) for name in names)


@pytest.mark.parametrize("name", [*SUBMODULES, *BY_NAME])
def test_public_modules_say_what_they_hold(name):
    module = importlib.import_module(f"jaxaccum.{name}") if name in BY_NAME else getattr(ja, name)
    assert list(module.__all__) == sorted(module.__all__)
    assert all(hasattr(module, n) for n in module.__all__)


def test_version_is_that_of_the_package():
    declared = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert ja.__version__ == declared[1]


@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name):
    positional, keywords = CONTRACT[name]
    thing = operator.attrgetter(name)(ja)
    parameters = inspect.signature(thing).parameters.values()
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert by_position == positional
    assert set(keywords) <= set(by_keyword)


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name):
    cls = operator.attrgetter(name)(ja)
    have = set(fields(cls)) | {n for n, v in vars(cls).items() if isinstance(v, property)}
    assert set(FIELDS[name]) <= have
    assert not have & {"count", "mu", "nu", "trace"}


@pytest.mark.parametrize("name", RETURNED)
def test_keywords_of_what_a_factory_returns(name):
    returned = getattr(ja, name)(lambda params, batch: ja.mean(batch), num_microbatches=1)
    parameters = inspect.signature(returned).parameters.values()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == RETURNED[name]


@pytest.mark.parametrize("module", SUBMODULES)
def test_submodules(module):
    submodule = getattr(ja, module)
    assert isinstance(submodule, types.ModuleType)
    assert all(callable(getattr(submodule, name)) for name in SUBMODULES[module])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_documented_arguments_are_those_of_the_signature(name):
    function = FUNCTIONS[name]
    parameters = list(inspect.signature(function).parameters)
    documented = section(function, "Args") or []
    if documented != parameters:  # the options of another function, with its words
        own = inspect.signature(inspect.unwrap(function)).parameters.values()
        assert documented == [p.name for p in own]
        assert set(documented[:-1]) < set(parameters)
    assert section(function, "Returns") is not None or section(function, "Yields") is not None


@pytest.mark.parametrize("name", CLASSES)
def test_documented_attributes_are_the_fields(name):
    expected = fields(CLASSES[name])
    assert CLASSES[name].__doc__
    assert not CLASSES[name].__doc__.startswith(f"{CLASSES[name].__name__}(")  # generated
    if expected:
        assert section(CLASSES[name], "Attributes") == expected


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_begins_with_one_line(name):
    first, _, rest = inspect.cleandoc(PUBLIC[name].__doc__).partition("\n")
    assert first.endswith(".")
    assert not rest or rest.startswith("\n")


@pytest.mark.parametrize("name", CONTRACT)
def test_at_most_two_positional_parameters(name):
    allowed = {
        "flush": 3,
        "check_equivalence": 3,
    }  # like `update`: after the transformation, its state and parameters
    assert len(CONTRACT[name][0]) <= allowed.get(name, 2)


def test_state_holds_arrays_only():
    state = ja.multi_steps(optax.adam(1.0), 2).init({"w": jnp.zeros(3)})
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))


def test_no_file_names_a_place_on_one_machine():
    place = re.compile(r"(?<![\w.$}*/-])/(?:work|home|root|tmp|mnt|Users)(?:/\w|\b(?!/))")
    folders = ["jaxaccum", "tests", "benchmarks", "examples", "docs", ".ci"]
    written = {".py", ".md", ".toml", ".json", ".jsonl", ".txt", ""}
    for path in itertools.chain(ROOT.glob("*"), *[(ROOT / f).rglob("*") for f in folders]):
        if path.is_file() and path.suffix in written and path.name != ".git":
            found = place.search(path.read_text(encoding="utf-8"))
            assert not found, f"{path.relative_to(ROOT)}: {found[0]}"
