"""Trains a small causal transformer on ragged text, then compares three ways to make one step.

The text is Python's own: every docstring of the standard library's modules, and every short module
whole, as documents of 2 to some thousand bytes. Rows are padded (or, with `--packed`, filled), so
the micro-batches of a window hold very different numbers of tokens.

The second part trains three more times, from the same start on the same batches:

  full batch     the whole batch in one forward and backward pass,
  window         `ja.value_and_grad` over micro-batches,
  mean of means  the mean of the micro-batches' mean gradients, with `optax.MultiSteps`,

draws their losses, and exits with an error if the window strays from the full batch by more than
rounding explains. What rounding explains is measured as well: the full batch trains a second time
with the rows of each batch in another order, which is the same mean in exact arithmetic.

  python train_lm.py              # about two minutes of CPU time
  python train_lm.py --quick      # a short version
  python train_lm.py --packed     # packed rows: the micro-batches weigh nearly the same
"""

import argparse
import ast
import functools
import itertools
import pathlib
import sysconfig
import time
from collections.abc import Callable, Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import jaxaccum as ja
from jaxaccum.batches import PackedBatch

BOS = 256  # begins and ends every document; the other tokens are bytes
VOCABULARY = 257

FULL_BATCH = "full batch, one pass"
ROUNDING = "full batch, rows reordered"  # the same but for rounding
WINDOW = "jaxaccum window"
MEAN_OF_MEANS = "mean of means"
BOUND = 10.0  # how many times the reordered run's distance the window may be away; see `report`


# --- Text: documents, rows, batches ---------------------------------------------------------------


def read_documents(max_module_bytes: int = 4000) -> list[str]:
    """Docstrings and short modules of the standard library, without repeats, in a fixed order."""
    documents = []
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_bytes()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                documents.append(ast.get_docstring(node))
        if len(source) <= max_module_bytes:
            documents.append(source.decode())
    return [document for document in dict.fromkeys(documents) if document]


def tokenize(document: str, length: int) -> list[np.ndarray]:
    """A document's tokens in pieces of at most `length`.

    Each piece begins with the last token of the one before, so every token is a target once.
    """
    tokens = np.array([BOS, *document.encode(), BOS], np.int32)
    return [tokens[i : i + length] for i in range(0, len(tokens) - 1, length - 1)]


def pad(pieces: list[np.ndarray], length: int) -> PackedBatch:
    """One piece a row, as from `ja.batches.pack`: segment 1, then padding of segment 0."""
    sizes = np.array([len(piece) for piece in pieces])
    real = np.arange(length) < sizes[:, None]
    tokens = np.zeros((len(pieces), length), np.int32)
    tokens[real] = np.concatenate(pieces)
    return PackedBatch(tokens, real.astype(np.int32), np.arange(length, dtype=np.int32) * real)


def make_rows(documents: list[str], length: int, *, packed: bool) -> PackedBatch:
    pieces = [piece for document in documents for piece in tokenize(document, length)]
    return ja.batches.pack(pieces, length) if packed else pad(pieces, length)


def select(rows: PackedBatch, index: np.ndarray) -> PackedBatch:
    return jax.tree.map(lambda leaf: leaf[index], rows)


