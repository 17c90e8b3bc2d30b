"""A window on an Explicit mesh whose deferral is left to JAX's `unreduced` type."""

from collections.abc import Sequence
from typing import Any

from jaxaccum.core import compat
from jaxaccum.core.sums import WindowSums
from jaxaccum.folds import devices, spmd
from jaxaccum.folds.arguments import Given, Options
from jaxaccum.folds.bound import Bound
from jaxaccum.numerics import accumulators


def check(function: str, accumulator: Any, others: dict[str, Any]) -> None:
    """Refuses what the operators on `unreduced` arrays do not allow.

    Raises:
      ValueError: an option cannot be combined with `reduction="unreduced"`.
    """
    refused = {
        "accumulator": accumulator != accumulators.plain(),
        "skip_nonfinite": others.get("skip_nonfinite"),
        "noise_scale": others.get("noise_scale"),
        "grad_reducers": others.get("grad_reducers") is not None,
        "param_specs": others.get("param_specs") is not None,
        "grad_specs": others.get("grad_specs") is not None,
        "axis_name": others.get("axis_name") is not None,
        "model_state": others.get("model_state") is not None,
        "argnums": others.get("argnums", 0) != 0,
    }
    named = [f"`{name}`" for name, given in refused.items() if given]
    if named:
        raise ValueError(
            f'{function}: reduction="unreduced" cannot be combined with {", ".join(named)}: JAX '
            'only adds and casts unreduced arrays. Use reduction="defer".'
        )
    if others.get("spmd_axis_name") is None:
        raise ValueError(
            f'{function}: reduction="unreduced" needs `spmd_axis_name`, the mesh axes over which '
            "the rows of the batch are split."
        )


def check_call(function: str, loss_scale: Any) -> None:
    """Refuses a loss scale, which would multiply unreduced gradients."""
    if loss_scale is not None:
        raise ValueError(
            f'{function}: reduction="unreduced" cannot be combined with `loss_scale`: JAX only '
            'adds and casts unreduced arrays. Use reduction="defer".'
        )


def sums(options: Options, args: Sequence[Any], given: Given) -> WindowSums:
    """The window's sums, from parameters typed `reduced` and gradients typed `unreduced`.

    Raises:
      ValueError: the axes are not Explicit, or an operator of the loss function does not accept
        parameters of the `reduced` type.
    """
    function = options.function
    check_call(function, given.loss_scale)
    names = devices.names_of(function, "spmd_axis_name", options.spmd_axis_name)
    mesh = spmd.mesh_of(function, names, args)
    if not all(compat.is_explicit(mesh, name) for name in names):
        raise ValueError(
            f'{function}: reduction="unreduced" needs mesh axes of the Explicit type, got '
            f'{mesh.axis_types} for {mesh.axis_names}. Use reduction="defer".'
        )
    try:
        return Bound(options, args, given).sums()
    except Exception as error:
        if not compat.concerns_reduced_types(error) or function in str(error):
            raise
        operator = compat.failing_primitive(error) or "an operator"
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f'{function}: reduction="unreduced": `{operator}` in the loss function does not accept '
            f'parameters of the reduced type over {names}: {reason} Use reduction="defer".'
        ) from error
