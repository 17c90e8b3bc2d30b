"""The architecture: which module may import which, and what `import jaxaccum` loads."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

import jaxaccum

PACKAGE = pathlib.Path(jaxaccum.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = ["core", "numerics", "devices", "window", "closing", "stream", "combine", "window_axis"]
TOP = len(ROOMS)
ADAPTERS = dict.fromkeys(("orbax", "linen", "nnx"), TOP + 1)
LAYERS = {room: rank for rank, room in enumerate(ROOMS)} | ADAPTERS
# Where a message of JAX is still read, for want of anything else that it says.
PENDING = (
    "jaxaccum.stream.multi_steps",
    "jaxaccum.training.donation",
    "jaxaccum.diagnostics.equivalence",
)


def module_of(path):
    parts = ("jaxaccum", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): ast.parse(path.read_text()) for path in FILES}


def layer_of(module):
    """The layer by the first name below the package; the root itself stands on all but adapters."""
    parts = module.split(".")
    return LAYERS.get(parts[1], TOP) if len(parts) > 1 else TOP


def imports_of(module):
    """Every module that `module` imports anywhere in its text, with `from a import b` as `a.b`."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inner_imports_of(module):
    """The package's own modules among the imports."""
    for name in imports_of(module):
        if name.split(".")[0] == "jaxaccum":
            yield name if name in MODULES else name.rpartition(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    for imported in inner_imports_of(module):
        assert imported in MODULES, imported
        assert layer_of(imported) <= layer_of(module), f"{module} imports {imported} above it"
        if module != "jaxaccum":
            assert imported != "jaxaccum", f"{module} imports the root package"


def test_imports_make_no_circle():
    graph = {module: set(inner_imports_of(module)) - {module} for module in MODULES}
    assert list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("module", MODULES)
def test_no_private_jax(module):
    private = [name for name in imports_of(module) if name.startswith("jax._src")]
    names = [
        ast.unparse(node)
        for node in ast.walk(MODULES[module])
        if isinstance(node, ast.Attribute) and node.attr == "_src"
    ]
    assert not private + names


@pytest.mark.parametrize("module", MODULES)
def test_one_reader_of_programs(module):
    """JAX's staging interfaces stand in one file, its version differences and our rules in two."""
    staging = [n for n in imports_of(module) if n.startswith(("jax.extend", "jax.interpreters"))]
    names = [n.attr for n in ast.walk(MODULES[module]) if isinstance(n, ast.Attribute)]
    staging += [name for name in names if name == "make_jaxpr"]
    allowed = ("programs", "compat", "in_place")
    assert not staging or module in [f"jaxaccum.core.{name}" for name in allowed]


@pytest.mark.parametrize("module", MODULES)
def test_no_decision_by_a_text(module):
    """Neither the words of a message nor the name of a class decide what is done."""
    bound = {n.name for n in ast.walk(MODULES[module]) if isinstance(n, ast.ExceptHandler)}

    def says(node):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "str":
            return bool(bound & {ast.unparse(arg) for arg in node.args})
        return isinstance(node, ast.Attribute) and node.attr in ("__name__", "f_locals")

    def decides(node):
        calls = isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.")
        return calls or isinstance(node, ast.Compare)

    choices = [node for node in ast.walk(MODULES[module]) if decides(node)]
    decisions = [ast.unparse(node) for node in choices if any(map(says, ast.walk(node)))]
    assert not decisions or module in PENDING


@pytest.mark.parametrize("module", MODULES)
def test_no_assert(module):
    lines = [node.lineno for node in ast.walk(MODULES[module]) if isinstance(node, ast.Assert)]
    assert not lines


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is(module):
    assert ast.get_docstring(MODULES[module])


def test_the_root_namespace_is_small():
    names = [name for name in vars(jaxaccum) if not name.startswith("_")]
    modules = {name.split(".")[1] for name in MODULES if "." in name}
    assert len(set(names) - modules) <= 42


def test_importing_loads_jax_and_optax_and_nothing_heavier():
    heavy = {"flax", "orbax", "matplotlib", "grain", "tensorflow", "torch", "tqdm"}
    code = (
        "import sys, jax, optax; base = set(sys.modules);"
        "import jaxaccum; new = {m.split('.')[0] for m in set(sys.modules) - base};"
        f"print(sorted(new & {heavy}), 'jax' in sys.modules, 'optax' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["[]", "True", "True"]


def test_importing_starts_no_backend():
    """Else `jax.distributed.initialize` and the choice of devices would come too late."""
    modules = sorted(name for name in MODULES if not name.endswith("__main__"))
    code = f"""
import importlib, jax
for name in {modules}:
    importlib.import_module(name)
jax.config.update("jax_num_cpu_devices", 3)  # raises once there is a backend
"""
    subprocess.run([sys.executable, "-c", code], check=True)
