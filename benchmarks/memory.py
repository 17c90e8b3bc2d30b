r"""Compares the memory that `ja.fit_microbatch` predicts with what a process really needs.

A step (a small transformer with AdamW, parameters and state donated) is compiled for each
micro-batch size of one window. A process of its own then runs it twice and reads the growth of its
resident memory: the peak during the second call over what was resident before the step was called
the first time, arguments not counted. The prediction of the same is `temporaries + outputs -
aliased`; what the compiler, threads and the allocator keep for themselves is measured and no part
of it.

    JAX_PLATFORMS=cpu python benchmarks/memory.py > memory.jsonl

With `--platform cuda` or `tpu` the same step is compiled for one H100 or TPU v5e instead, which
needs the plugin named in clusters.py and no such device. There is nothing to measure then.

    JAX_PLATFORMS=cpu python benchmarks/memory.py --platform cuda --limit-gib 4 > memory.jsonl
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import clusters
import harness
import jax
import jax.numpy as jnp
import language_model
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

import jaxaccum as ja

SIZES = {
    "full": {"rows": 64, "vocabulary": 4096, "width": 256, "layers": 4, "length": 128},
    "quick": {"rows": 16, "vocabulary": 512, "width": 128, "layers": 2, "length": 128},
}


def main() -> None:
    parser = harness.parser(__doc__, rounds=1)
    parser.add_argument("--platform", choices=("cpu", *clusters.CLUSTERS), default="cpu")
    parser.add_argument("--limit-gib", type=float, help="bisect for this limit, with --platform")
    parser.add_argument("--measure", type=int, metavar="K", help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = SIZES["quick" if args.quick else "full"]
    if args.measure is not None:
        print(json.dumps(measure(size, args.measure, args.seed)))
        return
    if args.platform != "cpu":
        compiled_elsewhere(size, args)
        return
    fit = ja.fit_microbatch(
        lambda num_microbatches: make_step(size, num_microbatches),
        examples_per_step=size["rows"],
        limit_bytes=2**50,
        curve=not args.quick,  # else the whole batch alone, which fits
    )
    harness.Report("memory", args).table(
        f"Predicted and measured memory of a step, windows of {size['rows']} rows",
        [row_of(point, args) for point in fit.points],
    )


def compiled_elsewhere(size: dict[str, int], args: argparse.Namespace) -> None:
    """The table for a device that is not here, as `fit_microbatch` prints it."""
    topology = {"cuda": "1x1x1", "tpu": "v5e:2x2"}[args.platform]
    shape = (1, 4) if args.platform == "tpu" else (1, 1)
    mesh = clusters.mesh_of(args.platform, clusters.Cluster(args.platform, topology, shape))
    sharding = SingleDeviceSharding(np.ravel(mesh.devices)[0])

    def make(num_microbatches: int) -> tuple[Any, Any]:
        step, given = make_step(size, num_microbatches)
        return step, jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), given
        )

    limit = int((args.limit_gib or 2**20) * 2**30)
    curve = args.limit_gib is None
    fit = ja.fit_microbatch(make, examples_per_step=size["rows"], limit_bytes=limit, curve=curve)
    print(fit, file=sys.stderr)
    print(json.dumps({"benchmark": "memory", "arguments": vars(args), **fit.as_dict()}))


def row_of(point: ja.planning.MemoryPoint, args: argparse.Namespace) -> dict[str, Any]:
    """One micro-batch size: the prediction here, the measurement in a process of its own."""
    command = [sys.executable, __file__, "--measure", str(point.num_microbatches)]
    command += ["--seed", str(args.seed), *(["--quick"] if args.quick else [])]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(run.stdout)["peak"]
    predicted = point.memory.peak if point.memory else 0
    return {
        "micro-batch": point.microbatch_size,
        "K": point.num_microbatches,
        "arguments MiB": point.memory.arguments / 2**20 if point.memory else None,
        "predicted MiB": predicted / 2**20,
        "measured MiB": measured / 2**20,
        "predicted / measured": round(predicted / measured, 3),
        "GFLOP": point.flops / 1e9,
        "moved GiB": (point.moved_bytes or 0) / 2**30,
        "compile s": point.compile_seconds,
    }


def loss_fn(params: Any, batch: Any) -> ja.Mean:
    """Mean cross-entropy of the tokens that count."""
    return ja.mean(language_model.token_losses(params, batch["tokens"]), where=batch["mask"])


def make_step(size: dict[str, int], num_microbatches: int) -> tuple[Any, tuple[Any, ...]]:
    """The step and the types of its arguments."""
    init, step = ja.train_step(loss_fn, optax.adamw(1e-3), num_microbatches=num_microbatches)

    def arguments() -> Any:
        model = {k: v for k, v in size.items() if k != "rows"}
        params = language_model.init_params(0, **model)
        return params, init(params)

    length, rows = size["length"], size["rows"]
    batch = {
        "tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32),
        "mask": jax.ShapeDtypeStruct((rows, length), jnp.bool_),
    }
    return step, (*jax.eval_shape(arguments), batch)


def measure(size: dict[str, int], num_microbatches: int, seed: int) -> dict[str, int]:
    """The growth of this process's resident memory during a call."""
    init, step = ja.train_step(loss_fn, optax.adamw(1e-3), num_microbatches=num_microbatches)
    model = {k: v for k, v in size.items() if k != "rows"}
    params = language_model.init_params(seed, **model)
    state = init(params)
    batch = language_model.ragged_batch(
        seed, rows=size["rows"], length=size["length"], vocabulary=size["vocabulary"]
    )
    compiled = step.lower(params, state, batch).compile()
    params, state, batch = jax.block_until_ready((params, state, batch))
    before = resident()
    for _ in range(2):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        params, state, _ = jax.block_until_ready(compiled(params, state, batch))
    return {"peak": resident("VmHWM") - before}


def resident(field: str = "VmRSS") -> int:
    """Bytes of this process in memory, now or at most."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}.")


if __name__ == "__main__":
    main()
