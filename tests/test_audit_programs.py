"""Planted programs: those that reduce once per window, and those that do so too often."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxaccum as ja

K, LAYERS, ROWS, WIDTH = 4, 8, 16, 8


def mesh_of(**axes):
    kinds = (AxisType.Auto,) * len(axes)
    number = 1
    for size in axes.values():
        number *= size
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=kinds, devices=jax.devices()[:number]
    )


WHOLE, ROWS_OF_EACH = P(), P(None, "data")
DATA = mesh_of(data=4)
MODEL = mesh_of(model=4)
BOTH = mesh_of(data=2, model=2)


def struct(mesh, spec, *shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def layers_of(mesh=DATA, spec=WHOLE, dtype=jnp.float32):
    return struct(mesh, spec, LAYERS, WIDTH, WIDTH, dtype=dtype)


def batch_of(mesh=DATA, spec=ROWS_OF_EACH, dtype=jnp.float32):
    return struct(mesh, spec, K, ROWS, WIDTH, dtype=dtype)


def scanned(layers, x):
    """The sum of squares behind a scan over the layers."""
    h = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, layers)[0]
    return jnp.sum(h.astype(jnp.float32) ** 2)


def window(grad, params, batch, zeros=None):
    """Adds the micro-batches' gradients in a scan."""
    zeros = jax.tree.map(jnp.zeros_like, params) if zeros is None else zeros
    add = lambda total, x: (jax.tree.map(jnp.add, total, grad(params, x)), None)  # noqa: E731
    return lax.scan(add, zeros, batch)[0]


def mapped(local, mesh=DATA, specs=(WHOLE, ROWS_OF_EACH), out=WHOLE):
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)


def every_micro_batch(reduce_fn, loss=scanned):
    """A window in which `reduce_fn` sums each micro-batch's gradient over the devices."""
    grad = lambda w, x: reduce_fn(jax.grad(loss)(w, x))  # noqa: E731
    return mapped(lambda w, x: window(grad, w, x))


def at_the_end(loss=scanned, mesh=DATA, **options):
    """A window that sums its gradient over the devices once."""
    grad = jax.grad(loss)
    return mapped(lambda w, x: lax.psum(window(grad, w, x), "data"), mesh, **options)


def psum(g):
    return lax.psum(g, "data")


# Too often


def linear(w, x):
    """Its gradient does not depend on the parameters, and that of one row is the row."""
    return jnp.sum(w[None] * x)


def in_one_operation(g):
    return jnp.concatenate(psum(jnp.split(g.ravel(), 16))).reshape(g.shape)


def in_sixteen(g):
    parts = [lax.optimization_barrier(psum(part)) for part in jnp.split(g.ravel(), 16)]
    return jnp.concatenate(parts).reshape(g.shape)


def as_integers(g):
    scale = lax.pmax(jnp.max(jnp.abs(g)), "data") / 31
    return psum(jnp.round(g / scale).astype(jnp.int8)).astype(g.dtype) * scale


def gathered_integers(g):
    scale = jnp.max(jnp.abs(g)) / 127
    scales = lax.all_gather(scale, "data").reshape(-1, 1, 1, 1)
    whole = lax.all_gather(jnp.round(g / scale).astype(jnp.int8), "data")
    return jnp.sum(whole.astype(g.dtype) * scales, 0)


def scatter_and_gather(g):
    return lax.all_gather(lax.psum_scatter(g, "data", tiled=True), "data", tiled=True)


def ring(g):
    """Every device hands on what it has: three times a gradient in each micro-batch."""
    around = [(i, (i + 1) % 4) for i in range(4)]
    got = total = g
    for _ in range(3):
        got = lax.ppermute(got, "data", around)
        total = total + got
    return total


def layer_by_layer():
    """Sums added in place, each layer's gradient reduced before it is added."""

    def local(layers, batch):
        sums = jax.new_ref(jnp.zeros_like(layers))

        @jax.custom_vjp
        def meet(w):
            return w

        meet.defvjp(lambda w: (w, None), lambda _, g: (psum(g),))

        def loss(layers, x):
            h = lax.scan(lambda h, w: (h + jnp.tanh(h @ meet(w)), None), x, layers)[0]
            return jnp.sum(h**2)

        def add(_, x):
            value, backward = jax.vjp(lambda layers: loss(layers, x), layers)
            backward.with_refs(sums)(jnp.ones_like(value))
            return None, None

        lax.scan(add, None, batch)
        return jax.freeze(sums)

    return mapped(local)


