"""A small transformer language model in plain JAX, and ragged batches for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HEADS = 4


def init_params(seed: int, *, vocabulary: int, width: int, layers: int, length: int) -> Any:
    """Parameters in float32; the embedding is also the output matrix."""
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 4 * layers))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / jnp.sqrt(rows)

    return {
        "embedding": 0.1 * matrix(vocabulary, width),
        "position": 0.1 * matrix(length, width),
        "layers": [
            {
                "scale_1": jnp.ones(width),
                "scale_2": jnp.ones(width),
                "qkv": matrix(width, 3 * width),
                "out": matrix(width, width),
                "up": matrix(width, 4 * width),
                "down": matrix(4 * width, width),
            }
            for _ in range(layers)
        ],
    }


def token_losses(params: Any, tokens: jax.Array) -> jax.Array:
    """Cross-entropy of each next token, `[rows, length]` from `[rows, length + 1]` tokens."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    rows, length = inputs.shape
    x = params["embedding"][inputs] + params["position"][None, :length]
    causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
    for layer in params["layers"]:
        qkv = _normalize(x, layer["scale_1"]) @ layer["qkv"]
        q, k, v = jnp.split(qkv.reshape(rows, length, HEADS, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        attention = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        x += jnp.einsum("bhqk,bkhd->bqhd", attention, v).reshape(x.shape) @ layer["out"]
        x += jax.nn.gelu(_normalize(x, layer["scale_2"]) @ layer["up"]) @ layer["down"]
    logits = _normalize(x, 1.0) @ params["embedding"].T
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def _normalize(x: jax.Array, scale: Any) -> jax.Array:
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def ragged_batch(seed: int, *, rows: int, length: int, vocabulary: int) -> dict[str, jax.Array]:
    """Random tokens `[rows, length + 1]`, and a mask of between a quarter and all of a row."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(length // 4, length + 1, size=(rows, 1))
    return {
        "tokens": jnp.asarray(generator.integers(vocabulary, size=(rows, length + 1)), jnp.int32),
        "mask": jnp.asarray(np.arange(length)[None] < lengths),
    }
