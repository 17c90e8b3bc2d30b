"""Argument checks, and the one style in which their messages are written.

A message names the function, what was expected (the argument in backticks), what came, and one
remedy.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core.leaves import leafwise

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_SHORT = {"float": "f", "bfloat": "bf", "complex": "c", "uint": "u", "int": "i"}


def describe(x: Any) -> str:
    """A short text for a value: dtype and shape of an array, the repr of anything else."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    text = repr(x)
    return text if len(text) <= 60 else f"{type(x).__name__} {text[:50]}…"


def integer(
    function: str, name: str, value: Any, *, minimum: int = 1, remedy: str = "Pass an int."
) -> int:
    """`value` as a Python int; NumPy and JAX integers are accepted, bools and floats are not."""
    number: int | None = None
    if not isinstance(value, bool | np.bool_):
        try:
            number = operator.index(value)
        except (TypeError, jax.errors.JAXTypeError):
            number = None
    if number is None:
        raise TypeError(
            f"{function}: `{name}` must be a static integer, got {describe(value)} of type "
            f"{type(value).__name__}. {remedy}"
        )
    if number < minimum:
        raise ValueError(f"{function}: `{name}` must be at least {minimum}, got {number}.")
    return number


def number(function: str, name: str, value: Any) -> float:
    """`value` as a Python float; NumPy and JAX numbers are accepted, bools and texts are not."""
    if not isinstance(value, bool | np.bool_ | str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError):  # of JAX too, for what is traced
            pass
    raise TypeError(
        f"{function}: `{name}` must be a static number, got {describe(value)} of type "
        f"{type(value).__name__}. Pass a float."
    )


def positive(function: str, name: str, value: Any) -> None:
    """Requires a real number, above zero where it is known; it may be traced.

    Raises:
      TypeError: it is something else.
      ValueError: it is not above zero.
    """
    if not is_array(value) or is_key(value) or np.ndim(value) or jnp.iscomplexobj(value):
        raise TypeError(f"{function}: `{name}` must be a positive number, got {describe(value)}.")
    if not isinstance(value, jax.core.Tracer) and not np.asarray(value) > 0:
        raise ValueError(f"{function}: `{name}` must be positive, got {describe(value)}.")


def one_of(function: str, **arguments: Any) -> None:
    """Requires exactly one of the keyword arguments to be other than `None`."""
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) != 1:
        names = " and ".join(f"`{name}`" for name in arguments)
        raise ValueError(
            f"{function}: exactly one of {names} is needed, got "
            f"{' and '.join(f'`{n}`' for n in given) if given else 'none'}."
        )


