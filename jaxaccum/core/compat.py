"""The one place for JAX's staging interfaces and for differences between JAX versions.

Everything here is a thin door to `jax.extend` and `jax.interpreters`; the rest of the library
stages and inspects functions through these doors only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.extend.random as jex_random
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.interpreters import partial_eval

# Primitives that only wrap another program, and the parameter that holds it. Looking through
# them lets dead-code elimination separate what a custom derivative or a `jit` computes for the
# loss from what it counts.
_WRAPPERS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


class Staged(NamedTuple):
    """A function traced once, to be called on flat inputs as often as needed.

    Attributes:
      closed: the closed jaxpr.
      out_shape: the output tree, with `jax.ShapeDtypeStruct` leaves.
    """

    closed: Any
    out_shape: Any

    def __call__(self, *flat: Any) -> list[Any]:
        outs = jex.jaxpr_as_fun(self.closed)(*flat)
        # A constant output comes back as a typed Python scalar.
        return [out if isinstance(out, jax.Array) else jnp.asarray(out) for out in outs]

    def with_consts(self, consts: Sequence[Any]) -> "Staged":
        """The same program with other values in place of the arrays that it closes over."""
        return Staged(jex.ClosedJaxpr(open_jaxpr(self.closed), list(consts)), self.out_shape)


def stage(fn: Callable[..., Any], *args: Any, axis_env: Sequence[tuple[str, int]] = ()) -> Staged:
    """Traces `fn` once on the types of `args`; arrays it closes over become constants.

    Args:
      fn: the function.
      *args: arrays or their types.
      axis_env: names and sizes of axes that `fn` may use in collectives.
    """
    return Staged(*jax.make_jaxpr(fn, return_shape=True, axis_env=list(axis_env) or None)(*args))


def with_axis(axis_env: Sequence[tuple[str, int]], fn: Callable[[], Any]) -> Any:
    """`fn()`, which returns no arrays, while the axes are bound."""
    out: list[Any] = []

    def run() -> tuple[()]:
        out.append(fn())
        return ()

    stage(run, axis_env=axis_env)
    return out[0]


def types_of(fn: Callable[..., Any], *args: Any) -> Any:
    """The tree of abstract values that `fn(*args)` returns, nothing of their types left out."""
    staged = stage(fn, *args)
    return jax.tree.unflatten(jax.tree.structure(staged.out_shape), staged.closed.out_avals)


def prune(
    staged: Staged, keep: Sequence[bool], differentiated: Sequence[bool]
) -> tuple[Staged, list[bool]]:
    """Keeps the flagged flat outputs of `staged` and only the equations that they need.

    Where the kept outputs seem to need a `differentiated` input, the program is searched once more
    through its custom derivatives and inner jits.

    Returns:
      The pruned program, which takes only the inputs it reads and returns a flat list, and a flag
      for each input of `staged` that says whether it is one of them.
    """

    closed = staged.closed
    pruned, used = _dce(open_jaxpr(closed), keep)
    if any(d and u for d, u in zip(differentiated, used, strict=True)):

        def kept_outputs(*flat: Any) -> list[Any]:
            outs = _evaluate(open_jaxpr(staged.closed), staged.closed.consts, flat)
            return [out for out, k in zip(outs, keep, strict=True) if k]

        closed = stage(kept_outputs, *staged.closed.in_avals).closed
        pruned, used = _dce(open_jaxpr(closed), [True] * sum(keep))
    in_avals = [aval for aval, u in zip(closed.in_avals, used, strict=True) if u]
    return stage(lambda *flat: _evaluate(pruned, closed.consts, flat), *in_avals), used


def _dce(jaxpr: Any, keep: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Dead-code elimination that also drops callbacks nobody waits for, `jax.debug.print`."""
    needed = {v for v, k in zip(jaxpr.outvars, keep, strict=True) if k and not is_literal(v)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars):
            continue
        needed.update(v for v in eqn.invars if not is_literal(v))
        eqns.append(eqn)
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    live = jaxpr.replace(
        eqns=eqns[::-1],
        outvars=[v for v, k in zip(jaxpr.outvars, keep, strict=True) if k],
        effects=effects,
        debug_info=jaxpr.debug_info._replace(result_paths=None),
    )
    pruned, used = partial_eval.dce_jaxpr(live, [True] * sum(keep))[:2]
    return pruned, list(used)


def depends(staged: Staged, differentiated: Sequence[bool]) -> list[bool]:
    """Which flat outputs of `staged` have a derivative in the flagged flat inputs.

    The answer is structural: what passes through `stop_gradient`, a comparison or an `argmax`
    has none. `staged` must come from `prune`, which looks through custom derivatives.
    """
    avals = staged.closed.in_avals
    moving = [aval for aval, d in zip(avals, differentiated, strict=True) if d]

    def tangents(*flat: Any) -> list[Any]:
        primals, moved = flat[: len(avals)], flat[len(avals) :]

        def at(*xs: Any) -> list[Any]:
            supply = iter(xs)
            full = [next(supply) if d else p for p, d in zip(primals, differentiated, strict=True)]
            return staged(*full)

        start = [p for p, d in zip(primals, differentiated, strict=True) if d]
        return jax.jvp(at, tuple(start), tuple(moved))[1]

    program = open_jaxpr(stage(tangents, *avals, *moving).closed)
    answers = []
    for out in range(len(program.outvars)):
        wanted = [index == out for index in range(len(program.outvars))]
        used = partial_eval.dce_jaxpr(program, wanted)[1]
        answers.append(any(used[len(avals) :]))
    return answers


