"""One window inside a step: `accumulate`, `value_and_grad`, `denominators`."""

from typing import Any, Unpack, overload

import jax

from jaxaccum.window.arguments import Given
from jaxaccum.window.bound import Counter
from jaxaccum.window.options import (
    AccumulateOptions,
    DenominatorsCall,
    DenominatorsOptions,
    SumsCall,
    ValueAndGradOptions,
    WindowCall,
)
from jaxaccum.window.protocols import DenominatorsFn, LossFn, SumsFn, WindowFn
from jaxaccum.window.signatures import batch_fn, factory
from jaxaccum.window.window_fn import Accumulation, checked_options, loss_and_grads, window_sums


@overload
def accumulate(
    loss_fn: LossFn, *, num_microbatches: int, **options: Unpack[AccumulateOptions]
) -> SumsFn: ...


@overload
def accumulate(
    loss_fn: LossFn, *, microbatch_size: int, **options: Unpack[AccumulateOptions]
) -> SumsFn: ...


@factory("accumulate", AccumulateOptions, SumsCall)
def accumulate(loss_fn: LossFn, **options: Any) -> SumsFn:
    """Sums gradients, losses and weights over the micro-batches of a batch, undivided.

    `grads = sum_k grad(total_k)`, `loss = sum_k total_k`, `weight = sum_k weight_k` over the
    micro-batches `k`, where `loss_fn` returns `Mean(total_k, weight_k)`. `finalize` divides.
    `optax.microbatch` sums in the gradient's dtype and knows no weights.

    A loss of several terms, each with its own denominator, is exact in one accumulator: a first
    pass, stripped of the model, finds the denominators `D`, and `grads = sum_k sum_t
    grad(total_kt) / D_t`.

    Args:
      loss_fn: `loss_fn(params, batch, *args)` on one micro-batch; returns a `Mean` or a dict or
        tuple of `Mean`s, with `has_aux` also auxiliary outputs. With `key=` it is called with the
        keyword `key` as well.
      num_microbatches: how many micro-batches; the first `B % num_microbatches` hold one row more.
      microbatch_size: the rows of a micro-batch; the last may be shorter. Exactly one of the two.
      argnums: the positional arguments to differentiate, as in `jax.grad`; the gradient of one that
        is cut comes back in the batch's row order.
      batch_argnums: the positional arguments that are cut along axis 0, all of the same number of
        rows; the others pass through whole. 1 by default, and then another argument whose arrays
        all have the batch's number of rows is refused until it is said what it is.
      has_aux: whether `loss_fn` returns `(loss, aux)`. Leaves of `aux` are combined by their
        marks: `Mean`, `Sum`, `Max`, `Min`, `Last`, `Concat`; a bare array is stacked along a new
        leading axis of micro-batches.
      axis_name: mesh axes over which the batch is split, inside `jax.shard_map` or `jax.pmap`: the
        sums of all devices meet in one reduction at the end. `num_real` may differ per device;
        keys do. Stacked and `Concat` outputs stay on their device, as shards of the whole.
      spmd_axis_name: the same under plain `jit`: mesh axes over which the rows of the batch are
        split. The mesh is that of `jax.set_mesh`, or of the arguments. Rows must divide by the
        devices; `num_real` may hold one number for each.
      reduction: for sums in parts (`grad_specs`), the choice between communication and memory.
        "defer" keeps whole sums on each device and reduce-scatters them once, at the end;
        "scatter" reduce-scatters each micro-batch's gradient into a sum of 1/W the size. Axes that
        no spec names are reduced once, at the end, in both.
      param_specs: which parameters come in parts, split over the axes of the window (FSDP): a tree
        prefix of the parameters with `PartitionSpec` leaves. `loss_fn` sees them whole: gathered
        once with "defer", in every micro-step with "scatter". Under `spmd_axis_name` on an
        Explicit mesh they are read off the types.
      grad_specs: which gradients are returned in parts; `param_specs` by default. With whole
        parameters this is ZeRO: a sharded optimizer update follows.
      whole_params: whether `loss_fn` sees parameters whole that come in parts. With False it sees
        its parts, and makes one layer whole at a time with `ja.gather`, which sums the gradient of
        a part over its devices in every micro-step (ZeRO-3); over the other axes of the window
        such a sum is reduced once, at the end.
      reduce_dtype: the dtype in which the sums of gradients are reduced over devices; wider sums
        travel as they are. `jnp.bfloat16` halves what travels and rounds each device's sum once.
        Weights, losses and counts are never narrowed.
      overlap: whether the last micro-batch stands outside of the loop, so that the compiler may run
        its backward pass beside the reduction of sums that are complete. The model is compiled
        twice. Where `num_real` is given, no micro-batch is known to be the last one, and nothing
        changes.
      local_params: which parameters are each device's own (experts, stages): a tree prefix of the
        parameters with `PartitionSpec` leaves. `loss_fn` sees its own, and its gradient is not
        summed over the axes named there, while weights are. A parameter that is typed as different
        over an axis of the window is refused where neither this nor `param_specs` says why; with
        `check_vma=False` and in `pmap` types say nothing, and it must be named here. Clip
        by a norm of all gradients with `jaxaccum.norms` then.
      accumulator: how the gradient sums are carried; float32 by default.
      skip_nonfinite: leaves out, with its weight and its carried outputs, every micro-batch whose
        loss, gradient or new model state is not finite; the window is shorter by it. "window"
        leaves out the whole window instead, as one without micro-batches. What is stacked or
        concatenated is kept as it came. With "scatter" all devices leave out the same micro-steps,
        since the part of one device holds the gradients of all.
      grad_reducers: for gradient leaves that are not sums (FP8 scaling state): a tree prefix of
        the gradients with `ja.Sum`, `ja.Max`, `ja.Min` or `ja.Last` as leaves.
      model_state: what the window does to state that the model keeps beside its parameters, such
        as running batch statistics. `loss_fn` then receives the keyword `model_state` and returns
        `(loss, new_state)`, with `has_aux` `(loss, (aux, new_state))`. "sequential": each
        micro-batch updates what the last one left; devices are averaged. "pooled": all start from
        the same state, and floating leaves become the mean of the new values, weighted by rows (see
        `ja.Counted`); a leaf `var` beside a leaf `mean` becomes the running variance of the whole
        window, spread between the micro-batches included; other leaves are the last one's.
        "frozen": stays as it was.
      unroll: as in `jax.lax.scan`.
      noise_scale: whether the sums also hold what `ja.noise_scale` needs: one scalar and one count
        more, from the gradients that are there anyway. For losses of one term.

    Returns:
      `f(params, batch, *args, key=None, num_real=None, denominators=None, loss_scale=None,
      model_state=None, into=None)`, which returns `WindowSums`. `key` is a PRNG key, folded with
      the micro-batch's index, for `loss_fn` and for an accumulator that rounds stochastically.
      `num_real`, an int that may be traced, runs only the first so many micro-batches without
      recompilation.
      `denominators`, a number for each loss term, replaces the terms' own: a term then counts
      whatever its own weight is. Where it is traced and zero, the term adds nothing. `loss_scale`,
      a scalar that may be traced, multiplies the loss for the backward pass only: gradients come
      back unscaled, each divided by it in float32 before it is added (see `ja.loss_scaling`).
      `into`, sums that an earlier call returned, is what the window goes on from: `f(params, batch,
      into=sums)` is `merge(sums, f(params, batch))` without a second set of sums, added in place
      where `sums` is donated.

    Raises:
      TypeError: an option has the wrong type, or `loss_fn` returns something else than means.
      ValueError: the batch cannot be cut, a weight depends on the parameters, or `into` does not
        match.

    Example:
      >>> import jax.numpy as jnp, jaxaccum as ja
      >>> f = ja.accumulate(lambda w, x: ja.mean(w * x), num_microbatches=2)
      >>> sums = f(jnp.float32(0), jnp.array([1.0, 2.0, 3.0]))
      >>> print(sums.grads, sums.weight, ja.finalize(sums).grads)
      6.0 3 2.0
    """
    return Accumulation(checked_options("accumulate", loss_fn, options), SumsCall)


