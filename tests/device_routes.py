"""Every way to run a window over devices, on every kind of mesh, behind one call.

A `Setup` is a mesh, the axes over which rows are split, and what happens on its other axis. A
route takes a loss function to `run(params, batch)`, which returns an `Outcome`. The model is
bilinear, `error = (x @ up) @ down - y`, so that it can be cut over a model axis; its integer data
is small enough that every float32 sum is exact; `answer` is its float64 NumPy formula. `recording`
keeps the compiled programs, `collectives` reads them.
"""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import cut_rows, take, wide

import jaxaccum as ja

ROWS, TOKENS, FEATURES, HIDDEN = 64, 4, 4, 8
DEVICES = 8
KEPT_TOKENS = 64

CUTS = {"even": {"num_microbatches": 4}, "uneven": {"microbatch_size": 3}}
WHOLE = P()
_TYPES = {"A": AxisType.Auto, "E": AxisType.Explicit}


# Meshes


class Setup(NamedTuple):
    """Where the rows go.

    Attributes:
      types: `A` (Auto) or `E` (Explicit) for each axis of the mesh: `data` of 8 devices, or `data`
        of 4 and `model` of 2. Empty for `pmap`.
      names: the axes over which rows are split.
      check_vma: whether `shard_map` checks replication.
      manual: whether the model axis is manual too; otherwise the parameters are split over it.
      context: whether the mesh is set in the context or comes with the arguments.
    """

    types: str
    names: str | tuple[str, ...] = "data"
    check_vma: bool = True
    manual: bool = False
    context: bool = True

    def __str__(self):
        if not self.types:
            return "pmap"
        words = [self.types, "".join(self.names) if self.names != "data" else ""]
        words += ["manual" if self.manual else "", "" if self.check_vma else "unchecked"]
        return "-".join([w for w in [*words, "" if self.context else "arguments"] if w])

    @property
    def mesh(self):
        shape = (8,) if len(self.types) == 1 else (4, 2)
        types = tuple(_TYPES[t] for t in self.types)
        return jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=types)

    @property
    def manual_axes(self):
        names = (self.names,) if isinstance(self.names, str) else self.names
        return set(names) | ({"model"} if self.manual else set())

    @property
    def number(self):
        """Over how many devices the rows are split."""
        return 4 if len(self.types) == 2 and self.names == "data" else DEVICES

    @property
    def tensor_parallel(self):
        return len(self.types) == 2 and "model" not in self.manual_axes

    @property
    def param_specs(self):
        if self.tensor_parallel:
            return {"up": P(None, "model"), "down": P("model")}
        return {"up": P(), "down": P()}

    def place(self, params, batch):
        """The arguments on the mesh: rows split, parameters as the model axis asks."""
        params = jax.tree.map(self.put, params, self.param_specs)
        return params, self.put(batch, P(self.names))

    def put(self, tree, spec):
        return jax.device_put(tree, NamedSharding(self.mesh, spec))

    def shard(self, fn, in_specs, out_specs):
        """The compiled `shard_map` of `fn`."""
        mapped = jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self.manual_axes,
            check_vma=self.check_vma,
        )
        return watched(jax.jit(mapped))

    def each(self, fn, out_specs=WHOLE):
        """`fn(params, batch)` over the devices; results are the same on each, or as specified."""
        if not self.types:
            return one_result(pmapped(fn))
        compiled = self.shard(fn, (P(), P(self.names)), out_specs)
        return lambda params, batch: compiled(*self.place(params, batch))

    def active(self):
        return jax.set_mesh(self.mesh) if self.context and self.types else contextlib.nullcontext()


PMAP = Setup("")


def manual_setups(types, *, manual=(False,)):
    """Setups for `shard_map`, checked and unchecked."""
    return [
        Setup(t, check_vma=check, manual=m)
        for t in types
        for m in manual
        for check in (True, False)
    ]


def pmapped(fn):
    """`pmap` of `fn(params, batch)`: rows split over all devices, parameters on each."""
    mapped = watched(jax.pmap(fn, axis_name="data", in_axes=(None, 0)))
    return lambda params, batch: mapped(params, per_device(batch))


