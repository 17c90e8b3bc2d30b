"""An NNX call taken apart and put together again: the one place where graphs become arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import filterlib

from jaxaccum.core import checks, programs
from jaxaccum.window.model_state import CHOICES

# What becomes of the variables that are not differentiated.
KEYS = "keys"  # of random streams: each micro-batch draws from other ones
COUNTS = "counts"  # of random streams: they move on by what one micro-batch draws
SUMS = "sums"  # totals and counts of metrics: what the micro-batches add is summed
SOWN = "sown"  # `nnx.Intermediate`: dropped
FIXED = "fixed"  # other parameters, and arrays beside the modules: must not change
STATE = "state"  # all others, such as running statistics: see `model_state`


_HELD = (KEYS, COUNTS, SUMS, SOWN, FIXED, STATE)
_TYPES = ((nnx.RngKey, KEYS), (nnx.RngCount, COUNTS), (nnx.Intermediate, SOWN))


class Parts:
    """The modules, random streams and metrics among a call's arguments, as arrays.

    Attributes:
      args: the arguments; in the place of one that holds variables those to differentiate, or
        nothing.
      held: all other variables, a dict of `nnx.State` by what becomes of them.
    """

    def __init__(self, function: str, args: Sequence[Any], filters: dict[int, Any]):
        self.function = function
        self.nodes = {i: arg for i, arg in enumerate(args) if _has_variables(arg)}
        if 0 not in self.nodes:
            raise TypeError(
                f"{function}: the first argument must be an `nnx.Module`, got "
                f"{checks.describe(args[0])}."
            )
        wanted = {i: filterlib.to_predicate(f) for i, f in filters.items() if i in self.nodes}
        metrics = [x for _, x in nnx.iter_graph(self.nodes) if isinstance(x, nnx.Metric)]
        averages = [x for x in metrics if isinstance(x, nnx.metrics.Average)]
        summed = {id(v) for average in averages for v in (average.total, average.count)}
        measured = {id(v) for x in metrics for v in vars(x).values()}

        def kind(path: tuple[Any, ...], x: Any) -> Any:
            if id(x) in summed:
                return SUMS
            for variable_type, name in _TYPES:
                if isinstance(x, variable_type):
                    return name
            if path[0] in wanted and wanted[path[0]](path[1:], x):
                return path[0]
            return STATE if isinstance(x, nnx.Variable) and not isinstance(x, nnx.Param) else FIXED

        self._graph, state = nnx.split(self.nodes)
        variables = dict(nnx.to_flat_state(state))
        self._kinds = {path: kind(path, x) for path, x in variables.items()}
        self._metrics = {
            path
            for path, x in variables.items()
            if isinstance(x, nnx.metrics.MetricState) or id(x) in measured
        }
        self.args = [() if i in self.nodes else arg for i, arg in enumerate(args)]
        for i in wanted:
            self.args[i] = self._select(variables, i)
            if not jax.tree.leaves(self.args[i]):
                raise ValueError(
                    f"{function}: `wrt` must name the variables to differentiate, but argument {i} "
                    f"has none of {filters[i]!r}. Pass a filter such as `nnx.Param`."
                )
        self.held = {name: self._select(variables, name) for name in _HELD}

    def _select(self, variables: dict[Any, Any], kind: Any) -> Any:
        """The variables of one kind; those to differentiate by their path in their argument."""
        first = int(isinstance(kind, int))
        flat = [(p[first:], x) for p, x in variables.items() if self._kinds.get(p) == kind]
        return flat[0][1] if flat and not flat[0][0] else nnx.from_flat_state(flat)

    def _join(self, args: Sequence[Any], held: dict[str, Any]) -> dict[Any, Any]:
        """All variables by path, the inverse of `_select`."""
        found: dict[Any, Any] = {}
        for kind in dict.fromkeys(self._kinds.values()):
            state, start = (args[kind], (kind,)) if isinstance(kind, int) else (held[kind], ())
            flat = {(): state} if isinstance(state, nnx.Variable) else nnx.to_flat_state(state)
            found |= {(*start, *path): x for path, x in dict(flat).items()}
        return {path: found[path] for path in self._kinds}

    def call(
        self,
        loss_fn: Callable[..., Any],
        args: Sequence[Any],
        held: dict[str, Any],
        *,
        model_state: str | None,
        over_devices: bool,
    ) -> tuple[Any, dict[str, Any]]:
        """Calls the loss function on variables with these values.

        Args:
          loss_fn: a function of arguments like those that the call was given.
          args: as in `args`.
          held: as in `held`.
          model_state: the policy.
          over_devices: whether devices have states of their own that are averaged.

        Returns:
          The loss function's output, and `held` after it.

        Raises:
          ValueError: a variable was changed whose change would be lost.
        """
        before = self._join(args, held)

        def run(values: list[Any]) -> tuple[Any, dict[Any, Any]]:
            state = nnx.from_flat_state(zip(before, jax.tree.map(lambda x: x, values), strict=True))
            nodes = nnx.merge(self._graph, state)
            out = loss_fn(*(nodes.get(i, arg) for i, arg in enumerate(args)))
            return out, dict(nnx.to_flat_state(nnx.state(nodes)))

        values = list(before.values())
        out, after = run(values)
        averaged = model_state == "pooled" or (model_state == "sequential" and over_devices)

        def lost(path: Any) -> bool:
            if self._kinds[path] == STATE:
                return model_state is None or (averaged and path in self._metrics)
            return isinstance(self._kinds[path], int) or self._kinds[path] == FIXED

        same = {path: jax.tree.leaves(x) for path, x in before.items()}
        changed = [
            p for p in before if lost(p) and not _are(jax.tree.leaves(after.get(p)), same[p])
        ]
        if changed:  # by what it is; whether by what it holds, only the program can tell
            changed = _changed(lambda values: run(values)[1], dict(zip(before, values)), changed)
        made = [
            p for p, x in after.items() if p not in before and not isinstance(x, nnx.Intermediate)
        ]
        self._refuse(changed, made, model_state)
        return out, {name: self._select(after, name) for name in held}

    def _refuse(self, changed: list[Any], made: list[Any], model_state: str | None) -> None:
        """Raises for variables whose change would be lost."""
        if made:
            raise ValueError(
                f"{self.function}: `loss_fn` makes {_names(made)}, which no argument had before. "
                "Make it before the window, or return its value as an auxiliary output."
            )
        metrics = [path for path in changed if path in self._metrics and model_state is not None]
        if metrics:
            raise ValueError(
                f"{self.function}: `loss_fn` changes {_names(metrics)}, a metric whose "
                "micro-batches do not add up; `nnx.metrics.Average` and those made from it do. "
                "Update it after the window, from auxiliary outputs (`ja.Concat`)."
            )
        state = [path for path in changed if self._kinds[path] == STATE]
        if state:
            raise ValueError(
                f"{self.function}: `loss_fn` changes {_names(state)} of the model, and what a "
                f"window does to that was not said. Pass `model_state=`: {CHOICES}."
            )
        if changed:
            raise ValueError(
                f"{self.function}: `loss_fn` changes {_names(changed)}, a parameter, which only "
                "the optimizer may change. Keep it in a variable of another type, or change it "
                "after the window."
            )

    def update(self, **held: Any) -> None:
        """Gives the variables of the call's own arguments new values, in place."""
        nnx.update(self.nodes, *held.values())