def every_step():
    """An optimizer step in every micro-batch."""

    def local(layers, batch):
        step = lambda w, x: (w - 0.1 * psum(jax.grad(scanned)(w, x)), None)  # noqa: E731
        return lax.scan(step, layers, batch)[0]

    return mapped(local)


def stacked(layers, batch):
    """Every micro-batch's gradient is kept, and their sum taken at the end."""
    grads = lambda w, x: lax.map(lambda x: psum(jax.grad(scanned)(w, x)), x)  # noqa: E731
    return mapped(lambda w, x: jnp.sum(grads(w, x), 0))(layers, batch)


def unrolled(layers, batch):
    def local(layers, batch):
        grads = [psum(jax.grad(scanned)(layers, x)) for x in batch]
        return functools.reduce(lambda a, b: lax.optimization_barrier(a) + b, grads)

    return mapped(local)(layers, batch)


def left_to_the_compiler(layers, batch):
    return window(jax.grad(scanned), layers, batch)


TOO_OFTEN = {
    "layers, no axis name": left_to_the_compiler,
    "layers in place": layer_by_layer(),
    "buckets in one operation": every_micro_batch(in_one_operation),
    "sixteen buckets": every_micro_batch(in_sixteen),
    "quantised": every_micro_batch(as_integers),
    "quantised and gathered": every_micro_batch(gathered_integers),
    "scattered and gathered": every_micro_batch(scatter_and_gather),
    "ring": every_micro_batch(ring),
    "linear loss": every_micro_batch(psum, linear),
    "optimizer in the loop": every_step(),
    "stacked": stacked,
    "unrolled": unrolled,
}


@pytest.mark.parametrize("name", TOO_OFTEN)
def test_programs_that_reduce_too_often(name):
    given = layers_of(), batch_of()
    if name == "linear loss":
        given = struct(DATA, P(), WIDTH), struct(DATA, P(None, "data"), K, 4, WIDTH)
    report = ja.audit(TOO_OFTEN[name], *given)
    gradients = 3 * K if name == "ring" else K
    inside, outside = (0, gradients) if name == "unrolled" else (gradients, 0)
    assert (report.loop_gradients, report.outside_gradients) == (inside, outside)
    found = rf"{inside}\.00 gradients are reduced in loops, {outside}\.00 outside"
    with pytest.raises(AssertionError, match=found):
        report.assert_deferred()
    assert len(report.warnings) == 1
    assert not report.moved_rows


# Once


def of_the_library(**options):
    loss = lambda w, x: ja.Mean(scanned(w, x), 1.0)  # noqa: E731
    return ja.value_and_grad(loss, num_microbatches=K, **options)


def halves(meet=lambda x: x):
    """Layers of two products, between which the model axis cuts; `meet` sums the activations."""
    layer = lambda h, pair: (h + meet(jnp.tanh(h @ pair[0]) @ pair[1]), None)  # noqa: E731
    return lambda layers, x: jnp.sum(lax.scan(layer, x, layers)[0] ** 2)


HALVES = P(None, None, "model"), P(None, "model")


def embedded(params, tokens):
    """A table cut by its rows: what is looked up meets by a sum, four times as large as it."""
    return jax.grad(lambda p: jnp.sum((p[0][tokens] @ p[1]) ** 2))(params)


def fsdp(parts, batch):
    """Parameters gathered in every micro-batch, one scattered sum."""

    def local(parts, batch):
        def grad(_, x):
            return jax.grad(scanned)(lax.all_gather(parts, "data", axis=1, tiled=True), x)

        total = window(grad, jnp.zeros((LAYERS, WIDTH, WIDTH)), batch)
        return lax.psum_scatter(total, "data", scatter_dimension=1, tiled=True)

    specs = P(None, "data"), P(None, "data")
    return mapped(local, specs=specs, out=P(None, "data"))(parts, batch)


