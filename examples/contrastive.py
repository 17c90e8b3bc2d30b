"""Contrastive learning on real images, exact in micro-batches: every other image is a negative.

Two encoders look at two views of each of scikit-learn's handwritten digits: the upper and the lower
half of the same image. Trained together, an upper half finds its own lower half among images that
neither encoder has seen. The loss compares every pair of a batch with every other, so it does not
split into micro-batches; `ja.losses.contrastive_fn` computes the gradient of the whole batch all
the same, with the encoders' activations of one micro-batch.

  python contrastive.py           # about a minute on two cores
  python contrastive.py --quick   # a short version
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxaccum as ja

BATCH, NUM_MICROBATCHES, HELD_OUT = 256, 8, 200


def load_halves():
    """Upper and lower halves of the images, `[images, 32]` each; the last ones are held out."""
    images = load_digits().images.astype(np.float32) / 16
    order = np.random.default_rng(0).permutation(len(images))
    images = images[order]
    halves = {
        "upper": images[:, :4].reshape(-1, 32),
        "lower": images[:, 4:].reshape(-1, 32),
    }
    train = {name: half[:-HELD_OUT] for name, half in halves.items()}
    return train, {name: half[-HELD_OUT:] for name, half in halves.items()}


def init_params(width, embedding=32):
    rng = np.random.default_rng(1)

    def layer(inputs, outputs):
        return jnp.asarray(rng.normal(size=(inputs, outputs)) * (2 / inputs) ** 0.5, jnp.float32)

    def encoder():
        return [layer(32, width), layer(width, width), layer(width, embedding)]

    return {"upper": encoder(), "lower": encoder(), "log_scale": jnp.float32(np.log(5))}


def embed(weights, x):
    for w in weights[:-1]:
        x = jax.nn.gelu(x @ w)
    x = x @ weights[-1]
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def encode(params, batch):
    return embed(params["upper"], batch["upper"]), embed(params["lower"], batch["lower"])


def temperature(params):
    return jnp.exp(-params["log_scale"])


def full_loss(params, batch):
    return ja.losses.contrastive(*encode(params, batch), temperature=temperature(params))


window_loss = ja.losses.contrastive_fn(
    encode, temperature=temperature, num_microbatches=NUM_MICROBATCHES
)


def naive_gradient(params, batch):
    """The mean of the gradients of the micro-batches' own losses."""
    grad = jax.jit(jax.grad(full_loss))
    grads = [grad(params, m) for m in ja.split(batch, num_microbatches=NUM_MICROBATCHES)]
    return jax.tree.map(lambda *gs: sum(gs) / len(gs), *grads)


def distance(a, b):
    return float(optax.tree.norm(optax.tree.sub(a, b)) / optax.tree.norm(b))


@jax.jit
def accuracy(params, batch):
    """How often an upper half is closest to its own lower half, of all that are held out."""
    a, b = encode(params, batch)
    return jnp.mean(jnp.argmax(a @ b.T, axis=1) == jnp.arange(len(a)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps, smaller encoders")
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    steps = args.steps or (60 if args.quick else 600)

    train, held_out = load_halves()
    params = init_params(64 if args.quick else 256)
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=1e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(window_loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    rng = np.random.default_rng(2)

    def draw():
        rows = rng.choice(len(train["upper"]), BATCH, replace=False)
        return {name: half[rows] for name, half in train.items()}

    start = accuracy(params, held_out)
    for number in range(1, steps + 1):
        params, state, loss = step(params, state, draw())
        if number % (steps // 5) == 0:
            print(
                f"step {number:4d}  loss {loss:.4f}  own half found first among "
                f"{HELD_OUT} unseen: {accuracy(params, held_out):.1%}"
            )

    # The claim: the window's gradient is the full batch's, the micro-batches' own is another one.
    batch = draw()
    full = jax.jit(jax.grad(full_loss))(params, batch)
    exact = distance(jax.jit(jax.grad(window_loss))(params, batch), full)
    naive = distance(naive_gradient(params, batch), full)
    print(
        f"relative distance from the full batch's gradient: window {exact:.1e}, naive {naive:.1%}"
    )
    if not exact < 1e-4:
        raise SystemExit("FAILED: the window's gradient is not the full batch's")
    if not naive > 0.05:
        raise SystemExit("FAILED: naive accumulation was expected to be off")
    if not accuracy(params, held_out) > 3 * start:
        raise SystemExit("FAILED: the encoders have not learned to find each other")
    print("OK: the micro-batched contrastive gradient equals the full batch's, to rounding")


if __name__ == "__main__":
    main()
