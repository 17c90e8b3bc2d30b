"""Reinforcement learning whose actors write while the trainer trains, after PipelineRL.

  python pipeline_rl.py           # some ten seconds
  python pipeline_rl.py --quick   # a lower goal

The task and the policy are those of `grpo.py`: after the digit d write d + 1, d + 2, … 9 and stop.
Four actors write groups of answers, a token at a time, and read the newest weights before each
token, so that one answer holds tokens of several versions. Writing is the slow part: an actor waits
after each token, mostly one millisecond, in every fourth batch of answers eight, as some answers
take longer than others.

  in turns    all actors write, the trainer waits for the slowest; it trains, and the actors wait
  pipelined   actors put answers into a bounded queue, and the trainer takes what is there; what is
              older than the largest lag allowed is dropped and counted

Both make optimizer steps of the same number of answers until the policy counts. Tokens are weighted
by truncated importance weights; lag and effective sample size are metrics of the window.

Reference: Alexandre Piché et al., "PipelineRL: Faster On-policy Reinforcement Learning for Long
Sequence Generation", 2025.
"""

import argparse
import collections
import concurrent.futures
import queue
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from grpo import GROUP, LONGEST, STOP, init, largest_deviation, policy, reward
from tqdm import tqdm

import jaxaccum as ja
from jaxaccum import rollouts

ACTORS, GROUPS = 4, 4  # groups that an actor writes at a time
ANSWERS = ACTORS * GROUPS * GROUP  # of an optimizer step
MAX_LAG = 8


@jax.jit
def next_token(params, tokens, key):
    log_probs = policy(params, tokens)
    chosen = jax.random.categorical(key, log_probs)
    return chosen, jnp.take_along_axis(log_probs, chosen[:, None], 1)[:, 0]


class Actor:
    """Writes answers with whatever weights are published when a token is due."""

    def __init__(self, published, seed):
        self.published, self.rng = published, np.random.default_rng(seed)

    def write(self):
        """Rollouts of some groups and their rewards."""
        prompts = np.repeat(self.rng.integers(0, STOP, GROUPS), GROUP)
        wait = 0.008 if self.rng.random() < 0.25 else 0.001
        last, columns = prompts, []
        for _ in range(LONGEST):
            params, version = self.published["weights"]
            key = jax.random.key(self.rng.integers(2**31))
            last, log_probs = map(np.asarray, next_token(params, last, key))
            columns.append((last, log_probs, np.full(len(last), version)))
            time.sleep(wait)
        tokens, log_probs, versions = (np.stack(each, 1) for each in zip(*columns))
        stops = tokens == STOP
        lengths = np.where(stops.any(1), stops.argmax(1) + 1, LONGEST)
        rewards = [reward(p, t[:n]) for p, t, n in zip(prompts, tokens, lengths)]
        advantages = np.asarray(rollouts.group_advantages(rewards, GROUP))
        return [
            rollouts.Rollout(np.append(p, t[:n]), 1, lp[:n], float(a), v[:n])
            for p, t, lp, v, n, a in zip(prompts, tokens, log_probs, versions, lengths, advantages)
        ], rewards


def in_turns(actors, published):
    """Batches of answers; in each turn all actors write, and the slowest is waited for."""
    with concurrent.futures.ThreadPoolExecutor(len(actors)) as pool:
        while True:
            yield from pool.map(Actor.write, actors)


def pipelined(actors, published):
    """Batches of answers as they are ready, none of them too old."""
    ready, stopped = queue.Queue(maxsize=2 * ACTORS), threading.Event()

    def work(actor):
        while not stopped.is_set():
            batch = actor.write()
            while not stopped.is_set():
                try:
                    ready.put(batch, timeout=0.1)
                    break
                except queue.Full:
                    pass

    threads = [threading.Thread(target=work, args=(actor,), daemon=True) for actor in actors]
    for thread in threads:
        thread.start()
    try:
        while True:
            answers, rewards = ready.get()
            _, newest = published["weights"]
            fresh = [newest - a.version.min() <= MAX_LAG for a in answers]
            published["dropped"] += fresh.count(False)
            yield [a for a, keep in zip(answers, fresh) if keep], rewards
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def loss_fn(params, batch, version):
    log_probs = policy(params, batch.tokens[:, :-1])
    log_probs = jnp.take_along_axis(log_probs, batch.tokens[:, 1:, None], 2)[..., 0]
    weights = rollouts.truncated_weights(log_probs, batch.log_probs, limit=2.0)
    aux = {
        "lag": rollouts.version_lag(batch.version, version, batch.mask),
        "mismatch": rollouts.mismatch(log_probs, batch.log_probs, mask=batch.mask),
    }
    return rollouts.token_mean(-weights * batch.advantage * log_probs, batch.mask), aux


