"""The options of a window whose micro-batches meet, and the functions that it returns; typed."""

from typing import Any, Literal, Protocol, TypedDict, Unpack

from jax.typing import ArrayLike

from jaxaccum.core.sums import WindowSums
from jaxaccum.window.options import ArgnumsOptions, FoldOptions, IntoCall, KeyCall, LossOptions


class AxisNameOptions(TypedDict, total=False):
    """The axis over which micro-batches meet."""

    window_axis_name: str


class AxisWindowOptions(AxisNameOptions, FoldOptions, ArgnumsOptions, total=False):
    """Those of `window_axis.accumulate` and `window_axis.value_and_grad`."""

    storage: Literal["store", "recompute"]
    skip_nonfinite: Literal[False, "window"]


class AxisDenominatorsOptions(AxisNameOptions, LossOptions, ArgnumsOptions, total=False):
    """Those of `window_axis.denominators`."""


class AxisCall(KeyCall, total=False):
    """The keywords of what `window_axis.value_and_grad` returns."""

    denominators: Any
    loss_scale: ArrayLike | None


class AxisSumsCall(AxisCall, IntoCall, total=False):
    """The keywords of what `window_axis.accumulate` returns."""


class AxisSumsFn(Protocol):
    """What `window_axis.accumulate` returns: from a batch to the window's sums."""

    def __call__(
        self, params: Any, batch: Any, *args: Any, **call: Unpack[AxisSumsCall]
    ) -> WindowSums: ...


class AxisWindowFn(Protocol):
    """What `window_axis.value_and_grad` returns: from a batch to `(loss, grads)`."""

    def __call__(
        self, params: Any, batch: Any, *args: Any, **call: Unpack[AxisCall]
    ) -> tuple[Any, Any]: ...


class AxisDenominatorsFn(Protocol):
    """What `window_axis.denominators` returns: from a batch to the weights of the loss's terms."""

    def __call__(self, params: Any, batch: Any, *args: Any, **call: Unpack[KeyCall]) -> Any: ...
