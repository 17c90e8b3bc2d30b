"""A loss function bound to the arguments of one call: what is differentiated, counted, folded."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import compat, dtypes
from jaxaccum.core.checks import all_finite
from jaxaccum.core.mean import as_float, divide
from jaxaccum.core.reducers import Addition, Kept, Reducers, reducers_of_sums
from jaxaccum.core.sums import WindowSums, cleared, kept_if
from jaxaccum.devices import local_values, reduction
from jaxaccum.numerics import accumulators, loss_scaling
from jaxaccum.window import arguments, cut, into, placement, refusals
from jaxaccum.window.arguments import Given, Options
from jaxaccum.window.backward import Sums
from jaxaccum.window.batch import Batch
from jaxaccum.window.gradients import Differentiated
from jaxaccum.window.layout import find_layout
from jaxaccum.window.loss_gradient import LossGradient, stage_gradient
from jaxaccum.window.losses import Loss, check_same_outputs, paths, stage_loss
from jaxaccum.window.micro_step import MicroStep
from jaxaccum.window.model_state import ModelState, check_given
from jaxaccum.window.scan import Outcome, fold


class Bound:
    """The loss of one call, as a function of flat leaves.

    The flat inputs of the staged loss are the inexact leaves of the differentiated arguments, the
    micro-batch's rows, and its key. All other arguments are closed over and pass through whole.
    """

    is_typed = True  # whether JAX can type its collectives where replication is checked
    differentiates = True  # whether the loss is traced with its gradient

    def __init__(self, options: Options, args: Sequence[Any], given: Given):
        name = options.function
        self.given = given
        self.scale = loss_scaling.checked_scale(name, given.loss_scale)
        self.options, self.args = options, args
        self.batch = Batch(name, args, options.batch_argnums, options.argnums)
        self.axes = reduction.axes(name, options.axis_name)
        # Gradients stay local only of parameters that are typed as different on each device.
        self.checked = reduction.checked(self.axes)
        self.varied = self.checked.union(*map(compat.varying_axes, self.batch.leaves))
        self.key = arguments.own_key(options, given.key, self.axes)
        self.segments = cut.segments(
            name, self.batch.rows, options.num_microbatches, options.microbatch_size
        )
        self.num_microbatches = sum(segment.num for segment in self.segments)
        self.num_real = arguments.num_real(name, given.num_real, self.num_microbatches)
        self.tree = Differentiated(options, args, self.batch)
        self.moving = reduction.vary(self.tree.moving, self.varied)
        layout = find_layout(self.tree, self.axes, self.moving, refuses=self.differentiates)
        self.param_shards, self.grad_shards, self.own = layout
        self.scattering = options.reduction == "scatter" and any(self.grad_shards)
        # Of parts that the loss sees as such, `gather` sums the gradients.
        seen = [not options.whole_params and shard is not None for shard in self.param_shards]
        self.scatters = [
            shard if self.scattering and not part else None
            for shard, part in zip(self.grad_shards, seen, strict=True)
        ]
        self.done = [
            part or shard is not None for part, shard in zip(seen, self.scatters, strict=True)
        ]
        self.meets = any(self.done)  # whether the devices meet in every micro-step
        if not self.scattering and options.whole_params:
            self.moving = self._gathered()
        if not self.meets:
            pass
        elif isinstance(self.num_real, jax.Array) and compat.varying_axes(self.num_real):
            raise refusals.refused("scatter of unequal windows", name)
        check_given(name, options.model_state, given.model_state)
        self.state = None
        if options.model_state is not None:
            self.state = ModelState(
                name, options.model_state, given.model_state, self.varied, self.axes
            )
        self.last_state: list[Any] | None = None
        self.start = self._start()
        self.gradient_sums = self._gradient_sums()
        self._losses: dict[int, Loss] = {}
        self._gradients: dict[int, LossGradient] = {}

    def _start(self) -> list[Any]:
        """What the gradients' sums begin with; nothing where those given are added afterwards."""
        sums, denominators = self.given.into, jax.tree.leaves(self.given.denominators)
        # What may be left out as a whole, or cleared, or scaled, has to stay apart.
        apart = self.options.drops or self.meets or self.scale is not None
        traced = any(isinstance(d, jax.core.Tracer) for d in denominators)
        if sums is None or apart or traced or not self.differentiates:
            return []
        return into.begin(
            self.options.function,
            sums,
            self.tree,
            own=self.own,
            shards=self.grad_shards,
            axes=self.axes,
            varied=self.varied,
        )

    def _gradient_sums(self) -> Sums | None:
        """How the fold sums gradients that are added in place; `None` where none is."""
        shapes = placement.Window(
            self.options,
            alone=self.num_microbatches == 1 and self.num_real is None and not self.start,
            scatters=self.scattering,
            gathers=any(self.tree.rows),
        )
        if not self.differentiates:
            return None
        reducers = self.tree.reducers(self.moving)
        types = [jax.typeof(x) for x in self.moving]
        flags = placement.in_place(shapes, self.tree, reducers, types)
        structure = jax.tree.structure(([0] * len(types),))
        everywhere = accumulators.in_place(self.options.accumulator) is True
        return Sums(reducers, types, flags, structure, everywhere) if any(flags) else None

    def _gathered(self, index: Any = None) -> list[jax.Array]:
        """Whole parameters; with a micro-step's `index`, gathered in that micro-step."""
        parts = self.moving
        if index is not None:
            # Tied to the loop: XLA would move the gather out of it and keep the whole.
            parts, _ = jax.lax.optimization_barrier((parts, index))
        pairs = zip(parts, self.param_shards, strict=True)
        return [x if shard is None else shard.gather(x) for x, shard in pairs]

    def first_loss(self) -> Any:
        """The loss on the first micro-batch's shape, with its gradient where there is one."""
        stage_fn: Any = self.gradient_at if self.differentiates else self.loss_at
        return stage_fn(jnp.int32(0), self._first_rows())[0]

    def _first(self) -> tuple[Loss, list[Any], list[bool]]:
        return self.loss_at(jnp.int32(0), self._first_rows())

    def _first_rows(self) -> list[Any]:
        return cut.micro_batch(self.segments[0].grid(self.batch.leaves), 0)

    def loss_at(
        self, index: Any, rows: Any, state: Sequence[Any] | None = None
    ) -> tuple[Loss, list[Any], list[bool]]:
        """The loss as a program, its flat inputs, and which of these are differentiated."""
        call_fn, flat, differentiated, size = self._flat(index, rows, state)
        if size not in self._losses:
            loss = stage_loss(
                self.options.function,
                call_fn,
                flat,
                size,
                has_aux=self.options.has_aux or self.state is not None,
                axis_env=self.axis_env,
            )
            self._losses[size] = self._checked(loss, self._losses)
        return self._losses[size], flat, differentiated

    def gradient_at(
        self, index: Any, rows: Any, state: Sequence[Any] | None = None
    ) -> tuple[LossGradient, list[Any]]:
        """The loss and its gradient as a program, and its flat inputs.

        The user's function is traced here, once for each micro-batch shape.
        """
        call_fn, flat, differentiated, size = self._flat(index, rows, state)
        if size not in self._gradients:
            gradient = stage_gradient(
                self.options.function,
                call_fn,
                flat,
                size,
                differentiated=differentiated,
                has_aux=self.options.has_aux or self.state is not None,
                divides=self.given.denominators is not None,
                scale=self.scale,
                own_over=self.checked,
                pulls=None if self.gradient_sums is None else self.gradient_sums.in_place,
                alone_fn=lambda: self.loss_at(index, rows, state)[0],
            )
            self._gradients[size] = self._checked(gradient, self._gradients)
        return self._gradients[size], flat

    def _checked(self, loss: Any, others: dict[int, Any]) -> Any:
        """`loss`, which is no device's sum already and is like those of other shapes."""
        function = self.options.function
        if self.axes:
            n = loss.terms.num_leaves
            own = len(self.moving)
            local_values.check_undivided(function, loss.program, n, self.axes, parameters=own)
            avals = loss.program.closed.out_avals[2 * n : 2 * n + loss.aux_tree.num_leaves]
            aux, terms = jax.tree.unflatten(loss.aux_tree, avals), paths(loss.terms)
            local_values.check_outputs(
                function, loss.program, aux, self.axes, terms=terms, parameters=own
            )
        for other in others.values():
            check_same_outputs(function, loss, other)
        return loss

    def _flat(
        self, index: Any, rows: Any, state: Sequence[Any] | None
    ) -> tuple[Any, list[Any], list[bool], int]:
        """The loss function on flat inputs, these for one micro-batch, and its rows."""
        key = None if self.key is None else jax.random.fold_in(self.key, index)
        number = len(self.moving)
        rest = [*rows, *([] if key is None else [key])]
        # Gathered once before the fold, or in every micro-step, where only parts are kept.
        gathers = self.scattering and self.options.whole_params
        flat = [*(self._gathered(index) if gathers else self.moving), *rest]
        size, cut_leaves, stop = rest[0].shape[0], number + len(rows), number + len(rest)
        if self.state is not None:
            flat += self.state.leaves if state is None else state

        def call_fn(*inputs: Any) -> Any:  # kept beside its program, so it holds no arrays
            args = self.batch.put(self.args, inputs[number:cut_leaves])
            for position, value in self.tree.rebuild(inputs[:number]).items():
                args[position] = value
            own_key = inputs[cut_leaves] if cut_leaves < stop else None
            named = arguments.passed_key(self.options, own_key)
            if self.state is None:
                return self.options.loss_fn(*args, **named)
            return self.state.call(
                self.options.loss_fn, args, named, inputs[stop:], self.options.has_aux
            )

        differentiated = [True] * number + self.tree.rows
        differentiated += [False] * (len(flat) - len(differentiated))
        return call_fn, flat, differentiated, size

    @property
    def axis_env(self) -> list[tuple[str, int]]:
        """Names and sizes of axes that the loss may use in collectives, beside those around it."""
        return []

    def count(self, kept: Any = None) -> list[jax.Array]:
        """The summed weight of each term, over all devices, by a pass stripped of the model.

        Args:
          kept: boolean for each micro-batch; only these are counted. `None`: all.
        """
        weights = self._counted(kept)
        return reduction.reduce(reducers_of_sums(weights), weights, self.axes, True)

    def _counted(self, kept: Any) -> list[jax.Array]:
        """`count` on this device."""

        def count_fn(index: Any, rows: Any) -> Outcome:
            weights = reduction.vary(self._weights(index, rows), self.varied)
            if not self.options.skips:
                return Outcome(weights, None if kept is None else kept[index])
            finite = all_finite(weights)
            return Outcome(weights, finite if kept is None else finite & kept[index])

        return self.fold(count_fn, reducers_of_sums)

    def _weights(self, index: Any, rows: Any) -> list[Any]:
        """The terms' weights of one micro-batch, without the model."""
        gradient, flat = self.gradient_at(index, rows)
        return gradient.weights_fn(flat)

    def sums(self) -> WindowSums:
        """The window's sums, over the denominators that were given or else over its own."""
        given = self.given.denominators
        terms = self.first_loss().terms
        if self.options.noise_scale:
            arguments.check_noise_scale(self.options.function, terms, given)
        if self.state is not None and self.state.adds:  # else one trace of the loss is enough
            loss, flat, _ = self._first()
            self.state.read_program(loss.program, flat)
        denominators = None
        if given is not None:
            denominators = arguments.denominators(self.options.function, given, terms)
            local, _ = self._local(denominators)
        elif terms.num_leaves == 1:
            local, _ = self._local(None)
        elif not self.options.skips:
            denominators = self.count()
            local, _ = self._local(denominators)
        else:
            denominators, local = self._repeated()
        return self._reduced(local, denominators, given is not None)

    def _repeated(self) -> tuple[list[jax.Array], WindowSums]:
        """Leaves out of the denominators what the fold leaves out, which only the fold knows.

        All micro-batches are tried first; only if one was bad, on any device, the fold runs once
        more over those that were kept.
        """
        kept = jnp.arange(self.num_microbatches, dtype=jnp.int32) < self._num_run()
        kept = reduction.vary(kept, self.varied)

        def attempt(kept: jax.Array) -> Any:
            denominators = self.count(kept)
            local, finite = self._local(denominators, kept)
            good = reduction.agree((~kept | finite).all(), self.axes)
            return kept & finite, denominators, local, self.last_state, good

        _, denominators, local, self.last_state, _ = jax.lax.while_loop(
            lambda state: ~state[-1], lambda state: attempt(state[0]), attempt(kept)
        )
        return denominators, local

    def _num_run(self) -> Any:
        return self.num_microbatches if self.num_real is None else self.num_real

    def _local(self, denominators: Any, kept: Any = None) -> tuple[WindowSums, Any]:
        """One fold over this device's micro-batches.

        Returns:
          Its sums, as carries; and for each micro-batch whether it was finite, where that is asked.
        """
        seeds = None
        if denominators is not None:
            totals = self.first_loss().program.closed.out_avals[: len(denominators)]
            seeds = [
                divide(jnp.ones((), t.dtype), d, empty=0.0)
                for t, d in zip(totals, denominators, strict=True)
            ]
        return self._folded(seeds, kept)

    def _folded(self, seeds: Sequence[Any] | None, kept: Any) -> tuple[WindowSums, Any]:
        """The fold of `_local`; `seeds` multiply each term's gradient, `None` is 1."""
        micro_step = MicroStep(self, self.first_loss().pack(seeds), kept)
        threads = self.state.leaves if self.state is not None and self.state.threads else None
        summed = self._placed_sums()
        result = self.fold(micro_step, MicroStep.reducers, threads, start=self.start, sums=summed)
        grads: Any = None
        last: Any = None
        if summed is not None:
            grads, result = result
        if threads is not None:
            result, last = result
        sums, finite = result
        if summed is not None:
            grads, reducers = summed.read(grads, self.scale), Reducers(summed.reducers)
            sums = dataclasses.replace(sums, grads=grads, grad_reducers=reducers)
        if threads is not None and self.state is not None:
            self.last_state = last
            own = self.state.of_device(last, sums.num_microbatches)
            sums = dataclasses.replace(sums, model_state=own)
        return sums, finite

    def _placed_sums(self) -> Sums | None:
        """`gradient_sums`, in place where the loss lets them be, with every shape of micro-batch.

        Raises:
          ValueError: the accumulator demands it where it cannot be.
        """
        if self.gradient_sums is None:
            return None
        for segment in self.segments:
            rows = cut.micro_batch(segment.grid(self.batch.leaves), 0)
            self.gradient_at(jnp.int32(0), rows)
        reaches = [g.reach for g in self._gradients.values() if g.reach is not None]
        placed = self.gradient_sums.where_it_pays(reaches)
        if placed.everywhere and not all(placed.in_place):
            placement.refuse(self.options.function, self.tree, placed.in_place.index(False))
        return placed

    def rounding_key(self, index: Any) -> Any:
        """The accumulator's key for one micro-step, apart from the loss function's."""
        if not self.options.accumulator.needs_key:
            return None
        return jax.random.fold_in(jax.random.fold_in(self.key, index), 0x5EED)

    def _reduced(self, local: WindowSums, denominators: Any, given: bool) -> WindowSums:
        """The one reduction over devices, after which gradients read as one array each."""
        skipped = self._num_run() - local.num_microbatches
        local = dataclasses.replace(local, num_skipped=skipped)
        sums = reduction.reduce_window(
            local,
            self.axes,
            own=self.own,
            shards=self.grad_shards,
            done=self.done,
            wire=self.options.reduce_dtype,
        )
        reducers = sums.reducers.grads
        grads = [r.read(g) for r, g in zip(reducers, sums.grads, strict=True)]
        grads, tree = self.tree.gradients(grads, reducers)
        special = any(not isinstance(r, Addition | Kept) for r in jax.tree.leaves(tree))
        if denominators is not None:
            floats = [as_float(d, dtypes.promote(d, jnp.float32)) for d in denominators]
            denominators = jax.tree.unflatten(self.first_loss().terms, floats)
        state = self.state and self.state.after(sums.model_state, self.last_state)
        sums = dataclasses.replace(
            sums,
            grads=grads,
            grad_reducers=Reducers(tree) if special else None,
            denominators=denominators,
            denominators_given=given,
            model_state=state,
        )
        if not (self.options.skips or self.options.drops):
            # Known when tracing, so that a stream over devices need not ask how many there were.
            none: Any = np.zeros((), np.int32)
            sums = dataclasses.replace(sums, num_skipped=none)
        folded = sums.grads
        sums = cleared(sums)
        if self.options.drops:
            start = self.state and self.state.start
            good = sums.is_finite(start)
            # Where a device holds but a part of some sums, all must agree.
            if any(self.grad_shards) or any(self.own) or any(self.tree.rows):
                good = reduction.agree(good, self.axes)
            sums = kept_if(good, sums, start)
        return self._onto(sums, folded, reducers)

    def _onto(self, sums: WindowSums, folded: Any, reducers: Sequence[Any]) -> WindowSums:
        """`sums`, added to those that were given; `folded` are the gradients as the fold left them.

        Where these went on from given ones they are taken as they are: nothing was added to them
        where nothing counts.
        """
        if self.given.into is None:
            return sums
        begun = [x is not None for x in self.start]
        begun += [False] * (len(reducers) - len(begun))
        flags, _ = self.tree.gradients(begun, list(reducers))
        held = [flag is True for flag in jax.tree.leaves(flags)]
        leaves, tree = jax.tree.flatten(sums.grads)
        pairs = zip(held, leaves, jax.tree.leaves(folded), strict=True)
        grads = jax.tree.unflatten(tree, [f if h else x for h, x, f in pairs])
        return into.onto(
            self.options.function, self.given.into, dataclasses.replace(sums, grads=grads), held
        )

    def fold(self, micro_fn: Any, reducers_fn: Any, thread: Any = None, **how: Any) -> Any:
        """`scan.fold` over the batch; `how` are its other arguments."""
        return fold(
            micro_fn,
            self.batch.leaves,
            self.segments,
            reducers_fn,
            num_real=self.num_real,
            unroll=self.options.unroll,
            peel=self.options.overlap,
            thread=thread,
            function=self.options.function,
            **how,
        )


class Counter(Bound):
    """A loss of which only the weights are wanted, bound to the arguments of a call."""

    differentiates = False

    def _weights(self, index: Any, rows: Any) -> list[Any]:
        loss, flat, differentiated = self.loss_at(index, rows)
        return loss.weights_fn(self.options.function, differentiated)(flat)
