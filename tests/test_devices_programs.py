"""Compiled windows over devices: one reduction of one gradient, and no rows that move."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bilinear import ROWS, build, problem, terms_loss, token_loss
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, PMAP, Collective, Setup, collectives, recording

import jaxaccum as ja

FEATURES, HIDDEN = 128, 32
WEIGHT_BYTES = 4 * FEATURES * HIDDEN
GRADIENT_BYTES = WEIGHT_BYTES + 4 * HIDDEN
# The smallest that a part of a gradient can be; activations of a micro-batch are smaller.
GRADIENT_SIZED = WEIGHT_BYTES // 4
BOTH = ("data", "model")

# On jax 0.10 `shard_map` gathers what is split over another Explicit axis at its boundary: the
# parameters once before the loop, the gradients once after it.
GATHERS_PARAMETERS = tuple(int(n) for n in jax.__version__.split(".")[:2]) < (0, 12)

CASES = [
    ("value_and_grad", Setup("A"), token_loss, False),
    ("value_and_grad", Setup("E", check_vma=False), terms_loss, True),
    ("value_and_grad", Setup("AA"), token_loss, True),
    ("value_and_grad", Setup("EE", manual=True), token_loss, False),
    ("value_and_grad", Setup("EE", check_vma=False), token_loss, False),
    ("value_and_grad", PMAP, terms_loss, False),
    ("plain jit", Setup("A"), terms_loss, True),
    ("plain jit", Setup("E"), token_loss, False),
    ("plain jit", Setup("AA"), token_loss, False),
    ("plain jit", Setup("EE"), token_loss, True),
    ("plain jit", Setup("EE", names=BOTH), token_loss, False),
    ("train_step", Setup("E"), token_loss, True),
    ("train_step", Setup("AA"), terms_loss, False),
    ("stream", Setup("A"), token_loss, False),
    ("stream", Setup("E", check_vma=False), token_loss, True),
    ("stream", Setup("AA", manual=True), token_loss, False),
    ("stream", PMAP, token_loss, False),
]


def case_name(case):
    route, setup, loss_fn, skip = case
    return f"{route}-{setup}-{loss_fn.__name__}{'-skip' if skip else ''}"


@functools.cache
def programs(route, setup, loss_fn=token_loss, skip=False):
    """The collectives of the last program that a route runs, on parameters that are large."""
    run = build(route, setup, loss_fn, "even", skip=skip)
    with recording() as texts:
        run.call(*problem(1, features=FEATURES, hidden=HIDDEN))
    return collectives(texts[-1])


def gradient_sized(found):
    return [c for c in found if c.bytes >= GRADIENT_SIZED]


EACH = pytest.mark.parametrize("case", CASES, ids=case_name)


@EACH
def test_case_24_no_reduction_in_a_loop_and_one_gradient_outside(case):
    found = programs(*case)
    reductions = [c for c in found if c.kind == "all-reduce"]
    assert not [c for c in gradient_sized(found) if c.in_loop]
    assert gradient_sized(reductions)
    outside = sum(c.bytes for c in reductions if not c.in_loop)
    one = GRADIENT_BYTES // 2 if case[1].tensor_parallel else GRADIENT_BYTES
    assert 1.0 <= outside / one <= 1.02


@EACH
def test_case_25_no_rows_are_moved(case):
    setup = case[1]
    moved = [c for c in programs(*case) if c.kind != "all-reduce"]
    if GATHERS_PARAMETERS and setup.tensor_parallel and "E" in setup.types:
        assert {c.kind for c in moved} <= {"all-gather"}
        assert not any(c.in_loop or c.bytes > WEIGHT_BYTES for c in moved)
        assert sum(c.bytes for c in moved) <= 2 * GRADIENT_BYTES
    else:
        assert not moved


@pytest.mark.parametrize("case", [c for c in CASES if c[0] == "stream"], ids=case_name)
def test_only_the_closing_call_of_a_stream_reduces(case):
    """What is not in the branch that closes the window is at most one flag."""
    found = programs(*case)
    assert all(c.in_branch for c in gradient_sized(found))
    always = [c for c in found if not c.in_branch]
    assert sum(c.bytes for c in always) <= (4 if case[3] else 0)


def test_a_stream_of_tokens_reduces_one_number_more_in_each_call():
    setup = Setup("A")
    tx = ja.multi_steps(optax.adam(0.1), ja.until_weight(100), axis_name="data")
    params, _ = problem(1, features=FEATURES, hidden=HIDDEN)
    specs = ja.state_specs(jax.eval_shape(tx.init, params), "data")

    def micro_step(params, state, grads):
        grads = jax.tree.map(lambda g: g[0], grads)
        return tx.update(grads, state, params, weight=jnp.int32(5))

    grads = jax.tree.map(lambda p: np.ones((DEVICES, *p.shape), np.float32), params)
    state = setup.shard(tx.init, P(), specs)(params)
    with recording() as texts:
        setup.shard(micro_step, (P(), specs, P("data")), (P(), specs))(params, state, grads)
    found = collectives(texts[-1])
    assert all(c.in_branch for c in gradient_sized(found))
    assert sum(c.bytes for c in found if not c.in_branch) <= 8
    assert GRADIENT_BYTES <= sum(c.bytes for c in found if c.in_branch) <= 1.02 * GRADIENT_BYTES


@pytest.mark.parametrize("loss_fn", [token_loss, terms_loss])
@pytest.mark.parametrize("spmd", [True, False])
def test_unequal_work_has_no_collective_in_its_loop(loss_fn, spmd):
    """A device that runs fewer micro-batches waits for nobody inside the loop."""
    setup = Setup("A")
    args = setup.place(*problem(1, features=FEATURES, hidden=HIDDEN))
    real = setup.put(np.arange(DEVICES, dtype=np.int32) % 5, P("data"))
    if spmd:
        f = ja.value_and_grad(loss_fn, num_microbatches=4, spmd_axis_name="data")
        with setup.active():
            lowered = jax.jit(lambda p, b, n: f(p, b, num_real=n)).lower(*args, real)
        text = lowered.compile().as_text()
    else:
        f = ja.value_and_grad(loss_fn, num_microbatches=4, axis_name="data")
        with recording() as texts:
            setup.shard(lambda p, b, n: f(p, b, num_real=n[0]), (P(), P("data"), P("data")), P())(
                *args, real
            )
        (text,) = texts
    found = collectives(text)
    assert not [c for c in found if c.in_loop]
    assert sum(c.bytes for c in found) <= 1.02 * GRADIENT_BYTES


def test_plain_jit_without_the_library_reduces_in_its_loop():
    """The reader of programs sees what the library avoids."""
    setup = Setup("A")
    params, batch = setup.place(*problem(1, features=FEATURES, hidden=HIDDEN))

    def naive(params, batch):
        def step(total, rows):
            grads = jax.grad(lambda p: token_loss(p, rows).total)(params)
            return jax.tree.map(jnp.add, total, grads), None

        strided = jax.tree.map(lambda x: x.reshape(-1, 4, *x.shape[1:]).swapaxes(0, 1), batch)
        return jax.lax.scan(step, jax.tree.map(jnp.zeros_like, params), strided)[0]

    found = collectives(jax.jit(naive).lower(params, batch).compile().as_text())
    assert any(c.in_loop for c in gradient_sized(found))


def test_collectives_are_read_with_the_control_flow_around_them():
    text = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %c = f32[] add(%a, %b)
}

%close (p: f32[4]) -> f32[4] {
  ROOT %r = (f32[4]{0}, s32[]) all-reduce(%p, %q), channel_id=1, to_apply=%add
}

%hold (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4] parameter(0)
}

%body (p: (f32[4])) -> (f32[4]) {
  ROOT %r = bf16[2,3]{1,0} all-gather(%p), dimensions={0}
}

%condition (p: (f32[4])) -> pred[] {
  ROOT %r = pred[] constant(true)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (f32[4]{0}) while(%p), condition=%condition, body=%body
  %x = f32[4]{0} conditional(%i, %p, %p), branch_computations={%hold, %close}
  ROOT %y = pred[] collective-permute(%x), channel_id=2
}
"""
    assert collectives(text) == [
        Collective("all-gather", 12, True, False),
        Collective("all-reduce", 20, False, True),
        Collective("collective-permute", 1, False, False),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [token_loss, terms_loss])
@pytest.mark.parametrize("types", ["AA", "EE", "AE", "EA"])
def test_tensor_parallel_reductions_are_of_the_local_part(types, loss_fn):
    found = programs("plain jit", Setup(types), loss_fn, True)
    assert not [c for c in gradient_sized(found) if c.in_loop]
    outside = sum(c.bytes for c in found if c.kind == "all-reduce" and not c.in_loop)
    assert 1.0 <= outside / (GRADIENT_BYTES // 2) <= 1.02


def test_the_batch_is_larger_than_any_slack():
    """A moved batch cannot hide in the two per cent."""
    _, batch = problem(1, features=FEATURES, hidden=HIDDEN)
    assert batch["x"].nbytes / DEVICES > 0.02 * GRADIENT_BYTES
    assert batch["x"].shape[0] == ROWS
