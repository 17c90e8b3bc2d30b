"""Parameters and gradient sums in parts: FSDP, HSDP and ZeRO, deferred or scattered.

The oracle is the gradient of the full batch in one pass on one device, in float64.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxaccum as ja
from jaxaccum.core import compat

ROWS, TOKENS, FEATURES, HIDDEN, OUT = 48, 3, 16, 32, 8
K = 3
TYPES = {"A": AxisType.Auto, "E": AxisType.Explicit}
SPECS = {"up": P(None, "data"), "down": P("data"), "scale": P()}
WHOLE = {"up": P(), "down": P(), "scale": P()}
REDUCTIONS = ("defer", "scatter")
# One whole gradient in float32.
GRADIENT_BYTES = 4 * (FEATURES * HIDDEN + HIDDEN * OUT + OUT)


@functools.cache
def problem():
    """Parameters and a batch with rows of unequal weight."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    params = {"up": normal(FEATURES, HIDDEN), "down": normal(HIDDEN, OUT), "scale": normal(OUT)}
    mask = rng.random((ROWS, TOKENS)) < rng.random((ROWS, 1))
    return params, {"x": normal(ROWS, TOKENS, FEATURES), "mask": mask}


def loss_fn(params, batch):
    hidden = jnp.tanh(jnp.einsum("btf,fh->bth", batch["x"], params["up"]))
    out = jnp.einsum("bth,ho->bto", hidden, params["down"])
    return ja.mean((out * params["scale"][None, None]).sum(-1) ** 2, where=batch["mask"])


def full_batch(loss=loss_fn, mask=None, params=None):
    """Value and gradient of one pass in float64."""
    with jax.enable_x64(True):
        given, batch = problem()
        given = jax.tree.map(np.float64, given if params is None else params)
        x = np.float64(batch["x"])
        batch = {"x": x, "mask": batch["mask"] if mask is None else mask}

        def value(params):
            terms = jax.tree.leaves(loss(params, batch), is_leaf=lambda x: isinstance(x, ja.Mean))
            return sum(term.value for term in terms)

        loss_value, grads = jax.jit(jax.value_and_grad(value))(given)
        return jax.tree.map(np.asarray, (loss_value, grads))


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(np.float64(x))) for x in jax.tree.leaves(tree)))


def assert_close(got, expected, tolerance=1e-6):
    """Loss and gradients, the latter relative to the norm of the gradient."""
    (loss, grads), (true_loss, true_grads) = got, expected
    assert abs(float(loss) - true_loss) <= tolerance * abs(true_loss)
    error = norm(jax.tree.map(lambda a, b: np.asarray(a) - b, grads, true_grads))
    assert error <= tolerance * norm(true_grads)


class Layout(NamedTuple):
    """A mesh, and what lies in parts on it.

    Attributes:
      name: `FSDP` and `HSDP` split parameters, `ZeRO` only gradients; `HSDP` has two replicas.
      types: `A` (Auto) or `E` (Explicit).
    """

    name: str
    types: str

    @property
    def mesh(self):
        if self.name == "HSDP":
            return jax.make_mesh((2, 4), ("replica", "data"), axis_types=(TYPES[self.types],) * 2)
        return jax.make_mesh((8,), ("data",), axis_types=(TYPES[self.types],))

    @property
    def axes(self):
        return ("replica", "data") if self.name == "HSDP" else ("data",)

    @property
    def parts(self):
        return self.mesh.shape["data"]

    @property
    def param_specs(self):
        return WHOLE if self.name == "ZeRO" else SPECS

    @property
    def options(self):
        return {"grad_specs" if self.name == "ZeRO" else "param_specs": SPECS}

    def place(self, params, batch):
        put = lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec))  # noqa: E731
        return jax.tree.map(put, params, self.param_specs), put(batch, P(self.axes))

    def arguments(self):
        return self.place(*problem())

    def manual(self, reduction, *, check_vma=True, loss=loss_fn, **options):
        """`value_and_grad` inside a `shard_map`."""
        given = {"num_microbatches": K, **self.options, **options}
        f = ja.value_and_grad(loss, axis_name=self.axes, reduction=reduction, **given)
        return jax.jit(self.shard(f, (P(), SPECS), check_vma))

    def shard(self, f, out_specs, check_vma=True):
        return jax.shard_map(
            f,
            mesh=self.mesh,
            in_specs=(self.param_specs, P(self.axes)),
            out_specs=out_specs,
            check_vma=check_vma,
        )

    def spmd(self, reduction, *, loss=loss_fn, **options):
        """`value_and_grad` under plain `jit`; on Explicit axes the types say what is split."""
        read_off = self.types == "E" and self.name != "ZeRO"
        given = {"num_microbatches": K, **({} if read_off else self.options), **options}
        f = ja.value_and_grad(loss, spmd_axis_name=self.axes, reduction=reduction, **given)
        return jax.jit(f)

    def audit(self, reduction, **options):
        with jax.set_mesh(self.mesh):
            return ja.audit(self.spmd(reduction, **options), *self.arguments(), axis_name=self.axes)


