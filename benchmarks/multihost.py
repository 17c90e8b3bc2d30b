"""One reduction per window against one in every micro-batch, on two processes over gloo.

Starts two local processes with one CPU device each. All sides make the same optimizer step (SGD
with momentum) on the same rows, K micro-batches on each device, and differ in when they reduce:

  spmd_axis_name         `ja.value_and_grad(spmd_axis_name=...)` under plain `jit`: once
  axis_name              `ja.value_and_grad(axis_name=...)` inside `shard_map`: once
  psum after the scan    written by hand inside `shard_map`: once
  psum in the scan       written by hand inside `shard_map`: in every micro-batch
  replicated carry       written by hand under plain `jit`: where the compiler puts it

The sides run in turns, in the same order on both processes. In the end the parameters must be the
same bits on both processes, and the same on all sides to rounding.

    python benchmarks/multihost.py > multihost.jsonl
    python benchmarks/multihost.py --quick
"""

import argparse
import functools
import hashlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import language_model as lm
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxaccum as ja

PROCESSES = 2
WHOLE, SPLIT = PartitionSpec(), PartitionSpec("data")
BASE = "psum in the scan"


def mean_loss(params: Any, batch: Any) -> ja.Mean:
    """The loss as jaxaccum takes it."""
    return ja.mean(lm.token_losses(params, batch["tokens"]), where=batch["mask"])


def summed_loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The same loss as a sum and a count."""
    losses = lm.token_losses(params, batch["tokens"])
    return jnp.where(batch["mask"], losses, 0.0).sum(), batch["mask"].sum()


def scan(params: Any, micros: Any, reduce: Callable[[Any], Any]) -> Any:
    """Sums over micro-batches `[K, rows, ...]`; `reduce` is applied to each one's."""

    def fold(sums: Any, micro: Any) -> tuple[Any, None]:
        (total, count), grads = jax.value_and_grad(summed_loss, has_aux=True)(params, micro)
        return jax.tree.map(jnp.add, sums, reduce((total, count, grads))), None

    zeros = (jnp.float32(0), jnp.int32(0), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(fold, zeros, micros)[0]


def divide(sums: Any) -> tuple[jax.Array, Any]:
    total, count, grads = sums
    return total / count, jax.tree.map(lambda g: g / count, grads)


def make_sides(mesh: jax.sharding.Mesh, num: int) -> dict[str, Callable[..., Any]]:
    """By name, a function of `(params, batch)` to the loss and its gradient."""

    def manual(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return jax.shard_map(
            fn, mesh=mesh, in_specs=(WHOLE, SPLIT), out_specs=WHOLE, axis_names={"data"}, **options
        )

    def cut(batch: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), batch)

    psum = functools.partial(lax.psum, axis_name="data")

    def replicated_carry(params: Any, batch: Any) -> Any:
        # Strided, so that every row stays on its device.
        def strided(x: jax.Array) -> jax.Array:
            x = x.reshape(-1, num, *x.shape[1:]).swapaxes(0, 1)
            return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, "data")))

        return divide(scan(params, jax.tree.map(strided, batch), lambda sums: sums))

    by_library = functools.partial(ja.value_and_grad, mean_loss, num_microbatches=num)
    return {
        "spmd_axis_name": by_library(spmd_axis_name="data"),
        "axis_name": manual(by_library(axis_name="data")),
        # Without replication checking, as a hand-written psum needs local gradients.
        "psum after the scan": manual(
            lambda p, b: divide(psum(scan(p, cut(b), lambda sums: sums))), check_vma=False
        ),
        BASE: manual(lambda p, b: divide(scan(p, cut(b), psum)), check_vma=False),
        "replicated carry": replicated_carry,
    }


def make_step(value_and_grad: Callable[..., Any], optimizer: optax.GradientTransformation) -> Any:
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def count_reductions(hlo: str) -> dict[str, int]:
    """All-reduces of the optimized program, inside of loop bodies and outside."""
    bodies = set(re.findall(r"\bbody=%?([\w.\-]+)", hlo))
    inside = outside = 0
    computation = ""
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.removeprefix("ENTRY ").lstrip("%").split()[0].split("(")[0]
        elif re.search(r"\ball-reduce(-start)?\(", line):
            inside += computation in bodies
            outside += computation not in bodies
    return {"all-reduces in the loop": inside, "outside": outside}