@overload
def value_and_grad(
    loss_fn: LossFn, *, num_microbatches: int, **options: Unpack[ValueAndGradOptions]
) -> WindowFn: ...


@overload
def value_and_grad(
    loss_fn: LossFn, *, microbatch_size: int, **options: Unpack[ValueAndGradOptions]
) -> WindowFn: ...


@factory("value_and_grad", ValueAndGradOptions, WindowCall)
def value_and_grad(loss_fn: LossFn, **options: Any) -> WindowFn:
    """The window's mean loss and its gradient, like `jax.value_and_grad` of the full batch.

    `loss = sum_k total_k / sum_k weight_k` and its gradient, for every cut of the batch the same
    to rounding. The sums are float32 or wider, the gradients are returned in each parameter's own
    dtype. The memory is that of one micro-batch and one float32 sum for each parameter.

    Args:
      loss_fn: `loss_fn(params, batch, *args)` on one micro-batch; returns a `Mean` or a dict or
        tuple of them, with `has_aux` also auxiliary outputs.
      num_microbatches: how many micro-batches; this and all below as in `accumulate`.
      microbatch_size: the rows of a micro-batch. Exactly one of the two.
      argnums: the positional arguments to differentiate.
      batch_argnums: the positional arguments that are cut; 1 by default.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      axis_name: mesh axes over which the sums are reduced, once, inside `shard_map` or `pmap`.
      spmd_axis_name: mesh axes over which the sums are reduced, once, under plain `jit`.
      reduction: "defer" or "scatter".
      param_specs: which parameters come in parts.
      grad_specs: which gradients are returned in parts.
      whole_params: whether the loss sees parts of parameters whole.
      reduce_dtype: the dtype in which the sums are reduced over devices.
      overlap: whether the last micro-batch stands outside of the loop.
      local_params: which parameters are each device's own.
      accumulator: how the gradient sums are carried.
      skip_nonfinite: whether to leave out micro-batches, or windows, that are not finite.
      grad_reducers: reducers of gradient leaves that are not sums.
      model_state: what the window does to the model's state.
      unroll: as in `jax.lax.scan`.

    Returns:
      `f(params, batch, *args, key=None, num_real=None, denominators=None, loss_scale=None,
      model_state=None)`, which returns `(loss, grads)`, or `((loss, aux), grads)` with `has_aux`;
      with a policy for it the new model state stands in the place of `aux`, or beside it, as
      `loss_fn` returns it. Where the weight of the window is zero the gradients are exactly zero
      and the loss is nan.

    Raises:
      TypeError: as `accumulate`.
      ValueError: as `accumulate`.

    Example:
      >>> import jax.numpy as jnp, jaxaccum as ja
      >>> f = ja.value_and_grad(lambda w, x: ja.mean(w * x), microbatch_size=2)
      >>> loss, grads = f(jnp.float32(1), jnp.array([1.0, 2.0, 3.0]))
      >>> print(loss, grads)
      2.0 2.0
    """
    checked = checked_options("value_and_grad", loss_fn, options)

    def run_fn(args: tuple[Any, ...], given: Given) -> tuple[Any, Any]:
        return loss_and_grads(checked, args, window_sums(checked, args, given))

    return batch_fn(checked, WindowCall, run_fn)


