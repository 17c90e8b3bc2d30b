"""One window in words, and many of them in a picture."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import optax

from jaxaccum.core import checks
from jaxaccum.core.sums import Window
from jaxaccum.reporting.records import number_text, scalars

_BAR = 32


@dataclasses.dataclass(frozen=True)
class WindowReport:
    """What happened in one window, in plain numbers; `print` shows it.

    Attributes:
      optimizer_step: the optimizer step that it made; `None` where unknown.
      loss: the mean loss.
      weight: the weight (tokens); of several terms the largest.
      num_microbatches: the micro-batches, those left out not among them.
      num_skipped: the micro-batches that were left out.
      updated: whether an optimizer step was applied; `None` where unknown.
      grad_norm: the norm of the mean gradient; `None` where unknown.
      noise_scale: the simple noise scale, in units of weight; `None` where it was not measured.
      capacity: the positions of the window, padding included; `None` where unknown.
      microbatch_weights: the weight of each micro-batch; empty where unknown.
    """

    optimizer_step: int | None
    loss: float
    weight: float
    num_microbatches: int
    num_skipped: int
    updated: bool | None
    grad_norm: float | None
    noise_scale: float | None
    capacity: int | None
    microbatch_weights: tuple[float, ...]

    @property
    def padding(self) -> float | None:
        """The share of positions that count for nothing, `1 - weight / capacity`."""
        return None if self.capacity is None else 1 - self.weight / self.capacity

    def as_dict(self) -> dict[str, Any]:
        """The fields and the padding share, for `json`."""
        return dataclasses.asdict(self) | {"padding": self.padding}

    def __str__(self) -> str:
        name = "window" if self.optimizer_step is None else f"window {self.optimizer_step}"
        applied = {None: "", True: "", False: "; no optimizer step was applied"}[self.updated]
        skipped = f", {self.num_skipped} skipped" if self.num_skipped else ""
        norm, noise = self.grad_norm, self.noise_scale
        lines = [
            f"{name}: loss {self.loss:.6g}"
            + (f", gradient norm {norm:.4g}" if norm is not None else "")
            + applied,
            f"weight {number_text(self.weight)} in {self.num_microbatches} micro-batches{skipped}",
        ]
        if self.padding is not None:
            lines.append(f"padding {self.padding:.1%} of {number_text(self.capacity or 0)}")
        if noise is not None:
            lines.append(
                f"noise scale {number_text(noise)}"
                + (f", {noise / self.weight:.3g} of this window" if self.weight else "")
            )
        largest = max(self.microbatch_weights, default=0)
        for number, weight in enumerate(self.microbatch_weights):
            share = weight / largest if largest else 0.0  # nan where a weight is not finite
            bar = "#" * round(_BAR * share) if math.isfinite(share) else ""
            lines.append(f"  {number:>4}  {number_text(weight):>7}  {bar}".rstrip())
        return "\n".join(lines)


def window_report(
    info: Any,
    *,
    microbatch_weights: Any = None,
    capacity: int | None = None,
    grad_norm: Any = None,
    noise_scale: Any = None,
) -> WindowReport:
    """Reads one window's record on the host, after the step.

    The weight of each micro-batch is in no record by itself. Return it as an auxiliary output,
    `aux = {"weights": loss.weight}`: a bare array is stacked over the micro-batches.

    Args:
      info: a `ja.StepInfo` or `ja.Window`, or a dictionary with the names of their fields.
      microbatch_weights: the weight of each micro-batch, an array of one axis.
      capacity: the positions of the window, padding included: rows times length.
      grad_norm: the gradient's norm, where the record has none; that of a `ja.Window` is computed.
      noise_scale: a `ja.NoiseScale` or a number; by default that of the record.

    Returns:
      A `WindowReport`.

    Raises:
      TypeError: the record holds traced values, or `capacity` is not an integer.
      ValueError: the record has no loss or no weight, `microbatch_weights` has not one axis, or
        `capacity` is less than the weight.

    Example:
      >>> report = window_report(
      ...     {"loss": 1.5, "weight": 10, "num_microbatches": 2, "num_skipped": 0},
      ...     microbatch_weights=[3, 7], capacity=16)
      >>> print(report)
      window: loss 1.5
      weight 10 in 2 micro-batches
      padding 37.5% of 16
           0        3  ##############
           1        7  ################################
    """
    numbers = scalars(info)
    weights = [v for name, v in numbers.items() if name.split("/")[0] == "weight"]
    if "loss" not in numbers or not weights:
        raise ValueError(
            "window_report: `info` must have a `loss` and a `weight`, got "
            f"{', '.join(numbers) or 'nothing'}. Pass what a step returns, or a `ja.Window`."
        )
    if grad_norm is None and isinstance(info, Window):
        grad_norm = optax.tree.norm(info.grads)
    if capacity is not None:
        capacity = checks.integer("window_report", "capacity", capacity)
    parts = np.asarray([] if microbatch_weights is None else microbatch_weights)
    if parts.ndim != 1:
        raise ValueError(
            "window_report: `microbatch_weights` must have one axis, got the shape "
            f"{parts.shape}. Sum over the others."
        )
    given = {"grad_norm": grad_norm, "noise_scale": noise_scale}
    found = numbers | scalars({name: v for name, v in given.items() if v is not None})
    noise = found.get("noise_scale/value", found.get("noise_scale"))
    step, updated = numbers.get("optimizer_step"), numbers.get("updated")
    weight = float(max(weights))
    if capacity is not None and capacity < weight:
        raise ValueError(
            f"window_report: `capacity` must be at least the window's weight, {weight:g}, got "
            f"{capacity}. Pass all positions, padding included; leave it out where the weight is "
            "no count of positions."
        )
    return WindowReport(
        optimizer_step=None if step is None else int(step),
        loss=float(numbers["loss"]),
        weight=weight,
        num_microbatches=int(numbers.get("num_microbatches", len(parts))),
        num_skipped=int(numbers.get("num_skipped", 0)),
        updated=None if updated is None else bool(updated),
        grad_norm=found.get("grad_norm"),
        noise_scale=noise,
        capacity=capacity,
        microbatch_weights=tuple(float(w) for w in parts),
    )


def plot(reports: WindowReport | Sequence[WindowReport]) -> Any:
    """A picture of one window's micro-batches, or of many windows over the optimizer steps.

    Panels: loss, gradient norm, weight per micro-batch (mean, and the range where it is known),
    noise scale beside the window's weight, padding share, skipped micro-batches. What no report
    knows is left out. Needs matplotlib, which is imported here and nowhere else; nothing opens a
    window.

    Args:
      reports: a `WindowReport`, or several in order.

    Returns:
      A `matplotlib.figure.Figure`; `figure.savefig("windows.png")`.

    Raises:
      ValueError: there is no report.
      ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot: matplotlib is needed for the picture. Install it, `pip install matplotlib`, or "
            "print the report."
        ) from error
    if isinstance(reports, WindowReport):
        return _one(Figure(figsize=(7, 3), layout="constrained"), reports)
    if not reports:
        raise ValueError("plot: `reports` is empty. Pass at least one `window_report(...)`.")
    steps = [number if r.optimizer_step is None else r.optimizer_step
             for number, r in enumerate(reports)]  # fmt: skip
    lines = [panel for panel in _panels(reports) if any(v is not None for v in panel[1])]
    figure = Figure(figsize=(7, 1.8 * len(lines)), layout="constrained")
    axes = figure.subplots(len(lines), sharex=True, squeeze=False)[:, 0]
    for ax, (name, values) in zip(axes, lines):
        ax.plot(steps, [np.nan if v is None else v for v in values], marker=".")
        ax.set_ylabel(name)
        if name == "weight of a micro-batch":
            _range(ax, steps, reports)
        if name == "noise scale":
            ax.plot(steps, [r.weight for r in reports], linestyle=":", label="weight of the window")
            ax.legend()
    axes[-1].set_xlabel("optimizer step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return figure


def _panels(reports: Sequence[WindowReport]) -> list[tuple[str, list[Any]]]:
    skipped = [r.num_skipped for r in reports]
    return [
        ("loss", [r.loss for r in reports]),
        ("gradient norm", [r.grad_norm for r in reports]),
        (
            "weight of a micro-batch",
            [r.weight / r.num_microbatches if r.num_microbatches else None for r in reports],
        ),
        ("noise scale", [r.noise_scale for r in reports]),
        ("padding share", [r.padding for r in reports]),
        ("skipped", skipped if any(skipped) else []),
    ]


def _range(ax: Any, steps: Sequence[int], reports: Sequence[WindowReport]) -> None:
    known = [(s, r.microbatch_weights) for s, r in zip(steps, reports) if r.microbatch_weights]
    if known:
        xs, parts = zip(*known)
        ax.fill_between(xs, [min(p) for p in parts], [max(p) for p in parts], alpha=0.3)


def _one(figure: Any, report: WindowReport) -> Any:
    ax = figure.subplots()
    parts = report.microbatch_weights or (report.weight,)
    ax.bar(range(len(parts)), parts)
    if report.capacity is not None:
        share = report.capacity / len(parts)
        ax.axhline(share, linestyle=":", color="black", label="positions")
        ax.legend()
    ax.set_xlabel("micro-batch" if report.microbatch_weights else "window")
    ax.set_ylabel("weight")
    ax.set_title(str(report).splitlines()[0])
    return figure
