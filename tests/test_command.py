"""The commands `plan` and `memory`; that of `audit` is tested with the audit."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from jaxaccum import __main__ as command

PLAN = ["plan", "--tokens-per-step", "524288", "--sequence-length", "2048",
        "--sequences-per-microbatch", "4"]  # fmt: skip
EXAMPLE = """
    import jax, jax.numpy as jnp, jaxaccum as ja

    def make_step(num_microbatches):
        args = tuple(jax.ShapeDtypeStruct((n, 32), "float32") for n in (32, 64))

        def loss_fn(w, x):
            for _ in range(4):
                x = jnp.tanh(x @ w)
            return ja.mean(x)

        return ja.value_and_grad(loss_fn, num_microbatches=num_microbatches), args

    def bad(num_microbatches):
        return 3

    def broken(num_microbatches):
        raise ValueError("of the user's own")

    def devices(num_microbatches):
        assert jax.device_count() == 3
        return make_step(num_microbatches)
"""


@pytest.fixture
def example(tmp_path, monkeypatch):
    (tmp_path / "planned_example.py").write_text(textwrap.dedent(EXAMPLE))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("planned_example", None)


def memory(function, *options):
    return command.main(
        ["memory", f"planned_example:{function}", "--examples-per-step", "64", *options]
    )


def test_plan(capsys):
    assert command.main([*PLAN, "--data-parallel", "8"]) == 0
    assert "num_microbatches=8 on 8 devices" in capsys.readouterr().out
    assert command.main([*PLAN, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_microbatches"], plan["sequences_per_step"]) == (64, 256)
    assert (
        command.main(["plan", "--examples-per-step", "48", "--examples-per-microbatch", "4"]) == 0
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PLAN, "--data-parallel", "5"], "nearest targets are 491,520"),
        ([*PLAN, "--data-parallel", "0"], "`data_parallel` must be at least 1"),
        ([*PLAN, "--data-parallel", "two"], "invalid int value: 'two'"),
        (["plan"], "exactly one of `tokens_per_step`"),
        (["plan", "--no-such-option"], "unrecognized arguments"),
        ([], "required: COMMAND"),
        (["memory", "a:b"], "--examples-per-step"),
        (["memory", "a:b", "--examples-per-step", "8", "--limit", "lots"], "--limit: expected"),
        (["memory", "no_such_module:b", "--examples-per-step", "8"], "no module"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, message):
    assert command.main(arguments) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert not out


def test_memory(example, capsys):
    assert memory("make_step", "--limit", "1GiB") == 0
    assert "no accumulation is needed" in capsys.readouterr().out
    assert memory("make_step", "--limit", "36KiB", "--json") == 0
    fit = json.loads(capsys.readouterr().out)
    assert 1 < fit["num_microbatches"] < 64
    assert fit["limit_bytes"] == 36 * 1024


def test_memory_says_when_nothing_fits(example, capsys):
    assert memory("make_step", "--limit", "1000", "--json") == 1
    assert json.loads(capsys.readouterr().out)["num_microbatches"] is None


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("make_step", [], "`limit_bytes` is needed"),
        ("make_step", ["--limit", "1GiB", "--data-parallel", "5"], "Use 60 or 65"),
        ("bad", ["--limit", "1GiB"], "must return (fn, args)"),
    ],
)
def test_memory_mistakes(example, capsys, function, options, message):
    assert memory(function, *options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_memory_shows_where_user_code_fails(example):
    with pytest.raises(ValueError, match="of the user's own"):
        memory("broken", "--limit", "1GiB")


def test_in_a_process_of_its_own(example):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env["PYTHONPATH"] = ":".join(p for p in sys.path if p)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "jaxaccum", *arguments],
            cwd=example, capture_output=True, text=True, env=env,
        )  # fmt: skip

    fit = run("memory", "planned_example:devices", "--examples-per-step", "64",
              "--limit", "1MiB", "--devices", "3", "--json")  # fmt: skip
    assert json.loads(fit.stdout)["num_microbatches"] == 1, fit.stderr
    refused = run(*PLAN, "--data-parallel", "3")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