@overload
def denominators(
    loss_fn: LossFn, *, num_microbatches: int, **options: Unpack[DenominatorsOptions]
) -> DenominatorsFn: ...


@overload
def denominators(
    loss_fn: LossFn, *, microbatch_size: int, **options: Unpack[DenominatorsOptions]
) -> DenominatorsFn: ...


@factory("denominators", DenominatorsOptions, DenominatorsCall)
def denominators(loss_fn: LossFn, **options: Any) -> DenominatorsFn:
    """Counts the weights of a loss's terms over a batch, without running the model.

    Add the results over several batches, `jax.tree.map(jnp.add, d(params, a), d(params, b))`, and
    pass them as `denominators=` to make sums of several-term losses that merge across batches.

    Args:
      loss_fn: as in `accumulate`.
      num_microbatches: how many micro-batches; as in `accumulate`.
      microbatch_size: the rows of a micro-batch. Exactly one of the two.
      argnums: the positional arguments to differentiate.
      batch_argnums: the positional arguments that are cut; 1 by default.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      axis_name: mesh axes over which the weights are summed.
      model_state: as in `accumulate`; the weights must not depend on it.

    Returns:
      `d(params, batch, *args, key=None, num_real=None, model_state=None)`, which returns the summed
      weights in the tree structure of the loss: int32 where they are integers, float32 or wider
      elsewhere.

    Raises:
      TypeError: as `accumulate`.
      ValueError: as `accumulate`.

    Example:
      >>> import jax.numpy as jnp, jaxaccum as ja
      >>> def loss_fn(w, x):
      ...     return {"fit": ja.mean(w * x), "penalty": ja.Mean(w * w, 1.0)}
      >>> d = ja.denominators(loss_fn, num_microbatches=1)(jnp.float32(2), jnp.ones(4))
      >>> print(d["fit"], d["penalty"])
      4 1.0
    """
    checked = checked_options("denominators", loss_fn, options)

    def run_fn(args: tuple[Any, ...], given: Given) -> Any:
        bound = Counter(checked, args, given)
        return jax.tree.unflatten(bound.first_loss().terms, bound.count())

    return batch_fn(checked, DenominatorsCall, run_fn)
