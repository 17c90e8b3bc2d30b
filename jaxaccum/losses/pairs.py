"""The contrastive loss of pairs of embeddings, with the whole window as negatives."""

from collections.abc import Callable
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp

from jaxaccum.combine.microbatch import microbatch
from jaxaccum.core import checks, dtypes
from jaxaccum.core.mean import Mean, mean
from jaxaccum.core.reducers import Concat
from jaxaccum.window.batch import checked_argnums
from jaxaccum.window.options import MapCall, MicrobatchOptions
from jaxaccum.window.protocols import CombinedFn
from jaxaccum.window.signatures import NOTHING, call_signature, factory, signed, taken


def contrastive(
    a: Any,
    b: Any,
    *,
    temperature: Any = 1.0,
    where: Any = None,
    block_size: int | None = None,
) -> jax.Array:
    """The symmetric contrastive loss (InfoNCE) of pairs of embeddings.

    `logits = a @ b.T / temperature`; the mean over the pairs `i` of `(logsumexp_j(logits[i, j]) +
    logsumexp_j(logits[j, i])) / 2 - logits[i, i]`: every other row is a negative, in both
    directions. It is a function of the whole batch; see `contrastive_fn` for micro-batches.

    Args:
      a: embeddings `[B, D]`, usually of unit length.
      b: the embeddings of their partners, `[B, D]`.
      temperature: a positive number or scalar array, which may be differentiated.
      where: boolean `[B]`; pairs that it drops, such as padding, are neither pairs nor negatives,
        and have a gradient of exactly zero, also where they hold nan.
      block_size: compares so many rows at a time with all others, so that the logits in memory are
        `[block_size, B]` and not `[B, B]`. Costs more than twice the products of the logits.

    Returns:
      A scalar in float32 or wider; nan where `where` drops all pairs.

    Raises:
      ValueError: a shape does not fit, or `block_size` is less than 1.
      TypeError: `where` is not boolean, or `block_size` is not an integer.

    References:
      Aaron van den Oord, Yazhe Li, Oriol Vinyals, "Representation Learning with Contrastive
      Predictive Coding", 2018. Alec Radford and others, "Learning Transferable Visual Models From
      Natural Language Supervision", 2021 (both directions).

    Example:
      >>> print(f"{contrastive(jnp.eye(2), jnp.eye(2)):.4f}")
      0.3133
    """
    a, b = _embeddings("a", a), _embeddings("b", b)
    if a.shape != b.shape:
        raise ValueError(
            f"contrastive: `a` and `b` must hold the two sides of the same pairs, got "
            f"{checks.describe(a)} and {checks.describe(b)}."
        )
    kept = None
    if where is not None:
        kept = checks.mask("contrastive", "where", where, a.shape[:1])
        # Dropped at the source: a zero times a nan in a product's derivative would be a nan.
        a, b = (jnp.where(kept[:, None], x, jnp.zeros_like(x)) for x in (a, b))
    dtype = dtypes.promote(a, b, jnp.float32)
    temperature = jnp.asarray(temperature, dtype)
    if block_size is not None:
        block_size = checks.integer("contrastive", "block_size", block_size)
        return (
            _direction(a, b, temperature, kept, block_size)
            + _direction(b, a, temperature, kept, block_size)
        ) / 2
    logits = jnp.matmul(a, b.T, preferred_element_type=dtype) / temperature
    pairs = jnp.diagonal(logits)
    if kept is not None:  # a pair that is dropped sees itself alone, so that it stays finite
        seen = kept[None, :] & kept[:, None] | jnp.eye(len(a), dtype=bool)
        logits = jnp.where(seen, logits, -jnp.inf)
    both = jax.nn.logsumexp(logits, axis=1) + jax.nn.logsumexp(logits, axis=0)
    return mean(both / 2 - pairs, where=kept).value


def _direction(
    queries: jax.Array, keys: jax.Array, temperature: jax.Array, kept: Any, block_size: int
) -> jax.Array:
    """The mean of `logsumexp_j(logits[i, j]) - logits[i, i]`, block by block of queries."""

    def block_fn(whole: Any, block: Any) -> Mean:
        keys, temperature, kept = whole
        logits = jnp.matmul(block["query"], keys.T, preferred_element_type=temperature.dtype)
        logits = logits / temperature
        own = block["row"][:, None] == jnp.arange(len(keys))[None, :]
        pairs = jnp.sum(jnp.where(own, logits, 0), axis=1)
        logits = jnp.where(kept[None, :] | own, logits, -jnp.inf)
        return mean(jax.nn.logsumexp(logits, axis=1) - pairs, where=block["kept"])

    kept = jnp.ones(len(keys), bool) if kept is None else kept
    blocks = {"query": queries, "row": jnp.arange(len(queries)), "kept": kept}
    blocked = microbatch(block_fn, microbatch_size=block_size, argnums=(0, 1))
    return blocked((keys, temperature, kept), blocks)


