"""A model's state over a window, pooled from its micro-batches: `StateSums`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import dtypes
from jaxaccum.core.checks import is_inexact, is_key
from jaxaccum.core.mean import divide, wide
from jaxaccum.core.reducers import Addition, Kept, Latest, Moments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StateSums:
    """A window's model state before the division; `read` gives the state.

    Attributes:
      start: the state at the window's start.
      totals: for each leaf the sum of the micro-batches' new values, each times its count, or the
        last new value of a leaf that is not a floating number; `None` for one that does not change.
      moments: for each variance the count, the mean and the sum of squares about the mean of what
        the micro-batches held, `[3, ...]`.
      decays: for each mean beside a variance and each variance, how much of the old value stays.
      number: the summed counts; float32.
      variances: static; the position of each variance among the leaves, with that of its mean.
    """

    start: Any
    totals: list[Any]
    moments: list[Any]
    decays: dict[int, Any]
    number: Any
    variances: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})

    def read(self) -> Any:
        """The state after the window; the one at its start where nothing was counted."""
        start, tree = jax.tree.flatten(self.start)
        old = [*map(numbers, start)]
        new = [
            leaf
            if total is None
            else (divide(total, self.number, empty=0.0) if is_inexact(leaf) else total)
            for leaf, total in zip(old, self.totals, strict=True)
        ]
        for (variance, _), moments in zip(self.variances, self.moments, strict=True):
            pooled = divide(moments[2], moments[0], empty=0.0)
            stays = self.decays[variance]
            new[variance] = stays * old[variance] + (1 - stays) * pooled
        empty = jnp.asarray(self.number) == 0
        kept = [jnp.where(empty, a, b.astype(a.dtype)) for a, b in zip(old, new, strict=True)]
        return jax.tree.unflatten(tree, map(like, kept, start))

    @property
    def reducers(self) -> "StateSums":
        """The same structure with a reducer in the place of each array."""
        return dataclasses.replace(
            self,
            start=jax.tree.map(lambda _: Kept(), self.start),
            totals=jax.tree.map(lambda x: Addition() if is_inexact(x) else Latest(), self.totals),
            moments=[Moments()] * len(self.moments),
            decays=jax.tree.map(lambda _: Kept(), self.decays),
            number=Addition(),
        )


def numbers(leaf: jax.Array) -> jax.Array:
    """A leaf of a state as numbers: the data of a typed PRNG key."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def like(value: jax.Array, leaf: jax.Array) -> jax.Array:
    """The inverse of `numbers`, for a `leaf` of the same kind."""
    if not is_key(leaf):
        return value
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf))


def sound(new: Any, old: Any) -> jax.Array:
    """Whether no number of the state `new` is nan or infinite that was not so in `old`.

    What a model holds for good, such as the -inf of a mask or of a running maximum, is no fault.

    Args:
      new: a state, a tree of arrays.
      old: the state before, of the same structure.
    """
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    flags = [
        (jnp.isfinite(a) | (a == b) | (jnp.isnan(a) & jnp.isnan(b))).all()
        for a, b in pairs
        if not is_key(a) and is_inexact(a)
    ]
    return jnp.stack([jnp.ones((), jnp.bool_), *flags]).all()


def statistic(stays: Any, old: Any, new: Any) -> jax.Array:
    """A batch's own statistic, from the exponential average `new` that it was folded into."""
    dtype = dtypes.promote(wide(jnp.asarray(new).dtype), jnp.float32)
    stays, old, new = (jnp.asarray(x, dtype) for x in (stays, old, new))
    return divide(new - stays * old, 1 - stays, empty=0.0)