def per_device(batch):
    """Rows `[64, ...]` as `[8, 8, ...]`."""
    return jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)


def one_result(fn):
    """The result of a `pmap`, after a check that all devices have the same."""

    def one(x):
        x = np.asarray(x)
        assert (bits(x) == bits(x[:1])).all()
        return x[0]

    return lambda *args: jax.tree.map(one, fn(*args))


def bits(x):
    """The bytes of an array, one row for each entry of axis 0."""
    x = np.ascontiguousarray(x)
    return np.frombuffer(x.tobytes(), np.uint8).reshape(x.shape[0], -1)


# The problem


def problem(seed, *, integer=False, rows=ROWS, features=FEATURES, hidden=HIDDEN):
    """`(params, batch)` with NumPy leaves; real data makes every gradient a sum of positives."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        x = rng.integers(-2, 3, shape) if integer else rng.uniform(0.5, 1.5, shape)
        return x.astype(np.float32)

    batch = {
        "x": draw(rows, TOKENS, features),
        "y": -draw(rows, TOKENS),
        "mask": np.ones((rows, TOKENS), bool),
    }
    return {"up": draw(features, hidden), "down": draw(hidden)}, batch


def error(params, batch, *, out_sharding=None):
    """The signed error of every token, `[rows, TOKENS]`."""
    hidden = batch["x"] @ params["up"]
    out = jnp.einsum("bth,h->bt", hidden, params["down"], out_sharding=out_sharding)
    return out - batch["y"]


def token_loss(params, batch, **how):
    """One term: the mean squared error of the kept tokens."""
    e = error(params, batch, **how)
    return ja.mean(e * e, where=batch["mask"])


def terms_loss(params, batch, **how):
    """Three terms with denominators of their own."""
    e = error(params, batch, **how)
    kept = batch["mask"].any(axis=1)
    return {
        "token": ja.mean(e * e, where=batch["mask"]),
        "sequence": ja.Mean(jnp.sum(jnp.where(batch["mask"], e, 0)), jnp.sum(kept)),
        "penalty": ja.Mean(0.5 * jnp.sum(params["down"] * params["down"]), 1.0),
    }


def answer(loss_fn, params, batch, rows):
    """`(loss, grads, weight)` of the given rows in one pass, in float64 NumPy."""
    params, batch = wide(params), wide(take(batch, rows))
    up, down, x, mask = params["up"], params["down"], batch["x"], batch["mask"]
    e = np.einsum("btf,fh,h->bt", x, up, down) - batch["y"]
    total, slope, weight = np.sum(mask * e * e), 2 * mask * e, mask.sum()
    loss, slope, penalty = total / weight, slope / weight, 0
    if loss_fn is terms_loss:
        sequences = mask.any(axis=1).sum()
        loss += np.sum(mask * e) / sequences + 0.5 * np.sum(down * down)
        slope, penalty = slope + mask / sequences, down
    grads = {
        "up": np.einsum("bt,btf,h->fh", slope, x, down),
        "down": np.einsum("bt,btf,fh->h", slope, x, up) + penalty,
    }
    return loss, grads, weight


def loss_on(setup, loss_fn):
    """`loss_fn` with what an Explicit model axis has to be told."""
    if setup.tensor_parallel and setup.types[1] == "E":
        return functools.partial(loss_fn, out_sharding=P(None, None))
    return loss_fn


SCENARIOS = ["even", "ragged", "empty device", "skipped"]


def scenario(name, run, *, integer=False):
    """`(params, batch, kept)`: the problem and the rows that the window must count.

    The kept tokens are a power of two, so that a correct mean of integers is exact.
    """
    params, batch = problem(3, integer=integer)
    rng = np.random.default_rng(5)
    local = ROWS // run.setup.number
    kept = np.arange(ROWS)
    if name == "even":
        return params, batch, kept
    if name == "empty device":
        kept = np.setdiff1d(kept, np.arange(local, 2 * local))
    if name == "skipped":
        bad = ROWS // 2 + 1
        batch["x"][bad, 2] = np.nan
        kept = np.concatenate([rows for rows in run.micro_batches() if bad not in rows])
    places = [(row, token) for row in np.sort(kept) for token in range(TOKENS)]
    batch["mask"][kept] = False
    if name == "empty device":
        batch["mask"][:] = False
    for place in rng.permutation(places)[:KEPT_TOKENS]:
        batch["mask"][tuple(place)] = True
    return params, batch, np.sort(kept)


# Routes


class Outcome(NamedTuple):
    """What a route gives: the window's loss, gradient, and weight where it tells."""

    loss: Any
    grads: Any
    weight: Any = None