def shuffled_batches(rows: PackedBatch, size: int, *, seed: int) -> Iterator[PackedBatch]:
    """Batches of `size` rows without end, each epoch in a new order."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(rows.tokens))
        for start in range(0, len(order) - size + 1, size):
            yield select(rows, order[start : start + size])


# --- Model and loss -------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a feed-forward layer."""

    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        width = x.shape[-1]
        dense = functools.partial(nn.DenseGeneral, use_bias=False)
        qkv = dense((3, self.num_heads, width // self.num_heads), name="qkv")(nn.RMSNorm()(x))
        query, key, value = jnp.moveaxis(qkv, -3, 0)
        attended = jax.nn.dot_product_attention(query, key, value, mask=mask)
        x = x + dense(width, axis=(-2, -1), name="attention_out")(attended)
        hidden = nn.gelu(dense(4 * width, name="up")(nn.RMSNorm()(x)))
        return x + dense(width, name="down")(hidden)


class Transformer(nn.Module):
    """A causal language model whose attention stays inside a segment; the head is tied."""

    width: int
    num_layers: int
    num_heads: int
    max_length: int

    @nn.compact
    def __call__(
        self, tokens: jax.Array, segment_ids: jax.Array, positions: jax.Array
    ) -> jax.Array:
        embed = functools.partial(
            nn.Embed,
            features=self.width,
            embedding_init=nn.initializers.normal(self.width**-0.5),  # logits of unit scale
        )
        embedding = embed(VOCABULARY, name="tokens")
        position = embed(self.max_length, name="positions")
        x = embedding(tokens) + position(positions)
        same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
        mask = (same_segment & jnp.tri(tokens.shape[1], dtype=bool)[None])[:, None]
        for _ in range(self.num_layers):
            x = Block(self.num_heads)(x, mask)
        return embedding.attend(nn.RMSNorm()(x))


def make_loss_fn(model: Transformer) -> Callable[..., ja.Mean]:
    def loss_fn(params, batch: PackedBatch) -> ja.Mean:
        inputs = jax.tree.map(lambda leaf: leaf[:, :-1], batch)
        logits = model.apply(params, *inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens[:, 1:])
        return ja.mean(losses, where=batch.target_mask())

    return loss_fn


def make_optimizer(peak: float, num_steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        0.1 * peak, peak, max(1, num_steps // 10), decay_steps=num_steps, end_value=0.1 * peak
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01)
    )


# --- Part one: train ------------------------------------------------------------------------------


def train(args, loss_fn, params, batches, validation_batches):
    """Trains with `ja.train_step`, shows losses as it goes, and returns the parameters."""
    optimizer = make_optimizer(args.learning_rate, args.steps)
    init, step = ja.train_step(loss_fn, optimizer, num_microbatches=args.num_microbatches)
    evaluate = jax.jit(loss_fn)

    def validation_loss(params) -> float:
        # The batches' means are merged, not averaged: every token counts once.
        means = [evaluate(params, batch) for batch in validation_batches]
        return float(functools.reduce(ja.merge, means).value)

    params, state = jax.tree.map(jnp.copy, params), init(params)  # the step takes both over
    with tqdm(total=args.steps, unit="step", dynamic_ncols=True) as bar:
        for number in range(1, args.steps + 1):
            params, state, info = step(params, state, next(batches))
            bar.update()
            if number == 1:  # the clock starts after the step that compiled
                tokens, start = int(info.tokens_seen), time.perf_counter()
            elif number % args.log_every == 0:
                rate = (int(info.tokens_seen) - tokens) / (time.perf_counter() - start)
                bar.set_postfix_str(f"loss {info.loss:.3f}, {rate:,.0f} tokens/s")
            if number % args.eval_every == 0 or number == args.steps:
                loss, pause = float(info.loss), time.perf_counter()
                bar.write(
                    f"step {number:4d}  train loss {loss:.3f}  "
                    f"validation loss {validation_loss(params):.3f}"
                )
                start += time.perf_counter() - pause
    print(f"{int(info.tokens_seen):,} tokens in {int(info.optimizer_step)} optimizer steps")
    return params


def greedy_sample(model: Transformer, params, prompt: str, *, length: int) -> str:
    """Continues `prompt` with the most likely token, up to `length` tokens or the next BOS."""
    start = np.array([BOS, *prompt.encode()], np.int32)
    tokens = jnp.zeros((1, length), jnp.int32).at[0, : len(start)].set(start)
    positions = jnp.arange(length)[None]

    @jax.jit
    def complete(params, tokens):
        def extend(index, tokens):
            logits = model.apply(params, tokens, jnp.ones_like(tokens), positions)
            return tokens.at[0, index].set(logits[0, index - 1].argmax())

        return jax.lax.fori_loop(len(start), length, extend, tokens)

    completed = np.asarray(complete(params, tokens))[0, 1:].tolist()
    end = completed.index(BOS) if BOS in completed else len(completed)
    return bytes(completed[:end]).decode(errors="replace")


# --- Part two: compare ----------------------------------------------------------------------------


def make_full_batch_step(loss_fn, optimizer):
    """One optimizer step from one pass over the whole batch."""

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, batch).value)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return optimizer.init, step


