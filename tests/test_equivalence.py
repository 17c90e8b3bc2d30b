"""`check_equivalence`: names each planted fault, and is silent about correct loss functions."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxaccum as ja

ROWS, TOKENS, VOCABULARY, WIDTH = 6, 5, 11, 4


def problem(dtype=jnp.float32):
    """A small language model and ragged rows; token 0 is padding."""
    rng = np.random.default_rng(0)
    params = {
        "embed": jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)), dtype),
        "out": jnp.asarray(rng.normal(size=(WIDTH, VOCABULARY)), dtype),
    }
    lengths = np.array([[5], [2], [3], [5], [1], [4]])
    tokens = rng.integers(1, VOCABULARY, (ROWS, TOKENS))
    batch = {
        "tokens": jnp.asarray(np.where(np.arange(TOKENS)[None] < lengths, tokens, 0)),
        "row": jnp.arange(ROWS),
        "key": ja.batches.example_keys(jax.random.key(1), ROWS),
    }
    return params, batch


def hidden(params, batch):
    return jnp.tanh(params["embed"][batch["tokens"][:, :-1]])


def kept(batch):
    return batch["tokens"][:, 1:] > 0


def per_token(params, batch, h=None):
    logits = (hidden(params, batch) if h is None else h) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])


def good(params, batch):
    return ja.mean(per_token(params, batch), where=kept(batch))


def check(loss_fn, **options):
    params, batch = problem()
    return ja.check_equivalence(loss_fn, params, batch, **{"num_microbatches": 3, **options})


# Faults. Each returns what a person might have written.


def bare_mean(params, batch):
    return per_token(params, batch).mean()


def bare_masked_mean(params, batch):
    return (per_token(params, batch) * kept(batch)).sum() / kept(batch).sum()


def bare_sum(params, batch):
    return (per_token(params, batch) * kept(batch)).sum()


def mean_of_weight_one(params, batch):
    return ja.Mean(bare_masked_mean(params, batch), 1.0)


def mean_with_its_count(params, batch):
    return ja.Mean(bare_masked_mean(params, batch), kept(batch).sum())


def divided_by_its_rows(params, batch):
    rows = batch["tokens"].shape[0]
    return ja.Mean(bare_sum(params, batch) / rows, rows)


def divided_by_the_whole_batch(params, batch):
    return ja.Mean(bare_sum(params, batch) / (ROWS * TOKENS), 1.0)


def labels_counted(params, batch):
    total = (per_token(params, batch) * kept(batch)).sum()
    return ja.Mean(total, (batch["tokens"] > 0).sum())


def all_positions_counted(params, batch):
    return ja.Mean(per_token(params, batch).sum(), batch["tokens"].size)


def padded_labels_counted(params, batch):
    """The same in a model of one fixed length, so that nothing can be cut short."""
    position = jnp.arange(TOKENS - 1.0)[None, :, None]
    total = per_token(params, batch, hidden(params, batch) + position) * kept(batch)
    return ja.Mean(total.sum(), jnp.sum(batch["tokens"] > 0))


def batch_norm(params, batch):
    h = hidden(params, batch)
    h = (h - h.mean((0, 1), keepdims=True)) / (h.std((0, 1), keepdims=True) + 1e-3)
    return ja.mean(per_token(params, batch, h), where=kept(batch))


def contrastive(params, batch):
    a, b = params["embed"][batch["tokens"][:, 0]], params["embed"][batch["tokens"][:, 1]]
    return ja.mean(-jnp.diag(jax.nn.log_softmax(a @ b.T)))


def same_mask(params, batch):
    h = hidden(params, batch)
    mask = jax.random.bernoulli(jax.random.key(7), 0.5, h.shape)
    return ja.mean(per_token(params, batch, h * mask / 0.5), where=kept(batch))


def row_number(params, batch):
    weights = 1.0 + jnp.arange(batch["tokens"].shape[0])[:, None]
    return ja.mean(per_token(params, batch) * weights, where=kept(batch))


class Counting:
    """A loss function that changes with each call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, params, batch):
        self.calls += 1
        return self.calls * good(params, batch)


