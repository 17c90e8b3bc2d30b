"""Reading a window: how noisy its gradient is, and whether it equals the full batch's."""

from jaxaccum.diagnostics.equivalence import EquivalenceReport, check_equivalence
from jaxaccum.diagnostics.gradient_noise import (
    BatchAdvice,
    NoiseScale,
    NoiseTracker,
    batch_advice,
    noise_scale,
    noise_tracker,
    smooth_noise,
)
from jaxaccum.diagnostics.structure import Finding

__all__ = [
    "BatchAdvice",
    "EquivalenceReport",
    "Finding",
    "NoiseScale",
    "NoiseTracker",
    "batch_advice",
    "check_equivalence",
    "noise_scale",
    "noise_tracker",
    "smooth_noise",
]
