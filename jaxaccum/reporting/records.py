"""Records as flat dictionaries of numbers, and the loggers that take them."""

import csv
import dataclasses
import logging
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks
from jaxaccum.core.mean import Mean

_LEFT_OUT = frozenset({"grads", "grad_sum", "inner_state", "denominators", "grad_reducers"})


def scalars(info: Any, *, prefix: str = "") -> dict[str, int | float]:
    """All single numbers of a record, as Python numbers under flat names.

    Fields are named as they are, what lies inside of them `field/inner`. A `ja.Mean` counts as its
    value, a Boolean as 0 or 1. Arrays of more than one number, gradients, optimizer states and
    carries are left out. The numbers come from the devices in one transfer, so that calling this
    waits for the step.

    Args:
      info: a `ja.StepInfo`, `ja.Window`, `multi_steps` state, noise scale, or a dictionary of such
        records and numbers.
      prefix: put before each name, `"train/"`.

    Returns:
      A dictionary of ints and floats, in the order of the fields.

    Raises:
      TypeError: the record holds traced values: this was called inside of `jit`.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp
      >>> loss_fn = lambda w, x: (ja.mean(w * x), {"largest": ja.Max(x.max())})
      >>> sums = ja.accumulate(loss_fn, num_microbatches=2, has_aux=True)(2.0, jnp.arange(4.0))
      >>> record = scalars(ja.finalize(sums), prefix="train/")
      >>> record["train/loss"], record["train/weight"], record["train/aux/largest"]
      (3.0, 4, 3.0)
    """
    found = dict(_walk("", info))
    if any(isinstance(x, jax.core.Tracer) for x in found.values()):
        raise TypeError(
            "scalars: `info` holds traced values, so it was called inside of `jit`. Return the "
            "record from the step and call it on what comes back."
        )
    values = jax.device_get(list(found.values()))  # of a dictionary it would sort the names
    return {prefix + name: _number(value) for name, value in zip(found, values)}


def _walk(name: str, node: Any) -> Iterator[tuple[str, Any]]:
    """The single numbers below a node and their names."""
    if isinstance(node, Mean):
        yield from _walk(name, node.value)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _walk(_join(name, str(key)), value)
    elif (fields := _fields(node)) is not None:
        for field in fields:
            yield from _walk(_join(name, field), getattr(node, field))
    elif isinstance(node, tuple | list):
        for number, value in enumerate(node):
            yield from _walk(_join(name, str(number)), value)
    elif _is_number(node):
        yield name or "value", node


def _join(name: str, inner: str) -> str:
    return f"{name}/{inner}" if name else inner


def _fields(node: Any) -> list[str] | None:
    """The fields of a named tuple or dataclass, and the properties of the library's own."""
    names = list(getattr(node, "_fields", ())) if isinstance(node, tuple) else []
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
    if not names:
        return None
    kind = type(node)
    if kind.__module__.split(".")[0] == __name__.split(".")[0]:
        names += [name for name, v in vars(kind).items() if isinstance(v, property)]
    return [n for n in names if n not in _LEFT_OUT and not n.endswith("_carry")]


def _is_number(node: Any) -> bool:
    if isinstance(node, bool | int | float):
        return True
    dtype = getattr(node, "dtype", None)
    if dtype is None or np.shape(node):
        return False
    real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return bool(real or dtype == np.bool_)


def _number(value: Any) -> int | float:
    kind = jax.dtypes.result_type(value)
    return float(value) if jnp.issubdtype(kind, jnp.floating) else int(value)


def log(writer: Any, info: Any, *, step: int | None = None, prefix: str = "") -> dict[str, Any]:
    """Writes a record's numbers to any logger.

    What a logger is, is told by its methods, the first of which that it has is called:

    - `write_scalars(step, numbers)`: clu's metric writers, `CsvWriter`;
    - `add_scalar(name, number, step)`: a TensorBoard `SummaryWriter`;
    - `log_metrics(numbers, step=step)`: MLflow, Lightning loggers;
    - `set_postfix(texts)`: a tqdm progress bar, which gets the short form of `summary`;
    - `log(numbers, step=step)`: a Weights & Biases run, or its module;
    - a `logging.Logger` gets the text of `summary`;
    - any other function is called as `writer(step, numbers)`.

    Args:
      writer: the logger.
      info: a record, as for `scalars`.
      step: the optimizer step; by default the `optimizer_step` of the record.
      prefix: put before each name.

    Returns:
      The numbers, as from `scalars`.

    Raises:
      TypeError: the writer has none of these methods and cannot be called.
      ValueError: no step is given or in the record.

    Example:
      >>> class Run:
      ...     def log(self, numbers, step):
      ...         print(step, numbers)
      >>> _ = log(Run(), {"loss": jnp.float32(0.5), "optimizer_step": jnp.int32(7)})
      7 {'loss': 0.5, 'optimizer_step': 7}
    """
    numbers = scalars(info)
    if step is None:
        steps = [v for n, v in numbers.items() if n.split("/")[-1] == "optimizer_step"]
        if not steps:
            raise ValueError(
                "log: `step` is needed, since the record has no `optimizer_step`, only "
                f"{', '.join(numbers) or 'nothing'}. Pass the number of the optimizer step."
            )
        step = int(steps[0])
    named = {prefix + name: value for name, value in numbers.items()}
    if isinstance(writer, logging.Logger):
        writer.info("%s", summary(numbers))
    elif hasattr(writer, "write_scalars"):
        writer.write_scalars(step, named)
    elif hasattr(writer, "add_scalar"):
        for name, value in named.items():
            writer.add_scalar(name, value, step)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(named, step=step)
    elif hasattr(writer, "set_postfix"):
        writer.set_postfix(_short(numbers))
    elif hasattr(writer, "log"):
        writer.log(named, step=step)
    elif callable(writer):
        writer(step, named)
    else:
        raise TypeError(
            "log: `writer` must have one of the methods write_scalars, add_scalar, log_metrics, "
            f"set_postfix and log, or be a function of (step, numbers), got "
            f"{checks.describe(writer)}."
        )
    return named


