"""Random calls over the whole contract: an exact answer, or a refusal in our own words.

Everything that a call is made of is drawn: structures, shapes, dtypes, weights, cuts, options, some
of them wrong. What comes back is compared with a float64 sum; what is raised must be a `TypeError`
or `ValueError` whose message begins with the public function's name and holds an argument in
backticks. Tracing problems and internal errors (`KeyError`, `AttributeError`, …) fail the test.
"""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxaccum as ja

FEW = settings(max_examples=25, deadline=None, derandomize=True, database=None)
OURS = re.compile(
    r"(accumulate|value_and_grad|merge|finalize|mean|Mean|multi_steps|flush): .*`", re.S
)
DTYPES = ["float32", "bfloat16", "float16", "int32", "bool", "complex64"]
STRANGE = [None, "text", 3, 2.5, True, (), {}, [1.0], np.array(["a"]), np.array([None]), object()]


@contextlib.contextmanager
def ours_to_refuse(refused):
    """Notes a refusal in our own words; anything else goes through."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not OURS.match(str(error)):
            raise AssertionError("a message that is not ours") from error
        refused.append(str(error))


def arrays(shape):
    return st.sampled_from(DTYPES).map(lambda dtype: jnp.ones(shape, dtype))


def trees(leaves):
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=2).map(tuple),
            st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        ),
        max_leaves=3,
    )


PARAMS = trees(st.one_of(arrays(()), arrays((2,)), arrays((0,)), st.none()))
STRANGE_TREES = trees(st.one_of(arrays((2,)), st.sampled_from(STRANGE)))
INTEGERS = st.one_of(st.integers(-1, 6), st.sampled_from(STRANGE))


def inexact(tree):
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def linear_loss(params, batch):
    """Each row adds its number to the gradient of every real parameter's entries."""
    slope = batch.astype(jnp.float32)
    parts = [jnp.sum(x.real.astype(jnp.float32)) for x in inexact(params)]
    total = sum(parts, jnp.float32(0))
    return ja.mean(slope * total)


@FEW
@given(
    PARAMS,
    st.integers(0, 5),
    st.sampled_from(["float32", "int32", "bfloat16"]),
    INTEGERS,
    st.sampled_from([None, 1, 2, 9, "2"]),
    st.sampled_from([False, True]),
    st.sampled_from([None, "compensated", "chunked", "plain", 3]),
    st.sampled_from([None, 0, 1, 2, 9, -1, "1"]),
)
def test_windows(params, rows, dtype, number, size, skip, accumulator, num_real):
    refused = []
    with ours_to_refuse(refused):
        if isinstance(accumulator, str):
            accumulator = getattr(ja.accumulators, accumulator)()
        f = ja.accumulate(
            linear_loss,
            num_microbatches=number,
            microbatch_size=size,
            skip_nonfinite=skip,
            accumulator=accumulator,
        )
        sums = f(params, jnp.arange(1, rows + 1).astype(dtype), num_real=num_real)
    if not refused:
        assert size is None or number is None
        order = [list(map(int, m)) for m in ja.split(np.arange(1, rows + 1),
                 num_microbatches=number, microbatch_size=size)]  # fmt: skip
        kept = [row for micro_batch in order[:num_real] for row in micro_batch]
        assert sums.weight == len(kept)
        for grad in inexact(sums.grads):
            np.testing.assert_array_equal(np.float64(grad.real), sum(kept))


ARGUMENTS = {
    "w": np.float32(3),
    "s": np.array([1, 2], np.float32),
    "x": np.array([1, -2, 3, 0, 2, 5, -1, 4], np.float32),
    "y": np.array([2, 1, 0, -3, 4, 2, 2, -1], np.float32),
}


def answers_by_name():
    """The loss `mean((w * sum(s) * x - y)**2)` and its gradients, in float64."""
    w, s, x, y = (np.float64(a) for a in ARGUMENTS.values())
    error = w * s.sum() * x - y
    of_s = np.mean(2 * error * w * x) * np.ones(2)
    of_w, of_x = np.mean(2 * error * s.sum() * x), 2 * error * w * s.sum() / 8
    return np.mean(error**2), {"w": of_w, "s": of_s, "x": of_x, "y": -2 * error / 8}