def batch_norm(layers, batch):
    """Statistics over the devices in every layer, and a running mean."""

    def local(layers, batch):
        def loss(layers, x):
            def layer(h, w):
                h = jnp.tanh(h @ w)
                mean = lax.pmean(jnp.mean(h, 0), "data")
                return h - mean[None], mean

            h, means = lax.scan(layer, x, layers)
            return jnp.sum(h**2), means[0]

        def step(carry, x):
            total, running = carry
            g, mean = jax.grad(loss, has_aux=True)(layers, x)
            return (total + g, 0.9 * running + 0.1 * mean), None

        total, running = lax.scan(step, (jnp.zeros_like(layers), jnp.zeros(WIDTH)), batch)[0]
        return psum(total), running

    return mapped(local)(layers, batch)


def contrastive(layers, x):
    """Every row against those of all devices; what the others think of them is scattered back."""
    h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)[0]
    others = lax.all_gather(h, "data", tiled=True)
    return jnp.sum(jax.nn.logsumexp(h @ others.T, 1))


def muon(layers, batch):
    """An optimizer that multiplies the gradient with itself."""
    total = at_the_end()(layers, batch)
    x = total / jnp.linalg.norm(total)
    for _ in range(2):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return layers - x


def metrics_too(layers, batch):
    """Two sums that are logged meet in every micro-batch."""

    def local(layers, batch):
        def step(carry, x):
            total, logged = carry
            two = psum(jnp.stack([jnp.sum(x), jnp.max(x)]))
            return (total + jax.grad(scanned)(layers, x), logged + two), None

        total, logged = lax.scan(step, (jnp.zeros_like(layers), jnp.zeros(2)), batch)[0]
        return psum(total), logged

    return mapped(local)(layers, batch)


def overlapped(layers, batch):
    """The last micro-batch stands alone, and its backward pass reduces layer by layer."""

    def local(layers, batch):
        before = window(jax.grad(scanned), layers, batch[:-1])

        @jax.custom_vjp
        def meet(w, total):
            return w

        meet.defvjp(lambda w, total: (w, total), lambda total, g: (psum(total + g), None))

        def loss(layers):
            layer = lambda h, pair: (h + jnp.tanh(h @ meet(*pair)), None)  # noqa: E731
            return jnp.sum(lax.scan(layer, batch[-1], (layers, before))[0] ** 2)

        return jax.grad(loss)(layers)

    return mapped(local)(layers, batch)


def one_axis_after_the_other(layers, batch):
    local = lambda w, x: lax.psum(psum(window(jax.grad(scanned), w, x)), "model")  # noqa: E731
    return mapped(local, BOTH, (P(), P(None, ("data", "model"))))(layers, batch)


def shared(params, x):
    """Every layer multiplies by the same matrix too, whose gradient the layers' loop sums."""
    layers, matrix = params
    layer = lambda h, w: (h + jnp.tanh(h @ w) @ matrix, None)  # noqa: E731
    return jnp.sum(lax.scan(layer, x, layers)[0].astype(jnp.float32) ** 2)


ONCE = {
    "the library in shard_map": (
        mapped(of_the_library(axis_name="data"), specs=(P(), P("data"))),
        1,
    ),
    "the library under jit": (of_the_library(spmd_axis_name="data"), 1),
    "tensor parallel": (
        at_the_end(
            halves(lambda x: lax.psum(x, "model")),
            BOTH,
            specs=(HALVES, P(None, "data")),
            out=HALVES,
        ),
        1,
    ),
    "tensor parallel alone": (lambda w, x: window(jax.grad(halves()), w, x), 0),
    "embedding": (embedded, 0),
    "gathered parameters": (fsdp, 1),
    "batch norm": (batch_norm, 1),
    "contrastive": (at_the_end(contrastive), 1),
    "bfloat16 layers": (jax.grad(scanned), 1),
    "bfloat16 layers that share a matrix": (jax.grad(shared), 0),
    "Muon": (muon, 1),
    "metrics": (metrics_too, 1),
    "overlap": (overlapped, 1),
    "one axis after the other": (one_axis_after_the_other, 2),
}


