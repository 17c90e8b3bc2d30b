"""Losses that do not split, `ja.losses` on `ja.microbatch`, against what one would do instead.

Dense networks on random data in random order, which is the kind case for naive accumulation. For
each loss: the full batch in one pass; the exact window; naive accumulation, the mean of the
micro-batches' own losses in a hand-written scan; for the contrastive loss also GradCache written by
hand. Time in turns within one process, compiled temporary memory, and the distance of the gradient
from the full batch's.

    python benchmarks/losses.py > losses.jsonl
    python benchmarks/losses.py --quick
"""

from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import jaxaccum as ja

FEATURES, EMBEDDING, CLASSES = 64, 32, 8
TEMPERATURE = 0.2


def tower(params: Any, x: jax.Array) -> jax.Array:
    for w in params[:-1]:
        x = jax.nn.gelu(x @ w)
    return x @ params[-1]


def unit(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def encode(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    return unit(tower(params["a"], batch["x"])), unit(tower(params["b"], batch["y"]))


def contrastive(number: int, **options: Any) -> Callable[..., Any]:
    return ja.losses.contrastive_fn(
        encode, temperature=TEMPERATURE, num_microbatches=number, **options
    )


def probabilities(params: Any, batch: Any) -> jax.Array:
    return jax.nn.softmax(tower(params["a"], batch["x"])[:, :CLASSES])


def load_balance(number: int) -> Callable[..., Any]:
    routed = ja.microbatch(
        lambda p, b: ja.losses.routing(probabilities(p, b)), num_microbatches=number
    )
    return lambda p, b: ja.losses.load_balance(routed(p, b))


def dice(number: int) -> Callable[..., Any]:
    def fn(p: Any, b: Any) -> Any:
        return ja.losses.overlap(probabilities(p, b), jax.nn.one_hot(b["label"], CLASSES))

    overlap = ja.microbatch(fn, num_microbatches=number)
    return lambda p, b: ja.losses.dice(overlap(p, b))


def plain_contrastive(params: Any, batch: Any) -> jax.Array:
    return ja.losses.contrastive(*encode(params, batch), temperature=TEMPERATURE)


def plain_load_balance(params: Any, batch: Any) -> jax.Array:
    p = probabilities(params, batch)
    chosen = jax.nn.one_hot(jnp.argmax(p, axis=1), CLASSES)
    return CLASSES * jnp.sum(jnp.mean(chosen, axis=0) * jnp.mean(p, axis=0))


def plain_dice(params: Any, batch: Any) -> jax.Array:
    p, t = probabilities(params, batch), jax.nn.one_hot(batch["label"], CLASSES)
    size = jnp.sum(p, axis=0) + jnp.sum(t, axis=0)
    return 1 - jnp.mean((2 * jnp.sum(p * t, axis=0) + 1) / (size + 1))


LOSSES = {
    "contrastive": (contrastive, plain_contrastive),
    "load balance": (load_balance, plain_load_balance),
    "soft Dice": (dice, plain_dice),
}


def cut(batch: Any, number: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), batch)


def naive(loss: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The mean of the micro-batches' own losses and gradients."""

    def step_fn(params: Any, batch: Any) -> Any:
        def step(sums: Any, micro: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, micro)), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        sums, _ = jax.lax.scan(step, zeros, cut(batch, number))
        return jax.tree.map(lambda x: x / number, sums)

    return step_fn


def grad_cache(number: int) -> Callable[..., Any]:
    """GradCache by hand: embeddings, the loss's derivative in them, the encoders once more."""

    def step_fn(params: Any, batch: Any) -> Any:
        micros = cut(batch, number)
        embeddings = jax.lax.map(lambda micro: encode(params, micro), micros)
        flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), embeddings)
        loss, slopes = jax.value_and_grad(
            lambda pair: ja.losses.contrastive(*pair, temperature=TEMPERATURE)
        )(flat)

        def step(sums: Any, given: Any) -> tuple[Any, None]:
            micro, slope = given
            _, pull = jax.vjp(lambda p: encode(p, micro), params)
            return jax.tree.map(jnp.add, sums, pull(slope)[0]), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return loss, jax.lax.scan(step, zeros, (micros, cut(slopes, number)))[0]

    return step_fn


def distance(got: Any, want: Any) -> float:
    """The relative distance of two gradients as vectors."""
    a, b = (np.concatenate([np.ravel(g) for g in jax.tree.leaves(x[1])]) for x in (got, want))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def main() -> None:
    parser = harness.parser(__doc__, rounds=20)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--num-microbatches", type=int, default=8)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.rows, args.width = 3, 128, 64
    report = harness.Report("losses", args)
    rng = np.random.default_rng(args.seed)

    def draw(*shape: int) -> jax.Array:
        scale = shape[0] ** -0.5 if len(shape) > 1 else 1.0
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    def make_tower() -> list[jax.Array]:
        return [draw(FEATURES, args.width), draw(args.width, args.width), draw(args.width, 32)]

    params = {"a": make_tower(), "b": make_tower()}
    label = rng.integers(0, CLASSES, args.rows)
    x = rng.normal(size=(args.rows, FEATURES)) + rng.normal(size=(CLASSES, FEATURES))[label]
    y = x + 0.5 * rng.normal(size=x.shape)
    batch = {"x": jnp.float32(x), "y": jnp.float32(y), "label": jnp.asarray(label)}

    number = args.num_microbatches
    for name, (window, plain) in LOSSES.items():
        fns = {
            "full batch": jax.value_and_grad(plain),
            "jaxaccum": jax.value_and_grad(window(number)),
            "naive accumulation": naive(plain, number),
        }
        if name == "contrastive":
            blocks = contrastive(number, block_size=args.rows // number)
            fns["jaxaccum, logits in blocks"] = jax.value_and_grad(blocks)
            fns["GradCache by hand"] = grad_cache(number)
        programs = {n: harness.compile_program(f, params, batch) for n, f in fns.items()}
        sides = {n: lambda p=p: p.call(params, batch) for n, p in programs.items()}
        results = {n: jax.device_get(side()) for n, side in sides.items()}
        extra = {}
        for side, program in programs.items():
            error = distance(results[side], results["full batch"])
            if side != "naive accumulation" and error > 1e-5:
                raise SystemExit(f"losses: {side} is {error} off")
            extra[side] = {
                "temporary bytes": program.temp_bytes,
                "memory ratio": program.temp_bytes / programs["full batch"].temp_bytes,
                "gradient error": error,
            }
        report.comparison(
            f"{name}, {args.rows} rows, K={number}",
            sides,
            over={n: "full batch" for n in fns if n != "full batch"},
            rounds=args.rounds,
            extra=extra,
        )


if __name__ == "__main__":
    main()