LAYOUTS = [Layout(name, types) for name in ("FSDP", "HSDP", "ZeRO") for types in "AE"]
AUTO = [layout for layout in LAYOUTS if layout.types == "A"]
all_layouts = pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
auto_layouts = pytest.mark.parametrize("layout", AUTO, ids=[layout.name for layout in AUTO])
both_reductions = pytest.mark.parametrize("reduction", REDUCTIONS)


def assert_in_parts(layout, grads):
    for name, grad in grads.items():
        expected = NamedSharding(layout.mesh, SPECS[name])
        assert grad.sharding.is_equivalent_to(expected, grad.ndim), (name, grad.sharding)
        parts = 1 if SPECS[name] == P() else layout.parts
        assert grad.addressable_shards[0].data.size == grad.size // parts


# Equality with the full batch


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@both_reductions
@all_layouts
def test_manual_axes_equal_the_full_batch(layout, reduction, check_vma):
    got = layout.manual(reduction, check_vma=check_vma)(*layout.arguments())
    assert_close(got, full_batch())
    assert_in_parts(layout, got[1])


@both_reductions
@all_layouts
def test_plain_jit_equals_the_full_batch(layout, reduction):
    with jax.set_mesh(layout.mesh):
        got = layout.spmd(reduction)(*layout.arguments())
    assert_close(got, full_batch())
    assert_in_parts(layout, got[1])


@both_reductions
def test_an_uneven_cut(reduction):
    layout = Layout("FSDP", "A")  # six rows on each device
    got = layout.manual(reduction, num_microbatches=None, microbatch_size=4)(*layout.arguments())
    assert_close(got, full_batch())


@both_reductions
def test_several_terms(reduction):
    def terms_fn(params, batch):
        penalty = ja.Mean(jnp.sum(params["up"] ** 2), 1.0)
        row = ja.mean(jnp.einsum("btf,fh->bh", batch["x"], params["up"]) ** 2)
        return {"token": loss_fn(params, batch), "row": row, "penalty": penalty}

    layout = Layout("HSDP", "A")
    got = layout.manual(reduction, loss=terms_fn)(*layout.arguments())
    assert_close(got, full_batch(terms_fn))


@both_reductions
def test_a_compensated_sum(reduction):
    layout = Layout("HSDP", "A")
    compensated = ja.accumulators.compensated()
    got = layout.manual(reduction, accumulator=compensated)(*layout.arguments())
    assert_close(got, full_batch())


def test_dtypes_of_the_parameters_are_kept():
    layout = Layout("FSDP", "A")
    params, batch = problem()
    params = params | {"up": params["up"].astype(jnp.bfloat16)}
    got = layout.manual("scatter")(*layout.place(params, batch))
    assert [got[1][name].dtype for name in ("up", "down")] == [jnp.bfloat16, jnp.float32]
    assert_close(got, full_batch(params=params), 2 * float(jnp.finfo(jnp.bfloat16).eps))


def test_sums_in_parts_merge():
    layout = Layout("FSDP", "A")
    specs = {"loss": P(), "weight": P()}

    def twice(params, batch):
        f = ja.accumulate(
            loss_fn, num_microbatches=K, axis_name="data", reduction="scatter", param_specs=SPECS
        )
        window = ja.finalize(ja.merge(f(params, batch), f(params, batch)))
        return {"loss": window.loss, "weight": window.weight}, window.grads

    found, grads = jax.jit(layout.shard(twice, (specs, SPECS)))(*layout.arguments())
    assert_close((found["loss"], grads), full_batch())
    assert found["weight"] == 2 * problem()[1]["mask"].sum()


