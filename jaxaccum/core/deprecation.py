"""How a public name is retired: it warns for two minor versions, then it goes."""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Deprecation(NamedTuple):
    """One retired name.

    Attributes:
      name: what is retired.
      instead: what to write in its place.
      removed_in: the version that no longer has it, as "0.4.0".
    """

    name: str
    instead: str
    removed_in: str


DEPRECATIONS: list[Deprecation] = []


def deprecated(
    name: str, *, instead: str, removed_in: str
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function whose calls warn with a `DeprecationWarning` at the caller's line.

    Args:
      name: the public name, as "ja.old".
      instead: what to write in its place.
      removed_in: the version that no longer has it; a test fails once that is reached.
    """
    entry = Deprecation(name, instead, removed_in)
    DEPRECATIONS.append(entry)

    def decorate(fn: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(fn)
        def warned(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            text = f"{name} is deprecated and goes with version {removed_in}. Write {instead}."
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return fn(*args, **kwargs)

        return warned

    return decorate
