"""Flax NNX: windows over a model object, whose statistics and random streams move on with it."""

from jaxaccum.nnx.training import Optimizer as Optimizer
from jaxaccum.nnx.training import flush as flush
from jaxaccum.nnx.training import train_step as train_step
from jaxaccum.nnx.windows import accumulate as accumulate
from jaxaccum.nnx.windows import value_and_grad as value_and_grad

__all__ = ["Optimizer", "accumulate", "flush", "train_step", "value_and_grad"]