@both_reductions
def test_an_optimizer_step_with_a_sharded_state(reduction):
    """ZeRO-1: whole parameters, gradients and Adam's moments in parts, updates gathered."""
    layout = Layout("ZeRO", "A")
    adam = optax.adam(0.1)
    f = layout.spmd(reduction)
    params, batch = layout.arguments()

    def put(specs):
        return jax.tree.map(lambda spec: NamedSharding(layout.mesh, spec), specs)

    def step(params, state, batch):
        _, grads = f(params, batch)
        updates, state = adam.update(grads, state, params)
        params = jax.lax.with_sharding_constraint(optax.apply_updates(params, updates), put(WHOLE))
        return params, state

    with jax.set_mesh(layout.mesh):
        state = adam.init(jax.tree.map(jax.device_put, params, put(SPECS)))
        assert_in_parts(layout, state[0].mu)
        new, state = jax.jit(step, donate_argnums=1)(params, state, batch)
    assert_in_parts(layout, state[0].mu)
    assert all(x.sharding.is_fully_replicated for x in new.values())
    given, _ = problem()
    _, grads = full_batch()
    for name in given:  # the first step of Adam is the sign of the gradient, but for its epsilon
        step = -0.1 * grads[name] / (np.abs(grads[name]) + 1e-8)
        np.testing.assert_allclose(new[name], given[name] + step, atol=1e-5)


# What is held and what is moved


def carried(jaxpr):
    """The shapes of the floating-point arrays that a scan or a while loop carries."""
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            consts, carry = compat.scan_sizes(eqn.params)
            found |= {v.aval for v in eqn.invars[consts : consts + carry]}
        elif eqn.primitive.name == "while":
            found |= {v.aval for v in eqn.outvars}
        for inner in jex.jaxprs_in_params(eqn.params):
            found |= carried(inner)
    return found


def shapes(jaxpr):
    return {aval.shape if hasattr(aval, "shape") else aval for aval in carried(jaxpr)}


