"""Flax NNX: windows over a model object, whose statistics and random streams move on with it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxaccum.core import checks
from jaxaccum.core.reducers import Max
from jaxaccum.folds.arguments import NOTHING, Given, positional
from jaxaccum.folds.batch import Batch, checked_argnums
from jaxaccum.folds.model_state import CHOICES
from jaxaccum.folds.window import value_and_grad as plain_value_and_grad


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    wrt: Any = nnx.Param,
    model_state: Any = None,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """The window's mean loss and its gradient, like `nnx.value_and_grad` of the full batch.

    As `ja.value_and_grad`; what the model keeps beside its parameters is updated in place, once
    for each micro-batch or once for the window, as `model_state` says. Each micro-batch draws from
    the model's random streams anew, and the streams move on by what one micro-batch drew.

    Args:
      loss_fn: `loss_fn(model, batch, *args)` on one micro-batch; returns a `ja.Mean`, or what
        `ja.accumulate` takes, with `has_aux` also auxiliary outputs.
      wrt: the variables to differentiate, an NNX filter.
      model_state: "sequential", "pooled" or "frozen", as in `ja.accumulate`; required where
        `loss_fn` changes variables of the model other than random streams.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      batch_argnums: the positions of the arguments of `loss_fn` that are cut; 1 by default, as in
        `ja.accumulate`.
      **options: the other keywords of `ja.value_and_grad`, `num_microbatches` or
        `microbatch_size` among them.

    Returns:
      `f(model, batch, *args, **call_options)`, which returns `(loss, grads)`, or `((loss, aux),
      grads)` with `has_aux`. `grads` is an `nnx.State` for `optimizer.update(model, grads)`.

    Raises:
      TypeError: the first argument is not an NNX module.
      ValueError: `loss_fn` changes variables and `model_state` was not said; or as
        `ja.value_and_grad`.

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

    cut_argnums = checked_argnums("nnx.value_and_grad", loss_fn, batch_argnums)

    def value_and_grad_fn(model: Any, batch: Any = NOTHING, *args: Any, **call_options: Any) -> Any:
        inputs = {k: v for k, v in call_options.items() if k not in Given._fields}
        _, *every = positional("nnx.value_and_grad", (model, batch, *args), inputs, cut_argnums)
        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"nnx.value_and_grad: the first argument must be an `nnx.Module`, got "
                f"{checks.describe(model)}."
            )
        graph, params, streams, _, others = _split(model, wrt)
        key = call_options.pop("key", None)
        if key is None:
            key = _window_key(streams)

        def functional(
            params: Any,
            batch: Any,
            *args: Any,
            model_state: Any = None,
            key: Any = None,
        ) -> Any:
            *own_args, streams = args
            own = streams if key is None else _reseeded(streams, key)
            before = others if model_state is None else model_state
            before = jax.tree.map(lambda x: x, before)  # variables of this trace
            held = dict(jax.tree_util.tree_leaves_with_path(before))
            copy = nnx.merge(graph, params, own, before)
            out = loss_fn(copy, batch, *own_args)
            _, _, streams_after, _, after = _split(copy, wrt)
            counts = Max(_counts(streams_after))
            if model_state is None:
                _check_unchanged(held, after)
            if not has_aux:
                out = (out, None)
            if not (isinstance(out, tuple) and len(out) == 2):
                return out  # `value_and_grad` says what is missing
            loss, aux = out
            return loss, ((aux, counts) if model_state is None else ((aux, counts), after))

        cut = Batch("nnx.value_and_grad", (params, *every), cut_argnums)
        f = plain_value_and_grad(
            functional,
            batch_argnums=cut.positions,
            has_aux=True,
            model_state=model_state,
            **options,
        )
        if model_state is not None:
            call_options["model_state"] = others
        (loss, aux), grads = f(params, *every, streams, key=key, **call_options)
        (aux, counts), state = aux if model_state is not None else (aux, None)
        nnx.update(model, _advanced(streams, counts))
        if state is not None:
            nnx.update(model, state)
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad_fn


def _split(model: Any, wrt: Any) -> Any:
    """Graph, differentiated variables, random streams, sown values, and all others."""
    return nnx.split(model, wrt, nnx.RngState, nnx.Intermediate, ...)


def _window_key(streams: Any) -> Any:
    """A key that differs from window to window, as the streams move on; `None` without any."""
    keys, counts = _keys(streams), _counts(streams)
    return jax.random.fold_in(keys[0], counts[0]) if keys else None


def _keys(streams: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(streams) if checks.is_key(x)]


def _counts(streams: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(streams) if not checks.is_key(x)]


def _reseeded(streams: Any, key: Any) -> Any:
    """The streams of one micro-batch, each of its own key."""
    bits = jax.random.bits(key, dtype=jnp.uint32)
    return jax.tree.map(lambda x: jax.random.fold_in(x, bits) if checks.is_key(x) else x, streams)


def _advanced(streams: Any, counts: list[Any]) -> Any:
    """The streams after the window: their keys stay, they have counted what was drawn."""
    supply = iter(counts)
    return jax.tree.map(lambda x: x if checks.is_key(x) else jnp.maximum(x, next(supply)), streams)


def _check_unchanged(held: dict[Any, Any], after: Any) -> None:
    """Requires that a loss function without a policy changed no variable."""
    changed = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(after)
        if held.get(path) is not leaf
    ]
    if changed:
        raise ValueError(
            f"nnx.value_and_grad: `loss_fn` changes {', '.join(changed)} of the model, and what a "
            f"window does to that was not said. Pass `model_state=`: {CHOICES}."
        )
