"""The inner optimizer: what it is offered, in which precision, and what its states say."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxaccum.closing.leaves import fill, hide, is_none, trained, unchanged
from jaxaccum.core import checks, compat, programs
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.mean import wide
from jaxaccum.core.sums import WindowSums


def in_one_precision(inner: optax.GradientTransformation) -> Any:
    """`inner`, whose update accepts the float32 mean gradient of bfloat16 parameters.

    Most optimizers promote as they go. Some require that gradients, parameters and state agree:
    the branches of a `cond` of their own differ in dtype otherwise, or a `clamp` mixes them. Such
    an update sees parameters and state in float32 too, which loses no bit of them; whoever calls it
    casts the new state and the updates back.

    Args:
      inner: an Optax transformation.

    Returns:
      A transformation that accepts extra arguments.
    """
    inner = optax.with_extra_args_support(inner)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        def as_it_is() -> Any:
            return inner.update(updates, state, params, **extra_args)

        def widened() -> Any:
            return inner.update(updates, _wide(state), _wide(params), **extra_args)

        mixed = any(d == wide(d) for d in _floats(updates)) and any(
            d != wide(d) for d in _floats((state, params))
        )
        # An error in both is the user's own, and is raised by the call as it is.
        return widened() if mixed and not _traces(as_it_is) and _traces(widened) else as_it_is()

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def of_trained(tx: Any) -> optax.GradientTransformationExtraArgs:
    """`tx`, which never sees a leaf without a gradient, for whoever calls it as it is.

    It finds `None` in the places of integers, booleans and keys, as in `multi_steps`, and their
    updates change no bit of them.
    """
    tx = optax.with_extra_args_support(tx)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        if params is None or isinstance(updates, WindowSums):  # of a stream, which hides them
            return tx.update(updates, state, params, **extra_args)
        leaves = jax.tree.leaves(params, is_leaf=is_none)
        moves = [leaf is not None and is_inexact(leaf) for leaf in leaves]
        given = jax.tree.leaves(updates, is_leaf=is_none)
        new, state = tx.update(hide(updates, moves), state, hide(params, moves), **extra_args)
        others = [unchanged(grad, leaf) for grad, leaf in zip(given, leaves, strict=True)]
        return fill(new, moves, others), state

    return optax.GradientTransformationExtraArgs(lambda params: tx.init(trained(params)), update_fn)


class EveryWindow:
    """Base of optimizer states that have to see every window, one without any weight too.

    Such a window hands over a gradient of zero; all others drop it.
    """


def sees_every_window(inner_state: Any) -> bool:
    """Whether any part of the optimizer's state is an `EveryWindow`."""
    leaves = jax.tree.leaves(inner_state, is_leaf=lambda x: isinstance(x, EveryWindow))
    return any(isinstance(leaf, EveryWindow) for leaf in leaves)


class Trial(NamedTuple):
    """What came of tracing an optimizer's update once.

    Attributes:
      takes_offers: whether it takes what it is offered beside what the caller passed.
      types: the tree of its updates' abstract values.
      constant: for each update whether it depends on nothing, as that of a frozen parameter;
        `None` before the trial.
    """

    takes_offers: bool
    types: Any
    constant: list[bool] | None


def tried(update_fn: Callable[..., Any], *args: Any, offers: bool) -> Trial:
    """Traces `update_fn(offering, *args)`, which returns the updates.

    Some optimizers accept no extra argument that they do not know, SAM is one: where it cannot be
    traced with the offers, it is traced without, and an error of the user's own comes up there.
    """

    def trial(offering: bool) -> Trial:
        program = programs.stage(functools.partial(update_fn, offering), *args)
        tree = jax.tree.structure(program.out_shape)
        types = jax.tree.unflatten(tree, program.closed.out_avals)
        return Trial(offering, types, programs.constant(program))

    if offers:
        try:
            return trial(True)
        except TypeError:
            pass
    return trial(False)


def check_shared(function: str, types: Any, params: Any, axes: Sequence[str]) -> None:
    """Refuses an optimizer that moves a parameter apart on devices which share it.

    Args:
      function: the public function's name, for messages.
      types: the tree of the updates' abstract values.
      params: the parameters that they are of.
      axes: the axes of the window; only where replication is checked types tell.
    """
    if not axes or not checks.same_tree(types, params):
        return
    pairs = zip(jax.tree.leaves(types), jax.tree_util.tree_leaves_with_path(params), strict=True)
    for update, (path, param) in pairs:
        apart = sorted((compat.varying_axes(update) - compat.varying_axes(param)) & set(axes))
        if apart:
            raise ValueError(
                f"{function}: the optimizer's update of `params{jax.tree_util.keystr(path)}` "
                f"differs over {apart}, where the parameter is the same: it is made of something "
                "that is each device's own, such as the norm of gradients in parts. Clip with "
                "`jaxaccum.norms.clip_by_global_norm(max_norm, specs)`, which takes the norm of "
                "the whole."
            )


def strong(arrays: Sequence[Any]) -> list[jax.Array]:
    """The arrays without weak types, as the sums of gradients are."""
    return [jax.lax.convert_element_type(x, jnp.asarray(x).dtype) for x in arrays]


def _traces(fn: Any) -> bool:
    """Whether `fn` can be traced, without a warning of JAX that it mixes dtypes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            programs.stage(fn)
    except Exception:
        return False
    return True


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(wide(x.dtype)) if _is_narrow(x) else x, tree)


def _is_narrow(x: Any) -> bool:
    return is_inexact(x) and jnp.result_type(x) != wide(jnp.result_type(x))


def _floats(tree: Any) -> set[Any]:
    """The floating and complex dtypes in a tree."""
    leaves = jax.tree.leaves(tree)
    dtypes = {x.dtype if hasattr(x, "dtype") else jnp.result_type(x) for x in leaves}
    return {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)}
