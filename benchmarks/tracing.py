"""What a window costs before it runs: tracing and lowering a model of many leaves.

Each side is traced and lowered with cold caches, in turns, and stands beside
`jax.value_and_grad` of the full batch (for a window), beside that with the optimizer (for a
`train_step`), or beside the optimizer alone (for a stream).
Read the processor's time: tracing uses one core.

    python benchmarks/tracing.py > tracing.jsonl
"""

import functools
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import optax

import jaxaccum as ja

ROWS, WIDTH, K = 8, 4, 4


def main() -> None:
    args = harness.parser(__doc__, rounds=5).parse_args()
    report = harness.Report("tracing", args)
    for leaves in (100,) if args.quick else (500, 2000):
        params = [jnp.full((WIDTH,), 1 + i / leaves) for i in range(leaves)]
        batch = jnp.ones((ROWS, WIDTH))
        sides = {"jax.value_and_grad": lower(full_batch, params, batch)}
        for name, options in {
            "window": {},
            "window, skip_nonfinite=True": {"skip_nonfinite": True},
            'window, skip_nonfinite="window"': {"skip_nonfinite": "window"},
        }.items():
            window = ja.value_and_grad(loss_fn, num_microbatches=K, **options)
            sides[name] = lower(window, params, batch)
        inner = optax.adamw(1e-3)
        init, step = ja.train_step(loss_fn, inner, num_microbatches=K)
        sides["full batch and optimizer"] = lower(
            functools.partial(full_step, inner), params, inner.init(params), batch
        )
        sides["train_step"] = lower(step.__wrapped__, params, init(params), batch)
        sides["optimizer"] = update(inner, params)
        sides["stream"] = update(ja.multi_steps(inner, K), params)
        over = {name: "jax.value_and_grad" for name in sides if name.startswith("window")}
        over |= {"train_step": "full batch and optimizer", "stream": "optimizer"}
        report.comparison(f"{leaves:,} leaves, K={K}", sides, over=over, rounds=args.rounds)


def loss_fn(params: list[jax.Array], batch: jax.Array) -> ja.Mean:
    x = batch
    for leaf in params:
        x = jnp.tanh(x * leaf[None, :])
    return ja.mean(x)


def full_batch(params: list[jax.Array], batch: jax.Array) -> Any:
    return jax.value_and_grad(lambda params: loss_fn(params, batch).value)(params)


def full_step(tx: Any, params: list[jax.Array], state: Any, batch: jax.Array) -> Any:
    """A step without a window."""
    loss, grads = full_batch(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def update(tx: Any, params: list[jax.Array]) -> Callable[[], Any]:
    """Tracing and lowering one `update` of a transformation."""
    return lower(tx.update, params, tx.init(params), params)


def lower(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """A call that traces and lowers `fn` anew, as a process that starts does."""

    def run(fn: Callable[..., Any] = fn) -> Any:
        jax.clear_caches()
        jax.jit(functools.partial(fn)).trace(*args).lower()
        return ()

    return run


if __name__ == "__main__":
    main()
