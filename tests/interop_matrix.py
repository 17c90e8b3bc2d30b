"""Every optimizer of Optax under `multi_steps`, alone and with Optax's wrappers, as one matrix.

A row is an optimizer, a column a kind of parameters or a wrapper inside or outside of the window.
`cell` runs one of them: four windows of three micro-steps, whose undivided gradients weigh
differently, against the plain optimizer on the four weighted mean gradients.

    python tests/interop_matrix.py        # writes the table of docs/interop.md
"""

import functools
import inspect
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import jaxaccum as ja

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "interop.md"
RATE = 0.125
WEIGHTS = np.array(
    [[1, 3, 4], [2, 5, 1], [3, 3, 2], [6, 1, 1]], np.float32
)  # each window sums to 8
WINDOWS, EVERY = WEIGHTS.shape


def loss(params):
    """A smooth loss for what evaluates one itself."""
    return sum(jnp.sum(jnp.square(x.astype(jnp.float32) - 1)) for x in jax.tree.leaves(params))


def adversary():
    return optax.chain(contrib.normalize(), optax.sgd(0.25))


# Rows that need more than a learning rate: how they are made, the extra arguments of their update.
SPECIAL = {
    "polyak_sgd": (optax.polyak_sgd, {"value"}),
    "lbfgs": (optax.lbfgs, {"value", "grad", "value_fn"}),
    "momo": (contrib.momo, {"value"}),
    "momo_adam": (contrib.momo_adam, {"value"}),
    "sophia": (lambda: contrib.sophia(RATE), {"obj_fn"}),
    "galore": (lambda: contrib.galore(RATE, rank=2), ()),
    "noisy_sgd": (lambda: optax.noisy_sgd(RATE, key=0), ()),
    "optimistic_gradient_descent": (lambda: optax.optimistic_gradient_descent(RATE), ()),
    "cocob": (contrib.cocob, ()),
    "schedule_free": (lambda: contrib.schedule_free(optax.sgd(RATE), RATE), ()),
    "mechanize": (lambda: contrib.mechanize(optax.sgd(RATE)), ()),
    "reduce_on_plateau": (
        lambda: optax.chain(optax.sgd(RATE), contrib.reduce_on_plateau()),
        {"value"},
    ),
    "sam": (lambda: contrib.sam(optax.sgd(RATE), adversary()), ()),
}
LEFT_OUT = {
    "optimistic_adam": "deprecated by Optax; optimistic_adam_v2 takes its place",
    "dpsgd": "its update takes per-example gradients with a leading axis, a sum has none",
}


def discover():
    """Every public optimizer of `optax` and `optax.contrib` that needs only a learning rate."""
    found = {}
    for module in (optax, contrib):
        for name, factory in vars(module).items():
            if name.startswith("scale_by") or not inspect.isfunction(factory):
                continue
            parameters = inspect.signature(factory).parameters
            required = {p.name for p in parameters.values() if p.default is p.empty}
            if "learning_rate" in parameters and required <= {"learning_rate"}:
                found[name] = (functools.partial(factory, learning_rate=RATE), ())
    return {name: made for name, made in found.items() if name not in LEFT_OUT}


ROWS = dict(sorted((discover() | SPECIAL).items()))


# Columns: `(inner, outer, extra)`: what is put into the window, what is put around it, and the
# extra arguments that they need. The plain optimizer has both around it.


def same(tx):
    return tx


def only_w(tx):
    """`tx` on one parameter, the other one frozen."""
    rest = optax.masked(optax.set_to_zero(), {"w": False, "b": True})
    return optax.chain(optax.masked(tx, {"w": True, "b": False}), rest)


def injected(tx):
    return optax.inject_hyperparams(lambda factor: optax.chain(tx, optax.scale(factor)))(0.5)


def searched(search):
    return lambda tx: optax.chain(tx, search())


LINE = {"value", "grad", "value_fn"}
INSIDE = {
    "chain": (lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx), ()),
    "masked": (only_w, ()),
    "partition": (
        lambda tx: optax.partition({"a": tx, "b": optax.sgd(1.0)}, {"w": "a", "b": "b"}),
        (),
    ),
    "inject_hyperparams": (injected, ()),
    "apply_if_finite": (lambda tx: optax.apply_if_finite(tx, 3), ()),
    "schedule_free": (lambda tx: contrib.schedule_free(tx, RATE), ()),
    "backtracking": (
        searched(lambda: optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)),
        LINE,
    ),
    "zoom": (searched(lambda: optax.scale_by_zoom_linesearch(max_linesearch_steps=5)), LINE),
    "reduce_on_plateau": (searched(lambda: contrib.reduce_on_plateau(patience=1)), {"value"}),
    "sam": (lambda tx: contrib.sam(tx, adversary()), ()),
    "lookahead": (lambda tx: optax.lookahead(tx, 2, 0.5), ()),
}


