"""The arguments of a call that are cut into micro-batches, as one tree."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import checks
from jaxaccum.core.checks import is_inexact
from jaxaccum.window import cut


class Batch:
    """The cut arguments of one call.

    Attributes:
      positions: where they stand among the positional arguments, ascending.
      leaves: their arrays, `[rows, ...]`, argument by argument.
      owners: for each leaf the position of its argument.
      rows: how many rows all of them have.
    """

    def __init__(
        self,
        function: str,
        args: Sequence[Any],
        batch_argnums: int | Sequence[int] | None = None,
        argnums: int | Sequence[int] = 0,
    ):
        """Finds and checks the cut arguments.

        Args:
          function: the public function's name, for messages.
          args: all positional arguments.
          batch_argnums: the positions of those that are cut; `None` for 1, provided that no other
            argument looks as if it had to be cut as well.
          argnums: the positions of those that are differentiated.

        Raises:
          TypeError: a leaf of a cut argument is no array.
          ValueError: the number of rows is not the same everywhere; or with `batch_argnums=None`
            another argument has it too.
        """
        self.function = function
        chosen = 1 if batch_argnums is None else batch_argnums
        self.positions = tuple(
            sorted(checks.argnums(function, chosen, len(args), name="batch_argnums"))
        )
        trees = {p: args[p] for p in self.positions}
        self.rows = cut.common_rows(function, {self.name(p): tree for p, tree in trees.items()})
        cut.check_rows(function, trees, self.rows)
        leaves, self._tree = jax.tree.flatten(trees)
        self.leaves = [jnp.asarray(leaf) for leaf in leaves]
        self.owners = [p for p, tree in trees.items() for _ in jax.tree.leaves(tree)]
        if batch_argnums is None:
            self._check_others(args, argnums)

    def name(self, position: int) -> str:
        """The argument's name in messages."""
        return "batch" if self.positions == (1,) else f"argument {position}"

    def moving(self, positions: Sequence[int]) -> list[bool]:
        """Which leaves have a gradient, where the arguments at `positions` are differentiated."""
        return [
            p in positions and is_inexact(x) for p, x in zip(self.owners, self.leaves, strict=True)
        ]

    def others(self, args: Sequence[Any]) -> dict[int, Any]:
        """By position: the arguments that pass through whole."""
        return {p: arg for p, arg in enumerate(args) if p not in self.positions}

    def put(self, args: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """All arguments, the cut ones made of `leaves`."""
        trees = self.by_position(leaves)
        cut.check_rows(self.function, trees, leaves[0].shape[0])
        return [trees.get(p, arg) for p, arg in enumerate(args)]

    def by_position(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """The cut arguments, made of `leaves`.

        Raises:
          TypeError: a node of the tree does not accept arrays of another shape.
        """
        return cut.rebuilt(self.function, self._tree, leaves)

    def _check_others(self, args: Sequence[Any], argnums: int | Sequence[int]) -> None:
        """Refuses to guess whether another argument belongs to the batch.

        One row is the same cut and whole. The parameters may have the batch's size by chance.
        """
        differentiated = checks.argnums(self.function, argnums, len(args))
        owners = [p for p in differentiated if p not in self.positions]
        parameters = 0 if 0 in owners or not owners else owners[0]
        for position, arg in self.others(args).items():
            arrays = [
                x for x in jax.tree.leaves(arg) if hasattr(x, "shape") and hasattr(x, "dtype")
            ]
            alike = arrays and all(tuple(x.shape[:1]) == (self.rows,) for x in arrays)
            if alike and position != parameters and self.rows != 1:
                both = tuple(sorted({*self.positions, position}))
                raise ValueError(
                    f"{self.function}: argument {position} has {self.rows} rows, as many as the "
                    f"batch, argument 1, has ({checks.describe(arrays[0])}), and it was not said "
                    f"whether it is cut with it. Pass `batch_argnums={both}` to cut it, "
                    "`batch_argnums=1` to pass it whole to every micro-batch."
                )


def checked_argnums(
    function: str, loss_fn: Callable[..., Any], batch_argnums: Any, *, name: str = "loss_fn"
) -> int | tuple[int, ...] | None:
    """`batch_argnums` of a factory, whose function must have arguments in these places.

    Raises:
      TypeError: it is no position; or the function has no argument for the batch.
      ValueError: it names a position twice.
    """
    chosen = (1,) if batch_argnums is None else batch_argnums
    chosen = chosen if isinstance(chosen, Sequence) else (chosen,)
    large = 1 << 30  # how many arguments there will be is not known yet
    positions = [
        checks.integer(function, "batch_argnums", p, minimum=-large, remedy="Pass positions.")
        for p in chosen
    ]
    if not positions or len(set(positions)) != len(positions):
        raise ValueError(
            f"{function}: `batch_argnums` must name at least one argument and each once, got "
            f"{batch_argnums!r}."
        )
    names = _positional(loss_fn)
    if names is not None and max(positions) >= len(names):
        takes = f"`{name}` takes only {len(names)} positional: ({', '.join(names)})"
        if batch_argnums is not None:
            raise ValueError(
                f"{function}: `batch_argnums` names argument {max(positions)}, but {takes}."
            )
        raise TypeError(
            f"{function}: the batch must be an argument of the loss, but {takes}. Write `def "
            f"{name}(params, batch)`; a batch that it closes over cannot be cut."
        )
    return None if batch_argnums is None else tuple(positions)


def _positional(fn: Callable[..., Any]) -> list[str] | None:
    """The names of a function's positional parameters; `None` where it takes any number."""
    names: list[str] = []
    for follow in (True, False):  # a wrapper may take more than what it wraps
        try:
            parameters = inspect.signature(fn, follow_wrapped=follow).parameters.values()
        except (TypeError, ValueError):  # some callables have no signature
            return None
        if any(p.kind == p.VAR_POSITIONAL for p in parameters):
            return None
        found = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        names = max(names, found, key=len)
    return names
