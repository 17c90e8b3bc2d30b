"""Every optimizer of Optax under `multi_steps`: equal to itself on the window's mean gradient.

Those that need more than a learning rate are in `SPECIAL`, those that are left out in `LEFT_OUT`,
and those that refuse a float32 gradient of a bfloat16 parameter in `NARROW`, each with the reason.
"""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from test_stream import integer_grads, train

import jaxaccum as ja

RATE = 0.125
EVERY = 3


def loss(params):
    """A smooth loss for what evaluates one itself."""
    return sum(jnp.sum(jnp.square(x.astype(jnp.float32) - 1)) for x in jax.tree.leaves(params))


# name: (how it is made, extra arguments of its update, reason)
SPECIAL = {
    "polyak_sgd": (optax.polyak_sgd, {"value"}, "its step size is computed from the loss"),
    "lbfgs": (optax.lbfgs, {"value", "grad", "value_fn"}, "its line search evaluates the loss"),
    "momo": (contrib.momo, {"value"}, "its step size is computed from the loss"),
    "momo_adam": (contrib.momo_adam, {"value"}, "its step size is computed from the loss"),
    "sophia": (lambda: contrib.sophia(RATE), {"obj_fn"}, "estimates the Hessian of the loss"),
    "galore": (lambda: contrib.galore(RATE, rank=2), (), "its rank must fit the matrices"),
    "noisy_sgd": (lambda: optax.noisy_sgd(RATE, key=0), (), "its noise needs a key"),
    "optimistic_gradient_descent": (
        lambda: optax.optimistic_gradient_descent(RATE),
        (),
        "holds the previous gradient, nothing else is special",
    ),
    "cocob": (contrib.cocob, (), "has no learning rate"),
    "schedule_free": (
        lambda: contrib.schedule_free(optax.sgd(RATE), RATE),
        (),
        "wraps an optimizer; its state holds the parameters",
    ),
    "mechanize": (lambda: contrib.mechanize(optax.sgd(RATE)), (), "wraps an optimizer"),
    "apply_if_finite": (
        lambda: optax.apply_if_finite(optax.adam(RATE), 3),
        (),
        "wraps an optimizer",
    ),
    "reduce_on_plateau": (
        lambda: optax.chain(optax.sgd(RATE), contrib.reduce_on_plateau()),
        {"value"},
        "judges the loss",
    ),
    "sam": (
        lambda: contrib.sam(optax.sgd(RATE), optax.chain(contrib.normalize(), optax.sgd(0.25))),
        (),
        "takes its two gradients in turn: one window for each",
    ),
}
LEFT_OUT = {
    "optimistic_adam": "deprecated by Optax; optimistic_adam_v2 takes its place",
    "dpsgd": "its update takes per-example gradients with a leading axis, the sum has none",
}
NARROW = {
    "novograd": "the branches of its own cond differ in dtype",
    "galore": "the branches of its own cond differ in dtype",
    "apply_if_finite": "the branches of its own cond differ in dtype",
    "mechanize": "its lax.clamp mixes dtypes",
    "lbfgs": "writes the float32 gradient into a bfloat16 history, which JAX warns about",
}
EXTRA = {
    "value": lambda params, grad: ja.Mean(8.0, 2.0),
    "grad": lambda params, grad: grad,
    "value_fn": lambda params, grad: loss,
    "obj_fn": lambda params, grad: loss,
}


def discover():
    """Name and factory of every public optimizer that takes a learning rate."""
    found = {}
    for module in (optax, contrib):
        for name, factory in vars(module).items():
            if name.startswith("scale_by") or not inspect.isfunction(factory):
                continue
            parameters = inspect.signature(factory).parameters
            required = [p.name for p in parameters.values() if p.default is p.empty]
            if "learning_rate" in parameters and set(required) <= {"learning_rate"}:
                found[name] = lambda factory=factory: factory(learning_rate=RATE)
    return found


OPTIMIZERS = {n: (make, (), "") for n, make in discover().items() if n not in LEFT_OUT} | SPECIAL
# One of each kind for every run; the others are marked slow.
QUICK = {"adamw", "adafactor", "muon", "momo", "schedule_free"}
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(OPTIMIZERS)]


def parameters(dtype=jnp.float32):
    values = {"w": jnp.arange(12.0).reshape(4, 3) / 8 - 0.5, "b": jnp.array([0.5, -1.0, 2.0])}
    return jax.tree.map(lambda x: x.astype(dtype), values)


def with_extra_args(tx, extra):
    """`tx` with the arguments that its update needs; functions are no arguments of a `jit`."""

    def update_fn(updates, state, params=None, *, value=None):
        given = {name: EXTRA[name](params, updates) for name in extra}
        if value is not None and "value" in extra:
            given["value"] = value
        return tx.update(updates, state, params, **given)

    return optax.GradientTransformationExtraArgs(tx.init, update_fn)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_plain_optimizer_on_the_mean_gradient(name):
    make, extra, _ = OPTIMIZERS[name]
    grads = integer_grads(2 * EVERY, parameters())
    windows = [grads[:EVERY], grads[EVERY:]]
    means = [jax.tree.map(lambda *g: jnp.float32(sum(g)) / EVERY, *w) for w in windows]
    values = jnp.full(2, 4.0)
    plain = train(with_extra_args(make(), extra), parameters(), means, value=values)
    stream = with_extra_args(ja.multi_steps(make(), EVERY), extra)
    params, state = train(stream, parameters(), grads)
    assert state.optimizer_step == 2
    chex.assert_trees_all_equal_shapes_and_dtypes(params, plain[0])
    chex.assert_trees_all_close(params, plain[0], rtol=4e-6, atol=1e-6)


def narrow(name):
    """Marks what cannot take the mean in float32 where the parameters are bfloat16."""
    marks = [] if name in QUICK else [pytest.mark.slow]
    if name in NARROW:
        marks.append(pytest.mark.xfail(strict=True, reason=NARROW[name]))
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [narrow(name) for name in sorted(OPTIMIZERS)])
def test_runs_in_a_scan_with_bfloat16_parameters(name):
    make, extra, _ = OPTIMIZERS[name]
    tx = with_extra_args(ja.multi_steps(make(), EVERY), extra)
    start = parameters(jnp.bfloat16)

    def step(carry, grad):
        params, state = carry
        updates, state = tx.update(grad, state, params)
        return (optax.apply_updates(params, updates), state), ja.has_updated(state)

    stacked = jax.tree.map(lambda *g: jnp.stack(g), *integer_grads(6, start, dtype=jnp.bfloat16))
    run = jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g))
    (params, _), closed = run(start, stacked)
    np.testing.assert_array_equal(closed, [False, False, True] * 2)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, start)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(params))


def test_every_optimizer_is_named_once():
    assert len(OPTIMIZERS) >= 45
    assert not LEFT_OUT.keys() & OPTIMIZERS.keys()
