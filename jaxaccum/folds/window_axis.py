"""Losses that speak over the window's axis: every micro-batch as if it were a device."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import checks
from jaxaccum.core.reducers import Reducers
from jaxaccum.core.sums import WindowSums
from jaxaccum.folds import devices, faults, stages
from jaxaccum.folds.staged import StagedWindow


def check_options(function: str, options: dict[str, Any]) -> None:
    """Refuses a wrong `window_axis_name` and options that do not go with it.

    Raises:
      TypeError: `window_axis_name` is not a name.
      ValueError: an option has no meaning with it, or `window_axis_storage` is unknown.
    """
    storage, name = options.get("window_axis_storage", "store"), options.get("window_axis_name")
    if storage not in stages.STORAGES:
        raise ValueError(
            f'{function}: `window_axis_storage` must be "store" or "recompute", got {storage!r}.'
        )
    if name is None:
        return
    if not isinstance(name, str):
        raise TypeError(
            f"{function}: `window_axis_name` must be the name of an axis, got "
            f"{checks.describe(name)}. Collectives over devices too name both axes; the window's "
            "is one."
        )
    reasons = {
        "grad_reducers": "a gradient is a sum over stages as well as over micro-batches",
        "noise_scale": "no micro-batch has a gradient of its own",
        "model_state": "statistics are the window's already; return them in aux, as `ja.Last`",
    }
    for option, reason in reasons.items():
        if options.get(option):
            raise ValueError(
                f"{function}: `{option}` does not go with `window_axis_name`: {reason}. Leave one "
                "of the two out."
            )
    if options.get("skip_nonfinite") == faults.MICRO_BATCH:
        raise ValueError(
            f"{function}: with `window_axis_name` a micro-batch that is not finite reaches all "
            'others through the collectives. Leave out the whole window, `skip_nonfinite="window"`.'
        )
    for other in ("axis_name", "spmd_axis_name"):
        if name in devices.names_of(function, other, options.get(other)):
            raise ValueError(
                f"{function}: `window_axis_name` and `{other}` both name the axis {name!r}. Give "
                "the window's axis a name of its own."
            )


def check_call(bound: Any) -> None:
    """Refuses a call whose micro-batches cannot meet.

    Raises:
      ValueError: an uneven cut, `num_real`, a bound name, or checked manual axes.
    """
    function, name = bound.options.function, bound.options.window_axis_name
    if len(bound.segments) > 1:
        sizes = " and ".join(f"{s.num} of {s.rows} rows" for s in bound.segments)
        raise ValueError(
            f"{function}: with `window_axis_name` all micro-batches need the same number of rows, "
            f"got {sizes}. Choose a number that divides the batch, or pad it with `ja.pad_batch` "
            "and mask in the loss."
        )
    if bound.num_real is not None:
        raise ValueError(
            f"{function}: `num_real` does not go with `window_axis_name`: every micro-batch takes "
            "part in the collectives. Mask rows in the loss instead."
        )
    if devices.is_bound(name):
        raise ValueError(
            f"{function}: `window_axis_name` {name!r} is already an axis around this call. Give "
            "the window's axis a name of its own."
        )
    manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
    if devices.checked(manual):
        raise ValueError(
            f"{function}: `window_axis_name` works inside `jax.shard_map` only with "
            "`check_vma=False`, since JAX types no collective over an axis that is not of the "
            "mesh. Pass it, or use `spmd_axis_name` under plain `jit`."
        )


def axis_env(options: Any, number: int) -> list[tuple[str, int]]:
    """The axis that the loss may use, with its size; empty without one."""
    return [(options.window_axis_name, number)] if options.window_axis_name else []


def count(bound: Any) -> list[jax.Array]:
    """The summed weight of each term on this device, by a pass stripped of the model."""
    window = StagedWindow(bound, weights_only=True)
    window.forward()
    return window.outputs()


def sums(bound: Any, seeds: Sequence[Any] | None) -> WindowSums:
    """The window's sums on this device, as carries.

    Args:
      bound: the loss, bound to the arguments of a call.
      seeds: what each term's gradient is multiplied by; `None` for 1.
    """
    window = StagedWindow(bound, weights_only=False)
    grads = window.gradients(seeds)
    values, terms = window.outputs(), window.loss.terms
    n = terms.num_leaves
    return WindowSums(
        grads=grads,
        loss=jax.tree.unflatten(terms, values[:n]),
        weight=jax.tree.unflatten(terms, values[n : 2 * n]),
        aux=jax.tree.unflatten(window.loss.aux_tree, values[2 * n :]),
        num_microbatches=jnp.int32(bound.num_microbatches),
        num_skipped=None,  # type: ignore[arg-type]  # known by the end of the fold
        grad_reducers=Reducers(bound.tree.reducers(grads)),
    )
