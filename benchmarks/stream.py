"""Streaming accumulation, `ja.multi_steps`, against `optax.MultiSteps`.

Whole windows of K calls are timed, with parameters and state donated on both sides: first
`update` and `apply_updates` alone on gradients that are given, then a whole jitted training step
(gradient, update, apply) of a small transformer language model on small micro-batches.

    python benchmarks/stream.py > stream.jsonl
    python benchmarks/stream.py --quick
"""

import argparse
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import language_model as lm
import numpy as np
import optax

import jaxaccum as ja

OURS, THEIRS = "jaxaccum", "optax.MultiSteps"


def transformations(
    inner: optax.GradientTransformation, num: int, *, skip: bool = False
) -> dict[str, Any]:
    """Both sides of a comparison: the same window around the same optimizer."""
    guard = {"should_skip_update_fn": optax.skip_not_finite} if skip else {}
    return {
        OURS: ja.multi_steps(inner, num, skip_nonfinite=skip),
        THEIRS: optax.MultiSteps(inner, num, **guard),
    }


def compare(
    report: harness.Report,
    title: str,
    sides: dict[str, Any],
    make_step: Callable[[Any], Callable[..., Any]],
    params: Any,
    micros: list[Any],
    *,
    rounds: int,
) -> None:
    """Times one window: a call of `make_step(tx)` for each of `micros`, all donated.

    Args:
      report: where the figures go.
      title: heading of the table.
      sides: the transformations, by name.
      make_step: from a transformation to `step(params, state, micro)`, which returns the first two.
      params: initial parameters; each side gets a copy.
      micros: what each call of the window receives.
      rounds: timed windows.
    """
    windows, extra = {}, {}
    for name, tx in sides.items():
        start = jax.tree.map(jnp.copy, params)
        held = [start, tx.init(start)]
        program = harness.compile_program(make_step(tx), *held, micros[0], donate=(0, 1))

        def window(held: list[Any] = held, program: harness.Program = program) -> Any:
            for micro in micros:
                held[:] = program.call(*held, micro)
            return held[0]

        windows[name] = window
        extra[name] = {
            "temporary bytes": program.temp_bytes,
            "compile s": program.trace_s + program.compile_s,
        }
    _check_equal({name: window() for name, window in windows.items()})
    report.comparison(title, windows, over={THEIRS: OURS}, rounds=rounds, extra=extra)


def given_gradients(tx: Any) -> Callable[..., Any]:
    """The optimizer's part of a step."""

    def step_fn(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step_fn


def training_step(tx: Any) -> Callable[..., Any]:
    """A whole step: the mean loss's gradient, `update` and `apply_updates`."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return lm.token_losses(params, batch["tokens"]).mean()

    def step_fn(params: Any, state: Any, batch: Any) -> Any:
        return given_gradients(tx)(params, state, jax.grad(loss_fn)(params, batch))

    return step_fn


def main() -> None:
    parser = harness.parser(__doc__, rounds=20)
    parser.add_argument("--every", type=int, default=16, help="K, micro-steps of a window")
    parser.add_argument("--width", type=int, default=768, help="of the six given matrices")
    parser.add_argument("--part", choices=["given", "trained"], help="only one of the two parts")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.every, args.width = 3, 4, 64
    report = harness.Report("stream", args)
    if args.part != "trained":
        _given(report, args)
    if args.part != "given":
        _trained(report, args)


def _given(report: harness.Report, args: argparse.Namespace) -> None:
    generator = np.random.default_rng(args.seed)

    def matrices() -> dict[str, jax.Array]:
        shape = (args.width, args.width)
        return {f"w{i}": jnp.asarray(generator.normal(size=shape), jnp.float32) for i in range(6)}

    params, grads = matrices(), [matrices() for _ in range(2)]
    micros = [grads[i % 2] for i in range(args.every)]
    adamw, muon = optax.adamw(1e-3), optax.contrib.muon(1e-3)
    for name, sides in {
        "AdamW": transformations(adamw, args.every),
        "AdamW, non-finite guard": transformations(adamw, args.every, skip=True),
        "Muon": transformations(muon, args.every),
    }.items():
        title = f"{name}: six {args.width}x{args.width} gradients given, K={args.every}"
        rounds = min(args.rounds, 3) if name == "Muon" else args.rounds  # a window takes seconds
        compare(report, title, sides, given_gradients, params, micros, rounds=rounds)


def _trained(report: harness.Report, args: argparse.Namespace) -> None:
    sizes = {"vocabulary": 1024, "length": 32}
    params = lm.init_params(args.seed, width=64 if args.quick else 192, layers=3, **sizes)
    micros = [lm.ragged_batch(args.seed + i, rows=1, **sizes) for i in range(args.every)]
    for name, inner in {"AdamW": optax.adamw(1e-3), "Muon": optax.contrib.muon(1e-3)}.items():
        sides = transformations(inner, args.every)
        title = f"{name}: whole training step, one row of {sizes['length']} tokens, K={args.every}"
        compare(report, title, sides, training_step, params, micros, rounds=args.rounds)


def _check_equal(results: dict[str, Any]) -> None:
    """A comparison counts only if both sides step to the same parameters."""
    for a, b in zip(*map(jax.tree.leaves, results.values()), strict=True):
        error = float(jnp.abs(a - b).max())
        if error > 1e-4:
            raise SystemExit(f"stream: the parameters differ by {error}")


if __name__ == "__main__":
    main()
