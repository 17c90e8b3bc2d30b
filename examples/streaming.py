"""One window over many calls: micro-batches from a loader, one optimizer step for every four.

The loader hands out ten micro-batches an epoch, so the last window is short: `ja.flush` applies
it, divided by the tokens that it really holds. Run it with `python streaming.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxaccum as ja

MICRO_BATCHES, WINDOW, EPOCHS = 10, 4, 20


def loader():
    """Ten micro-batches of 8 padded sequences; some hold four times as many tokens as others."""
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=6)
    for longest in np.resize([4, 16, 7], MICRO_BATCHES):
        x = rng.normal(size=(8, 16, 6)).astype(np.float32)
        lengths = rng.integers(1, longest + 1, size=(8, 1))
        yield {"x": x, "y": np.tanh(x @ teacher, dtype=np.float32), "mask": np.arange(16) < lengths}


def loss_fn(params, batch):
    prediction = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return ja.mean((prediction - batch["y"]) ** 2, where=batch["mask"])


optimizer = optax.chain(
    optax.clip_by_global_norm(0.5), optax.adamw(optax.cosine_decay_schedule(0.1, 60))
)
tx = ja.multi_steps(optimizer, WINDOW)
undivided = ja.accumulate(loss_fn, num_microbatches=1)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def micro_step(params, state, batch):
    sums = undivided(params, batch)
    updates, state = tx.update(sums, state, params)
    return optax.apply_updates(params, updates), state, ja.Mean(sums.loss, sums.weight)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def flush(params, state):
    updates, state = ja.flush(tx, state, params)
    return optax.apply_updates(params, updates), state


@jax.jit
def full_batch_step(params, state, batch):
    loss, grads = jax.value_and_grad(lambda p: loss_fn(p, batch).value)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def initial_params():
    return {"w": jnp.zeros(6), "b": jnp.zeros(())}


def main():
    params = initial_params()
    state = tx.init(params)
    for epoch in range(EPOCHS):
        losses = []
        for window in ja.batches.windows(loader(), WINDOW):
            for batch in window:
                params, state, loss = micro_step(params, state, batch)
                losses.append(loss)
        params, state = flush(params, state)  # the epoch's last two micro-batches
        if epoch % 5 == 0 or epoch == EPOCHS - 1:
            print(
                f"epoch {epoch:2d}  optimizer step {state.optimizer_step:2d}  "
                f"loss {ja.merge(*losses).value:.5f}"
            )

    # The check: the same training with every window as one big batch in one pass.
    expected = initial_params()
    expected_state = optimizer.init(expected)
    for _ in range(EPOCHS):
        for window in ja.batches.windows(loader(), WINDOW):
            batch = jax.tree.map(lambda *rows: np.concatenate(rows), *window)
            expected, expected_state, _ = full_batch_step(expected, expected_state, batch)

    distance = optax.tree.norm(optax.tree.sub(params, expected)) / optax.tree.norm(expected)
    print(f"relative distance of the parameters from the full-batch run's: {distance:.1e}")
    # Every step may add a few roundings of float32.
    if not distance < 4 * int(state.optimizer_step) * jnp.finfo(jnp.float32).eps:
        raise SystemExit("FAILED: the streamed training is not the full batch's")
    print("OK: the streamed training equals the full-batch run, to rounding")


if __name__ == "__main__":
    main()
