"""Draws the pictures of the documentation in a few seconds: `python docs/pictures.py`."""

import ast
import inspect
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax

import jaxaccum as ja

matplotlib.use("Agg")
from matplotlib import pyplot as plt

FOLDER = pathlib.Path(__file__).parent / "_static"
FULL, OURS, THEIRS = "full batch, one pass", "jaxaccum", "mean of means"
K, LENGTH, STEPS = 16, 256, 60


def windows() -> list[tuple[jax.Array, jax.Array]]:
    """Questions and answers from Python's library: every second row asks for the name alone."""
    rows = []
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                rows.append((node.name, inspect.cleandoc(ast.get_docstring(node) or "")))
    chosen = np.random.default_rng(0).permutation(len(rows))[: K * STEPS]
    tokens = np.zeros((K * STEPS, LENGTH), np.int32)
    where = np.zeros((K * STEPS, LENGTH - 1), bool)
    for row, i in enumerate(chosen):
        name, text = rows[i]
        prompt, answer = (text, name) if row % 2 else (name, text)
        joined = (prompt + answer).encode("ascii", "replace")[-LENGTH:]
        tokens[row, : len(joined)] = list(joined)
        where[row, max(len(joined) - len(answer) - 1, 0) : len(joined) - 1] = True
    cut = (np.split(tokens, STEPS), np.split(where, STEPS))
    return [(jnp.asarray(t), jnp.asarray(w)) for t, w in zip(*cut)]


def loss_fn(params, batch):
    tokens, where = batch
    hidden = params["embed"][tokens[:, :-1]]
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], tokens[:, 1:])
    return ja.mean(losses, where=where)


def value(params, batch):
    return loss_fn(params, batch).value


def means(params, batch):
    """The mean of the micro-batches' means, and of their gradients."""
    per_row = jax.vmap(jax.value_and_grad(value), in_axes=(None, 0))
    return jax.tree.map(
        lambda x: x.mean(0), per_row(params, jax.tree.map(lambda x: x[:, None], batch))
    )


def train(gradient_fn, batches):
    """The loss of the whole window before each step, as one pass sees it."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "embed": jax.random.normal(keys[0], (128, 32)) * 0.1,
        "out": jax.random.normal(keys[1], (32, 128)) * 0.1,
    }
    optimizer = optax.sgd(2.0)

    @jax.jit
    def step(params, state, batch):
        loss, (_, grads) = value(params, batch), gradient_fn(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses


def mean_of_means() -> None:
    batches = windows()
    ways = {
        FULL: jax.value_and_grad(value),
        THEIRS: means,
        OURS: ja.value_and_grad(loss_fn, num_microbatches=K),
    }
    curves = {name: train(fn, batches) for name, fn in ways.items()}
    away = np.subtract(curves[OURS], curves[FULL])
    print("largest distance from the full batch:", OURS, np.abs(away).max())
    print(THEIRS, np.abs(np.subtract(curves[THEIRS], curves[FULL])).max())
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(1, 1.6))
    bars = {"sum of\nsums": 13.0, "mean of\nmeans": 1.5, "jaxaccum": 1.3}
    left.bar(list(bars), list(bars.values()), color=["#999999", "#d1495b", "#2e6f95"])
    left.axhline(1.3, color="black", linestyle="--", linewidth=1)
    for i, height in enumerate(bars.values()):
        left.text(i, height + 0.2, f"{height:g}", ha="center")
    left.set(title="token gradients {1, 2, 3} and {1} × 7", ylabel="gradient", ylim=(0, 14.5))
    right.plot(curves[FULL], color="black", linewidth=4, alpha=0.25, label=FULL)
    right.plot(curves[OURS], color="#2e6f95", linewidth=1.3, label=OURS)
    right.plot(curves[THEIRS], color="#d1495b", linewidth=1.3, label=THEIRS)
    right.set(title="short and long answers, 16 micro-batches a window")
    right.set(xlabel="optimizer step", ylabel="loss of the window")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    figure.tight_layout()
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / "mean_of_means.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    mean_of_means()
