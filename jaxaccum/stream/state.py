"""The state of `multi_steps`, and what can be asked of it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxaccum.closing.ledger import Ledger, WithLedger
from jaxaccum.core import checks
from jaxaccum.core.sums import WindowSums
from jaxaccum.devices import reduction
from jaxaccum.numerics import accumulators, weights
from jaxaccum.stream.own_params import inner_specs


class MeanSum(NamedTuple):
    """The undivided mean of an extra argument, as `ja.Mean`, in a form that every checkpoint knows.

    Attributes:
      total: the undivided sum; float scalar.
      weight: what it is to be divided by; float scalar.
    """

    total: Any
    weight: Any


class _Fields(NamedTuple):
    micro_step: jax.Array
    optimizer_step: jax.Array
    updated: jax.Array
    weight_carry: accumulators.Compensated
    grad_carry: Any
    mean_args: dict[str, MeanSum]
    inner_state: Any
    ledger: Ledger


# Those that a device has for itself.
LOCAL = ("weight_carry", "grad_carry", "mean_args")


class MultiStepsState(WithLedger, _Fields):
    """The state of `multi_steps`; every field is an array or a tree of arrays.

    What stands in the ledger reads as a field too: `state.num_skipped`.

    Attributes:
      micro_step: how many micro-steps the open window holds; int32 scalar.
      optimizer_step: how many optimizer steps were applied; int32 scalar.
      updated: whether the last call applied an optimizer step; boolean scalar.
      weight_carry: the open window's weight as a `Compensated` pair of floats; see `weight`.
      grad_carry: the open window's gradient sums as the accumulator carries them; see `grad_sum`.
      mean_args: the undivided means of the extra arguments that are averaged, by name.
      inner_state: the state of the inner optimizer.
      ledger: what was skipped and dropped so far, over the state's lifetime, `diverged`, and the
        state of the loss scale; see `Ledger`.
    """

    __slots__ = ()

    @property
    def grad_sum(self) -> Any:
        """The open window's undivided gradients: one array per parameter, float32 or wider.

        Parameters without a gradient (integers) have `None`; a window of one micro-step carries
        nothing and has `None` throughout.
        """
        return accumulators.read(self.grad_carry)

    @property
    def weight(self) -> Any:
        """The open window's weight, a float scalar.

        Outside of `jit` it is read from both limbs as a NumPy float64, exact for integers far past
        2**24; inside it is the rounded sum.
        """
        return weights.read(self.weight_carry)


_FLAGS = ("updated", "diverged")
_COUNTS = ("micro_step", "optimizer_step", *Ledger._fields[:4])

_OTHERS = (
    "To go on from a state of `optax.MultiSteps` call `ja.interop.from_optax(tx, state, params)`, "
    "from that of a plain optimizer `ja.interop.from_inner_state(tx, state, params)`."
)


class InitFn(Protocol):
    """From the parameters to the state of a `multi_steps`."""

    def __call__(self, params: Any) -> MultiStepsState: ...


class UpdateFn(Protocol):
    """From the sums of a micro-step to updates and a new state; see `multi_steps`."""

    def __call__(
        self,
        updates: Any,
        state: MultiStepsState,
        params: Any = None,
        *,
        weight: Any = None,
        flush: bool = False,
        **extra_args: Any,
    ) -> tuple[Any, MultiStepsState]: ...


class MultiSteps(optax.GradientTransformationExtraArgs):
    """What `multi_steps` returns."""

    __slots__ = ()
    init: InitFn
    update: UpdateFn


def check_no_window(function: str, name: str, value: Any) -> None:
    """Refuses a window inside of another one.

    Args:
      function: the public function's name, for messages.
      name: the argument's name.
      value: the transformation that was passed, or the state that it made.
    """
    windows = MultiSteps, optax.MultiSteps, MultiStepsState, optax.MultiStepsState
    parts = [value, getattr(getattr(value, "update", None), "__self__", None)]
    if not isinstance(value, MultiSteps):
        parts += jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, windows))
    found = [part for part in parts if isinstance(part, windows)]
    if found:
        theirs = isinstance(found[0], optax.MultiSteps | optax.MultiStepsState)
        held = "an `optax.MultiSteps`" if theirs else "a `ja.multi_steps`"
        raise ValueError(
            f"{function}: `{name}` holds {held}, so that one window would stand in another. Pass "
            "the optimizer without it."
        )


def check_divides(function: str, grads: Any, named: Mapping[str, Any], state: Any) -> None:
    """Refuses sums, and a weight, for an optimizer that would take a sum for a mean.

    Args:
      function: the public function's name, for messages.
      grads: what is passed as gradients.
      named: the extra arguments.
      state: the optimizer's state.
    """
    summed = isinstance(grads, WindowSums)
    if (summed or "weight" in named) and not find_states(state):
        raise TypeError(
            f"{function}: {'`ja.WindowSums`' if summed else '`weight=`'} needs an optimizer that "
            "divides by the weight, `ja.multi_steps(tx, every)`; this one would take the sum for "
            "the mean. Pass `ja.finalize(sums).grads`."
        )


def _kind(state: Any) -> str:
    """The type of a state, in words; that of Optax has the same name as ours."""
    whose = " of Optax" if isinstance(state, optax.MultiStepsState) else ""
    return f"{type(state).__name__}{whose}"


def check_state(state: Any) -> None:
    """Requires a `MultiStepsState` whose counters and weight are as `init` makes them.

    Raises:
      TypeError: it is something else, or a field is.
    """
    if not isinstance(state, MultiStepsState):
        remedy = _OTHERS
        places = jax.tree_util.tree_leaves_with_path(
            state, is_leaf=lambda x: isinstance(x, MultiStepsState)
        )
        for path, node in places:
            if isinstance(node, MultiStepsState):
                remedy = (
                    "It is that of a transformation around `multi_steps`, such as `optax.chain`, "
                    f"whose `update` takes it; this one takes `state{jax.tree_util.keystr(path)}`."
                )
        raise TypeError(f"multi_steps: `state` must come from `init`, got {_kind(state)}. {remedy}")
    for name in (*_COUNTS, *_FLAGS):
        field, kind = getattr(state, name), jnp.bool_ if name in _FLAGS else jnp.int32
        if not hasattr(field, "dtype") or field.dtype != kind or np.shape(field):
            raise TypeError(
                f"multi_steps: `state.{name}` must be a scalar of {jnp.dtype(kind)}, got "
                f"{checks.describe(field)}. Restore the state into that of `init`."
            )
    pair = state.weight_carry
    if not (isinstance(pair, accumulators.Compensated) and all(map(checks.is_array, pair))):
        raise TypeError(
            "multi_steps: `state.weight_carry` must be a pair of floats, got "
            f"{checks.describe(pair)}. Restore the state into that of `init`."
        )


def find_states(state: Any) -> list[MultiStepsState]:
    """All `MultiStepsState`s in an optimizer state."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MultiStepsState))
    return [leaf for leaf in leaves if isinstance(leaf, MultiStepsState)]


