"""A loss function whose gradient is a sum over the examples of their transformed gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import checks, compat
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.mean import Mean, divide, wide
from jaxaccum.core.reducers import Concat, Last, Max, Min, Sum, is_marked
from jaxaccum.devices import shards
from jaxaccum.window.batch import Batch, checked_argnums


def clip(
    loss_fn: Callable[..., Any],
    clip_norm: Any,
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    metrics_fn: Callable[[Any], Any] | None = None,
    skip_nonfinite: bool = False,
) -> Callable[..., Any]:
    """A loss function whose gradient is the sum of the examples' clipped gradients.

    `sum_i grad_i * min(1, clip_norm / norm_i)`, with the weight "number of examples". `norm_i` is
    the global norm over all differentiated arguments. Unlike
    `optax.contrib.differentially_private_aggregate`, which needs all examples' gradients at once,
    it holds those of one micro-batch.

    Args:
      loss_fn: as in `ja.accumulate`; it is called with batches of one row. An example's loss is the
        mean that it returns, or the sum of its terms' means. An example of weight zero, such as a
        row of padding that the loss masks, counts for nothing.
      clip_norm: the largest norm of one example's gradient, in units of the gradient; a positive
        number, may be traced.
      argnums: the positional arguments that will be differentiated, as given to `ja.accumulate`.
      batch_argnums: those that are cut, the same as there; 1 by default.
      has_aux: whether `loss_fn` returns `(loss, aux)`. Marked outputs are combined over the
        examples by their marks; bare arrays become `ja.Concat`, one entry for each example.
      metrics_fn: `metrics_fn(grads)` of one example, before clipping: what to return for each
        example, such as `optax.tree.norm`. Costs an auxiliary output, see below.
      skip_nonfinite: leaves out every example whose loss or gradient is not finite, from the sum
        and from the weight. The option of `ja.accumulate` would leave out its micro-batch.

    Returns:
      A loss function `f(params, batch, *args)`. It has auxiliary outputs, so that `ja.accumulate`
      needs `has_aux=True`: `aux` with `has_aux`, the metrics with `metrics_fn`, or `(aux,
      metrics)` with both. With `key=` each example gets a key of its own, which depends on the
      cut; keys in the batch, `ja.batches.example_keys`, do not.

    Raises:
      TypeError: an argument has the wrong type, or `loss_fn` returns something else than means.
      ValueError: `clip_norm` is not positive, or something outside of `argnums` is differentiated.

    References:
      Martin Abadi and others, "Deep Learning with Differential Privacy", 2016.

    Example:
      >>> import jaxaccum as ja
      >>> loss_fn = ja.per_example.clip(lambda w, x: ja.mean(w * x), 2.0)
      >>> x = jnp.array([1.0, 3.0, 5.0])
      >>> for number in (1, 3):
      ...     print(ja.value_and_grad(loss_fn, num_microbatches=number)(jnp.float32(1), x)[1])
      1.6666666
      1.6666666
    """
    checks.positive("per_example.clip", "clip_norm", clip_norm)

    def clip_fn(grads: Any) -> Any:
        leaves, tree = jax.tree.flatten(grads)
        if not leaves:
            return grads
        leaves = [g.astype(wide(g.dtype)) for g in leaves]
        squares = [jnp.sum(jnp.square(jnp.abs(g))) for g in leaves]
        norm = jnp.sqrt(functools.reduce(jnp.add, squares))
        factor = jnp.where(norm > clip_norm, clip_norm / norm, jnp.ones_like(norm))
        return jax.tree.unflatten(tree, [g * factor.astype(g.dtype) for g in leaves])

    return _transformed(
        "per_example.clip",
        loss_fn,
        clip_fn,
        argnums,
        batch_argnums,
        has_aux,
        metrics_fn,
        skip_nonfinite,
    )


def transform(
    loss_fn: Callable[..., Any],
    transform_fn: Callable[[Any], Any],
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    metrics_fn: Callable[[Any], Any] | None = None,
    skip_nonfinite: bool = False,
) -> Callable[..., Any]:
    """A loss function whose gradient is the sum of the examples' transformed gradients.

    `sum_i transform_fn(grad_i)`, with the weight "number of examples": second moments, signs,
    clipping layer by layer. What `optax.microbatching.micro_grad` returns, as a loss function.

    Args:
      loss_fn: as in `clip`.
      transform_fn: from the gradient of one example to a tree of the same shapes. Its tree is that
        of the differentiated argument, or a tuple of them, with `None` for integer leaves.
      argnums: the positional arguments that will be differentiated, as given to `ja.accumulate`.
      batch_argnums: those that are cut, the same as there; 1 by default.
      has_aux: whether `loss_fn` returns `(loss, aux)`; as in `clip`.
      metrics_fn: what to return for each example, from its gradient before the transformation.
      skip_nonfinite: leaves out every example whose loss or gradient is not finite.

    Returns:
      A loss function, as from `clip`. An example of weight zero adds nothing, whatever
      `transform_fn` makes of a gradient of zero.

    Raises:
      TypeError: as `clip`.
      ValueError: `transform_fn` changes the structure or the shapes, or as `clip`.

    Example:
      >>> import jaxaccum as ja
      >>> loss_fn = ja.per_example.transform(lambda w, x: ja.mean(w * x), jnp.square)
      >>> print(ja.value_and_grad(loss_fn, num_microbatches=2)(1.0, jnp.array([1.0, 3.0]))[1])
      5.0
    """
    return _transformed(
        "per_example.transform",
        loss_fn,
        transform_fn,
        argnums,
        batch_argnums,
        has_aux,
        metrics_fn,
        skip_nonfinite,
    )


def _transformed(
    function: str,
    loss_fn: Any,
    transform_fn: Any,
    argnums: Any,
    batch_argnums: Any,
    has_aux: bool,
    metrics_fn: Any,
    skip_nonfinite: bool,
) -> Callable[..., Any]:
    for name, value in (("loss_fn", loss_fn), ("transform_fn", transform_fn)):
        if not callable(value):
            raise TypeError(
                f"{function}: `{name}` must be a function, got {checks.describe(value)}."
            )

    cut = checked_argnums(function, loss_fn, batch_argnums)

    @functools.wraps(loss_fn)  # whose signature says whether it takes a key
    def per_example_loss_fn(*args: Any, key: Any = None) -> Any:
        batch = Batch(function, args, cut, argnums)
        positions = checks.argnums(function, argnums, len(args))
        both = set(positions) & set(batch.positions)
        if both:
            raise ValueError(
                f"{function}: `argnums` must not name the batch, argument {min(both)}, got "
                f"{argnums}."
            )
        trees = tuple(args[p] for p in positions)
        leaves, tree = jax.tree.flatten(trees)
        moves = [is_inexact(x) for x in leaves]
        moving = [jnp.asarray(x) for x, m in zip(leaves, moves, strict=True) if m]
        over = {name for x in batch.leaves for name in _rows_over(x)}

        def rebuilt(values: Sequence[Any], others: Sequence[Any]) -> Any:
            supply = iter(values)
            every = [next(supply) if m else x for x, m in zip(others, moves, strict=True)]
            return jax.tree.unflatten(tree, every)

        def loss_of_row(moving: list[Any], row: Any, key: Any) -> Any:
            full = batch.put(args, [x[None] for x in row])
            for p, value in zip(positions, rebuilt(moving, leaves), strict=True):
                full[p] = value
            out = loss_fn(*full, **({} if key is None else {"key": key}))
            loss, aux = out if has_aux else (out, None)
            terms = _terms(function, loss)
            value = functools.reduce(
                jnp.add, [divide(term.total, term.weight, empty=0.0) for term in terms]
            )
            counts = jnp.stack([jnp.asarray(term.weight) != 0 for term in terms]).any()
            return value, (counts, aux)

        def one(row: Any, key: Any) -> Any:
            (value, (counts, aux)), grads = jax.value_and_grad(loss_of_row, has_aux=True)(
                [_whole(x, over) for x in jax.lax.stop_gradient(moving)], row, key
            )
            nested = rebuilt(grads, [None] * len(leaves))
            nested = nested if isinstance(argnums, Sequence) else nested[0]
            metrics = None if metrics_fn is None else metrics_fn(nested)
            new = transform_fn(nested)
            remedy = "Return one array for each gradient, of its shape."
            checks.same_structure(function, "transform_fn(grads)", new, nested, remedy=remedy)
            if skip_nonfinite:
                counts = counts & checks.all_finite([value, *grads])
            new = [jnp.where(counts, g, jnp.zeros_like(g)) for g in jax.tree.leaves(new)]
            return jnp.where(counts, value, jnp.zeros_like(value)), counts, new, aux, metrics

        keys = None if key is None else jax.random.split(key, batch.rows)
        values, counts, new, aux, metrics = jax.vmap(one)(batch.leaves, keys)
        sums = [jnp.sum(g, axis=0, dtype=wide(g.dtype)) for g in new]
        sums = [_like(g, x) for g, x in zip(sums, moving, strict=True)]
        total = _with_gradient(jnp.sum(values), moving, sums)
        loss = Mean(total, jnp.sum(counts, dtype=jnp.int32))
        metrics = jax.tree.map(Concat, metrics)
        if has_aux:
            aux = _over_examples(aux)
            return loss, (aux if metrics_fn is None else (aux, metrics))
        return loss if metrics_fn is None else (loss, metrics)

    return per_example_loss_fn


def _rows_over(x: jax.Array) -> tuple[str, ...]:
    """The Explicit axes over which rows are split by their type."""
    spec = compat.spec_of(x)
    return shards.names_in(spec[0]) if len(spec) else ()


def _whole(x: jax.Array, over: set[str]) -> jax.Array:
    """A parameter, whole over the axes of the rows, as each of them has a gradient of its own."""
    spec = compat.spec_of(x)
    if over.isdisjoint(shards.axes_in(spec)):
        return x
    rest = [tuple(n for n in shards.names_in(e) if n not in over) or None for e in spec]
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*rest))


def _like(x: jax.Array, parameter: jax.Array) -> jax.Array:
    """The sum of a parameter's gradients, which lies as it does."""
    spec = compat.spec_of(parameter)
    return x if spec == compat.spec_of(x) else jax.sharding.reshard(x, spec)


