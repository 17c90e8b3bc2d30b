"""What becomes of micro-batches and windows whose numbers are not finite."""

from typing import Any

import numpy as np

from jaxaccum.core import checks

MICRO_BATCH, WINDOW = "micro_batch", "window"


def policy(function: str, value: Any) -> str | None:
    """`skip_nonfinite` as the name of what is left out, `None` for nothing.

    Raises:
      ValueError: it is none of the known choices.
    """
    if isinstance(value, bool | np.bool_):
        return MICRO_BATCH if value else None
    if isinstance(value, str) and value == WINDOW:
        return WINDOW
    raise ValueError(
        f"{function}: `skip_nonfinite` must be False, True (leaves out a micro-batch) or "
        f'"window" (leaves out the whole window), got {value!r}.'
    )


def limit(function: str, value: Any) -> int | None:
    """`max_bad_windows`, checked.

    Raises:
      TypeError: it is not a static integer.
      ValueError: it is less than 1.
    """
    return None if value is None else checks.integer(function, "max_bad_windows", value)
