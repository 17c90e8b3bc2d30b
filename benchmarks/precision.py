"""How exact the sum of many gradients is, by how it is carried.

The root mean square error of the window's mean gradient, relative to that of the exact mean in
float64, for windows of K = 32 to 4096 micro-batches with bfloat16 and with float32 gradients; the
bytes that each way carries for a parameter, counted on its state. The figures do not depend on the
machine's speed.

    python benchmarks/precision.py > precision.jsonl
    python benchmarks/precision.py --quick
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxaccum as ja


class Way(NamedTuple):
    """One way to carry a sum.

    Attributes:
      mean_fn: from the gradients `[K, size]` to their mean.
      held_fn: from one parameter to what is carried for it, for the memory.
      law: the relative error of K micro-batches.
      reduction: what devices exchange for a parameter, once per window, in bytes and dtype.
    """

    mean_fn: Callable[[Any], Any]
    held_fn: Callable[[Any], Any]
    law: str
    reduction: str


def by_library(accumulator: ja.accumulators.Accumulator, law: str, reduction: str) -> Way:
    """The mean that `ja.finalize` returns: gradient `k` is row `k` of `grads`."""

    def mean_fn(grads: jax.Array) -> jax.Array:
        f = ja.accumulate(
            lambda w, rows: ja.Mean((w * rows).sum(dtype=jnp.float32), rows.shape[0]),
            microbatch_size=1,
            accumulator=accumulator,
        )
        key = {"key": jax.random.key(0)} if accumulator.needs_key else {}
        return ja.finalize(f(jnp.zeros_like(grads[0]), grads, **key)).grads

    def held_fn(param: jax.Array) -> Any:
        return ja.multi_steps(optax.identity(), 2, accumulator=accumulator).init(param).grad_carry

    return Way(mean_fn, held_fn, law, reduction)


def naive_sum(dtype: Any, law: str) -> Way:
    """A sum carried in `dtype`, as where the accumulator has the gradient's dtype."""

    def mean_fn(grads: jax.Array) -> jax.Array:
        def step(total: jax.Array, grad: jax.Array) -> tuple[jax.Array, None]:
            return total + grad.astype(dtype), None

        total, _ = jax.lax.scan(step, jnp.zeros(grads.shape[1], dtype), grads)
        return total.astype(jnp.float32) / grads.shape[0]

    return Way(mean_fn, lambda param: param.astype(dtype), law, "2, bfloat16")


def by_optax_microbatch(law: str) -> Way:
    """`optax.microbatch`, which sums in the gradient's dtype."""

    def mean_fn(grads: jax.Array) -> jax.Array:
        def grad_fn(w: jax.Array, rows: jax.Array) -> jax.Array:
            return jax.grad(lambda w: (w * rows).sum(dtype=jnp.float32))(w)

        summed = optax.microbatching.microbatch(grad_fn, argnums=1, microbatch_size=1)
        total = summed(jnp.zeros_like(grads[0]), grads)
        return total.astype(jnp.float32) / grads.shape[0]

    return Way(mean_fn, lambda param: param, law, "as the gradient")


def running_mean(law: str, *, handed_over: bool) -> Way:
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

    def held_fn(param: jax.Array) -> Any:
        return optax.MultiSteps(optax.identity(), 2).init(param).acc_grads

    return Way(mean_fn, held_fn, law, "the gradient, in every micro-step")


WAYS = {
    "float32 (default)": by_library(ja.accumulators.plain(), "K u32, about √K u32", "4, float32"),
    "compensated": by_library(ja.accumulators.compensated(), "u32, for every K", "8, float32 pair"),
    "chunked (32)": by_library(ja.accumulators.chunked(), "32 u16, for every K", "4, float32"),
    "stochastic": by_library(ja.accumulators.stochastic(), "about √K u16, unbiased", "4, float32"),
    "naive bfloat16": naive_sum(jnp.bfloat16, "K u16; stops growing at K = 256"),
    "optax.microbatch": by_optax_microbatch("as naive, in the gradient's dtype"),
    "MultiSteps, carried": running_mean("K u32", handed_over=False),
    "MultiSteps, handed over": running_mean("one u of the gradient's dtype more", handed_over=True),
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
    report.table(
        "What each way carries; u32 = 2^-24 is the rounding of float32, u16 = 2^-9 of bfloat16",
        [
            {
                "sum": name,
                **{f"bytes, {d} gradients": _bytes(way, d) for d in ("bfloat16", "float32")},
                "relative error": way.law,
                "reduced per parameter": way.reduction,
            }
            for name, way in WAYS.items()
        ],
    )
    programs = {name: jax.jit(way.mean_fn) for name, way in WAYS.items()}
    for dtype in (jnp.bfloat16, jnp.float32):
        rows = []
        for num in (32, 256) if args.quick else (32, 128, 512, 2048, 4096):
            errors: dict[str, list[float]] = {name: [] for name in WAYS}
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


def _bytes(way: Way, dtype: str) -> float:
    """Bytes carried for one parameter."""
    param = jnp.zeros(1 << 16, dtype)
    held = sum(x.nbytes for x in jax.tree.leaves(way.held_fn(param)))
    return round(held / param.size, 2)


def _size(x: np.ndarray) -> np.floating:
    return np.sqrt(np.mean(x * x))


if __name__ == "__main__":
    main()
