"""Fine-tunes a small BERT with an effective batch of 32 from micro-batches of 4.

The text is Python's own: docstrings of the standard library. WordPiece is trained on them, a small
bidirectional encoder is pre-trained by masked words for a moment, and fine-tuned to tell which
package a docstring belongs to: once with true batches of 32, once with windows of eight
micro-batches of 4, from the same start and on the same batches. Parameters are float32, and the
model computes in bfloat16.

  python bert_finetune.py           # about three minutes on two cores
  python bert_finetune.py --quick   # a short version
"""

import argparse
import ast
import itertools
import pathlib
import sysconfig

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from tqdm import tqdm

import jaxaccum as ja

PACKAGES = ["asyncio", "email", "importlib", "logging", "multiprocessing", "unittest", "xml"]
BATCH, MICRO_BATCH = 32, 4
PAD, CLS, SEP, MASK = range(4)
VOCABULARY = 1500


# --- Text -----------------------------------------------------------------------------------------


def read_docstrings():
    """`(docstring, number of its package)`, without repeats, mixed in a fixed order."""
    label_of = {}
    for label, package in enumerate(PACKAGES):
        for path in sorted(pathlib.Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    label_of.setdefault(ast.get_docstring(node), label)
    label_of.pop(None, None)
    examples = list(label_of.items())
    np.random.default_rng(0).shuffle(examples)
    return examples


def train_tokenizer(texts, length):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=PAD)
    return tokenizer


def mask_words(example, rng):
    """Hides 15 % of the words: of these 80 % behind [MASK], 10 % behind a word drawn at random."""
    words = example["words"]
    chosen = (rng.random(words.shape) < 0.15) & ~np.isin(words, (PAD, CLS, SEP))
    how = rng.random(words.shape)
    seen = np.where(chosen & (how < 0.8), MASK, words)
    drawn = rng.integers(MASK + 1, VOCABULARY, words.shape)
    seen = np.where(chosen & (how >= 0.9), drawn, seen)
    return {"words": seen.astype(np.int32), "targets": words, "chosen": chosen}


# --- Model ----------------------------------------------------------------------------------------


