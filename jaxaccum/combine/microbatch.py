"""A differentiable map over micro-batches whose outputs are combined: `microbatch`."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack, overload

from jaxaccum.combine.replay import Replay
from jaxaccum.core import checks
from jaxaccum.devices import reduction
from jaxaccum.numerics import accumulators
from jaxaccum.window import cut, refusals, spmd
from jaxaccum.window.arguments import Given, Options
from jaxaccum.window.batch import checked_argnums
from jaxaccum.window.options import MapCall, MicrobatchOptions
from jaxaccum.window.protocols import CombinedFn
from jaxaccum.window.signatures import batch_fn, factory


@overload
def microbatch(
    fn: Callable[..., Any], *, num_microbatches: int, **options: Unpack[MicrobatchOptions]
) -> CombinedFn: ...


@overload
def microbatch(
    fn: Callable[..., Any], *, microbatch_size: int, **options: Unpack[MicrobatchOptions]
) -> CombinedFn: ...


@factory("microbatch", MicrobatchOptions, MapCall)
def microbatch(fn: Callable[..., Any], **options: Any) -> CombinedFn:
    """Maps `fn` over micro-batches and combines its outputs, differentiably.

    `combined = reduce_k fn(params, batch_k, *args)`, each output by its own reducer. For losses
    that are no sum over examples: any function of `combined` is differentiated exactly, with the
    memory of one micro-batch. The backward pass runs each micro-batch again, with the cotangent of
    `combined`, so it costs two forwards and one backward. `optax.microbatch` has no derivative
    rule: differentiating it keeps what every micro-batch left behind.

    A loss that is a plain mean needs one forward only: use `ja.value_and_grad`.

    Args:
      fn: `fn(params, batch, *args)` on one micro-batch; returns a tree of `ja.Mean`, `ja.Sum`,
        `ja.Max`, `ja.Min`, `ja.Last`, `ja.Concat` and of bare arrays. With `key=` it is called
        with the keyword `key` as well.
      num_microbatches: how many micro-batches; the first `B % num_microbatches` hold one row more.
      microbatch_size: the rows of a micro-batch; the last may be shorter. Exactly one of the two.
      argnums: the positional arguments that may be differentiated; the cotangent of one that is cut
        is in the batch's row order. Values that `fn` closes over may be differentiated as well.
      batch_argnums: the positional arguments that are cut; 1 by default, as in `ja.accumulate`.
      axis_name: mesh axes over which the batch is split, inside `jax.shard_map` or `jax.pmap`. All
        outputs are combined over the devices, concatenated and stacked ones in the order of the
        devices, and are the same on each; gradients meet in one reduction. What is made of the
        outputs must be computed alike on every device, and its gradient must not be reduced again.
      spmd_axis_name: the same under plain `jit`, as in `ja.accumulate`.
      local_params: which parameters are each device's own, as in `ja.accumulate`. Inside
        `shard_map` with replication checked their types say it.
      accumulator: how the gradient sums are carried; float32 by default.
      unroll: as in `jax.lax.scan`.

    Returns:
      `g(params, batch, *args, key=None, num_real=None)`, which returns the tree of `fn`'s outputs
      with plain values: a `Mean` as its quotient, `ja.Sum` in float32, int32 or wider, `ja.Concat`
      in the batch's row order, a bare array stacked along a new leading axis of micro-batches.
      The gradient of `ja.Max` and `ja.Min` is shared equally by the micro-batches that tie. `key`
      is a PRNG key, folded with the micro-batch's index, and the same in the backward pass.
      `num_real`, an int that may be traced, runs only the first so many micro-batches.

    Raises:
      TypeError: an option has the wrong type, or an output is not an array.
      ValueError: the batch cannot be cut; or an argument outside of `argnums` is differentiated.

    Example:
      >>> import jax, jaxaccum as ja, jax.numpy as jnp
      >>> def moments(w, x):
      ...     return ja.Sum(jnp.sum(w * x)), ja.Sum(jnp.sum((w * x) ** 2))
      >>> def loss(w, x, n):
      ...     total, squares = ja.microbatch(moments, num_microbatches=n)(w, x)
      ...     return squares / total
      >>> x = jnp.array([1.0, 2.0, 3.0])
      >>> [round(float(jax.grad(loss)(2.0, x, n)), 4) for n in (1, 3)]
      [2.3333, 2.3333]
    """
    checked = _checked(fn, options)

    def run_fn(args: tuple[Any, ...], given: Given) -> Any:
        if checked.spmd_axis_name is not None:
            return spmd.combine(checked, args, given.key, given.num_real, _combined)
        return _combined(checked, args, given.key, given.num_real)

    return batch_fn(checked, MapCall, run_fn)


def _checked(fn: Any, given: dict[str, Any]) -> Options:
    name = "microbatch"
    if not callable(fn):
        raise TypeError(f"{name}: `fn` must be a function, got {checks.describe(fn)}.")
    axes = {n: given.get(n) for n in ("axis_name", "spmd_axis_name")}
    own = {
        "accumulator": accumulators.checked(
            name, given.get("accumulator"), apart="a replayed gradient is made, then added"
        ),
        "batch_argnums": checked_argnums(name, fn, given.get("batch_argnums"), name="fn"),
        **{n: reduction.names_of(name, n, value) or None for n, value in axes.items()},
        **cut.checked_cut(name, given),
    }
    refusals.check(name, {**cut.NONE, **given})
    return Options(function=name, loss_fn=fn, **{**given, **own})


def _combined(
    options: Options,
    args: Sequence[Any],
    key: Any,
    num_real: Any,
    check_fn: Callable[[Any], None] = lambda program: None,
) -> Any:
    """The combined outputs over the micro-batches of `args`, as a function with a derivative.

    `check_fn` sees the program of the user's function.
    """
    replay = Replay(options, args, key, num_real)
    check_fn(next(iter(replay.programs.values())))
    return replay.combined()
