"""The window as a function: checked options, the sums for a batch, a loss and its gradients."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import checks, faults
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.sums import WindowSums, finalize
from jaxaccum.devices import reduction, shards, wires
from jaxaccum.numerics import accumulators
from jaxaccum.window import arguments, cut, into, refusals, spmd
from jaxaccum.window.arguments import Given, Options
from jaxaccum.window.batch import checked_argnums
from jaxaccum.window.bound import Bound
from jaxaccum.window.model_state import check_policy
from jaxaccum.window.signatures import NOTHING, call_signature, taken


class Accumulation:
    """What `accumulate` returns: from a batch to the window's sums; see there."""

    bound_fn: type[Bound] = Bound  # what binds the loss of one call

    def __init__(self, options: Options, call: type):
        self.options, self.call = options, call
        self.__signature__ = call_signature(call)

    def having(self, **changes: Any) -> "Accumulation":
        """The same window with other options, which must be checked."""
        return type(self)(dataclasses.replace(self.options, **changes), self.call)

    def __call__(self, params: Any, batch: Any = NOTHING, *args: Any, **named: Any) -> WindowSums:
        every, options = (params, batch, *args), self.options
        every, given = taken(options.function, every, named, self.call, options.batch_argnums)
        return window_sums(options, every, given, self.bound_fn)


def window_sums(
    options: Options, args: tuple[Any, ...], given: Given, bound_fn: type[Bound] = Bound
) -> WindowSums:
    """The sums of a window, with one micro-batch's loss bound by `bound_fn`."""
    arguments.check_denominators(options.function, given.denominators)
    into.check(options.function, given.into)
    if options.spmd_axis_name is not None:
        sums = spmd.sums(options, args, given._replace(into=None), bound_fn)
        return into.onto(options.function, given.into, sums)
    return bound_fn(options, args, given).sums()


def loss_and_grads(options: Options, args: tuple[Any, ...], sums: WindowSums) -> Any:
    """A window's `(loss, grads)`, beside the loss its outputs and new state, as in `jax.grad`."""
    window = finalize(sums)
    positions = checks.argnums(options.function, options.argnums, len(args))
    wanted = tuple(args[p] for p in positions)
    wanted = wanted if isinstance(options.argnums, Sequence) else wanted[0]
    grads = jax.tree.map(_like, window.grads, wanted)
    aux = window.aux
    if options.model_state is not None:
        aux = (aux, window.model_state) if options.has_aux else window.model_state
    beside = options.has_aux or options.model_state is not None
    return ((window.loss, aux) if beside else window.loss), grads


def checked_options(
    function: str, loss_fn: Any, given: Mapping[str, Any], **beside: Any
) -> Options:
    """The checked keywords of a factory, of which `given` came.

    Args:
      function: the public function's name, for messages.
      loss_fn: the loss function.
      given: the keywords that came.
      beside: those of one room alone, which are checked there; here only in their combinations.

    Raises:
      TypeError: an option has the wrong type.
      ValueError: one has no meaning, alone or beside another.
    """
    others = dict(given)
    if not callable(loss_fn):
        raise TypeError(
            f"{function}: `loss_fn` must be a function, got {checks.describe(loss_fn)}."
        )
    apart = "gradients are made stage by stage" if "window_axis_name" in beside else ""
    others["accumulator"] = accumulators.checked(function, others.get("accumulator"), apart=apart)
    faults.policy(function, others.get("skip_nonfinite", False))
    reduction.names_of(function, "axis_name", others.get("axis_name"))
    reduction.names_of(function, "spmd_axis_name", others.get("spmd_axis_name"))
    check_policy(function, others.get("model_state"))
    shards.check_reduction(function, others.get("reduction", "defer"))
    refusals.check(function, {**cut.NONE, **given, **beside})
    axes = others.get("axis_name"), others.get("spmd_axis_name")
    wires.check(function, others.get("reduce_dtype", jnp.float32), *axes)
    shards.check_whole(function, others.get("whole_params", True), others.get("param_specs"))
    if others.get("noise_scale") and not others.get("whole_params", True):
        raise ValueError(
            f"{function}: `noise_scale=True` needs each micro-batch's whole gradient, but with "
            "`whole_params=False` a device sees its parts. Leave one of them out."
        )
    if not isinstance(others.get("overlap", False), bool):
        raise TypeError(
            f"{function}: `overlap` must be True or False, got "
            f"{checks.describe(others['overlap'])}."
        )
    unroll = others.get("unroll", 1)
    if not isinstance(unroll, bool):
        others["unroll"] = checks.integer(function, "unroll", unroll, minimum=1)
    others["batch_argnums"] = checked_argnums(function, loss_fn, others.get("batch_argnums"))
    others |= cut.checked_cut(function, given)
    return Options(function=function, loss_fn=loss_fn, **others)


def _like(grad: Any, parameter: Any) -> Any:
    return grad.astype(jnp.asarray(parameter).dtype) if is_inexact(parameter) else grad
