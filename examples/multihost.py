"""Trains the small language model of train_lm.py on several processes that hold one copy each.

One command starts two local processes, which reduce over gloo as two hosts would over a network:

  python multihost.py              # under two minutes on two CPU cores
  python multihost.py --quick      # a short version
  python multihost.py --resume     # goes on from the newest checkpoint, if there is one

Every process reads only its own rows of each batch, the window's sums stay local, and one
reduction follows the last micro-batch. Checkpoints hold parameters, optimizer state, step and
loader position, so that a run which was killed and resumed ends with the same parameters, bit for
bit, as one that was left alone. At the end the launcher compares a digest of the parameters over
all processes.

If a process dies, its peers get an error in their next reduction; if it hangs (try `kill -STOP` on
a printed pid), a watchdog sees that no step completes. Either way every other process says so in
one line and ends with a non-zero exit code within 30 seconds, and the launcher ends the rest. They
leave through `os._exit`: a normal exit would wait for the lost peer and abort. A hang before the
first step takes longer to see, since compiling may take long too.

On a TPU pod or a GPU cluster nothing changes but the launcher: the cluster's own starts

  python multihost.py --cluster --checkpoints /a/folder/that/all/hosts/see

on every host, `jax.distributed.initialize()` without arguments finds the others, and the mesh spans
all their devices. The step, the loader, the checkpoints and the watchdog stay as they are.
"""

import argparse
import ctypes
import functools
import hashlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import train_lm
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

import jaxaccum as ja
from jaxaccum.multihost import FAILED, Watchdog

STARTUP = 300.0  # seconds until the first step is done: reading text, connecting, compiling
HEARTBEAT = (
    3600  # seconds; JAX's own answer to a silent peer is to abort, so the watchdog is earlier
)
DIGEST = "parameters sha256"


# --- Failing --------------------------------------------------------------------------------------


def from_peers(error: Exception) -> bool:
    """Whether an error came from the runtime, and not from a mistake in this program."""
    return isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)


# --- Data -----------------------------------------------------------------------------------------


class Position(NamedTuple):
    """Where the loader stands: the next batch to read, of which epoch."""

    epoch: int = 0
    batch: int = 0


class Loader:
    """Batches over all processes, of which each one reads and holds its own rows only.

    The order of an epoch follows from the seed and the epoch's number, so two integers are all that
    a checkpoint needs.
    """

    def __init__(
        self, rows: ja.batches.PackedBatch, sharding: NamedSharding, *, batch_size: int, seed: int
    ):
        self.position = Position()
        self._rows, self._sharding, self._size, self._seed = rows, sharding, batch_size, seed
        # The rows of a batch that the mesh puts on this process's devices.
        slices = sharding.addressable_devices_indices_map((batch_size,)).values()
        self._own = np.unique(np.concatenate([np.arange(batch_size)[s] for s in slices]))

    def __next__(self) -> ja.batches.PackedBatch:
        epoch, batch = self.position
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows.tokens))
        own = train_lm.select(self._rows, order[batch * self._size + self._own])
        last = (batch + 2) * self._size > len(order)
        self.position = Position(epoch + 1, 0) if last else Position(epoch, batch + 1)
        return jax.tree.map(self._join, own)

    def _join(self, own: np.ndarray) -> jax.Array:
        """This process's rows as its part of one array over all processes."""
        shape = (self._size, *own.shape[1:])
        return jax.make_array_from_process_local_data(self._sharding, own, shape)


# --- One process ----------------------------------------------------------------------------------


def connect(args: argparse.Namespace) -> None:
    """Makes this process one of many. This is all that depends on who launched it."""
    if args.cluster:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher
    if sys.platform == "linux":  # end when the launcher does, even if that was killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != args.launcher:
        raise SystemExit("the launcher is gone")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=args.coordinator,
        num_processes=args.processes,
        process_id=args.process_id,
        coordinator_bind_address="127.0.0.1:0",  # that of process 0 stays unused; see `serve`
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=HEARTBEAT,
    )


def digest(params: Any) -> str:
    """A hash of this process's copy of the parameters."""
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        sha.update(np.asarray(leaf.addressable_data(0)).tobytes())
    return sha.hexdigest()


