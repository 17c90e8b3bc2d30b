"""One call of `microbatch`: a fold forward, and a fold over replayed micro-batches backward."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxaccum.combine.cotangents import spread
from jaxaccum.core import checks, compat, programs
from jaxaccum.core.checks import is_inexact
from jaxaccum.core.programs import pick, put
from jaxaccum.core.reducers import (
    Concatenation,
    Maximum,
    Minimum,
    Reducer,
    Stack,
    reducers_of,
    values_of,
)
from jaxaccum.devices import reduction
from jaxaccum.devices.local_values import check_outputs
from jaxaccum.devices.shards import axes_in, specs_of
from jaxaccum.window import arguments, cut
from jaxaccum.window.arguments import Options
from jaxaccum.window.batch import Batch
from jaxaccum.window.gradients import Differentiated
from jaxaccum.window.losses import check_rows, check_same_marks
from jaxaccum.window.scan import Outcome, fold


class _Inputs(NamedTuple):
    """All arrays of one call; JAX differentiates with respect to these.

    Attributes:
      moving: the inexact leaves of the arguments in `argnums` that are whole.
      fixed: the other arrays among the arguments' leaves.
      rows: the leaves of the batch.
      key: the PRNG key, or `None`.
      num_real: how many micro-batches run where that is data, else `None`.
      consts: the arrays that the function closes over.
    """

    moving: list[Any]
    fixed: list[Any]
    rows: list[Any]
    key: Any
    num_real: Any
    consts: list[Any]


@jax.tree_util.register_static
class _Asked:
    """Which inputs are differentiated, as a leafless tree among the residuals."""

    def __init__(self, flags: _Inputs):
        self.flags = flags


class Replay:
    """The function of one call on flat inputs, and its derivative."""

    def __init__(self, options: Options, args: Sequence[Any], key: Any, num_real: Any):
        name = options.function
        self.options, self.args = options, args
        self.batch = Batch(name, args, options.batch_argnums, options.argnums)
        self.axes = reduction.axes(name, options.axis_name)
        self.devices = reduction.number_of(self.axes)
        key = arguments.own_key(options, key, self.axes)
        self.segments = cut.segments(
            name, self.batch.rows, options.num_microbatches, options.microbatch_size
        )
        self.number = sum(segment.num for segment in self.segments)
        num_real = arguments.num_real(name, num_real, self.number)
        differentiated = Differentiated(options, args, self.batch)
        self.rows_move = differentiated.rows
        batch = self.batch.leaves
        # Gradients stay local only of what is typed as different on each device.
        self.varied = reduction.checked(self.axes).union(*map(compat.varying_axes, batch))
        self._split(differentiated)
        self.inputs = _Inputs(self.moving, self.fixed, batch, key, num_real, [])
        self._stage()

    def _split(self, differentiated: Differentiated) -> None:
        """The arguments' leaves: those that move, other arrays, and what is closed over."""
        whole = self.batch.others(self.args)
        leaves, self.tree = jax.tree.flatten(whole)
        owners = jax.tree.leaves({p: jax.tree.map(lambda _, p=p: p, a) for p, a in whole.items()})
        self.leaves = leaves
        self.roles = [
            "moving"
            if owner in differentiated.positions and is_inexact(leaf)
            else "fixed"
            if isinstance(leaf, jax.Array)
            else "static"
            for leaf, owner in zip(leaves, owners, strict=True)
        ]
        pairs = list(zip(self.roles, leaves, strict=True))
        self.moving = [jnp.asarray(x) for role, x in pairs if role == "moving"]
        self.fixed = [x for role, x in pairs if role == "fixed"]
        specs = differentiated.by_position(differentiated.local_specs(self.axes))
        places = [s for p, arg in whole.items() for s in specs_of(arg, specs.get(p))]
        paired = zip(self.roles, places, strict=True)
        self.own = [axes_in(spec) for role, spec in paired if role == "moving"]

    def _stage(self) -> None:
        """Traces the user's function once for each micro-batch shape."""
        self.programs: dict[int, programs.Program] = {}
        self.used: dict[int, list[int]] = {}
        self.position: dict[int, int] = {}
        for segment in self.segments:
            flat = self._flat(self.inputs, jnp.int32(0), self._first_rows(segment))
            program = programs.stage(self._call, *flat)
            check_rows(self.options.function, "outputs", program.out_shape, segment.rows)
            check_outputs(self.options.function, program, program.out_shape, self.axes)
            for other in self.programs.values():
                check_same_marks(self.options.function, program.out_shape, other.out_shape)
            self.programs[segment.rows] = program
            self.used[segment.rows] = [self._const(c) for c in program.closed.consts]
        self.out_shape = program.out_shape
        self.reducers: list[Reducer] = jax.tree.leaves(reducers_of(self.out_shape))
        if not self.reducers:
            raise TypeError(
                f"{self.options.function}: `fn` returned no arrays, so there is nothing to "
                "combine. Return for example `ja.Sum(total)`."
            )

    def _const(self, const: Any) -> int:
        """The position of a closed-over array; the programs of two shapes share theirs."""
        position = self.position.setdefault(id(const), len(self.inputs.consts))
        if position == len(self.inputs.consts):
            self.inputs.consts.append(const)
        return position

    def _first_rows(self, segment: cut.Segment) -> list[Any]:
        return jax.tree.leaves(cut.micro_batch(segment.grid(self.inputs.rows), 0))

    def _flat(self, inputs: _Inputs, index: Any, rows: Sequence[Any]) -> list[Any]:
        """The inputs of the staged function for one micro-batch."""
        key = None if inputs.key is None else jax.random.fold_in(inputs.key, index)
        moving = reduction.vary(inputs.moving, self.varied)
        return [*moving, *inputs.fixed, *rows, *([] if key is None else [key])]

    def _call(self, *flat: Any) -> Any:
        """The user's function on the flat inputs of one micro-batch."""
        supply = iter(flat)
        moving = iter([next(supply) for _ in self.moving])
        fixed = iter([next(supply) for _ in self.fixed])
        kinds = {"moving": moving, "fixed": fixed}
        leaves = [
            x if role == "static" else next(kinds[role])
            for role, x in zip(self.roles, self.leaves, strict=True)
        ]
        whole = jax.tree.unflatten(self.tree, leaves)
        args = [whole.get(p) for p in range(len(self.args))]
        args = self.batch.put(args, [next(supply) for _ in self.inputs.rows])
        named = arguments.passed_key(self.options, next(supply, None))
        outputs = self.options.loss_fn(*args, **named)
        remedy = "Return arrays, in `ja.Sum`, `ja.Mean`, `ja.Concat` and the like."
        checks.arrays(self.options.function, outputs, name="outputs", remedy=remedy)
        return outputs

    def _run(self, inputs: _Inputs, index: Any, rows: Sequence[Any], consts: Any) -> list[Any]:
        """The flat outputs of one micro-batch, different on each device that holds rows."""
        size = rows[0].shape[0]
        program = self.programs[size].with_consts([consts[i] for i in self.used[size]])
        return reduction.vary(program(*self._flat(inputs, index, rows)), self.varied)

    def combined(self) -> Any:
        """The function's outputs over all micro-batches and devices, with plain values."""

        @jax.custom_vjp
        def combine(inputs: _Inputs) -> list[Any]:
            return self._forward(inputs)[0]

        def forward(inputs: _Inputs) -> Any:
            is_primal = lambda x: isinstance(x, jax.custom_derivatives.CustomVJPPrimal)  # noqa: E731
            flags = jax.tree.map(lambda p: p.perturbed, inputs, is_leaf=is_primal)
            values = jax.tree.map(lambda p: p.value, inputs, is_leaf=is_primal)
            self._check_asked(values, flags)
            outs, extremes = self._forward(values, keep=True)
            return outs, (values, outs, extremes, _Asked(flags))

        def backward(residuals: Any, cotangents: list[Any]) -> Any:
            values, outs, extremes, asked = residuals
            return (self._backward(values, outs, extremes, asked.flags, cotangents),)

        combine.defvjp(forward, backward, symbolic_zeros=True)
        # An eager `shard_map` evaluates no `custom_vjp` with symbolic zeros, but any `jit`.
        manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
        outs = (jax.jit(combine) if manual else combine)(self.inputs)
        return values_of(jax.tree.unflatten(jax.tree.structure(self.out_shape), outs))

    def _check_asked(self, values: _Inputs, flags: _Inputs) -> None:
        name = self.options.function

        def moves(value: Any, flag: bool) -> bool:
            return flag and is_inexact(value)

        rows = [
            self.batch.owners[i]
            for i, (x, flag) in enumerate(zip(values.rows, flags.rows, strict=True))
            if moves(x, flag) and not self.rows_move[i]
        ]
        if rows or any(map(moves, values.fixed, flags.fixed)):
            what = f"the batch, argument {rows[0]}," if rows else "an argument"
            raise ValueError(
                f"{name}: {what} that is not in `argnums` {self.options.argnums} is "
                "differentiated. Add it to `argnums`, or put `jax.lax.stop_gradient` around it."
            )
        unchecked = self.axes and not reduction.checked(self.axes)
        if unchecked and any(map(moves, values.consts, flags.consts)):
            raise ValueError(
                f"{name}: `fn` closes over an array that is differentiated, and without "
                "replication checking it cannot be known whether it differs per device. Pass it "
                "as an argument, in `argnums`."
            )

    # Forward.

    def _forward(self, inputs: _Inputs, *, keep: bool = False) -> tuple[list[Any], list[Any]]:
        """The combined outputs; with `keep` each micro-batch's values of maxima and minima too."""
        extreme = [isinstance(r, Maximum | Minimum) and keep for r in self.reducers]

        def micro_fn(index: Any, rows: Any) -> Outcome:
            outs = self._run(inputs, index, rows, inputs.consts)
            return Outcome((outs, [x for x, e in zip(outs, extreme, strict=True) if e]))

        stacks = [Stack() for e in extreme if e]
        outs, extremes = self._fold(
            micro_fn, inputs, inputs.rows, lambda _: (self.reducers, stacks)
        )
        if self.axes:  # the same on each device
            outs = reduction.reduce(self.reducers, outs, self.axes, self._num_run(inputs) > 0)
            pairs = zip(outs, self.reducers, strict=True)
            outs = [
                reduction.gather(x, self.axes, self.devices) if r.emits else x for x, r in pairs
            ]
        return outs, extremes

    def _num_run(self, inputs: _Inputs) -> Any:
        return jnp.int32(self.number) if inputs.num_real is None else inputs.num_real

    def _fold(self, micro_fn: Any, inputs: _Inputs, batch: Any, reducers_fn: Any) -> Any:
        return fold(
            micro_fn,
            batch,
            self.segments,
            reducers_fn,
            num_real=inputs.num_real,
            unroll=self.options.unroll,
            function=self.options.function,
        )

    # Backward.

    def _backward(
        self, inputs: _Inputs, outs: Any, extremes: Any, flags: _Inputs, cotangents: Any
    ) -> _Inputs:
        """The cotangents of the inputs; zero for those that were not asked for."""
        accumulator = self.options.accumulator
        moving, rows, consts = (
            [f and is_inexact(x) for x, f in zip(values, wanted, strict=True)]
            for values, wanted in (
                (inputs.moving, flags.moving),
                (inputs.rows, flags.rows),
                (inputs.consts, flags.consts),
            )
        )
        micro_cotangents, ct_rows = spread(
            self.reducers,
            outs,
            extremes,
            cotangents,
            self.number,
            self._num_run(inputs),
            self.axes,
            self.devices,
        )

        def micro_fn(index: Any, packed: Any) -> Outcome:
            own_rows, own_ct_rows = packed
            # What is closed over keeps its type, and so meets over devices in each micro-step.
            sources = [reduction.vary(inputs.moving, self.varied), inputs.consts, own_rows]
            wanted = [moving, consts, rows]

            def outputs(chosen: list[list[Any]]) -> list[Any]:
                new_moving, new_consts, new_rows = map(put, sources, chosen, wanted)
                full = inputs._replace(moving=new_moving)
                values = self._run(full, index, new_rows, new_consts)
                return [x for x in values if is_inexact(x)]

            values, pull = jax.vjp(outputs, list(map(pick, sources, wanted)))
            given = micro_cotangents(index, own_ct_rows)
            ((of_moving, of_consts, of_rows),) = pull(
                [
                    reduction.vary(ct.astype(v.dtype), compat.varying_axes(v))
                    for ct, v in zip(given, values, strict=True)
                ]
            )
            of_moving, of_rows = reduction.vary((of_moving, of_rows), self.varied)
            key = None
            if accumulator.needs_key:
                key = jax.random.fold_in(jax.random.fold_in(inputs.key, index), 0x5EED)
            return Outcome((of_moving, of_consts, of_rows), key=key)

        reducers = (
            [accumulator] * sum(moving),
            [accumulator] * sum(consts),
            [Concatenation()] * sum(rows),
        )
        sums: Any = ([], [], [])
        if any(moving + consts + rows):
            sums = self._fold(micro_fn, inputs, (inputs.rows, ct_rows), lambda _: reducers)
        shared = self._reduced(sums[0], pick(inputs.moving, moving), pick(self.own, moving))
        closed = [
            accumulator.read(c).astype(x.dtype)
            for c, x in zip(sums[1], pick(inputs.consts, consts), strict=True)
        ]
        return _Inputs(
            moving=put([None] * len(moving), shared, moving),
            fixed=[None] * len(inputs.fixed),
            rows=put([None] * len(rows), sums[2], rows),
            key=None,
            num_real=None,
            consts=put([None] * len(consts), closed, consts),
        )

    def _reduced(
        self, carries: list[Any], primals: list[Any], own: Sequence[tuple[str, ...]]
    ) -> list[Any]:
        """Gradient sums over the devices that share each input, in its dtype: one reduction.

        Where replication is checked its type says over which they do, elsewhere what is `own`.
        """
        accumulator = self.options.accumulator
        is_checked = not self.axes or bool(reduction.checked(self.axes))
        groups: dict[tuple[str, ...], list[int]] = {}
        for i, (primal, apart) in enumerate(zip(primals, own, strict=True)):
            missing = self.varied - compat.varying_axes(primal)
            rest = tuple(name for name in self.axes if name not in apart)
            shared = tuple(sorted(missing)) if is_checked else rest
            groups.setdefault(shared, []).append(i)
        out = list(carries)
        for shared, members in groups.items():
            reducers = [accumulator] * len(members)
            totals = reduction.reduce(reducers, [carries[i] for i in members], shared, True)
            for i, total in zip(members, totals, strict=True):
                out[i] = total
        return [accumulator.read(c).astype(p.dtype) for c, p in zip(out, primals, strict=True)]