class ContrastiveOptions(MicrobatchOptions, total=False):
    """The options of `contrastive_fn` beside the cut."""

    temperature: Any
    block_size: int | None


@overload
def contrastive_fn(
    encode_fn: Callable[..., Any], *, num_microbatches: int, **options: Unpack[ContrastiveOptions]
) -> CombinedFn: ...


@overload
def contrastive_fn(
    encode_fn: Callable[..., Any], *, microbatch_size: int, **options: Unpack[ContrastiveOptions]
) -> CombinedFn: ...


@factory("losses.contrastive_fn", ContrastiveOptions, MapCall)
def contrastive_fn(
    encode_fn: Callable[..., Any],
    *,
    temperature: Any = 1.0,
    block_size: int | None = None,
    **options: Any,
) -> CombinedFn:
    """The contrastive loss of two encoders over a batch that is cut into micro-batches.

    `contrastive(*encode_fn(params, batch, *args))` of the whole batch, with the encoders'
    activations of one micro-batch: the embeddings are gathered over the window (and over the
    devices), and the backward pass runs the encoders again with the loss's derivative in each
    embedding. Two forwards, one backward.

    Args:
      encode_fn: `encode_fn(params, batch, *args)` on one micro-batch; returns `(a, b)`, embeddings
        `[rows, D]`, or `(a, b, where)`.
      temperature: a number, or a function of `params` where it is learned, such as
        `lambda params: jnp.exp(-params["log_scale"])`.
      block_size: rows of the logits in memory at a time; see `contrastive`.
      **options: the keywords of `ja.microbatch`: `num_microbatches` or `microbatch_size`,
        `batch_argnums` where `encode_fn` takes its batch in several arguments,
        `axis_name` or `spmd_axis_name` for negatives from all devices.

    Returns:
      `loss(params, batch, *args, key=None, num_real=None)`, a scalar for `jax.grad`. With
      `axis_name` it is the loss over all devices, and its gradient must not be reduced again.
      `num_real` drops the pairs of the micro-batches that do not run.

    Raises:
      TypeError: as `ja.microbatch`, or `encode_fn` returns something else.
      ValueError: as `ja.microbatch`.

    References:
      Luyu Gao, Yunyi Zhang, Jiawei Han, Jamie Callan, "Scaling Deep Contrastive Learning Batch
      Size under Memory Limited Setup", 2021.

    Example:
      >>> def encode(params, batch):
      ...     return batch["x"] * params, batch["y"] * params
      >>> batch = {"x": jnp.eye(4), "y": jnp.eye(4)}
      >>> for number in (1, 3):
      ...     loss = contrastive_fn(encode, num_microbatches=number)
      ...     print(f"{jax.grad(loss)(jnp.float32(1), batch):.4f}")
      -1.0493
      -1.0493
    """
    if not callable(encode_fn):
        raise TypeError(
            f"contrastive_fn: `encode_fn` must be a function, got {checks.describe(encode_fn)}."
        )

    cut = checked_argnums(
        "contrastive_fn", encode_fn, options.get("batch_argnums"), name="encode_fn"
    )

    def pairs_fn(params: Any, batch: Any, *args: Any, **named: Any) -> Any:
        out = encode_fn(params, batch, *args, **named)
        if not (isinstance(out, tuple) and len(out) in (2, 3)):
            raise TypeError(
                "contrastive_fn: `encode_fn` must return `(a, b)` or `(a, b, where)`, got "
                f"{checks.describe(out)}."
            )
        rows = jnp.shape(out[0])[:1]
        where = jnp.ones(rows, bool)
        if len(out) == 3:
            where = checks.mask("contrastive_fn", "where", out[2], rows)
        return Concat((out[0], out[1])), Concat(where)

    # What does not run is filled with zeros, so that its `where` is false.
    combined_fn = microbatch(pairs_fn, **options)

    @signed(call_signature(MapCall))
    def contrastive_loss_fn(
        params: Any, batch: Any = NOTHING, *args: Any, **named: Any
    ) -> jax.Array:
        taken("contrastive_fn", (params, batch, *args), named, MapCall, cut)
        (a, b), where = combined_fn(params, batch, *args, **named)
        scale = temperature(params) if callable(temperature) else temperature
        return contrastive(a, b, temperature=scale, where=where, block_size=block_size)

    return contrastive_loss_fn


def _embeddings(name: str, x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"contrastive: `{name}` must be real embeddings `[B, D]`, got {checks.describe(x)}."
        )
    return x
