"""A user's script for type checkers: `test_typing.py` wants an error in each line marked `wrong`.

What stands in functions is never called, but for `right`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

import jaxaccum as ja
from jaxaccum import linen
from jaxaccum import nnx as ja_nnx

Tree = dict[str, jax.Array]
PARAMS: Tree = {"w": jnp.ones(3)}
BATCH: Tree = {"x": jnp.ones((4, 3)), "y": jnp.ones(4)}


def one_fn(params: Tree, batch: Tree) -> ja.Mean:
    return ja.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def aux_fn(params: Tree, batch: Tree, *, key: Any = None) -> tuple[ja.Mean, dict[str, ja.Mean]]:
    loss = one_fn(params, batch)
    return loss, {"mean": loss}


def dict_fn(params: Tree, batch: Tree) -> dict[str, ja.Mean]:
    return {"fit": one_fn(params, batch), "penalty": 0.1 * ja.Mean(params["w"].sum(), 1.0)}


def pair_fn(params: Tree, batch: Tree) -> tuple[ja.Mean, ja.Mean]:
    return one_fn(params, batch), ja.Mean(params["w"].sum(), 1.0)


def state_fn(params: Tree, batch: Tree, *, model_state: Any) -> tuple[ja.Mean, Any]:
    return one_fn(params, batch), model_state


def scalar_fn(params: Tree, batch: Tree) -> jax.Array:
    return jnp.mean(batch["x"] @ params["w"])


def right() -> None:
    loss, grads = ja.value_and_grad(one_fn, num_microbatches=2)(PARAMS, BATCH)
    f = ja.value_and_grad(aux_fn, microbatch_size=2, has_aux=True, skip_nonfinite="window")
    (loss, aux), grads = f(PARAMS, BATCH, key=jax.random.key(0), num_real=1)
    print(loss, aux["mean"], grads)
    ja.value_and_grad(lambda w, x: ja.mean(w * x), num_microbatches=2, argnums=(0,), unroll=True)
    ja.value_and_grad(state_fn, num_microbatches=2, model_state="frozen")
    ja.value_and_grad(pair_fn, num_microbatches=2)(PARAMS, BATCH)
    several = ja.denominators(dict_fn, num_microbatches=2)(PARAMS, BATCH)
    sums_fn = ja.accumulate(dict_fn, num_microbatches=2, noise_scale=False)
    sums = sums_fn(PARAMS, BATCH, denominators=several)
    sums = sums_fn(PARAMS, BATCH, denominators=several, into=sums)
    window = ja.finalize(ja.merge(sums, sums))
    print(window.loss, window.grads, window.num_microbatches, sums.weight)
    combined = ja.microbatch(lambda w, x: ja.Sum(w * x), num_microbatches=2)
    print(combined(jnp.ones(()), jnp.ones(4), num_real=2))
    over_axis = ja.window_axis.value_and_grad(one_fn, window_axis_name="rows", microbatch_size=2)
    loss, grads = over_axis(PARAMS, BATCH)


def streams() -> None:
    tx = ja.multi_steps(optax.adam(1e-3), 2, accumulator=ja.accumulators.compensated())
    sums_fn = ja.accumulate(one_fn, num_microbatches=2)

    @jax.jit
    def step_fn(
        params: Any, state: ja.MultiStepsState, batch: Tree
    ) -> tuple[Any, ja.MultiStepsState]:
        updates, state = tx.update(sums_fn(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(PARAMS)
    params, state = step_fn(PARAMS, state, BATCH)
    print(state.micro_step, state.optimizer_step, state.grad_sum, state.weight, state.num_skipped)
    updates, state = tx.update(sums_fn(PARAMS, BATCH).grads, state, params, weight=4, value=1.0)
    updates, state = ja.flush(tx, state, params)
    chain = optax.chain(optax.identity(), ja.multi_steps(optax.sgd(1.0), ja.until_weight(10)))
    chain_state = chain.init(PARAMS)
    updates, chain_state = chain.update(PARAMS, chain_state, PARAMS, weight=3)
    print(ja.has_updated(chain_state), updates)


def steps() -> None:
    init, step = ja.train_step(one_fn, optax.adam(1e-3), num_microbatches=2, donate=False)
    state = init(PARAMS)
    params, state, info = step(PARAMS, state, BATCH, num_real=2)
    print(params, info.loss, info.tokens_seen, state.num_skipped)
    ja.train_step(ja.accumulate(one_fn, microbatch_size=1), optax.sgd(0.1), max_bad_windows=None)
    ja.train_step(ja.window_axis.accumulate(one_fn, microbatch_size=1), optax.sgd(0.1))


def model_fn(model: nnx.Linear, x: jax.Array) -> ja.Mean:
    return ja.mean(model(x) ** 2)


def models() -> None:
    model, x = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
    optimizer = ja_nnx.Optimizer(model, optax.adam(1e-2))
    step = ja_nnx.train_step(model_fn, num_microbatches=2, model_state="pooled", donate=False)
    info = step(model, optimizer, x, num_real=2)
    loss, grads = ja_nnx.value_and_grad(model_fn, microbatch_size=2, wrt=nnx.Param)(model, x)
    print(info.loss, loss, optimizer.update(model, grads), optimizer.step)
    sums = ja_nnx.accumulate(model_fn, num_microbatches=2, argnums=0)(model, x)
    stream = ja_nnx.Optimizer(model, ja.multi_steps(optax.adam(1e-2), 2))
    print(stream.update(model, sums), ja_nnx.flush(stream, model))
    module = nn.Dense(3)
    state = linen.TrainState.create(
        apply_fn=module.apply, variables=module.init(jax.random.key(0), x), tx=optax.sgd(0.1)
    )
    linen_step = linen.train_step(
        lambda variables, x: ja.mean(jnp.asarray(module.apply(variables, x))), num_microbatches=2
    )
    state, info = linen_step(state, x, num_real=1)
    print(state.step, info.loss)
    step(model, x)  # wrong: no optimizer
    ja_nnx.train_step(model_fn, num_microbatch=2)  # wrong: a keyword of the factory
    ja_nnx.value_and_grad(model_fn)  # wrong: neither cut
    linen.train_step(model_fn, num_microbatches=2, argnums=1)  # wrong: not an option
    linen_step(state, x, loss_scale=2.0)  # wrong: not a keyword of a step


def wrong() -> None:
    f = ja.value_and_grad(one_fn, num_microbatches=2)
    tx = ja.multi_steps(optax.sgd(1.0), 2)
    state = tx.init(PARAMS)
    f(PARAMS)  # wrong: no batch
    f(PARAMS, BATCH, kye=None)  # wrong: a keyword of the call
    ja.value_and_grad(one_fn, num_microbatch=2)  # wrong: a keyword of the factory
    ja.value_and_grad(one_fn, num_microbatches="four")  # wrong: its type
    ja.value_and_grad(scalar_fn, num_microbatches=2)  # wrong: a loss that is a scalar
    ja.value_and_grad(one_fn)  # wrong: neither cut
    ja.value_and_grad(one_fn, num_microbatches=2, microbatch_size=2)  # wrong: both
    print(state.mikro_step)  # wrong: a field of the state
    ja.value_and_grad(lambda w, x: jnp.mean(w * x), num_microbatches=2)  # wrong: a scalar too
    ja.accumulate(one_fn, num_microbatches=2)(PARAMS)  # wrong: no batch
    ja.accumulate(one_fn, num_microbatches=2, reduction="late")  # wrong: a choice
    print(ja.accumulate(one_fn, num_microbatches=2)(PARAMS, BATCH).gards)  # wrong: a field
    ja.denominators(one_fn, num_microbatches=2, accumulator=None)  # wrong: not an option here
    ja.microbatch(one_fn, num_microbatches=2, has_aux=True)  # wrong: nor here
    ja.window_axis.value_and_grad(one_fn, num_microbatches=2, skip_nonfinite=True)  # wrong: a value
    ja.window_axis.accumulate(one_fn, num_microbatches=2)(PARAMS, BATCH, num_real=1)  # wrong: there
    ja.train_step(one_fn, optax.sgd(1.0))  # wrong: neither cut
    ja.train_step(one_fn, optax.sgd(1.0), num_microbatches=2, argnums=1)  # wrong: not an option
    init, step = ja.train_step(one_fn, optax.sgd(1.0), num_microbatches=2)
    step(PARAMS, init(PARAMS))  # wrong: no batch
    ja.losses.contrastive_fn(lambda w, x: (w, x), num_microbatches=2, block=3)  # wrong: a name
    tx.update(PARAMS)  # wrong: no state