class Run(NamedTuple):
    """A compiled route on one setup.

    Attributes:
      call: `call(params, batch)` to an `Outcome`, from NumPy arrays.
      setup: the setup.
      cut: how each part of a device's rows is cut.
      parts: into how many windows or calls a device's rows are divided before.
    """

    call: Callable[..., Outcome]
    setup: Setup
    cut: dict[str, int]
    parts: int

    def micro_batches(self):
        """The row numbers of every micro-batch on every device."""
        part = ROWS // self.setup.number // self.parts
        starts = range(0, ROWS, part)
        return [start + rows for start in starts for rows in cut_rows(part, **self.cut)]


class Recorded(NamedTuple):
    """What an optimizer was given last."""

    value: jax.Array
    grads: Any


def recorder():
    """An optimizer that changes nothing and keeps the value and the gradient that it is given."""

    def init_fn(params):
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        return Recorded(jnp.zeros((), jnp.float32), zeros)

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


def route_value_and_grad(setup, loss_fn, options):
    """`value_and_grad(axis_name)` inside `shard_map` or `pmap`."""
    f = ja.value_and_grad(loss_fn, axis_name=setup.names, **options)
    return setup.each(lambda params, batch: Outcome(*f(params, batch)))


def route_merge(setup, loss_fn, options):
    """`accumulate(axis_name)` twice, merged and divided."""
    options = {**options, "axis_name": setup.names}
    skip = options.pop("skip_nonfinite")
    several = loss_fn is terms_loss or getattr(loss_fn, "func", None) is terms_loss

    def step(params, batch):
        parts = halves(batch, 1)
        denominators = None
        if several:
            count = ja.denominators(loss_fn, **options)
            denominators = jax.tree.map(jnp.add, *[count(params, part) for part in parts])
        f = ja.accumulate(loss_fn, skip_nonfinite=skip, **options)
        window = ja.finalize(ja.merge(*[f(params, p, denominators=denominators) for p in parts]))
        return Outcome(window.loss, window.grads, window.weight)

    return setup.each(step)


def route_stream(setup, loss_fn, options):
    """`accumulate` without an axis in each of two calls, `multi_steps(axis_name)` over them."""
    tx = ja.multi_steps(recorder(), 2, axis_name=setup.names)
    f = ja.accumulate(loss_fn, **options)

    def micro_step(params, state, batch):
        sums = f(params, batch)
        loss = ja.Mean(sums.loss, sums.weight)
        return tx.update(sums.grads, state, params, weight=sums.weight, value=loss)[1]

    if not setup.types:
        init = pmapped(lambda params, batch: tx.init(params))
        step = watched(jax.pmap(micro_step, axis_name="data", in_axes=(None, 0, 0)))

        def run_pmap(params, batch):
            state = init(params, batch)
            for half in halves(batch, DEVICES):
                state = step(params, state, per_device(half))
            return Outcome(*one_result(lambda: state.inner_state)())

        return run_pmap

    specs = ja.state_specs(jax.eval_shape(tx.init, problem(0)[0]), setup.names)
    rows = P(setup.names)
    init = setup.shard(tx.init, P(), specs)
    step = setup.shard(micro_step, (P(), specs, rows), specs)

    def run(params, batch):
        placed = setup.place(params, batch)[0]
        state = init(placed)
        for half in halves(batch, setup.number):
            state = step(placed, state, setup.put(half, rows))
        return Outcome(*state.inner_state)

    return run


