"""The numeric cases of a window from public bug reports: a loss, a batch, the right answer.

The toy of the list: a token's loss is `w * x`, so that its gradient is its `x`. Here `w` is the sum
of eight equal entries, so that it can be split over eight devices; each entry's gradient is the
toy's. Sixteen rows, empty ones behind the case's own, give each device two micro-batches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jaxaccum as ja

ROWS = 16


class Problem(NamedTuple):
    """One case.

    Attributes:
      loss_fn: `loss_fn(w, batch)`.
      batch: NumPy leaves of a multiple of sixteen rows.
      grad: the gradient of the toy's `w`, in float64.
      loss: the window's loss; nan where nothing counts.
      weight: what the window holds, or None where it is not asked.
      w: the toy's parameter.
      dtype: of the parameter.
      options: of the window.
      given: denominators that are given to the call.
      exact: whether the answer must be met bit for bit, rounded to the parameter's dtype.
      several: whether the loss has several terms.
    """

    loss_fn: Callable[..., Any]
    batch: Any
    grad: Any
    loss: float = 0.0
    weight: Any = None
    w: float = 0.0
    dtype: str = "float32"
    options: Any = None
    given: Any = None
    exact: bool = True
    several: bool = False

    @property
    def params(self):
        return np.full(8, self.w / 8).astype(jnp.dtype(self.dtype))


def rows(*tokens, dtype=np.float32):
    """Rows of different length as `(x, mask)`, padded with empty rows to a multiple of sixteen."""
    tokens = [*tokens, *[[]] * (-len(tokens) % ROWS)]
    width = max(map(len, tokens))
    x = np.array([[*row, *[0] * (width - len(row))] for row in tokens]).astype(jnp.dtype(dtype))
    return x, np.arange(width) < np.array([[len(row)] for row in tokens])


def token_mean(w, batch):
    """The mean over the kept tokens."""
    x, mask = batch
    return ja.mean(jnp.sum(w) * x, where=mask)


def row_sum(w, batch):
    """One sum for each row that holds something: a row is what counts."""
    x, mask = batch
    kept = jnp.where(mask, jnp.sum(w) * x, 0)
    return ja.Mean(jnp.sum(kept), jnp.sum(mask.any(axis=1)))


def divided(w, batch):
    """A mean that was divided already: nan in an empty micro-batch."""
    x, mask = batch
    count = jnp.sum(mask)
    value = jnp.sum(jnp.where(mask, jnp.sum(w) * x, 0)) / jnp.where(count == 0, jnp.nan, count)
    return ja.Mean.from_value(value, count)


def shifted(w, batch):
    """A label is the target of the token before it."""
    x, mask = batch
    return ja.mean(jnp.sum(w) * x[:, 1:], where=mask[:, 1:])


def with_auxiliary(w, batch):
    """Case 8: the gradient of the auxiliary term is two, its coefficient a tenth."""
    main = token_mean(w, batch)
    return {"main": main, "auxiliary": 0.1 * ja.mean(2 * jnp.sum(w) * batch[0], where=batch[1])}


def with_penalty(w, batch):
    """One term is counted once for each micro-batch."""
    return token_mean(w, batch), ja.Mean(jnp.sum(w) ** 2, 1.0)


def sequence_mean(w, batch):
    """The mean of the packed sequences' own means, by segment ids; -1 is padding."""
    x, segments = batch
    member = segments[:, :, None] == jnp.arange(2)[None, None]
    lengths = jnp.sum(member, axis=1)
    sums = jnp.sum(jnp.where(member, (jnp.sum(w) * x)[:, :, None], 0), axis=1)
    return ja.mean(sums / jnp.maximum(lengths, 1), where=lengths > 0)


def at_the_source(w, batch):
    """What is left out is masked before the multiply, which would make `0 * nan`."""
    x, mask = batch
    return ja.mean(jnp.sum(w) * jnp.where(mask, x, 1), where=mask)


def after_the_loss(w, batch):
    """What is left out is nan in the loss, but not in its derivative."""
    x, mask = batch
    return ja.mean(jnp.sum(w) + x, where=mask)


def real_part(w, batch):
    x, mask = batch
    return ja.mean(jnp.real(jnp.sum(w) * x), where=mask)


def counted(w, batch):
    """Large integer counts: one loss of `w` in each row that holds something."""
    count, mask = batch
    kept = jnp.where(mask, count, 0)
    return ja.Mean(jnp.sum(w) * jnp.sum(mask), jnp.sum(kept))


def unit_weight(w, batch):
    """A sum: what all rows count is one."""
    x, mask = batch
    kept = jnp.where(mask, jnp.sum(w) * x, 0)
    return ja.Mean(jnp.sum(kept, dtype=wider(kept)), x.shape[0] / UNIT_ROWS)


UNIT_ROWS = 1024


