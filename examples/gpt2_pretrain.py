"""Pre-trains a GPT-2 on packed documents, with the number of tokens of a step given.

The text is Python's own: the modules of the standard library. Byte-pair encoding is trained on
them, `grain` streams and packs the documents, and each checkpoint holds its position: kill the run
and start it again with the same command. Layers are scanned and rematerialised, parameters are
float32, and the model computes in bfloat16.

  python gpt2_pretrain.py           # some ten minutes on two cores
  python gpt2_pretrain.py --quick   # a short version
  python gpt2_pretrain.py --model 124M --tokens-per-step 524288 --sequence-length 1024 \
      --sequences-per-microbatch 16 --tokens 10e9 --checkpoints RUN     # what it is written for
  python gpt2_pretrain.py --compile cpu    # the memory of the line above; or v5e, where libtpu is
"""

import argparse
import functools
import pathlib
import sysconfig
import tempfile
import time

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import ByteLevelBPETokenizer
from tqdm import tqdm

import jaxaccum as ja
from jaxaccum.orbax import Checkpoints, Run

MODELS = {  # width, layers, heads, vocabulary
    "tiny": (64, 2, 4, 512),
    "124M": (768, 12, 12, 50_304),
}


# --- Documents to packed rows ---------------------------------------------------------------------


def read_documents(max_bytes=20_000):
    paths = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [p.read_text("utf-8", "replace") for p in paths if 0 < p.stat().st_size <= max_bytes]


def make_loader(documents, args, sequences):
    """An iterator without end over batches of packed rows; it tells its position."""
    rows = grain.experimental.ConcatThenSplitIterDataset(
        grain.MapDataset.source(documents).seed(args.seed).shuffle().repeat().to_iter_dataset(),
        # One token more than the model reads: the last one is only a target.
        length_struct={"tokens": args.sequence_length + 1},
    )
    return iter(rows.batch(sequences).map(to_packed))


def to_packed(batch):
    return ja.batches.PackedBatch(
        batch["tokens"], batch["tokens_segment_ids"], batch["tokens_positions"]
    )


# --- Model ----------------------------------------------------------------------------------------


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x, mask):
        width = x.shape[-1]
        dense = functools.partial(nn.DenseGeneral, dtype=jnp.bfloat16)
        norm = functools.partial(nn.LayerNorm, dtype=jnp.bfloat16)
        qkv = dense((3, self.heads, width // self.heads))(norm()(x))
        attended = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, -3, 0), mask=mask)
        x = x + dense(width, axis=(-2, -1))(attended)
        return x + dense(width)(nn.gelu(dense(4 * width)(norm()(x)))), None


