"""An NNX optimizer that counts optimizer steps, and training steps over model and optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, Unpack, overload

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxaccum.closing.handover import own_buffer
from jaxaccum.closing.inner import of_trained
from jaxaccum.core import checks
from jaxaccum.core.sums import WindowSums
from jaxaccum.nnx.windows import Call
from jaxaccum.numerics import loss_scaling
from jaxaccum.stream.state import (
    check_divides,
    check_no_window,
    find_states,
    has_updated,
)
from jaxaccum.stream.state import flush as plain_flush
from jaxaccum.training.records import StepInfo, StepOptions, StepState
from jaxaccum.training.step import train_step as plain_train_step
from jaxaccum.window.arguments import Given
from jaxaccum.window.options import StepCall, WindowCall
from jaxaccum.window.protocols import LossFn
from jaxaccum.window.signatures import NOTHING, call_signature, factory, signed, taken
from jaxaccum.window.window_fn import Accumulation, checked_options


class Optimizer(nnx.Optimizer):
    """A `flax.nnx.Optimizer` whose `step` counts optimizer steps.

    Flax's own counts calls of `update`, which under `ja.multi_steps` are micro-steps.

    Args:
      model: an NNX module.
      tx: an Optax optimizer; for `update` it may be a `ja.multi_steps`.
      wrt: the variables that it optimizes, an NNX filter, as in `value_and_grad`.
      loss_scale: the one that `train_step` is made with, if any.
      graph: as in Flax.

    Attributes:
      step: the optimizer steps; uint32.
      tx: the Optax optimizer, which does not see variables without a gradient (integers, keys).
      opt_state: its state.
      wrt: the filter.
      progress: what `train_step` keeps beside the optimizer's state; see `ja.training.StepState`.
    """

    def __init__(
        self,
        model: Any,
        tx: optax.GradientTransformation,
        *,
        wrt: Any = nnx.Param,
        loss_scale: loss_scaling.LossScale | None = None,
        graph: bool | None = None,
    ):
        checks.transformation("nnx.Optimizer", "tx", tx)
        super().__init__(model, of_trained(tx), wrt=wrt, graph=graph)
        # Some optimizers keep the parameters themselves: donating both would free them twice.
        self.opt_state = nnx.data(jax.tree.map(own_buffer, self.opt_state))
        self.progress = nnx.data(jax.tree.map(nnx.OptArray, StepState.first(None, loss_scale)))

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """One call of the optimizer; `step` grows where it applied an optimizer step.

        Args:
          model: the module, changed in place.
          grads: gradients; under `ja.multi_steps` the `ja.WindowSums` of `accumulate`, or gradient
            sums with `weight=`. The optimizer does not see variables without a gradient (integers,
            keys), which stay as they are.
          **kwargs: extra arguments of the optimizer.

        Returns:
          The updates that were added to the variables.

        Raises:
          TypeError: sums or a weight for an optimizer that divides by none.
        """
        check_divides("nnx.Optimizer.update", grads, kwargs, self.opt_state)
        sums = grads if isinstance(grads, WindowSums) else None
        given: Any = nnx.as_pure(nnx.state(grads if sums is None else sums.grads, self.wrt))
        given = given if sums is None else dataclasses.replace(sums, grads=given)
        tx, named = of_trained(self.tx), nnx.as_pure(kwargs)
        return _apply(self, model, lambda state, params: tx.update(given, state, params, **named))


def flush(optimizer: nnx.Optimizer, model: Any, **extra_args: Any) -> Any:
    """Applies a partial window, divided by what it really holds; `ja.flush` for an NNX optimizer.

    Args:
      optimizer: one with a `ja.multi_steps`, changed in place; `step` grows where a window was
        open.
      model: the module, changed in place.
      **extra_args: as in `ja.flush`.

    Returns:
      The updates that were added to the variables.

    Raises:
      TypeError: `optimizer` is not an `nnx.Optimizer`.
      ValueError: it holds no `ja.multi_steps`.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from jaxaccum import nnx as ja_nnx
      >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
      >>> optimizer = ja_nnx.Optimizer(model, ja.multi_steps(optax.sgd(0.1), 4))
      >>> f = ja_nnx.accumulate(lambda model, x: ja.mean(model(x)), num_microbatches=1)
      >>> _ = optimizer.update(model, f(model, jnp.ones((2, 1))))
      >>> _ = ja_nnx.flush(optimizer, model)
      >>> print(optimizer.step[...], model.bias[...])
      1 [-0.1]
    """
    if not isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            f"nnx.flush: `optimizer` must be an `nnx.Optimizer`, got {checks.describe(optimizer)}."
        )
    return _apply(
        optimizer,
        model,
        lambda state, params: plain_flush(optimizer.tx, state, params, **nnx.as_pure(extra_args)),
    )


def _apply(optimizer: nnx.Optimizer, model: Any, update_fn: Callable[..., Any]) -> Any:
    """Updates of an optimizer, added to a model; both are changed in place."""
    params = nnx.as_pure(nnx.state(model, optimizer.wrt))
    updates, opt_state = update_fn(nnx.as_pure(optimizer.opt_state), params)
    nnx.update(model, optax.apply_updates(params, updates))
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    stepped = has_updated(opt_state) if find_states(opt_state) else True
    optimizer.step[...] += jnp.asarray(stepped, optimizer.step[...].dtype)
    return updates


class ModelStepFn(Protocol):
    """What `train_step` returns: one window, one optimizer step, in place."""

    def __call__(
        self, model: Any, optimizer: Optimizer, batch: Any, *args: Any, **call: Unpack[StepCall]
    ) -> StepInfo: ...


@overload
def train_step(
    loss_fn: LossFn, *, num_microbatches: int, **options: Unpack[StepOptions]
) -> ModelStepFn: ...


@overload
def train_step(
    loss_fn: LossFn, *, microbatch_size: int, **options: Unpack[StepOptions]
) -> ModelStepFn: ...


@factory("nnx.train_step", StepOptions, StepCall)
def train_step(
    loss_fn: LossFn,
    *,
    donate: bool = True,
    max_bad_windows: int | None = None,
    loss_scale: loss_scaling.LossScale | None = None,
    **options: Any,
) -> ModelStepFn:
    """A jitted training step on a model and its optimizer: one window, one optimizer step.

    As `ja.train_step`; model and optimizer are updated in place, all else in the model and among
    the arguments as in `value_and_grad`.

    Args:
      loss_fn: `loss_fn(model, batch, *args)` on one micro-batch, as in `value_and_grad`.
      donate: whether the step takes over the buffers of model and optimizer.
      max_bad_windows: as in `ja.train_step`.
      loss_scale: as in `ja.train_step`; the optimizer is made with the same.
      **options: the keywords of `ja.train_step` that are those of `ja.accumulate`,
        `num_microbatches` or `microbatch_size` among them; `model_state=` as in `value_and_grad`.
        The variables that are differentiated are the optimizer's `wrt`.

    Returns:
      `step(model, optimizer, batch, *args, key=None, num_real=None, denominators=None)`, which
      returns a `ja.training.StepInfo`. `optimizer` is a `jaxaccum.nnx.Optimizer`.

    Raises:
      TypeError: `optimizer` is none; or as `value_and_grad`.
      ValueError: `optimizer` holds a `ja.multi_steps`; or as `value_and_grad`.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from jaxaccum import nnx as ja_nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = ja_nnx.Optimizer(model, optax.adam(1e-2))
      >>> step = ja_nnx.train_step(lambda model, x: ja.mean(model(x) ** 2), num_microbatches=2)
      >>> info = step(model, optimizer, jnp.arange(8.0).reshape(4, 2))
      >>> print(info.updated, info.weight, optimizer.step[...])
      True 4 1
    """
    checked = checked_options("nnx.train_step", loss_fn, options)
    named: Any = {"max_bad_windows": max_bad_windows, "loss_scale": loss_scale}
    plain_train_step(
        Accumulation(checked, WindowCall), optax.identity(), **named
    )  # refuses nonsense

    def step_fn(model: Any, optimizer: Any, args: tuple[Any, ...], given: Given) -> StepInfo:
        call = Call("train_step", (model, *args), {0: optimizer.wrt}, checked, given)
        progress = nnx.as_pure(optimizer.progress)._replace(
            optimizer_step=optimizer.step[...].astype(jnp.int32),
            inner_state=nnx.as_pure(optimizer.opt_state),
            model_state=call.given.model_state,
        )
        window = Accumulation(call.options, WindowCall)
        step = plain_train_step(window, optimizer.tx, donate=False, **named).step
        params, *rest = call.args
        params, progress, info = step(
            nnx.as_pure(params),
            progress,
            *rest,
            key=call.given.key,
            num_real=given.num_real,
            denominators=given.denominators,
        )
        aux = call.finish(info.aux, progress.model_state)
        nnx.update(model, params)
        nnx.update(optimizer.opt_state, nnx.state(progress.inner_state))
        optimizer.step[...] = progress.optimizer_step.astype(optimizer.step[...].dtype)
        kept = progress._replace(inner_state=None, model_state=None)
        nnx.update(optimizer.progress, nnx.state(kept))
        return info._replace(aux=aux)

    jitted = nnx.jit(step_fn, donate_argnums=(0, 1) if donate else ())

    @signed(call_signature(StepCall, "model", "optimizer", "batch"))
    def checked_step_fn(
        model: Any, optimizer: Any, batch: Any = NOTHING, *args: Any, **call: Any
    ) -> StepInfo:
        given_args = model, batch, *args
        (_, *every), given = taken(
            "nnx.train_step", given_args, call, StepCall, checked.batch_argnums
        )
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "nnx.train_step: `optimizer` must be a `jaxaccum.nnx.Optimizer`, got "
                f"{type(optimizer).__name__}. Make it with `Optimizer(model, tx, wrt=nnx.Param)`."
            )
        check_no_window("nnx.train_step", "optimizer", optimizer.opt_state)
        if donate:
            _own_buffers((model, optimizer), (every, given))
        return jitted(model, optimizer, tuple(every), given)

    return checked_step_fn


def _own_buffers(nodes: Any, others: Any) -> None:
    """Gives each variable of `nodes` a buffer of its own: one in two places is not donated."""
    seen = {id(x) for x in jax.tree.leaves(others)}
    for _, variable in nnx.iter_graph(nodes):
        value = variable.get_value() if isinstance(variable, nnx.Variable) else None
        if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
            if id(value) in seen:
                value = jnp.copy(value)
                variable.set_value(value)
            seen.add(id(value))
