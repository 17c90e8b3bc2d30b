"""The causes that `check_equivalence` knows: the experiment that shows each, and its remedy."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxaccum.diagnostics.departures import PLACE, RANDOM, SIZE, Departure, departures
from jaxaccum.diagnostics.probes import Parts, Probe, distance
from jaxaccum.diagnostics.structure import Finding, first_line, low_precision

UNKNOWN = Finding(
    "unknown",
    "The window differs from the full batch for a reason that no experiment here explains.",
    "Compare the loss of single rows with that of pairs of rows to find which examples differ.",
)


NOTHING_COUNTED = Finding(
    "nothing_counted",
    "No position of this batch is counted: all weights are zero, and the loss is 0 / 0.",
    "Check the mask, or take a batch that has something to count.",
)


def fixed_shape(error: Exception, rows: int) -> Finding:
    """The loss function fails on fewer rows."""
    return Finding(
        "fixed_shape",
        f"The loss function runs on all {rows} rows but raises on fewer: {first_line(error)}.",
        "Take the number of rows from the batch it is given, `x.shape[0]`, not from a constant.",
    )


def uncut(positions: Sequence[int], cut: Probe) -> Finding:
    """Arguments that have the batch's rows, but are not cut with it."""
    names = " and ".join(map(str, positions))
    return Finding(
        "uncut_argument",
        f"Argument {names} of the loss function has {cut.rows} rows, as the batch has, but is not "
        "cut: every micro-batch sees all of them beside its own rows. Cut with the batch they fit.",
        f"Pass `batch_argnums={cut.batch.positions}`, here and to the window.",
    )


def refused(error: Exception) -> Finding:
    """The library refuses the loss function."""
    return Finding("refused", str(error), "The message above names it.")


def non_finite(probe: Probe, full: Parts, parts: Sequence[Parts]) -> Finding | None:
    """Which rows are not finite, and whether it is their loss or only their gradient."""
    if full.is_finite() and all(p.is_finite() for p in parts):
        return None
    bad, leaking = [], True
    for row in range(min(probe.rows, 64)):
        alone = probe([row])
        if not alone.is_finite():
            bad.append(row)
            leaking &= bool(np.isfinite(alone.totals).all() or (alone.weights == 0).all())
    where = f"row{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad[:8]))}" if bad else "no row"
    if not bad:
        return Finding(
            "non_finite",
            "The loss or its gradient is not finite, but for each row alone it is: it overflows.",
            "Sum in float32, as `ja.mean` does.",
        )
    if leaking:
        return Finding(
            "non_finite",
            f"Of {where} the gradient is nan or inf although the loss is finite or nothing is "
            "counted: a masked position, or the mean of nothing, leaks through a product with "
            "zero.",
            "Mask the input before the operation that fails, `jnp.where(mask, x, 1.0)`, and "
            "return sums: `ja.mean(values, where=mask)`.",
        )
    return Finding(
        "non_finite",
        f"The loss of {where} is nan or inf, and so is that of every window they are in.",
        "Repair the rows or their mask; `skip_nonfinite=True` leaves such micro-batches out.",
    )


def numeric(
    probe: Probe, full: Parts, windows: dict[str, list[Parts]], tolerance: float
) -> list[Finding]:
    """The faults of the terms whose window differs from the full batch."""
    found: list[Finding] = []
    pieces = [parts for parts in windows.values() if len(parts) > 1]
    permuted = [parts for parts in windows.values() if len(parts) == 1]
    wrong = [
        term
        for term in range(len(probe.terms))
        if max(_term_error(full, parts, term) for parts in windows.values()) > tolerance
    ]
    seen = departures(probe, tolerance, wrong) if wrong else []
    for term, name in enumerate(probe.terms):
        if _rounds_totals(full, pieces, term):
            found.append(low_precision(name, "bfloat16 or float16"))
            continue
        experiment = _Experiment(probe, full, term, tolerance, [d for d in seen if term in d.terms])
        cause = None
        if term in wrong:
            moved = max((_term_error(full, parts, term) for parts in permuted), default=0.0)
            cause = experiment.order() if moved > tolerance else experiment.rows()
        if probe.scalar[term]:
            found.append(experiment.scalar())
            known = (found[-1].kind, "constant_denominator")
            cause = cause if cause and cause.kind not in known else None
        elif term in wrong and cause is None:
            cause = UNKNOWN._replace(message=f"`loss{name}`: {UNKNOWN.message}")
        found += [cause] if cause else []
    return found


