"""Reads the text of a compiled program (HLO): computations, instructions and types."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_NAMED = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-zA-Z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(to_apply|calls|body|condition|branch_computations|true_computation|false_computation"
    r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_LONG = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


class Array(NamedTuple):
    """The type of one array.

    Attributes:
      dtype: HLO's name, such as `f32`.
      shape: static sizes.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of the elements, without padding."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            digits = re.search(r"\d+", self.dtype)
            bits = int(digits[0]) if digits else 0
        return -(-self.size * bits // 8)

    @property
    def inexact(self) -> bool:
        """Whether the elements are floating or complex numbers."""
        return re.match(r"(f|bf|c)\d", self.dtype) is not None

    @property
    def dtype_name(self) -> str:
        """The name that NumPy uses, such as `float32`."""
        found = re.fullmatch(r"(bf|f|s|u|c)(\d+)(.*)", self.dtype)
        if found is None:
            return {"pred": "bool"}.get(self.dtype, self.dtype)
        if found[3]:  # float8_e4m3fn
            return f"float{found[2]}_{found[3]}"
        return f"{_LONG[found[1]]}{found[2]}"

    def __str__(self) -> str:
        return f"{self.dtype_name}[{','.join(map(str, self.shape))}]"


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
      name: without the percent sign.
      type: its text.
      opcode: such as `all-reduce-start`.
      operands: names, in order.
      inside: the text between the parentheses, which a `parameter` or `constant` needs.
      attributes: the text after them.
      is_root: whether it is its computation's result.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    inside: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """The computations that this instruction runs, by the attribute that names them."""
        bare = _QUOTED.sub('""', self.attributes)
        return {
            key: tuple(name.strip().lstrip("%") for name in names.strip("{}").split(","))
            for key, names in _CALLED.findall(bare)
        }

    @property
    def op_name(self) -> str:
        """The path of the operation in the traced program; empty where unknown."""
        found = _OP_NAME.search(self.attributes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @property
    def kind(self) -> str | None:
        """The kind of collective that starts here; `None` for anything else."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in KINDS else None

    def attribute(self, name: str) -> str:
        """The text of one attribute, up to the comma that ends it; empty where it is absent."""
        found = re.search(rf"\b{name}=", self.attributes)
        return _until_comma(self.attributes[found.end() :]) if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions.

    Attributes:
      name: without the percent sign.
      instructions: by name, in order.
      root: the result.
    """

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def type_of(self, name: str) -> tuple[Array, ...]:
        """The arrays of an instruction's result."""
        return arrays(self.instructions[name].type) if name in self.instructions else ()


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      header: the line of the module.
      computations: by name.
      entry: where it starts.
    """

    header: str
    computations: dict[str, Computation]
    entry: Computation

    @property
    def name(self) -> str:
        """The module's name, such as `jit_step`."""
        found = re.match(r"HloModule ([^\s,]+)", self.header)
        return found[1] if found else ""

    @property
    def num_devices(self) -> int:
        """Replicas times partitions."""
        counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", self.header)
        return math.prod(map(int, counts))

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The entry's parameters by number."""
        found = (i for i in self.entry.instructions.values() if i.opcode == "parameter")
        return {int(i.inside): i for i in found}

    def aliased(self) -> frozenset[int]:
        """The numbers of the entry's parameters whose buffers outputs reuse."""
        found = re.search(r"\binput_output_alias=", self.header)
        text = _until_comma(self.header[found.end() :]) if found else ""
        return frozenset(int(n) for n in re.findall(r"\((\d+), \{", text))


def parse(text: str) -> Program:
    """Reads what `compiled.as_text()` returns.

    Raises:
      ValueError: the text has no entry computation.
    """
    header, computations, entry = "", {}, ""
    current: str | None = None
    body: dict[str, Instruction] = {}
    for line in text.splitlines():
        if line.startswith("HloModule"):
            header = line
        elif line.startswith("}") and current is not None:
            root = next((i for i in body.values() if i.is_root), None)
            if root is not None:
                computations[current] = Computation(current, body, root)
            current = None
        elif current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                body[instruction.name] = instruction
        elif not line.startswith(" ") and (found := _HEADER.match(line)):
            current, body = found[2], {}
            entry = found[2] if found[1] else entry
    if entry not in computations:
        raise ValueError(
            "audit: the compiled program's text has no entry computation, got "
            f"{text[:60]!r}. Pass a function, or what `jax.jit(fn).lower(...)` returns."
        )
    return Program(header, computations, computations[entry])


def _instruction(line: str) -> Instruction | None:
    found = _NAMED.match(line)
    if found is None:
        return None
    rest = re.sub(r"/\*.*?\*/", "", line[found.end() :])
    end = _closing(rest) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if end < 0 or opcode is None:
        return None
    close = opcode.end() - 1 + _closing(rest[opcode.end() - 1 :])
    inside = rest[opcode.end() : close - 1]
    operands = tuple(_OPERAND.findall(_QUOTED.sub('""', inside)))
    return Instruction(
        found[2], rest[:end], opcode[1], operands, inside, rest[close:], found[1] is not None
    )


def _closing(text: str) -> int:
    """The position after the bracket that closes the one `text` starts with."""
    depth = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[(){}\[\]]', text):
        if found[0] in "([{":
            depth += 1
        elif found[0] in ")]}":
            depth -= 1
            if not depth:
                return found.end()
    return len(text)


def _until_comma(text: str) -> str:
    """`text` up to the first comma that no bracket and no quote holds."""
    depth = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]', text):
        if found[0] in "([{":
            depth += 1
        elif found[0] in ")]}":
            depth -= 1
        elif found[0] == "," and depth <= 0:
            return text[: found.start()]
    return text
