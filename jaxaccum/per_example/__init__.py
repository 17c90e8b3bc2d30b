"""Per-example gradients in the window: clipping, any other transformation, and private noise.

`clip` and `transform` turn a loss function into another one, whose gradient is the sum over the
examples of their transformed gradients. It goes wherever a loss function goes, `ja.accumulate`,
`ja.value_and_grad` or `ja.train_step`, with everything that they offer.
"""

from jaxaccum.per_example.clipping import clip, transform
from jaxaccum.per_example.private import NoiseState, add_noise, noise

__all__ = ["NoiseState", "add_noise", "clip", "noise", "transform"]
