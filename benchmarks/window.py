"""One window inside a jitted step, `ja.value_and_grad`, against what one would write instead.

A small transformer language model with ragged token masks. Time and compiled temporary memory
against a hand-written `lax.scan`, `optax.microbatch` and the full batch in one pass; the cost of
the non-finite guard; an uneven cut; memory, compile time and program size against the number of
micro-batches K; and a window of one micro-batch against `jax.value_and_grad`.

    python benchmarks/window.py > window.jsonl
    python benchmarks/window.py --quick
"""

from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import language_model as lm
import optax

import jaxaccum as ja

ROWS = 16


def mean_loss(params: Any, batch: Any) -> ja.Mean:
    """The loss as jaxaccum takes it."""
    return ja.mean(lm.token_losses(params, batch["tokens"]), where=batch["mask"])


def summed_loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The same loss as a sum and a count."""
    losses = lm.token_losses(params, batch["tokens"])
    return jnp.where(batch["mask"], losses, 0.0).sum(), batch["mask"].sum()


def by_library(num: int, **options: Any) -> Callable[..., Any]:
    return ja.value_and_grad(mean_loss, num_microbatches=num, **options)


def by_hand(num: int) -> Callable[..., Any]:
    """Accumulation in float32 as a careful author writes it for one model."""

    def window_fn(params: Any, batch: Any) -> Any:
        def step(sums: Any, micro: Any) -> tuple[Any, None]:
            (total, count), grads = jax.value_and_grad(summed_loss, has_aux=True)(params, micro)
            new = (total, count, jax.tree.map(lambda g: g.astype(jnp.float32), grads))
            return jax.tree.map(jnp.add, sums, new), None

        micros = jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), batch)
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        (total, count, grads), _ = jax.lax.scan(step, (jnp.float32(0), jnp.int32(0), zeros), micros)
        return total / count, jax.tree.map(lambda g: g / count, grads)

    return window_fn


def by_hand_padded(num: int) -> Callable[..., Any]:
    """The same for a batch that does not divide: masked rows fill it up."""

    def window_fn(params: Any, batch: Any) -> Any:
        missing = -batch["mask"].shape[0] % num
        padded = jax.tree.map(lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)), batch)
        return by_hand(num)(params, padded)

    return window_fn


def by_optax(num: int) -> Callable[..., Any]:
    """`optax.microbatch` over the same sums, divided once."""

    def window_fn(params: Any, batch: Any) -> Any:
        summed = optax.microbatch(
            jax.value_and_grad(summed_loss, has_aux=True),
            argnums=1,
            microbatch_size=batch["mask"].shape[0] // num,
        )
        (total, count), grads = summed(params, batch)
        return total / count, jax.tree.map(lambda g: g / count, grads)

    return window_fn


def full_batch(params: Any, batch: Any) -> Any:
    """All rows in one pass."""

    def loss_fn(params: Any) -> jax.Array:
        total, count = summed_loss(params, batch)
        return total / count

    return jax.value_and_grad(loss_fn)(params)


def main() -> None:
    parser = harness.parser(__doc__, rounds=40)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=1024)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.width, args.layers, args.length, args.vocabulary = 3, 32, 1, 16, 64
    report = harness.Report("window", args)
    sizes = {"vocabulary": args.vocabulary, "length": args.length}
    params = lm.init_params(args.seed, width=args.width, layers=args.layers, **sizes)

    def batch_of(rows: int) -> Any:
        return lm.ragged_batch(args.seed, rows=rows, **sizes)

    def compare(title: str, fns: dict[str, Callable[..., Any]], over: dict[str, str]) -> None:
        batch = batch_of(ROWS)
        programs = {n: harness.compile_program(f, params, batch) for n, f in fns.items()}
        sides = {n: lambda p=p: p.call(params, batch) for n, p in programs.items()}
        _check_equal(sides)
        memory = {}
        for name, program in programs.items():
            base = programs.get(over.get(name, ""))
            memory[name] = {
                "temporary bytes": program.temp_bytes,
                "memory ratio": program.temp_bytes / base.temp_bytes if base else None,
                "compile s": program.trace_s + program.compile_s,
                "loops": program.loops,
            }
        report.comparison(title, sides, over=over, rounds=args.rounds, extra=memory)

    for num in (4, 8):
        compare(
            f"Window of {ROWS} rows, K={num}",
            {
                "jaxaccum": by_library(num),
                "jaxaccum, skip_nonfinite": by_library(num, skip_nonfinite=True),
                "hand-written scan": by_hand(num),
                "optax.microbatch": by_optax(num),
                "full batch": full_batch,
            },
            {
                "jaxaccum": "hand-written scan",
                "jaxaccum, skip_nonfinite": "jaxaccum",
                "optax.microbatch": "hand-written scan",
                "full batch": "hand-written scan",
            },
        )
    compare(
        f"Uneven cut: {ROWS} rows, K=7 (two micro-batches of 3 rows, five of 2)",
        {
            "jaxaccum": by_library(7),
            "hand-written scan, padded to 21 rows": by_hand_padded(7),
            "full batch": full_batch,
        },
        {
            "jaxaccum": "hand-written scan, padded to 21 rows",
            "full batch": "hand-written scan, padded to 21 rows",
        },
    )
    compare(
        f"K=1: {ROWS} rows in one micro-batch",
        {"jaxaccum": by_library(1), "jax.value_and_grad": full_batch},
        {"jaxaccum": "jax.value_and_grad"},
    )

    growth = []
    for num in (2, 8, 64):
        for name, make in (("jaxaccum", by_library), ("hand-written scan", by_hand)):
            runs = [
                harness.compile_program(make(num), params, batch_of(2 * num))
                for _ in range(1 if args.quick else 5)
            ]
            growth.append(
                {
                    "side": name,
                    "K": num,
                    "temporary bytes": runs[0].temp_bytes,
                    "trace s": harness.quartiles([r.trace_s for r in runs]),
                    "compile s": harness.quartiles([r.compile_s for r in runs]),
                    "jaxpr equations": runs[0].equations,
                }
            )
    for row in growth:
        first = next(r for r in growth if r["side"] == row["side"])
        row["memory ratio to K=2"] = row["temporary bytes"] / first["temporary bytes"]
    report.table("Against K, micro-batches of 2 rows", growth)


def _check_equal(sides: dict[str, Callable[[], Any]]) -> None:
    """A comparison counts only if all its sides compute the same."""
    results = {name: jax.device_get(fn()) for name, fn in sides.items()}
    _, expected = results.popitem()
    scale = max(abs(g).max() for g in jax.tree.leaves(expected))
    for name, result in results.items():
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            if abs(a - b).max() > 1e-5 * scale:
                raise SystemExit(f"window: {name} differs by {abs(a - b).max()}")


if __name__ == "__main__":
    main()
