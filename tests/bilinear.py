"""The bilinear problem over devices, `error = (x @ up) @ down - y`, which a model axis can cut.

Its integer data is small enough that every float32 sum is exact; `answer` is its float64 NumPy
formula. `build` takes it to a route of `routes.py` on a setup of `meshes.py`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from meshes import Setup
from oracles import cut_rows, take, wide
from routes import ROUTES, Outcome

import jaxaccum as ja

ROWS, TOKENS, FEATURES, HIDDEN = 64, 4, 4, 8
KEPT_TOKENS = 64

CUTS = {"even": {"num_microbatches": 4}, "uneven": {"microbatch_size": 3}}


# The problem


def problem(seed, *, integer=False, rows=ROWS, features=FEATURES, hidden=HIDDEN):
    """`(params, batch)` with NumPy leaves; real data makes every gradient a sum of positives."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        x = rng.integers(-2, 3, shape) if integer else rng.uniform(0.5, 1.5, shape)
        return x.astype(np.float32)

    batch = {
        "x": draw(rows, TOKENS, features),
        "y": -draw(rows, TOKENS),
        "mask": np.ones((rows, TOKENS), bool),
    }
    return {"up": draw(features, hidden), "down": draw(hidden)}, batch


def error(params, batch, *, out_sharding=None):
    """The signed error of every token, `[rows, TOKENS]`."""
    hidden = batch["x"] @ params["up"]
    out = jnp.einsum("bth,h->bt", hidden, params["down"], out_sharding=out_sharding)
    return out - batch["y"]


def token_loss(params, batch, **how):
    """One term: the mean squared error of the kept tokens."""
    e = error(params, batch, **how)
    return ja.mean(e * e, where=batch["mask"])


def terms_loss(params, batch, **how):
    """Three terms with denominators of their own."""
    e = error(params, batch, **how)
    kept = batch["mask"].any(axis=1)
    return {
        "token": ja.mean(e * e, where=batch["mask"]),
        "sequence": ja.Mean(jnp.sum(jnp.where(batch["mask"], e, 0)), jnp.sum(kept)),
        "penalty": ja.Mean(0.5 * jnp.sum(params["down"] * params["down"]), 1.0),
    }


def answer(loss_fn, params, batch, rows):
    """`(loss, grads, weight)` of the given rows in one pass, in float64 NumPy."""
    params, batch = wide(params), wide(take(batch, rows))
    up, down, x, mask = params["up"], params["down"], batch["x"], batch["mask"]
    e = np.einsum("btf,fh,h->bt", x, up, down) - batch["y"]
    total, slope, weight = np.sum(mask * e * e), 2 * mask * e, mask.sum()
    loss, slope, penalty = total / weight, slope / weight, 0
    if loss_fn is terms_loss:
        sequences = mask.any(axis=1).sum()
        loss += np.sum(mask * e) / sequences + 0.5 * np.sum(down * down)
        slope, penalty = slope + mask / sequences, down
    grads = {
        "up": np.einsum("bt,btf,h->fh", slope, x, down),
        "down": np.einsum("bt,btf,fh->h", slope, x, up) + penalty,
    }
    return loss, grads, weight


def loss_on(setup, loss_fn):
    """`loss_fn` with what an Explicit model axis has to be told."""
    if setup.tensor_parallel and setup.types[1] == "E":
        return functools.partial(loss_fn, out_sharding=P(None, None))
    return loss_fn


SCENARIOS = ["even", "ragged", "empty device", "skipped"]


def scenario(name, run, *, integer=False):
    """`(params, batch, kept)`: the problem and the rows that the window must count.

    The kept tokens are a power of two, so that a correct mean of integers is exact.
    """
    params, batch = problem(3, integer=integer)
    rng = np.random.default_rng(5)
    local = ROWS // run.setup.number
    kept = np.arange(ROWS)
    if name == "even":
        return params, batch, kept
    if name == "empty device":
        kept = np.setdiff1d(kept, np.arange(local, 2 * local))
    if name == "skipped":
        bad = ROWS // 2 + 1
        batch["x"][bad, 2] = np.nan
        kept = np.concatenate([rows for rows in run.micro_batches() if bad not in rows])
    places = [(row, token) for row in np.sort(kept) for token in range(TOKENS)]
    batch["mask"][kept] = False
    if name == "empty device":
        batch["mask"][:] = False
    for place in rng.permutation(places)[:KEPT_TOKENS]:
        batch["mask"][tuple(place)] = True
    return params, batch, np.sort(kept)


# On a route


class Run(NamedTuple):
    """A compiled route on one setup.

    Attributes:
      call: `call(params, batch)` to an `Outcome`, from NumPy arrays.
      setup: the setup.
      cut: how each part of a device's rows is cut.
      parts: into how many windows or calls a device's rows are divided before.
    """

    call: Callable[..., Outcome]
    setup: Setup
    cut: dict[str, int]
    parts: int

    def micro_batches(self):
        """The row numbers of every micro-batch on every device."""
        part = ROWS // self.setup.number // self.parts
        starts = range(0, ROWS, part)
        return [start + rows for start in starts for rows in cut_rows(part, **self.cut)]


@functools.cache
def build(route, setup, loss_fn=token_loss, cut="even", *, skip=False):
    """The `Run` of a route; compiled once for all tests that ask for the same."""
    chosen = ROUTES[route]
    options = {**CUTS[cut], "skip_nonfinite": skip}
    call = chosen.make(setup, loss_on(setup, loss_fn), options, several_terms=loss_fn is terms_loss)
    return Run(call, setup, CUTS[cut], chosen.parts)
