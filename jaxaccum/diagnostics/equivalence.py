"""`check_equivalence`: does a window equal the full batch, and if not, why."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks
from jaxaccum.devices import reduction
from jaxaccum.diagnostics import causes, structure
from jaxaccum.diagnostics.probes import Parts, Probe, distance
from jaxaccum.diagnostics.structure import Finding
from jaxaccum.window import cut
from jaxaccum.window.batch import Batch, checked_argnums
from jaxaccum.window.windows import value_and_grad


@dataclasses.dataclass(frozen=True)
class EquivalenceReport:
    """Whether windows of a loss function equal the full batch, and why not; `str` says it in words.

    Attributes:
      ok: whether every comparison held and no fault was found.
      max_error: the largest deviation of loss or gradient from the full batch's, relative to the
        largest number that was summed; nan where the loss function could not be run.
      tolerance: the deviation that rounding is allowed.
      worst: the path of the parameter that deviates most, `"loss"` for the loss itself.
      errors: the largest deviation of each comparison, by its name.
      findings: the faults, the most fundamental first; each has `kind`, `message`, `remedy`.
      notes: what the comparison leaves open, such as keys whose draws were made equal.
    """

    ok: bool
    max_error: float
    tolerance: float
    worst: str
    errors: dict[str, float]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = []
        if self.ok:
            lines.append(
                f"ok: every window equals the full batch to rounding (largest deviation "
                f"{self.max_error:.1e}, at {self.worst})."
            )
        elif self.max_error > self.tolerance:
            lines.append(
                f"not ok: the window deviates from the full batch by {self.max_error:.1e} "
                f"(rounding explains {self.tolerance:.1e}), most at {self.worst}."
            )
        else:
            lines.append("not ok:")
        for finding in self.findings:
            lines += [f"- {finding.message}", f"  {finding.remedy}"]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"  {error:.1e}  {name}" for name, error in self.errors.items()]
        return "\n".join(lines)


def check_equivalence(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    num_microbatches: int,
    args: Sequence[Any] = (),
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    axis_name: str | Sequence[str] | None = None,
    rtol: float | None = None,
) -> EquivalenceReport:
    """Runs full batch, windows and permutations on a small input and says what is wrong.

    The thing to run first when losses differ. The full batch, `sum_t total_t / weight_t` in one
    pass, is compared with windows of several cuts, even and uneven, of the rows as they are and
    permuted. Where they differ, experiments tell the cause: rows doubled (a mean does not grow, a
    sum does), reordered, cut into groups, sequences cut short; and the loss is run operation by
    operation on the batch and its halves, to find the line in which rows see each other. Unlike
    `accumulate` it also takes loss functions that return a bare scalar, to explain them.

    Args:
      loss_fn: as in `ja.accumulate`, right or wrong. If it takes the keyword `key`, it is given a
        key of which all draws are equal, since masks that differ by micro-batch would hide
        everything else.
      params: the parameters; some dozen to some thousand of them will do.
      batch: a small batch; four rows or more of different content and length find most.
      num_microbatches: into how many micro-batches the window is cut; a static int.
      args: further positional arguments of `loss_fn`.
      batch_argnums: the positions of the arguments of `loss_fn` that are cut; 1 by default, as in
        `accumulate`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      axis_name: device axes that the loss function names; it is then run as their only device.
      rtol: the deviation allowed, relative to the largest number that was summed; by default 256
        times the epsilon of float32, or 8 times that of a narrower dtype that the loss computes in.

    Returns:
      An `EquivalenceReport`. Nothing is printed, and a faulty loss does not raise.

    Raises:
      TypeError: `loss_fn` is not a function, or `rtol` not a number.
      ValueError: the batch has fewer rows than micro-batches, or than three, of which no uneven
        window can be made; `rtol` is negative.

    Example:
      >>> import jaxaccum as ja
      >>> x = jnp.arange(8.0)
      >>> report = ja.check_equivalence(
      ...     lambda w, x: jnp.mean((w - x) ** 2), jnp.float32(1), x, num_microbatches=2)
      >>> print(report.ok, report.findings[0].kind)
      False mean_inside
      >>> report = ja.check_equivalence(
      ...     lambda w, x: ja.mean((w - x) ** 2), jnp.float32(1), x, num_microbatches=2)
      >>> print(report.ok)
      True
    """
    function = "check_equivalence"
    if rtol is not None and not checks.number(function, "rtol", rtol) >= 0:
        raise ValueError(f"{function}: `rtol` must be at least 0, got {rtol!r}.")
    if not callable(loss_fn):
        raise TypeError(
            f"{function}: `loss_fn` must be a function, got {checks.describe(loss_fn)}."
        )
    number = checks.integer(function, "num_microbatches", num_microbatches)
    every = (params, batch, *args)
    rows = Batch(function, every, checked_argnums(function, loss_fn, batch_argnums))
    if 0 in rows.positions:
        raise ValueError(
            f"{function}: `batch_argnums` must not name argument 0, the parameters, got "
            f"{batch_argnums!r}."
        )
    if rows.rows < max(3, number):
        raise ValueError(
            f"{function}: the batch has {rows.rows} rows; at least three and at least "
            f"`num_microbatches`, {number}, are needed to compare anything."
        )
    axes = reduction.names_of(function, "axis_name", axis_name)
    probe = Probe(loss_fn, every, rows, has_aux=has_aux, axes=axes)
    return _Check(probe, number, rtol).report()


class _Check:
    """One check: its comparisons, the worst of them, its findings."""

    def __init__(self, probe: Probe, number: int, rtol: float | None):
        self.probe, self.number, self.rtol = probe, number, rtol
        self.main = f"window of {number} micro-batches"
        self.errors: dict[str, float] = {}
        self.notes: list[str] = []
        self.worst, self.max_error, self.tolerance = "", float("nan"), float("nan")

    def report(self) -> EquivalenceReport:
        """Runs the check."""
        if self.probe.named:
            self.notes.append(
                "all draws from `key` were made equal, since each micro-batch has a key of its "
                "own: what the loss draws, such as a dropout mask, was not compared."
            )
        found = self._run()
        if not found and not self.max_error <= self.tolerance:
            found = [causes.UNKNOWN]
        return EquivalenceReport(
            ok=not found,
            max_error=self.max_error,
            tolerance=self.tolerance,
            worst=self.worst,
            errors=self.errors,
            findings=tuple(found),
            notes=tuple(self.notes),
        )

    def _run(self) -> list[Finding]:
        """The experiments, the most fundamental first; a fault that hides the others ends it."""
        probe = self.probe
        everything = np.arange(probe.rows)
        whole = probe.take(everything)
        try:
            program = self._stage(whole)
            full = probe(everything)
        except Exception as error:
            return [structure.raised(error)]
        found = structure.structural(probe, program, whole)
        again = structure.impure(probe, program, whole)
        if again is not None:
            return [*found, again]
        narrow = structure.narrowest(program)
        factor = 256 if narrow == np.float32 else 8
        self.tolerance = factor * float(jnp.finfo(narrow).eps) if self.rtol is None else self.rtol
        windows, raised = self._windows(everything)
        for name, parts in windows.items():
            if full.is_finite() and all(p.is_finite() for p in parts):
                self._compare(name, full, parts)
        uncut = self._uncut(raised) if raised or not self.max_error <= self.tolerance else []
        if uncut:
            return [*found, *uncut]
        if self.main in raised:
            terms = range(len(probe.terms))
            together = causes.torn_apart(probe, full, self.tolerance, terms)
            return [*found, together or causes.fixed_shape(raised[self.main], probe.rows)]
        self.notes += [f"the {name} raises, and was left out." for name in raised]
        return [*found, *self._numeric(full, windows, program, whole, found)]

    def _numeric(
        self, full: Parts, windows: dict[str, list[Parts]], program: Any, whole: Any,
        found: Sequence[Finding],
    ) -> list[Finding]:  # fmt: skip
        """What the numbers of full batch and windows show."""
        probe = self.probe
        finite = causes.non_finite(probe, full, [p for parts in windows.values() for p in parts])
        # Where only small micro-batches are not finite, a mean inside the loss may be the cause.
        windows = {n: parts for n, parts in windows.items() if all(p.is_finite() for p in parts)}
        if finite is not None and not (windows and full.is_finite()):
            return [finite]
        if not full.weights.any():
            return [causes.NOTHING_COUNTED]
        numeric = causes.numeric(probe, full, windows, self.tolerance)
        new = [f for f in numeric if f.kind not in {g.kind for g in found}]
        if finite is not None and not numeric:
            new.append(finite)
        shifted = structure.shifted(probe, program, whole)
        new += [shifted] if shifted is not None else []
        return new if found or new or probe.axes else self._library(full)

    def _uncut(self, raised: dict[str, Exception]) -> list[Finding]:
        """Whether it helps to cut the other arguments that have the batch's rows too."""
        sizes = {
            position: {np.shape(x)[:1] for x in jax.tree.leaves(arg)}
            for position, arg in self.probe.batch.others(self.probe.args).items()
        }
        alike = [p for p, found in sizes.items() if p and found == {(self.probe.rows,)}]
        if not alike:
            return []
        other = _Check(self.probe.cutting(alike), self.number, self.rtol)
        report = other.report()
        runs = self.main in raised and other.main in report.errors
        return [causes.uncut(alike, other.probe), *report.findings] if report.ok or runs else []

    def _stage(self, whole: Any) -> Any:
        """The loss's program; device axes that it names are bound on the way."""
        for _ in range(4):
            try:
                return self.probe.stage(whole)
            except NameError as error:
                found = re.search(r"unbound axis name:?\s*'?(\w+)", str(error))
                if found is None or found[1] in self.probe.axes:
                    raise
                self.probe.axes = (*self.probe.axes, found[1])
        return self.probe.stage(whole)

    def _windows(
        self, everything: np.ndarray
    ) -> tuple[dict[str, list[Parts]], dict[str, Exception]]:
        """The parts of several windows that all hold every row, and what some of them raise."""
        size = len(everything)
        mixed = np.random.default_rng(0).permutation(size)
        even = self._split(everything)
        # In few different shapes.
        rows = len(even[-1]) if 1 < len(even[-1]) < size else size - 1
        singles = size - (size - 1) // rows * rows
        starts = [*range(1, singles), *range(singles, size, rows)]
        pieces = {
            self.main: even,
            "uneven window": np.split(everything, starts),
            "window of single rows": np.split(everything, size) if size <= 64 else [],
            "full batch, rows permuted": [mixed],
            f"{self.main}, rows permuted": self._split(mixed),
        }
        windows: dict[str, list[Parts]] = {}
        raised: dict[str, Exception] = {}
        for name, parts in pieces.items():
            try:
                windows |= {name: [self.probe(rows) for rows in parts]} if parts else {}
            except Exception as error:
                raised[name] = error
        return windows, raised

    def _split(self, rows: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(p) for p in cut.split(rows, num_microbatches=self.number)]

    def _compare(self, name: str, full: Parts, parts: Sequence[Parts]) -> None:
        merged, sizes = _sum(parts), _sum([p.sizes() for p in parts])
        sizes = sizes._replace(weights=np.abs(merged.weights))
        self._note(name, full, merged.means(), sizes.means())

    def _note(self, name: str, full: Parts, got: Any, size: Any) -> None:
        """Notes the distance of `(loss, grads)` from the full batch's."""
        want, own = full.means(), full.sizes().means()
        loss_size, *grad_sizes = [np.maximum(a, b) for a, b in zip(_flat(size), _flat(own))]
        errors = {"loss": distance(np.asarray(got[0]), np.asarray(want[0]), loss_size)}
        # A gradient that is zero but for rounding is measured against the others.
        floor = 0.01 * max((float(np.max(g, initial=0)) for g in grad_sizes), default=0.0)
        for path, g, w, s in zip(self.probe.paths, got[1], want[1], grad_sizes, strict=True):
            errors[f"params{path}"] = distance(g, w, np.maximum(s, floor))
        worst = max(errors, key=lambda path: errors[path])
        self.errors[name] = errors[worst]
        if not errors[worst] <= self.max_error:
            self.worst, self.max_error = worst, errors[worst]

    def _library(self, full: Parts) -> list[Finding]:
        """The library's own window; what it refuses is a fault too."""
        probe = self.probe

        f = value_and_grad(
            probe.loss_fn,
            num_microbatches=self.number,
            batch_argnums=probe.batch.positions,
            has_aux=probe.has_aux,
        )
        try:
            run = jax.jit(lambda params, rows: f(*probe.put(params, rows), **probe.named))
            out, grads = run(jax.tree.unflatten(probe.tree, probe.leaves), probe.batch.leaves)
        except (TypeError, ValueError) as error:
            return [causes.refused(error)]
        loss = out[0] if probe.has_aux else out
        leaves = [np.asarray(g).astype(w.dtype) for g, w in zip(_moving(grads), full.means()[1])]
        got = float(loss), leaves
        self._note(f"ja.value_and_grad, {self.number} micro-batches", full, got, got)
        return []


def _flat(means: Any) -> list[Any]:
    return [np.abs(means[0]), *map(np.abs, means[1])]


def _moving(grads: Any) -> list[Any]:
    return [g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0]


def _sum(parts: Sequence[Parts]) -> Parts:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