class GPT(nn.Module):
    """A decoder whose attention stays inside of a document; the head is tied."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    max_length: int

    @nn.compact
    def __call__(self, tokens, segment_ids, positions):
        init = nn.initializers.normal(0.02)
        embed = functools.partial(nn.Embed, features=self.width, embedding_init=init)
        embedding = embed(self.vocabulary, dtype=jnp.bfloat16)
        x = embedding(tokens) + embed(self.max_length, dtype=jnp.bfloat16)(positions)
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        mask = (same & jnp.tri(tokens.shape[1], dtype=bool)[None])[:, None]
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.layers,
        )
        x, _ = blocks(self.heads)(x, mask)
        return embedding.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


def make_loss_fn(model):
    def loss_fn(params, batch):
        inputs = jax.tree.map(lambda x: x[:, :-1], batch)
        logits = model.apply(params, *inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens[:, 1:])
        return ja.mean(losses, where=batch.target_mask())

    return loss_fn


def make_optimizer(args):
    """AdamW; warm-up and decay are written in tokens and stay where they are for any step."""
    in_tokens = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, 0.1 * args.tokens, args.tokens, 0.1 * args.learning_rate
    )
    schedule = ja.schedules.by_tokens(in_tokens, tokens_per_step=args.tokens_per_step)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices),
    )


def matrices(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )


# --- Training -------------------------------------------------------------------------------------


def train(args, plan, step, fresh, loader):
    """Trains to the last step, from the last checkpoint on; returns parameters, losses, seconds."""
    last = ja.schedules.steps_at(args.tokens, per_step=plan.tokens_per_step)
    losses, seconds = [], []
    with Checkpoints(args.checkpoints or tempfile.mkdtemp()) as checkpoints:
        run = fresh
        if checkpoints.latest is not None:
            run = checkpoints.restore(fresh)
            loader.set_state(run.loader)
        params, state, _, position, _ = run
        begin = position // plan.num_microbatches
        print(f"begins at step {begin} of {last}")
        for number in (
            bar := tqdm(range(begin, last), initial=begin, total=last, mininterval=0.5, unit="step")
        ):
            start = time.perf_counter()
            params, state, info = step(params, state, next(loader))
            losses.append(float(info.loss))  # waits for the step
            seconds.append(time.perf_counter() - start)
            bar.set_postfix_str(ja.reporting.summary(info), refresh=False)
            if (number + 1) % args.save_every == 0 or number + 1 == last:
                position = (number + 1) * plan.num_microbatches
                checkpoints.save(Run(params, state, None, position, loader.get_state()))
    return params, losses, seconds


def share_beyond(args, plan, loss_fn, params, batch, step_seconds):
    """The share of a step that is neither forward nor backward pass."""
    one = jax.jit(jax.value_and_grad(lambda params, batch: loss_fn(params, batch).value))
    micro_batch = jax.tree.map(lambda x: x[: args.sequences_per_microbatch], batch)
    jax.block_until_ready(one(params, micro_batch))
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(one(params, micro_batch))
        seconds.append(time.perf_counter() - start)
    return 1 - plan.num_microbatches * min(seconds) / step_seconds


def sample(model, params, tokenizer, prompt, length):
    """Continues `prompt` with the most likely tokens."""
    start = tokenizer.encode(prompt).ids
    tokens = jnp.zeros((1, length), jnp.int32).at[0, : len(start)].set(np.array(start))

    @jax.jit
    def complete(params, tokens):
        def extend(index, tokens):
            logits = model.apply(params, tokens, jnp.ones_like(tokens), jnp.arange(length)[None])
            return tokens.at[0, index].set(logits[0, index - 1].argmax())

        return jax.lax.fori_loop(len(start), length, extend, tokens)

    return tokenizer.decode(complete(params, tokens)[0].tolist())


def draw(losses, tokens_per_step, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(1, len(losses) + 1) * tokens_per_step, losses)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)


# --- The 124M configuration, compiled and not run -------------------------------------------------


def compile_124m(target):
    """What one step of 524,288 tokens needs on one device, from the compiler."""
    plan = ja.plan_window(
        tokens_per_step=524_288, sequence_length=1024, sequences_per_microbatch=16
    )
    if target == "cpu":
        device = jax.devices("cpu")[0]
    else:
        from jax.experimental import topologies

        name = {"v5e": "v5e:1x1x1"}[target]
        shape = {"chips_per_host_bounds": (1, 1, 1), "num_slices": 1}
        device = topologies.get_topology_desc(name, platform="tpu", **shape).devices[0]
    args = argparse.Namespace(learning_rate=6e-4, tokens=10e9, tokens_per_step=524_288)
    model = GPT(*MODELS["124M"], max_length=1024)
    init, step = ja.train_step(
        make_loss_fn(model), make_optimizer(args), num_microbatches=plan.num_microbatches
    )
    row = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), row, row, row)
    rows = jax.ShapeDtypeStruct((plan.sequences_per_step, 1025), jnp.int32)
    shapes = (params, jax.eval_shape(init, params), ja.batches.PackedBatch(rows, rows, rows))
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    memory = step.lower(*shapes).compile().memory_analysis()
    number = sum(x.size for x in jax.tree.leaves(params))
    print(plan)
    print(
        f"{number:,} parameters, compiled for {target}: arguments "
        f"{memory.argument_size_in_bytes / 2**20:,.0f} MiB, temporaries "
        f"{memory.temp_size_in_bytes / 2**20:,.0f} MiB"
    )


def print_plans(tokens_per_step=524_288):
    """How many micro-batches make a step of 524,288 tokens."""
    for sequences, length in ((4, 2048), (16, 512)):
        each = [
            ja.plan_window(
                tokens_per_step=tokens_per_step,
                sequence_length=length,
                sequences_per_microbatch=sequences,
                data_parallel=devices,
            ).num_microbatches
            for devices in (1, 8)
        ]
        print(
            f"micro-batches of {sequences} x {length:,} tokens: {each[0]} for a step of "
            f"{tokens_per_step:,} on one device, {each[1]} on each of 8"
        )


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="tiny")
    add("--tokens-per-step", type=int, default=8192)
    add("--sequence-length", type=int, default=128)
    add("--sequences-per-microbatch", type=int, default=8)
    add("--tokens", type=float, default=4e6, help="tokens of the whole run")
    add("--learning-rate", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    add("--checkpoints", help="train in this folder, from its last checkpoint on")
    add("--save-every", type=int, default=50, help="optimizer steps between checkpoints")
    add("--out", default="gpt2_pretrain.png", help="the picture")
    add("--compile", choices=["cpu", "v5e"], help="compile the 124M model, and run nothing")
    add("--quick", action="store_true", help="a short version")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.tokens_per_step, args.sequence_length = 300_000, 2048, 64
        args.learning_rate = 1e-2
    return args


def main():
    args = parse_args()
    print_plans()
    if args.compile:
        compile_124m(args.compile)
        return
    plan = ja.plan_window(
        tokens_per_step=args.tokens_per_step,
        sequence_length=args.sequence_length,
        sequences_per_microbatch=args.sequences_per_microbatch,
    )
    print(plan)

    texts = read_documents()
    width, layers, heads, vocabulary = MODELS[args.model]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocabulary, special_tokens=["<|endoftext|>"], show_progress=False
    )
    encoded = tokenizer.encode_batch([f"<|endoftext|>{text}" for text in texts])
    documents = [{"tokens": np.array(document.ids, np.int32)} for document in encoded]
    print(f"{len(texts)} documents, {sum(len(d['tokens']) for d in documents):,} tokens")

    model = GPT(width, layers, heads, vocabulary, args.sequence_length)
    loss_fn = make_loss_fn(model)
    row = jnp.zeros((1, args.sequence_length), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(args.seed), row, row, row)
    init, step = ja.train_step(
        loss_fn, make_optimizer(args), num_microbatches=plan.num_microbatches
    )
    loader = make_loader(documents, args, plan.sequences_per_step)
    params, losses, seconds = train(args, plan, step, Run(params, init(params)), loader)
    if len(losses) < 5:
        print("nothing is left to measure: the last checkpoint is the end of the run")
        return

    step_seconds = float(np.median(seconds[1:]))  # the first one compiled
    beyond = share_beyond(args, plan, loss_fn, params, next(loader), min(seconds))
    last = np.mean(losses[-10:])
    print(f"loss {losses[0]:.2f} at first, {last:.2f} over the last ten steps")
    print(f"{plan.tokens_per_step / step_seconds:,.0f} tokens/s, {step_seconds:.3f} s a step")
    print(f"{beyond:.0%} of a step is neither forward nor backward pass")
    print(f"greedy sample: {sample(model, params, tokenizer, 'import ', 48)!r}")
    draw(losses, plan.tokens_per_step, args.out)
    print(f"picture: {args.out}")
    if not last < 0.87 * losses[0]:
        raise SystemExit("FAILED: the model has learned nothing")
    print("OK: the model learns, a step of the tokens that were asked for at a time")


if __name__ == "__main__":
    main()
