"""The faults that `check_equivalence` knows: the experiment that shows each, and its remedy."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import programs
from jaxaccum.diagnostics.probes import (
    Parts,
    Probe,
    callbacks,
    distance,
    draws,
    same_program,
    summed_shapes,
)
from jaxaccum.folds import devices
from jaxaccum.folds.losses import Loss

_CLOSE = 0.02  # how near to 1 or 2 times a doubled batch comes to count as that


class Finding(NamedTuple):
    """One fault.

    Attributes:
      kind: its short name.
      message: what was seen.
      remedy: what to do.
    """

    kind: str
    message: str
    remedy: str


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


def raised(error: Exception) -> Finding:
    """The loss function fails on the full batch already."""
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return _IMPURE
    return Finding(
        "raises",
        f"The loss function raises on the full batch: {_first_line(error)}.",
        "Make it run there first.",
    )


def fixed_shape(error: Exception, rows: int) -> Finding:
    """The loss function fails on fewer rows."""
    return Finding(
        "fixed_shape",
        f"The loss function runs on all {rows} rows but raises on fewer: {_first_line(error)}.",
        "Take the number of rows from the batch it is given, `x.shape[0]`, not from a constant.",
    )


def refused(error: Exception) -> Finding:
    """The library refuses the loss function."""
    return Finding("refused", str(error), "The message above names it.")


_IMPURE = Finding(
    "impure",
    "Two calls with the same arguments give different results: the loss function reads or changes "
    "something outside of its arguments, such as a counter, running statistics or NumPy's random "
    "numbers. A window calls it once for each micro-batch, and JAX traces it as often as it likes.",
    "Pass state in and return it through `has_aux=True`; pass randomness as `key=`.",
)


def impure(probe: Probe, staged: programs.Program, rows: Any) -> Finding | None:
    """Whether a second trace, or a second run of the same program, gives something else."""
    try:
        again = probe.stage(rows)
        if (same_program(staged, again) and not callbacks(staged)) or probe.axes:
            return None
        runs = [jax.jit(lambda *flat, program=p: program(*flat)) for p in (staged, again)]
        flat = probe.flat(rows)
        first, *others = [[np.asarray(x) for x in run(*flat)] for run in runs * 2]
    except jax.errors.UnexpectedTracerError:
        return _IMPURE
    pairs = [pair for other in others for pair in zip(first, other, strict=True)]
    return None if all(np.array_equal(*pair, equal_nan=True) for pair in pairs) else _IMPURE


def structural(probe: Probe, staged: programs.Program, rows: Any) -> list[Finding]:
    """What the program shows without its numbers."""
    found = []
    number = len(probe.terms)
    if probe.axes:
        try:
            both = probe.stage(rows, devices=2)
            devices.check_undivided("", both, number, probe.axes)
        except ValueError:
            names = ", ".join(map(repr, probe.axes))
            found.append(
                Finding(
                    "collective",
                    f"The loss is a `psum` or `pmean` over the device axis {names}. The window "
                    "is reduced over it as well, so gradients come out a number of devices too "
                    "large.",
                    "Return this device's own sum and weight and pass `axis_name`, which reduces "
                    "both once, at the end of the window.",
                )
            )
    loss = Loss(staged, jax.tree.structure([0] * number), jax.tree.structure(None))
    try:
        if not probe.axes:
            inputs = len(staged.closed.in_avals)
            loss.weights_fn("", [i < len(probe.moving) for i in range(inputs)])
    except ValueError:
        found.append(
            Finding(
                "weight_depends_on_params",
                "The weight depends on the parameters, so that the loss is no mean over examples.",
                "Put `jax.lax.stop_gradient` around a weight that is meant as a constant; use "
                "`ja.microbatch` for a loss that is a function of window-wide sums.",
            )
        )
    for name, aval in zip(probe.terms * 2, staged.closed.out_avals, strict=True):
        if jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4:
            found.append(_low_precision(name, aval.dtype))
            break
    return found


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
    everything = np.arange(probe.rows)
    pieces = [parts for parts in windows.values() if len(parts) > 1]
    permuted = next((parts[0] for parts in windows.values() if len(parts) == 1), full)
    for term, name in enumerate(probe.terms):
        if _rounds_totals(full, pieces, term):
            found.append(_low_precision(name, "bfloat16 or float16"))
            continue
        apart = max(_term_error(full, parts, term) for parts in windows.values())
        if probe.bare[term] and apart <= tolerance:
            found.append(_bare(probe, full, everything, term, name))
        if apart <= tolerance:
            continue
        found.append(_cause(probe, full, permuted, everything, term, name, tolerance))
    return found


def _cause(
    probe: Probe,
    full: Parts,
    permuted: Parts,
    everything: np.ndarray,
    term: int,
    name: str,
    tolerance: float,
) -> Finding:
    loss = f"loss{name}"
    moved = distance(permuted.vector(term), full.vector(term), full.sizes().vector(term))
    if moved > tolerance:
        if draws(probe.stage(probe.take(everything))):
            return Finding(
                "same_mask",
                f"`{loss}` depends on the order of the rows, and it draws random numbers from a "
                "key that is not the micro-batch's: every micro-batch gets the same mask.",
                "Take the key as the keyword `key` of the loss function and pass `key=` to the "
                "window, or put `ja.example_keys` into the batch.",
            )
        return Finding(
            "row_order",
            f"`{loss}` depends on the order of the rows, which a cut changes.",
            "Put what belongs to an example, such as its position or weight, into the batch.",
        )
    degree = _degree(probe, full, everything, term)
    grows = float(_doubled(probe, everything).weights[term]) > 1.5 * float(full.weights[term])
    if probe.bare[term]:
        return _bare(probe, full, everything, term, name)
    if degree == 0:
        weight = "the number that it counts" if grows else "a constant"
        return Finding(
            "mean_inside",
            f"The total of `{loss}` is a mean already: twice the rows give the same total, while "
            f"its weight is {weight}. Windows average the means of their micro-batches, whatever "
            "these hold.",
            "Return the sum and what was counted, `ja.mean(per_token, where=mask)`; a mean that "
            "was divided before becomes `ja.Mean.from_value(mean, count)`.",
        )
    if degree == 1 and not grows:
        return Finding(
            "constant_denominator",
            f"The total of `{loss}` is a sum, but its weight is the same for any number of rows: "
            "each micro-batch counts like the whole batch.",
            "Count what the total sums, `ja.mean(per_token, where=mask)`; for a constant "
            "denominator give each micro-batch its share, `constant * rows / batch_rows`.",
        )
    if _interaction(probe, full, everything, term) > tolerance:
        return Finding(
            "batch_statistics",
            f"The examples of `{loss}` see each other: exchanging one row changes what the others "
            "add. Batch normalisation, in-batch negatives and batch-wide maxima do that.",
            "Use statistics that do not depend on the batch, or make the window exact with "
            "`ja.microbatch`, which combines window-wide sums before the loss.",
        )
    return UNKNOWN._replace(message=f"`{loss}`: {UNKNOWN.message}")


def _bare(probe: Probe, full: Parts, everything: np.ndarray, term: int, name: str) -> Finding:
    degree = _degree(probe, full, everything, term)
    if degree == 0:
        return Finding(
            "mean_inside",
            f"`loss{name}` is a bare scalar, and a mean: twice the rows give the same number. What "
            "it was divided by is lost, so micro-batches of different weight cannot be merged.",
            "Return the sum and the count: `ja.mean(per_token, where=mask)` in place of "
            "`per_token.mean()`.",
        )
    kind = "a sum: twice the rows give twice the number" if degree == 1 else "neither sum nor mean"
    return Finding(
        "scalar_loss",
        f"`loss{name}` is a bare scalar, and {kind}. By what it should be divided is not said.",
        "Return `ja.Mean(total, weight)` or `ja.mean(values, where=mask)`.",
    )


def _low_precision(name: str, dtype: Any) -> Finding:
    return Finding(
        "low_precision",
        f"The total or weight of `loss{name}` is summed in {dtype}, which stops counting after a "
        "few hundred tokens.",
        "Cast the values before the sum, `values.astype(jnp.float32)`; `ja.mean` does.",
    )


def _term_error(full: Parts, parts: Sequence[Parts], term: int) -> float:
    vectors, weights = [p.vector(term) for p in parts], [p.weights[term] for p in parts]
    weight, own = sum(weights), full.weights[term]
    if weight == 0 or own == 0:
        return 0.0 if weight == own else float("inf")
    size = np.maximum(
        sum(np.abs(v) for v in vectors) / abs(weight), np.abs(full.vector(term) / own)
    )
    return distance(sum(vectors) / weight, full.vector(term) / own, size)


def _doubled(probe: Probe, everything: np.ndarray) -> Parts:
    return probe(np.concatenate([everything, everything]))


def _degree(probe: Probe, full: Parts, everything: np.ndarray, term: int) -> int | None:
    """0 if twice the rows give the same total and gradient, 1 if they give twice of both."""
    once = full.vector(term)
    twice = _doubled(probe, everything).vector(term)
    for degree, factor in ((0, 1.0), (1, 2.0)):
        if distance(twice, factor * once, factor * once) < _CLOSE:
            return degree
    return None


def _interaction(probe: Probe, full: Parts, everything: np.ndarray, term: int) -> float:
    """The mixed second difference: whether half of the rows change what the other half adds."""
    half = len(everything) // 2
    other = np.roll(everything, 1)
    first, second = everything.copy(), everything.copy()
    first[:half], second[half:] = other[:half], other[half:]
    a, b, c = (probe(rows).vector(term) for rows in (first, second, other))
    size = np.abs(a) + np.abs(b) + np.abs(c) + np.abs(full.vector(term))
    return distance(a + b, c + full.vector(term), size)


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
    return 1e-5 < max(gaps) < _CLOSE


def shifted(probe: Probe, staged: programs.Program, rows: Any) -> Finding | None:
    """Whether the weight counts one position more in each sequence than the total sums."""
    number = len(probe.terms)
    shapes = [None] * 2 * number if probe.axes else summed_shapes(staged)
    for term, name in enumerate(probe.terms):
        total, weight = shapes[term], shapes[number + term]
        if total is not None and weight is not None and _one_longer(total, weight):
            return _shift(name, f"it sums {list(total)} values and counts {list(weight)}")
        if _counts_lonely_tokens(probe, rows, term):
            return _shift(name, "a sequence of one token has no target but is counted")
    return None


def _shift(name: str, why: str) -> Finding:
    return Finding(
        "shifted_denominator",
        f"The weight of `loss{name}` is counted before the causal shift: {why}.",
        "Count the targets, not the labels: `ja.mean(per_token, where=labels[:, 1:] != pad)`.",
    )


def _one_longer(total: Any, weight: Any) -> bool:
    if len(total) != len(weight):
        return False
    return sorted(w - t for t, w in zip(total, weight, strict=True)) == [0] * (len(total) - 1) + [1]


def _counts_lonely_tokens(probe: Probe, rows: Any, term: int) -> bool:
    """Cuts every sequence to one token; a causal loss then has nothing to count."""
    # Tokens and labels are integers; what else stands side by side in a row need not be in time.
    leaves = [x for x in jax.tree.leaves(rows) if jnp.issubdtype(x.dtype, jnp.integer)]
    lengths = [x.shape[1] for x in leaves if x.ndim > 1]
    length = max(set(lengths), key=lengths.count, default=0)
    if length < 3:
        return False

    def shorter(tokens: int) -> Any:
        return jax.tree.map(
            lambda x: x[:, :tokens] if x.ndim > 1 and x.shape[1] == length else x, rows
        )

    try:
        one, two = probe.on(shorter(1)), probe.on(shorter(2))
    except Exception:  # a model of one fixed length
        return False
    silent = not np.any(one.vector(term))
    return bool(silent and 0 < one.weights[term] < two.weights[term])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