def _terms(function: str, loss: Any) -> list[Mean]:
    terms = jax.tree.leaves(loss, is_leaf=lambda x: isinstance(x, Mean))
    for term in terms or [loss]:
        if not isinstance(term, Mean):
            raise TypeError(
                f"{function}: the loss function must return a `ja.Mean`, or a dict or tuple of "
                f"them, got {checks.describe(term)}. Return `ja.mean(per_token_loss, where=mask)`."
            )
    return terms


def _over_examples(aux: Any) -> Any:
    """Marked outputs of all examples, `[rows, ...]`, as those of one micro-batch."""
    folds = {
        Sum: lambda x: jnp.sum(x, axis=0, dtype=wide(x.dtype)),
        Max: lambda x: jnp.max(x, axis=0),
        Min: lambda x: jnp.min(x, axis=0),
        Last: lambda x: x[-1],
        Concat: lambda x: x.reshape((-1, *x.shape[2:])),
    }

    def combine(node: Any) -> Any:
        if isinstance(node, Mean):
            return jax.tree.map(folds[Sum], node)
        return jax.tree.map(folds[type(node)], node) if is_marked(node) else Concat(node)

    return jax.tree.map(combine, aux, is_leaf=is_marked)


@jax.custom_jvp
def _with_gradient(total: Any, moving: list[Any], grads: list[Any]) -> Any:
    """`total`, with the derivative `grads` in `moving`, and in nothing else."""
    del moving, grads
    return total


def _tangent(primals: Any, tangents: Any) -> Any:
    total, _, grads = primals
    of_total, of_moving, _ = tangents
    if not _is_zero(of_total):
        raise ValueError(
            "per_example: something that is not in `argnums` is differentiated: the batch, another "
            "argument, or an array that the loss function closes over. Name the same `argnums` "
            "here and in `ja.accumulate`."
        )
    out = jnp.zeros_like(total)
    for grad, move in zip(grads, of_moving, strict=True):
        if not _is_zero(move):
            product = jnp.sum(grad * move.astype(grad.dtype))
            out = out + jnp.real(product).astype(total.dtype)
    return total, out


_with_gradient.defjvp(_tangent, symbolic_zeros=True)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)
