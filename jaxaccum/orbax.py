"""Checkpoints of a run, in the middle of a window too, with Orbax: `from jaxaccum import orbax`.

What a run needs to go on bit for bit is more than its parameters: the open window's sums and
counters, the optimizer state, the random key, and where the loader stood, counted in micro-batches
and in its own words. All of it is written at once or not at all. The files are Orbax's own.
"""

import json
import os
import pathlib
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxaccum import interop
from jaxaccum.core import checks
from jaxaccum.stream.state import LOCAL, MultiStepsState

__all__ = ["Checkpoints", "Run"]

_FORMAT = 1


class Run(NamedTuple):
    """What a run needs to go on.

    Attributes:
      params: the parameters.
      state: the state of `multi_steps` (alone or inside `optax.chain` and the like) or of
        `train_step`.
      key: a PRNG key, typed or raw, or a tree of them; `None` for none.
      micro_batches: how many micro-batches the loader has handed out; an int.
      loader: what the loader says of its position, for one that counting alone does not bring
        back: `iterator.get_state()` of grain, `state_dict()` of others. Anything that JSON can
        hold; it comes back as JSON gives it, tuples as lists and keys as text.
    """

    params: Any
    state: Any
    key: Any = None
    micro_batches: int = 0
    loader: Any = None


class Checkpoints:
    """The checkpoints in one directory; close it, or use it in a `with` statement.

    Each is written to a temporary folder that is renamed when it is complete, so that a process
    that is killed leaves the last complete one.

    Args:
      directory: where they lie; made if missing. All hosts of a run name the same.
      max_to_keep: how many are kept; older ones are deleted.

    Raises:
      NotADirectoryError: there is a file in the place of the directory.

    Example:
      >>> import tempfile, jaxaccum as ja, jax, jax.numpy as jnp, optax
      >>> tx, w = ja.multi_steps(optax.sgd(1.0), 4), jnp.float32(0)
      >>> _, state = tx.update(jnp.float32(3), tx.init(w), w)
      >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
      ...     checkpoints.save(Run(w, state, jax.random.key(0), micro_batches=1))
      ...     again = checkpoints.restore(Run(w, tx.init(w), jax.random.key(1)))
      >>> print(again.micro_batches, again.state.micro_step, again.state.grad_sum)
      1 1 3.0
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_to_keep: int = 2):
        checks.integer("Checkpoints", "max_to_keep", max_to_keep)
        directory = pathlib.Path(directory).absolute()
        for path in (directory, *directory.parents):
            if path.exists() and not path.is_dir():
                raise NotADirectoryError(
                    f"Checkpoints: `directory` must be a folder, got {str(directory)!r}, where "
                    f"{str(path)!r} is a file. Name another one."
                )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(directory, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """The number of micro-batches of the last complete checkpoint; `None` if there is none."""
        step: int | None = self._manager.latest_step()
        return step

    def save(self, run: Run) -> None:
        """Writes `run`, labelled with its `micro_batches`; returns when it is complete.

        Raises:
          TypeError: `run` is not a `Run` of arrays, or JSON cannot hold its `loader`.
          ValueError: there is a checkpoint at this or a later micro-batch.
        """
        position = _position("save", run)
        if self.latest is not None and position <= self.latest:
            raise ValueError(
                f"save: `micro_batches` is {position}, but there is a checkpoint at {self.latest}. "
                "Count the micro-batches on from the one that was restored."
            )
        tree = _tree(run)
        checks.arrays("save", tree, name="run")
        table = [_entry(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
        notes = {"format": _FORMAT, "micro_batches": position, "leaves": table}
        notes["loader"] = _plain(run.loader)
        notes["checksum"] = _checksum(notes)
        self._manager.save(
            position,
            args=ocp.args.Composite(
                run=ocp.args.StandardSave(jax.tree.map(_data, tree)), notes=ocp.args.JsonSave(notes)
            ),
        )
        self._manager.wait_until_finished()

    def restore(self, like: Run, *, micro_batches: int | None = None) -> Run:
        """A checkpoint as a `Run`, laid out like `like`, bit for bit what was saved.

        A window that was open over another number of devices is folded onto those of `like`, see
        `ja.interop.reshape_devices`.

        Args:
          like: what a fresh run begins with; arrays or `jax.ShapeDtypeStruct`s. Its values and its
            `micro_batches` are not looked at.
          micro_batches: which checkpoint; the last complete one by default.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          ValueError: structure, shape, dtype or kind of key of a leaf differ, and nothing was read
            yet; or the checkpoint is damaged.
        """
        _position("restore", like)
        position = self.latest if micro_batches is None else micro_batches
        kept = list(self._manager.all_steps())
        if position is None or position not in kept:
            sought = "" if position is None else f" at micro-batch {position}"
            raise FileNotFoundError(
                f"restore: there is no checkpoint{sought} in {self._manager.directory}, only "
                f"{kept}. Ask `checkpoints.latest` first."
            )
        notes = self._read(position, lambda: self._notes(position))
        tree, table = _tree(like), notes["leaves"]
        moved = _check(tree, table, position)
        leaves, structure = jax.tree.flatten(tree)
        wanted = [
            jax.ShapeDtypeStruct(
                tuple(entry["shape"]), jnp.dtype(entry["dtype"]), sharding=_place(leaf, alike)
            )
            for leaf, entry, alike in zip(leaves, table, moved, strict=True)
        ]
        args = ocp.args.Composite(
            run=ocp.args.StandardRestore(jax.tree.unflatten(structure, wanted))
        )
        found = self._read(position, lambda: self._manager.restore(position, args=args).run)
        values = [
            jax.random.wrap_key_data(value, impl=entry["key"]) if entry["key"] else value
            for value, entry in zip(jax.tree.leaves(found), table, strict=True)
        ]
        run = jax.tree.unflatten(structure, values)
        if not all(moved):
            run["state"] = jax.tree.map(_onto, run["state"], like.state, is_leaf=_is_stream)
        return Run(**run, micro_batches=position, loader=notes["loader"])

    def _notes(self, position: int) -> Any:
        """What was noted of a checkpoint's leaves."""
        args = ocp.args.Composite(notes=ocp.args.JsonRestore())
        notes = self._manager.restore(position, args=args).notes
        if notes.pop("checksum") != _checksum(notes):
            raise ValueError("its notes were changed")
        return notes

    def _read(self, position: int, read_fn: Callable[[], Any]) -> Any:
        """What `read_fn` reads of a checkpoint; of one that it cannot read its name."""
        try:
            return read_fn()
        except Exception as error:  # of many libraries, and of many types
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            earlier = [step for step in self._manager.all_steps() if step < position]
            remedy = "there is none before it"
            if earlier:
                remedy = f"restore the one before it with `micro_batches={max(earlier)}`"
            raise ValueError(
                f"restore: the checkpoint at micro-batch {position} in {self._manager.directory} "
                f"cannot be read ({reason}). Delete its folder; {remedy}."
            ) from error


