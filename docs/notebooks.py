"""Makes a notebook of each tutorial, to open in Jupyter or Colab: `python docs/notebooks.py`."""

import json
import pathlib
import re

FOLDER = pathlib.Path(__file__).parent / "tutorials"
INSTALL = """try:
    import jaxaccum
except ImportError:
    %pip install -q jaxaccum[examples]"""
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def cells(page: str) -> list[tuple[str, str]]:
    """The kind and the text of each cell: what stands between the blocks, and the blocks."""
    page = re.sub(r" \[The same as a notebook\]\(\S+\)\.", "", page)
    parts = BLOCK.split(page)
    kinds = ["markdown", "code"] * len(parts)
    title, text = parts[0].split("\n", 1)
    parts[0] = text
    both = [("markdown", title), ("code", INSTALL), *zip(kinds, parts)]
    return [(kind, text.strip()) for kind, text in both if text.strip()]


def notebook(page: str) -> str:
    """The notebook of a page, as JSON."""
    out = []
    for number, (kind, text) in enumerate(cells(page)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        out.append(cell | {"source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": out, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.md")):
        path.with_suffix(".ipynb").write_text(notebook(path.read_text("utf-8")), "utf-8")