def _has_variables(tree: Any) -> bool:
    """Whether there is an NNX object in a tree."""
    kinds = (nnx.Pytree, nnx.Variable)
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return any(isinstance(x, kinds) for x in leaves)


def _are(xs: list[Any], ys: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(xs) == len(ys) and all(x is y for x, y in zip(xs, ys, strict=True))


def _changed(
    after_fn: Callable[[list[Any]], dict[Any, Any]], before: dict[Any, Any], suspects: list[Any]
) -> list[Any]:
    """Which of the suspected variables a program does not hand on as they are.

    A `jit`, a `remat` or a scan in a model hands on all of its variables as outputs of its own.
    """
    program = programs.stage(
        lambda values: [jax.tree.leaves(after_fn(values).get(path)) for path in suspects],
        list(before.values()),
    )
    sources = iter(programs.passed_on(program))
    found = jax.tree.map(lambda _: next(sources), program.out_shape)
    supply = iter(range(len(program.closed.in_avals)))
    own = {path: [next(supply) for _ in jax.tree.leaves(x)] for path, x in before.items()}
    return [path for path, got in zip(suspects, found, strict=True) if got != own[path]]


def _names(paths: Sequence[Any]) -> str:
    """Variables as a person writes them."""
    shown = [
        ".".join(map(str, path[1:])) + (f" of argument {path[0]}" if path[0] else "")
        for path in paths[:3]
    ]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(f"`{name}`" for name in shown) + more
