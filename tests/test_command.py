"""The commands `plan` and `memory`; that of `audit` is tested with the audit."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

import jaxaccum
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
        return helper()

    def helper():
        raise ValueError("of the user's own\\nin two lines")

    def leaves(num_microbatches):
        raise SystemExit(0)

    def talks(num_microbatches):
        import atexit, os, sys
        print("print")
        print("print", file=sys.__stdout__)
        os.system("echo echo")
        os.write(1, b"write")
        atexit.register(print, "at exit")
        return make_step(num_microbatches)

    def undefined(num_microbatches):
        w = jax.ShapeDtypeStruct((32, 32), "float32")
        return ja.value_and_grad(lambda w, x: x.mean(), num_microbatches=2), (w, w)

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


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            "broken",
            "planned_example:broken raised ValueError: of the user's own […] "
            "(planned_example.py:18 in broken, planned_example.py:21 in helper)",
        ),
        ("leaves", "planned_example:leaves exited with 0 (planned_example.py:24 in leaves)"),
        ("undefined", "value_and_grad: the loss function must return"),
    ],
)
def test_user_code_that_fails_is_told_in_one_line(example, capsys, function, said):
    assert memory(function, "--limit", "1GiB") == 2
    out, err = capsys.readouterr()
    assert said in err
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize("text", ["1 +", "import no_such_thing", "raise SystemExit", "0 / 0"])
def test_modules_that_fail_are_told_in_one_line(tmp_path, monkeypatch, capsys, text):
    (tmp_path / "failing_example.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert command.main(["audit", "failing_example:f"]) == 2
    out, err = capsys.readouterr()
    assert "failing_example.py" in err
    assert (out, err.count("\n")) == ("", 1)


def test_mistakes_of_the_library_are_shown_whole(example, monkeypatch):
    def fit_microbatch(*args, **kwargs):
        return {}["no such"]

    fit_microbatch.__code__ = fit_microbatch.__code__.replace(co_filename=command.__file__)
    monkeypatch.setattr(command, "fit_microbatch", fit_microbatch)
    with pytest.raises(KeyError, match="no such"):
        memory("make_step")


def test_in_a_process_of_its_own(example):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env["PYTHONPATH"] = ":".join(p for p in sys.path if p)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "jaxaccum", *arguments],
            cwd=example, capture_output=True, text=True, env=env,
        )  # fmt: skip

    limits = ["--examples-per-step", "64", "--limit", "1MiB", "--json"]
    fit = run("memory", "planned_example:devices", *limits, "--devices", "3")
    assert json.loads(fit.stdout)["num_microbatches"] == 1, fit.stderr
    talks = run("memory", "planned_example:talks", *limits)
    assert json.loads(talks.stdout)["num_microbatches"] == 1, talks.stderr
    assert all(word in talks.stderr for word in ("print", "echo", "write", "at exit"))
    refused = run(*PLAN, "--data-parallel", "3")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)


def test_version_and_help_of_each_command(capsys):
    def printed(*argv):
        with pytest.raises(SystemExit) as left:
            command.main(argv)
        assert left.value.code == 0
        return capsys.readouterr().out

    assert printed("--version") == f"jaxaccum {jaxaccum.__version__}\n"
    names = ("plan", "memory", "audit")
    assert all(f"\n    {name} " in printed("--help") for name in names)
    assert all("--json" in printed(name, "--help") for name in names)


def test_the_installed_command_calls_itself_by_its_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/jaxaccum"])
    assert command.main(["plan", "--tokens"]) == 2
    assert capsys.readouterr().err.startswith("jaxaccum: ")
