"""A loss over the window's axis, bound to the arguments of one call."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import checks
from jaxaccum.core.reducers import Reducers
from jaxaccum.core.sums import WindowSums
from jaxaccum.devices import reduction
from jaxaccum.window.arguments import Given, Options
from jaxaccum.window.bound import Bound
from jaxaccum.window_axis.call import Call
from jaxaccum.window_axis.passes import Passes

STORAGES = ("store", "recompute")


@dataclasses.dataclass(frozen=True)
class AxisOptions(Options):
    """The checked keywords of `window_axis.accumulate`; see there."""

    window_axis_name: str = "window"
    storage: str = "store"

    def __post_init__(self) -> None:
        """Refuses what has no meaning over the window's axis.

        Raises:
          TypeError: `window_axis_name` is not a name.
          ValueError: `storage` is unknown.
        """
        function, name = self.function, self.window_axis_name
        if self.storage not in STORAGES:
            raise ValueError(
                f'{function}: `storage` must be "store" or "recompute", got {self.storage!r}.'
            )
        if not isinstance(name, str):
            raise TypeError(
                f"{function}: `window_axis_name` must be the name of an axis, got "
                f"{checks.describe(name)}. Collectives over devices too name both axes; the "
                "window's is one."
            )


class AxisBound(Bound):
    """A loss that may use collectives over the window's axis, bound to the arguments of a call."""

    options: AxisOptions
    is_typed = False  # JAX types no collective over an axis that is not of the mesh
    differentiates = False  # but stage by stage

    def __init__(self, options: AxisOptions, args: Sequence[Any], given: Given):
        super().__init__(options, args, given)
        self._check()

    def _check(self) -> None:
        """Refuses a call whose micro-batches cannot meet.

        Raises:
          ValueError: an uneven cut, a bound name, or checked manual axes.
        """
        function, name = self.options.function, self.options.window_axis_name
        if len(self.segments) > 1:
            sizes = " and ".join(f"{s.num} of {s.rows} rows" for s in self.segments)
            raise ValueError(
                f"{function}: over the window's axis all micro-batches need the same number of "
                f"rows, got {sizes}. Choose a number that divides the batch, or pad it with "
                "`ja.pad_batch` and mask in the loss."
            )
        if reduction.is_bound(name):
            raise ValueError(
                f"{function}: `window_axis_name` {name!r} is already an axis around this call. "
                "Give the window's axis a name of its own."
            )
        manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
        if reduction.checked(manual):
            raise ValueError(
                f"{function}: it works inside `jax.shard_map` only with `check_vma=False`, since "
                "JAX types no collective over an axis that is not of the mesh. Pass it, or use "
                "`spmd_axis_name` under plain `jit`."
            )

    @property
    def axis_env(self) -> list[tuple[str, int]]:
        return [(self.options.window_axis_name, self.num_microbatches)]

    def _passes(self, *, weights_only: bool) -> Passes:
        loss, _, differentiated = self._first()
        number = len(self.moving)
        return Passes(
            Call(
                function=self.options.function,
                axis=self.options.window_axis_name,
                size=self.num_microbatches,
                storage=self.options.storage,
                loss=loss,
                differentiated=differentiated,
                num_shared=number,
                inputs_fn=lambda index, rows: self.loss_at(index, rows)[1],
                fold_fn=self.fold,
                accumulator=self.options.accumulator,
                key_fn=self.rounding_key,
                scale=self.scale,
                shards=self.scatters,
                wire=self.options.reduce_dtype,
            ),
            weights_only=weights_only,
        )

    def _counted(self, kept: Any) -> list[jax.Array]:
        passes = self._passes(weights_only=True)
        passes.forward()
        return passes.outputs()

    def _folded(self, seeds: Sequence[Any] | None, kept: Any) -> tuple[WindowSums, Any]:
        passes = self._passes(weights_only=False)
        grads = passes.gradients(seeds)
        values, loss = passes.outputs(), passes.call.loss
        n = loss.terms.num_leaves
        sums = WindowSums(
            grads=grads,
            loss=jax.tree.unflatten(loss.terms, values[:n]),
            weight=jax.tree.unflatten(loss.terms, values[n : 2 * n]),
            aux=jax.tree.unflatten(loss.aux_tree, values[2 * n :]),
            num_microbatches=jnp.int32(self.num_microbatches),
            num_skipped=None,  # type: ignore[arg-type]  # known by the end of the fold
            grad_reducers=Reducers(self.tree.reducers(grads)),
        )
        return sums, None
