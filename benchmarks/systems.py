"""Whole optimizer steps with accumulation, as different systems describe theirs.

Each system's way is written anew from its description, in plain JAX, around one small transformer
language model with ragged token masks and AdamW: a window of K micro-batches and one update.

- K passes, one update: forward and backward passes whose gradients are thrown away but for the
  last; what any accumulation has to do at least.
- hand-written scan: token sums, divided once, in float32.
- MaxText: token sums over a scan in the parameters' dtype, divided by all tokens.
- Levanter: the mean over micro-batches of their means, in a loop.
- optax.microbatch: token sums over its loop, divided once.
- optax.MultiSteps, Tunix 0.1.7: K jitted calls, each with its own mean gradient.
- jaxaccum: `ja.train_step`; and `ja.multi_steps` in K jitted calls.

"Gradient error" is that of one window's gradient against the full batch's in float64, relative;
"optimizer runs" counts the executions of the inner optimizer in one window. Temporaries are those
of the program that takes over parameters and state; what is timed copies them.

    python benchmarks/systems.py > systems.jsonl
    python benchmarks/systems.py --quick
"""

from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import language_model as lm
import numpy as np
import optax

import jaxaccum as ja

FLOOR, BASE = "K passes, one update", "hand-written scan"
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def mean_loss(params: Any, batch: Any) -> ja.Mean:
    return ja.mean(lm.token_losses(params, batch["tokens"]), where=batch["mask"])


def summed(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    mean = mean_loss(params, batch)
    return mean.total, mean.weight


def value(params: Any, batch: Any) -> jax.Array:
    return mean_loss(params, batch).value


def cut(batch: Any, num: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), batch)


def passes(params: Any, batch: Any, num: int) -> Any:
    def body(_: Any, micro: Any) -> tuple[Any, None]:
        return jax.grad(lambda p: summed(p, micro)[0])(params), None

    return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), cut(batch, num))[0]


def token_sums(params: Any, batch: Any, num: int, dtype: Any = None) -> Any:
    def body(sums: Any, micro: Any) -> tuple[Any, None]:
        (_, count), grads = jax.value_and_grad(summed, has_aux=True)(params, micro)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, (count, grads)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype or p.dtype), params)
    (count, grads), _ = jax.lax.scan(body, (jnp.int32(0), zeros), cut(batch, num))
    return jax.tree.map(lambda g: g / count, grads)


def mean_of_means(params: Any, batch: Any, num: int) -> Any:
    def body(sums: Any, micro: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, jax.grad(value)(params, micro)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.tree.map(lambda g: g / num, jax.lax.scan(body, zeros, cut(batch, num))[0])


def by_microbatch(params: Any, batch: Any, num: int) -> Any:
    size = batch["mask"].shape[0] // num
    fn = jax.value_and_grad(summed, has_aux=True)
    (_, count), grads = optax.microbatch(fn, argnums=1, microbatch_size=size)(params, batch)
    return jax.tree.map(lambda g: g / count, grads)


def in_one_step(gradient_fn: Callable[..., Any]) -> Callable[..., tuple[Any, Step]]:
    """A system that makes a window and its update in one program."""

    def make(optimizer: Any, num: int) -> tuple[Any, Step]:
        def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(gradient_fn(params, batch, num), state, params)
            return optax.apply_updates(params, updates), state

        return optimizer.init, jax.jit(step)

    return make


def by_train_step(optimizer: Any, num: int) -> tuple[Any, Step]:
    init, whole = ja.train_step(mean_loss, optimizer, num_microbatches=num, donate=False)
    return init, jax.jit(lambda params, state, batch: whole(params, state, batch)[:2])


def in_calls(wrap: Callable[..., Any], gradient_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A system whose window is made of K calls of a jitted function."""

    def make(optimizer: Any, num: int) -> tuple[Any, Step]:
        tx = wrap(optimizer, num)

        @jax.jit
        def micro_step(params: Any, state: Any, micro: Any) -> tuple[Any, Any]:
            updates, state = tx.update(gradient_fn(params, micro), state, params)
            return optax.apply_updates(params, updates), state

        def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
            for number in range(num):
                micro = jax.tree.map(lambda x, n=number: x[n], cut(batch, num))
                params, state = micro_step(params, state, micro)
            return params, state

        return tx.init, step

    return make


SYSTEMS: dict[str, Callable[..., tuple[Any, Step]]] = {
    FLOOR: in_one_step(passes),
    BASE: in_one_step(lambda *args: token_sums(*args, dtype=jnp.float32)),
    "MaxText": in_one_step(token_sums),
    "Levanter": in_one_step(mean_of_means),
    "optax.microbatch": in_one_step(by_microbatch),
    "optax.MultiSteps, Tunix 0.1.7": in_calls(optax.MultiSteps, jax.grad(value)),
    "jaxaccum, step": by_train_step,
    "jaxaccum, stream": in_calls(ja.multi_steps, ja.accumulate(mean_loss, num_microbatches=1)),
}


def optimizer_runs(make: Callable[..., Any], params: Any, batch: Any, num: int) -> int:
    calls: list[int] = []

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        jax.debug.callback(lambda: calls.append(1))
        return updates, state

    init, step = make(optax.GradientTransformation(lambda params: (), update_fn), num)
    jax.block_until_ready(step(params, init(params), batch))
    jax.effects_barrier()
    return len(calls)


def gradient_error(make: Callable[..., Any], params: Any, batch: Any, num: int) -> float:
    init, step = make(optax.sgd(1.0), num)
    after, _ = step(params, init(params), batch)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), params)
        exact = jax.tree.map(np.asarray, jax.grad(value)(wide, batch))
    got = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), params, after)
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True))
    distance = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs))
    return float(distance / np.sqrt(sum(np.sum(b**2) for _, b in pairs)))


def main() -> None:
    args = harness.parser(__doc__, rounds=15).parse_args()
    sizes = {"vocabulary": 1024, "length": 64}
    shape, numbers = {"width": 192, "layers": 3}, (4, 16)
    if args.quick:
        args.rounds, numbers = 4, (4,)
        sizes, shape = {"vocabulary": 64, "length": 16}, {"width": 32, "layers": 1}
    report = harness.Report("systems", args)
    params = lm.init_params(args.seed, **shape, **sizes)
    batch = lm.ragged_batch(args.seed, rows=32, **sizes)
    for num in numbers:
        sides, extra = {}, {}
        for name, make in SYSTEMS.items():
            init, step = make(optax.adamw(1e-3), num)
            state = init(params)
            row: dict[str, Any] = {"temporary bytes": None, "compile s": None}
            if hasattr(step, "lower"):
                program = harness.compile_program(step, params, state, batch, donate=(0, 1))
                row["temporary bytes"] = program.temp_bytes
                row["compile s"] = program.trace_s + program.compile_s
            row["optimizer runs"] = optimizer_runs(make, params, batch, num)
            wrong = None if name == FLOOR else gradient_error(make, params, batch, num)
            row["gradient error"] = None if wrong is None else f"{wrong:.1e}"
            sides[name] = lambda f=step, s=state: f(params, s, batch)
            extra[name] = row
        report.comparison(
            f"One optimizer step, 32 rows, K={num}",
            sides,
            over={name: FLOOR for name in SYSTEMS if name != FLOOR},
            rounds=args.rounds,
            extra=extra,
        )


if __name__ == "__main__":
    main()
