"""Where a micro-batch's program departs from the full batch's: the operation, and its line.

The loss runs on all rows and on two halves of them, operation by operation. Each operation of a
half is given what the full batch has for its rows. Where its result then is not what the full batch
has for these rows, nor a share of a sum, rows see each other in it, or their number is seen.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import programs
from jaxaccum.diagnostics.probes import Probe, quick_jit

_SELECTS = ("argmax", "argmin", "reduce_max", "reduce_min", "sort", "top_k", "approx_top_k")
# They only move numbers: where rows stand behind them may be another order.
_MOVES = frozenset(
    """broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather pad reshape rev
    scatter slice squeeze transpose""".split()  # noqa: SIM905
)
_MOST = 24  # departures looked at

# What a value is: a number for each row, a sum over rows, the same for any rows, or made from
# their number, their places or random draws alone; or it is not known which rows stand where.
ROW, SUM, SAME, SIZE, PLACE, RANDOM, LOST = [
    "row",
    "sum",
    "same",
    "size",
    "place",
    "random",
    "lost",
]


class Departure(NamedTuple):
    """An operation whose result depends on which rows, or how many, are in the micro-batch.

    Attributes:
      primitive: its name.
      line: where it stands in the user's program.
      made_of: what goes into it.
      divides: whether it, or something made of it, is what numbers of rows are divided by.
      returns: whether numbers of rows are made of it again.
      terms: the terms of the loss that depend on it, by number.
    """

    primitive: str
    line: str
    made_of: frozenset[str]
    divides: bool
    returns: bool
    terms: frozenset[int]

    @property
    def normalises(self) -> bool:
        """Whether it divides by a sum over the rows, or by their number."""
        return self.divides or (self.primitive == "div" and {SUM, SIZE} <= self.made_of)

    @property
    def selects(self) -> bool:
        """Whether it picks among the rows."""
        return self.primitive in _SELECTS

    def __str__(self) -> str:
        where = "what goes into " if LOST in self.made_of and not self.selects else ""
        return f"{where}`{self.primitive}` at {self.line}"


def departures(probe: Probe, tolerance: float, terms: Sequence[int]) -> list[Departure]:
    """The departures that reach one of the terms, in the order of the program; none if not known.

    Where the halves add up by chance, as the largest rows of each may be those of all, others are
    tried.
    """
    rows, half, left = np.arange(probe.rows), probe.rows // 2, set(terms)
    found: list[Departure] = []
    try:
        programs = {n: _Program(probe, rows[:n]) for n in (half, len(rows) - half, len(rows))}
        for seed in range(4):
            order = np.random.default_rng(seed).permutation(rows) if seed else rows
            parts = [order, order[:half], order[half:]]
            runs = [_Run(programs[len(part)], probe.flat(probe.take(part))) for part in parts]
            search = _Search(runs, tolerance)
            seen = [d._replace(terms=d.terms & left) for d in search.harmful()]
            found += [departure for departure in seen if departure.terms]
            left -= {term for departure in seen for term in departure.terms}
            if not left:
                return found
    except Exception:  # what cannot be taken apart tells nothing
        return []
    return found


class _Program:
    """A loss on so many rows, operation by operation, any of whose results can be replaced."""

    def __init__(self, probe: Probe, rows: np.ndarray):
        closed = probe.stage(probe.take(rows)).opened().closed
        self.jaxpr, self.consts, self.eqns = closed.jaxpr, closed.consts, closed.jaxpr.eqns
        self.nothing = [[_zeros(v.aval) for v in eqn.outvars] for eqn in self.eqns]
        self.evaluate = quick_jit(self._evaluate)

    def _evaluate(self, inputs: Any, given: Any, on: Any) -> Any:
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        env.update(zip(self.jaxpr.invars, inputs, strict=True))

        results = []
        for i, eqn in enumerate(self.eqns):
            own = programs.bind(eqn, [programs.read(env, atom) for atom in eqn.invars])
            outs = [o if g is None else jnp.where(on[i], g, o) for g, o in zip(given[i], own)]
            env.update(zip(eqn.outvars, outs, strict=True))
            results.append([jax.random.key_data(x) if _is_key(x) else x for x in outs])
        return results, [jnp.asarray(programs.read(env, atom)) for atom in self.jaxpr.outvars]


class _Run(NamedTuple):
    """A program and the rows it runs on."""

    program: _Program
    inputs: list[Any]

    def __call__(self, given: Any, on: Sequence[bool]) -> Any:
        """The results of all operations, then totals and weights; where `on`, those `given`."""
        return jax.device_get(self.program.evaluate(self.inputs, given, np.asarray(on)))


class _Search:
    """The full batch beside its two halves."""

    def __init__(self, runs: Sequence[_Run], tolerance: float):
        self.full, *self.halves = runs
        self.nothing, self.tolerance = self.full.program.nothing, tolerance
        programs = [run.program for run in runs]
        self.eqns = list(zip(*(program.eqns for program in programs), strict=True))
        if any(len({e.primitive.name for e in group}) > 1 for group in self.eqns):
            raise ValueError("other operations for other numbers of rows")
        self.off = [False] * len(self.eqns)
        self.results, self.ends = self.full(self.nothing, self.off)
        self.kinds: dict[Any, str] = {}  # by variable of the full batch's program
        jaxpr = programs[0].jaxpr
        for var, *xs in zip(jaxpr.constvars, *(p.consts for p in programs), strict=True):
            self.kinds[var] = self._kind(list(map(np.asarray, xs)), set(), "") or PLACE
        for var, *xs in zip(jaxpr.invars, *(run.inputs for run in runs), strict=True):
            self.kinds[var] = SAME if len({x.shape for x in xs}) == 1 else ROW

    def harmful(self) -> Iterator[Departure]:
        """The departures without which, and what follows from them, halves would add up."""
        given = [self._shares(half, i == 0) for i, half in enumerate(self.halves)]

        def wrong(on: Sequence[bool]) -> frozenset[int]:
            ends = [half(g, on)[1] for half, g in zip(self.halves, given)]
            return self._changed([a + b for a, b in zip(*ends, strict=True)])

        deviating, found = wrong(self.off), self._departures(given)
        for i in found:
            behind = {i, *(k for k, _ in self._later(i))}
            on = [k in found and k not in behind for k in range(len(self.eqns))]
            terms = deviating & wrong(on) & self._shifted_terms(i)
            if terms:
                yield self._departure(i, terms)

    def _changed(self, ends: Sequence[Any]) -> frozenset[int]:
        """The terms of which total or weight is not the full batch's."""
        pairs = enumerate(zip(self.ends, ends, strict=True))
        number = len(self.ends) // 2
        return frozenset(k % number for k, (a, b) in pairs if not self._equal(a, b))

    def _departures(self, given: Sequence[Any]) -> list[int]:
        """The operations that depart, each found with all before it set right."""
        on = list(self.off)
        found: list[int] = []
        while len(found) < _MOST:
            outs = [half(g, on)[0] for half, g in zip(self.halves, given)]
            first = found[-1] + 1 if found else 0
            i = self._next(first, outs)
            if i is None:
                break
            found.append(i)
            on[i] = True
            for var, *others in zip(*(eqn.outvars for eqn in self.eqns[i]), strict=True):
                same = all(var.aval.shape == other.aval.shape for other in others)
                self.kinds[var] = SAME if same else ROW
        return found

    def _shares(self, half: _Run, first: bool) -> list[list[Any]]:
        """The full batch's results for the rows of a half."""
        given = []
        for results, nothing in zip(self.results, half.program.nothing, strict=True):
            pairs = zip(results, nothing, strict=True)
            given.append([None if n is None else _share(x, n.shape, first) for x, n in pairs])
        return given

    def _next(self, start: int, outs: Sequence[Any]) -> int | None:
        """The next operation whose result is not the full batch's."""
        for i in range(start, len(self.eqns)):
            eqn, made_of = self.eqns[i][0], self._made_of(i)
            for k, var in enumerate(eqn.outvars):
                values = [self.results[i][k], *(out[i][k] for out in outs)]
                kind = self._kind(values, made_of, eqn.primitive.name)
                if kind is None and eqn.primitive.name in _MOVES:
                    kind = LOST
                if kind is None:
                    return i
                self.kinds[var] = kind
        return None

    def _kind(self, values: Sequence[Any], made_of: set[str], primitive: str) -> str | None:
        """What the values of one variable are; `None` for those that depart."""
        full, first, second = values
        data = made_of & {ROW, SUM, LOST}
        if len({np.shape(x) for x in values}) > 1:
            shares = _share(full, first.shape, True), _share(full, second.shape, False)
            if data and all(self._equal(*pair) for pair in zip(shares, (first, second))):
                return ROW
            if LOST in made_of:
                return LOST
        elif self._equal(full, first) and self._equal(full, second):
            return SAME
        elif (
            full.dtype != bool
            and primitive not in _SELECTS
            and self._equal(full, first + second, _size(first) + _size(second))
        ):
            return SUM
        if data:
            return None
        drawn = RANDOM in made_of or primitive.startswith(("random_", "threefry", "rng_"))
        return RANDOM if drawn else PLACE if np.ndim(full) else SIZE

    def _equal(self, a: Any, b: Any, size: Any = 0.0) -> bool:
        """Whether numbers are the same to rounding, of their own size or of some of the others'."""
        a, b = np.asarray(a), np.asarray(b)
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return bool(np.array_equal(a, b))
        kind = np.complex128 if np.iscomplexobj(a) else np.float64
        a, b = a.astype(kind), b.astype(kind)
        odd = ~np.isfinite(a) | ~np.isfinite(b)
        if not np.array_equal(a[odd], b[odd], equal_nan=True):
            return False
        a, b = np.where(odd, 0, a), np.where(odd, 0, b)
        # Not of the largest: that may be what a mask puts in.
        size = np.maximum(np.maximum(np.abs(a), np.abs(b)), size)
        some = np.quantile(size, 0.25) if a.size else 0.0
        return bool(np.all(np.abs(a - b) <= self.tolerance * (size + some)))

    def _made_of(self, i: int) -> set[str]:
        """What goes into an operation."""
        found: set[str] = set()
        for atoms in zip(*(eqn.invars for eqn in self.eqns[i]), strict=True):
            if all(map(programs.is_literal, atoms)):
                found |= {SIZE} if len({str(a.val) for a in atoms}) > 1 else set()
            else:
                found.add(self.kinds.get(atoms[0], SIZE))
        return found - {SAME}

    def _shifted_terms(self, i: int) -> frozenset[int]:
        """The terms of the full batch that change if all of a result is shifted."""
        given, on = list(self.nothing), list(self.off)
        on[i] = True
        changed: frozenset[int] = frozenset()
        for sign in (1, -1):
            given[i] = [_shifted(x, sign) for x in self.results[i]]
            changed |= self._changed(self.full(given, on)[1])
        return changed

    def _departure(self, i: int, terms: frozenset[int]) -> Departure:
        """What there is to say of an operation."""
        eqn, line = self.eqns[i][0], programs.where(self.eqns[i][0])
        divides = eqn.primitive.name == "div" and self.kinds.get(_var(eqn.invars[1])) == SUM
        returns = any(self.kinds[v] == ROW for v in eqn.outvars)
        values = set(eqn.outvars)
        inverses = values if eqn.primitive.name == "rsqrt" else set()
        for _, later in self._later(i):
            name, atoms = later.primitive.name, [_var(a) for a in later.invars]
            line = line or programs.where(later)
            divides |= (name == "div" and atoms[1] in values) or (
                name == "mul" and bool(inverses & set(atoms))
            )
            returns |= any(self.kinds.get(v) == ROW for v in later.outvars)
            if not any(self.kinds.get(a) == ROW for a in atoms if a not in values | inverses):
                turned = name in ("div", "rsqrt") or bool(inverses & set(atoms))
                (inverses if turned else values).update(later.outvars)
        made_of = frozenset(self._made_of(i))
        return Departure(eqn.primitive.name, line, made_of, divides, returns, terms)

    def _later(self, i: int) -> Iterator[tuple[int, Any]]:
        """The operations made of the results of one, with their numbers."""
        made = set(self.eqns[i][0].outvars)
        for k, (eqn, *_) in enumerate(self.eqns[i + 1 :], start=i + 1):
            if any(_var(a) in made for a in eqn.invars):
                made.update(eqn.outvars)
                yield k, eqn


def _var(atom: Any) -> Any:
    """A variable; `None` for a constant in the program's text."""
    return None if programs.is_literal(atom) else atom


def _zeros(aval: Any) -> Any:
    """What is given in place of a result of this type; `None` for keys, which stay."""
    return None if _is_key(aval) else np.zeros(aval.shape, aval.dtype)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _share(x: Any, shape: tuple[int, ...], first: bool) -> Any:
    """The first or the last part of an array, of the given shape; zeros where it has none."""
    if len(shape) != x.ndim or any(part > whole for part, whole in zip(shape, x.shape)):
        return np.zeros(shape, x.dtype)
    return x[tuple(slice(n) if first else slice(m - n, None) for n, m in zip(shape, x.shape))]


def _size(x: Any) -> Any:
    return np.abs(np.asarray(x, np.complex128))


def _shifted(x: Any, sign: int) -> Any:
    if x.dtype == bool:
        return ~x
    return (x + sign * np.maximum(1, np.max(np.abs(x), initial=0))).astype(x.dtype)
