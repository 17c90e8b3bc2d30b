"""The options of a window over a model object, and the functions that it returns; typed."""

from typing import Any, Protocol, TypedDict, Unpack

from jaxaccum.core.sums import WindowSums
from jaxaccum.window.options import GradCall, GradOptions, SumsOptions


class FilterOptions(TypedDict, total=False):
    """Which variables are differentiated."""

    wrt: Any
    argnums: Any


class ModelGradOptions(GradOptions, FilterOptions, total=False):
    """Those of `nnx.value_and_grad`."""


class ModelSumsOptions(SumsOptions, FilterOptions, total=False):
    """Those of `nnx.accumulate`."""


class ModelSumsFn(Protocol):
    """What `nnx.accumulate` returns: from a batch to the window's sums."""

    def __call__(
        self, model: Any, batch: Any, *args: Any, **call: Unpack[GradCall]
    ) -> WindowSums: ...


class ModelWindowFn(Protocol):
    """What `nnx.value_and_grad` returns: from a batch to `(loss, grads)`."""

    def __call__(
        self, model: Any, batch: Any, *args: Any, **call: Unpack[GradCall]
    ) -> tuple[Any, Any]: ...
