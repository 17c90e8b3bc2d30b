"""Every way to run a window, behind one call.

A route takes a loss function, the options of its window, and a setup of `meshes.py` to
`call(params, batch)`, which returns an `Outcome`. `bilinear.py` runs them over every mesh,
`problems.py` brings each numeric case of the public bug reports.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from meshes import one_result, per_device, pmapped, watched

import jaxaccum as ja


class Outcome(NamedTuple):
    """What a route gives: the window's loss, gradient, and weight where it tells."""

    loss: Any
    grads: Any
    weight: Any = None


class Recorded(NamedTuple):
    """What an optimizer was given last."""

    value: jax.Array
    grads: Any


def recorder():
    """An optimizer that changes nothing and keeps the value and the gradient that it is given."""

    def init_fn(params):
        zeros = jax.tree.map(
            lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)), params
        )
        doubled = any(x.dtype == jnp.float64 for x in jax.tree.leaves(zeros))
        return Recorded(jnp.full((), jnp.nan, jnp.float64 if doubled else jnp.float32), zeros)

    def update_fn(updates, state, params=None, *, value, **extra_args):
        del state, params, extra_args
        return jax.tree.map(jnp.zeros_like, updates), Recorded(value, updates)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def halves(batch, number):
    """The first and the second half of every device's rows."""

    def cut(leaf, half):
        parts = leaf.reshape(number, 2, -1, *leaf.shape[1:])
        return parts[:, half].reshape(-1, *leaf.shape[1:])

    return [jax.tree.map(lambda leaf: cut(leaf, half), batch) for half in range(2)]


def route_value_and_grad(setup, loss_fn, options, *, given=None, **_):
    """`value_and_grad`, inside `shard_map` or `pmap` with an axis name."""
    f = ja.value_and_grad(loss_fn, axis_name=setup.names, **options)
    return setup.each(lambda params, batch: Outcome(*f(params, batch, denominators=given)))


def route_scatter(setup, loss_fn, options, *, given=None, **_):
    """`value_and_grad` of parameters in parts, whose sums are reduce-scattered (FSDP)."""
    parts = P(setup.names)
    options = {**options, "reduction": "scatter", "param_specs": parts}
    f = ja.value_and_grad(loss_fn, axis_name=setup.names, **options)
    call = setup.shard(
        lambda params, batch: f(params, batch, denominators=given), (parts, parts), (P(), parts)
    )
    return lambda params, batch: Outcome(*call(setup.put(params, parts), setup.put(batch, parts)))


COUNTING = {"num_microbatches", "microbatch_size", "axis_name"}


def route_merge(setup, loss_fn, options, *, given=None, several_terms=False, into=False):
    """`accumulate` of both halves, merged, or the second one going on from the first; divided."""
    options = {**options, "axis_name": setup.names}
    counting = {name: x for name, x in options.items() if name in COUNTING}

    def step(params, batch):
        parts, denominators = halves(batch, 1), given
        if several_terms and given is None:
            count = ja.denominators(loss_fn, **counting)
            denominators = jax.tree.map(jnp.add, *[count(params, part) for part in parts])
        f = ja.accumulate(loss_fn, **options)
        first = f(params, parts[0], denominators=denominators)
        if into:
            sums = f(params, parts[1], denominators=denominators, into=first)
        else:
            sums = ja.merge(first, f(params, parts[1], denominators=denominators))
        window = ja.finalize(sums)
        return Outcome(window.loss, window.grads, window.weight)

    return setup.each(step)


