"""The smallest use: ragged sequences, four micro-batches, one AdamW step on the exact gradient.

Run it with `python minimal_optax.py`; it takes a few seconds.
"""

import jax
import jax.numpy as jnp
import optax

import jaxaccum as ja


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    error = (hidden @ params["out"])[..., 0] - batch["y"]
    return ja.mean(error**2, where=batch["mask"])  # a sum and a count, not yet divided


optimizer = optax.adamw(3e-3)


@jax.jit
def train_step(params, state, batch):
    loss, grads = ja.value_and_grad(loss_fn, num_microbatches=4)(params, batch)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def main():
    # 64 sequences of 1 to 16 real tokens, so no two micro-batches weigh the same.
    k_in, k_out, k_x, k_length = jax.random.split(jax.random.key(0), 4)
    params = {
        "in": jax.random.normal(k_in, (8, 32)) / 8**0.5,
        "out": jax.random.normal(k_out, (32, 1)) / 32**0.5,
    }
    x = jax.random.normal(k_x, (64, 16, 8))
    lengths = jax.random.randint(k_length, (64, 1), 1, 17)
    batch = {"x": x, "y": jnp.sin(x.sum(-1)), "mask": jnp.arange(16) < lengths}

    # The check: the window's gradient is that of the full batch.
    _, grads = ja.value_and_grad(loss_fn, num_microbatches=4)(params, batch)
    expected = jax.grad(lambda p: loss_fn(p, batch).value)(params)

    state = optimizer.init(params)
    for step in range(301):
        params, state, loss = train_step(params, state, batch)
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss:.4f}")

    distance = optax.tree.norm(optax.tree.sub(grads, expected)) / optax.tree.norm(expected)
    print(f"relative distance of the window's gradient from the full batch's: {distance:.1e}")
    if not distance < 16 * jnp.finfo(jnp.float32).eps:
        raise SystemExit("FAILED: the window's gradient is not the full batch's")
    print("OK: the window's gradient equals the full batch's, to rounding")


if __name__ == "__main__":
    main()
