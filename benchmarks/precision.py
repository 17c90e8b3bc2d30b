"""How exact the sum of many gradients is, by how it is carried.

The root mean square error of the window's mean gradient, relative to that of the exact mean in
float64, for windows of K = 32 to 4096 micro-batches with bfloat16 and with float32 gradients. The
figures do not depend on the machine's speed.

    python benchmarks/precision.py > precision.jsonl
    python benchmarks/precision.py --quick
"""

from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxaccum as ja


def by_library(accumulator: ja.accumulators.Accumulator) -> Callable[[Any], Any]:
    """The mean that `ja.finalize` returns: gradient `k` is row `k` of `grads`."""

    def mean_fn(grads: jax.Array) -> jax.Array:
        f = ja.accumulate(
            lambda w, rows: ja.Mean((w * rows).sum(dtype=jnp.float32), rows.shape[0]),
            microbatch_size=1,
            accumulator=accumulator,
        )
        return ja.finalize(f(jnp.zeros_like(grads[0]), grads)).grads

    return mean_fn


def naive_sum(dtype: Any) -> Callable[[Any], Any]:
    """A sum carried in `dtype`, as where the accumulator has the gradient's dtype."""

    def mean_fn(grads: jax.Array) -> jax.Array:
        def step(total: jax.Array, grad: jax.Array) -> tuple[jax.Array, None]:
            return total + grad.astype(dtype), None

        total, _ = jax.lax.scan(step, jnp.zeros(grads.shape[1], dtype), grads)
        return total.astype(jnp.float32) / grads.shape[0]

    return mean_fn


def running_mean(*, handed_over: bool) -> Callable[[Any], Any]:
    """The mean of `optax.MultiSteps`: what it hands to the optimizer, or what it carries.

    A window that is one longer than the gradients still carries the mean at their end.
    """

    def mean_fn(grads: jax.Array) -> jax.Array:
        every = len(grads) + (0 if handed_over else 1)
        tx = optax.MultiSteps(optax.identity(), every)

        def step(state: Any, grad: jax.Array) -> tuple[Any, jax.Array]:
            updates, state = tx.update(grad, state)
            return state, updates

        state, updates = jax.lax.scan(step, tx.init(grads[0]), grads)
        return updates[-1] if handed_over else state.acc_grads

    return mean_fn


METHODS = {
    "float32 (default)": by_library(ja.accumulators.plain()),
    "compensated": by_library(ja.accumulators.compensated()),
    "naive bfloat16": naive_sum(jnp.bfloat16),
    "MultiSteps, carried": running_mean(handed_over=False),
    "MultiSteps, handed over": running_mean(handed_over=True),
}


def main() -> None:
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--size", type=int, default=2048, help="gradient entries")
    parser.add_argument(
        "--mean", type=float, default=0.5, help="mean of the gradients; deviation 1"
    )
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.size = 2, 128
    report = harness.Report("precision", args)
    programs = {name: jax.jit(fn) for name, fn in METHODS.items()}
    for dtype in (jnp.bfloat16, jnp.float32):
        rows = []
        for num in (32, 256) if args.quick else (32, 128, 512, 1024, 4096):
            errors: dict[str, list[float]] = {name: [] for name in METHODS}
            for number in range(args.rounds):
                generator = np.random.default_rng([args.seed, number, num])
                grads = jnp.asarray(generator.normal(args.mean, 1, (num, args.size)), dtype)
                exact = np.asarray(grads, np.float64).mean(axis=0)
                for name, program in programs.items():
                    error = np.asarray(program(grads), np.float64) - exact
                    errors[name].append(float(_size(error) / _size(exact)))
            rows.append({"K": num, **{n: harness.quartiles(e) for n, e in errors.items()}})
        title = f"Relative error of the mean of K {jnp.dtype(dtype).name} gradients"
        report.table(title, rows)


def _size(x: np.ndarray) -> np.floating:
    return np.sqrt(np.mean(x * x))


if __name__ == "__main__":
    main()
