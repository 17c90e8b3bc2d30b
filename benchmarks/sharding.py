"""What parameters and gradient sums in parts cost: bytes moved and held on each of eight devices.

Compiles one window of a small transformer language model on eight virtual CPU devices for every
way of splitting it, reads the programs with `ja.audit`, runs each once, and requires its loss and
gradient to equal those of the full batch on one device to 1e-5 of their norm.

- replicated carry: what plain `jit` makes of a hand-written loop, `sums += grad / K`;
- data parallel: whole parameters, `spmd_axis_name`;
- ZeRO-1: whole parameters, gradients and Adam's moments in parts, updates gathered by plain `jit`
  (the only rows that hold an optimizer step);
- FSDP: parameters in parts, over eight devices;
- HSDP: the same over four, in two replicas.

"Moved" is the payload on one device in one window, in units of one whole float32 gradient; what a
loop repeats K times counts K times. A ring moves about twice the payload for an all-reduce. "Held"
are the bytes of the compiled program on one device.

    python benchmarks/sharding.py > sharding.jsonl
"""

import os

# JAX reads these once, when it is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import language_model
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxaccum as ja

MODEL = {"vocabulary": 256, "width": 64, "layers": 1, "length": 16}
K = 8
ADAM = optax.adam(1e-3)


class Side(NamedTuple):
    """One way to split a window.

    Attributes:
      axes: the mesh axes over which rows are split.
      step: a function of the parameters and the batch, or of an optimizer state as well.
      param_specs: how the parameters lie.
      loss: the loss function.
      state_specs: how Adam's moments lie; `None` without an optimizer step.
    """

    axes: tuple[str, ...]
    step: Callable[..., Any]
    param_specs: Any
    loss: Callable[..., Any]
    state_specs: Any = None

    @property
    def mesh(self) -> jax.sharding.Mesh:
        shape = (2, 4) if len(self.axes) == 2 else (8,)
        return jax.make_mesh(shape, self.axes, axis_types=(AxisType.Auto,) * len(shape))


def main() -> None:
    args = harness.parser(__doc__, rounds=1).parse_args()
    report = harness.Report("sharding", args)
    params = language_model.init_params(args.seed, **MODEL)
    rows, length = 8 * K, MODEL["length"]
    sizes = {"length": length, "vocabulary": MODEL["vocabulary"]}
    batch = language_model.ragged_batch(args.seed, rows=rows, **sizes)
    table = []
    for name, (side, given) in sides(params, batch).items():
        table.append({"route": name, **measure(side, *given)})
        print(table[-1], file=sys.stderr, flush=True)
    columns = lambda row, *names: {n: row[n] for n in ("route", *names)}  # noqa: E731
    moved = ("reduced in loops", "gathered in loops", "reduced outside", "gathered outside")
    held = ("arguments", "temporaries", "peak beside arguments", "loop sums")
    report.table(
        f"Moved on each device in a window of K={K}, in gradients",
        [columns(row, *moved, "kinds in loops", "kinds outside", "error") for row in table],
    )
    report.table(
        "Held on each device, bytes",
        [columns(row, "gradient", *held) for row in table],
    )


def measure(side: Side, params: Any, batch: Any) -> dict[str, Any]:
    """Compiles and runs one side."""
    put = lambda x, spec: jax.device_put(x, NamedSharding(side.mesh, spec))  # noqa: E731
    given = [jax.tree.map(put, params, side.param_specs), put(batch, P(side.axes))]
    if side.state_specs is not None:
        given.append(ADAM.init(jax.tree.map(put, params, side.state_specs)))
    with jax.set_mesh(side.mesh):
        compiled = jax.jit(side.step).lower(*given).compile()
        result = compiled(*given)
    found = ja.audit(compiled, axis_name=side.axes, gradient_like=params)
    gradient = 4 * sum(x.size for x in jax.tree.leaves(params))
    memory = found.memory

    def share(collectives: Any, kinds: tuple[str, ...]) -> float:
        return round(sum(c.total_bytes for c in collectives if c.kind in kinds) / gradient, 3)

    def kinds(collectives: Any) -> str:
        large = {c.kind for c in collectives if c.counts and 1000 * c.bytes >= gradient}
        return ", ".join(sorted(large))

    sums, gathers = ("all-reduce", "reduce-scatter"), ("all-gather", "all-to-all")
    return {
        "gradient": gradient,
        "reduced in loops": share(found.in_loops, sums),
        "gathered in loops": share(found.in_loops, gathers),
        "reduced outside": share(found.outside, sums),
        "gathered outside": share(found.outside, gathers),
        "kinds in loops": kinds(found.in_loops),
        "kinds outside": kinds(found.outside),
        "arguments": memory.arguments,
        "temporaries": memory.temporaries,
        "peak beside arguments": memory.peak,
        "loop sums": sum(4 * math.prod(s.shape) for s in found.loop_sums),
        "error": check(result[:2], side.loss, params, batch),
    }


