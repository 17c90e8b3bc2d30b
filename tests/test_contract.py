"""What every public transformation promises, checked for each entry of one registry."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_stream import assert_same_bits, integer_grads, train

import jaxaccum as ja

# Rates and decays are powers of two, so that integer gradients stay exact in every compilation.
MOMENTUM = functools.partial(optax.sgd, 0.5, momentum=0.5)
REGISTRY = {
    "sgd": lambda: ja.multi_steps(optax.sgd(0.5), 2),
    "momentum": lambda: ja.multi_steps(MOMENTUM(), 2),
    "window of one": lambda: ja.multi_steps(MOMENTUM(), 1),
    "scheduled": lambda: ja.multi_steps(MOMENTUM(), lambda step: 1 + step % 2),
    "until_weight": lambda: ja.multi_steps(MOMENTUM(), ja.until_weight(4)),
    "skipping": lambda: ja.multi_steps(MOMENTUM(), 2, skip_nonfinite=True),
    "dropping": lambda: ja.multi_steps(MOMENTUM(), 2, skip_nonfinite="window", max_bad_windows=3),
    "loss scale": lambda: ja.multi_steps(
        MOMENTUM(), 2, skip_nonfinite=True, loss_scale=ja.loss_scaling.dynamic(growth_interval=2)
    ),
    "sums": lambda: ja.multi_steps(MOMENTUM(), 2, normalize=False),
    "compensated": lambda: ja.multi_steps(MOMENTUM(), 2, accumulator=ja.accumulators.compensated()),
    "adamw": lambda: ja.multi_steps(optax.adamw(0.5), 2),
    "schedule_free": lambda: ja.multi_steps(optax.contrib.schedule_free_sgd(0.5), 2),
    "chained": lambda: optax.chain(optax.clip(64.0), ja.multi_steps(MOMENTUM(), 2)),
}
# Their own arithmetic is rounded differently by each compilation.
INEXACT = {"adamw", "schedule_free"}
QUICK = {
    "momentum",
    "window of one",
    "until_weight",
    "skipping",
    "dropping",
    "loss scale",
    "compensated",
    "schedule_free",
}
WEIGHTS = [2, 2, 1, 3]


def each(*, without=()):
    """Over the registry; entries that differ little from others are left to the slow run."""
    return pytest.mark.parametrize(
        "name",
        [
            name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
            for name in REGISTRY
            if name not in without
        ],
    )


def parameters():
    return {"w": jnp.arange(16.0).reshape(8, 2), "b": jnp.float32(-0.0)}


def micro_steps(number=4, **options):
    return integer_grads(number, parameters(), **options)


def types(tree):
    """What a scan or a cond compares: structure, shapes, dtypes and weak types."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, jax.typeof(x).weak_type) for x in leaves]


def scan(tx, params, grads, weights):
    def step(carry, inputs):
        params, state = carry
        grad, weight = inputs
        updates, state = tx.update(grad, state, params, weight=weight)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads), jnp.array(weights)
    return jax.lax.scan(step, (params, tx.init(params)), stacked)[0]


@each()
def test_eager_jit_and_scan_agree(name):
    results = [
        train(REGISTRY[name](), parameters(), micro_steps(), jit=jit, weight=WEIGHTS)
        for jit in (False, True)
    ]
    results.append(scan(REGISTRY[name](), parameters(), micro_steps(), WEIGHTS))
    for other in results[1:]:
        if name in INEXACT:
            chex.assert_trees_all_equal_shapes_and_dtypes(results[0], other)
            chex.assert_trees_all_close(results[0], other, rtol=2e-6, atol=1e-7)
        else:
            assert_same_bits(results[0], other)


@each()
def test_init_is_abstract(name):
    tx = REGISTRY[name]()
    state = tx.init(parameters())
    abstract = jax.eval_shape(tx.init, parameters())
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, state)
    assert types(jax.jit(tx.init)(parameters())) == types(state)


@each()
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_state_types_never_change(name, dtype):
    """Through init, an open and a closed window, a skip, an empty window and a flush."""
    tx = REGISTRY[name]()
    params = jax.tree.map(lambda x: x.astype(dtype), parameters())
    update = jax.jit(tx.update)
    states = [tx.init(params)]
    good, *_ = micro_steps(1, dtype=dtype)
    bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), good)
    for grad, weight in [(good, 1), (good, 2.5), (bad, 1), (good, 0), (good, 0), (good, 1)]:
        states.append(update(grad, states[-1], params, weight=weight)[1])
    if name != "window of one":
        states.append(jax.jit(functools.partial(ja.flush, tx))(states[-1], params)[1])
    expected, *others = map(types, states)
    assert all(other == expected for other in others)
    assert not any(weak for *_, weak in expected[1])


