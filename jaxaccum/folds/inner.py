"""The inner optimizer, run in one precision where it asks for that."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxaccum.core import programs
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.mean import wide


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

        mixed = any(map(_is_wide, jax.tree.leaves(updates))) and any(
            map(_is_narrow, jax.tree.leaves((state, params)))
        )
        # An error in both is the user's own, and is raised by the call as it is.
        return widened() if mixed and not _traces(as_it_is) and _traces(widened) else as_it_is()

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def differentiated(params: Any) -> Any:
    """What the gradients are of: `optax.lookahead` differentiates its fast parameters only."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


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


def _is_wide(x: Any) -> bool:
    return is_inexact(x) and not _is_narrow(x)
