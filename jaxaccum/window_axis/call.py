"""The call: what the passes over a window's stages know of a loss and of its micro-batches."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxaccum.core.reducers import Reducer
from jaxaccum.devices.shards import Shard
from jaxaccum.window.losses import Loss


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """The loss of one call on a micro-batch, and the fold over the micro-batches.

    Attributes:
      function: the public function's name, for messages.
      axis: the name of the window's axis.
      size: the number of micro-batches.
      storage: "store" or "recompute".
      loss: the loss on the micro-batches' shape.
      differentiated: for each of its flat inputs whether it is.
      num_shared: the first so many inputs are the same for all micro-batches.
      inputs_fn: from a micro-batch's index and rows to the flat inputs.
      fold_fn: the fold, `window.scan.fold` on the micro-batches of this call.
      accumulator: how the gradient of a shared input is carried.
      key_fn: from a micro-batch's index to the accumulator's key, or `None`.
      scale: the loss scale, or `None`.
      shards: for each shared input the part of its gradient that each micro-step leaves here.
      wire: the dtype in which these sums travel.
    """

    function: str
    axis: str
    size: int
    storage: str
    loss: Loss
    differentiated: list[bool]
    num_shared: int
    inputs_fn: Callable[[Any, Any], list[Any]]
    fold_fn: Callable[[Any, Any], Any]
    accumulator: Reducer
    key_fn: Callable[[Any], Any]
    scale: Any
    shards: list[Shard | None]
    wire: Any
