"""Settings of the whole suite: eight virtual CPU devices, strict JAX, and warnings as errors."""

import os

# JAX reads these once, when it is imported, so they come before that import.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error")
    config.addinivalue_line("markers", "slow: a large matrix of cases; deselect with -m 'not slow'")


@pytest.fixture
def x64():
    """Run one test with 64-bit types enabled."""
    with jax.enable_x64(True):
        yield