def wider(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def side_by_side(w, batch):
    """Two losses in a tuple, each with its own mean."""
    x, mask = batch
    return (
        ja.mean(jnp.sum(w) * x, where=mask),
        0.5 * ja.mean(jnp.sum(w) * x, where=mask & (x > 1)),
    )


def detection(w, batch):
    """The second term has no weight of its own."""
    x, mask = batch
    return {
        "cls": token_mean(w, (x[:, :1], mask[:, :1])),
        "box": ja.Mean(jnp.sum(w) * jnp.sum(jnp.where(mask, x, 0)[:, 1:]), 0),
    }


def boxes(w, batch):
    return ja.Mean(jnp.sum(w) * jnp.sum(batch[0]), 0)


def nothing_counts(w, batch):
    x, mask = batch
    return ja.mean(jnp.sum(w) * x, where=mask), 0.5 * ja.mean(jnp.sum(w) * x, where=mask)


def packed():
    x = np.zeros((ROWS, 5), np.float32)
    segments = np.full((ROWS, 5), -1)
    x[:2], segments[:2] = [10, 1, 1, 1, 1], [0, 1, 1, 1, 1]
    return x, segments


def holes(value):
    x, mask = rows([1, value], [3, 5])
    return x, mask & np.isfinite(x)


def nothing(value):
    x, mask = rows([value] * 3, [value] * 3)
    return x, mask & False


FOUR = rows([1], [np.nan], [3], [5])
SKIP = {"skip_nonfinite": True}
COMPLEX = rows([1 + 2j], [3 - 5j], [2 + 1j], dtype="complex64")
TINY = [1.0] + [2.0**-25] * 1023

PROBLEMS = {
    "1": Problem(token_mean, rows([1, 2, 3], [1] * 7), 1.3, 1.3, 10, w=1.0, exact=False),
    "2": Problem(divided, rows([1, 3], [3, 5]), 3.0, weight=4),
    "4": Problem(shifted, rows([1] * 5, [1] * 5), 1.0, weight=8),
    "5": Problem(token_mean, rows([1] * 10, [3] * 20), 70 / 30, weight=30, exact=False),
    "6": Problem(
        token_mean,
        rows(*[[length % 5 - 2] * length for length in range(1, 9)]),
        sum((length % 5 - 2) * length for length in range(1, 9)) / 36,
        weight=36,
        exact=False,
    ),
    "8": Problem(with_auxiliary, rows(*[[1]] * 4), 1.2, 1.2, w=1.0, exact=False, several=True),
    "8 penalty": Problem(with_penalty, rows(*[[1]] * 4), 1.0 + 6.0, 3.0 + 9.0, w=3.0, several=True),
    "9": Problem(sequence_mean, packed(), 5.5, weight=4),
    "10": Problem(token_mean, rows([1], [2], [3], [44]), 0.5, 1.0, w=2.0, given=100.0, exact=False),
    "11": Problem(token_mean, rows([1] * 4, [0] * 60), 0.0625, weight=64),
    "13": Problem(token_mean, nothing(np.nan), 0.0, np.nan, 0),
    "14": Problem(token_mean, rows([], [1] * 7), 1.0, 1.0, 7, w=1.0),
    "14 reversed": Problem(token_mean, rows([1] * 7, []), 1.0, 1.0, 7, w=1.0),
    "15": Problem(divided, rows([], [1] * 7), 1.0, 1.0, 7, w=1.0),
    "16": Problem(after_the_loss, holes(np.nan), 1.0, 3.0, 3),
    "16 at the source": Problem(at_the_source, holes(np.inf), 3.0, 3.0, 3, w=1.0),
    "18": Problem(row_sum, FOUR, 3.0, 3.0, 3, w=1.0, options=SKIP),
    "19": Problem(row_sum, FOUR, np.nan, np.nan, w=1.0),
    "21": Problem(token_mean, rows([1] * 5, [7]), 2.0, weight=6),
    "31": Problem(row_sum, rows([2], [4]), 3.0, 3.0, 2, w=1.0),
    "49": Problem(unit_weight, rows(*[[1]] * 1024), 1024.0, dtype="bfloat16"),
    "50": Problem(row_sum, rows(*[[20000]] * 4, dtype="float16"), 20000.0, dtype="float16"),
    "50 small": Problem(
        row_sum,
        rows(*[[2e-5]] * 1024, dtype="float16"),
        np.float64(np.float16(2e-5)),
        dtype="float16",
    ),
    "51": Problem(real_part, COMPLEX, 2 - 2j / 3, dtype="complex64", exact=False),
    "51 float64": Problem(
        row_sum,
        rows([1], [1e-14], [2], dtype="float64"),
        (1 + 1e-14 + 2) / 3,
        (1 + 1e-14 + 2) / 3,
        w=1.0,
        dtype="float64",
        exact=False,
    ),
    "52": Problem(
        unit_weight,
        rows(*[[x] for x in TINY]),
        sum(TINY),
        options={"accumulator": ja.accumulators.compensated()},
    ),
    "53": Problem(
        counted,
        rows([2**24], [1], [1], [1], dtype="int32"),
        4 / (2**24 + 3),
        weight=2**24 + 3,
        exact=False,
    ),
    "62": Problem(side_by_side, rows([1], [1], [4]), 2.0 + 2.0, 4.0, w=1.0, several=True),
    "66": Problem(
        detection,
        rows([1, 5], [2, 8], [3, 6], [7, 7]),
        29.25,
        29.25,
        w=1.0,
        given={"cls": 4, "box": 1},
        several=True,
    ),
    "66 alone": Problem(boxes, rows([5], [8], [6], [7]), 26.0, 26.0, w=1.0, given=1),
    "73": Problem(nothing_counts, nothing(np.nan), 0.0, np.nan, several=True),
    "79": Problem(
        row_sum,
        FOUR,
        3.0,
        3.0,
        3,
        w=1.0,
        options={**SKIP, "accumulator": ja.accumulators.chunked()},
    ),
}