def find_state(function: str, state: Any) -> MultiStepsState:
    """The one `MultiStepsState` in an optimizer state, however deeply it is nested."""
    found = find_states(state)
    if len(found) != 1:
        raise ValueError(
            f"{function}: expected a state that holds one `multi_steps` state, found "
            f"{len(found)} in {_kind(state)}. "
            "Pass the part of the state that belongs to one `multi_steps`. "
            f"{'' if found else _OTHERS}".rstrip()
        )
    return found[0]


def has_updated(state: Any) -> jax.Array:
    """Whether the last call of `multi_steps`' `update` applied an optimizer step.

    False before the first step, between windows, after a skipped micro-step, and after a window
    that held no weight. `optax.MultiSteps.has_updated` infers it from the position and is true
    after a skipped micro-step at a window's start.

    Args:
      state: a `multi_steps` state, alone or inside the state of `optax.chain` and the like.

    Returns:
      A boolean scalar.

    Raises:
      ValueError: the state holds no `multi_steps` state, or several.
    """
    return find_state("has_updated", state).updated


def state_specs(state: Any, axis_name: str | Sequence[str], *, local_params: Any = None) -> Any:
    """How a `multi_steps(axis_name=...)` state is laid out over the mesh.

    For the `in_specs` and `out_specs` of the `shard_map` that carries the state through jitted
    calls: fields that differ per device (`grad_carry`, `weight_carry`, `mean_args`) have a leading
    axis of devices and the spec `P(axis_name)`, all others `P()`.

    Args:
      state: the state, alone or inside that of `optax.chain` and the like; arrays or the result
        of `jax.eval_shape(tx.init, params)`.
      axis_name: the mesh axes, as given to `multi_steps`.
      local_params: as given to `multi_steps`: what the inner state holds of such parameters lies as
        they do. Make the state where they are parts, inside the `shard_map`, or under
        `jax.set_mesh`.

    Returns:
      A tree like `state` with `PartitionSpec` leaves.

    Raises:
      TypeError: the state is one of `optax.MultiSteps`, or `axis_name` is no name.

    Example:
      >>> import jax, jaxaccum as ja, jax.numpy as jnp, optax
      >>> tx = ja.multi_steps(optax.sgd(1.0), 2, axis_name="data")
      >>> specs = ja.state_specs(jax.eval_shape(tx.init, jnp.ones(3)), "data")
      >>> print(specs.grad_carry, specs.micro_step)
      P('data',) P()
    """
    names = reduction.names_of("state_specs", "axis_name", axis_name)
    if not names:
        raise TypeError("state_specs: `axis_name` must be the name of a mesh axis, got None.")
    local = PartitionSpec(names if len(names) > 1 else names[0])

    def specs(node: Any) -> Any:
        if isinstance(node, optax.MultiStepsState):
            raise TypeError(
                f"state_specs: `state` must come from a `ja.multi_steps`, got {_kind(node)}, which "
                f"keeps no sums of a device's own. {_OTHERS}"
            )
        if not isinstance(node, MultiStepsState):
            return PartitionSpec()
        whole = jax.tree.map(lambda _: PartitionSpec(), node)
        return whole._replace(
            **{name: jax.tree.map(lambda _: local, getattr(node, name)) for name in LOCAL},
            inner_state=inner_specs(node.inner_state, node.grad_carry, local_params, names),
        )

    kinds = MultiStepsState, optax.MultiStepsState
    return jax.tree.map(specs, state, is_leaf=lambda x: isinstance(x, kinds))