def check(result: Any, loss: Any, params: Any, batch: Any) -> float:
    """The relative error against the full batch on one device, required to be at most 1e-5."""
    value, grads = full_batch_fn(loss)(params, batch)
    difference = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), result[1], grads)
    error = float(norm(difference) / norm(grads))
    if not max(error, abs(float(result[0] / value) - 1)) <= 1e-5:
        raise AssertionError(f"the gradient differs from the full batch's by {error}")
    return float(f"{error:.1e}")


@functools.cache
def full_batch_fn(loss: Any) -> Any:
    """The full batch in one pass on one device."""
    return jax.jit(jax.value_and_grad(lambda params, batch: loss(params, batch).value))


def norm(tree: Any) -> float:
    return math.sqrt(sum(float(np.sum(np.square(x))) for x in jax.tree.leaves(tree)))


# The sides


def loss_fn(params: Any, batch: Any) -> ja.Mean:
    """Mean cross-entropy of the tokens that count."""
    losses = language_model.token_losses(params, batch["tokens"])
    return ja.mean(losses, where=batch["mask"])


def replicated_carry(params: Any, batch: Any) -> Any:
    """The loop as it is often written, for rows that keep their device."""
    rows = len(batch["mask"])
    # The fair cut: micro-batch k takes rows k, k + K, ..., so that no row moves.
    cut = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(rows // K, K, *x.shape[1:]), 1, 0), batch)
    weight = batch["mask"].sum()

    def body(sums: Any, micro_batch: Any) -> Any:
        total = lambda params: loss_fn(params, micro_batch).total / weight  # noqa: E731
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(total)(params)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(body, zeros, cut)[0]


def sides(params: Any, batch: Any) -> dict[str, tuple[Side, Any]]:
    """Every side, with its parameters and batch."""
    whole = jax.tree.map(lambda _: P(), params)
    wide = jax.tree.map(functools.partial(spec_of, number=8), params)
    narrow = jax.tree.map(functools.partial(spec_of, number=4), params)
    data, hybrid = ("data",), ("replica", "data")

    def window(axes: tuple[str, ...], loss: Any = loss_fn, **options: Any) -> Any:
        return ja.value_and_grad(loss, num_microbatches=K, spmd_axis_name=axes, **options)

    def sharded(axes: tuple[str, ...], specs: Any, reduction: str) -> Side:
        step = window(axes, reduction=reduction, param_specs=specs)
        return Side(axes, step, specs, loss_fn)

    def zero(reduction: str) -> Side:
        step = window(data, reduction=reduction, grad_specs=wide)
        return Side(data, zero_step(step, whole), whole, loss_fn, state_specs=wide)

    found = {
        "replicated carry": Side(data, replicated_carry, whole, loss_fn),
        "data parallel, defer": Side(data, window(data), whole, loss_fn),
    }
    for reduction in ("defer", "scatter"):
        found[f"ZeRO-1, {reduction}"] = zero(reduction)
    for reduction in ("defer", "scatter"):
        found[f"FSDP, {reduction}"] = sharded(data, wide, reduction)
    for reduction in ("defer", "scatter"):
        found[f"HSDP 2x4, {reduction}"] = sharded(hybrid, narrow, reduction)
    return {name: (side, (params, batch)) for name, side in found.items()}


def zero_step(window: Any, whole: Any) -> Any:
    """A window and Adam's step; also returns the loss and the gradient, in parts."""

    def step(params: Any, batch: Any, state: Any) -> Any:
        loss, grads = window(params, batch)
        updates, state = ADAM.update(grads, state, params)
        new = optax.apply_updates(params, updates)
        return loss, grads, jax.lax.with_sharding_constraint(new, whole), state

    return step


def spec_of(x: Any, *, number: int) -> P:
    """The largest dimension of a matrix over the axis `data`; vectors stay whole."""
    if x.ndim < 2:
        return P()
    sizes = [size if size % number == 0 else 0 for size in x.shape]
    return P(*[None] * int(np.argmax(sizes)), "data") if any(sizes) else P()


if __name__ == "__main__":
    main()
