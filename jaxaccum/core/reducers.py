"""How the outputs of micro-batches are combined: one small protocol, six reducers, their marks.

A *reducer* says how values of one leaf are folded. A *mark* (`Sum`, `Max`, …) is a wrapper that a
loss function puts around an output to choose its reducer. `Mean` is a pair of sums.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import compat, dtypes
from jaxaccum.core.mean import Mean, add, divide, wide


class Reducer:
    """How one leaf is combined over the micro-batches of a window; a commutative monoid.

    Attributes:
      emits: whether the result holds every micro-batch's value (stacked or concatenated) instead
        of one carried value.
      divides: whether a gradient leaf combined this way is undivided, so that the window's weight
        divides it.
    """

    emits: ClassVar[bool] = False
    divides: ClassVar[bool] = False

    def empty(self, aval: Any) -> Any:
        """The carry of a window without micro-batches, for values of the type `aval`."""
        raise NotImplementedError

    def start(self, value: jax.Array) -> Any:
        """The carry after one value; equal to `fold(empty, value)` without the buffer of zeros."""
        return value

    def fold(self, carry: Any, value: jax.Array) -> Any:
        """The carry after one more value."""
        return self.merge(carry, self.start(value))

    def merge(self, a: Any, b: Any) -> Any:
        """The carry that holds what `a` and `b` hold."""
        raise NotImplementedError

    def restart(self, carry: Any, again: jax.Array) -> Any:
        """The carry; that of a window without micro-batches where `again` holds."""
        return jax.tree.map(lambda x: jnp.where(again, self.empty(x), x), carry)

    def gather(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """One array from the values `[num, ...]` that each segment emitted; see `emits`."""
        raise NotImplementedError

    def keyed(self, key: jax.Array) -> "Reducer":
        """The reducer of one leaf in one micro-step, for those that draw random numbers."""
        del key
        return self

    def outgoing(self, carry: Any) -> Any:
        """The carry as it is summed over devices: arrays in float32, int32 or wider."""
        return carry

    def renormalise(self, carry: Any) -> Any:
        """A carry whose arrays were summed over devices, in the form that `fold` expects."""
        return carry

    def read(self, carry: Any) -> jax.Array:
        """The carry as one array."""
        return carry


class Carried:
    """Base of carries of several arrays that say themselves how they are combined."""

    __slots__ = ()
    reducer: ClassVar[Reducer]


@dataclasses.dataclass(frozen=True)
class Addition(Reducer):
    """Sums in float32, int32 or wider."""

    divides: ClassVar[bool] = True

    def empty(self, aval: Any) -> Any:
        return compat.filled(aval, wide(aval.dtype))

    def start(self, value: jax.Array) -> Any:
        return value.astype(wide(value.dtype))

    def merge(self, a: Any, b: Any) -> Any:
        return add(a, b)


@dataclasses.dataclass(frozen=True)
class Moments(Reducer):
    """Pools counts, means and sums of squares about the mean, `[3, ...]`; float32 or wider.

    Means and squares are never subtracted from each other, so that data far from zero keep their
    variance (Tony Chan, Gene Golub, Randall LeVeque, "Updating Formulae and a Pairwise Algorithm
    for Computing Sample Variances", 1979).
    """

    def empty(self, aval: Any) -> jax.Array:
        return compat.filled(aval, aval.dtype)

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        number = add(a[0], b[0])
        share = divide(b[0], number, empty=0.0)
        distance = b[1] - a[1]
        squares = add(add(a[2], b[2]), distance**2 * a[0] * share)
        return jnp.stack([number, add(a[1], distance * share), squares])


@dataclasses.dataclass(frozen=True)
class Maximum(Reducer):
    """Keeps the elementwise largest value; a nan stays."""

    def empty(self, aval: Any) -> jax.Array:
        return compat.filled(aval, aval.dtype, dtypes.lowest(aval.dtype))

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.maximum(a, b)


@dataclasses.dataclass(frozen=True)
class Minimum(Reducer):
    """Keeps the elementwise smallest value; a nan stays."""

    def empty(self, aval: Any) -> jax.Array:
        return compat.filled(aval, aval.dtype, dtypes.highest(aval.dtype))

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.minimum(a, b)


@dataclasses.dataclass(frozen=True)
class Latest(Reducer):
    """Keeps the last micro-batch's value; zeros if there was none."""

    def empty(self, aval: Any) -> jax.Array:
        return compat.filled(aval, aval.dtype)

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return b


@dataclasses.dataclass(frozen=True)
class Kept(Reducer):
    """What is the same for every micro-batch, such as the state at the window's start."""

    def empty(self, aval: Any) -> Any:
        return aval

    def merge(self, a: Any, b: Any) -> Any:
        return a


@dataclasses.dataclass(frozen=True)
class Agreed(Reducer):
    """What has to be the same on both sides; nan where it is not."""

    def empty(self, aval: Any) -> jax.Array:
        return compat.filled(aval, aval.dtype)

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(a == b, a, np.asarray(jnp.nan, a.dtype))


@dataclasses.dataclass(frozen=True)
class Stack(Reducer):
    """Keeps every micro-batch's value along a new leading axis."""

    emits: ClassVar[bool] = True

    def empty(self, aval: Any) -> jax.Array:
        return compat.filled(aval, aval.dtype)

    def merge(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.concatenate([a, b])

    def gather(self, pieces: Sequence[jax.Array]) -> jax.Array:
        return joined(pieces)


@dataclasses.dataclass(frozen=True)
class Concatenation(Stack):
    """Keeps every example's value along axis 0, in the order of the batch's rows."""

    divides: ClassVar[bool] = True

    def gather(self, pieces: Sequence[jax.Array]) -> jax.Array:
        # A segment is cut strided, so its rows interleave the micro-batches.
        return joined([jnp.swapaxes(p, 0, 1).reshape((-1, *p.shape[2:])) for p in pieces])


def joined(pieces: Sequence[jax.Array]) -> jax.Array:
    """The concatenation of arrays along axis 0."""
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


class Reducers:
    """A tree of reducers as one static value: hashed and compared by what it holds."""

    def __init__(self, tree: Any):
        leaves, self._structure = jax.tree.flatten(tree)
        self._leaves = tuple(leaves)

    @property
    def tree(self) -> Any:
        """The tree, its leaves the reducers."""
        return jax.tree.unflatten(self._structure, self._leaves)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reducers):
            return NotImplemented
        return (self._structure, self._leaves) == (other._structure, other._leaves)

    def __hash__(self) -> int:
        return hash((self._structure, self._leaves))

    def __repr__(self) -> str:
        return f"Reducers({self.tree!r})"


@dataclasses.dataclass(frozen=True, eq=False)
class Mark:
    """Base of the wrappers that choose a reducer for an output; see `Sum`."""

    value: Any
    reducer: ClassVar[Reducer]


def _mark(reducer: Reducer) -> Any:
    def decorate(cls: type[Mark]) -> type[Mark]:
        cls.reducer = reducer
        cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
        return jax.tree_util.register_dataclass(cls, data_fields=["value"], meta_fields=[])

    return decorate


@_mark(Addition())
class Sum(Mark):
    """Marks an output that is summed over the window's micro-batches.

    Sums are carried in float32 or int32 at least, whatever the dtype of `value`.

    Attributes:
      value: an array or a tree of arrays, any shape.
    """


@_mark(Maximum())
class Max(Mark):
    """Marks an output of which the elementwise maximum over the window is kept.

    Attributes:
      value: an array or a tree of arrays, any shape and real dtype.
    """


@_mark(Minimum())
class Min(Mark):
    """Marks an output of which the elementwise minimum over the window is kept.

    Attributes:
      value: an array or a tree of arrays, any shape and real dtype.
    """


@_mark(Latest())
class Last(Mark):
    """Marks an output of which the last micro-batch's value is kept.

    A micro-batch that is skipped or not run is not the last one.

    Attributes:
      value: an array or a tree of arrays, any shape and dtype.
    """


@_mark(Concatenation())
class Concat(Mark):
    """Marks a per-example output: axis 0 is the micro-batch's rows.

    The window's result holds all rows in the order of the batch.

    Attributes:
      value: an array or a tree of arrays whose axis 0 has one entry for each row.
    """


def reducers_of(tree: Any) -> Any:
    """The tree of reducers that the marks in `tree` choose; a bare array is stacked."""

    def choose(node: Any) -> Any:
        if isinstance(node, Mean):
            return jax.tree.map(lambda _: Sum.reducer, node)
        if isinstance(node, Mark):
            return jax.tree.map(lambda _: node.reducer, node)
        return Stack()

    return jax.tree.map(choose, tree, is_leaf=is_marked)


def reducers_of_sums(tree: Any) -> Any:
    """The tree of reducers that sums every leaf of `tree`."""
    return jax.tree.map(lambda _: Sum.reducer, tree)


def is_marked(node: Any) -> bool:
    """Whether `node` is a `Mean` or one of the marks."""
    return isinstance(node, Mean | Mark)


def values_of(tree: Any) -> Any:
    """`tree` with plain values: a `Mean` as its `.value`, a mark as what it wraps."""
    return jax.tree.map(lambda x: x.value if is_marked(x) else x, tree, is_leaf=is_marked)
