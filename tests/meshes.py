"""Where the rows of a window go: one device, the axes of a mesh, or `pmap`.

A `Setup` is a mesh, the axes over which rows are split, and what happens on its other axis.
`recording` keeps the compiled programs of what a setup runs, `collectives` reads them.
"""

import contextlib
import re
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = 8
WHOLE = P()
_TYPES = {"A": AxisType.Auto, "E": AxisType.Explicit}


class Setup(NamedTuple):
    """Where the rows go.

    Attributes:
      types: `A` (Auto) or `E` (Explicit) for each axis of the mesh: `data` of 8 devices, or `data`
        of 4 and `model` of 2. Empty for one device and for `pmap`.
      names: the axes over which rows are split; None for one device.
      check_vma: whether `shard_map` checks replication.
      manual: whether the model axis is manual too; otherwise the parameters are split over it.
      context: whether the mesh is set in the context or comes with the arguments.
    """

    types: str
    names: str | tuple[str, ...] | None = "data"
    check_vma: bool = True
    manual: bool = False
    context: bool = True

    def __str__(self):
        if not self.types:
            return "local" if self.names is None else "pmap"
        words = [self.types, "".join(self.names) if self.names != "data" else ""]
        words += ["manual" if self.manual else "", "" if self.check_vma else "unchecked"]
        return "-".join([w for w in [*words, "" if self.context else "arguments"] if w])

    @property
    def mesh(self):
        shape = (8,) if len(self.types) == 1 else (4, 2)
        types = tuple(_TYPES[t] for t in self.types)
        return jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=types)

    @property
    def manual_axes(self):
        names = (self.names,) if isinstance(self.names, str) else self.names
        return set(names) | ({"model"} if self.manual else set())

    @property
    def number(self):
        """Over how many devices the rows are split."""
        if self.names is None:
            return 1
        return 4 if len(self.types) == 2 and self.names == "data" else DEVICES

    @property
    def tensor_parallel(self):
        return len(self.types) == 2 and "model" not in self.manual_axes

    def place(self, params, batch):
        """The arguments on the mesh: rows split, the bilinear model's parameters too where its
        model axis is automatic."""
        specs = {"up": P(None, "model"), "down": P("model")} if self.tensor_parallel else P()
        return self.put(params, specs), self.put(batch, P(self.names))

    def put(self, tree, spec):
        """The tree on the mesh; `spec` is one spec or a tree of them."""
        if not self.types:
            return tree
        if isinstance(spec, P):
            return jax.tree.map(lambda x: self._put(x, spec), tree)
        return jax.tree.map(self._put, tree, spec)

    def _put(self, tree, spec):
        return jax.device_put(tree, NamedSharding(self.mesh, spec))

    def shard(self, fn, in_specs, out_specs):
        """The compiled `shard_map` of `fn`."""
        mapped = jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self.manual_axes,
            check_vma=self.check_vma,
        )
        return watched(jax.jit(mapped))

    def each(self, fn, out_specs=WHOLE):
        """`fn(params, batch)` over the devices; results are the same on each, or as specified."""
        if self.names is None:
            return watched(jax.jit(fn))
        if not self.types:
            return one_result(pmapped(fn))
        compiled = self.shard(fn, (P(), P(self.names)), out_specs)
        return lambda params, batch: compiled(*self.place(params, batch))

    def active(self):
        return jax.set_mesh(self.mesh) if self.context and self.types else contextlib.nullcontext()


LOCAL = Setup("", names=None)
PMAP = Setup("")


def manual_setups(types, *, manual=(False,)):
    """Setups for `shard_map`, checked and unchecked."""
    return [
        Setup(t, check_vma=check, manual=m)
        for t in types
        for m in manual
        for check in (True, False)
    ]


def pmapped(fn):
    """`pmap` of `fn(params, batch)`: rows split over all devices, parameters on each."""
    mapped = watched(jax.pmap(fn, axis_name="data", in_axes=(None, 0)))
    return lambda params, batch: mapped(params, per_device(batch))


def per_device(batch):
    """Rows `[64, ...]` as `[8, 8, ...]`."""
    return jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)


def one_result(fn):
    """The result of a `pmap`, after a check that all devices have the same."""

    def one(x):
        x = np.asarray(x)
        assert (bits(x) == bits(x[:1])).all()
        return x[0]

    return lambda *args: jax.tree.map(one, fn(*args))


def bits(x):
    """The bytes of an array, one row for each entry of axis 0."""
    x = np.ascontiguousarray(x)
    return np.frombuffer(x.tobytes(), np.uint8).reshape(x.shape[0], -1)


# Compiled programs


_texts: list[str] | None = None


@contextlib.contextmanager
def recording():
    """A list that receives the text of every program that the routes run inside."""
    global _texts
    _texts = []
    try:
        yield _texts
    finally:
        _texts = None


def watched(fn):
    """`fn`, a jitted function, whose program `recording` can read."""

    def call(*args, **named):
        if _texts is None:
            return fn(*args, **named)
        compiled = fn.lower(*args, **named).compile()
        _texts.append(compiled.as_text())
        return compiled(*args, **named)

    return call


class Collective(NamedTuple):
    """One collective operation of a compiled program.

    Attributes:
      kind: `all-reduce` and the like.
      bytes: the size of its result on one device.
      in_loop: whether a `while` runs it.
      in_branch: whether a `conditional` runs it.
    """

    kind: str
    bytes: int
    in_loop: bool
    in_branch: bool


_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    r"|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)
_CALLED = re.compile(r"(\w+)=(?:\{(%[^}]*)\}|%([\w.-]+))")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


def collectives(text):
    """All collectives of an optimised HLO text, with the control flow around them."""
    lines, entry, name = {}, None, None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head.group(2)
            lines[name] = []
            entry = name if head.group(1) else entry
        elif name is not None:
            lines[name].append(line)
    found = []

    def visit(name, in_loop, in_branch):
        for line in lines[name]:
            if match := _COLLECTIVE.search(line):
                size = sum(_bytes(*shape) for shape in _SHAPE.findall(match.group(1)))
                found.append(Collective(match.group(2), size, in_loop, in_branch))
            for role, several, one in _CALLED.findall(line):
                if role == "to_apply" and " call(" not in line:
                    continue
                loop = in_loop or role in ("body", "condition")
                branch = in_branch or role.endswith(("computation", "computations"))
                for inner in re.findall(r"[\w.-]+", several or one):
                    if inner in lines:
                        visit(inner, loop, branch)

    visit(entry, False, False)
    return found


def _bytes(dtype, shape):
    number = int(np.prod([int(n) for n in shape.split(",") if n], dtype=int))
    return number * _WIDTHS.get(dtype, 4)
