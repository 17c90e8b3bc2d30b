"""Which devices take part in a collective, and over which axes of the mesh."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from jaxaccum.auditing.hlo import Instruction

_IOTA = re.compile(r"^\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"^mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}$")
_AXIS = re.compile(r"'((?:[^'\\]|\\.)*)'=(\d+)")
_REFERENCE = re.compile(r"'((?:[^'\\]|\\.)*)'(?::\((\d+)\)(\d+))?")

Groups = list[list[int]]


def replica_groups(text: str, num_devices: int) -> Groups | None:
    """The groups of devices that `replica_groups=` names, as positions in the mesh.

    Three forms are read: lists, `{{0,2},{1,3}}`, where no list means all devices; ranges,
    `[4,2]<=[2,4]T(1,0)`; and axes of a mesh, `mesh['a'=4,'b'=2] {'a'}`, also parts of an axis,
    `{'a':(1)2}`.

    Args:
      text: what follows `replica_groups=`.
      num_devices: how many devices run the program.

    Returns:
      The groups, or `None` for a form that is not known.
    """
    text = text.strip()
    if found := _MESH.match(text):
        return _mesh_groups(found[1], found[2], found[3])
    if found := _IOTA.match(text):
        return _range(found[1], found[2], found[3]).tolist()
    if re.match(r"^\{[\d,{} ]*\}$", text):
        groups = [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d, ]+)\}", text)]
        return groups or [list(range(num_devices))]
    return None


def permute_groups(text: str) -> Groups | None:
    """The pairs of `source_target_pairs=`, those from a device to itself left out."""
    if not re.match(r"^\{[\d,{} ]*\}$", text.strip()):
        return None
    pairs = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text)]
    return [[a, b] for a, b in pairs if a != b]


def groups_of(collective: Instruction, num_devices: int) -> Groups | None:
    """The groups of devices that exchange data in a collective; `None` where they are unknown."""
    if pairs := collective.attribute("source_target_pairs"):
        return permute_groups(pairs)
    text = text_of(collective)
    return replica_groups(text, num_devices) if text else [list(range(num_devices))]


def text_of(collective: Instruction) -> str:
    """How the compiler writes the groups of a collective; empty where it names none."""
    if pairs := collective.attribute("source_target_pairs"):
        return pairs
    # This form holds a comma that no bracket encloses.
    found = re.search(r"\breplica_groups=(mesh\[[^\]]*\].*? \{[^}]*\})", collective.attributes)
    return found[1] if found else collective.attribute("replica_groups")


def axes_of(groups: Groups | None, mesh: Mapping[str, int] | None) -> tuple[str, ...] | None:
    """The axes of the mesh, whole or in part, along which the members of a group differ.

    Args:
      groups: positions of devices, in the order of the mesh.
      mesh: the size of each axis, in order.

    Returns:
      The names in the mesh's order, without axes of size one; `None` where the groups or the mesh
      are unknown.
    """
    if groups is None or not mesh:
        return None
    names, shape = tuple(mesh), tuple(mesh.values())
    if any(not 0 <= n < math.prod(shape) for group in groups for n in group):
        return None
    varying: set[int] = set()
    for group in groups:
        places = np.unravel_index(np.array(group, int), shape)
        varying |= {i for i, place in enumerate(places) if np.unique(place).size > 1}
    return tuple(names[i] for i in sorted(varying))


def _range(dims: str, source: str | None, order: str | None) -> np.ndarray:
    shape = _ints(dims)
    numbers = np.arange(math.prod(shape)).reshape(_ints(source) if source else shape)
    if order:
        numbers = numbers.transpose(_ints(order))
    return numbers.reshape(shape) if source else numbers


def _mesh_groups(axes: str, devices: str | None, references: str) -> Groups | None:
    """The groups of a mesh's axes; an axis of which a part is named is split into factors."""
    mesh = [(name, int(size)) for name, size in _AXIS.findall(axes)]
    number = math.prod(size for _, size in mesh)
    if devices is None:
        ids = np.arange(number)
    elif found := _IOTA.match(devices):
        ids = _range(found[1], found[2], found[3])
    elif re.match(r"^[\d, ]+$", devices):
        ids = np.array(_ints(devices))
    else:
        return None
    parts: dict[str, list[tuple[int, int]]] = {}
    for name, before, size in _REFERENCE.findall(references):
        whole = dict(mesh).get(name)
        if whole is None:
            return None
        first = int(before or 1)
        parts.setdefault(name, []).append((first, first * int(size or whole)))
    shape: list[int] = []
    inside: list[int] = []
    for name, size in mesh:
        cuts = sorted({1, size, *itertools.chain(*parts.get(name, []))})
        for low, high in itertools.pairwise(cuts):
            if any(a <= low and high <= b for a, b in parts.get(name, [])):
                inside.append(len(shape))
            shape.append(high // low)
    if ids.size != number or math.prod(shape) != number:
        return None
    outside = [i for i in range(len(shape)) if i not in inside]
    width = math.prod(shape[i] for i in inside)
    moved = ids.reshape(shape or (1,)).transpose([*outside, *inside] or (0,))
    return moved.reshape(-1, width).tolist()


def _ints(text: str | Sequence[int]) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",")) if isinstance(text, str) else tuple(text)
