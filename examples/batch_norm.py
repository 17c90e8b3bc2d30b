"""Batch normalisation under accumulation: what each choice computes, on real images.

A network with two unmodified Flax `BatchNorm` layers learns scikit-learn's digits, each batch cut
into micro-batches. Four ways to normalise are compared with the full batch in one pass:

  full batch        one pass over the whole batch,
  window axis       `ja.window_axis`: the layers see the statistics of the whole window,
  pooled            each micro-batch normalises by itself, running statistics of the whole window,
  sequential        each micro-batch normalises by itself, running statistics one after the other.

The first two are the same network: the example ends with an error if their gradients differ by
more than rounding, or if those of the others do not. All four are then trained and tested.

  python batch_norm.py
  python batch_norm.py --quick
"""

import argparse
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import jaxaccum as ja
from jaxaccum import linen as ja_linen

BATCH, MICRO_BATCHES = 256, 8
AXIS = "window"


class Net(nn.Module):
    """Two dense layers, each normalised; `axis_name` as in Flax's own `BatchNorm`."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, axis_name=self.axis_name
        )
        for width in (64, 32):
            x = nn.relu(norm()(nn.Dense(width, use_bias=False)(x)))
        return nn.Dense(10)(x)


def loss_fn(variables, batch, model):
    """The mean cross-entropy, and the new running statistics."""
    images, labels = batch
    logits, updates = model.apply(variables, images, train=True, mutable=["batch_stats"])
    return ja.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels)), updates


def whole_window(variables, batch, model):
    """As `loss_fn`; the statistics are the window's, so that of any micro-batch is the result."""
    loss, updates = loss_fn(variables, batch, model)
    return loss, ja.Last(updates["batch_stats"])


def gradients(state, batch):
    """The gradient of one batch, each way."""
    params, stats = state.params, state.collections["batch_stats"]

    def by_window(params, batch):
        return whole_window({"params": params, "batch_stats": stats}, batch, Net(AXIS))

    def by_micro_batch(params, batch, *, model_state):
        loss, updates = loss_fn({"params": params, **model_state}, batch, Net())
        return loss, updates

    def full(params):
        return loss_fn({"params": params, "batch_stats": stats}, batch, Net())[0].value

    window = ja.window_axis.value_and_grad(by_window, num_microbatches=MICRO_BATCHES, has_aux=True)
    single = ja.value_and_grad(by_micro_batch, num_microbatches=MICRO_BATCHES, model_state="pooled")
    return {
        "full batch": jax.jit(jax.grad(full))(params),
        "window axis": jax.jit(window)(params, batch)[1],
        "each by itself": jax.jit(single)(params, batch, model_state={"batch_stats": stats})[1],
    }


def distance(a, b):
    """The largest deviation of any leaf, relative to that leaf's largest entry."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))) for x, y in leaves)


def train_steps():
    """A training step for each way."""
    plain = functools.partial(loss_fn, model=Net())

    def window_step(state, batch):
        def by_window(params, batch):
            variables = {"params": params, **state.collections}
            return whole_window(variables, batch, Net(AXIS))

        f = ja.window_axis.value_and_grad(by_window, num_microbatches=MICRO_BATCHES, has_aux=True)
        (_, stats), grads = f(state.params, batch)
        return state.apply_gradients(grads=grads, collections={"batch_stats": stats})

    def make(policy, number):
        step = ja_linen.train_step(plain, num_microbatches=number, model_state=policy)
        return lambda state, batch: step(state, batch)[0]

    return {
        "full batch": make("sequential", 1),
        "window axis": jax.jit(window_step),
        "pooled": make("pooled", MICRO_BATCHES),
        "sequential": make("sequential", MICRO_BATCHES),
    }


def create_state(images):
    variables = Net().init(jax.random.key(0), images[:2], train=False)
    return ja_linen.TrainState.create(
        apply_fn=Net().apply, variables=variables, tx=optax.adam(3e-3)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one epoch instead of ten")
    epochs = 1 if parser.parse_args().quick else 10

    digits = load_digits()
    images = jnp.asarray(digits.data / 16, jnp.float32)
    labels = jnp.asarray(digits.target, jnp.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    training, test = order[:1536], order[1536:]

    state = create_state(images)
    first = training[:BATCH]
    grads = gradients(state, (images[first], labels[first]))
    exact = distance(grads["window axis"], grads["full batch"])
    other = distance(grads["each by itself"], grads["full batch"])
    print(f"gradient, window axis:      {exact:.1e} from the full batch")
    print(f"gradient, each by itself:   {other:.1e} from the full batch")

    for name, step in train_steps().items():
        state, rng = create_state(images), np.random.default_rng(1)
        bar = tqdm(range(epochs), desc=f"{name:12}", unit="epoch")
        for _ in bar:
            for rows in np.split(rng.permutation(training), len(training) // BATCH):
                state = step(state, (images[rows], labels[rows]))
            logits = Net().apply(state.variables, images[test], train=False)
            right = float(jnp.mean(jnp.argmax(logits, -1) == labels[test]))
            bar.set_postfix(test=f"{right:.1%}", steps=int(state.step))

    if exact > 1e-4 or other < 1e-2:
        raise SystemExit("FAILED: the window's gradient is not that of the full batch")
    print("OK: over the window's axis, batch normalisation is that of the full batch, to rounding")


if __name__ == "__main__":
    main()