def route_plain_jit(setup, loss_fn, options):
    """`value_and_grad(spmd_axis_name)` under plain `jit`."""
    f = watched(jax.jit(ja.value_and_grad(loss_fn, spmd_axis_name=setup.names, **options)))

    def run(params, batch):
        with setup.active():
            return Outcome(*f(*setup.place(params, batch)))

    return run


def route_train_step(setup, loss_fn, options):
    """`train_step(spmd_axis_name)`."""
    train = ja.train_step(loss_fn, recorder(), spmd_axis_name=setup.names, **options)
    step = watched(train.step)

    def run(params, batch):
        with setup.active():
            params, batch = setup.place(params, batch)
            _, state, info = step(params, train.init(params), batch)
        assert (info.loss == state.inner_state.value) | jnp.isnan(info.loss)
        return Outcome(info.loss, state.inner_state.grads, info.weight)

    return run


class Route(NamedTuple):
    """A way to run a window.

    Attributes:
      make: `make(setup, loss_fn, options)` to `call(params, batch)`.
      parts: see `Run`.
      in_region: whether it runs inside `shard_map` or `pmap`.
      several_terms: whether it takes a loss of several terms.
    """

    make: Callable[..., Callable[..., Outcome]]
    parts: int
    in_region: bool
    several_terms: bool = True


ROUTES = {
    "value_and_grad": Route(route_value_and_grad, 1, True),
    "merge": Route(route_merge, 2, True),
    "stream": Route(route_stream, 2, True, several_terms=False),
    "plain jit": Route(route_plain_jit, 1, False),
    "train_step": Route(route_train_step, 1, False),
}


@functools.cache
def build(route, setup, loss_fn=token_loss, cut="even", *, skip=False):
    """The `Run` of a route; compiled once for all tests that ask for the same."""
    chosen = ROUTES[route]
    options = {**CUTS[cut], "skip_nonfinite": skip}
    call = chosen.make(setup, loss_on(setup, loss_fn), options)
    return Run(call, setup, CUTS[cut], chosen.parts)


# Compiled programs


_texts: list[str] | None = None


@contextlib.contextmanager
def recording():
    """A list that receives the text of every program that the routes run inside."""
    global _texts
    _texts = []
    try:
        yield _texts
    finally:
        _texts = None


def watched(fn):
    """`fn`, a jitted function, whose program `recording` can read."""

    def call(*args):
        if _texts is None:
            return fn(*args)
        compiled = fn.lower(*args).compile()
        _texts.append(compiled.as_text())
        return compiled(*args)

    return call


class Collective(NamedTuple):
    """One collective operation of a compiled program.

    Attributes:
      kind: `all-reduce` and the like.
      bytes: the size of its result on one device.
      in_loop: whether a `while` runs it.
      in_branch: whether a `conditional` runs it.
    """

    kind: str
    bytes: int
    in_loop: bool
    in_branch: bool


_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    r"|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)
_CALLED = re.compile(r"(\w+)=(?:\{(%[^}]*)\}|%([\w.-]+))")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


def collectives(text):
    """All collectives of an optimised HLO text, with the control flow around them."""
    lines, entry, name = {}, None, None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head.group(2)
            lines[name] = []
            entry = name if head.group(1) else entry
        elif name is not None:
            lines[name].append(line)
    found = []

    def visit(name, in_loop, in_branch):
        for line in lines[name]:
            if match := _COLLECTIVE.search(line):
                size = sum(_bytes(*shape) for shape in _SHAPE.findall(match.group(1)))
                found.append(Collective(match.group(2), size, in_loop, in_branch))
            for role, several, one in _CALLED.findall(line):
                if role == "to_apply" and " call(" not in line:
                    continue
                loop = in_loop or role in ("body", "condition")
                branch = in_branch or role.endswith(("computation", "computations"))
                for inner in re.findall(r"[\w.-]+", several or one):
                    if inner in lines:
                        visit(inner, loop, branch)

    visit(entry, False, False)
    return found


def _bytes(dtype, shape):
    number = int(np.prod([int(n) for n in shape.split(",") if n], dtype=int))
    return number * _WIDTHS.get(dtype, 4)