class _Experiment:
    """What is tried with one term of a loss, and what that shows."""

    def __init__(
        self, probe: Probe, full: Parts, term: int, tolerance: float, seen: Sequence[Departure]
    ):
        self.probe, self.full, self.term, self.tolerance = probe, full, term, tolerance
        self.name = f"`loss{probe.terms[term]}`"
        self.seen = seen

    def order(self) -> Finding:
        """The cause where the order of the rows matters."""
        together = torn_apart(self.probe, self.full, self.tolerance, [self.term])
        if together is not None:
            return together
        drawn = [d for d in self.seen if RANDOM in d.made_of]
        if drawn:
            return Finding(
                "same_mask",
                f"{self.name} depends on the order of the rows: {drawn[0]} takes random draws from "
                "a key that is not the micro-batch's. Every micro-batch gets the same mask.",
                "Take the key as the keyword `key` of the loss function and pass `key=` to the "
                "window, or put `ja.batches.example_keys` into the batch.",
            )
        moved = [d for d in self.seen if PLACE in d.made_of or d.primitive != "reduce_sum"]
        line = f", in {moved[0]}" if moved else ""
        return Finding(
            "row_order",
            f"{self.name} depends on the order of the rows, which a cut changes{line}.",
            "Put what belongs to an example, such as its position or weight, into the batch.",
        )

    def rows(self) -> Finding | None:
        """The cause where it does not."""
        name, first = self.name, next(iter(self.seen), None)
        if first is not None and first.selects:
            return Finding(
                "selection",
                f"{name} selects among the rows of the micro-batch, {first}: of the same numbers "
                "a part of the batch selects others than the whole batch.",
                "Let each row decide by itself, or select before the window is cut and put the "
                "choice into the batch; `ja.microbatch` shows the numbers of all rows to the loss.",
            )
        degree, grows = self._degree(), self._weight_grows()
        if degree == 1 and not grows:
            return Finding(
                "constant_denominator",
                f"The total of {name} is a sum, but its weight is the same for any number of rows: "
                "each micro-batch counts like the whole batch.",
                "Count what the total sums, `ja.mean(per_token, where=mask)`; for a constant "
                "denominator give each micro-batch its share, `constant * rows / batch_rows`.",
            )
        if first and degree != 1 and first.returns and first.divides and SIZE not in first.made_of:
            return Finding(
                "mean_inside",
                f"{name} is normalised inside: numbers of rows are divided by a sum over the "
                f"micro-batch's rows, {first}, which is another one in a smaller micro-batch.",
                "Normalise each row by itself (`axis=-1`), or divide by what was computed before "
                "the window was cut; `ja.microbatch` divides by sums over the whole window.",
            )
        if degree == 0 or (first is not None and degree is None and first.normalises):
            return self._mean(degree, grows, first)
        if first is not None or self._interact():
            where = f" in {first}" if first is not None else ""
            return Finding(
                "batch_statistics",
                f"The examples of {name} see each other{where}: of the same rows a part of the "
                "batch makes something else than the whole batch. Batch normalisation, in-batch "
                "negatives and functions of sums over the batch do that.",
                "Use statistics that do not depend on the batch, or make the window exact with "
                "`ja.microbatch`, which combines window-wide sums before the loss.",
            )
        return None

    def _mean(self, degree: int | None, grows: bool, first: Departure | None) -> Finding:
        weight = "the number that it counts" if grows else "a constant"
        seen = f"twice the rows give the same total, while its weight is {weight}"
        if degree is None:
            seen = "what it divides by depends on the number of rows"
        line = f" ({first})" if first is not None else ""
        return Finding(
            "mean_inside",
            f"The total of {self.name} is a mean already: {seen}{line}. Windows average the means "
            "of their micro-batches, whatever these hold.",
            "Return the sum and what was counted, `ja.mean(per_token, where=mask)`; a mean that "
            "was divided before becomes `ja.Mean.from_value(mean, count)`.",
        )

    def scalar(self) -> Finding:
        """What a bare scalar is."""
        degree = self._degree()
        if degree == 0:
            return Finding(
                "mean_inside",
                f"{self.name} is a bare scalar, and a mean: twice the rows give the same number. "
                "What it was divided by is lost, so micro-batches of different weight cannot be "
                "merged.",
                "Return the sum and the count: `ja.mean(per_token, where=mask)` in place of "
                "`per_token.mean()`.",
            )
        what = "a sum: twice the rows give twice the number" if degree else "neither sum nor mean"
        return Finding(
            "scalar_loss",
            f"{self.name} is a bare scalar, and {what}. By what it should be divided is not said.",
            "Return `ja.Mean(total, weight)` or `ja.mean(values, where=mask)`.",
        )

    @functools.cached_property
    def _doubled(self) -> Parts:
        return self.probe([*range(self.probe.rows)] * 2)

    def _degree(self) -> int | None:
        """0 if twice the rows give the same total and gradient, 1 if they give twice of both."""
        once, twice = self.full.vector(self.term), self._doubled.vector(self.term)
        for degree, factor in ((0, 1.0), (1, 2.0)):
            if distance(twice, factor * once, factor * once) < 8 * self.tolerance:
                return degree
        return None

    def _interact(self) -> bool:
        """Whether exchanging some rows changes what the others add: the mixed second difference."""
        every, half = np.arange(self.probe.rows), self.probe.rows // 2
        other = np.roll(every, 1)
        first, second = [*other[:half], *every[half:]], [*every[:half], *other[half:]]
        a, b, c = (self.probe(rows).vector(self.term) for rows in (first, second, other))
        d = self.full.vector(self.term)
        size = np.abs(a) + np.abs(b) + np.abs(c) + np.abs(d)
        return distance(a + b, c + d, size) > self.tolerance

    def _weight_grows(self) -> bool:
        return bool(self._doubled.weights[self.term] > 1.5 * self.full.weights[self.term])


