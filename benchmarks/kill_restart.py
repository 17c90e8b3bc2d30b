"""Kills a training process at random moments and restarts it, until it has died often enough.

`python benchmarks/kill_restart.py` runs `examples/restart.py` once without interruption; then again
and again, each time with SIGKILL after a random time, from before its first import to the middle of
a checkpoint; then to the end. Every bit of parameters, state and key has to be that of the
undisturbed run. Prints one line for each kill.
"""

import argparse
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "restart.py"


class Process:
    """One process of the run, with its output in a file."""

    def __init__(self, folder, log, options):
        self.log, self.begin = log, time.monotonic()
        command = [sys.executable, str(EXAMPLE), "--checkpoints", str(folder), *options]
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    def seconds(self):
        return time.monotonic() - self.begin

    def wait(self):
        if self.process.wait():
            sys.exit(f"the process failed:\n{self.log.read_text()}")
        return self.log.read_text().split()[-1]

    def began(self):
        """Where the process began, if it has come so far."""
        words = self.log.read_text().split()
        return int(words[3]) if words[:3] == ["begins", "at", "micro-batch"] else None


def latest(folder):
    """The last complete checkpoint, and how many incomplete ones lie beside it."""
    names = [path.name for path in folder.glob("*")]
    complete = [int(name) for name in names if name.isdigit()]
    return max(complete, default=0), len(names) - len(complete)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--micro-batches", type=int, default=1500)
    parser.add_argument("--delay", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    length = ["--micro-batches", str(options.micro_batches)]
    with tempfile.TemporaryDirectory() as place:
        root = pathlib.Path(place)
        undisturbed = Process(root / "whole", root / "whole.log", length)
        while undisturbed.began() is None and undisturbed.process.poll() is None:
            time.sleep(0.05)
        start = undisturbed.seconds()
        want = undisturbed.wait()
        print(f"undisturbed: {undisturbed.seconds():.1f} s, {start:.1f} s to its first micro-batch")
        folder, kills = root / "killed", 0
        delay = ["--delay", str(options.delay)]
        while kills < options.kills:
            process = Process(folder, root / f"{kills}.log", [*length, *delay])
            # A third dies before its first micro-batch, the others at work.
            moment = rng.uniform(0, 1) * start * 3
            try:
                process.process.wait(timeout=moment)
                sys.exit("the run was over before its last kill; raise --micro-batches")
            except subprocess.TimeoutExpired:
                pass
            os.kill(process.process.pid, signal.SIGKILL)
            process.process.wait()
            kills += 1
            began, (last, torn) = process.began(), latest(folder)
            what = "while starting" if began is None else f"at work since micro-batch {began}"
            print(f"kill {kills:2d} after {moment:4.1f} s {what}; last checkpoint {last} "
                  f"(in the window: {last % 4}), torn ones {torn}", flush=True)  # fmt: skip
        got = Process(folder, root / "last.log", length).wait()
    print(f"{kills} kills; digest {got}, undisturbed {want}")
    if got != want:
        sys.exit("FAILED: the killed run ends with other bits")
    print("OK: the killed run ends with the same bits")


if __name__ == "__main__":
    main()
