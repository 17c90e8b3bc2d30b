"""The examples run from the command line, and their own checks against the full batch hold."""

import argparse
import importlib
import itertools
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from oracles import child_environment

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def run(name: str, *args: str, cwd: pathlib.Path) -> str:
    """Runs an example in `cwd` on one CPU device; returns its output."""
    result = subprocess.run(
        [sys.executable, EXAMPLES / name, *args],
        cwd=cwd,
        env=child_environment() | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def losses(output: str) -> list[float]:
    words = output.split()
    return [float(after) for word, after in itertools.pairwise(words) if word == "loss"]


def test_minimal_optax(tmp_path):
    output = run("minimal_optax.py", cwd=tmp_path)
    assert "OK: the window's gradient equals the full batch's, to rounding" in output
    first, *_, last = losses(output)
    assert last < 0.5 * first


def test_streaming(tmp_path):
    output = run("streaming.py", cwd=tmp_path)
    assert "OK: the streamed training equals the full-batch run, to rounding" in output
    # Ten micro-batches in windows of four are three optimizer steps an epoch, the last one short.
    assert "epoch 19  optimizer step 60" in output
    first, *_, last = losses(output)
    assert last < 0.1 * first


@pytest.mark.slow  # `.ci/run` runs each of them by itself
@pytest.mark.parametrize(
    ("name", "needs", "claim"),
    [
        (
            "contrastive.py",
            ["sklearn"],
            "OK: the micro-batched contrastive gradient equals the full batch's, to rounding",
        ),
        (
            "moe.py",
            ["flax", "tqdm"],  # of the example that it takes its text from
            "OK: the load is balanced over the window, with the full batch's gradient",
        ),
        (
            "dp_sgd.py",
            ["sklearn"],
            "OK: neither the clipped gradient nor the noise's scale depends on the micro-batches",
        ),
    ],
    ids=["contrastive", "moe", "dp_sgd"],
)
def test_claims(name, needs, claim, tmp_path):
    for module in needs:
        pytest.importorskip(module)
    output = run(name, "--quick", cwd=tmp_path)
    assert claim in output
    assert list(tmp_path.iterdir()) == []


def distances(output: str, name: str) -> list[float]:
    """The two distances from the full batch in the table's row `name`: loss, parameters."""
    (line,) = (line for line in output.splitlines() if line.startswith(f"{name}  "))
    return [float(number) for number in line.split()[-2:]]


PACKED = ["--packed", "--steps", "2", "--compare-steps", "4"]


@pytest.mark.parametrize("options", [[], pytest.param(PACKED, marks=pytest.mark.slow)])
def test_train_lm(tmp_path, options):
    image_module = pytest.importorskip("matplotlib.image")
    pytest.importorskip("flax")
    pytest.importorskip("tqdm")
    picture = tmp_path / "curves.png"
    output = run("train_lm.py", "--quick", "--out", str(picture), *options, cwd=tmp_path)
    assert "OK: the window trains like the full batch, to rounding" in output
    assert "validation loss" in output
    assert "greedy sample: 'Return the " in output
    window, means = distances(output, "jaxaccum window"), distances(output, "mean of means")
    assert all(100 * near < far for near, far in zip(window, means, strict=True))
    image = image_module.imread(picture)
    assert min(image.shape[:2]) > 500
    assert image[..., :3].std() > 0.05
    assert list(tmp_path.iterdir()) == [picture]


@pytest.mark.slow  # `.ci/run` runs it by itself
def test_batch_norm(tmp_path):
    pytest.importorskip("sklearn")
    output = run("batch_norm.py", "--quick", cwd=tmp_path)
    assert "OK: over the window's axis, batch normalisation is that of the full batch" in output


@pytest.mark.slow  # `.ci/run` runs it by itself
def test_bert_finetune(tmp_path):
    pytest.importorskip("grain")
    pytest.importorskip("tokenizers")
    output = run("bert_finetune.py", "--quick", cwd=tmp_path)
    assert "OK: an effective batch of 32, to rounding, in the memory of 4" in output
    rows = [line.split() for line in output.splitlines() if line.endswith("MiB")]
    (*_, true, true_memory, _), (*_, window, memory, _) = rows
    assert abs(float(true.strip("%")) - float(window.strip("%"))) < 2
    assert float(memory) < 0.5 * float(true_memory)


@pytest.mark.slow  # `.ci/run` runs it by itself
def test_gpt2_pretrain(tmp_path):
    pytest.importorskip("grain")
    pytest.importorskip("tokenizers")
    options = ["--quick", "--checkpoints", str(tmp_path / "run"), "--out", str(tmp_path / "a.png")]
    output = run("gpt2_pretrain.py", *options, cwd=tmp_path)
    assert "micro-batches of 4 x 2,048 tokens: 64 for a step of 524,288 on one device, 8" in output
    assert "micro-batches of 16 x 512 tokens: 64 for a step of 524,288 on one device, 8" in output
    assert "begins at step 0 of 147" in output
    assert "OK: the model learns, a step of the tokens that were asked for at a time" in output
    assert (tmp_path / "a.png").stat().st_size > 10_000
    again = run("gpt2_pretrain.py", *options, cwd=tmp_path)  # the same command goes on
    assert "begins at step 147 of 147" in again


def test_gpt2_rows_go_on_where_the_checkpoint_says(monkeypatch):
    pytest.importorskip("grain")
    pytest.importorskip("tokenizers")
    pytest.importorskip("tqdm")
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("gpt2_pretrain")
    documents = [{"tokens": np.arange(n, dtype=np.int32) + 100 * n} for n in (5, 9, 3, 14, 2)]
    args = argparse.Namespace(seed=0, sequence_length=7)
    loader = example.make_loader(documents, args, 2)
    for _ in range(3):
        rows = next(loader)
    assert rows.tokens.shape == (2, 8)
    state = json.loads(json.dumps(loader.get_state()))
    again = example.make_loader(documents, args, 2)
    again.set_state(state)
    for _ in range(4):
        np.testing.assert_array_equal(next(loader), next(again))


@pytest.mark.slow  # `.ci/run` runs it by itself
def test_pipeline_rl(tmp_path):
    pytest.importorskip("tqdm")
    output = run("pipeline_rl.py", "--quick", cwd=tmp_path)
    assert "OK: the pipeline reaches the reward of training in turns, in less time" in output
    lines = output.splitlines()
    turns, pipeline = (
        next(line for line in lines if line.startswith(name)).replace(",", "").split()
        for name in ("in_turns ", "pipelined ")
    )
    assert float(pipeline[2]) < float(turns[2])  # seconds
    assert min(float(turns[3]), float(pipeline[3])) >= 0.5  # reward
    assert [float(lag) for lag in turns[4:7]] == [0, 0, 0]
    assert 0 < float(pipeline[6]) <= 8
