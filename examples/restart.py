"""A run that may be killed at any moment and ends with the same parameters, bit for bit.

Every third micro-batch a checkpoint is written, mostly in the middle of a window of four. It holds
the parameters, the state of the stream with its open window, the random key, and the loader's
position. Run it with `python restart.py`: it trains once without interruption and once through
three interruptions, and compares. With `--checkpoints FOLDER` it trains in that folder, and goes on
from the last complete checkpoint there, so kill it and start it again as often as you like.
"""

import argparse
import functools
import hashlib
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxaccum as ja
from jaxaccum.orbax import Checkpoints, Run

WINDOW, SAVE_EVERY = 4, 3


def batch_at(position):
    """The loader: the micro-batch at a position, the same whenever it is asked for."""
    rng = np.random.default_rng([7, position])
    x = rng.normal(size=(8, 16)).astype(np.float32)
    return x, np.sin(x.sum(axis=1)), rng.random(8) < 0.8


def loss_fn(params, batch, *, key):
    x, y, real = batch
    hidden = jnp.tanh(x @ params["in"]) * jax.random.bernoulli(key, 0.9, (32,)) / 0.9
    return ja.mean((hidden @ params["out"] - y) ** 2, where=real)


tx = ja.multi_steps(
    optax.adamw(1e-2), WINDOW, accumulator=ja.accumulators.compensated(), skip_nonfinite=True
)
undivided = ja.accumulate(loss_fn, num_microbatches=1)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def micro_step(params, state, batch, key):
    key, used = jax.random.split(key)
    sums = undivided(params, batch, key=used)
    updates, state = tx.update(sums, state, params)
    return optax.apply_updates(params, updates), state, key


def fresh():
    rng = np.random.default_rng(0)
    params = {
        "in": jnp.asarray(rng.normal(size=(16, 32)) / 4, jnp.float32),
        "out": jnp.asarray(rng.normal(size=32) / 6, jnp.float32),
    }
    return Run(params, tx.init(params), jax.random.key(0), micro_batches=0)


def train(folder, *, until, delay=0.0):
    """Trains to the micro-batch `until`, from the last checkpoint in `folder` if there is one."""
    with Checkpoints(folder) as checkpoints:
        run = fresh()
        if checkpoints.latest is not None:
            run = checkpoints.restore(run)
        print(f"begins at micro-batch {run.micro_batches}", flush=True)
        params, state, key, position, _ = run
        while position < until:
            params, state, key = micro_step(params, state, batch_at(position), key)
            position += 1
            if position == run.micro_batches + 1:
                jax.block_until_ready(params)
                print("at work", flush=True)  # everything is compiled
            if position % SAVE_EVERY == 0:
                checkpoints.save(Run(params, state, key, position))
            time.sleep(delay)
    return Run(params, state, key, position)


def digest(run):
    """One number for every bit of the run."""
    leaves = jax.tree.leaves(run._replace(key=jax.random.key_data(run.key)))
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", help="train in this folder, from its last checkpoint on")
    parser.add_argument("--micro-batches", type=int, default=600)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds after each micro-batch")
    parser.add_argument("--quick", action="store_true", help="60 micro-batches")
    options = parser.parse_args()
    number = 60 if options.quick else options.micro_batches
    if options.checkpoints:
        run = train(options.checkpoints, until=number, delay=options.delay)
        print(f"ends at micro-batch {run.micro_batches}, digest {digest(run)}", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        whole = train(f"{folder}/whole", until=number)
        for stop in (number // 5, number // 2 + 1, number - 3, number):
            parts = train(f"{folder}/parts", until=stop)
    print(f"{int(whole.state.optimizer_step)} optimizer steps, digests {digest(whole)} and "
          f"{digest(parts)}")  # fmt: skip
    if digest(whole) != digest(parts):
        sys.exit("FAILED: the interrupted run is another one")
    print("OK: the interrupted run ends with the same bits")


if __name__ == "__main__":
    main()
