"""Which devices take part in a collective, and over which axes of the mesh."""

import math
import re
from collections.abc import Mapping

import numpy as np

from jaxaccum.auditing.hlo import Instruction

_RANGE = re.compile(r"^\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"^mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}$")
_AXIS = re.compile(r"'((?:[^'\\]|\\.)*)'=(\d+)")

Groups = list[list[int]]


def replica_groups(text: str, num_devices: int) -> Groups | None:
    """The groups of devices that `replica_groups=` names, as positions in the mesh.

    Three forms are read: lists, `{{0,2},{1,3}}`, where no list means all devices; ranges,
    `[4,2]<=[2,4]T(1,0)`; and axes of a mesh, `mesh['a'=4,'b'=2] {'a'}`.

    Returns:
      The groups, or `None` for a form that is not known.
    """
    if (numbers := _range(text)) is not None:
        return numbers.tolist()
    if found := _MESH.match(text):
        mesh = {name: int(size) for name, size in _AXIS.findall(found[1])}
        chosen = [name.strip("'") for name in found[3].split(",")]
        ids = _range(found[2] or f"[{math.prod(mesh.values())}]")
        if ids is None or not set(chosen) <= set(mesh):
            return None
        last = [i for i, name in enumerate(mesh) if name in chosen]
        places = np.moveaxis(ids.reshape([*mesh.values()]), last, range(-len(last), 0))
        return places.reshape(-1, math.prod(mesh[name] for name in chosen)).tolist()
    if re.match(r"^\{[\d,{} ]*\}$", text):
        groups = [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d, ]+)\}", text)]
        return groups or [list(range(num_devices))]
    return None


def _range(text: str) -> np.ndarray | None:
    """The numbers from 0 in a shape, with its axes in another order, then in the shape wanted."""
    if (found := _RANGE.match(text)) is None:
        return None
    wanted, shape, order = ([int(n) for n in re.findall(r"\d+", part)] for part in found.groups(""))
    numbers = np.arange(math.prod(wanted)).reshape(shape or wanted)
    numbers = numbers.transpose(order) if order else numbers
    return numbers.reshape(wanted) if shape else numbers


def groups_of(collective: Instruction, num_devices: int) -> Groups | None:
    """The groups of devices that exchange data in a collective; `None` where they are unknown."""
    if pairs := collective.attribute("source_target_pairs"):
        return [pair for pair in replica_groups(pairs, num_devices) or [] if pair[0] != pair[1]]
    # The axes of a mesh hold a comma that no bracket encloses.
    found = re.search(r"\breplica_groups=(mesh\[[^\]]*\].*? \{[^}]*\})", collective.attributes)
    text = found[1] if found else collective.attribute("replica_groups")
    return replica_groups(text or "{}", num_devices)


def axes_of(groups: Groups | None, mesh: Mapping[str, int] | None) -> tuple[str, ...] | None:
    """The axes of the mesh, whole or in part, along which the members of a group differ.

    Returns:
      The names in the mesh's order, without axes of size one; `None` where the groups, positions in
      the mesh, or the mesh are unknown.
    """
    if groups is None or not mesh or max(map(max, groups), default=0) >= math.prod(mesh.values()):
        return None
    places = [np.unravel_index(np.array(group, int), [*mesh.values()]) for group in groups]
    varying = (any(np.unique(place[i]).size > 1 for place in places) for i in range(len(mesh)))
    return tuple(name for name, varies in zip(mesh, varying) if varies)
