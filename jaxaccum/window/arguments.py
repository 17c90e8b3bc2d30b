"""The checked arguments of a window: the options of the factory, the keywords of the call."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks, faults
from jaxaccum.numerics import accumulators
from jaxaccum.window import refusals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The checked keywords of `accumulate`, with their defaults; see there.

    Their order is that of `help`. Where there is no default it is `None` until it is checked.
    """

    function: str
    loss_fn: Callable[..., Any]
    num_microbatches: int | None
    microbatch_size: int | None
    argnums: int | Sequence[int] = 0
    batch_argnums: int | Sequence[int] | None = None
    has_aux: bool = False
    axis_name: Any = None
    spmd_axis_name: Any = None
    reduction: str = "defer"
    param_specs: Any = None
    grad_specs: Any = None
    whole_params: bool = True
    reduce_dtype: Any = jnp.float32
    overlap: bool = False
    local_params: Any = None
    accumulator: accumulators.Accumulator
    skip_nonfinite: Any = False
    grad_reducers: Any = None
    model_state: str | None = None
    unroll: int | bool = 1
    noise_scale: bool = False

    @property
    def policy(self) -> str | None:
        """What is left out, by its name in `faults`; `None` for nothing."""
        return faults.policy(self.function, self.skip_nonfinite)

    @property
    def skips(self) -> bool:
        """Whether single micro-batches are left out."""
        return self.policy == faults.MICRO_BATCH

    @property
    def drops(self) -> bool:
        """Whether the whole window is."""
        return self.policy == faults.WINDOW


class Given(NamedTuple):
    """The keywords of a call; see `accumulate`."""

    key: Any = None
    num_real: Any = None
    denominators: Any = None
    loss_scale: Any = None
    model_state: Any = None
    into: Any = None


def own_key(options: Options, key: Any, axes: tuple[str, ...]) -> Any:
    """The key of a call, checked, and another one on each device.

    Raises:
      TypeError: it is not one PRNG key.
      ValueError: there is none, and the accumulator needs one.
    """
    checks.key(options.function, key)
    if key is None and options.accumulator.needs_key:
        raise refusals.refused("rounding without a key", options.function)
    if key is None or not axes:
        return key
    return jax.random.fold_in(key, jax.lax.axis_index(axes))


def passed_key(options: Options, key: Any) -> dict[str, Any]:
    """The keyword arguments that hand `key` to the loss function, where it takes one.

    Raises:
      TypeError: there is a key that nothing takes.
    """
    if key is None:
        return {}
    try:
        parameters = inspect.signature(options.loss_fn).parameters.values()
    except (TypeError, ValueError):  # some callables have no signature
        return {"key": key}
    takes_key = any(p.name == "key" or p.kind == p.VAR_KEYWORD for p in parameters)
    if not (takes_key or options.accumulator.needs_key):
        raise TypeError(
            f"{options.function}: `key=` was given, but `loss_fn` takes no keyword `key`. Add it, "
            "`def loss_fn(params, batch, *, key)`, or leave `key=` out."
        )
    return {"key": key} if takes_key else {}


def num_real(function: str, value: Any, number: int) -> Any:
    """`num_real`, checked: `None`, an int, or a traced scalar clipped to what there is."""
    if value is None:
        return None
    if isinstance(value, jax.Array):
        if value.shape or not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(
                f"{function}: `num_real` must be an integer scalar, got {checks.describe(value)}."
            )
        return jnp.clip(value.astype(jnp.int32), 0, number)
    value = checks.integer(function, "num_real", value, minimum=0)
    if value > number:
        raise ValueError(
            f"{function}: `num_real` is {value}, but the batch is cut into {number} micro-batches."
        )
    return value


def check_denominators(function: str, given: Any) -> None:
    """Refuses denominators by whose value nothing can be divided; what is traced may be zero.

    Raises:
      TypeError: they are not numbers.
      ValueError: one is not finite, or not above zero.
    """
    remedy = "`ja.denominators(loss_fn, ...)` returns them."
    checks.arrays(function, given, name="denominators", remedy=remedy)
    for path, leaf in jax.tree_util.tree_leaves_with_path(given):
        called = f"`denominators{jax.tree_util.keystr(path)}`"
        if jnp.result_type(leaf) == jnp.bool_:
            raise TypeError(f"{function}: {called} must be a number, got {leaf}. {remedy}")
        known = not isinstance(leaf, jax.core.Tracer) and np.isrealobj(leaf) and np.ndim(leaf) == 0
        number = np.asarray(leaf if known else 1)  # of NumPy, also while something is traced
        if not np.isfinite(number) or number <= 0:
            raise ValueError(
                f"{function}: {called} must be finite and above zero, got {leaf}. Pass what the "
                "term is to be divided by, or leave a term in which nothing counts out of the loss."
            )


def denominators(function: str, given: Any, terms: Any) -> list[Any]:
    """The leaves of `denominators`, checked against the terms of the loss."""
    remedy = "`ja.denominators(loss_fn, ...)` returns them."
    leaves, tree = jax.tree.flatten(given)
    if tree != terms:
        raise ValueError(
            f"{function}: `denominators` must have the structure of the loss, {terms}, got {tree}. "
            f"{remedy}"
        )
    for leaf in leaves:
        if np.shape(leaf) or np.iscomplexobj(leaf):
            raise ValueError(
                f"{function}: `denominators` must be real scalars, got {checks.describe(leaf)}."
            )
    return [jnp.asarray(d) for d in leaves]


def check_noise_scale(function: str, terms: Any, denominators: Any) -> None:
    """Requires undivided gradients with one weight, which the noise scale is a statement about.

    Raises:
      ValueError: the loss has several terms, or its denominators were given.
    """
    if terms.num_leaves != 1:
        raise refusals.refused("noise of several terms", function, number=terms.num_leaves)
    if denominators is not None:
        raise refusals.refused("noise of divided gradients", function)