def route_stream(setup, loss_fn, options, *, every=2, **_):
    """`accumulate` without an axis in each of two calls, `multi_steps(axis_name)` over them.

    The gradient sums come with their weight. An `every` of more than two takes whole `WindowSums`,
    and leaves the window open for `flush`.
    """
    is_open = every > 2
    tx = ja.multi_steps(recorder(), every, axis_name=setup.names)
    f = ja.accumulate(loss_fn, **options)

    def micro_step(params, state, batch):
        sums = f(params, batch)
        value = ja.Mean(sums.loss, sums.weight)
        if is_open:
            return tx.update(sums, state, params, value=value)[1]
        return tx.update(sums.grads, state, params, weight=sums.weight, value=value)[1]

    def flush(params, state):
        return ja.flush(tx, state, params)[1]

    def stays(params, state):
        return state

    if setup.names is None:
        init, step = jax.jit(tx.init), watched(jax.jit(micro_step))
        close = jax.jit(flush) if is_open else stays
        finish, cut = (lambda state: state), (lambda half: half)
    elif not setup.types:
        init = pmapped(lambda params, batch: tx.init(params))
        step = watched(jax.pmap(micro_step, axis_name="data", in_axes=(None, 0, 0)))
        close = jax.pmap(flush, axis_name="data", in_axes=(None, 0)) if is_open else stays
        finish, cut = one_result(lambda state: state), per_device
    else:
        return _sharded_stream(setup, tx, micro_step, flush if is_open else None)

    def run(params, batch):
        state = init(params) if setup.names is None else init(params, batch)
        for half in halves(batch, setup.number):
            state = step(params, state, cut(half))
        return Outcome(*finish(close(params, state).inner_state))

    return run


def _sharded_stream(setup, tx, micro_step, flush):
    rows = P(setup.names)

    @functools.cache
    def functions(tree, types):
        params = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*t) for t in types])
        specs = ja.state_specs(jax.eval_shape(tx.init, params), setup.names)
        return (
            setup.shard(tx.init, P(), specs),
            setup.shard(micro_step, (P(), specs, rows), specs),
            setup.shard(flush, (P(), specs), specs) if flush else lambda params, state: state,
        )

    def run(params, batch):
        leaves, tree = jax.tree.flatten(params)
        init, step, close = functions(tree, tuple((x.shape, x.dtype) for x in leaves))
        placed = setup.place(params, batch)[0]
        state = init(placed)
        for half in halves(batch, setup.number):
            state = step(placed, state, setup.put(half, rows))
        return Outcome(*close(placed, state).inner_state)

    return run


def route_flush(setup, loss_fn, options, **_):
    """A stream whose window of three is closed after two calls."""
    return route_stream(setup, loss_fn, options, every=3)


def route_plain_jit(setup, loss_fn, options, *, given=None, **_):
    """`value_and_grad(spmd_axis_name)` under plain `jit`."""
    f = ja.value_and_grad(loss_fn, spmd_axis_name=setup.names, **options)
    call = watched(jax.jit(lambda params, batch: f(params, batch, denominators=given)))

    def run(params, batch):
        with setup.active():
            return Outcome(*call(*setup.place(params, batch)))

    return run


def route_train_step(setup, loss_fn, options, *, given=None, **_):
    """`train_step(spmd_axis_name)`."""
    train = ja.train_step(loss_fn, recorder(), spmd_axis_name=setup.names, **options)
    step = watched(train.step)

    def run(params, batch):
        with setup.active():
            params, batch = setup.place(params, batch)
            extra = {} if given is None else {"denominators": given}
            _, state, info = step(params, train.init(params), batch, **extra)
        assert (info.loss == state.inner_state.value) | jnp.isnan(info.loss)
        return Outcome(info.loss, state.inner_state.grads, info.weight)

    return run


class Route(NamedTuple):
    """A way to run a window.

    Attributes:
      make: `make(setup, loss_fn, options, given=None, several_terms=False)` to
        `call(params, batch)`; `given` are denominators.
      parts: into how many windows or calls a device's rows are divided before.
      in_region: whether it runs inside `shard_map` or `pmap`.
      several_terms: whether it takes a loss of several terms, and given denominators.
    """

    make: Callable[..., Callable[..., Outcome]]
    parts: int
    in_region: bool
    several_terms: bool = True


ROUTES = {
    "value_and_grad": Route(route_value_and_grad, 1, True),
    "merge": Route(route_merge, 2, True),
    "into": Route(functools.partial(route_merge, into=True), 2, True),
    "stream": Route(route_stream, 2, True, several_terms=False),
    "flush": Route(route_flush, 2, True, several_terms=False),
    "scatter": Route(route_scatter, 1, True),
    "plain jit": Route(route_plain_jit, 1, False),
    "train_step": Route(route_train_step, 1, False),
}
