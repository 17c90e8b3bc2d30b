"""Losses over the window's axis, `ja.window_axis`, against the full batch in one pass.

Networks with batch normalisation in every layer, and an in-batch contrastive loss on a deep
network: time, compiled temporary memory and matrix products of the stored and of the recomputing
mode, of the full batch, and of naive accumulation, which computes something else.

    python benchmarks/window_axis.py > window_axis.jsonl
    python benchmarks/window_axis.py --quick
"""

import re
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.flatten_util
import jax.numpy as jnp
from jax import lax

import jaxaccum as ja

AXIS = "window"


def init_params(seed: int, layers: int, width: int) -> list[dict[str, jax.Array]]:
    """A stack of square layers with a scale and a shift each."""
    keys = jax.random.split(jax.random.key(seed), layers)
    return [
        {
            "w": jax.random.normal(key, (width, width)) / width**0.5,
            "scale": jnp.ones((1, width)),
            "shift": jnp.zeros((1, width)),
        }
        for key in keys
    ]


def normalised(params: Any, x: jax.Array, mean_fn: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Layers of product, batch normalisation and SiLU."""
    for layer in params:
        x = x @ layer["w"]
        mean, square = mean_fn(jnp.stack([x.mean(0), (x * x).mean(0)]))[:, None]
        x = (x - mean) * lax.rsqrt(square - mean * mean + 1e-5) * layer["scale"] + layer["shift"]
        x = jax.nn.silu(x)
    return x


def batch_norm_loss(mean_fn: Callable[[jax.Array], jax.Array]) -> Callable[..., ja.Mean]:
    return lambda params, batch: ja.mean(
        (normalised(params, batch["x"], mean_fn) - batch["y"]) ** 2
    )


def features(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = x + jax.nn.gelu(x @ layer["w"] + layer["shift"])
    return x / jnp.sqrt(jnp.sum(x * x, axis=1, keepdims=True))


def contrastive_loss(
    gather_fn: Callable[[jax.Array], jax.Array], index_fn: Callable[[], Any]
) -> Callable[..., ja.Mean]:
    """Every row of `x` against all rows of `y`; the positive is its own."""

    def loss_fn(params: Any, batch: Any) -> ja.Mean:
        a, b = features(params, batch["x"]), gather_fn(features(params, batch["y"]))
        own = index_fn() * a.shape[0] + jnp.arange(a.shape[0])
        logits = 10 * a @ b.T
        picked = jnp.take_along_axis(logits, own[:, None], axis=1)[:, 0]
        return ja.mean(jax.nn.logsumexp(logits, axis=1) - picked)

    return loss_fn


def full_batch(loss_fn: Callable[..., ja.Mean]) -> Callable[..., Any]:
    return lambda params, batch: jax.value_and_grad(lambda p: loss_fn(p, batch).value)(params)


def error(got: Any, expected: Any) -> float:
    """The norm of the gradients' difference over the norm of the full batch's."""
    flat = [jax.flatten_util.ravel_pytree(tree[1])[0] for tree in (got, expected)]
    return float(jnp.linalg.norm(flat[0] - flat[1]) / jnp.linalg.norm(flat[1]))


def main() -> None:
    parser = harness.parser(__doc__, rounds=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--num", type=int, default=16, help="micro-batches")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.width, args.rows, args.num = 3, 16, 64, 4
    report = harness.Report("window_axis", args)
    batch = {
        name: jax.random.normal(jax.random.key(i), (args.rows, args.width))
        for i, name in enumerate("xy")
    }

    def compare(title: str, staged: Any, whole: Any, naive: Any, layers: int) -> None:
        params = init_params(args.seed, layers, args.width)
        options: dict[str, Any] = {"num_microbatches": args.num}
        fns = {
            "full batch": full_batch(whole),
            "store": ja.window_axis.value_and_grad(staged, **options),
            "recompute": ja.window_axis.value_and_grad(staged, storage="recompute", **options),
            "naive accumulation": ja.value_and_grad(naive, **options),
        }
        programs = {n: harness.compile_program(f, params, batch) for n, f in fns.items()}
        sides = {n: lambda p=p: p.call(params, batch) for n, p in programs.items()}
        expected = sides["full batch"]()
        extra = {
            name: {
                "temporary bytes": program.temp_bytes,
                "memory ratio": program.temp_bytes / programs["full batch"].temp_bytes,
                "products": len(re.findall(r" dot\(", program.hlo)),
                "compile s": program.trace_s + program.compile_s,
                "gradient error": error(sides[name](), expected),
            }
            for name, program in programs.items()
        }
        against = dict.fromkeys(["store", "recompute", "naive accumulation"], "full batch")
        report.comparison(title, sides, over=against, rounds=args.rounds, extra=extra)

    over_window = batch_norm_loss(lambda x: lax.pmean(x, AXIS))
    alone = batch_norm_loss(lambda x: x)
    for layers in (1, 4, 8):
        title = f"Batch normalisation, {layers} layers, {args.rows} rows, K={args.num}"
        compare(title, over_window, alone, alone, layers)
    contrast = contrastive_loss(
        lambda z: lax.all_gather(z, AXIS, tiled=True), lambda: lax.axis_index(AXIS)
    )
    alone = contrastive_loss(lambda z: z, lambda: 0)
    compare(f"Contrast, 4 layers, {args.rows} rows, K={args.num}", contrast, alone, alone, 4)


if __name__ == "__main__":
    main()
