"""Two local processes: they train alike, resume bit for bit, and end when one of them is lost."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from oracles import child_environment

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("tqdm")

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "multihost.py"


def name_resolves() -> bool:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not name_resolves(), reason="gloo needs the host's name to resolve")
TRACES = ("Traceback", "Abort", "SIGABRT", "stack trace", "core dumped", "terminate called")


def start(*args: str, cwd: pathlib.Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, EXAMPLE, *args],
        cwd=cwd,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(launcher: subprocess.Popen) -> str:
    output, _ = launcher.communicate()
    assert launcher.returncode == 0, output
    return output


def read_until(launcher: subprocess.Popen, words: str) -> str:
    output = ""
    for line in launcher.stdout:
        output += line
        if words in line:
            return output
    raise AssertionError(f"the run ended before {words!r}:\n{output}")


def digests(output: str) -> list[str]:
    return re.findall(r"process \d: parameters sha256 ([0-9a-f]{64})", output)


def test_two_processes_end_with_the_same_parameters(tmp_path):
    options = ["--quick", "--steps", "6", "--checkpoint-every", "4", "--log-every", "2"]
    output = finish(start(*options, cwd=tmp_path))
    first, second = digests(output)
    assert first == second
    assert "OK: 2 processes end with the same parameters, bit for bit" in output
    assert re.search(r"loss \d\.\d+, [\d,]+ tokens/s", output)
    saved = sorted(int(path.name) for path in (tmp_path / "multihost_checkpoints").iterdir())
    assert saved == [4, 6]


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    options = ["--quick", "--steps", "60"]
    undisturbed = finish(start(*options, "--checkpoints", "whole", cwd=tmp_path))

    # From here on `--resume` always, as a scheduler does that starts a command until it succeeds.
    options += ["--checkpoints", "cut", "--resume"]
    launcher = start(*options, cwd=tmp_path)
    read_until(launcher, "saved step 20")
    launcher.kill()
    rest, _ = launcher.communicate()  # the workers are gone too when the output ends
    assert not digests(rest)
    assert not any(trace in rest for trace in TRACES), rest

    resumed = finish(start(*options, cwd=tmp_path))
    step = int(re.search(r"resumed at step (\d+)", resumed)[1])
    assert 20 <= step < 60
    assert digests(resumed) == digests(undisturbed)

    again = start("--quick", "--checkpoints", "cut", cwd=tmp_path)
    output, _ = again.communicate()
    assert again.returncode != 0
    assert "cut holds a checkpoint of step 60 already; add `--resume`" in output
    assert not any(trace in output for trace in TRACES), output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_ends_the_others(tmp_path, how, victim):
    launcher = start("--quick", "--steps", "100000", cwd=tmp_path)
    output = read_until(launcher, "saved step 10")
    pids = [int(pid) for pid in re.findall(r"has pid (\d+)", output)]
    os.kill(pids[victim], how)
    lost = time.monotonic()
    output, _ = launcher.communicate()
    assert time.monotonic() - lost < 30
    assert launcher.returncode == 1
    other = f"process {1 - victim}"
    silence = "nothing was completed for 20 s; another process hangs or is gone"
    if how == signal.SIGSTOP:
        assert f"{other}: {silence}, while " in output, output
        assert f"process {victim} did not end by itself and is killed" in output
    else:  # silence, if it waited for the other one outside of a step
        assert re.search(rf"{other}: (lost another process \(.*\)|{silence}), while ", output), (
            output
        )
        assert f"process {victim} was killed by SIGKILL" in output
    assert f"{other} ended with code 1" in output
    assert not any(trace in output for trace in TRACES), output
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
