"""One jitted training step: a window of gradients and one call of the optimizer."""

from jaxaccum.training.records import StepInfo, StepState, TrainStep
from jaxaccum.training.step import train_step

__all__ = ["StepInfo", "StepState", "TrainStep", "train_step"]