@each()
def test_params_and_state_can_be_donated(name):
    tx = REGISTRY[name]()

    def step(params, state, grad, weight):
        updates, state = tx.update(grad, state, params, weight=weight)
        return optax.apply_updates(params, updates), state

    donating = jax.jit(step, donate_argnums=(0, 1))
    params = parameters()
    state = tx.init(params)
    for grad, weight in zip(micro_steps(6), [*WEIGHTS, 1, 1], strict=True):
        held = [x for x in jax.tree.leaves((params, state)) if x.ndim]
        params, state = donating(params, state, grad, weight)
        assert all(x.is_deleted() for x in held)
    # The same program with nothing donated.
    kept = parameters(), tx.init(parameters())
    for grad, weight in zip(micro_steps(6), [*WEIGHTS, 1, 1], strict=True):
        kept = jax.jit(step)(*kept, grad, weight)
    assert_same_bits((params, state), kept)


@each()
def test_every_field_of_the_state_has_its_own_buffer(name):
    params = parameters()
    arrays = [*jax.tree.leaves(params), *jax.tree.leaves(REGISTRY[name]().init(params))]
    pointers = [x.unsafe_buffer_pointer() for x in arrays]
    assert len(set(pointers)) == len(pointers)


def sharded_parameters(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    specs = {"w": PartitionSpec("data"), "b": PartitionSpec()}

    def place(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    return mesh, jax.tree.map(place, parameters(), specs)


def shardings(tree):
    """Of everything but scalars, which JAX may place on one device or on all."""
    return [(x.sharding, x.ndim) for x in jax.tree.leaves(tree) if x.ndim]


def check_shardings(tx, params):
    """Every array of the state lies like its parameter, from init on."""
    step = jax.jit(lambda g, s, p: tx.update(g, s, p)[1])
    state = tx.init(params)
    for _ in range(4):
        assert all(s.is_equivalent_to(params["w"].sharding, n) for s, n in shardings(state))
        state = step(params, state, params)


def mesh_context(mesh, inside):
    return jax.set_mesh(mesh) if inside else contextlib.nullcontext()


@each(without=["window of one"])
@pytest.mark.parametrize("inside", [True, False], ids=["in a mesh", "without"])
def test_shardings_are_kept_on_an_automatic_mesh(name, inside):
    mesh, params = sharded_parameters(AxisType.Auto)
    with mesh_context(mesh, inside):
        check_shardings(REGISTRY[name](), params)


@each(without=["window of one"])
@pytest.mark.parametrize("inside", [True, False], ids=["in a mesh", "without"])
def test_shardings_are_kept_on_an_explicit_mesh(name, inside):
    mesh, params = sharded_parameters(AxisType.Explicit)
    with mesh_context(mesh, inside):
        check_shardings(REGISTRY[name](), params)


@each()
def test_extra_arguments_survive_chain(name):
    """The weight reaches the stream, an unknown argument does not stop it."""
    tx = REGISTRY[name]()
    plain = train(tx, parameters(), micro_steps(), weight=WEIGHTS)
    chained = optax.chain(optax.identity(), tx, optax.identity())
    values = [ja.Mean(1.0, 2)] * 4
    params, state = train(
        chained, parameters(), micro_steps(), weight=WEIGHTS, value=values, unknown=range(4)
    )
    assert_same_bits(params, plain[0])
    assert bool(ja.has_updated(state)) == bool(ja.has_updated(plain[1]))


@each()
@pytest.mark.parametrize("params", [{}, {"w": jnp.ones(2), "none": [None]}], ids=["empty", "none"])
def test_empty_trees_and_none_leaves(name, params):
    tx = REGISTRY[name]()
    after, state = train(tx, params, [params] * 3, weight=[2, 2, 1])
    assert jax.tree.structure(after) == jax.tree.structure(params)
    assert types(state) == types(tx.init(params))


@each()
def test_the_state_is_a_tree_of_arrays_that_flattens_and_back(name):
    state = REGISTRY[name]().init(parameters())
    leaves, tree = jax.tree.flatten(state)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    rebuilt = jax.tree.unflatten(tree, [np.asarray(leaf) for leaf in leaves])
    assert_same_bits(rebuilt, jax.tree.map(np.asarray, state))


@pytest.mark.parametrize("word", ["count", "mu", "nu", "trace"])
def test_no_field_is_named_like_an_optimizers(word):
    assert word not in ja.MultiStepsState._fields


def test_the_fields_and_their_order_are_public():
    """Checkpoints hold them."""
    assert ja.MultiStepsState._fields == (
        "micro_step",
        "optimizer_step",
        "updated",
        "weight_carry",
        "grad_carry",
        "mean_args",
        "inner_state",
        "ledger",
    )
    names = ["num_skipped", "num_dropped", "num_empty", "num_bad_in_row", "diverged", "loss_scale"]
    state = ja.multi_steps(optax.sgd(1.0), 2).init(jnp.float32(0))
    assert list(state.ledger._fields) == names
    for name in names:  # they read, and are replaced, as fields of the state
        assert getattr(state, name) is getattr(state.ledger, name)
        assert getattr(state._replace(**{name: 7}).ledger, name) == 7
