"""Differentially private training on real images: clipped per-example gradients, noise per window.

Each optimizer step draws every training image with probability q (Poisson sampling), so batches
vary in size: they are padded to a fixed number of rows, which the loss masks. `ja.per_example.clip`
clips each image's gradient inside a micro-batch; `ja.per_example.noise` adds the Gaussian
mechanism's noise once per window, over the expected batch size. The noise has the same scale for
every number of micro-batches, which the example checks; noise in every micro-batch would not.

  python dp_sgd.py           # half a minute on two cores
  python dp_sgd.py --quick   # a short version
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxaccum as ja

CLIP_NORM, NOISE_MULTIPLIER, EXPECTED = 1.0, 1.0, 128
CAPACITY = 224  # rows of a padded batch; more than EXPECTED + 8 standard deviations
TEST_IMAGES = 400


def load_images():
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    data = {
        "image": digits.data[order].astype(np.float32) / 16,
        "label": digits.target[order].astype(np.int32),
    }
    train = {name: rows[:-TEST_IMAGES] for name, rows in data.items()}
    return train, {name: rows[-TEST_IMAGES:] for name, rows in data.items()}


def init_params(width):
    rng = np.random.default_rng(1)
    return {
        "hidden": jnp.asarray(rng.normal(size=(64, width)) * 0.2, jnp.float32),
        "out": jnp.zeros((width, 10)),
    }


def logits_of(params, images):
    return jnp.tanh(images @ params["hidden"]) @ params["out"]


def loss_fn(params, batch):
    logits = logits_of(params, batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return ja.mean(losses, where=batch["real"])


clipped_loss = ja.per_example.clip(loss_fn, CLIP_NORM)
SCALE = {
    "noise_multiplier": NOISE_MULTIPLIER,
    "clip_norm": CLIP_NORM,
    "denominator": float(EXPECTED),
}


def poisson_sample(rng, train):
    """Every image with probability `EXPECTED / images`, padded to `CAPACITY` rows."""
    number = len(train["label"])
    rows = np.flatnonzero(rng.random(number) < EXPECTED / number)
    drawn = {name: values[rows] for name, values in train.items()}
    padded, real = ja.pad_batch(drawn, CAPACITY)
    return {**padded, "real": real}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    args = parser.parse_args()
    steps = 60 if args.quick else 400

    train, test = load_images()
    params = init_params(64)
    optimizer = optax.chain(
        ja.per_example.noise(jax.random.key(7), **SCALE), optax.sgd(1.0, momentum=0.9)
    )
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        f = ja.value_and_grad(clipped_loss, num_microbatches=7)
        # The number of images drawn is private; what the sum is divided by is not.
        _, grads = f(params, batch, denominators=float(EXPECTED))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def accuracy(params):
        return jnp.mean(jnp.argmax(logits_of(params, test["image"]), axis=1) == test["label"])

    rng = np.random.default_rng(2)
    for number in range(1, steps + 1):
        batch = poisson_sample(rng, train)
        params, state = step(params, state, batch)
        if number % (steps // 4) == 0:
            print(
                f"step {number:4d}  {batch['real'].sum()} images  accuracy {accuracy(params):.1%}"
            )

    # The claims. One: the sum of clipped gradients is that of all examples at once.
    def one(params, image, label):
        row = {"image": image[None], "label": label[None], "real": jnp.ones(1, bool)}
        return loss_fn(params, row).value

    grads = jax.vmap(jax.grad(one), (None, 0, 0))(params, batch["image"], batch["label"])
    norms = jnp.sqrt(sum(jnp.sum(g**2, axis=(1, 2)) for g in jax.tree.leaves(grads)))
    factors = jnp.minimum(1, CLIP_NORM / norms) * batch["real"]
    expected = jax.tree.map(lambda g: jnp.tensordot(factors, g, axes=1) / EXPECTED, grads)

    # Two: the noise's scale depends on nothing but the clip norm, the multiplier and EXPECTED.
    print("micro-batches   distance from the full batch   standard deviation of the noise")
    want = NOISE_MULTIPLIER * CLIP_NORM / EXPECTED
    for number in (1, 7, 28):
        f = ja.value_and_grad(clipped_loss, num_microbatches=number)
        clean = jax.jit(f)(params, batch, denominators=float(EXPECTED))[1]
        noisy = ja.per_example.add_noise(clean, jax.random.key(number), **SCALE)
        gap = optax.tree.norm(optax.tree.sub(clean, expected)) / optax.tree.norm(expected)
        draws = np.concatenate([np.ravel(n) for n in jax.tree.leaves(optax.tree.sub(noisy, clean))])
        print(f"{number:13d}   {gap:28.1e}   {draws.std():.6f}, expected {want:.6f}")
        if not gap < 1e-5:
            raise SystemExit("FAILED: the clipped gradient depends on the cut")
        if not abs(draws.std() / want - 1) < 5 / np.sqrt(2 * draws.size):
            raise SystemExit("FAILED: the noise's scale depends on the cut")
    if not accuracy(params) > 0.5:
        raise SystemExit("FAILED: the model has not learned")
    print("OK: neither the clipped gradient nor the noise's scale depends on the micro-batches")


if __name__ == "__main__":
    main()
