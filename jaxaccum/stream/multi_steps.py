"""The streaming transformation: a window over many calls of `update`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxaccum.closing.inner import in_one_precision
from jaxaccum.core import checks, faults
from jaxaccum.devices import reduction, wires
from jaxaccum.numerics import accumulators, loss_scaling
from jaxaccum.stream.length import checked_length, is_one, until_weight
from jaxaccum.stream.single import Single
from jaxaccum.stream.state import MultiSteps, MultiStepsState, check_no_window
from jaxaccum.stream.update import Stream
from jaxaccum.window import refusals


@checks.renamed(
    "multi_steps",
    every_k_schedule="every",
    use_grad_mean="normalize",
    should_skip_update_fn="skip_nonfinite",
)
def multi_steps(
    inner: optax.GradientTransformation,
    every: int | Callable[[jax.Array], Any] | until_weight,
    *,
    axis_name: str | Sequence[str] | None = None,
    local_params: Any = None,
    reduce_dtype: DTypeLike = jnp.float32,
    accumulator: accumulators.Accumulator | None = None,
    skip_nonfinite: bool | Literal["window"] = False,
    max_bad_windows: int | None = None,
    loss_scale: loss_scaling.LossScale | None = None,
    mean_args: Sequence[str] = ("value",),
    grad_args: Sequence[str] = ("grad",),
    normalize: bool = True,
) -> MultiSteps:
    """Runs `inner` once per window of `every` micro-steps, on the window's mean gradient.

    A micro-step adds `grad_sum` and `weight` to the state and returns updates that change no bit.
    The micro-step that closes the window hands `grad_sum / weight` to `inner` and resets the sums.
    `optax.MultiSteps` averages unweighted means, and runs `inner` in every micro-step only to
    throw its result away in all but one.

    Donate the state (and the parameters) to the jitted function that calls `update`: then the
    sums are added in place. JAX refuses to take over one buffer twice, as of two leaves that hold
    the same array: keep a tied parameter once and use it twice in the loss, or copy it.

    Args:
      inner: the optimizer; it sees the gradient of the large batch, and its step counts windows.
      every: micro-steps per window: a static int; or a function from the optimizer step (int32
        scalar) to an integer scalar, read at the window's start; or `until_weight(target)`. Where
        the scalar is traced, less than 1 means 1.
      axis_name: mesh axes over which the batch is split, inside `shard_map` or `pmap`: sums stay on
        their device between calls and meet in one reduction when the window closes. Gradients
        must not be reduced before. See `ja.state_specs` for the state's layout.
      local_params: which parameters are each device's own, as in `ja.accumulate`: over the axes
        named there their sums do not meet. Their part of the inner state is each device's own as
        well; a norm over all gradients, as in clipping, would be too, and the shared parameters
        would go apart.
      reduce_dtype: the dtype in which sums meet over devices, as in `ja.accumulate`.
      accumulator: how the gradient sums are carried; float32 by default.
      skip_nonfinite: leaves out every micro-step whose gradient, weight or averaged argument is not
        finite, on all devices where it is not on one. It does not advance the window: the next
        micro-step takes its place. "window" instead drops a window whose sums are not finite when
        it closes: no optimizer step, at no cost in the calls before.
      max_bad_windows: how many bad windows in a row set the state's `diverged`, after which no
        optimizer step is applied any more. Bad is a dropped window; where micro-steps are skipped,
        as many of them in a row as a window has (each one with `until_weight`).
      loss_scale: from `ja.loss_scaling`. Its state is `state.loss_scale`; pass
        `state.loss_scale.scale` to `ja.accumulate(...)(..., loss_scale=...)`, or multiply the loss
        and call `ja.loss_scaling.unscale`: `update` takes unscaled gradients, as always. Implies
        `skip_nonfinite="window"` where nothing else is chosen.
      mean_args: names of extra arguments that may be given as `ja.Mean`; `inner` receives their
        mean over the calls of the window that gave them.
      grad_args: names of extra arguments that are gradients (line searches take `grad=`); `inner`
        receives the window's mean gradient instead.
      normalize: whether to divide by the weight; `False` hands on the sums.

    Returns:
      A transformation. Its `update(sums, state, params=None, **extra_args)` takes the `WindowSums`
      of `ja.accumulate`, with their weight and with what they skipped; one call is one micro-step,
      however many micro-batches they hold. `update(grad_sum, state, params, weight=n)` takes a tree
      of undivided gradients (any inexact dtype) and their weight, a real scalar; without it they
      are means that count equally. Updates have the dtype that `inner` gives for the gradient's own
      dtype. A window that closes with a weight of zero is dropped: `inner` does not run, unless
      its state asks for every window, as that of `ja.per_example.noise` does.

      `inner` never sees leaves without a gradient (integers, booleans, keys): it finds `None` in
      their places. Their updates change no bit under `optax.apply_updates`: zeros in the dtype of
      the leaf, an empty node for a key. `None` comes back for a gradient of `None`.

      Of `WindowSums` the gradients, the weight and the skips are taken; auxiliary outputs, the loss
      and the model's state stay with the caller. Gradients of several terms must have been made
      with `denominators=` of the whole window, under `normalize=False`; `until_weight` then counts
      the largest of the terms' weights. Members of an `optax.chain` before `multi_steps` would see
      the sums of one call and change them with their weight: put them inside.

    Raises:
      TypeError: `inner` or `every` has the wrong type, or `inner` is a window itself.
      ValueError: `every` is less than 1, or the gradients do not match the state.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp, optax
      >>> tx = ja.multi_steps(optax.sgd(1.0), 2)
      >>> state = tx.init(jnp.float32(0))
      >>> sums_fn = ja.accumulate(lambda w, x: ja.mean(w * x), num_microbatches=1)
      >>> for x in (jnp.array([1.0, 2.0, 3.0]), jnp.ones(7)):
      ...     updates, state = tx.update(sums_fn(jnp.float32(0), x), state)
      >>> print(updates)
      -1.3
    """
    checks.transformation("multi_steps", "inner", inner)
    check_no_window("multi_steps", "inner", inner)
    accumulator = accumulators.checked(
        "multi_steps", accumulator, apart="a stream adds gradients that it is given"
    )
    every = checked_length(every)
    loss_scale = loss_scaling.checked("multi_steps", loss_scale)
    skips = faults.policy("multi_steps", skip_nonfinite)
    if loss_scale is not None and skips is None:
        skips = faults.WINDOW
    limit = faults.limit("multi_steps", max_bad_windows)
    for name, value in (("mean_args", mean_args), ("grad_args", grad_args)):
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        if not (listed and all(isinstance(n, str) for n in value)):
            raise TypeError(
                f"multi_steps: `{name}` must be a tuple of argument names, got {value!r}. For one "
                f'name pass `{name}=("value",)`.'
            )
    names = reduction.names_of("multi_steps", "axis_name", axis_name)
    given = {
        "axis_name": axis_name,
        "local_params": local_params,
        "max_bad_windows": max_bad_windows,
        "skip_nonfinite": skips,
    }
    refusals.check("multi_steps", given)
    wires.check("multi_steps", reduce_dtype, axis_name)
    kind = Single if is_one(every) else Stream
    stream = kind(
        inner=in_one_precision(inner),
        every=every,
        axis_name=axis_name,
        names=names,
        local_params=local_params,
        reduce_dtype=reduce_dtype,
        accumulator=accumulator,
        skips=skips,
        limit=limit,
        loss_scale=loss_scale,
        mean_args=tuple(mean_args),
        grad_args=tuple(grad_args),
        normalize=normalize,
    )

    def update_fn(
        updates: Any,
        state: MultiStepsState,
        params: Any = None,
        *,
        weight: Any = None,
        flush: bool = False,
        **extra_args: Any,
    ) -> tuple[Any, MultiStepsState]:
        return stream.update(updates, state, params, extra_args, weight=weight, flush=flush)

    return MultiSteps(stream.init, update_fn)