@settings(FEW, max_examples=12)
@given(
    st.permutations("wsxy"),
    st.permutations("xy"),
    st.lists(st.sampled_from("wsxy"), min_size=1, unique=True),
    st.sampled_from([0, 4]),
    st.integers(1, 8),
    st.booleans(),
)
def test_positions_in_any_order(order, cut, asked, back, number, combined):
    def loss_fn(*args):
        w, s, x, y = (dict(zip(order, args, strict=True))[name] for name in "wsxy")
        return ja.mean((w * s.sum() * x - y) ** 2)

    options = {
        "argnums": [order.index(name) - back for name in asked],
        "batch_argnums": [order.index(name) - back for name in cut],
        "num_microbatches": number,
    }
    if combined:
        f = jax.value_and_grad(ja.microbatch(loss_fn, **options), tuple(options["argnums"]))
    else:
        f = ja.value_and_grad(loss_fn, **options)
    got = f(*[jnp.asarray(ARGUMENTS[name]) for name in order])
    loss, grads = answers_by_name()
    jax.tree.map(np.testing.assert_array_equal, got, (loss, tuple(grads[n] for n in asked)))


@FEW
@given(
    STRANGE_TREES, STRANGE_TREES, st.sampled_from([jnp.float32(1), 1.0, None, "a", ja.Mean(1, 1)])
)
def test_windows_of_anything(params, batch, loss):
    refused = []
    with ours_to_refuse(refused):
        ja.value_and_grad(lambda p, b: loss, num_microbatches=1)(params, batch)
    assert refused or loss.__class__ is ja.Mean


@FEW
@given(
    PARAMS,
    st.one_of(
        st.integers(-1, 3), st.sampled_from([None, "2", 2.5, ja.until_weight(3), lambda s: 2])
    ),
    st.lists(
        st.tuples(
            st.integers(-3, 3),
            st.one_of(
                st.integers(-2, 5),
                st.floats(0, 4, width=16),
                st.sampled_from([None, np.nan, np.inf, "3", 1j, jnp.ones(2), True, 2**31]),
            ),
        ),
        max_size=5,
    ),
    st.booleans(),
)
def test_streams(params, every, calls, skip):
    refused, optimizer_steps = [], 0
    with ours_to_refuse(refused):
        tx = ja.multi_steps(optax.identity(), every, skip_nonfinite=skip)
        state = tx.init(params)
        types = jax.tree.map(lambda x: (x.shape, x.dtype), state)
        held = []
        for value, weight in calls:
            grads = jax.tree.map(lambda x: (value * jnp.ones_like(x)).astype(x.dtype), params)
            before = state
            grads = jax.tree.map(
                lambda g: (
                    g
                    if jnp.issubdtype(g.dtype, jnp.inexact)
                    else np.zeros(g.shape, jax.dtypes.float0)
                ),
                grads,
            )
            named = {} if weight is None else {"weight": weight}
            updates, state = tx.update(grads, state, params, **named)
            assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == types
            size = 1.0 if weight is None else float(weight)
            if skip and not np.isfinite(size):
                assert state.num_skipped == before.num_skipped + 1
                continue
            held.append((value, size))
            if state.micro_step == 0:  # the window has closed
                total, divisor = sum(v for v, _ in held), sum(w for _, w in held)
                held = []
                assert ja.has_updated(state) == (divisor != 0)
                if divisor and np.isfinite(divisor):
                    for u in inexact(updates):
                        wanted = np.full(u.shape, total / divisor)
                        rtol = 4 * float(jnp.finfo(u.dtype).eps)
                        np.testing.assert_allclose(np.complex128(u), wanted, rtol=rtol)
            optimizer_steps += int(ja.has_updated(state))
            assert state.optimizer_step == optimizer_steps


@FEW
@given(PARAMS, STRANGE_TREES, st.sampled_from([None, 1, "a"]), st.sampled_from(STRANGE))
def test_streams_of_anything(params, grads, weight, state):
    refused = []
    tx = ja.multi_steps(optax.identity(), 2)
    with ours_to_refuse(refused):
        made = tx.init(params)
        tx.update(grads, made, params, weight=weight)
    with ours_to_refuse(refused):
        tx.init(grads)
    with ours_to_refuse(refused):
        tx.update(params, state, params)
    assert refused  # no state is strange


@FEW
@given(st.sampled_from([*STRANGE, jnp.ones(3), jnp.ones((3, 2))]), st.data())
def test_means_of_anything(values, data):
    some = st.sampled_from([None, jnp.ones(3, bool), jnp.ones((3, 1)), 2, *STRANGE])
    refused = []
    with ours_to_refuse(refused):
        mean = ja.mean(values, data.draw(some), weights=data.draw(some))
    if not refused:
        assert isinstance(mean.value, jax.Array)
        assert mean.total.shape == mean.weight.shape == ()
    with ours_to_refuse(refused):
        ja.merge(ja.Mean(values, data.draw(some)), ja.Mean(1.0, 2)).value  # noqa: B018 - may raise
