"""Compensated and stochastically rounded sums survive the compilers of TPUs and GPUs.

On a CPU the residual itself is tested (cases 52). For TPUs and GPUs the compiled program is read,
where the plugins that compile without a device are installed: the subtractions that find the
residual, which an algebraic simplifier would remove, must be in it.
"""

import importlib.util
import os
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from oracles import OPTIMIZED

import jaxaccum as ja

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
NEEDS = {"cpu": None, "tpu": "libtpu", "cuda": "jax_cuda12_plugin"}
TOPOLOGIES = {"tpu": "v5e:2x2", "cuda": "1x1x1"}
SIZE = 256


def installed(module):
    try:
        return module is None or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


PLATFORMS = [
    pytest.param(
        name, marks=pytest.mark.skipif(not installed(module), reason=f"{module} is not installed")
    )
    for name, module in NEEDS.items()
]


def compiled_text(platform, fn, *args):
    """The optimized program of `fn` for a device of the platform that need not be there."""
    if platform == "cpu":
        return jax.jit(fn, compiler_options=OPTIMIZED).lower(*args).compile().as_text()
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import clusters
    finally:
        sys.path.remove(str(BENCHMARKS))
    cluster = clusters.Cluster(platform, TOPOLOGIES[platform], (1, 1 if platform == "cuda" else 4))
    mesh = clusters.mesh_of(platform, cluster)
    whole = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args)
    return jax.jit(fn, out_shardings=whole).lower(*placed).compile().as_text()


def update_of(accumulator):
    """One micro-step that stays in the window, without the optimizer's own arithmetic."""
    tx = ja.multi_steps(optax.identity(), 8, accumulator=accumulator)
    params = jnp.zeros(SIZE)
    key = {"key": jax.random.PRNGKey(0)} if accumulator.needs_key else {}
    state = jax.eval_shape(tx.init, params)

    def update(grads, state, key):
        return tx.update(grads, state, **key)[1]

    return update, jax.eval_shape(lambda: params), state, jax.eval_shape(lambda: key)


def operations(text, name, dtype="f32", size=SIZE):
    """How often an operation on whole gradients stands in the program."""
    return len(re.findall(rf"= {dtype}\[{size}\](?:\{{[^}}]*\}})? {name}\(", text))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_residual_is_computed(platform):
    """Knuth's two-sum finds the residual by four subtractions, and a micro-step makes two."""
    text = compiled_text(platform, *update_of(ja.accumulators.compensated()))
    assert operations(text, "subtract") >= 8
    plain = compiled_text(platform, *update_of(ja.accumulators.plain()))
    assert operations(plain, "subtract") == 0


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_stochastic_sum_is_carried_in_bfloat16(platform):
    """The rounding is made of integers, so excess precision cannot undo it."""
    text = compiled_text(platform, *update_of(ja.accumulators.stochastic()))
    assert operations(text, "and", "u32") >= 1
    root = text[text.index("ENTRY") :]
    assert re.search(rf"bf16\[{SIZE}\]", root[root.index("ROOT") :])
