"""States from and to Optax and other numbers of devices, in the middle of a run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxaccum.closing.leaves import differentiated, is_none, trained
from jaxaccum.core import checks
from jaxaccum.core.mean import divide
from jaxaccum.numerics import weights
from jaxaccum.numerics.accumulators import Compensated, Uncarried, is_carry, join
from jaxaccum.stream.state import LOCAL, MultiStepsState, find_states

__all__ = ["from_inner_state", "from_optax", "reshape_devices", "to_optax"]


def from_optax(
    tx: Any, state: Any, params: Any, weight: Any = None, *, use_grad_mean: bool = True
) -> MultiStepsState:
    """The state of `tx` that continues an `optax.MultiSteps` run, mid-window as well.

    `weight_sum = mini_step * weight` and `grad_sum = weight_sum * acc_grads`: the window closes
    with the mean over all its micro-steps.

    Args:
      tx: the `ja.multi_steps` transformation that takes over, with the same inner optimizer.
      state: an `optax.MultiStepsState`.
      params: the parameters.
      weight: what each micro-step so far held, such as its number of tokens; a real scalar above 0.
        Without it each counts as 1, and calls that give a weight are refused from then on: in a
        window that is open the old micro-steps would count for next to nothing beside them.
      use_grad_mean: whether `optax.MultiSteps` averaged (its default). Where it summed, its sums
        are taken as they are, for undivided gradients.

    Returns:
      A `MultiStepsState`.

    Raises:
      TypeError: `state` is not an `optax.MultiStepsState`, or `weight` no real scalar.
      ValueError: its inner state does not fit `tx`, or `weight` is not above 0.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp, optax
      >>> theirs, tx = optax.MultiSteps(optax.sgd(1.0), 2), ja.multi_steps(optax.sgd(1.0), 2)
      >>> params = jnp.float32(0)
      >>> _, old = theirs.update(jnp.float32(2), theirs.init(params), params)  # mean of 3 tokens
      >>> state = from_optax(tx, old, params, weight=3)
      >>> updates, state = tx.update(jnp.float32(7), state, params, weight=7)
      >>> print(updates)
      -1.3
    """
    if not isinstance(state, optax.MultiStepsState):
        raise TypeError(
            f"from_optax: `state` must be an `optax.MultiStepsState`, got {type(state).__name__}. "
            "For a plain optimizer state use `from_inner_state`."
        )
    fresh = from_inner_state(tx, state.inner_opt_state, params, optimizer_step=state.gradient_step)
    mini_step = jnp.asarray(state.mini_step, jnp.int32)
    is_open = isinstance(mini_step, jax.core.Tracer) or bool(mini_step > 0)
    held, tree = jax.tree.flatten(fresh.grad_carry, is_leaf=is_carry)
    sums = jax.tree.leaves(state.acc_grads, is_leaf=is_none)
    if len(held) != len(sums):
        raise ValueError(
            f"from_optax: `state` accumulates {len(sums)} arrays, but `params` has {len(held)}. "
            "Pass the parameters that the state was made for."
        )
    if is_open and any(isinstance(empty, Uncarried) for empty in held):
        raise ValueError(
            "from_optax: `state` holds an open window, which `tx`, with `every` of 1, cannot go on "
            "with. Convert it between two windows, or for a longer `every`."
        )
    weight_carry = _weight_of(mini_step, weight)

    def carry(empty: Any, acc: Any) -> Any:
        if not jax.tree.leaves(empty):
            return empty
        total, *errors = jax.tree.leaves(empty)
        if np.shape(acc) != total.shape:
            raise ValueError(
                f"from_optax: `state` accumulates {checks.describe(acc)} in the place of a "
                f"parameter of shape {total.shape}. Pass the parameters that it was made for."
            )
        factor = weight_carry.total if use_grad_mean else jnp.ones(())
        new = [factor.astype(total.dtype) * jnp.asarray(acc, total.dtype), *errors]
        return jax.tree.unflatten(jax.tree.structure(empty), new)

    return fresh._replace(
        micro_step=mini_step,
        updated=(mini_step == 0) & (jnp.asarray(state.gradient_step) > 0),
        weight_carry=(
            weights.CountedAsOne(*weight_carry) if weight is None and is_open else weight_carry
        ),
        grad_carry=jax.tree.unflatten(
            tree, [carry(empty, acc) for empty, acc in zip(held, sums, strict=True)]
        ),
    )


def _weight_of(mini_step: jax.Array, weight: Any) -> Compensated:
    """The exact weight of `mini_step` micro-steps of `weight` each, 1 by default."""
    one = weights.pair("from_optax", "weight", 1 if weight is None else weight)
    if not isinstance(one.total, jax.core.Tracer) and not one.total > 0:
        raise ValueError(f"from_optax: `weight` must be above 0, got {weight}.")
    return jax.lax.fori_loop(0, mini_step, lambda _, held: weights.add(held, one), weights.zero())


def to_optax(tx: Any, state: Any, params: Any) -> optax.MultiStepsState:
    """The `optax.MultiSteps` state that continues a `ja.multi_steps` run.

    `acc_grads = grad_sum / weight` and `mini_step = micro_step`. `optax.MultiSteps` counts every
    micro-step alike, so a window that is open with unequal weights cannot be handed over exactly.

    Args:
      tx: the `ja.multi_steps` transformation that the state is of.
      state: a `MultiStepsState`.
      params: the parameters.

    Returns:
      An `optax.MultiStepsState` for the same inner optimizer, in the parameters' dtypes; `None` in
      the places of leaves without a gradient.

    Raises:
      TypeError: `state` is not a `MultiStepsState`.
      ValueError: it does not fit `tx` and `params`; or the open window's weight is not its number
        of micro-steps; flush it first.
    """
    if not isinstance(state, MultiStepsState):
        raise TypeError(
            f"to_optax: `state` must be a `MultiStepsState`, got {checks.describe(state)}."
        )
    checks.transformation("to_optax", "tx", tx)
    remedy = "Pass the transformation and the parameters that the state is of."
    like = jax.eval_shape(tx.init, params)
    counted = state._replace(weight_carry=Compensated(*state.weight_carry))
    checks.same_structure("to_optax", "state", counted, like, remedy=remedy)
    seen = trained(differentiated(params))
    sums = jax.tree.map(jnp.zeros_like, seen)
    if jax.tree.leaves(state.grad_carry):
        sums = state.grad_sum
    remedy = "A state over devices becomes one of `reshape_devices(state, None)` first."
    checks.same_structure("to_optax", "state.grad_sum", sums, seen, remedy=remedy)
    traced = isinstance(state.micro_step, jax.core.Tracer)
    if not traced and float(state.weight) != int(state.micro_step):
        raise ValueError(
            f"to_optax: the open window holds {int(state.micro_step)} micro-steps of the weight "
            f"{float(state.weight)}, which `optax.MultiSteps` cannot represent. Call `ja.flush` "
            "first, or convert between windows."
        )
    means = jax.tree.map(lambda g: divide(g, state.weight_carry.total, empty=0.0), sums)
    return optax.MultiStepsState(
        mini_step=state.micro_step,
        gradient_step=state.optimizer_step,
        inner_opt_state=state.inner_state,
        acc_grads=jax.tree.map(lambda g, p: g.astype(p.dtype), means, seen),
    )


def from_inner_state(
    tx: Any, inner_state: Any, params: Any, *, optimizer_step: Any = 0
) -> MultiStepsState:
    """The state of `tx` that continues a run without accumulation.

    The way back is the field itself: `state.inner_state`.

    Args:
      tx: the `ja.multi_steps` transformation, with the same inner optimizer.
      inner_state: the state of the plain optimizer.
      params: the parameters.
      optimizer_step: how many steps it has made; an int or int32 scalar.

    Returns:
      A `MultiStepsState` with an empty window.

    Raises:
      TypeError: `tx` is not a `ja.multi_steps` transformation.
      ValueError: `inner_state` does not fit `tx`.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp, optax
      >>> params, adam = jnp.ones(3), optax.adam(0.1)
      >>> state = from_inner_state(ja.multi_steps(adam, 4), adam.init(params), params)
      >>> print(state.micro_step, state.weight)
      0 0.0
    """
    checks.transformation("from_inner_state", "tx", tx)
    fresh = tx.init(params)
    if not isinstance(fresh, MultiStepsState):
        raise TypeError(
            "from_inner_state: `tx` must be a `ja.multi_steps` transformation itself, got one "
            f"whose state is {type(fresh).__name__}."
        )
    checks.same_structure(
        "from_inner_state",
        "inner_state",
        inner_state,
        fresh.inner_state,
        remedy="Pass the state of the optimizer that `tx` wraps.",
    )
    if not (checks.is_array(optimizer_step) and np.shape(optimizer_step) == ()) or not (
        jnp.issubdtype(jnp.result_type(optimizer_step), jnp.integer)
    ):
        raise TypeError(
            "from_inner_state: `optimizer_step` must be an integer scalar, got "
            f"{checks.describe(optimizer_step)}."
        )
    return fresh._replace(
        optimizer_step=jnp.asarray(optimizer_step, jnp.int32),
        inner_state=jax.tree.map(
            lambda x, like: jnp.array(x, like.dtype, copy=True), inner_state, fresh.inner_state
        ),
    )


def reshape_devices(state: Any, num_devices: int | None) -> Any:
    """A state whose open windows lie on another number of devices, with the same mean.

    The sums of the devices that meet on one are added, with their error terms; new devices begin
    with nothing. `sum_d grad_sum_d / sum_d weight_d` stays, bit for bit where the sums are exact.
    Sums carried in bfloat16 are rounded once more where devices meet.

    Args:
      state: the state of `multi_steps(axis_name=...)`, alone or inside that of `optax.chain` and
        the like, outside of `jit`, with its leading axis of devices. A state without that axis,
        of one device, is taken as well.
      num_devices: how many devices there are now; `None` for a stream without `axis_name`.

    Returns:
      The state with new arrays in its device-local fields, on the default device. Lay them out with
      `jax.device_put` and `ja.state_specs`.

    Raises:
      TypeError: `num_devices` is not an integer.
      ValueError: it is less than 1, `state` holds no `multi_steps` state, or another host holds a
        part of it.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp, optax
      >>> state = ja.multi_steps(optax.sgd(1.0), 4, axis_name="data").init(jnp.float32(0))
      >>> state = state._replace(grad_carry=jnp.arange(4.0))  # from four devices
      >>> state = state._replace(weight_carry=jax.tree.map(lambda x: x + jnp.ones(4),
      ...                                                  state.weight_carry))
      >>> print(reshape_devices(state, 2).grad_carry)
      [1. 5.]
    """
    if num_devices is not None:
        num_devices = checks.integer("reshape_devices", "num_devices", num_devices)
    if not find_states(state):
        raise ValueError(
            f"reshape_devices: `state` holds no `multi_steps` state, got {checks.describe(state)}."
        )

    def one(node: Any) -> Any:
        if not isinstance(node, MultiStepsState):
            return node
        has_axis = np.ndim(node.weight_carry.total) == 1
        local = {n: getattr(node, n) for n in LOCAL}
        fold = functools.partial(_fold_devices, has_axis=has_axis, num_devices=num_devices)
        return node._replace(**jax.tree.map(fold, local, is_leaf=is_carry))

    return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, MultiStepsState))


def _fold_devices(carry: Any, *, has_axis: bool, num_devices: int | None) -> Any:
    arrays = jax.tree.leaves(carry)
    if not arrays:
        return carry
    if not all(getattr(x, "is_fully_addressable", True) for x in arrays):
        raise ValueError(
            "reshape_devices: another host holds a part of `state`. Restore a checkpoint on one "
            "host, or gather it first."
        )
    carry = jax.tree.map(lambda x: np.asarray(x) if has_axis else np.asarray(x)[None], carry)
    rows = [jax.tree.map(lambda x, i=i: x[i], carry) for i in range(len(jax.tree.leaves(carry)[0]))]
    nothing = jax.tree.map(np.zeros_like, rows[0])
    groups = np.array_split(np.arange(len(rows)), num_devices or 1)
    folded = [functools.reduce(join, [rows[i] for i in g]) if len(g) else nothing for g in groups]
    if isinstance(carry, weights.CountedAsOne):
        folded = [weights.CountedAsOne(*pair) for pair in folded]
    if num_devices is None:
        return jax.tree.map(jnp.array, folded[0])
    return jax.tree.map(lambda *xs: jnp.asarray(np.stack([np.asarray(x) for x in xs])), *folded)
