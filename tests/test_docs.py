"""Every Python block of README.md and docs/ runs, and prints what its comments say."""

import contextlib
import importlib
import io
import json
import pathlib
import re
import textwrap

import pytest

import jaxaccum

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^( *)```(.*?)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def blocks(page):
    """`(language, line number of the first line, source)` of each fenced block."""
    text = page.read_text(encoding="utf-8")
    return [
        (match[2], text.count("\n", 0, match.start(3)) + 1, textwrap.dedent(match[3]))
        for match in FENCE.finditer(text)
    ]


CASES = [
    pytest.param(page, line, id=f"{page.relative_to(ROOT).as_posix()}:{line}")
    for page in PAGES
    for language, line, _ in blocks(page)
    if language == "python"
]
_ran = {page: ({}, []) for page in PAGES}  # namespace, and the lines of the blocks that have run


def run(page, line, source):
    code = compile("\n" * (line - 1) + source, page, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, _ran[page][0])
    print(out.getvalue())
    promised = re.findall(r"^ *(?:print\(.*)?\)  # (.*)$", source, re.MULTILINE)
    if promised:
        assert out.getvalue().splitlines() == promised


@pytest.mark.parametrize(("page", "line"), CASES)
def test_block(page, line):
    """The blocks of a page share one namespace; those before this one run first, each once."""
    done = _ran[page][1]
    for language, start, source in blocks(page):
        if language == "python" and start <= line and start not in done:
            run(page, start, source)
            done.append(start)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_is_left_out(page):
    text = page.read_text(encoding="utf-8")
    assert {language for language, _, _ in blocks(page)} <= {"python", "bash", "text"}
    assert len(blocks(page)) * 2 == len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE))
    runnable = [line for language, line, _ in blocks(page) if language == "python"]
    assert runnable == [case.values[1] for case in CASES if case.values[0] == page]
    assert len(runnable) == text.count("```python")
    assert ">>>" not in text


def test_ci_runs_the_set_up_commands_as_written():
    commands = [source.strip() for kind, _, source in blocks(PAGES[0]) if kind == "bash"]
    job, suite = commands
    assert job.startswith("python -m venv ")
    assert job.endswith("/python examples/train_lm.py")
    assert suite.startswith("python -m venv ")
    assert "/python -m pytest" in suite
    assert not any("\n" in command for command in commands)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    pattern = re.search(r"grep '(\^.*)' README\.md", ci)[1]
    readme = PAGES[0].read_text(encoding="utf-8").splitlines()
    assert [line for line in readme if re.match(pattern, line)] == commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs/tutorials").glob("*.md")), ids=lambda p: p.stem
)
def test_notebooks_are_those_of_their_pages(page):
    """`python docs/notebooks.py` was run: the same blocks in the same order, which run here."""
    cells = json.loads(page.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code[1:] == [source.strip() for kind, _, source in blocks(page) if kind == "python"]


def test_every_public_name_is_in_the_reference():
    """A module that says what it holds has a page, or the root holds all of it."""
    pages = "\n".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.rst"))
    for path in sorted((ROOT / "jaxaccum").rglob("*.py")):
        if not re.search("^__all__", path.read_text(encoding="utf-8"), re.MULTILINE):
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if f"automodule:: {module}\n" not in pages:
            names = importlib.import_module(module).__all__
            assert set(names) <= set(jaxaccum.__all__), f"docs/reference has no {module}"


def test_every_page_is_in_a_list():
    """Each page stands in a list of docs/index.md, or of the page that leads to it."""
    lists = [p for p in (ROOT / "docs").rglob("*.md") if "{toctree}" in p.read_text("utf-8")]
    listed = {ROOT / "docs/index.md"}
    for page in lists:
        for body in re.findall(
            r"^:::\{toctree\}\n(.*?)^:::$", page.read_text("utf-8"), re.M | re.S
        ):
            for entry in re.findall(r"^[^:\s]\S*$", body, re.MULTILINE):
                listed |= {p for p in page.parent.glob(f"{entry}.*") if p.suffix in (".md", ".rst")}
    pages = {p for end in ("md", "rst") for p in (ROOT / "docs").rglob(f"*.{end}")}
    assert pages == listed


def test_the_files_that_the_architecture_names_are_there():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+(?:/\w+)*/\w+\.py)`", text)
    assert len(named) > 20
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "jaxaccum" / name).exists(), name
