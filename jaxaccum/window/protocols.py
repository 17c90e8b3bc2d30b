"""The functions of a window, for type checkers: losses that it takes, functions that it returns."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, Unpack

from jaxaccum.core.mean import Mean
from jaxaccum.core.sums import WindowSums
from jaxaccum.window.options import DenominatorsCall, MapCall, SumsCall, WindowCall

Loss: TypeAlias = "Mean | Mapping[Any, Loss] | Sequence[Loss]"
LossOutput: TypeAlias = "Loss | tuple[Loss, Any]"


class LossFn(Protocol):
    """A loss function: `loss_fn(params, batch, *args)` to its means.

    With `has_aux` they stand in a tuple with the auxiliary outputs, with `model_state=` with the
    new state.
    """

    def __call__(self, *args: Any, **named: Any) -> LossOutput: ...


class SumsFn(Protocol):
    """What `ja.accumulate` returns: from a batch to the window's sums."""

    def __call__(
        self, params: Any, batch: Any, *args: Any, **call: Unpack[SumsCall]
    ) -> WindowSums: ...


class WindowFn(Protocol):
    """What `ja.value_and_grad` returns: from a batch to `(loss, grads)`, or `((loss, aux), grads)`.

    In the place of `aux`, or beside it, stands the new state of the model where there is one.
    """

    def __call__(
        self, params: Any, batch: Any, *args: Any, **call: Unpack[WindowCall]
    ) -> tuple[Any, Any]: ...


class DenominatorsFn(Protocol):
    """What `ja.denominators` returns: from a batch to the weights of the loss's terms."""

    def __call__(
        self, params: Any, batch: Any, *args: Any, **call: Unpack[DenominatorsCall]
    ) -> Any: ...


class CombinedFn(Protocol):
    """What `ja.microbatch` returns: from a batch to the combined outputs."""

    def __call__(self, params: Any, batch: Any, *args: Any, **call: Unpack[MapCall]) -> Any: ...
