"""Whether the sums of two batches add up: made with the same loss function and options."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks
from jaxaccum.core.reducers import reducers_of
from jaxaccum.core.state_sums import StateSums


class Pair(NamedTuple):
    """Two `WindowSums` that are to add up, and what they are called in messages.

    Attributes:
      a: the first.
      b: the second.
      function: the public function's name.
      first: what it calls `a`.
      second: what it calls `b`.
    """

    a: Any
    b: Any
    function: str = "merge"
    first: str = "a"
    second: str = "b"

    def check(self) -> None:
        """Requires that they do.

        Raises:
          ValueError: their structures or shapes differ; they hold two model states that do not
            pool; or the denominators of their terms are not the same.
        """
        a, b, function = self.a, self.b, self.function
        self._check_denominators()
        if not checks.same_tree(a, b):
            raise ValueError(
                f"{function}: `{self.first}` and `{self.second}` have different structures, "
                f"{jax.tree.structure(a)} and {jax.tree.structure(b)}. Make both with the same "
                "loss function and options."
            )
        if a.model_state is not None and not isinstance(a.model_state, StateSums):
            raise ValueError(
                f"{function}: the sums hold two model states, of which it is not known how they "
                'combine. Use `model_state="pooled"`, whose statistics add up, or pass the whole '
                "batch in one call."
            )
        if a.grad_reducers is None:  # else the gradients of the batch's rows differ in their number
            remedy = "Make both with the same loss function and parameters."
            checks.same_structure(function, f"{self.first}.grads", a.grads, b.grads, remedy=remedy)
        _check_joined(f"{function}: `{self.first}.aux", a.aux, b.aux)

    def check_types(self) -> None:
        """Requires that each sum of `a` has the dtype that `b` gives it.

        Raises:
          ValueError: one has another.
        """
        leaves = zip(jax.tree_util.tree_leaves_with_path(self.a), jax.tree.leaves(self.b))
        for (path, x), y in leaves:
            if jnp.result_type(x) != jnp.result_type(y):
                raise ValueError(
                    f"{self.function}: `{self.first}{jax.tree_util.keystr(path)}` is "
                    f"{checks.describe(x)}, expected the dtype {jnp.result_type(y)} of this "
                    "window's sum. Make both with the same loss function, parameters and options."
                )

    def _check_denominators(self) -> None:
        a, b, function = self.a, self.b, self.function
        if a.denominators is None and b.denominators is None:
            return
        remedy = (
            "Find them over all batches first, `d = ja.denominators(loss_fn, ...)` summed over the "
            "batches, and pass `denominators=d` to each call."
        )
        if not (a.denominators_given and b.denominators_given):
            raise ValueError(
                f"{function}: a loss of several terms merges only if both sums were made with the "
                f"same `denominators=`; here at least one found its own. {remedy}"
            )
        pairs = zip(jax.tree.leaves(a.denominators), jax.tree.leaves(b.denominators), strict=False)
        for x, y in pairs:
            traced = isinstance(x, jax.core.Tracer) or isinstance(y, jax.core.Tracer)
            if not traced and not np.array_equal(x, y):
                raise ValueError(
                    f"{function}: the sums were made with different `denominators=`, {x} and {y}. "
                    f"{remedy}"
                )


def _check_joined(name: str, a: Any, b: Any) -> None:
    """Requires that auxiliary outputs agree in all but the axis along which they are joined."""
    reducers: Sequence[Any] = jax.tree.leaves(reducers_of(a))
    pairs = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), reducers, strict=True)
    for (path, x), y, reducer in pairs:
        skipped = 1 if reducer.emits else 0
        if np.shape(x)[skipped:] != np.shape(y)[skipped:]:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)}` is {checks.describe(x)}, expected the "
                f"shape of {checks.describe(y)}. Make both with the same loss function."
            )
