r"""Compiles a window for TPU and GPU clusters on a CPU, and reads what every device would do.

Nothing runs: the compilers for TPU and GPU are asked for the program of a whole cluster, and
`ja.audit` reads it. The step is a small transformer language model on ragged rows, one row a
device and micro-batch, over a mesh of replicas x shards:

- data parallel: `ja.value_and_grad(spmd_axis_name=...)` under plain `jit`;
- FSDP (HSDP where there are replicas), defer and scatter: parameters split over the shards;
- stream: one call of `ja.multi_steps(axis_name=...)` with AdamW, state and parameters donated.
  Its reduction stands in the branch that closes the window.

Bytes are the payload on one device, for a whole window, in units of one whole gradient in
float32; gathered bfloat16 parameters are half of one. A ring moves about twice the payload for an
all-reduce. The loop of a window runs K times; what it repeats is counted K times. "Carried by
loops" are the float32 sums in the loop's state, in the same unit: 1, or one part of it.

The compilers are optional, and come beside a JAX of the same version. For TPU:

    pip install "jax[tpu]"

For GPUs, without any CUDA library:

    pip install jax-cuda12-plugin jax-cuda12-pjrt

    JAX_PLATFORMS=cpu python benchmarks/clusters.py > clusters.jsonl
    JAX_PLATFORMS=cpu python benchmarks/clusters.py --platform cuda > clusters.jsonl
"""

import os

# Read once, when the libraries load: no accelerator is looked for, and none is locked.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import functools
import importlib.util
import math
import sys
import time
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import language_model
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxaccum as ja

AXES = ("replica", "shard")
MODEL = {"vocabulary": 1024, "width": 128, "layers": 2, "length": 64}
LARGE = {"vocabulary": 32768, "width": 1024, "layers": 1, "length": 64}
REDUCTIONS = ("all-reduce", "reduce-scatter")

H100 = """gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 6 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class Cluster(NamedTuple):
    """A cluster, and how its devices are arranged.

    Attributes:
      name: as in the tables.
      topology: as the plugin calls it; GPUs: slices x hosts x devices of a host.
      mesh: replicas and shards.
    """

    name: str
    topology: str
    mesh: tuple[int, int]


CLUSTERS = {
    "tpu": (
        Cluster("TPU v5e 4x4", "v5e:4x4", (1, 16)),
        Cluster("TPU v5p 8x8x8", "v5p:8x8x8", (8, 64)),
        Cluster("TPU v5p 16x16x16", "v5p:16x16x16", (64, 64)),
    ),
    "cuda": (
        Cluster("16 H100", "1x2x8", (2, 8)),
        Cluster("64 H100", "1x8x8", (8, 8)),
        Cluster("256 H100", "1x32x8", (32, 8)),
    ),
}
INSTALL = {
    "tpu": ("libtpu", 'pip install "jax[tpu]"'),
    "cuda": ("jax_cuda12_plugin", "pip install jax-cuda12-plugin jax-cuda12-pjrt"),
}


def main() -> None:
    parser = harness.parser(__doc__, rounds=1)
    parser.add_argument("--platform", choices=tuple(CLUSTERS), default="tpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--clusters", type=int, nargs="+", help="numbers of clusters, from 0")
    parser.add_argument("--windows", type=int, nargs="+", default=[2, 8], help="values of K")
    parser.add_argument(
        "--large", action="store_true", help="a model that on-chip memory can't hold"
    )
    args = parser.parse_args()
    if args.large:
        MODEL.update(LARGE)
    package, install = INSTALL[args.platform]
    if importlib.util.find_spec(package) is None:
        print(f"clusters.py: skipped, {package!r} is not installed. Try: {install}")
        return
    report = harness.Report("clusters", args)
    chosen = [0] if args.quick else args.clusters or range(len(CLUSTERS[args.platform]))
    for cluster in (CLUSTERS[args.platform][number] for number in chosen):
        report.table(f"{cluster.name}, {args.dtype} parameters", rows_of(cluster, args))


def rows_of(cluster: Cluster, args: Any) -> list[dict[str, Any]]:
    """A row for each route and K."""
    mesh = mesh_of(args.platform, cluster)
    params = jax.eval_shape(lambda: language_model.init_params(args.seed, **MODEL))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, args.dtype), params)
    rows = []
    for name, route in ROUTES.items():
        if cluster.mesh[0] > 1:
            name = name.replace("FSDP", "HSDP")
        for num_microbatches in args.windows:
            row = {"devices": mesh.size, "route": name, "K": num_microbatches}
            rows.append(row | measure(*route(mesh, params, num_microbatches), params))
            print(f"{cluster.name}: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def mesh_of(platform: str, cluster: Cluster) -> Mesh:
    """The cluster's devices as replicas x shards."""
    # A topology of GPUs needs a name that says what it is made of.
    config = {"target_config": H100, "topology": cluster.topology} if platform == "cuda" else {}
    topology = topologies.get_topology_desc(cluster.topology, platform, **config)
    devices = np.array(topology.devices).reshape(cluster.mesh)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2)


