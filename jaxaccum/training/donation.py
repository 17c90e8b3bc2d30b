"""A jitted step that takes over buffers, and says what JAX found wrong with its arguments."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxaccum.core import checks


class Step:
    """`jax.jit(fn, donate_argnums=donated)`, whose errors about arguments name the argument.

    Everything else, such as `lower` and `_cache_size`, is that of the jitted function.
    """

    def __init__(self, function: str, fn: Callable[..., Any], donated: Sequence[int]):
        functools.update_wrapper(self, fn)
        self._function, self._donated = function, tuple(donated)
        self._jitted = jax.jit(fn, donate_argnums=self._donated)

    def __call__(self, *args: Any, **named: Any) -> Any:
        try:
            return self._jitted(*args, **named)
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain(error, args, named)
            raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_jitted":  # not found on the way to be copied
            raise AttributeError(name)
        return getattr(self._jitted, name)

    def _explain(self, error: Exception, args: Sequence[Any], named: dict[str, Any]) -> None:
        """Raises what is wrong with the arguments of a call that failed, if anything is."""
        try:
            given = inspect.signature(self.__wrapped__).bind(*args, **named).arguments
        except TypeError:
            return
        self._check_alive(error, _arrays(given))
        names = list(given)
        if isinstance(error, jax.errors.JaxRuntimeError):
            donated = {name: given[name] for i, name in enumerate(names) if i in self._donated}
            kept = {name: value for name, value in given.items() if name not in donated}
            self._check_buffers(error, _arrays(donated), _arrays(kept))
            return
        for name, value in given.items():
            for path, leaf in jax.tree_util.tree_leaves_with_path(value):
                where = name + jax.tree_util.keystr(path)
                try:
                    checks.usable(self._function, where, leaf)
                    checks.concrete(self._function, leaf, name=where)
                    checks.arrays(self._function, leaf, name=where, remedy="Pass arrays only.")
                except TypeError as reason:
                    raise reason from error

    def _check_alive(self, error: Exception, arrays: Iterator[tuple[str, jax.Array]]) -> None:
        """Refuses arrays that an earlier call took over."""
        for name, leaf in arrays:
            if leaf.is_deleted():
                raise ValueError(
                    f"{self._function}: the buffer of `{name}` is gone: an earlier call took it "
                    "over. Pass what that call returned, or make the step with `donate=False`."
                ) from error

    def _check_buffers(self, error: Exception, donated: Iterator[Any], kept: Iterator[Any]) -> None:
        """Refuses buffers that are taken over and come twice."""
        owners: dict[Any, str] = {}
        for takes, arrays in ((True, donated), (False, kept)):
            for name, leaf in arrays:
                for buffer in _buffers(leaf):
                    if buffer in owners and owners[buffer] != name:
                        raise ValueError(
                            f"{self._function}: `{owners[buffer]}` and `{name}` share one buffer, "
                            "and the step takes it over. Keep a tied parameter once and use it "
                            "twice in the loss, copy what is not tied, `jnp.copy`, or pass "
                            "`donate=False`."
                        ) from error
                    if takes:
                        owners[buffer] = name


def _arrays(given: dict[str, Any]) -> Iterator[tuple[str, jax.Array]]:
    """The arrays with values among the leaves of arguments, by name."""
    for name, value in given.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
            if concrete and leaf.size:
                yield name + jax.tree_util.keystr(path), leaf


def _buffers(leaf: jax.Array) -> list[Any]:
    """Where the parts of an array lie; of keys it is not told."""
    if checks.is_key(leaf):
        return []
    shards = [shard.data for shard in leaf.addressable_shards]
    return [(shard.device.id, shard.unsafe_buffer_pointer()) for shard in shards]