def summary(info: Any) -> str:
    """A record in one short line, for a progress bar or a terminal.

    Holds the optimizer step, the loss, the gradient norm, the tokens seen and the noise scale, as
    far as they are there; what was skipped, and that no step was applied, only where it is so.

    Args:
      info: a record, as for `scalars`.

    Returns:
      A text without line breaks.

    Example:
      >>> summary({"optimizer_step": 120, "loss": 2.31456, "grad_norm": 0.5, "num_skipped": 1})
      'step 120, loss 2.315, grad_norm 0.5, skipped 1'
    """
    return ", ".join(f"{name} {value}" for name, value in _short(scalars(info)).items())


_SHORT = {
    "optimizer_step": "step",
    "micro_step": "micro_step",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "tokens_seen": "tokens",
    "noise_scale/value": "noise",
    "num_skipped": "skipped",
    "num_empty": "empty",
}


def _short(numbers: Mapping[str, int | float]) -> dict[str, str]:
    """The few that a progress bar has room for."""
    out = {}
    for name, short in _SHORT.items():
        ends = (v for n, v in numbers.items() if n == name or n.endswith(f"/{name}"))
        value = next(ends, None)
        if value is not None and (value or not name.startswith("num_")):
            out[short] = number_text(value)
    if numbers.get("updated", 1) == 0 and "micro_step" not in numbers:
        out["updated"] = "no"
    return out


def number_text(value: int | float) -> str:
    """A number in a few characters: four digits, large ones as thousands, millions, billions.

    Example:
      >>> number_text(2.31456), number_text(1_234_567), number_text(512)
      ('2.315', '1.235M', '512')
    """
    if not math.isfinite(value) or abs(value) < 10_000:
        return f"{value:.4g}"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


class CsvWriter:
    """Writes records as the rows of a CSV file, for `log`.

    The columns are `step` and those of the first row; they stay. A file that is there already is
    continued. Every row is written out at once.

    Args:
      path: the file.
      names: the columns beside `step`; by default those of the first record.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder) / "run.csv"
      ...     with CsvWriter(path) as writer:
      ...         _ = log(writer, {"loss": 0.5}, step=1)
      ...     print(path.read_text().split())
      ['step,loss', '1,0.5']
    """

    def __init__(self, path: str | os.PathLike[str], *, names: Sequence[str] | None = None):
        self.path = pathlib.Path(path)
        self.names = list(names) if names is not None else None
        known = self.path.exists() and self.path.stat().st_size > 0
        if known:
            with self.path.open(newline="", encoding="utf-8") as file:
                header = next(csv.reader(file))
            if header[:1] != ["step"] or (names is not None and header[1:] != list(names)):
                raise ValueError(
                    f"CsvWriter: {self.path.name} has the columns {', '.join(header)}, expected "
                    f"{', '.join(['step', *(names or ['…'])])}. Choose another file."
                )
            self.names = header[1:]
        self._file = self.path.open("a", newline="", encoding="utf-8")
        self._rows = csv.writer(self._file, lineterminator="\n")
        if self.names is not None and not known:
            self._rows.writerow(["step", *self.names])

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes one row; a column that the record lacks stays empty."""
        if self.names is None:
            self.names = list(scalars)
            self._rows.writerow(["step", *self.names])
        new = [name for name in scalars if name not in self.names]
        if new:
            raise ValueError(
                f"CsvWriter: the record has {', '.join(new)}, for which {self.path.name} has no "
                "column. Name all columns at the start, `CsvWriter(path, names=...)`."
            )
        self._rows.writerow([step, *(scalars.get(name, "") for name in self.names)])
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> "CsvWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
