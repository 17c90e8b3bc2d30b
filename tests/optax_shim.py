"""`optax.MultiSteps` spelled with `jaxaccum`: its interface, as a thin layer over `multi_steps`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

import jaxaccum as ja


class ShimState(NamedTuple):
    """A `jaxaccum` state under the field names of `optax.MultiStepsState`."""

    stream: ja.MultiStepsState

    @property
    def mini_step(self) -> Any:
        return self.stream.micro_step

    @property
    def gradient_step(self) -> Any:
        return self.stream.optimizer_step

    @property
    def inner_opt_state(self) -> Any:
        return self.stream.inner_state

    @property
    def acc_grads(self) -> Any:
        """The undivided sums; Optax holds the running mean."""
        return self.stream.grad_sum

    @property
    def skip_state(self) -> dict[str, Any]:
        return {"num_skipped": self.stream.num_skipped}


class MultiSteps:
    """The constructor and the methods of `optax.MultiSteps`."""

    def __init__(
        self,
        opt: optax.GradientTransformation,
        every_k_schedule: Any,
        use_grad_mean: bool = True,
        should_skip_update_fn: Any = None,
        accumulator_dtype: Any = jnp.float32,
    ):
        if should_skip_update_fn not in (None, optax.skip_not_finite):
            raise NotImplementedError(f"No counterpart of {should_skip_update_fn}.")
        self.inner_opt = optax.with_extra_args_support(opt)
        self._stream = ja.multi_steps(
            opt,
            every_k_schedule,
            normalize=use_grad_mean,
            skip_nonfinite=should_skip_update_fn is not None,
            accumulator=ja.accumulators.plain(dtype=accumulator_dtype),
        )

    def init(self, params: Any) -> ShimState:
        return ShimState(self._stream.init(params))

    def update(
        self, updates: Any, state: ShimState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ShimState]:
        updates, stream = self._stream.update(updates, state.stream, params, **extra_args)
        return updates, ShimState(stream)

    def has_updated(self, state: Any) -> Any:
        return ja.has_updated(state)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        return optax.GradientTransformationExtraArgs(self.init, self.update)