def same_tree(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure."""
    return same_structures(jax.tree.structure(a), jax.tree.structure(b))


def same_structures(a: Any, b: Any) -> bool:
    """Whether two tree structures are the same.

    Their own comparison takes dataclasses of equal fields for each other, `Sum` for `Max`.
    """
    return bool(a == b) and str(a) == str(b)


def same_structure(function: str, name: str, got: Any, expected: Any, *, remedy: str) -> None:
    """Requires two trees to agree in structure and in the shapes of their leaves."""
    if not same_tree(got, expected):
        raise ValueError(
            f"{function}: `{name}` has the tree structure {jax.tree.structure(got)}, expected "
            f"{jax.tree.structure(expected)}. {remedy}"
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, leaf), want in pairs:
        if np.shape(leaf) != np.shape(want):
            raise ValueError(
                f"{function}: `{name}{jax.tree_util.keystr(path)}` is {describe(leaf)}, expected "
                f"the shape {tuple(np.shape(want))}. {remedy}"
            )


def argnums(
    function: str, value: int | Sequence[int], number: int, *, name: str = "argnums"
) -> tuple[int, ...]:
    """`argnums` as a tuple of distinct positions below `number`, negative ones resolved."""
    positions = value if isinstance(value, Sequence) else (value,)
    resolved = []
    for position in positions:
        index = integer(function, name, position, minimum=-number)
        if index >= number:
            raise ValueError(
                f"{function}: `{name}` names argument {index}, but only {number} positional "
                "arguments were given."
            )
        resolved.append(index % number)
    if not resolved or len(set(resolved)) != len(resolved):
        raise ValueError(
            f"{function}: `{name}` must name at least one argument and each once, got {value!r}."
        )
    return tuple(resolved)


def key(function: str, value: Any) -> None:
    """Requires one PRNG key, typed or raw, or `None`."""
    dtype, shape = getattr(value, "dtype", None), np.shape(value)
    raw = dtype == jnp.uint32 and len(shape) == 1
    if value is None or (is_key(value) and shape == ()) or raw:
        return
    raise TypeError(
        f"{function}: `key` must be one PRNG key, got {describe(value)}. Pass "
        "`jax.random.key(seed)`; keys for each example belong into the batch, see "
        "`ja.batches.example_keys`."
    )


def is_key(x: Any) -> bool:
    """Whether `x` is an array of typed PRNG keys."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def arrays(
    function: str,
    tree: Any,
    *,
    name: str,
    remedy: str = "Keep what is not an array out of the differentiated arguments, or replace it by "
    "None.",
) -> None:
    """Requires every leaf to be an array or a number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        usable(function, f"{name}{jax.tree_util.keystr(path)}", leaf)
        if not is_array(leaf):
            raise TypeError(
                f"{function}: `{name}{jax.tree_util.keystr(path)}` must be an array, got "
                f"{describe(leaf)} of type {type(leaf).__name__}. {remedy}"
            )


def usable(function: str, name: str, x: Any) -> None:
    """Refuses arrays of kinds that JAX cannot compute with."""
    dtype = getattr(x, "dtype", None)
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{function}: `{name}` is a masked array, {describe(x)}, and JAX has no masks. Pass "
            "`x.filled(0)` and, as an array of its own, `~np.ma.getmaskarray(x)` for "
            "`ja.mean(..., where=...)`."
        )
    widest = {"f": np.dtype(np.float64), "c": np.dtype(np.complex128)}
    if isinstance(dtype, np.dtype) and dtype.kind in widest:
        most = widest[dtype.kind]
        if dtype.itemsize > most.itemsize:
            raise TypeError(
                f"{function}: `{name}` is {describe(x)}, wider than any type of JAX. Pass "
                f'`x.astype("{most}")`.'
            )


def concrete(function: str, tree: Any, *, name: str) -> None:
    """Requires values, which the description of an array does not have."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.AbstractValue):
            raise TypeError(
                f"{function}: `{name}{jax.tree_util.keystr(path)}` is a description without "
                f"values, {type(leaf).__name__} {describe(leaf)}. Pass an array, or trace the "
                "whole call: `jax.eval_shape(f, params, batch)`."
            )


def is_array(x: Any) -> bool:
    """Whether `x` is an array of numbers, booleans or PRNG keys, or a Python number."""
    kind = getattr(x, "dtype", None)
    if kind is None:
        return isinstance(x, bool | int | float | complex)
    text_or_object = isinstance(kind, np.dtype) and kind.kind in "OSUMmV"
    return not text_or_object or kind == jax.dtypes.float0 or jnp.issubdtype(kind, jnp.number)


def transformation(function: str, name: str, value: Any) -> None:
    """Requires an Optax transformation."""
    if not (hasattr(value, "init") and hasattr(value, "update")):
        raise TypeError(
            f"{function}: `{name}` must be an `optax.GradientTransformation`, got "
            f"{describe(value)}."
        )


def is_inexact(x: Any) -> bool:
    """Whether `x` is a floating or complex number, which has a gradient."""
    dtype = x.dtype if hasattr(x, "dtype") else np.result_type(x)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def all_finite(arrays: Sequence[Any]) -> jax.Array:
    """Whether no entry of any array is nan or infinite; a boolean scalar."""
    return jnp.concatenate(leafwise(_is_finite, list(map(jnp.asarray, arrays)))).all()


def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()[None]


def mask(function: str, name: str, value: Any, shape: tuple[int, ...]) -> jax.Array:
    """`value` as a boolean array of this shape."""
    value = jnp.asarray(value)
    if value.dtype != jnp.bool_:
        raise TypeError(
            f"{function}: `{name}` must be boolean, got {describe(value)}. Compare first, for "
            f"example `{name} > 0`."
        )
    if value.shape != shape:
        raise ValueError(
            f"{function}: `{name}` must have the shape {shape}, got {describe(value)}."
        )
    return value


def renamed(
    function: str, **names: str
) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """A decorator that answers keywords of another library with the names that they have here.

    Args:
      function: the public function's name, for messages.
      **names: the other library's names, each with ours.
    """

    def decorate(fn: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        @functools.wraps(fn)
        def checked(*args: _Params.args, **named: _Params.kwargs) -> _Result:
            for theirs, ours in names.items():
                if theirs in named:
                    raise TypeError(
                        f"{function}: `{theirs}` is no keyword of this function. Pass `{ours}`."
                    )
            return fn(*args, **named)

        return checked

    return decorate