def arguments_of(name):
    whole = struct(DATA, P("data"), K * ROWS, WIDTH)
    halves = [struct(MODEL, spec, LAYERS, WIDTH, WIDTH) for spec in HALVES]
    of_both = [struct(BOTH, spec, LAYERS, WIDTH, WIDTH) for spec in HALVES]
    table = struct(MODEL, P("model"), 16, WIDTH), struct(MODEL, P(), WIDTH, WIDTH)
    narrow = struct(DATA, P("data"), 4 * WIDTH, WIDTH, dtype=jnp.bfloat16)
    special = {
        "the library in shard_map": (layers_of(), whole),
        "the library under jit": (layers_of(), whole),
        "tensor parallel": (tuple(of_both), batch_of(BOTH)),
        # An activation has 256 numbers, 1 KiB, and a layer has 32.
        "tensor parallel alone": (tuple(halves), struct(MODEL, P(), K, 32, WIDTH)),
        "embedding": (table, struct(MODEL, P(), 64, dtype=jnp.int32)),
        "gathered parameters": (layers_of(spec=P(None, "data")), batch_of()),
        "bfloat16 layers": (layers_of(dtype=jnp.bfloat16), narrow),
        "bfloat16 layers that share a matrix": (
            (layers_of(dtype=jnp.bfloat16), struct(MODEL, P(), WIDTH, WIDTH, dtype=jnp.bfloat16)),
            struct(MODEL, P(), 4 * WIDTH, WIDTH, dtype=jnp.bfloat16),
        ),
        "one axis after the other": (
            layers_of(BOTH), batch_of(BOTH, P(None, ("data", "model"))),
        ),
    }  # fmt: skip
    return special.get(name, (layers_of(), batch_of()))


@pytest.mark.parametrize("name", ONCE)
def test_programs_that_reduce_once(name):
    step, gradients = ONCE[name]
    given = arguments_of(name)
    with jax.set_mesh(given[1].sharding.mesh):
        report = ja.audit(step, *given).assert_deferred()
    assert gradients <= report.reduced_gradients <= gradients + 0.1
    assert report.warnings == ()


def test_sums_that_are_scattered_by_choice_are_no_mistake():
    parts = layers_of(spec=P(None, "data"))
    f = of_the_library(
        spmd_axis_name="data", reduction="scatter", param_specs=P(None, "data")
    )  # fmt: skip
    with jax.set_mesh(DATA):
        report = ja.audit(f, parts, struct(DATA, P("data"), K * ROWS, WIDTH))
    assert report.loop_gradients == K
    assert report.warnings == ()
    with pytest.raises(AssertionError, match=r'pass kinds=\("all-reduce",\)'):
        report.assert_deferred()
    report.assert_deferred(kinds=("all-reduce",))


def test_a_low_sum_over_micro_batches_is_a_mistake_and_one_over_layers_is_not():
    params = (
        layers_of(MODEL, dtype=jnp.bfloat16),
        struct(MODEL, P(), WIDTH, WIDTH, dtype=jnp.bfloat16),
    )
    report = ja.audit(
        lambda params, batch: window(jax.grad(shared), params, batch),
        params, batch_of(MODEL, P(), jnp.bfloat16),
    )  # fmt: skip
    assert {(s.trip_count, s.cuts_batch) for s in report.loop_sums} == {(K, True), (LAYERS, False)}
    assert len([w for w in report.warnings if "less than float32" in w]) == 2


def test_the_report_of_a_model_of_two_layers_fits_on_a_screen():
    names = ["attention_query_kernel", "attention_value_kernel", "feed_forward_in", "norm_scale"]
    shape = {"norm_scale": (WIDTH,)}
    spec = lambda name: P("data") if name == "feed_forward_in" else P()  # noqa: E731
    params = {
        f"transformer_decoder_layer_{i}": {
            name: struct(DATA, spec(name), *shape.get(name, (WIDTH, WIDTH)), dtype=jnp.bfloat16)
            for name in names
        }
        for i in range(2)
    }

    def loss(params, x):
        for layer in params.values():
            for name in names[:3]:
                x = x + jnp.tanh(x @ layer[name]) * layer["norm_scale"][None]
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def step(params, moments, batch, unused):
        grads = window(jax.grad(loss), params, batch)
        first = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda p, g: (p - g).astype(jnp.bfloat16), params, first), first

    unused = [struct(DATA, P(), 3)] * 5
    donated = jax.jit(step, donate_argnums=(0, 1, 3))
    report = ja.audit(donated, params, params, batch_of(dtype=jnp.bfloat16), unused)
    assert len(report.warnings) > 5
    lines = str(report).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert "more" in lines[-1]
    with pytest.raises(AssertionError) as error:
        report.assert_deferred()
    assert len(str(error.value).splitlines()) <= 12