def train(args: argparse.Namespace, mesh: jax.sharding.Mesh, watchdog: Watchdog) -> Any:
    """Trains to the last step, from the newest checkpoint if asked to; returns the parameters."""
    whole, split = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("data",)))
    documents = train_lm.read_documents()
    rows = train_lm.make_rows(documents, args.sequence_length + 1, packed=False)
    loader = Loader(rows, split, batch_size=args.batch_size, seed=args.seed)

    model = train_lm.Transformer(args.width, args.layers, args.heads, args.sequence_length)
    optimizer = train_lm.make_optimizer(args.learning_rate, args.steps)
    init, step = ja.train_step(
        train_lm.make_loss_fn(model),
        optimizer,
        num_microbatches=args.num_microbatches,
        spmd_axis_name="data",
    )
    inputs = jax.tree.map(lambda leaf: leaf[:1, :-1], rows)
    make_params = functools.partial(model.init, jax.random.key(args.seed))
    params = jax.jit(make_params, out_shardings=whole)(*inputs)
    state = jax.jit(init, out_shardings=whole)(params)

    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(args.checkpoints.absolute(), options=options) as checkpoints:
        start = checkpoints.latest_step() or 0
        if start and not args.resume:
            watchdog.end(
                f"{args.checkpoints} holds a checkpoint of step {start} already; add `--resume` to "
                "go on from it, or remove the folder"
            )
        if start:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"params": params, "state": state})
            restored = checkpoints.restore(
                start,
                args=ocp.args.Composite(
                    model=ocp.args.StandardRestore(like), loader=ocp.args.JsonRestore()
                ),
            )
            params, state = restored.model["params"], restored.model["state"]
            loader.position = Position(**restored.loader)

        is_first = jax.process_index() == 0
        with tqdm(
            total=args.steps, initial=start, unit="step", dynamic_ncols=True, disable=not is_first
        ) as bar:
            if start and is_first:
                bar.write(f"resumed at step {start}, {loader.position}", file=sys.stderr)
            clock = None
            for number in range(start + 1, args.steps + 1):
                params, state, info = step(params, state, next(loader))
                jax.block_until_ready(info)
                watchdog.beat(f"in step {number + 1}")
                bar.update()
                if clock is None:  # both start after the step that compiled
                    watchdog.limit = args.timeout
                    tokens, clock = int(info.tokens_seen), time.perf_counter()
                elif number % args.log_every == 0:
                    rate = (int(info.tokens_seen) - tokens) / (time.perf_counter() - clock)
                    bar.set_postfix_str(f"loss {info.loss:.3f}, {rate:,.0f} tokens/s")
                if number % args.checkpoint_every == 0 or number == args.steps:
                    watchdog.doing = f"saving step {number}"
                    checkpoints.save(
                        number,
                        args=ocp.args.Composite(
                            model=ocp.args.StandardSave({"params": params, "state": state}),
                            loader=ocp.args.JsonSave(loader.position._asdict()),
                        ),
                    )
                    watchdog.beat(f"in step {number + 1}")
                    if is_first:
                        bar.write(f"saved step {number}, loss {info.loss:.3f}", file=sys.stderr)
    return params


def process(number: int) -> str:
    return f"process {number}"


def work(args: argparse.Namespace) -> None:
    """The life of one process."""
    watchdog = Watchdog(socket.gethostname() if args.cluster else process(args.process_id), STARTUP)
    try:
        connect(args)
        watchdog.name = process(jax.process_index())
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        with jax.set_mesh(mesh):
            result = digest(train(args, mesh, watchdog))
        watchdog.beat("waiting for the others to finish")
        jax.distributed.shutdown()
    except Exception as error:
        if from_peers(error):
            reason = " ".join(str(error).split())[:200]
            watchdog.end(f"lost another process ({reason})")
        traceback.print_exc()
        watchdog.end("failed")
    print(f"{watchdog.name}: {DIGEST} {result}", flush=True)


# --- The launcher ---------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(args: argparse.Namespace) -> None:
    """Is the coordinator, the service through which processes find each other.

    `jax.distributed.initialize` would start it in process 0, and if that were killed, the service's
    client would abort all others before they could say why. In a process of its own it outlives
    them all, the launcher too. JAX has no public name for it.
    """
    from jax._src.lib import _jax

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    service = _jax.get_distributed_runtime_service(
        args.coordinator, args.processes, heartbeat_timeout=HEARTBEAT
    )
    sys.stdin.read()  # returns when the launcher is gone
    time.sleep(2)
    del service