def train(source_fn, goal, *, max_steps=600):
    """Trains until the mean reward of the last answers reaches `goal`."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    init_fn, step_fn = ja.train_step(loss_fn, optimizer, num_microbatches=4, has_aux=True)
    params = init(jax.random.key(0))
    state = init_fn(params)
    published = {"weights": (jax.tree.map(jnp.copy, params), 0), "dropped": 0}
    actors = [Actor(published, seed) for seed in range(ACTORS)]
    recent, records, deviation = collections.deque(maxlen=4 * ANSWERS), [], 0.0

    def answers(batches):
        for kept, rewards in batches:
            recent.extend(rewards)
            yield from kept

    batches = source_fn(actors, published)
    windows = rollouts.close_windows(answers(batches), num_samples=ANSWERS)
    start = time.perf_counter()
    for step in (bar := tqdm(range(max_steps), desc=source_fn.__name__, mininterval=0.5)):
        batch = rollouts.pad_rollouts(
            next(windows), row_buckets=[ANSWERS], length_buckets=[LONGEST + 1]
        )
        if step == 10:
            pause = time.perf_counter()
            deviation = largest_deviation(loss_fn, params, batch, jnp.int32(step))
            start += time.perf_counter() - pause
        params, state, info = step_fn(params, state, batch, jnp.int32(step))
        published["weights"] = jax.tree.map(jnp.copy, params), step + 1
        seen = info.aux["mismatch"]
        share = float(rollouts.effective_share(seen))
        records.append((*(float(info.aux["lag"][name]) for name in ("min", "mean", "max")), share))
        if step == 0:
            start = time.perf_counter()  # everything is compiled
        mean_reward = float(np.mean(recent))
        bar.set_postfix_str(f"reward {mean_reward:.2f}, effective {share:.0%}", refresh=False)
        if mean_reward >= goal and len(recent) == recent.maxlen:
            break
    seconds = time.perf_counter() - start
    bar.close()
    batches.close()
    return step + 1, seconds, mean_reward, np.array(records), published["dropped"], deviation


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a lower goal")
    goal = 0.5 if parser.parse_args().quick else 0.9

    found = {source.__name__: train(source, goal) for source in (in_turns, pipelined)}
    print(f"{'':9}  steps  seconds  reward  lag min, mean, max  effective  dropped")
    for name, (steps, seconds, mean_reward, records, dropped, _) in found.items():
        low, mean, high, share = (
            records[:, 0].min(), records[:, 1].mean(), records[:, 2].max(), records[:, 3].mean(),
        )  # fmt: skip
        print(
            f"{name:9}  {steps:5d}  {seconds:7.1f}  {mean_reward:6.2f}  "
            f"{low:7.0f}, {mean:4.1f}, {high:3.0f}  {share:9.1%}  {dropped:7d}"
        )
    deviation = max(row[-1] for row in found.values())
    print(f"largest deviation of the gradient over splits of the answers: {deviation:.1e}")
    if not deviation < 64 * jnp.finfo(jnp.float32).eps:
        raise SystemExit("FAILED: the gradient depends on how the answers are split")
    if not all(row[2] >= goal for row in found.values()):
        raise SystemExit("FAILED: the policy did not learn its task")
    if not found["pipelined"][1] < found["in_turns"][1]:
        raise SystemExit("FAILED: the pipeline was expected to reach the goal sooner")
    print("OK: the pipeline reaches the reward of training in turns, in less time")


if __name__ == "__main__":
    main()
