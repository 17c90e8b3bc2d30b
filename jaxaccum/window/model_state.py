"""State that a model keeps beside its parameters (batch statistics), over one window."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccum.core import checks, compat, programs
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.mean import wide
from jaxaccum.core.state_sums import StateSums, like, numbers, sound, statistic
from jaxaccum.devices import reduction
from jaxaccum.window import refusals

POLICIES = ("sequential", "pooled", "frozen")
CHOICES = (
    '"sequential" (each micro-batch updates what the last one left), "pooled" (one update from the '
    'statistics of the whole window) or "frozen" (no update)'
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Counted:
    """A model state with the number of entries (rows, pixels, tokens) that its statistics hold.

    For `model_state="pooled"` where micro-batches have padding: return
    `Counted(new_state, jnp.sum(mask))` instead of `new_state`, or every row counts the same.

    Attributes:
      state: the new state.
      count: a real scalar; entries that went into the statistics.
    """

    state: Any
    count: Any


class ModelState:
    """The state of one call, and how micro-batches change it."""

    def __init__(
        self,
        function: str,
        policy: str,
        state: Any,
        varied: frozenset[str],
        axes: tuple[str, ...],
    ):
        checks.arrays(
            function, state, name="model_state", remedy="Keep only arrays in the model's state."
        )
        self.function, self.policy, self.axes = function, policy, axes
        self.start = jax.tree.map(jnp.asarray, state)
        paths, self.tree = jax.tree_util.tree_flatten_with_path(self.start)
        self.leaves = [reduction.vary(numbers(leaf), varied) for _, leaf in paths]
        self.variances = _pair([path for path, _ in paths]) if policy == "pooled" else ()
        self.stays: dict[int, Any] = {}
        self.kept: frozenset[int] = frozenset()

    @property
    def threads(self) -> bool:
        """Whether each micro-batch starts from what the one before it left."""
        return self.policy == "sequential"

    @property
    def pools(self) -> bool:
        """Whether the micro-batches' statistics are summed."""
        return self.policy == "pooled"

    @property
    def adds(self) -> bool:
        """Whether `StateSums` are made, of micro-batches or of devices."""
        return self.pools or (self.threads and bool(self.axes))

    def call(
        self, loss_fn: Any, args: Sequence[Any], named: Any, leaves: Sequence[Any], has_aux: bool
    ) -> Any:
        """The loss function's loss, and beside it its auxiliary outputs, new state and count."""
        state = self._rebuilt(leaves)
        loss, *others = self._unpack(loss_fn(*args, **named, model_state=state), has_aux)
        return loss, tuple(others)

    def _unpack(self, out: Any, has_aux: bool) -> tuple[Any, Any, list[Any], Any]:
        """A loss function's `(loss, state)` or `(loss, (aux, state))`: loss, aux, state, count.

        Raises:
          TypeError: it returned something else.
          ValueError: the state has another structure or shape than the one it was given.
        """
        shape = "(loss, (aux, state))" if has_aux else "(loss, state)"
        inner = out[1] if isinstance(out, tuple) and len(out) == 2 else None
        if inner is None or (has_aux and not (isinstance(inner, tuple) and len(inner) == 2)):
            raise TypeError(
                f"{self.function}: with `model_state` the loss function must return `{shape}`, got "
                f"{checks.describe(out)}."
            )
        aux, state = inner if has_aux else (None, inner)
        count = None
        if isinstance(state, Counted):
            state, count = state.state, state.count
        remedy = "Return the state in the structure in which `model_state=` came in."
        checks.same_structure(self.function, "model_state", state, self.start, remedy=remedy)
        named = jax.tree_util.tree_leaves_with_path(state)
        leaves = [
            _held(self.function, path, numbers(jnp.asarray(new)), old)
            for (path, new), old in zip(named, self.leaves, strict=True)
        ]
        return out[0], aux, leaves, count

    def _rebuilt(self, leaves: Sequence[Any]) -> Any:
        """The state from its flat numbers."""
        return jax.tree.unflatten(self.tree, map(like, leaves, jax.tree.leaves(self.start)))

    def contribution(self, new: Sequence[Any], count: Any) -> StateSums:
        """What one micro-batch adds: counted values, moments of what it held, its count."""
        number = jnp.asarray(count, jnp.float32)
        moments = []
        for variance, mean in self.variances:
            center = statistic(self.stays[mean], self.leaves[mean], new[mean])
            spread = statistic(self.stays[variance], self.leaves[variance], new[variance])
            parts = [jnp.ones_like(center), center, spread]
            # Statistics of nothing are nan; the mean is the only one that is not a sum.
            parts = [jnp.where(number == 0, jnp.zeros_like(x), x) for x in parts]
            counts = number.astype(center.dtype)
            moments.append(jnp.stack([counts * parts[0], parts[1], counts * parts[2]]))
        return self._sums(new, moments, number)

    def _sums(self, new: Sequence[Any], moments: list[Any], number: jax.Array) -> StateSums:
        """Sums that lack what all micro-batches share: the start and the decays."""
        totals = [
            None if i in self.kept else (_times(number, x) if is_inexact(x) else x)
            for i, x in enumerate(new)
        ]
        return StateSums(None, totals, moments, {}, number, self.variances)

    def of_device(self, last: Sequence[Any], number: Any) -> StateSums | None:
        """What a device adds whose micro-batches have updated the state one after the other."""
        return self._sums(last, [], jnp.asarray(number, jnp.float32)) if self.adds else None

    def sound(self, new: Sequence[Any], threads: Sequence[Any] | None, count: Any) -> Any:
        """Whether a micro-batch left nothing in the state that is not finite.

        Args:
          new: the leaves that it left.
          threads: those that the one before it left; `None` where all start from the same state.
          count: of how many entries; pooled statistics of none are nan and left out.
        """
        if self.policy == "frozen":
            return True
        fine = sound(new, self.leaves if threads is None else threads)
        return fine | (jnp.asarray(count) == 0) if self.pools else fine

    def after(self, sums: StateSums | None, last: Sequence[Any] | None) -> Any:
        """The state after the window; for the policy "pooled" its undivided sums.

        Args:
          sums: over all devices, where there are any.
          last: what the last micro-batch left, where each updates what the one before it left.
        """
        if sums is None:
            return self.start if last is None else self._rebuilt(last)
        sums = dataclasses.replace(sums, start=self.start, decays=self.stays)
        return sums if self.pools else sums.read()

    def read_program(self, program: programs.Program, flat: Sequence[Any]) -> None:
        """Finds which leaves do not change, and the momentum of those that are pooled.

        Args:
          program: from flat inputs to outputs, of which the last ones are the new state.
          flat: the inputs for one micro-batch, of which the last ones are the state.
        """
        first = len(flat) - len(self.leaves)
        # The last outputs are the new state, and its count if there is one.
        new = len(program.closed.out_avals) - len(jax.tree.leaves(program.out_shape[2][1:]))
        sources = programs.passed_on(program)[new:]
        self.kept = frozenset(i for i in range(len(self.leaves)) if sources[i] == first + i)
        self.variances = tuple(pair for pair in self.variances if not self.kept.issuperset(pair))
        wanted = sorted({i for pair in self.variances for i in pair})
        if wanted:
            self._find_decays(program, flat, wanted, first, new)

    def _find_decays(
        self,
        program: programs.Program,
        flat: Sequence[Any],
        wanted: Sequence[int],
        first: int,
        new: int,
    ) -> None:
        """Finds how much of the old value stays in each mean and variance that is pooled.

        The derivative of the new value in the old one, which for an exponential average is its
        momentum and depends on nothing else.
        """
        # Some layers stop the gradient of their update, which hides the momentum.
        open_program = program.opened(passed=frozenset({"stop_gradient"}))

        def tangents(*inputs: Any) -> list[Any]:
            def outputs(*state: Any) -> list[Any]:
                full = list(inputs)
                for i, x in zip(wanted, state, strict=True):
                    full[first + i] = x
                outs = open_program(*full)
                return [outs[new + i] for i in wanted]

            old = tuple(inputs[first + i] for i in wanted)
            return jax.jvp(outputs, old, tuple(map(jnp.ones_like, old)))[1]

        pruned, used = programs.prune(programs.stage(tangents, *flat), [True] * len(wanted))
        if any(i < first for i in used):
            raise ValueError(
                f'{self.function}: `model_state="pooled"` needs running means and variances that '
                "are exponential averages of a batch's own, but here an update depends on data in "
                'another way. Use "sequential", or normalise over the window with '
                "`ja.window_axis`."
            )
        found = pruned(*[flat[i] for i in used])
        # A momentum that is a constant is the same on every device by its type.
        over = [tuple(compat.varying_axes(x) & set(self.axes)) for x in found]
        found = [jax.lax.pmax(x, names) if names else x for x, names in zip(found, over)]
        self.stays = dict(zip(wanted, found, strict=True))