class Bert(nn.Module):
    """Logits for each word, and for the class of the text, from its first position."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    dtype: jnp.dtype = jnp.bfloat16  # of the computation; parameters are float32

    @nn.compact
    def __call__(self, words):
        real = words != PAD
        embed = nn.Embed(VOCABULARY, self.width, dtype=self.dtype, name="embed")
        position = nn.Embed(words.shape[1], self.width, dtype=self.dtype, name="positions")
        x = embed(words) + position(jnp.arange(words.shape[1]))[None]
        mask = nn.make_attention_mask(real, real)
        for _ in range(self.layers):
            attention = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)
            x = x + attention(nn.LayerNorm(dtype=self.dtype)(x), mask=mask)
            h = nn.Dense(4 * self.width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            x = x + nn.Dense(self.width, dtype=self.dtype)(nn.gelu(h))
        x = nn.LayerNorm(dtype=self.dtype)(x)
        word_logits = embed.attend(x)
        class_logits = nn.Dense(len(PACKAGES), dtype=self.dtype, name="classes")(x[:, 0])
        return word_logits.astype(jnp.float32), class_logits.astype(jnp.float32)


def make_losses(model):
    def word_loss(params, batch):
        logits, _ = model.apply(params, batch["words"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return ja.mean(losses, where=batch["chosen"])  # micro-batches hide few words, or many

    def class_loss(params, batch):
        _, logits = model.apply(params, batch["words"])
        return ja.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))

    return word_loss, class_loss


def make_optimizer(peak, steps):
    warm_up = optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 10), steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(warm_up, weight_decay=0.01))


# --- Training -------------------------------------------------------------------------------------


def train(name, loss_fn, params, loader, *, steps, peak, microbatch_size):
    """Trains and returns the parameters, and the bytes of temporary memory of a step."""
    init, step = ja.train_step(
        loss_fn, make_optimizer(peak, steps), microbatch_size=microbatch_size
    )
    params = jax.tree.map(jnp.copy, params)  # the step takes over what it is given
    state = init(params)
    batches = itertools.islice(loader, steps)
    first = next(batches)
    compiled = step.lower(params, state, first).compile()
    with tqdm(total=steps, desc=name, unit="step", mininterval=0.5) as bar:
        for batch in itertools.chain([first], batches):
            params, state, info = compiled(params, state, batch)
            bar.update()
            bar.set_postfix_str(ja.reporting.summary(info), refresh=False)
    return params, compiled.memory_analysis().temp_size_in_bytes


def distance(a, b):
    return float(optax.tree.norm(optax.tree.sub(a, b)) / optax.tree.norm(b))


def compare_gradients(model, params, batch):
    """How far the window's gradient, and the mean of means, are from the true batch's: float32."""
    word_loss, _ = make_losses(model.clone(dtype=jnp.float32))
    mean_gradient = jax.jit(jax.grad(lambda params, batch: word_loss(params, batch).value))
    micro_batches = list(ja.split(batch, num_microbatches=BATCH // MICRO_BATCH))
    true = mean_gradient(params, batch)
    _, window = jax.jit(ja.value_and_grad(word_loss, microbatch_size=MICRO_BATCH))(params, batch)
    each = [mean_gradient(params, micro_batch) for micro_batch in micro_batches]
    mean_of_means = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *each)
    hidden = [int(micro_batch["chosen"].sum()) for micro_batch in micro_batches]
    return distance(window, true), distance(mean_of_means, true), hidden


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer steps")
    args = parser.parse_args()
    length, width, steps = (40, 48, 80) if args.quick else (96, 128, 400)

    examples = read_docstrings()
    tokenizer = train_tokenizer([text for text, _ in examples], length)
    rows = [
        {"words": np.array(encoding.ids, np.int32), "label": np.int32(label)}
        for encoding, (_, label) in zip(
            tokenizer.encode_batch([text for text, _ in examples]), examples
        )
    ]
    held_out = len(rows) // 5
    source = grain.MapDataset.source(rows[held_out:]).seed(0).shuffle().repeat()
    masked = source.random_map(mask_words).batch(BATCH)
    labelled = source.batch(BATCH)
    test = next(iter(grain.MapDataset.source(rows[:held_out]).batch(held_out)))
    print(f"{len(rows):,} docstrings of {len(PACKAGES)} packages, {held_out:,} held out")

    model = Bert(width=width)
    params = model.init(jax.random.key(0), rows[0]["words"][None])
    word_loss, class_loss = make_losses(model)
    pretrained, _ = train("masked words", word_loss, params, masked, steps=steps, peak=3e-3,
                          microbatch_size=MICRO_BATCH)  # fmt: skip

    @jax.jit
    def accuracy_of(params):
        _, logits = model.apply(params, test["words"])
        return jnp.mean(logits.argmax(-1) == test["label"])

    table = {}
    for name, size in (("true batch of 32", BATCH), ("window of 8 x 4", MICRO_BATCH)):
        tuned, memory = train(name, class_loss, pretrained, labelled, steps=steps, peak=1e-3,
                              microbatch_size=size)  # fmt: skip
        table[name] = tuned, float(accuracy_of(tuned)), memory

    (true, true_accuracy, true_memory), (window, accuracy, memory) = table.values()
    moved = distance(true, pretrained)
    apart = distance(window, true)
    print(f"\n{'':18}  accuracy  memory of a step")
    for name, (_, share, size) in table.items():
        print(f"{name:18}  {share:8.1%}  {size / 2**20:8.1f} MiB")
    print(f"fine-tuning moved the parameters by {moved:.2e}; the two are {apart:.2e} apart")

    near, far, hidden = compare_gradients(model, pretrained, next(iter(masked)))
    print(
        f"masked words, {min(hidden)} to {max(hidden)} hidden in a micro-batch: from the true "
        f"batch's gradient the window is {near:.1e} away, the mean of means {far:.1e}"
    )
    if not (apart < 0.05 * moved and abs(accuracy - true_accuracy) < 0.02):
        raise SystemExit("FAILED: the window of micro-batches trains another model")
    if not (near < 1e-5 and far > 0.02):
        raise SystemExit("FAILED: the window should be exact, and the mean of means not")
    if not memory < 0.5 * true_memory:
        raise SystemExit("FAILED: the window needs the memory of the whole batch")
    if not accuracy > 2 / len(PACKAGES):
        raise SystemExit("FAILED: the model has learned nothing")
    print("OK: an effective batch of 32, to rounding, in the memory of 4")


if __name__ == "__main__":
    main()
