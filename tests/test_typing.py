"""What type checkers say of a user's script, and that the declarations are those of the checks."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typed_script

from jaxaccum.window import options
from jaxaccum.window.arguments import Given, Options

SCRIPT = Path(typed_script.__file__)
ROOT = SCRIPT.parents[1]


def lines_of_mypy(folder):
    pytest.importorskip("mypy", reason="mypy is not installed")
    config = folder / "mypy.ini"  # Optax and Flax have no types for others
    others = "".join(f"[mypy-{n}.*]\nignore_missing_imports = true\n" for n in ("optax", "flax"))
    config.write_text("[mypy]\nstrict = true\n" + others)
    cache = ROOT / ".mypy_cache" / "scripts"
    command = [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", cache]
    found = run(folder, [*command, "script.py"])
    return {int(n) for n in re.findall(r"^script\.py:(\d+): error:", found, re.MULTILINE)}


def lines_of_pyright(folder):
    pytest.importorskip("pyright", reason="pyright is not installed")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    found = json.loads(run(folder, [*command, "script.py"]))
    errors = [d for d in found["generalDiagnostics"] if d["severity"] == "error"]
    return {d["range"]["start"]["line"] + 1 for d in errors}


def run(folder, command):
    """What a checker of a package that is installed says of a script outside of it."""
    (folder / "script.py").write_text(SCRIPT.read_text())
    named = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=named, capture_output=True, text=True, timeout=300
    )
    assert done.stdout, done.stderr
    return done.stdout


@pytest.mark.parametrize("checker", [lines_of_mypy, lines_of_pyright])
def test_a_checker_finds_every_planted_mistake_and_nothing_else(checker, tmp_path):
    lines = SCRIPT.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong" in line}
    found = checker(tmp_path)
    said = {number: lines[number - 1] for number in found ^ wrong}
    assert not said


def test_what_checkers_find_right_runs():
    typed_script.right()


def test_every_declared_option_is_checked_somewhere():
    """A declaration without a check, or a check without a declaration, is no option."""
    declared = {*options.AccumulateOptions.__annotations__, *options.CutOptions.__annotations__}
    checked = {field.name for field in dataclasses.fields(Options)} - {"function", "loss_fn"}
    assert declared == checked
    assert set(options.SumsCall.__annotations__) == set(Given._fields)