def check_policy(function: str, policy: Any) -> str | None:
    """`model_state` of the factory: one of the policies, or `None`."""
    if policy is None or policy in POLICIES:
        return policy
    raise ValueError(f"{function}: `model_state` must be {CHOICES}, got {policy!r}.")


def check_given(function: str, policy: str | None, state: Any) -> None:
    """Requires a state exactly where there is a policy for it."""
    if policy is None and state is not None:
        raise refusals.refused("a state without a policy", function, choices=CHOICES)
    if policy is not None and state is None:
        raise refusals.refused("a policy without a state", function, policy=policy)


def _held(function: str, path: Any, new: jax.Array, old: jax.Array) -> jax.Array:
    """A leaf of the new state in the dtype in which it came in."""
    kinds = [jnp.inexact, jnp.complexfloating]
    if any(jnp.issubdtype(new.dtype, k) and not jnp.issubdtype(old.dtype, k) for k in kinds):
        raise TypeError(
            f"{function}: `model_state{jax.tree_util.keystr(path)}` is {checks.describe(new)}, but "
            f"came in as {checks.describe(old)}, which cannot hold it. Start it in the dtype in "
            "which `loss_fn` returns it."
        )
    return new.astype(old.dtype)


def _times(number: jax.Array, value: Any) -> jax.Array:
    """`number * value`, and zero where the number is: statistics of nothing are nan."""
    value = jnp.asarray(value, wide(value.dtype))
    return jnp.where(number == 0, jnp.zeros_like(value), number.astype(value.dtype) * value)


def _pair(paths: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """The positions of each leaf named `var` and of the leaf `mean` beside it."""
    names = [tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path) for path in paths]
    places = {name: i for i, name in enumerate(names)}

    def sibling(name: tuple[str, ...]) -> int | None:
        for i in reversed(range(len(name))):
            if name[i] == "var":
                return places.get((*name[:i], "mean", *name[i + 1 :]))
        return None

    found = [(i, sibling(name)) for i, name in enumerate(names)]
    return tuple((i, mean) for i, mean in found if mean is not None)
