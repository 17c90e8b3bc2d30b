"""What a step tells, for loggers, progress bars and eyes.

Everything here runs on the host, on what a step has returned; nothing is added to the step. A
dictionary of numbers is what every logger takes, so none is known here.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core.mean import Mean

__all__ = ["plot", "scalars", "summary"]

_LEFT_OUT = frozenset(
    {"grads", "grad_sum", "inner_state", "denominators", "grad_reducers", "ledger"}
)


def scalars(info: Any, *, prefix: str = "") -> dict[str, int | float]:
    """All single numbers of a record, as Python numbers under flat names.

    Fields are named as they are, what lies inside of them `field/inner`. A `ja.Mean` counts as its
    value, a Boolean as 0 or 1. Arrays of more than one number, gradients, optimizer states and
    carries are left out. The numbers come from the devices in one transfer, so that calling this
    waits for the step.

    Args:
      info: a `ja.training.StepInfo`, `ja.Window`, `multi_steps` state, noise scale, or a
        dictionary of such records and numbers.
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
    elif (inside := _inside(node)) is not None:
        for inner, value in inside:
            yield from _walk(f"{name}/{inner}" if name else inner, value)
    elif _is_number(node):
        yield name or "value", node


def _inside(node: Any) -> list[tuple[str, Any]] | None:
    """Names and values of what a record holds, the properties of the library's own too."""
    if isinstance(node, Mapping):
        return [(str(key), value) for key, value in node.items()]
    names = list(getattr(node, "_fields", ())) if isinstance(node, tuple) else []
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
    if names:
        kind = type(node)
        if kind.__module__.split(".")[0] == __name__.split(".")[0]:
            names += [name for name, v in vars(kind).items() if isinstance(v, property)]
        kept = [n for n in names if n not in _LEFT_OUT and not n.endswith("_carry")]
        return [(name, getattr(node, name)) for name in kept]
    if isinstance(node, tuple | list):
        return [(str(number), value) for number, value in enumerate(node)]
    return None


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


# What a line or a picture has room for, and how it is called there.
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
_PANELS = ("loss", "grad_norm", "weight", "noise_scale/value", "num_skipped")


def _find(numbers: Mapping[str, int | float], name: str) -> int | float | None:
    """The first number of this name, inside of other records too."""
    return next((v for n, v in numbers.items() if n == name or n.endswith(f"/{name}")), None)


def _says_something(name: str, value: int | float | None) -> bool:
    """Whether a number is known; of faults that are counted, whether there was one."""
    return value is not None and (value != 0 or not name.startswith("num_"))


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
    numbers = scalars(info)
    found = {name: _find(numbers, name) for name in _SHORT}
    words = [
        f"{_SHORT[name]} {_text(value)}"
        for name, value in found.items()
        if _says_something(name, value)
    ]
    idle = numbers.get("updated", 1) == 0 and "micro_step" not in numbers
    return ", ".join([*words, "updated no"] if idle else words)


def _text(value: Any) -> str:
    """A number in a few characters: four digits, large ones as thousands, millions, billions."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if math.isfinite(value) and abs(value) >= max(unit, 10_000):
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def plot(records: Sequence[Any], *, names: Sequence[str] | None = None) -> Any:
    """A picture of many windows over the optimizer steps, a panel for each number.

    Needs matplotlib, which is imported here and nowhere else; nothing opens a window.

    Args:
      records: what the steps returned, in order; each as for `scalars`.
      names: the numbers to draw, by their names in `scalars` or the ends of these; by default the
        loss, the gradient norm, the weight, the noise scale and the skipped micro-batches, as far
        as there are any.

    Returns:
      A `matplotlib.figure.Figure`; `figure.savefig("windows.png")`.

    Raises:
      ValueError: there is no record, or none holds one of the `names`.
      ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot: matplotlib is needed for the picture. Install it, `pip install matplotlib`, or "
            "print `summary` of the records."
        ) from error
    rows = [scalars(record) for record in records]
    lines = {name: [_find(row, name) for row in rows] for name in names or _PANELS}
    lines = {n: ys for n, ys in lines.items() if any(_says_something(n, y) for y in ys)}
    missing = set(names or lines) - set(lines)
    if missing or not lines:
        raise ValueError(
            f"plot: `records` hold no {' or '.join(sorted(missing)) or 'number to draw'}; they "
            f"hold {', '.join(rows[0]) if rows else 'nothing'}. Pass what the steps returned, and "
            "`names=` from those."
        )
    found = [_find(row, "optimizer_step") for row in rows]
    steps = [number if step is None else step for number, step in enumerate(found)]
    figure = Figure(figsize=(7, 1.8 * len(lines)), layout="constrained")
    axes = figure.subplots(len(lines), sharex=True, squeeze=False)[:, 0]
    for ax, (name, ys) in zip(axes, lines.items()):
        ax.plot(steps, [np.nan if y is None else y for y in ys], marker=".")
        ax.set_ylabel(name)
    axes[-1].set_xlabel("optimizer step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return figure