class Worker:
    """A local process whose output is passed on and searched for its digest."""

    def __init__(self, number: int, command: list[str]):
        self.number = number
        self.digest: str | None = None
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        say(f"{process(number)} has pid {self.process.pid}")

    def _read(self) -> None:
        for line in self.process.stdout:
            print(line, end="", flush=True)
            if DIGEST in line:
                self.digest = line.split()[-1]

    def kill(self) -> None:
        self.process.kill()  # also ends a stopped process
        self.process.wait()
        self._reader.join()


def say(text: str, before: str = "") -> None:
    print(f"{before}launcher: {text}", file=sys.stderr, flush=True)


def in_words(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def wait(workers: list[Worker], timeout: float) -> bool:
    """Waits for all workers, or for a while after the first that failed; whether all did well."""
    running, deadline, ok = list(workers), float("inf"), True
    while running and time.monotonic() < deadline:
        time.sleep(0.1)
        for worker in running.copy():
            code = worker.process.poll()
            if code is None:
                continue
            running.remove(worker)
            if code != 0:
                say(f"{process(worker.number)} {in_words(code)}", "\n")  # after the bar
                # After a death the others find out by themselves. A process that ended by itself
                # has seen already that the rest is stuck.
                deadline = min(deadline, time.monotonic() + (timeout + 3 if code < 0 else 3))
                ok = False
    for worker in running:
        say(f"{process(worker.number)} did not end by itself and is killed")
    return ok


def launch(args: argparse.Namespace) -> int:
    """Starts the workers, waits, compares their digests; returns the exit code."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        say(f"gloo needs the host's name to resolve; add {socket.gethostname()} to /etc/hosts")
        return FAILED
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    told = ["--launcher", str(os.getpid()), "--coordinator", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, __file__, *sys.argv[1:], *told]
    coordinator = subprocess.Popen([*command, "--serve"], stdin=subprocess.PIPE)
    workers = []
    try:
        for number in range(args.processes):
            workers.append(Worker(number, [*command, "--process-id", str(number)]))
        ok = wait(workers, args.timeout)
    except KeyboardInterrupt:
        say("interrupted", "\n")
        ok = False
    finally:
        for worker in workers:
            worker.kill()
        coordinator.kill()
        coordinator.wait()
    if not ok:
        say("FAILED; the same command with `--resume` goes on from the newest checkpoint")
        return FAILED
    if len({worker.digest for worker in workers}) != 1:
        say("FAILED: the processes end with different parameters")
        return FAILED
    say(f"OK: {args.processes} processes end with the same parameters, bit for bit")
    return 0


# --- Command line ---------------------------------------------------------------------------------


DEFAULT = {"steps": 200, "sequence_length": 128, "width": 96, "layers": 2, "checkpoint_every": 50}
QUICK = {"steps": 40, "sequence_length": 64, "width": 32, "layers": 1, "checkpoint_every": 10}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small model, few steps; under a minute")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--cluster", action="store_true", help="be one process that a cluster's launcher started")
    add("--processes", type=int, default=2, help="local processes to start")
    add("--checkpoints", type=pathlib.Path, default=pathlib.Path("multihost_checkpoints"))
    add("--checkpoint-every", type=int, help="steps between checkpoints")
    add("--timeout", type=float, default=20.0, help="seconds without a step that count as a hang")
    add("--steps", type=int, help="optimizer steps")
    add("--batch-size", type=int, default=16, help="rows of a batch, over all processes")
    add("--num-microbatches", type=int, default=4, help="micro-batches of a window")
    add("--sequence-length", type=int, help="tokens of a row")
    add("--width", type=int, help="width of the model")
    add("--layers", type=int, help="transformer blocks")
    add("--heads", type=int, default=4, help="attention heads")
    add("--learning-rate", type=float, default=4e-3, help="peak learning rate of AdamW")
    add("--log-every", type=int, default=5, help="steps between updates of the progress bar")
    add("--seed", type=int, default=0, help="seed of parameters and data order")
    # What the launcher tells those it starts.
    add("--serve", action="store_true", help=argparse.SUPPRESS)
    add("--process-id", type=int, help=argparse.SUPPRESS)
    add("--launcher", type=int, help=argparse.SUPPRESS)
    add("--coordinator", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, value in (QUICK if args.quick else DEFAULT).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> int:
    args = parse_args()
    if args.serve:
        serve(args)
    elif args.cluster or args.process_id is not None:
        work(args)
    else:
        return launch(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
