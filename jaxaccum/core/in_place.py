"""Functions that write into buffers of their own (`jax.Ref`), under every transformation of JAX.

JAX neither batches nor rematerialises a function in which such a buffer is made. Here it stands
behind one equation with rules of its own: where it is run it writes, where it is batched or
differentiated a function without buffers takes its place, which returns the same.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from jaxaccum.core import programs

Flat = Callable[..., Sequence[Any]]

_WRITING = jex.Primitive("write_in_place")
_WRITING.multiple_results = True


def run(writing_fn: Flat, plain_fn: Flat, *flat: Any) -> list[Any]:
    """`writing_fn(*flat)`, or `plain_fn(*flat)` where it is batched or differentiated.

    Args:
      writing_fn: from arrays to a list of arrays; may make refs, write into them and freeze them.
        It closes over no tracer.
      plain_fn: returns the same without refs; called only where it is needed, which may be after
        this call is over, so that it closes over no tracer either.
      *flat: arrays.
    """
    program = programs.stage(writing_fn, *flat)
    return _WRITING.bind(*flat, program=program.closed, plain_fn=plain_fn)


class Reach(NamedTuple):
    """Where the gradients of a backward pass may be written.

    Attributes:
      looped: for each gradient whether a loop makes it, step by step.
      safe: whether JAX writes it to the right place.
    """

    looped: list[bool]
    safe: list[bool]


def reach(pull: Any, wanted: Sequence[bool]) -> Reach:
    """What may be written of the `wanted` gradients of `pull`, which `jax.vjp` returned.

    Where a loop reads, among values that depend on the differentiated inputs, one that is written
    behind one that is not, JAX 0.10 takes them for each other without an error. Such gradients are
    not safe; neither is any where the linear program cannot be read.
    """
    jaxpr = getattr(pull, "jaxpr", None)
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    number, safe = len(wanted), list(wanted)
    looped = [False] * number
    if len(getattr(jaxpr, "invars", ())) != number:
        return Reach(looped, looped)
    while True:
        walk = _Walk(list(safe), looped)
        walk.follow(jaxpr, [i if s else _LINEAR for i, s in enumerate(safe)])
        if walk.safe == safe:
            return Reach(looped, safe)
        safe = walk.safe


# Calls through which buffers are handed on, and those that return gradients as a whole.
_HANDED_ON = ("jit", "pjit", "closed_call", "custom_jvp_call")
_WHOLE = ("checkpoint", "remat", "remat2", "shard_map")
# What JAX writes by a rule of its own that fails for some operands.
_DOUBTFUL = ("slice", "dynamic_slice", "reshard")
_LINEAR = -1  # in the place of an input's number: depends on inputs, but is none that is written


class _Walk(NamedTuple):
    """One walk through a linear program."""

    safe: list[bool]
    looped: list[bool]

    def follow(self, program: Any, tags: Sequence[Any]) -> list[Any]:
        """The tags of the outputs: an input's number, `_LINEAR`, `None` for a constant."""
        jaxpr = getattr(program, "jaxpr", program)
        env = dict(zip(jaxpr.invars, tags, strict=True))
        read = lambda atom: None if programs.is_literal(atom) else env.get(atom)  # noqa: E731
        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            if all(v is None for v in values):
                continue
            name, inner = eqn.primitive.name, programs.called(eqn)
            if name == "scan":
                self._loop(eqn, values)
            elif name in _HANDED_ON:
                self.follow(inner, values)
            elif name in _DOUBTFUL or (name not in _WHOLE and programs.programs_in(eqn)):
                for tag in values:  # not known to be right
                    if tag is not None and tag != _LINEAR:
                        self.safe[tag] = False
            env.update((v, _LINEAR) for v in eqn.outvars)
        return [read(atom) for atom in jaxpr.outvars]

    def _loop(self, eqn: Any, values: list[Any]) -> None:
        consts, carry, rows = programs.split_scan(eqn.params, values)
        for group in (consts, rows):
            behind = False
            for tag in group:
                written = tag is not None and tag != _LINEAR and self.safe[tag]
                if written:
                    self.looped[tag] = True
                    self.safe[tag] = not behind
                behind = behind or (tag is not None and not (written and self.safe[tag]))
        self.follow(eqn.params["jaxpr"], [*consts, *[_LINEAR for _ in carry], *rows])


def _evaluate(*flat: Any, program: Any, plain_fn: Flat) -> Sequence[Any]:
    del plain_fn
    return jex.jaxpr_as_fun(program)(*flat)


@functools.cache
def _own_effects() -> Any:
    """What JAX says of a program that makes a buffer of its own, though nobody outside can tell."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    return programs.stage(lambda x: jax.freeze(jax.new_ref(x)), scalar).jaxpr.effects


def _types(*avals: Any, program: Any, plain_fn: Flat) -> tuple[Any, Any]:
    del avals, plain_fn
    return program.out_avals, program.jaxpr.effects - _own_effects()


def _batched(axis: Any, flat: Any, places: Any, *, program: Any, plain_fn: Flat) -> tuple[Any, Any]:
    del program
    over = {"axis_name": axis.name, "axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
    outs = jax.vmap(plain_fn, in_axes=tuple(places), **over)(*flat)
    return outs, [0] * len(outs)


def _pushed(flat: Any, tangents: Any, *, program: Any, plain_fn: Flat) -> tuple[Any, Any]:
    del program
    moves = [not isinstance(t, ad.Zero) for t in tangents]

    def moving_fn(*moving: Any) -> list[Any]:
        return list(plain_fn(*programs.put(flat, moving, moves)))

    return jax.jvp(moving_fn, programs.pick(flat, moves), programs.pick(tangents, moves))


_WRITING.def_impl(_evaluate)
_WRITING.def_effectful_abstract_eval(_types)
mlir.register_lowering(_WRITING, mlir.lower_fun(_evaluate, multiple_results=True))
batching.fancy_primitive_batchers[_WRITING] = _batched
ad.primitive_jvps[_WRITING] = _pushed
