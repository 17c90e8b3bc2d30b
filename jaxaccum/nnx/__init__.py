"""Flax NNX: windows over a model object, whose statistics and random streams move on with it."""

from jaxaccum.nnx.training import Optimizer, flush, train_step
from jaxaccum.nnx.windows import accumulate, value_and_grad

__all__ = ["Optimizer", "accumulate", "flush", "train_step", "value_and_grad"]
