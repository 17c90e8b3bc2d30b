"""What every function that a factory returns promises, checked for each entry of one registry.

The streaming transformation has a registry of its own, in `test_contract.py`.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxaccum as ja

CUT = {"num_microbatches": 2}
ROWS = 4


def loss_fn(params, batch, scale=1.0):
    """An integer problem whose float32 sums are exact; trees may be empty and hold None."""
    e = batch["x"] + sum(jnp.sum(p) for p in jax.tree.leaves(params))
    return ja.mean(scale * e * e, where=batch["x"] > -3)


def statistics(params, batch, scale=1.0):
    loss = loss_fn(params, batch, scale)
    return {"sum": ja.Sum(loss.total), "largest": ja.Max(jnp.max(batch["x"])), "mean": loss}


def over_the_window(params, batch, scale=1.0):
    """Each micro-batch's mean is compared with the window's."""
    loss = loss_fn(params, batch, scale)
    return ja.Mean(loss.total + 0 * jax.lax.psum(loss.total, "window"), loss.weight)


def encode(params, batch, scale=1.0):
    rows = batch["x"][:, None] + sum(jnp.sum(p) for p in jax.tree.leaves(params))
    return scale * jnp.tanh(rows), jnp.tanh(rows + 1)


def step(**options):
    """A step as a function of parameters and batch, from a fresh state."""
    init, run = ja.train_step(loss_fn, optax.sgd(0.5, momentum=0.5), donate=False, **options)
    return lambda params, batch, *args: run(params, init(params), batch, *args)


# What each factory returns: a function of `(params, batch, *args)`.
REGISTRY = {
    "value_and_grad": lambda: ja.value_and_grad(loss_fn, **CUT),
    "accumulate": lambda: ja.accumulate(loss_fn, **CUT),
    "denominators": lambda: ja.denominators(loss_fn, **CUT),
    "microbatch": lambda: ja.microbatch(statistics, **CUT),
    "window_axis.value_and_grad": lambda: ja.window_axis.value_and_grad(over_the_window, **CUT),
    "window_axis.accumulate": lambda: ja.window_axis.accumulate(over_the_window, **CUT),
    "window_axis.denominators": lambda: ja.window_axis.denominators(over_the_window, **CUT),
    "train_step": lambda: step(**CUT),
    "per_example.clip": lambda: ja.value_and_grad(ja.per_example.clip(loss_fn, 2.0), **CUT),
    "per_example.transform": lambda: ja.value_and_grad(
        ja.per_example.transform(loss_fn, lambda g: jax.tree.map(jnp.sign, g)), **CUT
    ),
    "losses.contrastive_fn": lambda: ja.losses.contrastive_fn(encode, **CUT),
    # Options that change what the window carries.
    "skipping": lambda: ja.accumulate(loss_fn, skip_nonfinite=True, **CUT),
    "dropping": lambda: step(skip_nonfinite="window", max_bad_windows=2, **CUT),
    "compensated": lambda: ja.accumulate(
        loss_fn, accumulator=ja.accumulators.compensated(), noise_scale=True, **CUT
    ),
}
# Their own arithmetic is rounded differently by each compilation.
INEXACT = {"per_example.clip", "losses.contrastive_fn", "train_step", "dropping"}
each = pytest.mark.parametrize("name", REGISTRY)


def parameters():
    return {"w": jnp.array([1.0, -2.0]), "b": jnp.float32(3), "none": None, "empty": {}}


def batch(seed=0):
    x = np.random.default_rng(seed).integers(-4, 5, ROWS).astype(np.float32)
    return {"x": jnp.asarray(x), "none": None}


def types(tree):
    """What a scan or a cond compares: structure, shapes, dtypes and weak types."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, jax.typeof(x).weak_type) for x in leaves]


def assert_same(name, got, want):
    assert types(got) == types(want)
    exact = name not in INEXACT
    rtol, atol = (0, 0) if exact else (2e-6, 1e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@each
def test_eager_jit_and_scan_agree(name):
    fn = REGISTRY[name]()
    params, batches = parameters(), [batch(0), batch(1)]
    eager = [fn(params, b) for b in batches]
    compiled = jax.jit(fn)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    _, scanned = jax.lax.scan(lambda _, b: (None, fn(params, b)), None, stacked)
    for number, (want, b) in enumerate(zip(eager, batches)):
        assert_same(name, compiled(params, b), want)
        assert_same(name, jax.tree.map(lambda x, n=number: x[n], scanned), want)


@each
def test_types_are_known_beforehand_and_never_change(name):
    """Abstract evaluation gives them; nothing, one nan and only nans that count change none."""
    fn = REGISTRY[name]()
    compiled = jax.jit(fn)
    abstract = jax.eval_shape(fn, parameters(), batch())
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)]
    for fill in (1.0, -4.0, np.nan):
        out = compiled(parameters(), {**batch(), "x": jnp.full(ROWS, fill)})
        assert jax.tree.structure(out) == jax.tree.structure(abstract)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(out)] == shapes
        assert not any(weak for *_, weak in types(out)[1])


@each
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_arguments_can_be_donated(name):
    """The answer is the same, and what comes out undonated is never a buffer that came in."""
    fn, params, rows = REGISTRY[name](), parameters(), batch()
    kept = jax.jit(fn)(params, rows)
    given = {x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, rows))}
    assert not given & {x.unsafe_buffer_pointer() for x in jax.tree.leaves(kept)}
    assert_same(name, jax.jit(fn, donate_argnums=(0, 1))(params, rows), kept)


@each
def test_other_arguments_reach_the_loss(name):
    fn = REGISTRY[name]()
    plain, doubled = fn(parameters(), batch()), fn(parameters(), batch(), jnp.float32(2))
    assert types(plain) == types(doubled)
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(doubled), strict=True)
    ]
    # Weights do not depend on them.
    assert any(changed) == ("denominators" not in name)


@each
@pytest.mark.parametrize("params", [{}, {"none": [None]}], ids=["empty", "none"])
def test_no_parameters(name, params):
    out = REGISTRY[name]()(params, batch())
    assert types(out) == types(jax.jit(REGISTRY[name]())(params, batch()))


@each
def test_the_loss_is_traced_as_often_in_a_second_call_as_never(name, monkeypatch):
    """A jitted call of the same shapes traces nothing again."""
    traced = []
    whole = loss_fn

    def counting(*args):
        traced.append(1)
        return whole(*args)

    monkeypatch.setitem(globals(), "loss_fn", counting)
    monkeypatch.setitem(globals(), "encode", lambda *a, f=encode: (traced.append(1), f(*a))[1])
    fn = jax.jit(REGISTRY[name]())
    fn(parameters(), batch(0))
    number = len(traced)
    fn(parameters(), batch(1))
    assert number == len(traced) > 0


@each
def test_names_and_documentation(name):
    """A factory is documented with its arguments, results and errors, and shows a runnable line."""
    if name in {"skipping", "dropping", "compensated"}:
        pytest.skip("an option of another entry")
    factory = ja
    for part in name.split("."):
        factory = getattr(factory, part)
    text = inspect.getdoc(factory)
    assert all(f"{word}:\n" in text for word in ("Args", "Returns", "Raises", "Example"))
    keywords = inspect.signature(factory).parameters.values()
    assert all(p.annotation is not p.empty for p in keywords)
    returned = REGISTRY[name]()
    if inspect.isfunction(returned) and name != "train_step":
        assert returned.__name__.endswith("_fn")