def make_window_step(loss_fn, optimizer, num_microbatches: int):
    """One optimizer step from one window of jaxaccum."""
    value_and_grad = ja.value_and_grad(loss_fn, num_microbatches=num_microbatches)

    @jax.jit
    def step(params, state, batch):
        loss, grads = value_and_grad(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return optimizer.init, step


def make_mean_of_means_step(loss_fn, optimizer, num_microbatches: int):
    """One optimizer step from the mean of the micro-batches' means, with `optax.MultiSteps`."""
    multi_steps = optax.MultiSteps(optimizer, every_k_schedule=num_microbatches)
    split = jax.jit(functools.partial(ja.split, num_microbatches=num_microbatches))

    @jax.jit
    def micro_step(params, state, batch):
        def mean_loss(params):
            loss = loss_fn(params, batch)
            return loss.value, loss

        grads, loss = jax.grad(mean_loss, has_aux=True)(params)
        updates, state = multi_steps.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def step(params, state, batch):
        losses = []
        for micro_batch in split(batch):
            params, state, loss = micro_step(params, state, micro_batch)
            losses.append(loss)
        # The reported loss is the mean over all tokens here too: the curves differ only in what
        # the parameters became.
        return params, state, functools.reduce(ja.merge, losses).value

    return multi_steps.init, step


def relative_distance(params, reference) -> float:
    return float(optax.tree.norm(optax.tree.sub(params, reference)) / optax.tree.norm(reference))


def compare(args, loss_fn, params, batches: list[PackedBatch]):
    """Trains each way from `params` on the same batches.

    Returns:
      `(losses, distances)`: for each way its losses `[steps]`, and the relative distance of its
      final parameters from the full batch's.
    """
    optimizer = make_optimizer(args.learning_rate, len(batches))
    full_batch = make_full_batch_step(loss_fn, optimizer)
    reordered = [select(batch, np.arange(args.batch_size)[::-1]) for batch in batches]
    ways = {
        FULL_BATCH: (full_batch, batches),
        ROUNDING: (full_batch, reordered),
        WINDOW: (make_window_step(loss_fn, optimizer, args.num_microbatches), batches),
        MEAN_OF_MEANS: (
            make_mean_of_means_step(loss_fn, optimizer, args.num_microbatches),
            batches,
        ),
    }
    losses, final = {}, {}
    with tqdm(total=len(ways) * len(batches), unit="step", dynamic_ncols=True) as bar:
        for name, ((init, step), inputs) in ways.items():
            bar.set_description(name)
            current, state, steps = params, init(params), []
            for batch in inputs:
                current, state, loss = step(current, state, batch)
                steps.append(float(loss))
                bar.update()
            losses[name], final[name] = np.array(steps), current
    distances = {name: relative_distance(p, final[FULL_BATCH]) for name, p in final.items()}
    return losses, distances


def draw(losses: dict[str, np.ndarray], title: str, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    styles = {
        FULL_BATCH: {"color": "#b8c4d0", "linewidth": 6, "solid_capstyle": "round"},
        ROUNDING: {"color": "#8a94a0", "linewidth": 1.6, "linestyle": ":"},
        WINDOW: {"color": "#0b6e99", "linewidth": 1.8},
        MEAN_OF_MEANS: {"color": "#d1495b", "linewidth": 1.8, "linestyle": "--"},
    }
    steps = np.arange(1, len(losses[FULL_BATCH]) + 1)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 7.5), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    figure.suptitle(title, fontsize=12)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    for name in (FULL_BATCH, WINDOW, MEAN_OF_MEANS):
        top.plot(steps, losses[name], label=name, **styles[name])
    top.set_ylabel("loss, nats per token")
    top.legend(frameon=False)
    for name in (MEAN_OF_MEANS, WINDOW, ROUNDING):
        gap = np.abs(losses[name] - losses[FULL_BATCH])
        bottom.plot(steps, gap, label=name, **styles[name])
    bottom.set_yscale("symlog", linthresh=1e-7)  # logarithmic, and shows where the gap is zero
    bottom.set_ylim(0, None)
    bottom.set_ylabel("|loss − full batch's loss|")
    bottom.set_xlabel("optimizer step")
    bottom.legend(frameon=False)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def report(losses: dict[str, np.ndarray], distances: dict[str, float]) -> bool:
    """Prints how far each way is from the full batch; whether the window is within rounding."""
    gaps = {name: float(np.abs(x - losses[FULL_BATCH]).max()) for name, x in losses.items()}
    print(f"{'distance from the full batch':30s}{'max |loss difference|':>24s}{'parameters':>14s}")
    for name in (ROUNDING, WINDOW, MEAN_OF_MEANS):
        print(f"{name:30s}{gaps[name]:24.1e}{distances[name]:14.1e}")
    # Training amplifies roundings, by an amount that depends on the model, the steps and the
    # machine, so no fixed number is right; the reordered run went through the same amplification.
    # The window rounds in other places (once more for each micro-batch): it was measured 0.5 to 2
    # times as far away as the reordered run, hence the factor. The mean of means, on padded
    # rows, was more than 5,000 times as far.
    # The floor, one rounding of a loss and of a parameter, is for runs too short to differ.
    eps = float(jnp.finfo(jnp.float32).eps)
    loss_bound = BOUND * max(gaps[ROUNDING], eps * losses[FULL_BATCH].max())
    distance_bound = BOUND * max(distances[ROUNDING], eps)
    return gaps[WINDOW] <= loss_bound and distances[WINDOW] <= distance_bound


# --- Command line ---------------------------------------------------------------------------------


DEFAULT = {"steps": 600, "compare_steps": 60, "sequence_length": 128, "width": 96, "layers": 2}
QUICK = {"steps": 60, "compare_steps": 20, "sequence_length": 96, "width": 48, "layers": 1}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small model, few steps; under forty seconds")
    add("--packed", action="store_true", help="pack documents into full rows instead of padding")
    add("--steps", type=int, help="optimizer steps of the training")
    add("--compare-steps", type=int, help="optimizer steps of each compared training")
    add("--batch-size", type=int, default=16, help="rows of a batch")
    add("--num-microbatches", type=int, default=8, help="micro-batches of a window")
    add("--sequence-length", type=int, help="tokens of a row")
    add("--width", type=int, help="width of the model")
    add("--layers", type=int, help="transformer blocks")
    add("--heads", type=int, default=4, help="attention heads")
    add("--learning-rate", type=float, default=4e-3, help="peak learning rate of AdamW")
    add("--log-every", type=int, default=10, help="steps between updates of the progress bar")
    add("--eval-every", type=int, default=100, help="steps between validation losses")
    add("--prompt", default="Return the ", help="beginning of the sample")
    add("--seed", type=int, default=0, help="seed of parameters and data order")
    add("--out", type=pathlib.Path, default=pathlib.Path("train_lm.png"), help="the picture")
    args = parser.parse_args()
    sizes = QUICK if args.quick else DEFAULT
    for name, value in sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> None:
    args = parse_args()
    documents = read_documents()
    np.random.default_rng(0).shuffle(documents)
    held_out = len(documents) // 20
    # A row holds one token more than the model reads: the last one is only a target.
    make = functools.partial(make_rows, length=args.sequence_length + 1, packed=args.packed)
    train_rows, validation_rows = make(documents[held_out:]), make(documents[:held_out])
    sizes = [len(document.encode()) for document in documents]
    print(
        f"{len(documents):,} documents of {min(sizes)} to {max(sizes):,} bytes, in "
        f"{len(train_rows.tokens):,} {'packed' if args.packed else 'padded'} rows for training"
    )

    model = Transformer(args.width, args.layers, args.heads, args.sequence_length)
    loss_fn = make_loss_fn(model)
    inputs = jax.tree.map(lambda leaf: leaf[:1, :-1], train_rows)
    params = model.init(jax.random.key(args.seed), *inputs)
    print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters")

    # Part one.
    validation_batches = list(
        itertools.islice(shuffled_batches(validation_rows, args.batch_size, seed=0), 4)
    )
    batches = shuffled_batches(train_rows, args.batch_size, seed=args.seed)
    trained = train(args, loss_fn, params, batches, validation_batches)
    sample = greedy_sample(model, trained, args.prompt, length=min(args.sequence_length, 96))
    print(f"greedy sample: {sample!r}\n")

    # Part two.
    compared = shuffled_batches(train_rows, args.batch_size, seed=args.seed + 1)
    compared = list(itertools.islice(compared, args.compare_steps))
    counts = [
        int(micro_batch.target_mask().sum())
        for batch in compared
        for micro_batch in ja.split(batch, num_microbatches=args.num_microbatches)
    ]
    print(f"the compared windows' micro-batches hold {min(counts):,} to {max(counts):,} tokens")
    losses, distances = compare(args, loss_fn, params, compared)
    title = (
        f"Three ways to make one optimizer step of {args.num_microbatches} micro-batches\n"
        f"({min(counts):,} to {max(counts):,} tokens in a micro-batch)"
    )
    draw(losses, title, args.out)
    ok = report(losses, distances)
    print(f"picture: {args.out}")
    if not ok:
        raise SystemExit("FAILED: the window is further from the full batch than rounding explains")
    print("OK: the window trains like the full batch, to rounding")


if __name__ == "__main__":
    main()