def measure(fn: Any, given: Any, params: Any) -> dict[str, Any]:
    """Compiles `fn` and reads the program."""
    jax.clear_caches()
    start = time.perf_counter()
    lowered = fn.lower(*given)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)
    found = ja.audit(compiled, axis_name=AXES, gradient_like=like)
    gradient = 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(params))

    def share(collectives: Any, *, reductions: bool) -> float:
        chosen = [c for c in collectives if (c.kind in REDUCTIONS) == reductions]
        return round(sum(c.total_bytes for c in chosen) / gradient, 4)

    large = [c for c in found.outside if c.counts and 1000 * c.bytes >= gradient]
    memory = found.memory
    carried = sum(4 * math.prod(s.shape) for s in found.loop_sums if s.dtype == "float32")
    return {
        "reduced in loops": share(found.in_loops, reductions=True),
        "moved in loops": share(found.in_loops, reductions=False),
        "reduced outside": share(found.outside, reductions=True),
        "moved outside": share(found.outside, reductions=False),
        "kinds outside": ", ".join(sorted({c.kind for c in large})),
        "in a branch": all(c.in_branch for c in large),
        "carried by loops": round(carried / gradient, 4),
        "temporary bytes": memory.temporaries if memory else None,
        "argument bytes": memory.arguments if memory else None,
        "trace s": middle - start,
        "compile s": end - middle,
    }


# Routes: a jitted function and the types of its arguments


def loss_fn(params: Any, batch: Any) -> ja.Mean:
    """Mean cross-entropy of the tokens that count."""
    losses = language_model.token_losses(params, batch["tokens"])
    return ja.mean(losses.astype(jnp.float32), where=batch["mask"])


def data_parallel(mesh: Mesh, params: Any, num_microbatches: int) -> tuple[Any, Any]:
    """Whole parameters on every device."""
    fn = ja.value_and_grad(loss_fn, num_microbatches=num_microbatches, spmd_axis_name=AXES)
    return under(mesh, fn), (placed(mesh, params, P()), batch_of(mesh, num_microbatches))


def sharded(mesh: Mesh, params: Any, num_microbatches: int, *, reduction: str) -> tuple[Any, Any]:
    """Parameters and gradients in parts over the shards."""
    specs = jax.tree.map(functools.partial(spec_of, number=mesh.shape["shard"]), params)
    fn = ja.value_and_grad(
        loss_fn,
        num_microbatches=num_microbatches,
        spmd_axis_name=AXES,
        reduction=reduction,
        param_specs=specs,
    )
    given = jax.tree.map(functools.partial(placed, mesh), params, specs)
    return under(mesh, fn), (given, batch_of(mesh, num_microbatches))


def stream(mesh: Mesh, params: Any, num_microbatches: int) -> tuple[Any, Any]:
    """One micro-batch a call."""
    tx = ja.multi_steps(optax.adamw(1e-3), num_microbatches, axis_name=AXES)
    local = ja.accumulate(loss_fn, num_microbatches=1)

    def step(params: Any, state: Any, batch: Any) -> Any:
        sums = local(params, batch)
        updates, state = tx.update(sums, state, params)
        return optax.apply_updates(params, updates), state

    shard = functools.partial(jax.shard_map, mesh=mesh)
    specs = ja.state_specs(jax.eval_shape(tx.init, params), AXES)
    state = jax.eval_shape(shard(tx.init, in_specs=P(), out_specs=specs), params)
    state = jax.tree.map(functools.partial(placed, mesh), state, specs)
    mapped = shard(step, in_specs=(P(), specs, P(AXES)), out_specs=(P(), specs))
    given = (placed(mesh, params, P()), state, batch_of(mesh, 1))
    return jax.jit(mapped, donate_argnums=(0, 1)), given


ROUTES = {
    "data parallel": data_parallel,
    "FSDP, defer": functools.partial(sharded, reduction="defer"),
    "FSDP, scatter": functools.partial(sharded, reduction="scatter"),
    "stream": stream,
}


def under(mesh: Mesh, fn: Any) -> Any:
    """`jit` of `fn`, traced with the mesh in the context."""

    def with_mesh(params: Any, batch: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fn(params, batch)

    return jax.jit(with_mesh)


def spec_of(x: Any, *, number: int) -> P:
    """The largest dimension of a matrix over the shards; vectors stay whole."""
    if len(x.shape) < 2:
        return P()
    sizes = [size if size % number == 0 else 0 for size in x.shape]
    return P(*[None] * int(np.argmax(sizes)), "shard") if any(sizes) else P()


def placed(mesh: Mesh, tree: Any, spec: P) -> Any:
    """The types of arrays that lie over the mesh as `spec` says."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def batch_of(mesh: Mesh, num_microbatches: int) -> Any:
    """The types of one row for each device and micro-batch."""
    rows, length = mesh.size * num_microbatches, MODEL["length"]
    batch = {
        "tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32),
        "mask": jax.ShapeDtypeStruct((rows, length), jnp.bool_),
    }
    return placed(mesh, batch, P(AXES))


if __name__ == "__main__":
    main()
