"""Losses that do not split into micro-batches: statistics for `ja.microbatch`, functions of them.

Each loss comes in two parts. The statistics of one micro-batch are sums, marked so that
`ja.microbatch` adds them up over the window (and over the devices); the loss is a function of the
combined statistics. Differentiating through both gives the gradient of the full batch. Averaging
the micro-batches' own losses gives the gradient of something else.
"""

from jaxaccum.losses.pairs import contrastive, contrastive_fn
from jaxaccum.losses.sequences import sequence_mean
from jaxaccum.losses.statistics import (
    Overlap,
    Routing,
    dice,
    f_score,
    load_balance,
    overlap,
    routing,
)

__all__ = [
    "Overlap",
    "Routing",
    "contrastive",
    "contrastive_fn",
    "dice",
    "f_score",
    "load_balance",
    "overlap",
    "routing",
    "sequence_mean",
]