class RunningMean:
    """State that the loss function itself updates, as a mutable module would."""

    def __init__(self):
        self.mean = jnp.zeros(WIDTH)

    def __call__(self, params, batch):
        h = hidden(params, batch)
        self.mean = 0.9 * self.mean + 0.1 * h.mean((0, 1))
        return ja.mean(per_token(params, batch, h - self.mean[None, None]), where=kept(batch))


def random_numpy(params, batch):
    noise = np.random.default_rng().normal(size=(1, 1, WIDTH)).astype(np.float32)
    return ja.mean(per_token(params, batch, hidden(params, batch) + noise), where=kept(batch))


def psum_of_the_loss(params, batch):
    loss = good(params, batch)
    return ja.Mean(lax.psum(loss.total, "data"), lax.psum(loss.weight, "data"))


def pmean_of_the_loss(params, batch):
    loss = good(params, batch)
    return ja.Mean(lax.pmean(loss.total, "data"), loss.weight)


def weight_of_the_model(params, batch):
    gate = jax.nn.sigmoid(hidden(params, batch).sum(-1))
    return ja.mean(per_token(params, batch), weights=gate * kept(batch))


def leaking_nan(params, batch):
    x = jnp.where(batch["row"] == 2, 0.0, 1.0)
    root = jnp.sqrt(x * params["out"].sum() ** 2)  # at zero its slope is infinite
    return ja.mean(root, where=batch["row"] != 2)


def broken_row(params, batch):
    return ja.mean(per_token(params, batch) / (batch["row"][:, None] - 1), where=kept(batch))


def mean_of_nothing(params, batch):
    count = kept(batch).sum()
    return ja.Mean((per_token(params, batch) * kept(batch)).sum() / count * count, count)


def bfloat16_sum(params, batch):
    values = per_token(params, batch) * kept(batch)
    return ja.Mean(values.astype(jnp.bfloat16).sum().astype(jnp.float32), kept(batch).sum())


def bfloat16_total(params, batch):
    values = per_token(params, batch).astype(jnp.bfloat16)
    return ja.Mean(jnp.where(kept(batch), values, 0).sum(), kept(batch).sum())


def bfloat16_count(params, batch):
    total = jnp.where(kept(batch), per_token(params, batch), 0).sum()
    return ja.Mean(total, kept(batch).astype(jnp.bfloat16).sum())


def fixed_rows(params, batch):
    return ja.mean(per_token(params, batch).reshape(ROWS, TOKENS - 1), where=kept(batch))


def wrong_rows_in_aux(params, batch):
    return good(params, batch), ja.Concat(jnp.zeros(ROWS + 1))


# Rows of three numbers and their targets, for what goes on between rows.

POINTS = {
    "x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=8).astype(np.float32),
}
SLOPE = jnp.array([0.5, -1.0, 2.0])


def line(w, batch):
    return batch["x"] @ w


def squares(w, batch):
    return (line(w, batch) - batch["y"]) ** 2


def divided_by_a_norm(w, batch):
    z = line(w, batch)
    return ja.mean((z / jnp.linalg.norm(z) - batch["y"]) ** 2)


def softmax_over_rows(w, batch):
    return ja.mean(jax.nn.softmax(line(w, batch)) * squares(w, batch))


def divided_by_a_sum(w, batch):
    z = jnp.abs(line(w, batch))
    return ja.mean((z / z.sum() - batch["y"]) ** 2)


def divided_by_a_sum_without_slope(w, batch):
    losses = squares(w, batch)
    return ja.mean(losses / lax.stop_gradient(losses.sum()))


def divided_by_an_inverse(w, batch):
    z = line(w, batch)
    return ja.mean((z * lax.rsqrt((z**2).sum()) - batch["y"]) ** 2)


def divided_by_the_root_of_the_rows(w, batch):
    losses = squares(w, batch)
    return ja.Mean(losses.sum() / len(losses) ** 0.5, len(losses))


def bare_self_normalised(w, batch):
    z = line(w, batch)
    return ((z / jnp.linalg.norm(z) - batch["y"]) ** 2).mean()