def flush(tx: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
    """Applies a partial window, divided by the weight that it really holds.

    For the end of an epoch: the last window may hold fewer micro-steps than `every`. Where the
    open window is empty nothing changes and the updates are zero. Works inside `jit`.
    `optax.MultiSteps` has no such call: its last partial window is lost or leaks into the next
    epoch.

    Args:
      tx: the `multi_steps` transformation, alone or inside `optax.chain` and the like, or several
        of them; other members of a chain see gradients of zero.
      state: its state.
      params: the parameters, as for `update`. Without them the updates have the dtype that `inner`
        gives for gradients in the dtype of the sums, float32 or wider.
      **extra_args: extra arguments of the inner optimizer. The window's means of those named in
        `mean_args` are passed on by themselves.

    Returns:
      `(updates, state)`, as from `tx.update`.

    Raises:
      ValueError: the state holds no `multi_steps` state, or `params` are needed: where there are
        several, or where `every` is 1.

    Example:
      >>> import jaxaccum as ja, jax.numpy as jnp, optax
      >>> tx = ja.multi_steps(optax.sgd(1.0), 4)
      >>> state = tx.init(jnp.float32(0))
      >>> for grad in (2.0, 4.0):
      ...     _, state = tx.update(jnp.float32(grad), state)
      >>> updates, state = ja.flush(tx, state)
      >>> print(updates, ja.has_updated(state))
      -3.0 True
    """
    checks.transformation("flush", "tx", tx)
    if params is None or not find_states(state):
        params_like = find_state("flush", state).grad_sum
    else:
        params_like = params
    zeros = jax.tree.map(jnp.zeros_like, params_like)
    return tx.update(zeros, state, params, flush=True, **extra_args)
