"""Flax Linen: a train state that counts optimizer steps, and training steps over its variables."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, Unpack, overload

import jax
import jax.numpy as jnp
import optax
from flax import core
from flax.linen import fp8_ops
from flax.training import train_state

from jaxaccum.closing.handover import own_buffer
from jaxaccum.closing.inner import of_trained
from jaxaccum.core import checks
from jaxaccum.core.reducers import Max, Sum
from jaxaccum.core.sums import WindowSums
from jaxaccum.numerics import loss_scaling
from jaxaccum.stream.state import (
    check_divides,
    check_no_window,
    find_states,
    flush,
    has_updated,
)
from jaxaccum.training.donation import Step
from jaxaccum.training.records import StepInfo, StepOptions, StepState
from jaxaccum.training.step import train_step as plain_train_step
from jaxaccum.window.model_state import CHOICES
from jaxaccum.window.options import StepCall, WindowCall
from jaxaccum.window.protocols import LossFn
from jaxaccum.window.signatures import NOTHING, call_signature, factory, signed, taken
from jaxaccum.window.window_fn import Accumulation, checked_options

__all__ = ["TrainState", "train_step"]

OVERWRITE = fp8_ops.OVERWRITE_WITH_GRADIENT


class TrainState(train_state.TrainState):
    """A `flax.training.train_state.TrainState` whose `step` counts optimizer steps.

    Flax's own counts calls of `apply_gradients`, which under `ja.multi_steps` are micro-steps.

    Attributes:
      params: what is trained: the collection `params`, or, where the model has FP8 scaling state, a
        dict of `params` and `_overwrite_with_gradient`.
      collections: the model's other collections, such as `batch_stats`; a dict, empty without any.
      progress: what `train_step` keeps beside the optimizer's state; see `ja.training.StepState`.
    """

    collections: Any = None
    progress: Any = None

    @classmethod
    def create(  # type: ignore[override]
        cls,
        *,
        apply_fn: Callable[..., Any],
        variables: Any,
        tx: Any,
        loss_scale: loss_scaling.LossScale | None = None,
        **kwargs: Any,
    ) -> "TrainState":
        """A state at optimizer step 0.

        Args:
          apply_fn: the model's `apply`.
          variables: all of the model's collections, as from `model.init`, frozen or not; boxed
            parameters (`nn.Partitioned`) stay boxed.
          tx: an Optax optimizer; for `apply_gradients` it may be a `ja.multi_steps`.
          loss_scale: the one that `train_step` is made with, if any.
          **kwargs: fields of subclasses.

        Raises:
          ValueError: there is no collection `params`.
        """
        collections = {name: core.unfreeze(x) for name, x in dict(variables).items()}
        if "params" not in collections:
            raise ValueError(
                "TrainState.create: `variables` must hold the collection `params`, got "
                f"{sorted(collections)}. Pass what `model.init` returned."
            )
        params = variables["params"]
        del collections["params"]
        # Some optimizers keep the parameters themselves: donating both would free them twice.
        opt_state = jax.tree.map(own_buffer, of_trained(tx).init(params))
        if OVERWRITE in collections:
            params = {"params": params, OVERWRITE: collections.pop(OVERWRITE)}
        return cls(
            step=jnp.zeros((), jnp.int32),
            apply_fn=apply_fn,
            params=params,
            tx=tx,
            opt_state=opt_state,
            collections=collections,
            progress=StepState.first(None, loss_scale),
            **kwargs,
        )

    @property
    def variables(self) -> dict[str, Any]:
        """All collections, as `apply_fn` takes them."""
        return {**_by_collection(self.params), **(self.collections or {})}

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> "TrainState":
        """One call of the optimizer; `step` grows where it applied an optimizer step.

        Args:
          grads: in the structure of `params`, or, for a `ja.multi_steps`, the `ja.WindowSums` of
            it. Those of `_overwrite_with_gradient` replace it. The optimizer does not see leaves
            without a gradient (integers, keys), which stay as they are.
          **kwargs: `weight=` and other extra arguments of the optimizer; new values of other
            fields, such as `collections=`.

        Raises:
          TypeError: sums or a weight for an optimizer that divides by none.
        """
        names = [field.name for field in dataclasses.fields(self)]
        fields = {name: kwargs.pop(name) for name in names if name in kwargs}
        check_divides("apply_gradients", grads, kwargs, self.opt_state)
        sums = grads if isinstance(grads, WindowSums) else None
        whole = _by_collection(self.params)
        gradients = _by_collection(grads if sums is None else sums.grads)
        given = gradients["params"]
        if sums is not None:
            marks = None if OVERWRITE in whole else sums.grad_reducers
            given = dataclasses.replace(sums, grads=given, grad_reducers=marks)
        tx = of_trained(self.tx)
        updates, opt_state = tx.update(given, self.opt_state, whole["params"], **kwargs)
        params = optax.apply_updates(whole["params"], updates)
        if OVERWRITE in whole:
            params = {"params": params, OVERWRITE: gradients[OVERWRITE]}
        return self._stepped(params, opt_state, **fields)

    def flush(self, **kwargs: Any) -> "TrainState":
        """Applies the partial window of a `ja.multi_steps`; `step` grows where one was open.

        Args:
          **kwargs: extra arguments of the optimizer, as in `ja.flush`.
        """
        whole = _by_collection(self.params)
        updates, opt_state = flush(self.tx, self.opt_state, whole["params"], **kwargs)
        whole["params"] = optax.apply_updates(whole["params"], updates)
        return self._stepped(whole if OVERWRITE in whole else whole["params"], opt_state)

    def _stepped(self, params: Any, opt_state: Any, **fields: Any) -> "TrainState":
        stepped = has_updated(opt_state) if find_states(opt_state) else True
        step = jnp.asarray(self.step) + jnp.asarray(stepped, jnp.int32)
        return self.replace(step=step, params=params, opt_state=opt_state, **fields)


class TrainStepFn(Protocol):
    """What `train_step` returns: one window, one optimizer step."""

    def __call__(
        self, state: TrainState, batch: Any, *args: Any, **call: Unpack[StepCall]
    ) -> tuple[TrainState, StepInfo]: ...


@overload
def train_step(
    loss_fn: LossFn, *, num_microbatches: int, **options: Unpack[StepOptions]
) -> TrainStepFn: ...


@overload
def train_step(
    loss_fn: LossFn, *, microbatch_size: int, **options: Unpack[StepOptions]
) -> TrainStepFn: ...


@factory("linen.train_step", StepOptions, StepCall)
def train_step(
    loss_fn: LossFn,
    *,
    donate: bool = True,
    max_bad_windows: int | None = None,
    loss_scale: loss_scaling.LossScale | None = None,
    **options: Any,
) -> TrainStepFn:
    """A jitted training step on a `TrainState`: one window, one optimizer step.

    As `ja.train_step`, with the words of Linen: the loss function receives all of the model's
    collections and returns the mutable ones beside the loss.

    Args:
      loss_fn: `loss_fn(variables, batch, *args)` on one micro-batch; returns a `ja.Mean`, or what
        `ja.accumulate` takes. With `model_state=` it returns `(loss, updates)`, with `has_aux`
        `(loss, (aux, updates))`, where `updates` is what `model.apply(..., mutable=[...])`
        returned. With `key=` it is called with the keyword `key` as well.
      donate: whether the step takes over the buffers of the state, which then must not be used
        again.
      max_bad_windows: as in `ja.train_step`.
      loss_scale: as in `ja.train_step`; the state is made with the same.
      **options: the keywords of `ja.train_step` that are those of `ja.accumulate`,
        `num_microbatches` or `microbatch_size` among them. `model_state=` is required where the
        model has collections beside its parameters. FP8 scaling state is combined by its largest
        values.

    Returns:
      `step(state, batch, *args, key=None, num_real=None, denominators=None)`, which returns the
      new state and a `ja.training.StepInfo`.

    Raises:
      ValueError: the model has mutable collections and `model_state` was not said; or as
        `ja.accumulate`.

    Example:
      >>> import jax, jaxaccum as ja, jax.numpy as jnp, optax
      >>> from flax import linen as nn
      >>> from jaxaccum import linen
      >>> model, x = nn.BatchNorm(use_running_average=False), jnp.arange(8.0).reshape(4, 2)
      >>> state = linen.TrainState.create(
      ...     apply_fn=model.apply, variables=model.init(jax.random.key(0), x), tx=optax.sgd(0.1))
      >>> def loss_fn(variables, x):
      ...     out, updates = model.apply(variables, x, mutable=["batch_stats"])
      ...     return ja.mean(out**2), updates
      >>> step = linen.train_step(loss_fn, num_microbatches=2, model_state="pooled")
      >>> state, info = step(state, x)
      >>> print(state.step, state.collections["batch_stats"]["mean"].round(3))
      1 [0.03 0.04]
    """
    checked = checked_options("linen.train_step", loss_fn, options)
    policy = checked.model_state

    def functional(
        params: Any, batch: Any, *args: Any, model_state: Any = None, **named: Any
    ) -> Any:
        collections = model_state or {}
        out = loss_fn({**_by_collection(params), **collections}, batch, *args, **named)
        if policy is None:
            return out
        return _with_collections(out, collections, checked.has_aux)

    @signed(call_signature(StepCall, "state", "batch"))
    def step_fn(
        state: TrainState, batch: Any = NOTHING, *args: Any, **call: Any
    ) -> tuple[TrainState, StepInfo]:
        if not isinstance(state, TrainState):
            raise TypeError(
                "linen.train_step: `state` must be a `jaxaccum.linen.TrainState`, got "
                f"{checks.describe(state)}. Make it with `TrainState.create`."
            )
        if state.collections and policy is None:
            raise ValueError(
                f"linen.train_step: the model has the collections {sorted(state.collections)}, and "
                f"what a window does to them was not said. Pass `model_state=`: {CHOICES}."
            )
        given = None, batch, *args
        (_, *every), _ = taken("linen.train_step", given, call, StepCall, checked.batch_argnums)
        check_no_window("linen.train_step", "state.tx", state.opt_state)
        scaled = OVERWRITE in _by_collection(state.params)
        marks = {"params": Sum, OVERWRITE: Max} if scaled else checked.grad_reducers
        own = dataclasses.replace(checked, loss_fn=functional, grad_reducers=marks)
        step = plain_train_step(
            Accumulation(own, WindowCall),
            _of_params(state.tx, marks if scaled else None),
            donate=False,
            max_bad_windows=max_bad_windows,
            loss_scale=loss_scale,
        ).step
        collections = state.collections if policy is not None else None
        progress = state.progress._replace(
            optimizer_step=jnp.asarray(state.step),
            inner_state=state.opt_state,
            model_state=collections,
        )
        params, progress, info = step(state.params, progress, *every, **call)
        new_state = state.replace(
            step=progress.optimizer_step,
            params=params,
            opt_state=progress.inner_state,
            collections=state.collections if policy is None else progress.model_state,
            progress=progress._replace(inner_state=None, model_state=None),
        )
        return new_state, info

    return Step("linen.train_step", step_fn, (0,) if donate else ())


def _by_collection(params: Any) -> dict[str, Any]:
    """The trained collections by name."""
    both = isinstance(params, dict) and OVERWRITE in params
    return dict(params) if both else {"params": params}


def _of_params(tx: Any, marks: Any) -> Any:
    """The optimizer on the collection `params` alone, where there is another one beside it."""
    if marks is None:
        return tx
    tx = optax.with_extra_args_support(tx)

    def init_fn(params: Any) -> Any:
        return tx.init(params["params"])

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        if "grad" in extra_args:
            extra_args["grad"] = extra_args["grad"]["params"]
        new, state = tx.update(updates["params"], state, params["params"], **extra_args)
        return {**updates, "params": new}, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _with_collections(out: Any, collections: Any, has_aux: bool) -> Any:
    """The loss function's output, with the collections that it did not change beside the others."""
    if not (isinstance(out, tuple) and len(out) == 2):
        return out  # `accumulate` says what is missing
    loss, rest = out
    aux, updates = rest if has_aux and isinstance(rest, tuple) and len(rest) == 2 else (None, rest)
    if not isinstance(updates, dict | core.FrozenDict) or not set(updates) <= set(collections):
        got = (
            sorted(updates)
            if isinstance(updates, dict | core.FrozenDict)
            else checks.describe(updates)
        )
        raise ValueError(
            "linen.train_step: the loss function must return the collections that it changed, out "
            f"of {sorted(collections)}, got {got}. Return what `model.apply(variables, ..., "
            "mutable=[...])` returned, without sown values."
        )
    state = {**collections, **core.unfreeze(updates)}
    return loss, ((aux, state) if has_aux else state)
