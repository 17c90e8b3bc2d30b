"""One window whose micro-batches meet: `accumulate`, `value_and_grad`, `denominators`."""

from typing import Any, Literal, Unpack, overload

import jax

from jaxaccum.window.arguments import Given
from jaxaccum.window.options import KeyCall
from jaxaccum.window.protocols import LossFn
from jaxaccum.window.signatures import batch_fn, factory
from jaxaccum.window.window_fn import Accumulation, checked_options, loss_and_grads, window_sums
from jaxaccum.window_axis.bound import AxisBound, AxisOptions
from jaxaccum.window_axis.options import (
    AxisCall,
    AxisDenominatorsFn,
    AxisDenominatorsOptions,
    AxisSumsCall,
    AxisSumsFn,
    AxisWindowFn,
    AxisWindowOptions,
)


class AxisAccumulation(Accumulation):
    """What `accumulate` returns: from a batch to the window's sums; see there."""

    bound_fn = AxisBound


@overload
def accumulate(
    loss_fn: LossFn, *, num_microbatches: int, **options: Unpack[AxisWindowOptions]
) -> AxisSumsFn: ...


@overload
def accumulate(
    loss_fn: LossFn, *, microbatch_size: int, **options: Unpack[AxisWindowOptions]
) -> AxisSumsFn: ...


@factory("window_axis.accumulate", AxisWindowOptions, AxisSumsCall)
def accumulate(
    loss_fn: LossFn,
    *,
    window_axis_name: str = "window",
    storage: Literal["store", "recompute"] = "store",
    **options: Any,
) -> AxisSumsFn:
    """Sums gradients, losses and weights of micro-batches that meet in collectives, undivided.

    `loss_fn`, or any layer in it, may use `psum`, `pmean`, `all_gather`, `pmax`, `axis_index`, …
    over the window's axis. The totals and weights are those of `jax.vmap(loss_fn,
    axis_name=window_axis_name)` over the micro-batches, with the memory of one of them and of what
    it hands from one collective to the next; the sums are those of `ja.accumulate`. Two forwards
    and one backward.

    Args:
      loss_fn: as in `ja.accumulate`.
      window_axis_name: the name of the window's axis.
      storage: "store" keeps for each micro-batch what crosses a collective, "recompute" computes
        it again from the rows, in as many forwards as collectives that wait for each other.
      num_microbatches: how many micro-batches; a static int that divides the rows.
      microbatch_size: the rows of a micro-batch. Exactly one of the two.
      argnums: the positional arguments to differentiate.
      batch_argnums: the positional arguments that are cut; 1 by default.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      axis_name: mesh axes over which the sums are reduced, once, inside `pmap` or a `shard_map`
        without replication checking. Collectives over devices too name both axes.
      spmd_axis_name: mesh axes over which the sums are reduced, once, under plain `jit`.
      reduction: "defer" or "scatter", as all that follow as in `ja.accumulate`.
      param_specs: which parameters come in parts.
      grad_specs: which gradients are returned in parts.
      reduce_dtype: the dtype in which the sums are reduced over devices, as in `ja.accumulate`.
      local_params: which parameters are each device's own.
      accumulator: how the gradient sums are carried.
      skip_nonfinite: "window" leaves out a window that is not finite.
      unroll: as in `jax.lax.scan`.

    Returns:
      `f(params, batch, *args, key=None, denominators=None, loss_scale=None, into=None)`, which
      returns `WindowSums`; with `into=sums` those of an earlier call and these.

    Raises:
      TypeError: as `ja.accumulate`.
      ValueError: as `ja.accumulate`; or the batch does not divide evenly, a collective stands where
        micro-batches cannot wait for each other, or a gradient would go through a `pmax`.

    Example:
      >>> import jax.numpy as jnp, jaxaccum as ja
      >>> def loss_fn(w, x):  # the variance of the whole window
      ...     return ja.mean((w * x - jax.lax.pmean(jnp.mean(w * x), "window")) ** 2)
      >>> f = ja.window_axis.accumulate(loss_fn, num_microbatches=2)
      >>> print(ja.finalize(f(jnp.float32(1), jnp.array([1.0, 2.0, 3.0, 6.0]))).loss)
      3.5
    """
    return AxisAccumulation(
        _checked("window_axis.accumulate", loss_fn, window_axis_name, storage, options),
        AxisSumsCall,
    )


@overload
def value_and_grad(
    loss_fn: LossFn, *, num_microbatches: int, **options: Unpack[AxisWindowOptions]
) -> AxisWindowFn: ...


@overload
def value_and_grad(
    loss_fn: LossFn, *, microbatch_size: int, **options: Unpack[AxisWindowOptions]
) -> AxisWindowFn: ...


