"""The package: what retires, what is imported, what the metadata promise."""

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import jaxaccum
from jaxaccum.core import deprecation

ROOT = pathlib.Path(__file__).parents[1]


def version(text):
    return tuple(int(part) for part in text.split("."))


def test_a_deprecated_name_warns_at_the_callers_line(monkeypatch):
    monkeypatch.setattr(deprecation, "DEPRECATIONS", [])
    old = deprecation.deprecated("ja.old", instead="ja.new", removed_in="9.0.0")(lambda x: x + 1)
    with pytest.warns(DeprecationWarning, match=r"ja\.old .* 9\.0\.0\. Write ja\.new") as seen:
        assert old(1) == 2
    assert seen[0].filename == __file__
    assert [entry.name for entry in deprecation.DEPRECATIONS] == ["ja.old"]


def test_no_deprecated_name_is_overdue():
    late = [
        d
        for d in deprecation.DEPRECATIONS
        if version(d.removed_in) <= version(jaxaccum.__version__)
    ]
    assert not late, f"remove {late}"


def test_the_import_loads_nothing_heavy():
    """Beyond jax, optax and what they load, `import jaxaccum` loads itself and Python's own."""
    script = """
import sys, jax, optax
before = set(sys.modules)
import jaxaccum
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(n for n in new if not n.startswith("jax") and n not in sys.stdlib_module_names))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == jaxaccum.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert newest[1] == jaxaccum.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {newest[1]}" in citation
    assert f'date-released: "{newest[2]}"' in citation
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    for classifier in project["classifiers"]:
        if found := re.search(r":: (3\.\d+)$", classifier):
            assert f'"{found[1]}"' in workflow


def test_links_of_the_readme_are_absolute_on_the_index():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for rule in config["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 15
    source = config["project"]["urls"]["Source"]
    raw = source.replace("github.com", "raw.githubusercontent.com")
    for target in targets:
        assert target.startswith((f"{source}/blob/main/", f"{raw}/main/")), target