def _checksum(notes: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(notes, sort_keys=True).encode())


def _position(function: str, run: Any) -> int:
    if not isinstance(run, Run):
        raise TypeError(f"{function}: expected a `Run`, got {checks.describe(run)}.")
    return checks.integer(function, "micro_batches", run.micro_batches, minimum=0)


def _plain(loader: Any) -> Any:
    """A loader's position as JSON gives it back."""
    try:
        return json.loads(json.dumps(loader))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"save: `loader` must be what JSON can hold, got {checks.describe(loader)} ({error}). "
            "Turn arrays into lists and bytes into text, `base64.b64encode(data).decode()`."
        ) from error


def _tree(run: Run) -> dict[str, Any]:
    return {"params": run.params, "state": run.state, "key": run.key}


def _data(leaf: Any) -> Any:
    """A leaf as an array that can be written."""
    return jax.random.key_data(leaf) if checks.is_key(leaf) else jnp.asarray(leaf)


def _entry(path: Any, leaf: Any) -> dict[str, Any]:
    """What is noted of a leaf, to be compared before anything is read."""
    data = _data(leaf)
    return {
        "path": jax.tree_util.keystr(path),
        "shape": list(data.shape),
        "dtype": str(data.dtype),
        "key": str(jax.random.key_impl(leaf)) if checks.is_key(leaf) else None,
        "type": checks.describe(leaf) if hasattr(leaf, "dtype") else checks.describe(data),
    }


def _check(tree: Any, table: list[dict[str, Any]], position: int) -> list[bool]:
    """For each leaf whether it has the shape that was saved, or that of another set of devices."""
    local = _device_local(tree)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    saved = {entry["path"]: entry for entry in table}
    problems = [f"`{path}` is not in the checkpoint" for path in wanted if path not in saved]
    problems += [f"`{path}` of the checkpoint has no place" for path in saved if path not in wanted]
    alike = []
    for (path, leaf), is_local in zip(leaves, jax.tree.leaves(local), strict=True):
        name = jax.tree_util.keystr(path)
        if name not in saved:
            continue
        here = checks.describe(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf))
        there, dtype = saved[name]["type"], here.partition("[")[0]
        shape, found = np.shape(leaf), tuple(saved[name]["shape"])
        rest = {shape[1:], shape} & {found[1:], found} if is_local else set()
        alike.append(here == there)
        if here != there and not (rest and dtype == there.partition("[")[0]):
            problems.append(f"`{name}` is {there} in the checkpoint, {here} in `like`")
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"restore: the checkpoint at micro-batch {position} does not fit `like`: "
            f"{'; '.join(problems[:3])}{more}. Make `like` with the same model, optimizer and "
            "options."
        )
    return alike


def _is_stream(node: Any) -> bool:
    return isinstance(node, MultiStepsState)


def _device_local(tree: Any) -> Any:
    """Which leaves may have a leading axis of devices."""

    def flags(node: Any) -> Any:
        whole = jax.tree.map(lambda _: False, node)
        if not _is_stream(node):
            return whole
        local = {name: jax.tree.map(lambda _: True, getattr(node, name)) for name in LOCAL}
        return whole._replace(**local)

    return jax.tree.map(flags, tree, is_leaf=_is_stream)


def _onto(node: Any, like: Any) -> Any:
    """The state on the devices of `like`."""
    if not _is_stream(node):
        return node
    shape = np.shape(like.weight_carry.total)
    folded = interop.reshape_devices(node, shape[0] if shape else None)
    return jax.tree.map(lambda x, want: jax.device_put(x, _place(want, True)), folded, like)


def _place(leaf: Any, alike: bool) -> Any:
    """Where a leaf goes: as in `like`, or on one device where it is to be folded."""
    sharding = getattr(leaf, "sharding", None) if alike and not checks.is_key(leaf) else None
    return sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
