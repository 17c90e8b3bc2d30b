"""Settings of the whole suite: eight virtual CPU devices, strict JAX, and warnings as errors.

Nearly all of the suite's time is XLA's: thousands of tiny programs. So they are compiled with
little optimisation, and once for all workers and later runs. Flags and a cache folder that are set
from outside win; a function jitted with `compiler_options=oracles.OPTIMIZED` is compiled as users'
programs are.
"""

import importlib.metadata
import os
import pathlib

FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.metadata.version("jax").startswith("0.10."):
    # Later versions have no such flag, and an unknown one ends the process.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")

# JAX reads these once, when it is imported, so they come before that import.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")]).strip()
CACHE = pathlib.Path(__file__).parents[1] / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error")
    # A worker may read a program that another one is still writing; it then compiles it itself.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache")
    config.addinivalue_line("markers", "slow: a large matrix of cases; deselect with -m 'not slow'")


@pytest.fixture
def x64():
    """Run one test with 64-bit types enabled."""
    with jax.enable_x64(True):
        yield