@factory("window_axis.value_and_grad", AxisWindowOptions, AxisCall)
def value_and_grad(
    loss_fn: LossFn,
    *,
    window_axis_name: str = "window",
    storage: Literal["store", "recompute"] = "store",
    **options: Any,
) -> AxisWindowFn:
    """The mean loss of a window whose micro-batches meet, and its gradient.

    `loss = sum_k total_k / sum_k weight_k` and its gradient, where the micro-batches `k` run as
    `jax.vmap(loss_fn, axis_name=window_axis_name)` would run them: with batch normalisation over
    that axis, the full batch's. Gradients are returned in each parameter's own dtype.

    Args:
      loss_fn: as in `ja.value_and_grad`.
      window_axis_name: the name of the window's axis; this and all below as in `accumulate`.
      storage: "store" or "recompute".
      num_microbatches: how many micro-batches.
      microbatch_size: the rows of a micro-batch. Exactly one of the two.
      argnums: the positional arguments to differentiate.
      batch_argnums: the positional arguments that are cut; 1 by default.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      axis_name: mesh axes over which the sums are reduced, inside `pmap` or `shard_map`.
      spmd_axis_name: mesh axes over which the sums are reduced, under plain `jit`.
      reduction: "defer" or "scatter".
      param_specs: which parameters come in parts.
      grad_specs: which gradients are returned in parts.
      reduce_dtype: the dtype in which the sums are reduced over devices, as in `ja.accumulate`.
      local_params: which parameters are each device's own.
      accumulator: how the gradient sums are carried.
      skip_nonfinite: "window" leaves out a window that is not finite.
      unroll: as in `jax.lax.scan`.

    Returns:
      `f(params, batch, *args, key=None, denominators=None, loss_scale=None)`, which returns
      `(loss, grads)`, or `((loss, aux), grads)` with `has_aux`.

    Raises:
      TypeError: as `accumulate`.
      ValueError: as `accumulate`.

    Example:
      >>> import jax.numpy as jnp, jaxaccum as ja
      >>> def loss_fn(w, x):  # the variance of the whole window
      ...     return ja.mean((w * x - jax.lax.pmean(jnp.mean(w * x), "window")) ** 2)
      >>> f = ja.window_axis.value_and_grad(loss_fn, num_microbatches=2)
      >>> loss, grads = f(jnp.float32(1), jnp.array([1.0, 2.0, 3.0, 6.0]))
      >>> print(loss, grads)
      3.5 7.0
    """
    checked = _checked("window_axis.value_and_grad", loss_fn, window_axis_name, storage, options)

    def run_fn(args: tuple[Any, ...], given: Given) -> tuple[Any, Any]:
        return loss_and_grads(checked, args, window_sums(checked, args, given, AxisBound))

    return batch_fn(checked, AxisCall, run_fn)


@overload
def denominators(
    loss_fn: LossFn, *, num_microbatches: int, **options: Unpack[AxisDenominatorsOptions]
) -> AxisDenominatorsFn: ...


@overload
def denominators(
    loss_fn: LossFn, *, microbatch_size: int, **options: Unpack[AxisDenominatorsOptions]
) -> AxisDenominatorsFn: ...


@factory("window_axis.denominators", AxisDenominatorsOptions, KeyCall)
def denominators(
    loss_fn: LossFn, *, window_axis_name: str = "window", **options: Any
) -> AxisDenominatorsFn:
    """Counts the weights of a loss whose micro-batches meet, without running the model.

    As `ja.denominators`, with collectives over the window's axis in what is counted.

    Args:
      loss_fn: as in `ja.denominators`.
      window_axis_name: the name of the window's axis; this and all below as in `accumulate`.
      num_microbatches: how many micro-batches.
      microbatch_size: the rows of a micro-batch. Exactly one of the two.
      argnums: the positional arguments to differentiate.
      batch_argnums: the positional arguments that are cut; 1 by default.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      axis_name: mesh axes over which the weights are summed.

    Returns:
      `d(params, batch, *args, key=None)`, which returns the summed weights in the tree structure of
      the loss.

    Raises:
      TypeError: as `accumulate`.
      ValueError: as `accumulate`.

    Example:
      >>> import jax.numpy as jnp, jaxaccum as ja
      >>> def loss_fn(w, x):  # as much weight for each micro-batch as the largest has
      ...     return ja.Mean(jnp.sum(w * x), jax.lax.pmax(jnp.sum(x > 1), "window"))
      >>> d = ja.window_axis.denominators(loss_fn, num_microbatches=2)
      >>> print(d(jnp.float32(1), jnp.array([1.0, 2.0, 1.0, 6.0])))
      4
    """
    checked = _checked("window_axis.denominators", loss_fn, window_axis_name, "store", options)

    def run_fn(args: tuple[Any, ...], given: Given) -> Any:
        bound = AxisBound(checked, args, given)
        return jax.tree.unflatten(bound.first_loss().terms, bound.count())

    return batch_fn(checked, KeyCall, run_fn)


def _checked(
    function: str, loss_fn: Any, window_axis_name: Any, storage: Any, given: dict[str, Any]
) -> AxisOptions:
    options = vars(checked_options(function, loss_fn, given, window_axis_name=window_axis_name))
    return AxisOptions(**options, window_axis_name=window_axis_name, storage=storage)
