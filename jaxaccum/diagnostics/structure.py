"""What a loss's program shows without its numbers, and what running it twice shows."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import labels, primitives, programs
from jaxaccum.devices import local_values
from jaxaccum.diagnostics.probes import Probe
from jaxaccum.window.losses import Loss


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


def raised(error: Exception) -> Finding:
    """The loss function fails on the full batch already."""
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return _IMPURE
    return Finding(
        "raises",
        f"The loss function raises on the full batch: {first_line(error)}.",
        "Make it run there first.",
    )


_IMPURE = Finding(
    "impure",
    "Two calls with the same arguments give different results: the loss function reads or changes "
    "something outside of its arguments, such as a counter, running statistics or NumPy's random "
    "numbers. A window calls it once for each micro-batch, and JAX traces it as often as it likes.",
    "Pass state in and return it through `has_aux=True`; pass randomness as `key=`.",
)


def impure(probe: Probe, program: programs.Program, rows: Any) -> Finding | None:
    """Whether a second trace, or a second run of the same program, gives something else."""
    try:
        again = probe.stage(rows)
        if (same_program(program, again) and not callbacks(program)) or probe.axes:
            return None
        runs = [jax.jit(lambda *flat, p=p: p(*flat)) for p in (program, again)]
        flat = probe.flat(rows)
        first, *others = [[np.asarray(x) for x in run(*flat)] for run in runs * 2]
    except jax.errors.UnexpectedTracerError:
        return _IMPURE
    pairs = [pair for other in others for pair in zip(first, other, strict=True)]
    return None if all(np.array_equal(*pair, equal_nan=True) for pair in pairs) else _IMPURE


def structural(probe: Probe, program: programs.Program, rows: Any) -> list[Finding]:
    """What the program shows without its numbers."""
    found = []
    number = len(probe.terms)
    if probe.axes:
        try:
            both = probe.stage(rows, devices=2)
            local_values.check_undivided("", both, number, probe.axes)
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
    loss = Loss(program, jax.tree.structure([0] * number), jax.tree.structure(None))
    try:
        if not probe.axes:
            inputs = len(program.closed.in_avals)
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
    for name, aval in zip(probe.terms * 2, program.closed.out_avals, strict=True):
        if jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4:
            found.append(low_precision(name, aval.dtype))
            break
    return found


def low_precision(name: str, dtype: Any) -> Finding:
    """A sum in few digits."""
    return Finding(
        "low_precision",
        f"The total or weight of `loss{name}` is summed in {dtype}, which stops counting after a "
        "few hundred tokens.",
        "Cast the values before the sum, `values.astype(jnp.float32)`; `ja.mean` does.",
    )


def shifted(probe: Probe, program: programs.Program, rows: Any) -> Finding | None:
    """Whether the weight counts one position more in each sequence than the total sums."""
    number = len(probe.terms)
    shapes = [None] * 2 * number if probe.axes else summed_shapes(program)
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


def narrowest(program: programs.Program) -> Any:
    """The floating dtype of the fewest digits that a program computes in, float32 at most."""
    found = np.dtype(np.float32)
    for eqn in programs.equations(program.jaxpr):
        for var in eqn.outvars:
            dtype = getattr(var.aval, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                continue
            if jnp.finfo(dtype).eps > jnp.finfo(found).eps:
                found = dtype
    return found


def same_program(a: programs.Program, b: programs.Program) -> bool:
    """Whether two programs are the same, equation by equation, constants included."""
    texts = [re.sub("0x[0-9a-f]+", "", str(program.closed)) for program in (a, b)]
    constants = [jax.tree.leaves(program.closed.consts) for program in (a, b)]
    return texts[0] == texts[1] and all(
        np.shape(x) == np.shape(y) and bool(jnp.array_equal(x, y))
        for x, y in zip(*constants, strict=True)
    )


def callbacks(program: programs.Program) -> bool:
    """Whether a program calls the host."""
    return any("callback" in eqn.primitive.name for eqn in programs.equations(program.jaxpr))


def summed_shapes(program: programs.Program) -> list[tuple[int, ...] | None]:
    """The shape of what each output of a program is the sum of, `None` where that is not seen."""

    def rule(eqn: Any, found: Sequence[Any]) -> list[Any]:
        """The shape that went into a sum, or `()` for other results; inputs have none."""
        made = [(f, v) for f, v in zip(found, eqn.invars, strict=True) if f is not None]
        shape: tuple[int, ...] = ()
        if eqn.primitive.name == "reduce_sum":
            shape = found[0] or tuple(eqn.invars[0].aval.shape)
        elif len(made) == 1 and programs.has(eqn, primitives.MULTIPLE):
            ((own, v),) = made  # times a number, in another layout
            shape = own if v.aval.size == eqn.outvars[0].aval.size else ()
        return [shape] * len(eqn.outvars)

    inputs = [None] * len(program.closed.in_avals)
    return [shape or None for shape in labels.follow(program.closed, inputs, rule).outs]


def first_line(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
