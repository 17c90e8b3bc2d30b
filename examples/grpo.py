"""Trains a tiny policy to count with GRPO, on windows of samples of very different lengths.

  python grpo.py             # about a minute on two CPU cores
  python grpo.py --quick     # a short version
  python grpo.py --mean sequence

The task: after the digit d, write d + 1, d + 2, … 9 and stop. The reward is the share of the answer
that is right from its start. A sampler draws groups of answers with the weights that were last
published; answers are gathered until a window holds enough tokens, and one optimizer step follows.
Weights are published between windows only, every other one, so that samples are up to a version or
two old and the ratio of the clipped objective is at work.

The gradient of one window is also computed for several splits of its samples into micro-batches: it
is the same, to rounding.
"""

import argparse
import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import jaxaccum as ja
from jaxaccum import rollouts

STOP, VOCABULARY, LONGEST, WIDTH = 10, 11, 10, 32
GROUP = 8  # answers for each prompt
ROWS, LENGTHS = [64, 128, 192, 256], [LONGEST + 1]  # shapes that compile
MEANS = {
    "token": rollouts.token_mean,
    "sequence": rollouts.sequence_mean,
    "constant": lambda values, mask: rollouts.constant_mean(values, mask, length=LONGEST),
}


def init(key):
    k_embed, k_hidden = jax.random.split(key)
    return {
        "embed": jax.random.normal(k_embed, (VOCABULARY, WIDTH)) / WIDTH**0.5,
        "hidden": jax.random.normal(k_hidden, (WIDTH, WIDTH)) / WIDTH**0.5,
        "out": jnp.zeros((WIDTH, VOCABULARY)),
    }


def policy(params, tokens):
    """Log-probabilities of the token after each token."""
    h = jnp.tanh(params["embed"][tokens] @ params["hidden"])
    return jax.nn.log_softmax(h @ params["out"])


@jax.jit
def sample(params, prompts, key):
    """Answers `[prompts, LONGEST]` and their log-probabilities."""

    def step(token, key):
        log_probs = policy(params, token)
        token = jax.random.categorical(key, log_probs)
        return token, (token, jnp.take_along_axis(log_probs, token[:, None], 1)[:, 0])

    _, (tokens, log_probs) = jax.lax.scan(step, prompts, jax.random.split(key, LONGEST))
    return tokens.T, log_probs.T


def reward(prompt, answer):
    """The share of the right answer, from its start, that was given."""
    right = [*range(prompt + 1, STOP), STOP]
    matched = 0
    for want, got in zip(right, answer, strict=False):
        if want != got:
            break
        matched += 1
    return matched / len(right)


class Sampler:
    """Draws rollouts with the weights that were published last."""

    def __init__(self, params, seed):
        self.rng, self.key = np.random.default_rng(seed), jax.random.key(seed)
        self.rewards = collections.deque(maxlen=1024)
        self.publish(params, 0)

    def publish(self, params, version):
        self.params, self.version = jax.tree.map(jnp.copy, params), version

    def __iter__(self):
        while True:
            prompts = np.repeat(self.rng.integers(0, STOP, 16), GROUP)
            self.key, key = jax.random.split(self.key)
            version = self.version
            tokens, log_probs = map(np.asarray, sample(self.params, prompts, key))
            stops = tokens == STOP
            lengths = np.where(stops.any(1), stops.argmax(1) + 1, LONGEST)
            rewards = [reward(p, t[:n]) for p, t, n in zip(prompts, tokens, lengths, strict=True)]
            self.rewards.extend(rewards)
            advantages = np.asarray(rollouts.group_advantages(rewards, GROUP))
            for row, n in enumerate(lengths):
                yield rollouts.Rollout(
                    np.append(prompts[row], tokens[row, :n]),
                    1,
                    log_probs[row, :n],
                    float(advantages[row]),
                    version,
                )


def make_loss(mean_fn):
    def loss_fn(params, batch, version):
        log_probs = policy(params, batch.tokens[:, :-1])
        log_probs = jnp.take_along_axis(log_probs, batch.tokens[:, 1:, None], 2)[..., 0]
        values = rollouts.clipped_loss(
            log_probs, batch.log_probs, advantages=batch.advantage, clip_high=0.28
        )
        return mean_fn(values, batch.mask), rollouts.version_lag(batch.version, version, batch.mask)

    return loss_fn


def largest_deviation(loss_fn, params, batch, version):
    """The gradient for several splits against one micro-batch, relative to its largest entry."""
    splits = [ja.value_and_grad(loss_fn, num_microbatches=n, has_aux=True) for n in (1, 2, 5, 16)]
    grads = [jax.jit(f)(params, batch, version)[1] for f in splits]
    size = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads[0]))
    gaps = [jax.tree.map(lambda a, b: jnp.abs(a - b).max(), g, grads[0]) for g in grads[1:]]
    return max(map(float, jax.tree.leaves(gaps))) / size


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mean", choices=MEANS, default="token")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="80 steps")
    options = parser.parse_args()
    steps = 80 if options.quick else options.steps

    loss_fn = make_loss(MEANS[options.mean])
    init_fn, step_fn = ja.train_step(
        loss_fn,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        num_microbatches=options.microbatches,
        has_aux=True,
    )
    params = init(jax.random.key(0))
    state = init_fn(params)
    sampler = Sampler(params, seed=0)
    windows = rollouts.close_windows(sampler, num_tokens=400)
    first = None
    for step in (bar := tqdm(range(steps), mininterval=0.5)):
        window = next(windows)
        batch = rollouts.pad_rollouts(window, row_buckets=ROWS, length_buckets=LENGTHS)
        if step == steps // 10:  # later groups may all be right, and their gradients zero
            deviation = largest_deviation(loss_fn, params, batch, jnp.int32(step))
        params, state, info = step_fn(params, state, batch, jnp.int32(step))
        if step % 2:  # between windows only
            sampler.publish(params, step + 1)
        now = float(np.mean(sampler.rewards))
        first = now if first is None else first
        lag = info.aux["mean"]
        bar.set_postfix_str(f"reward {now:.2f}, {len(window)} samples, lag {float(lag):.1f}")
    print(f"mean reward: {first:.2f} at first, {now:.2f} at last")
    lags = {name: float(value) for name, value in info.aux.items()}
    print(f"lag in the last window: {lags}")

    print(f"largest deviation of the gradient over splits of the samples: {deviation:.1e}")
    if not deviation < 64 * jnp.finfo(jnp.float32).eps:
        raise SystemExit("FAILED: the gradient depends on how the samples are split")
    if not now > 0.8:
        raise SystemExit("FAILED: the policy did not learn its task")
    print("OK: the policy counts, and its gradient is the same for any split of the samples")


if __name__ == "__main__":
    main()
