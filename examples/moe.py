"""A small mixture-of-experts language model whose load is balanced over the whole window.

The text is that of `train_lm.py`, Python's own documentation. Two layers send each byte to one of
four experts; the load-balancing loss asks that the experts be used evenly. It is a product of two
means over tokens, so it does not split into micro-batches: averaged over them it punishes a
micro-batch for holding text of one kind. `ja.microbatch` gives its gradient for the whole window,
together with that of the token loss.

  python moe.py           # about a minute on two cores
  python moe.py --quick   # a short version
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from train_lm import VOCABULARY, make_rows, read_documents, select, shuffled_batches

import jaxaccum as ja

LAYERS, EXPERTS, CONTEXT, LENGTH = 2, 4, 8, 64
ROWS, NUM_MICROBATCHES, BALANCE = 48, 12, 0.1


def init_params(width):
    rng = np.random.default_rng(0)

    def draw(*shape):
        scale = shape[-2] ** -0.5
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    layers = [
        {
            # A router that starts out with favourites, as routers do.
            "router": draw(width, EXPERTS),
            "bias": jnp.asarray(np.linspace(3, 0, EXPERTS), jnp.float32),
            "up": draw(EXPERTS, width, 2 * width),
            "down": draw(EXPERTS, 2 * width, width),
        }
        for _ in range(LAYERS)
    ]
    return {
        "embed": draw(VOCABULARY, width // 4),
        "mix": draw(CONTEXT * (width // 4), width),
        "layers": layers,
        "out": draw(width, VOCABULARY),
    }


def normalise(x):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def expert_layer(layer, x):
    """Adds to `x` what the most probable expert makes of it, times its probability."""
    inputs = normalise(x)
    probabilities = jax.nn.softmax(inputs @ layer["router"] + layer["bias"][None, None])
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, axis=-1), EXPERTS)
    hidden = jax.nn.gelu(jnp.einsum("btw,ewh->bteh", inputs, layer["up"]))
    outputs = jnp.einsum("bteh,ehw->btew", hidden, layer["down"])
    return x + jnp.einsum("btew,bte->btw", outputs, chosen * probabilities), probabilities


def model(params, tokens):
    """Logits for the next byte from the last `CONTEXT`, and the routers' probabilities."""
    embedded = params["embed"][tokens]
    length = tokens.shape[1]
    padded = jnp.pad(embedded, [(0, 0), (CONTEXT - 1, 0), (0, 0)])
    last = [padded[:, k : k + length] for k in range(CONTEXT)]
    x = jnp.concatenate(last, axis=-1) @ params["mix"]
    routes = []
    for layer in params["layers"]:
        x, probabilities = expert_layer(layer, x)
        routes.append(probabilities)
    return normalise(x) @ params["out"], routes


def statistics(params, batch):
    """What one micro-batch adds to the window: its token loss, and where its tokens went."""
    logits, routes = model(params, batch.tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens[:, 1:])
    where = batch.target_mask()
    routing = [ja.losses.routing(route, where=where) for route in routes]
    return {"tokens": ja.mean(losses, where=where), "routing": routing}


def total(combined):
    balance = sum(ja.losses.load_balance(r) for r in combined["routing"]) / LAYERS
    return combined["tokens"] + BALANCE * balance, (combined, balance)


def window_loss(params, batch):
    return total(ja.microbatch(statistics, num_microbatches=NUM_MICROBATCHES)(params, batch))


def full_loss(params, batch):
    """The same in one pass, written out."""
    logits, routes = model(params, batch.tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens[:, 1:])
    where = batch.target_mask()
    number = jnp.sum(where)
    balance = 0.0
    for route in routes:
        chosen = jax.nn.one_hot(jnp.argmax(route, axis=-1), EXPERTS)
        fraction, probability = (
            jnp.sum(jnp.where(where[..., None], x, 0), axis=(0, 1)) / number
            for x in (chosen, route)
        )
        balance += EXPERTS * jnp.sum(fraction * probability) / LAYERS
    return jnp.sum(jnp.where(where, losses, 0)) / number + BALANCE * balance, balance


def naive_balance_gradient(params, batch):
    """The mean of the gradients of the micro-batches' own load-balancing losses."""
    grad = jax.jit(jax.grad(lambda params, micro: full_loss(params, micro)[1]))
    grads = [grad(params, m) for m in ja.split(batch, num_microbatches=NUM_MICROBATCHES)]
    return jax.tree.map(lambda *gs: sum(gs) / len(gs), *grads)


def distance(a, b):
    return float(optax.tree.norm(optax.tree.sub(a, b)) / optax.tree.norm(b))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps, a narrower model")
    args = parser.parse_args()
    steps, width = (40, 32) if args.quick else (300, 64)

    rows = make_rows(read_documents(), LENGTH, packed=False)
    batches = shuffled_batches(rows, ROWS, seed=1)
    params = init_params(width)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(5e-3, steps))
    )
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        (_, aux), grads = jax.value_and_grad(window_loss, has_aux=True)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, aux

    history = []
    for number in range(1, steps + 1):
        params, state, (combined, balance) = step(params, state, next(batches))
        history.append((float(combined["tokens"]), float(balance)))
        if number == 1 or number % (steps // 4) == 0:
            shares = ", ".join(f"{share:.0%}" for share in combined["routing"][0].fraction)
            print(
                f"step {number:4d}  token loss {combined['tokens']:.3f}  balance {balance:.3f}  "
                f"first layer's experts: {shares}"
            )

    # The claim, on a window whose micro-batches hold rows of different kinds and lengths.
    lengths = rows.segment_ids.sum(axis=1)
    batch = select(rows, np.argsort(lengths, kind="stable")[:: len(lengths) // ROWS][:ROWS])
    batch = jax.tree.map(lambda x: x.reshape(NUM_MICROBATCHES, -1, LENGTH), batch)
    batch = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(ROWS, LENGTH), batch)
    full = jax.jit(jax.grad(lambda p: full_loss(p, batch)[0]))(params)
    exact = distance(jax.jit(jax.grad(lambda p: window_loss(p, batch)[0]))(params), full)
    balance_only = jax.jit(jax.grad(lambda p: full_loss(p, batch)[1]))(params)
    naive = distance(naive_balance_gradient(params, batch), balance_only)
    print(
        f"relative distance from the full batch's gradient: window {exact:.1e}; "
        f"of the balance alone, averaged over micro-batches: {naive:.1%}"
    )
    if not exact < 1e-4:
        raise SystemExit("FAILED: the window's gradient is not the full batch's")
    if not naive > 0.02:
        raise SystemExit("FAILED: naive accumulation was expected to be off")
    (first_loss, first_balance), (last_loss, last_balance) = history[0], history[-1]
    if not (last_loss < 0.8 * first_loss and last_balance < 1.3 < first_balance):
        raise SystemExit("FAILED: the model has learned neither bytes nor balance")
    print("OK: the load is balanced over the window, with the full batch's gradient, to rounding")


if __name__ == "__main__":
    main()