def torn_apart(probe: Probe, full: Parts, tolerance: float, terms: Sequence[int]) -> Finding | None:
    """Whether groups of rows belong together: cut between them, the window is right."""
    rows = np.arange(probe.rows)
    for size in range(2, probe.rows // 2 + 1):
        if probe.rows % size:
            continue
        for groups in (rows.reshape(-1, size), rows.reshape(size, -1).T):
            try:
                parts = [probe(group) for group in groups]
            except Exception:  # groups of other sizes may run
                break
            if max(_term_error(full, parts, term) for term in terms) <= tolerance:
                pairs = " and ".join(map(str, groups[0]))
                return Finding(
                    "torn_apart",
                    f"Rows {pairs} belong together, and so on in groups of {size} rows: cut "
                    "between such groups, a window equals the full batch; torn apart, they do not. "
                    "A window is cut strided, micro-batch k of K takes the rows k, k + K, "
                    "k + 2K, …, so that neighbours land in different micro-batches.",
                    f"Make each group one row of the batch, `[groups, {size}, ...]`: reshape or "
                    "`jnp.stack` before the window, and undo it inside of the loss.",
                )
    return None


def _term_error(full: Parts, parts: Sequence[Parts], term: int) -> float:
    vectors, weights = [p.vector(term) for p in parts], [p.weights[term] for p in parts]
    weight, own = sum(weights), full.weights[term]
    if weight == 0 or own == 0:
        return 0.0 if weight == own else float("inf")
    size = np.maximum(
        sum(np.abs(v) for v in vectors) / abs(weight), np.abs(full.vector(term) / own)
    )
    return distance(sum(vectors) / weight, full.vector(term) / own, size)


def _rounds_totals(full: Parts, pieces: Sequence[Sequence[Parts]], term: int) -> bool:
    """Whether all totals are bfloat16 or float16 numbers that do not add up, but nearly."""
    every = np.array([full.totals[term], *[p.totals[term] for ps in pieces for p in ps]])
    if np.iscomplexobj(every):
        return False
    short = [every.astype(d).astype(np.float64) for d in (jnp.bfloat16, np.float16)]
    if not any(np.array_equal(every, s) for s in short):
        return False
    gaps = [
        distance(sum(p.totals[term] for p in ps), full.totals[term], full.totals[term])
        for ps in pieces
    ]
    return 1e-5 < max(gaps) < 0.02
