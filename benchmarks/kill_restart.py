"""Kills a training process at random moments and restarts it, until it has died often enough.

`python benchmarks/kill_restart.py` runs `examples/restart.py` once without interruption; then again
and again, each time with SIGKILL at a random moment: before its first import, at work, in the
middle of a checkpoint; then to the end. Every bit of parameters, state and key has to be that of
the undisturbed run. Prints one line for each kill.
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
        """Where the process began, once it is at work."""
        words = self.log.read_text().split()
        return int(words[3]) if words[4:6] == ["at", "work"] else None


def latest(folder):
    """The last complete checkpoint, and how many incomplete ones lie beside it."""
    names = [path.name for path in folder.glob("*")]
    complete = [int(name) for name in names if name.isdigit()]
    return max(complete, default=0), len(names) - len(complete)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--micro-batches", type=int, default=1800)
    parser.add_argument("--work", type=float, default=3.0, help="seconds of work before a kill")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds after a micro-batch")
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
            if rng.random() < 1 / 3:  # while it starts
                moment = rng.uniform(0, start)
            else:  # at work, or in the middle of a checkpoint
                while process.began() is None and process.process.poll() is None:
                    time.sleep(0.05)
                moment = process.seconds() + rng.uniform(0, options.work)
            time.sleep(max(0.0, moment - process.seconds()))
            if process.process.poll() is not None:
                sys.exit(f"over before its last kill:\n{process.log.read_text()}")
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
