"""A process whose peer is lost ends by itself, with one line."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxaccum.multihost import Watchdog

PROCESS = """
import sys
from jaxaccum.multihost import Watchdog

number, port = int(sys.argv[1]), sys.argv[2]
with Watchdog(f"process {number}", limit=float(sys.argv[3])) as watchdog:
    watchdog.beat("connecting")
    import jax
    import numpy as np
    import jaxaccum as ja

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number, heartbeat_timeout_seconds=3600)
    mesh = jax.make_mesh((2,), ("data",))
    with jax.set_mesh(mesh):
        x = jax.make_array_from_process_local_data(
            jax.NamedSharding(mesh, jax.P("data")), np.ones(4, np.float32) + number
        )
        fn = jax.jit(
            ja.value_and_grad(
                lambda w, x: ja.mean(w * x), num_microbatches=2, spmd_axis_name="data"
            )
        )
        while True:
            loss, _ = jax.block_until_ready(fn(np.float32(1), x))
            watchdog.beat("in a step")
            watchdog.limit = 2.0
            print("step", float(loss), flush=True)
"""


def start(number, port, limit):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(number), str(port), str(limit)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def name_resolves():
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


@pytest.mark.skipif(not name_resolves(), reason="gloo needs the host's name to resolve")
def test_a_peer_that_hangs_ends_the_other_in_one_line():
    port = free_port()
    workers = [start(number, port, 120) for number in range(2)]
    try:
        lines = iter(workers[0].stdout)
        assert any(line == "step 1.5\n" for line in lines)  # after those of gloo
        workers[1].send_signal(signal.SIGSTOP)
        lost = time.monotonic()
        _, errors = workers[0].communicate(timeout=30)
        assert time.monotonic() - lost < 10
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            worker.stdout.close()
            worker.stderr.close()
    assert workers[0].returncode == 1
    said = "process 0: nothing was completed for 2 s; another process hangs or is gone, while in a"
    assert errors.strip().splitlines()[-1].startswith(said)


def test_a_peer_that_never_comes_ends_it_too():
    alone = start(0, free_port(), 3)
    _, errors = alone.communicate(timeout=60)
    assert alone.returncode == 1
    assert errors.strip().splitlines()[-1].endswith("while connecting")


def test_without_an_error_it_stops():
    with Watchdog("this process", limit=0.2) as watchdog:
        watchdog.beat("nothing")
    time.sleep(0.4)  # and it would have ended this process