class Side:
    """A compiled step and what it has trained so far."""

    def __init__(self, step: Callable[..., Any], params: Any, state: Any, batch: Any):
        self._program = harness.compile_program(step, params, state, batch)
        self._batch = batch
        self.params, self._state = params, state
        self.reductions = count_reductions(self._program.hlo)

    def __call__(self) -> Any:
        self.params, self._state, loss = self._program.call(self.params, self._state, self._batch)
        return self.params, loss

    def bits(self) -> np.ndarray:
        """A hash of this process's copy of the parameters."""
        sha = hashlib.sha256()
        for leaf in jax.tree.leaves(self.params):
            sha.update(np.asarray(leaf.addressable_data(0)).tobytes())
        return np.frombuffer(sha.digest(), np.uint8)


def work(args: argparse.Namespace) -> None:
    """What each of the two processes does."""
    mesh = jax.make_mesh((PROCESSES,), ("data",), axis_types=(AxisType.Auto,))
    sizes = {"vocabulary": args.vocabulary, "length": args.length}
    rows = PROCESSES * args.num_microbatches * args.microbatch_rows
    batch = jax.device_get(lm.ragged_batch(args.seed, rows=rows, **sizes))
    start = jax.process_index() * rows // PROCESSES
    batch = jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(
            NamedSharding(mesh, SPLIT), x[start:][: rows // PROCESSES]
        ),
        batch,
    )
    # The optimizer does not amplify rounding, so that the sides can be compared at the end.
    optimizer = optax.sgd(0.1, momentum=0.9)

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, WHOLE))
    def initial() -> Any:
        params = lm.init_params(args.seed, width=args.width, layers=args.layers, **sizes)
        return params, optimizer.init(params)

    with jax.set_mesh(mesh):
        params, state = initial()
        sides = {
            name: Side(make_step(fn, optimizer), params, state, batch)
            for name, fn in make_sides(mesh, args.num_microbatches).items()
        }
        number = sum(leaf.size for leaf in jax.tree.leaves(params))
        title = (
            f"{PROCESSES} processes over gloo, K={args.num_microbatches}, {number:,} parameters, "
            f"micro-batches of {args.microbatch_rows} rows of {args.length} tokens"
        )
        if jax.process_index() == 0:
            compare = harness.Report("multihost", args).comparison
        else:  # in step with process 0, and silent

            def compare(title: str, sides: Any, *, rounds: int, **_: Any) -> None:
                harness.time_sides(sides, rounds=rounds, warmup=1 if rounds > 3 else 0)

        compare(
            title,
            sides,
            over=dict.fromkeys((name for name in sides if name != BASE), BASE),
            rounds=args.rounds,
            extra={name: side.reductions for name, side in sides.items()},
        )
        check(sides)


def check(sides: dict[str, Side]) -> None:
    """Bit-identical parameters on all processes; equal ones on all sides, to rounding."""
    for name, side in sides.items():
        first, *others = multihost_utils.process_allgather(side.bits())
        if not all((first == other).all() for other in others):
            raise SystemExit(f"multihost: {name}: the processes' parameters differ")
    local = [
        [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(side.params)]
        for side in sides.values()
    ]
    for name, leaves in zip(sides, local, strict=True):
        for a, b in zip(leaves, local[0], strict=True):
            if np.abs(a - b).max() > 1e-4 * np.abs(b).max():
                raise SystemExit(f"multihost: {name}: parameters differ by {np.abs(a - b).max()}")
    if jax.process_index() == 0:
        print("parameters are bit-identical on both processes, for each side", file=sys.stderr)


def launch() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, *sys.argv, "--port", str(port), "--process-id"]
    workers = [subprocess.Popen([*command, str(i)]) for i in range(PROCESSES)]
    try:
        return max(abs(worker.wait()) for worker in workers)
    finally:
        for worker in workers:
            worker.kill()


def main() -> None:
    parser = harness.parser(__doc__, rounds=40)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--microbatch-rows", type=int, default=1, help="on each process")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--process-id", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.width, args.layers, args.length, args.vocabulary = 3, 32, 1, 16, 64
    if args.process_id is None:
        sys.exit(launch())
    # Gloo writes to stdout, which is for JSON: what does not come from Python goes to stderr.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{args.port}", PROCESSES, args.process_id)
    del args.port, args.process_id  # not for the report
    work(args)


if __name__ == "__main__":
    main()