def strip(closed: Any, keep: Sequence[bool], *, effects: bool) -> Any:
    """The open jaxpr of the flagged outputs of `closed`, with all of its inputs.

    Args:
      closed: a closed jaxpr.
      keep: a flag for each output.
      effects: whether callbacks that nobody waits for (`jax.debug.print`) stay.
    """
    jaxpr = open_jaxpr(closed)
    if effects:
        return partial_eval.dce_jaxpr(jaxpr, list(keep), instantiate=True)[0]
    used = _dce(jaxpr, keep)
    supply = iter(used[0].invars)
    unused = [v if not u else next(supply) for v, u in zip(jaxpr.invars, used[1], strict=True)]
    return used[0].replace(
        invars=unused, debug_info=used[0].debug_info._replace(arg_names=None, result_paths=None)
    )


def open_jaxpr(closed: Any) -> Any:
    """The jaxpr of a closed jaxpr, without its constants."""
    return getattr(closed, "jaxpr", closed)


def is_literal(atom: Any) -> bool:
    """Whether an input of an equation is a constant in the program's text."""
    return isinstance(atom, jex.Literal)


def wrapped(eqn: Any) -> Any:
    """The program that `eqn` only wraps (`jit`, a custom derivative, …), or `None`."""
    inner = eqn.params.get(_WRAPPERS.get(eqn.primitive.name, ""))
    return None if inner is None else open_jaxpr(inner)


def programs_in(eqn: Any) -> list[Any]:
    """The open jaxprs among the parameters of an equation."""
    found = []
    for value in eqn.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if isinstance(x, jex.Jaxpr | jex.ClosedJaxpr):
                found.append(open_jaxpr(x))
    return found


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and how many carries the inputs of a `scan` begin with."""
    if "ft_in" in params:  # since jax 0.12
        consts, carry, _ = map(len, params["ft_in"].unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def where(eqn: Any) -> str:
    """The line of the user's program that made an equation."""
    return str(source_info_util.summarize(eqn.source_info))


def bind(eqn: Any, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Evaluates one equation on `values`."""
    bound = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager, source_info_util.user_context(eqn.source_info.traceback):
        out = eqn.primitive.bind(*subfuns, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], passed: frozenset[str] = frozenset()
) -> list[Any]:
    """Evaluates a jaxpr equation by equation, looking through the wrappers, scans included.

    Primitives named in `passed` hand on their inputs.
    """
    env: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        inner = eqn.params.get(_WRAPPERS.get(eqn.primitive.name, ""))
        if inner is not None:
            outs = _evaluate(open_jaxpr(inner), getattr(inner, "consts", ()), values, passed)
        elif eqn.primitive.name in passed:
            outs = values
        else:
            params = eqn.params
            if eqn.primitive.name == "scan":
                body = params["jaxpr"]
                flat = stage(
                    lambda *xs, body=body: _evaluate(open_jaxpr(body), body.consts, xs, passed),
                    *body.in_avals,
                )
                if not flat.closed.consts:
                    params = {**params, "jaxpr": flat.closed}
            outs = bind(eqn, values, params)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def filled(aval: Any, dtype: Any, value: Any = 0) -> jax.Array:
    """An array like `aval` in `dtype`, with its sharding and its varying manual axes.

    Args:
      aval: an array, or an abstract value or `jax.ShapeDtypeStruct`.
      dtype: the dtype wanted.
      value: what it is filled with.
    """
    if isinstance(aval, jax.Array):
        return jnp.full_like(aval, value, dtype)
    spec = spec_of(aval)
    typed = any(spec.partitions) or spec.unreduced or spec.reduced
    named = {"out_sharding": aval.sharding} if typed else {}
    array = jnp.full(aval.shape, value, dtype, **named)
    return vary(array, varying_axes(aval))


def spec_of(x: Any) -> jax.sharding.PartitionSpec:
    """The partition spec in the type of `x`; empty where shardings are not part of types."""
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    return getattr(getattr(aval, "sharding", None), "spec", None) or jax.sharding.PartitionSpec()


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes over which `x` differs; empty where replication is not checked."""
    aval = x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(manual.varying) if manual is not None else frozenset()


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Casts `x` to differ over `axes`; axes over which it does already are left alone."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def is_explicit(mesh: Any, name: str) -> bool:
    """Whether the mesh axis `name` is of the Explicit type, whose shardings are part of types."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return kinds[name] == jax.sharding.AxisType.Explicit


def promote(*dtypes: Any) -> Any:
    """The common dtype of `dtypes`, also under `jax_numpy_dtype_promotion="strict"`."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def inlined(staged: Staged, *, passed: frozenset[str] = frozenset()) -> Staged:
    """The same program with its inner jits and custom derivatives written out.

    Primitives named in `passed`, such as `stop_gradient`, hand on their inputs.
    """
    closed = staged.closed
    flat = stage(
        lambda *xs: _evaluate(open_jaxpr(closed), closed.consts, xs, passed), *closed.in_avals
    )
    return Staged(flat.closed, staged.out_shape)


@functools.cache
def _constant_impl() -> Any:
    """A generator of which every draw is the same: the uniform number 0.05."""

    def bits(key: Any, bit_width: int, shape: Sequence[int]) -> jax.Array:
        del key
        return jnp.full(shape, 0x0CCCCCCCCCCCCCCC >> (64 - bit_width), f"uint{bit_width}")

    return jex_random.define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: jnp.zeros((1,), jnp.uint32),
        split=lambda key, shape: jnp.zeros((*shape, 1), jnp.uint32),
        random_bits=bits,
        fold_in=lambda key, data: key,
        name="constant",
        tag="constant",
    )


def constant_key() -> jax.Array:
    """A PRNG key from which all draws are equal, whatever it is folded or split into."""
    return jax.random.key(0, impl=_constant_impl())
