"""Losses that do not split into micro-batches: statistics for `ja.microbatch`, functions of them.

Each loss comes in two parts. The statistics of one micro-batch are sums, marked so that
`ja.microbatch` adds them up over the window (and over the devices); the loss is a function of the
combined statistics. Differentiating through both gives the gradient of the full batch. Averaging
the micro-batches' own losses gives the gradient of something else.
"""

from jaxaccum.losses.classes import Overlap, dice, f_score, overlap
from jaxaccum.losses.experts import Routing, load_balance, routing
from jaxaccum.losses.pairs import contrastive, contrastive_fn
from jaxaccum.losses.sequences import sequence_mean

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
