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
        "key": ja.example_keys(jax.random.key(1), ROWS),
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
PLANTED = [
    pytest.param(kind, loss_fn, id=f"{kind}-{loss_fn.__name__}", marks=[pytest.mark.slow] * (i > 0))
    for kind, losses in FAULTS.items()
    for i, loss_fn in enumerate(losses)
]


@pytest.mark.parametrize(("kind", "loss_fn"), PLANTED)
def test_each_fault_is_named(kind, loss_fn):
    report = check(loss_fn() if inspect.isclass(loss_fn) else loss_fn)
    assert not report.ok
    assert [finding.kind for finding in report.findings] == [kind]
    text = str(report)
    assert text.startswith("not ok")
    assert report.findings[0].message in text
    assert report.findings[0].remedy in text


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
