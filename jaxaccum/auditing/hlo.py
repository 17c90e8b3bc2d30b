"""Reads the text of a compiled program (HLO): computations, instructions and types."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

KINDS = frozenset(
    """all-reduce reduce-scatter all-gather all-to-all ragged-all-to-all collective-permute
    collective-broadcast""".split()  # noqa: SIM905
)

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\], ]')
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_NAMED = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(to_apply|calls|body|condition|branch_computations|true_computation|false_computation"
    r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_LONG = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


class Array(NamedTuple):
    """The type of one array: HLO's name of the dtype, such as `f32`, and static sizes."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of the elements, without padding."""
        digits = re.search(r"\d+", self.dtype)
        bits = int(digits[0]) if digits else 8 * (self.dtype == "pred")
        return -(-self.size * bits // 8)

    @property
    def inexact(self) -> bool:
        """Whether the elements are floating or complex numbers."""
        return re.match(r"(f|bf|c)\d", self.dtype) is not None

    @property
    def dtype_name(self) -> str:
        """The name that NumPy uses, such as `float32` or `float8_e4m3fn`."""
        found = re.fullmatch(r"(bf|f|s|u|c)(\d+)(.*)", self.dtype)
        if found is None:
            return {"pred": "bool"}.get(self.dtype, self.dtype)
        return f"{_LONG[found[1]]}{found[2]}{'_' if found[3] else ''}{found[3]}"

    def __str__(self) -> str:
        return f"{self.dtype_name}[{','.join(map(str, self.shape))}]"


@functools.lru_cache(4096)
def arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a type, those of a tuple in order."""
    return tuple(
        Array(name, tuple(int(re.sub(r"\D", "", d)) for d in dims.split(",") if d.strip()))
        for name, dims in _ARRAY.findall(text)
    )


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign, like all names here.
      arrays: the types of the result, those of tuples in order.
      opcode: such as `all-reduce-start`.
      operands: names, in order.
      inside: the text between the parentheses, which a `parameter` or `constant` needs.
      attributes: the text after them.
      called: the computations that it runs, by the attribute that names them.
    """

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    inside: str
    attributes: str
    called: dict[str, tuple[str, ...]]

    @property
    def kind(self) -> str | None:
        """The kind of collective that starts here; `None` for anything else."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in KINDS else None

    @property
    def op_name(self) -> str:
        """The path of the operation in the traced program; empty where unknown."""
        found = _OP_NAME.search(self.attributes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    def attribute(self, name: str) -> str:
        """The text of one attribute, up to its comma; empty where it is absent."""
        return _attribute(self.attributes, name)


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions, by name and in order, the root of which is the result."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by number."""
        return {int(i.inside): i for i in self.instructions.values() if i.opcode == "parameter"}

    def type_of(self, name: str) -> tuple[Array, ...]:
        """The arrays of an instruction's result."""
        return self.instructions[name].arrays if name in self.instructions else ()


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      name: the module's, such as `jit_step`.
      num_devices: replicas times partitions.
      aliased: the numbers of the entry's parameters whose buffers outputs reuse.
      computations: by name.
      entry: where it starts.
    """

    name: str
    num_devices: int
    aliased: frozenset[int]
    computations: dict[str, Computation]
    entry: Computation


def parse(text: str) -> Program:
    """Reads what `compiled.as_text()` returns.

    Raises:
      ValueError: the text has no entry computation.
    """
    header, computations, entry = "", {}, ""
    current, root = "", ""
    body: dict[str, Instruction] = {}
    for line in text.splitlines():
        if line.startswith("HloModule"):
            header = line
        elif line.startswith("}") and current:
            if root:
                computations[current] = Computation(current, body, body[root])
            current = ""
        elif current and (found := _NAMED.match(line)):
            body[found[2]] = _instruction(found[2], line[found.end() :])
            root = found[2] if found[1] else root
        elif not line.startswith(" ") and (found := _HEADER.match(line)):
            current, root, body = found[2], "", {}
            entry = found[2] if found[1] else entry
    if entry not in computations:
        raise ValueError(
            "audit: the compiled program's text has no entry computation, got "
            f"{text[:60]!r}. Pass a function, or what `jax.jit(fn).lower(...)` returns."
        )
    name = re.match(r"HloModule ([^\s,]+)", header)
    counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header)
    aliased = re.findall(r"\((\d+), \{", _attribute(header, "input_output_alias"))
    return Program(
        name[1] if name else "",
        math.prod(map(int, counts)),
        frozenset(map(int, aliased)),
        computations,
        computations[entry],
    )


def _instruction(name: str, text: str) -> Instruction:
    text = re.sub(r"/\*.*?\*/", "", text)
    end = _until(text, " ")
    opcode, _, given = text[end + 1 :].partition("(")
    close = _until(given, ")")
    inside, attributes = given[:close], given[close + 1 :]
    operands = tuple(_NAME.findall(_QUOTED.sub("", inside)))
    called = _CALLED.findall(_QUOTED.sub("", attributes))
    inner = {key: tuple(re.findall(r"[\w.\-]+", names)) for key, names in called}
    return Instruction(name, arrays(text[:end]), opcode, operands, inside, attributes, inner)


def _attribute(text: str, name: str) -> str:
    """What follows `name=` up to the comma that ends it; empty where it is absent."""
    found = re.search(rf"\b{name}=", text)
    rest = text[found.end() :] if found else ""
    return rest[: _until(rest, ",")]


def _until(text: str, stop: str) -> int:
    """The position of the first `stop` that no bracket and no quote holds, or the end."""
    depth = 0
    for found in _TOKEN.finditer(text):
        if not depth and found[0] == stop:
            return found.start()
        depth += (found[0] in "([{") - (found[0] in ")]}")
    return len(text)
