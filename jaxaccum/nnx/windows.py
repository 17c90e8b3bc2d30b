"""Windows over a model object: `accumulate` and `value_and_grad` with the words of NNX."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
from flax import nnx

from jaxaccum.core import checks
from jaxaccum.core.mean import add
from jaxaccum.core.reducers import Max, Sum, values_of
from jaxaccum.core.sums import WindowSums, finalize
from jaxaccum.nnx import parts
from jaxaccum.nnx.options import (
    ModelGradOptions,
    ModelSumsFn,
    ModelSumsOptions,
    ModelWindowFn,
)
from jaxaccum.nnx.parts import Parts
from jaxaccum.window.arguments import Given, Options, passed_key
from jaxaccum.window.batch import Batch
from jaxaccum.window.model_state import CHOICES
from jaxaccum.window.options import GradCall
from jaxaccum.window.protocols import LossFn
from jaxaccum.window.signatures import NOTHING, call_signature, factory, signed, taken
from jaxaccum.window.window_fn import checked_options, loss_and_grads, window_sums


@overload
def accumulate(
    loss_fn: LossFn, *, num_microbatches: int, **options: Unpack[ModelSumsOptions]
) -> ModelSumsFn: ...


@overload
def accumulate(
    loss_fn: LossFn, *, microbatch_size: int, **options: Unpack[ModelSumsOptions]
) -> ModelSumsFn: ...


@factory("nnx.accumulate", ModelSumsOptions, GradCall)
def accumulate(
    loss_fn: LossFn, *, wrt: Any = nnx.Param, argnums: Any = 0, **options: Any
) -> ModelSumsFn:
    """Sums gradients, losses and weights over the micro-batches of a batch, undivided.

    As `ja.accumulate`; what the model keeps beside its parameters is updated in place, by every
    call, as in `value_and_grad`.

    Args:
      loss_fn: `loss_fn(model, batch, *args)` on one micro-batch; as in `value_and_grad`, as are all
        below.
      wrt: the variables to differentiate, an NNX filter.
      argnums: the arguments to differentiate.
      batch_argnums: the arguments that are cut.
      model_state: "sequential", "pooled" or "frozen".
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      **options: the other keywords of `ja.accumulate`.

    Returns:
      `f(model, batch, *args, **call_options)`, which returns `ja.WindowSums`. Its `grads` are an
      `nnx.State`; `optimizer.update(model, sums)` takes the sums whole, where `optimizer` is a
      `jaxaccum.nnx.Optimizer`.

    Raises:
      TypeError: as `value_and_grad`.
      ValueError: as `value_and_grad`.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from jaxaccum import nnx as ja_nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = ja_nnx.Optimizer(model, ja.multi_steps(optax.sgd(0.1), 2))
      >>> f = ja_nnx.accumulate(lambda model, x: ja.mean(model(x) ** 2), num_microbatches=2)
      >>> for x in jnp.arange(16.0).reshape(2, 4, 2):
      ...     sums = f(model, x)
      ...     _ = optimizer.update(model, sums)
      >>> print(sums.weight, optimizer.step[...])
      4 1
    """
    filters, positions = _differentiated("accumulate", argnums, wrt)
    checked = checked_options("nnx.accumulate", loss_fn, {**options, "argnums": positions})

    @signed(call_signature(GradCall, "model", "batch"))
    def accumulate_fn(model: Any, batch: Any = NOTHING, *args: Any, **named: Any) -> WindowSums:
        every, given = _taken("accumulate", (model, batch, *args), named, checked)
        call = Call("accumulate", every, filters, checked, given)
        sums = window_sums(call.options, call.args, call.given)
        call.finish(values_of(sums.aux), finalize(sums).model_state)
        return dataclasses.replace(
            sums, aux=sums.aux[0] if checked.has_aux else None, model_state=None
        )

    return accumulate_fn


@overload
def value_and_grad(
    loss_fn: LossFn, *, num_microbatches: int, **options: Unpack[ModelGradOptions]
) -> ModelWindowFn: ...


@overload
def value_and_grad(
    loss_fn: LossFn, *, microbatch_size: int, **options: Unpack[ModelGradOptions]
) -> ModelWindowFn: ...


@factory("nnx.value_and_grad", ModelGradOptions, GradCall)
def value_and_grad(
    loss_fn: LossFn, *, wrt: Any = nnx.Param, argnums: Any = 0, **options: Any
) -> ModelWindowFn:
    """The window's mean loss and its gradient, like `nnx.value_and_grad` of the full batch.

    As `ja.value_and_grad`; what the model keeps beside its parameters is updated in place, once
    for each micro-batch or once for the window, as `model_state` says. Each micro-batch draws from
    the random streams among the arguments anew (those of the model, and `nnx.Rngs`), and the
    streams move on by what one micro-batch drew. What micro-batches add to metrics among the
    arguments (`nnx.metrics.Average` and those made from it, in an `nnx.MultiMetric` too) is summed.

    Args:
      loss_fn: `loss_fn(model, batch, *args)` on one micro-batch; returns a `ja.Mean`, or what
        `ja.accumulate` takes, with `has_aux` also auxiliary outputs. With `key=` it is called with
        the keyword `key` as well.
      wrt: the variables to differentiate, an NNX filter: a type of variables (`nnx.LoRAParam`), a
        function of path and variable, or several in a tuple. `nnx.Optimizer(model, tx, wrt=...)`
        takes the same. Parameters that it leaves out stay as they are.
      argnums: the arguments to differentiate: an int; an `nnx.DiffState(argnum, filter)`, whose
        filter stands in the place of `wrt`; or several of both.
      batch_argnums: the positions of the arguments of `loss_fn` that are cut; 1 by default, as in
        `ja.accumulate`.
      model_state: "sequential", "pooled" or "frozen", as in `ja.accumulate`; required where
        `loss_fn` changes other variables than those of random streams and metrics.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      **options: the other keywords of `ja.value_and_grad`, `num_microbatches` or
        `microbatch_size` among them.

    Returns:
      `f(model, batch, *args, **call_options)`, which returns `(loss, grads)`, or `((loss, aux),
      grads)` with `has_aux`. `grads` is an `nnx.State` for `optimizer.update(model, grads)`.

    Raises:
      TypeError: the first argument is not an NNX module; `key=` was given and `loss_fn` takes none.
      ValueError: `loss_fn` changes variables and `model_state` was not said, or changes parameters
        or metrics that do not add up; or as `ja.value_and_grad`.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxaccum import nnx as ja_nnx
      >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
      >>> f = ja_nnx.value_and_grad(
      ...     lambda model, x: ja.mean(model(x) ** 2), num_microbatches=2, model_state="pooled")
      >>> loss, grads = f(model, jnp.arange(8.0).reshape(4, 2))
      >>> print(model.mean[...].round(3))
      [0.03 0.04]
    """
    filters, positions = _differentiated("value_and_grad", argnums, wrt)
    checked = checked_options("nnx.value_and_grad", loss_fn, {**options, "argnums": positions})

    @signed(call_signature(GradCall, "model", "batch"))
    def value_and_grad_fn(
        model: Any, batch: Any = NOTHING, *args: Any, **named: Any
    ) -> tuple[Any, Any]:
        every, given = _taken("value_and_grad", (model, batch, *args), named, checked)
        call = Call("value_and_grad", every, filters, checked, given)
        sums = window_sums(call.options, call.args, call.given)
        (loss, aux), grads = loss_and_grads(call.options, call.args, sums)
        aux, state = (aux, None) if checked.model_state is None else aux
        aux = call.finish(aux, state)
        return ((loss, aux) if checked.has_aux else loss), grads

    return value_and_grad_fn


def _differentiated(function: str, argnums: Any, wrt: Any) -> tuple[dict[int, Any], Any]:
    """For each differentiated argument the filter of its variables; and `argnums` as ints."""
    if isinstance(wrt, nnx.DiffState):
        raise TypeError(
            f"nnx.{function}: `wrt` must be a filter of variables, got {wrt!r}. Pass it as "
            "`argnums`."
        )
    several = isinstance(argnums, Sequence)
    filters: dict[int, Any] = {}
    for entry in argnums if several else (argnums,):
        named = isinstance(entry, nnx.DiffState)
        number = entry.argnum if named else entry
        number = checks.integer(f"nnx.{function}", "argnums", number, minimum=0)
        if number in filters:
            raise ValueError(f"nnx.{function}: `argnums` names argument {number} twice.")
        filters[number] = entry.filter if named else wrt
    return filters, (tuple(filters) if several else next(iter(filters)))


def _taken(
    function: str, args: tuple[Any, ...], named: dict[str, Any], options: Options
) -> tuple[tuple[Any, ...], Given]:
    if named.get("model_state") is not None:
        raise TypeError(
            f"nnx.{function}: the model holds its own state; say what becomes of it where the "
            f"function is made, `ja_nnx.{function}(loss_fn, model_state=...)`: {CHOICES}."
        )
    return taken(f"nnx.{function}", args, named, GradCall, options.batch_argnums)


class Call:
    """One call of a function of NNX objects, as a call of a function of arrays.

    Attributes:
      args: the arguments for `loss_fn`, see `Parts`; the variables that are not differentiated
        stand behind them.
      given: the keywords for the core.
      options: those for the core.
    """

    def __init__(
        self,
        function: str,
        args: Sequence[Any],
        filters: dict[int, Any],
        options: Options,
        given: Given,
    ):
        self._user_fn, self._has_aux = options.loss_fn, options.has_aux
        self._policy = options.model_state
        self._over_devices = bool(options.axis_name or options.spmd_axis_name)
        if max(filters) >= len(args):
            raise ValueError(
                f"nnx.{function}: `argnums` names argument {max(filters)}, but only {len(args)} "
                "positional arguments were given."
            )
        self._parts = Parts(f"nnx.{function}", args, filters)
        # The core does not know which of its arguments were modules.
        cut = Batch(f"nnx.{function}", self._parts.args, options.batch_argnums, tuple(filters))
        self._takes_key = bool(passed_key(options, given.key))
        self.options = dataclasses.replace(
            options, loss_fn=self.loss_fn, batch_argnums=cut.positions, has_aux=True
        )
        held = dict(self._parts.held)
        self.given = given._replace(
            key=_window_key(held) if given.key is None else given.key,
            model_state=None if self._policy is None else held.pop(parts.STATE),
        )
        self.args = (*self._parts.args, held)

    def loss_fn(self, *given: Any, key: Any = None, model_state: Any = None) -> Any:
        """The loss function of arrays; its auxiliary output is what `finish` takes."""
        *args, held = given
        if self._policy is not None:
            held = {**held, parts.STATE: model_state}
        if key is not None:
            held = {**held, parts.KEYS: _reseeded(held[parts.KEYS], key)}
        held = {**held, parts.SUMS: jax.tree.map(jnp.zeros_like, held[parts.SUMS])}
        named = {"key": key} if self._takes_key else {}
        out, after = self._parts.call(
            lambda *args: self._user_fn(*args, **named),
            args,
            held,
            model_state=self._policy,
            over_devices=self._over_devices,
        )
        if not self._has_aux:
            out = (out, None)
        if not (isinstance(out, tuple) and len(out) == 2):
            return out  # the core says what is missing
        loss, aux = out
        aux = (aux, Max(after[parts.COUNTS]), Sum(after[parts.SUMS]))
        return loss, (aux if self._policy is None else (aux, after[parts.STATE]))

    def finish(self, aux: Any, state: Any) -> Any:
        """Moves the objects on by what the window did to them; its own auxiliary output."""
        aux, counts, sums = aux
        held = self._parts.held
        new = {
            parts.COUNTS: jax.tree.map(jnp.maximum, held[parts.COUNTS], counts),
            parts.SUMS: jax.tree.map(
                lambda x, y: add(x, y).astype(x.dtype), held[parts.SUMS], sums
            ),
        }
        self._parts.update(**new, **({} if state is None else {parts.STATE: state}))
        return aux


def _window_key(held: dict[str, Any]) -> Any:
    """A key that differs from window to window, as the streams move on; `None` without any."""
    keys, counts = (jax.tree.leaves(held[name]) for name in (parts.KEYS, parts.COUNTS))
    return jax.random.fold_in(keys[0].ravel()[0], counts[0].ravel()[0]) if keys else None


def _reseeded(keys: Any, key: Any) -> Any:
    """The keys of one micro-batch's streams, each made from its own."""
    bits = jax.random.bits(key, dtype=jnp.uint32)

    def fold(x: Any) -> Any:
        fold_in = jax.random.fold_in
        for _ in range(x.ndim):  # the streams of stacked layers
            fold_in = jax.vmap(fold_in, (0, None))
        return fold_in(x, bits)

    return jax.tree.map(fold, keys)