def around(wrap, plain=None):
    """The wrapper around a window, and around the plain optimizer."""
    return wrap, plain or wrap


OUTSIDE = {
    "chain": around(lambda tx: optax.chain(optax.scale(2.0), tx, optax.scale(0.5))),
    "masked": around(only_w),
    "partition": around(
        lambda tx: optax.partition({"a": tx, "b": optax.set_to_zero()}, {"w": "a", "b": "b"})
    ),
    "inject_hyperparams": around(injected),
    "apply_if_finite": around(lambda tx: optax.apply_if_finite(tx, 3)),
    "flatten": around(optax.flatten),
    # It counts calls of its update, so its period is given in micro-steps; it passes no weights.
    "lookahead": around(
        lambda tx: optax.lookahead(tx, 2 * EVERY, 0.5), lambda tx: optax.lookahead(tx, 2, 0.5)
    ),
}
KINDS = {
    "float32": {"w": jnp.float32, "b": jnp.float32},
    "bfloat16": {"w": jnp.bfloat16, "b": jnp.bfloat16},
    "mixed": {"w": jnp.bfloat16, "b": jnp.float32},
}
COLUMNS = [*KINDS, *(f"in {name}" for name in INSIDE), *(f"around {name}" for name in OUTSIDE)]


def parameters(kind="float32"):
    values = {"w": jnp.arange(12.0).reshape(4, 3) / 8 - 0.5, "b": jnp.array([0.5, -1.0, 2.0])}
    return {name: x.astype(KINDS[kind][name]) for name, x in values.items()}


def undivided(params):
    """The gradient sums of all micro-steps, `[WINDOWS, EVERY, ...]`: small multiples of 1/8."""
    rng = np.random.default_rng(0)

    def draw(x):
        return jnp.asarray(rng.integers(-16, 17, (WINDOWS, EVERY, *x.shape)) / 8, x.dtype)

    return jax.tree.map(draw, params)


def extra_args(names, grad, value):
    given = {"value": value, "grad": grad, "value_fn": loss, "obj_fn": loss}
    return {name: given[name] for name in names}


def like(tree, types):
    """`tree` in the dtypes of `types`, the cast that carries of a scan need."""
    return jax.tree.map(lambda x, t: jnp.asarray(x).astype(t.dtype), tree, types)


def run(tx, params, grads, names, values, weights):
    """Parameters and state after a scan over the steps.

    A plain optimizer has `weights` of `None`; its state keeps the dtypes of its `init`, as a scan
    requires. A stream whose wrapper passes no weights has `()`.
    """

    def step(carry, xs):
        params, state = carry
        grad, value, weight = xs
        weighs = isinstance(weight, jax.Array)
        named = {"weight": weight} if weighs else {}
        given = extra_args(names, grad, ja.Mean(value * weight, weight) if weighs else value)
        updates, new = tx.update(grad, state, params, **named, **given)
        new = like(new, state) if weight is None else new
        return (optax.apply_updates(params, updates), new), None

    @jax.jit
    def whole(params, grads, values, weights):
        state = jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x)), tx.init(params))
        return jax.lax.scan(step, (params, state), (grads, values, weights))[0]

    return whole(params, grads, values, weights)


def inner_states(state):
    """A state without the windows: each `MultiStepsState` as that of the optimizer in it."""
    return jax.tree.map(
        lambda s: s.inner_state if isinstance(s, ja.MultiStepsState) else s,
        state,
        is_leaf=lambda s: isinstance(s, ja.MultiStepsState),
    )


def reference(tx, params, means, names, values):
    """The plain optimizer on the mean gradients, in float32 where it refuses to mix dtypes.

    In float32 its parameters and state are rounded to their own dtypes after each step.
    """
    try:
        return run(tx, params, means, names, values, None)
    except (TypeError, FutureWarning):
        if all(x.dtype == jnp.float32 for x in jax.tree.leaves(params)):
            raise
    wide = optax.with_extra_args_support(tx)

    def update_fn(updates, state, params=None, **extra):
        to_float32 = functools.partial(optax.tree.cast, dtype=jnp.float32)
        whole = jax.tree.map(
            lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state
        )
        return wide.update(updates, whole, to_float32(params), **extra)

    wrapped = optax.GradientTransformationExtraArgs(tx.init, update_fn)
    return run(wrapped, params, means, names, values, None)


