"""The documentation as a site: `sphinx-build -W docs site`."""

import re

import jaxaccum

project = "jaxaccum"
author = "the jaxaccum authors"
project_copyright = f"2026, {author}"
release = version = jaxaccum.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

default_role = "code"
autodoc_member_order = "alphabetical"
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "jaxaccum"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False


CODE = re.compile(r"(?<![`\w])`([^`]+)`(\w?)")


def skip_member(app, what, name, thing, skip, options):
    """Leaves out what comes from elsewhere, and on other pages what the root's page has."""
    module = getattr(thing, "__module__", None) or ""
    if callable(thing) and not module.startswith("jaxaccum"):
        return True
    on_root = app.env.current_document.docname == "reference/jaxaccum"
    if what == "module" and not on_root and getattr(jaxaccum, name, None) is thing:
        return True
    return skip


def as_rst(app, what, name, thing, options, lines):
    """Docstrings mark code by single backticks, also before a plural's letter."""
    text = CODE.sub(lambda m: f"``{m[1]}``" + (f"\\ {m[2]}" if m[2] else ""), "\n".join(lines))
    lines[:] = re.sub(r"\|(?=\w)(.*?)\|", r"\\|\1\\|", text).split("\n")


def setup(app):
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-docstring", as_rst, priority=400)