def normalised_advantages(w, batch):
    y = batch["y"]
    return ja.mean((y - y.mean()) / (y.std() + 1e-6) * line(w, batch))


def root_of_the_mean(w, batch):
    losses = squares(w, batch)
    return ja.Mean(jnp.sqrt(losses.mean()) * len(losses), len(losses))


def above_the_mean(w, batch):
    losses = squares(w, batch)
    return ja.mean(losses, where=losses >= losses.mean())


def loop_over_the_rows(w, batch):
    z = line(w, batch)
    square = sum(z[i] ** 2 for i in range(len(z)))  # another program for each number of rows
    return ja.mean((z / jnp.sqrt(square) - batch["y"]) ** 2)


def statistics_in_a_scan(w, batch):
    def layer(z, _):
        return jnp.tanh(z - z.mean()), None

    return ja.mean(lax.scan(layer, line(w, batch), length=2)[0] * batch["y"])


def largest_behind_another_layout(w, batch):
    z = (batch["x"] * w[None]).T.reshape(-1)
    return ja.mean((z / jnp.abs(z).max()).reshape(3, -1) * batch["y"][None])


def hardest_two(w, batch):
    return ja.mean(lax.top_k(squares(w, batch), 2)[0])  # a single row raises


def hardest_half(w, batch):
    losses = squares(w, batch)
    return ja.mean(lax.top_k(losses, max(1, len(losses) // 2))[0])


def hardest_half_beside_a_mean_times_its_rows(w, batch):
    losses, rows = squares(w, batch), len(batch["y"])
    hardest = lax.top_k(losses, max(1, rows // 2))[0]
    return ja.Mean(losses.mean() * rows + hardest.sum(), rows)


def hardest_one(w, batch):
    return ja.Mean(squares(w, batch).max(), 1.0)


def largest_target(w, batch):
    return ja.Mean(squares(w, batch)[jnp.argmax(batch["y"])], 1.0)


def above_the_median(w, batch):
    losses = squares(w, batch)
    return ja.mean(jnp.where(losses >= jnp.median(losses), losses, 0))


def hardest_negative(w, batch):
    z = batch["x"] * w[None]
    distances = jnp.square(z[:, None] - z[None]).sum(-1)
    own = jnp.eye(len(z), dtype=bool)
    return ja.mean(jnp.where(own, 1e3, distances).min(1))


def neighbours(w, batch):
    z = line(w, batch)
    return ja.mean(jax.nn.softplus(z[0::2] - z[1::2]))


def neighbours_reshaped(w, batch):
    z = line(w, batch).reshape(-1, 2)  # a single row raises
    return ja.mean(jax.nn.softplus(z[:, 0] - z[:, 1]))


def groups_of_four(w, batch):
    advantages = batch["y"].reshape(-1, 4) - batch["y"].reshape(-1, 4).mean(1, keepdims=True)
    return ja.mean(advantages.reshape(-1) * line(w, batch))


def halves(w, batch):
    z = line(w, batch)
    return ja.mean(jax.nn.softplus(z[: len(z) // 2] - z[len(z) // 2 :]))


def differences(w, batch):
    z = line(w, batch)
    return ja.mean((z[1:] - z[:-1]) ** 2)


@jax.custom_vjp
def clipped(z):
    return z


clipped.defvjp(lambda z: (z, None), lambda _, g: (g / jnp.maximum(1, jnp.linalg.norm(g)),))


def gradient_clipped_inside(w, batch):
    return ja.mean(clipped(line(w, batch)) * batch["y"])


@jax.custom_vjp
def many(z):
    return z


many.defvjp(lambda z: (z, None), lambda _, g: (g * len(g),))


def gradient_times_its_rows(w, batch):
    return ja.mean(many(line(w, batch)) * batch["y"])


FAULTS = {
    "mean_inside": [
        bare_mean, bare_masked_mean, mean_of_weight_one, mean_with_its_count, divided_by_its_rows,
    ],
    "scalar_loss": [bare_sum],
    "constant_denominator": [divided_by_the_whole_batch],
    "shifted_denominator": [labels_counted, all_positions_counted, padded_labels_counted],
    "batch_statistics": [batch_norm, contrastive],
    "same_mask": [same_mask],
    "row_order": [row_number],
    "impure": [Counting, RunningMean, random_numpy],
    "collective": [psum_of_the_loss, pmean_of_the_loss],
    "weight_depends_on_params": [weight_of_the_model],
    "non_finite": [leaking_nan, broken_row, mean_of_nothing],
    "low_precision": [bfloat16_sum, bfloat16_total, bfloat16_count],
    "fixed_shape": [fixed_rows],
}  # fmt: skip
# Of rows: what the message must name beside.
BETWEEN_ROWS = {
    "mean_inside": {
        divided_by_a_norm: "`sqrt`", softmax_over_rows: "`div`", divided_by_a_sum: "`div`",
        divided_by_a_sum_without_slope: "`div`", divided_by_an_inverse: "`rsqrt`",
        divided_by_the_root_of_the_rows: "number of rows",
    },
    "batch_statistics": {
        normalised_advantages: "`div`", root_of_the_mean: "`div`", above_the_mean: "`div`",
        statistics_in_a_scan: "`scan`", loop_over_the_rows: "see each other:",
        gradient_clipped_inside: "see each other:",
    },
    "selection": {
        hardest_half: "`top_k`", hardest_half_beside_a_mean_times_its_rows: "`top_k`",
        hardest_two: "`top_k`", hardest_one: "`reduce_max`",
        largest_target: "`argmax`", above_the_median: "`sort`", hardest_negative: "`reduce_min`",
        largest_behind_another_layout: "`reduce_max`",
    },
    "torn_apart": {
        neighbours: "Rows 0 and 1 belong", neighbours_reshaped: "Rows 0 and 1 belong",
        groups_of_four: "Rows 0 and 1 and 2 and 3 belong", halves: "Rows 0 and 4 belong",
    },
    "row_order": {differences: "order of the rows"},
    "unknown": {gradient_times_its_rows: "no experiment here explains"},
}  # fmt: skip


def cases(table):
    """Of each kind the first by default, the others under `-m slow`."""
    return [
        pytest.param(kind, loss_fn, id=f"{kind}-{loss_fn.__name__}",
                     marks=[pytest.mark.slow] * (i > 0))
        for kind, losses in table.items()
        for i, loss_fn in enumerate(losses)
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "loss_fn"), cases(FAULTS))
def test_each_fault_is_named(kind, loss_fn):
    report = check(loss_fn() if inspect.isclass(loss_fn) else loss_fn)
    assert not report.ok
    assert [finding.kind for finding in report.findings] == [kind]
    text = str(report)
    assert text.startswith("not ok")
    assert report.findings[0].message in text
    assert report.findings[0].remedy in text


@pytest.mark.parametrize(("kind", "loss_fn"), cases(BETWEEN_ROWS))
def test_what_goes_on_between_rows_is_named(kind, loss_fn):
    report = ja.check_equivalence(loss_fn, SLOPE, POINTS, num_microbatches=4)
    assert [finding.kind for finding in report.findings] == [kind], str(report)
    (finding,) = report.findings
    named = BETWEEN_ROWS[kind][loss_fn]
    assert named in finding.message
    if named.startswith("`"):  # with the line
        assert f"{loss_fn.__name__})" in finding.message
        assert "test_equivalence.py:" in finding.message


def test_a_bare_scalar_has_its_other_fault_beside_it():
    report = ja.check_equivalence(bare_self_normalised, SLOPE, POINTS, num_microbatches=4)
    assert [finding.kind for finding in report.findings] == ["scalar_loss", "mean_inside"]


def test_two_terms_have_a_cause_each():
    def loss_fn(w, batch):
        return {"a": hardest_half(w, batch), "b": divided_by_a_sum(w, batch),
                "c": ja.mean(squares(w, batch))}  # fmt: skip

    report = ja.check_equivalence(loss_fn, SLOPE, POINTS, num_microbatches=4)
    assert [(f.kind, f.message.split("`")[1]) for f in report.findings] == [
        ("selection", "loss['a']"), ("mean_inside", "loss['b']"),
    ]  # fmt: skip


def test_neighbours_of_which_no_micro_batch_holds_two():
    """CASE 83: each micro-batch is one row, on which the loss raises."""
    report = ja.check_equivalence(neighbours_reshaped, SLOPE, POINTS, num_microbatches=8)
    assert [finding.kind for finding in report.findings] == ["torn_apart"]
    assert "strided" in report.findings[0].message
    paired = {name: x.reshape(4, 2, *x.shape[1:]) for name, x in POINTS.items()}

    def one_row_a_pair(w, batch):
        return ja.mean(jax.nn.softplus(jnp.subtract(*jnp.moveaxis(batch["x"] @ w, 1, 0))))

    assert ja.check_equivalence(one_row_a_pair, SLOPE, paired, num_microbatches=4).ok


class TestSecondBatchArgument:
    """CASE 61: `loss(w, x, y)`."""

    x, y = POINTS["x"][:, 0], POINTS["y"]

    @staticmethod
    def broadcasts(w, x, y):
        return ja.mean((w * x[:, None] - y[None]) ** 2)

    @staticmethod
    def raises(w, x, y):
        return ja.mean((w * x - y) ** 2)

    def check(self, loss_fn, **options):
        return ja.check_equivalence(
            loss_fn, jnp.float32(2), self.x, args=(self.y,), num_microbatches=4, **options
        )

    def test_it_is_named_where_it_is_passed_whole(self):
        report = self.check(self.raises, batch_argnums=1)
        assert [finding.kind for finding in report.findings] == ["uncut_argument"]
        assert "`batch_argnums=(1, 2)`" in report.findings[0].remedy
        assert self.check(self.raises, batch_argnums=(1, 2)).ok
        with pytest.raises(ValueError, match=r"`batch_argnums=\(1, 2\)` to cut it"):
            self.check(self.raises)

    def test_other_faults_stand_beside_it(self):
        report = self.check(lambda w, x, y: jnp.mean((w * x - y) ** 2), batch_argnums=1)
        assert [finding.kind for finding in report.findings] == ["uncut_argument", "mean_inside"]

    def test_where_it_does_not_matter_it_is_whole(self):
        assert self.check(self.broadcasts, batch_argnums=1).ok


def test_keys_that_were_replaced_are_told():
    report = check(keyed_dropout)
    assert report.ok
    (note,) = report.notes
    assert "`key`" in note
    assert f"note: {note}" in str(report)
    assert check(good).notes == ()


def test_windows_that_were_left_out_are_told():
    def pairs_or_more(w, x):  # the deviation of the mean's own window is not asked for
        if len(x) < 2:
            raise ValueError("needs two rows")
        return ja.mean(w * x)

    report = ja.check_equivalence(pairs_or_more, 1.0, jnp.arange(6.0), num_microbatches=3)
    assert report.ok
    assert "the window of single rows raises" in " ".join(report.notes)


def test_what_the_library_refuses():
    report = check(wrong_rows_in_aux, has_aux=True)
    assert [finding.kind for finding in report.findings] == ["refused"]
    assert "`ja.Concat`" in report.findings[0].message


# Correct loss functions.


def terms(params, batch):
    return {
        "tokens": good(params, batch),
        "rows": ja.mean(jnp.where(kept(batch), per_token(params, batch), 0).sum(1)),
        "penalty": ja.Mean(0.1 * jnp.sum(params["out"] ** 2), 1.0),
    }


def with_aux(params, batch):
    return good(params, batch), {"rows": ja.Sum(batch["tokens"].shape[0])}


def weighted(params, batch):
    weights = 1.0 / (1 + batch["row"][:, None])
    return ja.mean(per_token(params, batch), kept(batch), weights=weights)


def per_sequence(params, batch):
    """Each sequence's own mean, then the mean over sequences, those without a target too."""
    count = kept(batch).sum(1)
    sums = jnp.where(kept(batch), per_token(params, batch), 0).sum(1)
    return ja.mean(sums / jnp.maximum(count, 1))


def keyed_dropout(params, batch, key):
    h = hidden(params, batch)
    mask = jax.random.bernoulli(key, 0.5, h.shape)
    return ja.mean(per_token(params, batch, h * mask / 0.5), where=kept(batch))


def example_dropout(params, batch):
    h = hidden(params, batch)
    mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, h.shape[1:]))(batch["key"])
    return ja.mean(per_token(params, batch, h * mask / 0.5), where=kept(batch))


def fixed_projection(params, batch):
    """Random, but part of the model and the same for each example."""
    projection = jax.random.normal(jax.random.key(3), (WIDTH, WIDTH))
    return ja.mean(per_token(params, batch, hidden(params, batch) @ projection), kept(batch))


def loops(params, batch):
    def layer(h, _):
        return jnp.tanh(h @ params["out"] @ params["embed"]), None

    return ja.mean(per_token(params, batch, lax.scan(layer, hidden(params, batch), length=3)[0]))


def share_of_a_constant(params, batch):
    return ja.Mean(bare_sum(params, batch), 100 * batch["tokens"].shape[0] / ROWS)


def zero_gradient(params, batch):
    """A parameter to which the loss is indifferent but for rounding."""
    shift = params["out"].sum()
    logits = hidden(params, batch) @ params["out"] + shift
    labels = batch["tokens"][:, 1:]
    return ja.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels), kept(batch))


def one_token_rows(params, batch):
    """No causal shift: every token is its own target."""
    logits = params["embed"][batch["tokens"]] @ params["out"]
    values = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    return ja.mean(values, where=batch["tokens"] > 0)


GOOD = [terms, keyed_dropout, example_dropout, per_sequence, one_token_rows]
MORE = [good, weighted, fixed_projection, loops, share_of_a_constant, zero_gradient]
GOOD += [pytest.param(loss_fn, marks=pytest.mark.slow) for loss_fn in MORE]


@pytest.mark.parametrize("loss_fn", GOOD, ids=lambda f: f.__name__)
def test_no_false_alarm(loss_fn):
    report = check(loss_fn)
    assert report.ok, str(report)
    assert report.findings == ()
    assert report.max_error <= report.tolerance < 1e-4
    assert len(report.errors) == 6
    assert str(report).startswith("ok")


def test_aux_args_and_integer_parameters():
    def loss_fn(params, batch, scale, *, key=None):
        assert key is not None
        loss, aux = with_aux(params["model"], batch)
        return scale * loss, aux

    params, batch = problem()
    params = {"model": params, "step": jnp.int32(3)}
    report = ja.check_equivalence(
        loss_fn, params, batch, num_microbatches=4, args=(2.0,), has_aux=True
    )
    assert report.ok, str(report)


def test_bfloat16_parameters():
    params, batch = problem(jnp.bfloat16)
    report = ja.check_equivalence(good, params, batch, num_microbatches=3)
    assert report.ok, str(report)
    assert 1e-2 < report.tolerance < 0.1
    assert not ja.check_equivalence(mean_with_its_count, params, batch, num_microbatches=3).ok


def test_a_collective_inside_the_model_is_none_of_the_loss():
    def loss_fn(params, batch):
        shared = lax.pmean(params["embed"].mean(), "data")
        h = hidden(params, batch) + lax.stop_gradient(shared)
        return ja.mean(per_token(params, batch, h), where=kept(batch))

    assert check(loss_fn, axis_name="data").ok


def test_the_parameter_that_deviates_most_is_named():
    def loss_fn(params, batch):
        wrong = jnp.mean(params["out"].sum() * batch["row"] ** 2)  # beside a correct term
        return {"good": good(params, batch), "wrong": ja.Mean(wrong, 1.0)}

    report = check(loss_fn)
    assert [f.kind for f in report.findings] == ["mean_inside"]
    assert "['wrong']" in report.findings[0].message
    assert report.worst == "params['out']"
    assert "params['out']" in str(report)


def test_the_deviation_is_the_true_one():
    def loss_fn(w, x):
        return ja.Mean(jnp.mean(w * x), 1.0)

    x = jnp.array([1.0, 2.0, 4.0, 9.0])
    report = ja.check_equivalence(loss_fn, jnp.float32(1), x, num_microbatches=2)
    # One row, one row and two: (1 + 2 + 6.5) / 3 instead of 4.
    assert report.errors["uneven window"] == pytest.approx((4 - 9.5 / 3) / 4)
    assert report.errors["window of 2 micro-batches"] == 0
    assert report.max_error >= report.errors["uneven window"]


def test_what_cannot_be_checked():
    params, batch = problem()
    with pytest.raises(TypeError, match="`loss_fn`"):
        ja.check_equivalence(3, params, batch, num_microbatches=2)
    with pytest.raises(ValueError, match="6 rows"):
        ja.check_equivalence(good, params, batch, num_microbatches=7)
    with pytest.raises(ValueError, match="1 rows"):
        ja.check_equivalence(good, params, jnp.ones((1, 2)), num_microbatches=1)
    report = ja.check_equivalence(lambda p, b: b["absent"], params, batch, num_microbatches=2)
    assert [f.kind for f in report.findings] == ["raises"]
    assert np.isnan(report.max_error)
    report = ja.check_equivalence(lambda p, b: "text", params, batch, num_microbatches=2)
    assert not report.ok


def test_a_mean_inside_is_seen_in_one_micro_batch_too():
    batch = jnp.array([1.0, 2.0, 4.0, 9.0])
    for rows in (3, 4):
        report = ja.check_equivalence(
            lambda w, x: ja.Mean(jnp.mean(w * x), 1.0), 1.0, batch[:rows], num_microbatches=1
        )
        assert [f.kind for f in report.findings] == ["mean_inside"]
    with pytest.raises(ValueError, match="at least three"):  # which have no uneven window
        ja.check_equivalence(lambda w, x: ja.mean(w * x), 1.0, batch[:2], num_microbatches=2)


def rolled_labels(params, batch):
    """Labels as long as the tokens, of which the last has no target."""
    labels = jnp.roll(batch["tokens"], -1, 1).at[:, -1].set(0)
    logits = params["embed"][batch["tokens"]] @ params["out"]
    values = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return ja.Mean(jnp.sum(values * (labels > 0)), jnp.sum(batch["tokens"] > 0))


def test_labels_counted_in_the_shape_of_the_targets():
    assert [f.kind for f in check(rolled_labels).findings] == ["shifted_denominator"]


def test_contrast_inside_of_a_row_is_no_causal_shift():
    views = np.random.default_rng(0).normal(size=(6, 3, 4)).astype(np.float32)

    def loss_fn(w, views):
        x = views @ w
        return ja.mean(-jnp.einsum("rii->ri", jax.nn.log_softmax(x @ x.mT)))

    report = ja.check_equivalence(loss_fn, jnp.eye(4, 2), views, num_microbatches=2)
    assert report.ok, str(report)


def test_a_batch_without_a_target_says_so():
    params, batch = problem()
    empty = batch | {"tokens": jnp.zeros_like(batch["tokens"])}
    report = ja.check_equivalence(good, params, empty, num_microbatches=2)
    assert [f.kind for f in report.findings] == ["nothing_counted"]


def test_only_the_term_that_is_bare_is_called_so():
    def loss_fn(w, x):
        return {"good": ja.mean(w * x), "bare": jnp.sum(w * x)}

    x = jnp.array([1.0, 2.0, 4.0, 9.0])
    report = ja.check_equivalence(loss_fn, 1.0, x, num_microbatches=2)
    assert ["['bare']" in f.message for f in report.findings] == [True]


@pytest.mark.parametrize("rtol", [-1, float("nan"), "a", True])
def test_rtol_is_checked(rtol):
    with pytest.raises((TypeError, ValueError), match="`rtol` must be"):
        ja.check_equivalence(lambda w, x: ja.mean(w * x), 1.0, jnp.ones(4), num_microbatches=2,
                             rtol=rtol)  # fmt: skip


def test_has_aux_without_a_pair():
    report = ja.check_equivalence(
        lambda w, x: ja.mean(w * x), 1.0, jnp.ones(4), num_microbatches=2, has_aux=True
    )
    assert "returns no (loss, aux)" in report.findings[0].message


def test_nothing_is_printed(capsys):
    check(good)
    check(bare_mean)
    assert capsys.readouterr() == ("", "")
