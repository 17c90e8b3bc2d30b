"""`Mean`: an undivided mean. The library's one addition and its one division live here."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks, dtypes


def wide(dtype: Any) -> Any:
    """The dtype in which values of `dtype` are summed: float32, complex64, int32 or wider."""
    if jnp.issubdtype(dtype, jnp.inexact):
        narrow = jnp.complex64 if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.float32
        return dtypes.promote(dtype, narrow)
    if jnp.issubdtype(dtype, jnp.unsignedinteger) and jnp.dtype(dtype).itemsize >= 4:
        return jnp.dtype(dtype)
    return dtypes.promote(dtype, jnp.int32)


def add(a: Any, b: Any) -> jax.Array:
    """`a + b` in their common dtype: the one addition of the library.

    An integer sum that does not fit becomes `lost(dtype)` and stays it.
    """
    dtype = dtypes.promote(a, b)
    a, b = jnp.asarray(a, dtype), jnp.asarray(b, dtype)
    total = jnp.add(a, b)
    if not jnp.issubdtype(dtype, jnp.integer):
        return total
    signed = jnp.issubdtype(dtype, jnp.signedinteger)
    wrapped = ((a ^ total) & (b ^ total)) < 0 if signed else total < a
    return jnp.where(wrapped | (a == lost(dtype)) | (b == lost(dtype)), lost(dtype), total)


def lost(dtype: Any) -> np.ndarray:
    """What an integer count reads as that did not fit: the nan of integers.

    The smallest value of a signed dtype, which no count has; the largest of an unsigned one.
    """
    info = jnp.iinfo(dtype)
    return np.asarray(info.min if info.min < 0 else info.max, dtype)


def as_float(weight: Any, dtype: Any) -> jax.Array:
    """A weight in a floating `dtype`; nan for an integer count that did not fit."""
    weight = jnp.asarray(weight)
    number = weight.astype(dtype)
    if not jnp.issubdtype(weight.dtype, jnp.integer) or weight.dtype.itemsize < 4:
        return number
    return jnp.where(weight == lost(weight.dtype), np.asarray(jnp.nan, dtype), number)


def divide(total: Any, weight: Any, *, empty: float) -> jax.Array:
    """`total / weight`, and `empty` where the weight is zero: the one division of the library.

    The dtype is that of `total`, float32 at least. Both branches are selected, never multiplied,
    so a nan in `total` cannot outlive a weight of zero, in the value or in the derivative. A count
    that did not fit into its integer dtype divides to nan.
    """
    dtype = dtypes.promote(total, jnp.float32)
    total, weight = jnp.asarray(total, dtype), as_float(weight, dtype)
    is_empty = weight == 0
    divisor = jnp.where(is_empty, jnp.ones_like(weight), weight)
    if total.shape and not divisor.shape:
        # XLA turns the division by a scalar into a multiplication by its rounded reciprocal, one
        # unit in the last place off. Two copies of the scalar that it cannot tell to be equal keep
        # the division, and with it the exact result of small integers.
        divisor = jnp.where(jnp.isfinite(total), divisor, jax.lax.optimization_barrier(divisor))
    return jnp.where(is_empty, np.asarray(empty, dtype), total / divisor)


def quotient(total: Any, weight: Any) -> jax.Array:
    """`total / weight`, and zero where the weight is."""
    return divide(total, weight, empty=0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Mean:
    """A mean that has not been divided yet: `total` over `weight`.

    `c * Mean(a, n) = Mean(c * a, n)` scales the mean, and `ja.merge(Mean(a, n), Mean(b, m)) =
    Mean(a + b, n + m)` is the mean over the examples of both. `optax.MultiSteps` averages the
    quotients `a / n` instead, which is the same only if all weights are equal. `Mean + Mean` is
    refused: two losses stand side by side in a tuple or dict.

    Attributes:
      total: the undivided sum; an array, usually a float scalar.
      weight: what it is to be divided by (tokens, sequences, examples); same shape or a scalar.

    Example:
      >>> import jaxaccum as ja
      >>> both = ja.merge(ja.Mean(6.0, 3), ja.Mean(7.0, 7))
      >>> print(both.value, (0.5 * both).value)
      1.3 0.65
    """

    total: Any
    weight: Any

    # NumPy scalars then leave `c * mean` to `__rmul__` below.
    __array_ufunc__ = None

    @property
    def value(self) -> jax.Array:
        """`total / weight` in float32 or wider; nan where `weight == 0`."""
        self._check()
        return divide(self.total, self.weight, empty=jnp.nan)

    @classmethod
    def from_value(cls, value: Any, weight: Any) -> "Mean":
        """The undivided form of a mean that was already divided.

        `total = value * weight`, and zero where `weight == 0`: the mean of an empty micro-batch
        is nan, and nan times zero would still be nan.

        Args:
          value: the mean; any shape.
          weight: what it was divided by; same shape or a scalar.

        Returns:
          `Mean(value * weight, weight)`, float32 or wider.

        Example:
          >>> print(Mean.from_value(2.0, 7).total, Mean.from_value(float("nan"), 0).total)
          14.0 0.0
        """
        cls(value, weight)._check()
        dtype = dtypes.promote(value, weight, jnp.float32)
        value, factor = jnp.asarray(value, dtype), jnp.asarray(weight, dtype)
        is_empty = jnp.broadcast_to(factor == 0, value.shape)
        kept = jnp.where(is_empty, jnp.zeros_like(value), value)
        return cls(kept * factor, weight)

    def _check(self, function: str = "Mean") -> None:
        for name, part in (("total", self.total), ("weight", self.weight)):
            if not checks.is_array(part):
                raise TypeError(
                    f"{function}: `{name}` must be an array, got {checks.describe(part)}."
                )
        _check_fits(function, "weight", self.weight, self.total)

    def _refuse(self, other: Any) -> Any:
        """Addition, which could mean two things."""
        if isinstance(other, Mean) or (isinstance(other, int) and other == 0):  # of `sum([...])`
            what = "two means cannot be added: it is not known which mean is meant"
        else:
            what = f"cannot add {checks.describe(other)}, which has no weight"
        raise TypeError(
            f"Mean: {what}. Two losses, each with its own weight, stand side by side in a tuple or "
            "dict: `return (a, b)`, a penalty as `ja.Mean(penalty, 1.0)`; their means are added. "
            "`ja.merge(a, b)` pools one loss over two sets of examples."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = _refuse

    def __mul__(self, factor: Any) -> "Mean":
        if not checks.is_array(factor):
            return NotImplemented
        return Mean(self.total * factor, self.weight)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "Mean":
        if not checks.is_array(divisor):
            return NotImplemented
        return Mean(self.total / divisor, self.weight)

    def __neg__(self) -> "Mean":
        return Mean(-self.total, self.weight)


def pool(a: Mean, b: Mean) -> Mean:
    """One loss over the examples of both: `Mean(a.total + b.total, a.weight + b.weight)`.

    Summed in float32, int32 or wider, as over micro-batches.

    Raises:
      TypeError: a part is no array.
      ValueError: the shapes do not fit.
    """
    for part in (a, b):
        part._check("merge")
    _check_fits("merge", "total", b.total, a.total)
    _check_fits("merge", "weight", b.weight, a.weight)
    total = add(_widened(a.total), _widened(b.total))
    return Mean(total, add(_widened(a.weight), _widened(b.weight)))


def _widened(x: Any) -> jax.Array:
    """A part of a mean in the dtype in which such parts are summed."""
    x = jnp.asarray(x)
    return x.astype(wide(x.dtype))


def mean(values: Any, where: Any = None, *, weights: Any = None) -> Mean:
    """The undivided mean of `values`: what a loss function returns.

    `Mean(sum(values), number)`; with `where`, sums and counts the kept positions; with `weights`,
    `Mean(sum(weights * values), sum(weights))`. Unlike `jnp.mean(values, where=where)` it keeps
    sum and count apart, so that the means of several micro-batches can be merged exactly.

    A position that is dropped adds nothing, and the derivative with respect to `values` is exactly
    zero there, also where `values` is nan or inf; the same holds for a nan or inf of weight zero.
    A nan made between the parameters and `values`, such as `0 * nan` inside a multiply, has to be
    masked at its source: `jnp.where(mask, x, 1.0)` *before* the operation that fails.

    Args:
      values: per-token or per-example losses; any shape, real dtype.
      where: boolean mask; the same number of dimensions as `values`, each equal or 1.
      weights: what each position counts for; shapes as for `where`.

    Returns:
      A `Mean` of two scalars. `total` is float32 or wider. `weight` is int32 for counts and for
      integer weights, float32 or wider for float weights.

    Raises:
      TypeError: `values` are complex or not numbers, or `where` is not boolean.
      ValueError: a shape does not fit.

    Example:
      >>> loss = mean(jnp.array([1.0, 2.0, 9.0]), where=jnp.array([True, True, False]))
      >>> print(loss.total, loss.weight, loss.value)
      3.0 2 1.5
    """
    values = _array("values", values)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        raise TypeError(f"mean: `values` must be real, got {checks.describe(values)}.")
    dtype = dtypes.promote(wide(values.dtype), jnp.float32)
    values = values.astype(dtype)
    kept = None
    if where is not None:
        where = _array("where", where)
        if where.dtype != jnp.bool_:
            raise TypeError(
                f"mean: `where` must be boolean, got {checks.describe(where)}. Compare first, for "
                "example `where=mask > 0`, or pass `weights=mask`."
            )
        kept = _fit("where", where, values)
        values = jnp.where(kept, values, jnp.zeros_like(values))
    if weights is None:
        if kept is None:
            return Mean(jnp.sum(values), jnp.asarray(values.size, jnp.int32))
        return Mean(jnp.sum(values), jnp.sum(kept, dtype=jnp.int32))
    weights = _array("weights", weights)
    if jnp.issubdtype(weights.dtype, jnp.complexfloating):
        raise TypeError(f"mean: `weights` must be real, got {checks.describe(weights)}.")
    weights = _fit("weights", weights, values).astype(wide(weights.dtype))
    if kept is not None:
        weights = jnp.where(kept, weights, jnp.zeros_like(weights))
    total_dtype = dtypes.promote(dtype, weights.dtype)
    factor, values = weights.astype(total_dtype), values.astype(total_dtype)
    unseen = (factor == 0) & ~jnp.isfinite(values)
    values = jnp.where(unseen, jnp.zeros_like(values), values)
    weight = jnp.sum(weights)
    if jnp.issubdtype(weight.dtype, jnp.integer):
        weight = kept_sum(weight, jnp.sum(factor))
    return Mean(jnp.sum(factor * values), weight)


def kept_sum(total: jax.Array, estimate: jax.Array) -> jax.Array:
    """An integer sum, or `lost` where a rounded `estimate` of it says that it has wrapped.

    What has wrapped is off by a multiple of the whole range, which no rounding is.
    """
    range_ = 2.0 ** (8 * total.dtype.itemsize)
    near = jnp.abs(estimate - total.astype(estimate.dtype)) < range_ / 4
    return jnp.where(near, total, lost(total.dtype))


def _check_fits(function: str, name: str, x: Any, other: Any) -> None:
    ranks_fit = 0 in (np.ndim(x), np.ndim(other)) or np.ndim(x) == np.ndim(other)
    if not ranks_fit or not all(
        a == b or 1 in (a, b) for a, b in zip(np.shape(x), np.shape(other), strict=False)
    ):
        raise ValueError(
            f"{function}: `{name}` has the shape {np.shape(x)}, which does not fit "
            f"{np.shape(other)}."
        )


def _array(name: str, x: Any) -> jax.Array:
    try:
        if isinstance(x, str):  # JAX would read it as a dtype
            raise TypeError
        array = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"mean: `{name}` must be an array of numbers, got {checks.describe(x)}."
        ) from error
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool_):
        raise TypeError(
            f"mean: `{name}` must be an array of numbers, got {checks.describe(array)}."
        )
    return array


def _fit(name: str, x: jax.Array, values: jax.Array) -> jax.Array:
    """Broadcasts only over dimensions of size one, so that a mask never lines up by accident."""
    fits = x.ndim in (0, values.ndim) and all(
        a in (1, b) for a, b in zip(x.shape, values.shape, strict=False)
    )
    if not fits:
        raise ValueError(
            f"mean: `{name}` must have the shape of `values` {np.shape(values)}, or 1 in some "
            f"dimensions, got {np.shape(x)}. Add the axes that are missing, as in "
            f"`{name}[:, None]` or `{name}[None, :]`."
        )
    return jnp.broadcast_to(x, values.shape)