@auto_layouts
def test_scattered_sums_are_one_part_of_the_gradient(layout):
    """Case 30."""
    parts = layout.parts
    whole = {(FEATURES, HIDDEN), (HIDDEN, OUT)}
    split = {(FEATURES, HIDDEN // parts), (HIDDEN // parts, OUT)}
    for reduction, held, absent in (("defer", whole, split), ("scatter", split, whole)):
        traced = layout.manual(reduction).trace(*layout.arguments())
        found = shapes(traced.jaxpr.jaxpr)
        assert held <= found
        assert not absent & found


def test_scattered_sums_take_less_memory():
    """Case 30, in the compiled program, of a gradient that outweighs everything else."""
    layout = Layout("ZeRO", "A")
    size, depth = 256, 6
    params = {f"layer_{i}": np.ones((size, size), np.float32) for i in range(depth)}
    x = np.ones((16, size), np.float32)
    specs = dict.fromkeys(params, P("data"))

    def deep_fn(params, x):
        for layer in params.values():
            x = jnp.tanh(x @ layer)
        return ja.mean(x)

    def temporaries(reduction):
        f = ja.value_and_grad(
            deep_fn, num_microbatches=2, axis_name="data", reduction=reduction, grad_specs=specs
        )
        mapped = jax.shard_map(
            f, mesh=layout.mesh, in_specs=(P(), P("data")), out_specs=(P(), specs)
        )
        return ja.audit(jax.jit(mapped), params, x).memory.temporaries

    assert temporaries("scatter") <= 0.6 * temporaries("defer")


@all_layouts
def test_deferral_reduces_once(layout):
    found = layout.audit("defer")
    found.assert_deferred()
    assert not [c for c in found.in_loops if c.counts]
    assert not found.moved_rows
    scattered = {c.kind for c in found.outside if c.gradient_sized and "data" in c.axes}
    assert "reduce-scatter" in scattered
    # HSDP sums the scattered parts once more, over the replicas.
    replicas = [c for c in found.outside if c.axes == ("replica",)]
    once = found.reduced_gradients - sum(c.total_bytes for c in replicas) / GRADIENT_BYTES
    assert 1.0 <= once <= 1.02
    gathered = sum(c.total_bytes for c in found.outside if c.kind == "all-gather")
    assert gathered == (0 if layout.name == "ZeRO" else GRADIENT_BYTES - 4 * OUT)


@all_layouts
def test_scattering_reduces_every_micro_step(layout):
    found = layout.audit("scatter")
    scattered = [c for c in found.in_loops if c.kind == "reduce-scatter"]
    assert sum(c.total_bytes for c in scattered) == K * (GRADIENT_BYTES - 4 * OUT)
    assert {c.axes for c in scattered} == {("data",)}
    kinds = {c.kind for c in found.in_loops if c.gradient_sized}
    assert kinds <= {"reduce-scatter", "all-gather"}
    with pytest.raises(AssertionError, match="reduce-scatter"):
        found.assert_deferred()


@pytest.mark.parametrize("types", ["A", "E"])
@both_reductions
def test_replicas_meet_once(types, reduction):
    """HSDP: inside the loop nothing of a gradient's size crosses the replicas."""
    layout = Layout("HSDP", types)
    found = layout.audit(reduction)
    assert not [c for c in found.in_loops if "replica" in c.axes]
    over = [c for c in found.outside if "replica" in c.axes and c.gradient_sized]
    matrices = (GRADIENT_BYTES - 4 * OUT) / layout.parts
    assert matrices <= sum(c.total_bytes for c in over) <= matrices + 4 * OUT + 64


# One decision for all devices


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@auto_layouts
def test_a_bad_micro_batch_is_left_out_on_every_device_that_shares_a_sum(layout, check_vma):
    """A scattered part holds every device's gradient, so all leave out the micro-step."""
    per_device, bad_device, bad_row = ROWS // 8, 5, 2
    params, batch = problem()
    x = batch["x"].copy()
    bad = bad_device * per_device + bad_row
    x[bad] = np.nan
    batch = {"x": x, "mask": batch["mask"] | (np.arange(ROWS)[:, None] == bad)}

    def run(reduction):
        def window(params, batch):
            sums = ja.accumulate(
                loss_fn,
                microbatch_size=1,
                axis_name=layout.axes,
                reduction=reduction,
                skip_nonfinite=True,
                **layout.options,
            )(params, batch)
            window = ja.finalize(sums)
            return (window.loss, sums.num_skipped), window.grads

        mapped = layout.shard(window, ((P(), P()), SPECS), check_vma)
        (loss, skipped), grads = jax.jit(mapped)(*layout.place(params, batch))
        return (loss, grads), int(skipped)

    def expected(rows):
        return full_batch(mask=problem()[1]["mask"] & ~rows[:, None])

    got, skipped = run("scatter")
    assert_close(got, expected(np.arange(ROWS) % per_device == bad_row))
    assert skipped == 8
    got, skipped = run("defer")
    assert_close(got, expected(np.arange(ROWS) == bad))
    assert skipped == 1


def test_a_per_device_number_of_micro_batches_is_exact_when_deferred():
    layout = Layout("ZeRO", "A")
    number = np.arange(8) % 7
    f = layout.spmd("defer", num_microbatches=None, microbatch_size=1)
    with jax.set_mesh(layout.mesh):
        got = f(*layout.arguments(), num_real=jnp.asarray(number, jnp.int32))
    kept = (np.arange(ROWS // 8)[None] < number[:, None]).reshape(ROWS, 1)
    assert_close(got, full_batch(mask=problem()[1]["mask"] & kept))


def test_a_per_device_number_of_micro_batches_is_refused_when_scattered():
    """Devices that meet in every micro-step would wait for each other for ever."""
    layout = Layout("ZeRO", "A")
    f = layout.spmd("scatter", num_microbatches=None, microbatch_size=1)
    with (
        jax.set_mesh(layout.mesh),
        pytest.raises(ValueError, match="`num_real` differs per device"),
    ):
        f(*layout.arguments(), num_real=jnp.arange(8, dtype=jnp.int32) % 7)


# Parts over another axis, which is Explicit and automatic


def typed_problem():
    """A parameter that lies over `model` by its type, with the data axis to be manual."""
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    w = np.arange(24, dtype=np.float32).reshape(4, 6)
    x = np.arange(64, dtype=np.float32).reshape(16, 4)
    put = lambda value, spec: jax.device_put(value, NamedSharding(mesh, spec))  # noqa: E731
    return mesh, put(w, P(None, "model")), put(x, P("data")), np.tile(x.mean(0)[:, None], 6)


def typed_loss(w, x):
    return ja.Mean(jnp.sum(x @ w), len(x))


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_gradient_in_parts_may_lie_over_an_explicit_axis_too(reduction, check_vma):
    mesh, w, x, want = typed_problem()
    f = ja.value_and_grad(
        typed_loss, num_microbatches=2, axis_name="data", grad_specs=P("data"), reduction=reduction
    )
    mapped = jax.shard_map(
        f,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=(P(), P("data")),
        axis_names={"data"},
        check_vma=check_vma,
    )
    with jax.set_mesh(mesh):
        _, grads = jax.jit(mapped)(w, x)
    np.testing.assert_array_equal(grads, want)


@pytest.mark.parametrize("skip", [False, True, "window"])
def test_the_sums_of_a_stream_lie_over_an_explicit_axis_as_the_parameters_do(skip):
    mesh, w, x, want = typed_problem()
    tx = ja.multi_steps(optax.sgd(1.0), 2, axis_name="data", skip_nonfinite=skip)
    sums_fn = ja.accumulate(typed_loss, num_microbatches=2)
    with jax.set_mesh(mesh):
        state = tx.init(w)
        assert jax.typeof(state.grad_carry).sharding.spec == P("data", None, "model")
        specs = ja.state_specs(state, "data")
        mapped = jax.shard_map(
            lambda w, state, x: tx.update(sums_fn(w, x), state, w),
            mesh=mesh,
            in_specs=(P(), specs, P("data")),
            out_specs=(P(), specs),
            axis_names={"data"},
        )
        for _ in range(2):
            updates, state = jax.jit(mapped)(w, state, x)
    np.testing.assert_array_equal(updates, -want)


# Refusals


def refused(layout, **options) -> Any:
    """Traces a window with these options inside a `shard_map`."""
    given = {"num_microbatches": K, "axis_name": layout.axes, "reduction": "scatter"} | options
    mapped = layout.shard(ja.value_and_grad(loss_fn, **given), P())
    return jax.eval_shape(mapped, *layout.arguments())


ZERO = Layout("ZeRO", "A")


@pytest.mark.parametrize("argument", ["param_specs", "grad_specs"])
@pytest.mark.parametrize("function", [ja.accumulate, ja.value_and_grad])
def test_specs_must_be_partition_specs(function, argument):
    given = {"num_microbatches": K, "axis_name": "data", argument: {**SPECS, "up": "data"}}
    mapped = ZERO.shard(function(loss_fn, **given), P())
    with pytest.raises(TypeError, match=rf"{function.__name__}: .*`{argument}`.*`PartitionSpec`s"):
        jax.eval_shape(mapped, *ZERO.arguments())


def test_specs_must_be_a_prefix_of_the_parameters():
    with pytest.raises(ValueError, match="`grad_specs` must be a tree prefix of the parameters"):
        refused(ZERO, grad_specs={"up": P("data")})


@pytest.mark.parametrize("name", ["axis_name", "spmd_axis_name"])
def test_a_dimension_must_divide(name):
    params, batch = problem()
    params = params | {"scale": np.ones(5, np.float32), "down": np.ones((HIDDEN, 5), np.float32)}
    specs = {**SPECS, "scale": P("data")}
    options = {"num_microbatches": K, name: "data", "grad_specs": specs}
    f = ja.value_and_grad(loss_fn, **options)
    if name == "axis_name":
        f = ZERO.shard(f, (P(), SPECS))
    with (
        jax.set_mesh(ZERO.mesh),
        pytest.raises(ValueError, match=r"float32\[5\], whose dimension 0 does not divide by"),
    ):
        jax.eval_shape(jax.jit(f), *ZERO.place(params, batch))


def test_one_dimension_is_split():
    layout = Layout("HSDP", "A")
    specs = {**SPECS, "up": P("replica", "data")}
    with pytest.raises(ValueError, match="splits several dimensions over the axes of the window"):
        refused(layout, param_specs=specs)


def test_gradients_lie_like_sharded_parameters():
    layout = Layout("FSDP", "A")
    specs = {**SPECS, "up": P()}
    with pytest.raises(ValueError, match="differs from `param_specs`"):
        refused(layout, param_specs=SPECS, grad_specs=specs)


@pytest.mark.parametrize("function", [ja.accumulate, ja.value_and_grad])
def test_the_reduction_must_be_known(function):
    match = rf'{function.__name__}: `reduction` must be "defer" or "scatter", got'
    with pytest.raises(ValueError, match=match):
        function(loss_fn, num_microbatches=K, axis_name="data", reduction="mean")