def combination(row, column):
    """`(stream, plain, kind, names of the extra arguments)` of one cell."""
    make, names = ROWS[row]
    where, _, wrapper = column.rpartition(" ")
    if not where:
        return ja.multi_steps(make(), EVERY), make(), wrapper, set(names)
    if where == "in":
        wrap, more = INSIDE[wrapper]
        names = set(names) | set(more)
        return ja.multi_steps(wrap(make()), EVERY), wrap(make()), "float32", names
    wrap, plain = OUTSIDE[wrapper]
    return wrap(ja.multi_steps(make(), EVERY)), plain(make()), "float32", set(names)


def cell(row, column):
    """`"equal"`, `"refused: reason"` where we refuse, `"Optax: reason"` where Optax does itself."""
    stream, plain, kind, names = combination(row, column)
    params = parameters(kind)
    sums = undivided(params)
    weights = WEIGHTS if column != "around lookahead" else np.ones_like(WEIGHTS)
    per_window = weights.sum(1)

    def mean(x):
        divisor = per_window.reshape(-1, *[1] * (x.ndim - 2))
        return jnp.asarray(np.sum(np.float64(x), 1) / divisor, jnp.float32)

    values = np.arange(1.0, 1 + WINDOWS * EVERY, dtype=np.float32).reshape(WINDOWS, EVERY)
    if column.endswith("lookahead"):
        params = optax.LookaheadParams.init_synced(params)
    try:
        wanted = optax.with_extra_args_support(plain), params, jax.tree.map(mean, sums), names
        want = reference(*wanted, np.sum(values * weights, 1) / per_window)
    except Exception as error:  # whatever Optax says
        return f"Optax: {reason(error)}"
    given = sums, values, weights
    sums, values, weights = (jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x) for x in given)
    by_itself = column == "around lookahead"
    try:
        got, state = run(stream, params, sums, names, values, () if by_itself else weights)
    except (TypeError, ValueError) as error:
        if not re.match(r"multi_steps: .*`", str(error)):
            raise
        return f"refused: {reason(error)}"
    compare(got, want[0], kind)
    compare(inner_states(state), want[1], kind, counters=not column.startswith("around"))
    return "equal"


def reason(error):
    """The first sentence of an error."""
    return re.split(r"(?<=[a-z`])\.\s|\n", str(error))[0][:160]


def compare(got, want, kind, *, counters=True):
    """Equal dtypes; values to the rounding of the dtype. Wrappers outside count micro-steps.

    What a line search notes for the reader is left out: differences of nearly equal numbers.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    paths = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(paths, jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (name, a.dtype, b.dtype)
        if ".info." in name:
            continue
        if jnp.issubdtype(a.dtype, jnp.inexact):
            eps = float(jnp.finfo(a.dtype).eps) if kind == "float32" else 2**-8
            scale = np.max(np.abs(np.float64(b)), initial=1e-3)
            np.testing.assert_allclose(
                np.float64(a), np.float64(b), rtol=32 * eps, atol=8 * eps * scale, err_msg=name
            )
        elif jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(jax.random.key_data(a), jax.random.key_data(b))
        elif counters:
            np.testing.assert_array_equal(a, b, err_msg=name)


# The page.

MARKS = {"equal": "=", "refused": "r", "Optax": "o"}
TABLES = {
    "The optimizer, and wrappers inside of the window": [c for c in COLUMNS if "around" not in c],
    "Wrappers around the window": [c for c in COLUMNS if "around" in c],
}


def mark(answer):
    return MARKS[answer.partition(":")[0]]


def table(columns, marks):
    """The Markdown table of `marks[row][column]`."""
    lines = ["| optimizer | " + " | ".join(c.rpartition(" ")[2] for c in columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    lines += [f"| {row} | " + " | ".join(marks[row][c] for c in columns) + " |" for row in marks]
    return "\n".join(lines)


def read_page():
    """`{row: {column: mark}}` as the page has it."""
    text = PAGE.read_text(encoding="utf-8")
    marks = {}
    for title, columns in TABLES.items():
        section = text.partition(f"### {title}\n")[2].partition("\n#")[0]
        lines = [line for line in section.splitlines() if line.startswith("|")]
        head, _, *rest = [[entry.strip() for entry in line.strip("|").split("|")] for line in lines]
        assert head[1:] == [c.rpartition(" ")[2] for c in columns]
        for row, *entries in rest:
            marks.setdefault(row, {}).update(zip(columns, entries, strict=True))
    return marks


def write_page(marks):
    """Replaces the tables of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for title, columns in TABLES.items():
        pattern = re.compile(rf"(### {title}\n\n)(?:\|.*\n)*")
        text = pattern.sub(lambda m: m[1] + table(columns, marks) + "\n", text)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("error")
    found = {}
    for row in ROWS:
        answers = {column: cell(row, column) for column in COLUMNS}
        for column, answer in answers.items():
            if answer != "equal":
                print(f"{row}, {column}: {answer}", flush=True)
        found[row] = {column: mark(answer) for column, answer in answers.items()}
    write_page(found)
