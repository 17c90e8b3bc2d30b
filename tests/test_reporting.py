"""Records for loggers, progress bars and eyes; nothing of it runs inside of the step."""

import csv
import inspect
import io
import json
import logging
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxaccum as ja


def loss_fn(w, batch):
    x, where = batch
    loss = ja.mean((w - x) ** 2, where=where)
    return loss, {"weights": loss.weight, "largest": ja.Max(x.max()), "mean": ja.mean(x)}


BATCH = (jnp.arange(8.0).reshape(4, 2), jnp.array([[1, 1], [1, 0], [0, 0], [1, 1]], bool))


def step_info(steps=1, **options):
    init, step = ja.train_step(loss_fn, optax.sgd(0.1), num_microbatches=2, has_aux=True, **options)
    w = jnp.float32(1)
    state = init(w)
    for _ in range(steps):
        w, state, info = step(w, state, BATCH)
    return info


# Scalars


def test_scalars_of_a_step():
    info = step_info(steps=3)
    found = ja.reporting.scalars(info)
    assert {type(v) for v in found.values()} <= {int, float}
    for name in ("loss", "weight", "grad_norm", "num_microbatches", "num_skipped", "updated",
                 "optimizer_step", "tokens_seen"):  # fmt: skip
        assert found[name] == np.asarray(getattr(info, name)).item(), name
    assert (found["optimizer_step"], found["tokens_seen"], found["updated"]) == (3, 15.0, 1)
    assert (found["aux/largest"], found["aux/mean"]) == (7.0, 3.5)
    assert "aux/weights" not in found  # more than one number
    assert not [name for name in found if "carry" in name]


def test_scalars_are_in_the_order_of_the_fields():
    found = list(ja.reporting.scalars({"z": 1, "info": step_info(), "a": jnp.int32(2)}))
    assert (found[0], found[-1]) == ("z", "a")
    assert found[1:4] == ["info/loss", "info/weight", "info/grad_norm"]


def test_every_scalar_field_is_there():
    """Also fields that records gain later."""
    info = step_info()
    expected = {
        name
        for name, value in info._asdict().items()
        if isinstance(value, jax.Array) and value.shape == ()
    }
    assert expected <= set(ja.reporting.scalars(info))


def test_scalars_of_a_window_and_a_stream():
    window = ja.finalize(ja.accumulate(loss_fn, num_microbatches=2, has_aux=True)(1.0, BATCH))
    found = ja.reporting.scalars(window, prefix="a/")
    assert found["a/loss"] == float(window.loss)
    assert set(found) == {
        "a/loss", "a/weight", "a/num_microbatches", "a/num_skipped", "a/aux/largest", "a/aux/mean",
    }  # fmt: skip
    tx = ja.multi_steps(optax.adam(0.1), 4, skip_nonfinite=True)
    state = tx.init(jnp.ones(3))
    for grad in (jnp.ones(3), jnp.full(3, jnp.nan), jnp.ones(3)):
        _, state = tx.update(grad, state, jnp.ones(3), weight=2**24 + 1)
    found = ja.reporting.scalars(state)
    assert found["weight"] == 2 * (2**24 + 1)
    assert (found["micro_step"], found["num_skipped"], found["updated"]) == (2, 1, 0)
    assert not [name for name in found if "inner_state" in name or "grad" in name]


def test_scalars_of_other_things():
    record = {
        "a": ja.Mean(jnp.float32(6), jnp.float32(4)),
        "b": [np.int8(3), jnp.bfloat16(0.5), None, "text", jnp.ones(2), jax.random.key(0)],
        "c": {"d": True, "e": jnp.bool_(False), 5: 1e-3},
        "f": 3 + 4j,
    }
    assert ja.reporting.scalars(record) == {
        "a": 1.5, "b/0": 3, "b/1": 0.5, "c/d": 1, "c/e": 0, "c/5": 1e-3,
    }  # fmt: skip
    assert ja.reporting.scalars(jnp.float32(2)) == {"value": 2.0}
    assert ja.reporting.scalars({}) == {}
    terms = {"loss": 1.0, "weight": {"tokens": 3, "rows": 2}}
    assert ja.reporting.scalars(terms)["weight/rows"] == 2


def test_scalars_of_a_noise_scale():
    batch = (jnp.arange(8.0).reshape(4, 2), jnp.ones((4, 2), bool))
    sums = ja.accumulate(loss_fn, num_microbatches=2, has_aux=True, noise_scale=True)(1.0, batch)
    noise = ja.noise_scale(sums)
    assert ja.reporting.scalars({"noise": noise}) == {
        f"noise/{name}": float(value) for name, value in noise._asdict().items()
    }


def test_one_transfer(monkeypatch):
    calls = []
    get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: calls.append(1) or get(tree))
    ja.reporting.scalars(step_info())
    assert calls == [1]


def test_traced_records_are_refused_and_steps_hold_no_transfer():
    with pytest.raises(TypeError, match="inside of `jit`"):
        jax.jit(lambda x: ja.reporting.scalars({"loss": x})["loss"])(1.0)
    init, step = ja.train_step(loss_fn, optax.sgd(0.1), num_microbatches=2, has_aux=True)
    hlo = step.lower(jnp.float32(1), init(jnp.float32(1)), BATCH).as_text()
    assert "callback" not in hlo
    assert "outfeed" not in hlo


# Loggers


class Clu:
    def __init__(self):
        self.calls = []

    def write_scalars(self, step, scalars):
        self.calls.append((step, dict(scalars)))


class TensorBoard:
    def __init__(self):
        self.calls, self.all = [], {}

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.all.setdefault(global_step, {})[tag] = scalar_value
        self.calls = list(self.all.items())


class Mlflow:
    def __init__(self):
        self.calls = []

    def log_metrics(self, metrics, step=None):
        self.calls.append((step, dict(metrics)))


class Wandb:
    def __init__(self):
        self.calls = []

    def log(self, data, step=None, commit=None):
        self.calls.append((step, dict(data)))


class Function:
    def __init__(self):
        self.calls = []

    def __call__(self, step, numbers):
        self.calls.append((step, numbers))


@pytest.mark.parametrize("kind", [Clu, TensorBoard, Mlflow, Wandb, Function])
def test_loggers(kind):
    writer, info = kind(), step_info(steps=2)
    expected = ja.reporting.scalars(info, prefix="train/")
    assert ja.reporting.log(writer, info, prefix="train/") == expected
    assert writer.calls == [(2, expected)]
    ja.reporting.log(writer, info, step=9, prefix="train/")
    assert writer.calls[-1] == (9, expected)
    assert type(writer.calls[0][0]) is int


def test_progress_bar_and_logging():
    class Bar:
        def set_postfix(self, ordered_dict=None, refresh=True, **kwargs):
            self.shown = dict(ordered_dict)

    bar, info = Bar(), step_info()
    ja.reporting.log(bar, info)
    assert bar.shown["step"] == "1"
    assert bar.shown["tokens"] == "5"
    assert all(isinstance(text, str) and len(text) < 12 for text in bar.shown.values())
    stream = io.StringIO()
    logger = logging.getLogger("reporting")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    ja.reporting.log(logger, info)
    logger.removeHandler(handler)
    assert stream.getvalue().strip() == ja.reporting.summary(info)


def test_tqdm():
    tqdm = pytest.importorskip("tqdm")
    stream = io.StringIO()
    with tqdm.tqdm(total=2, file=stream, ascii=True) as bar:
        ja.reporting.log(bar, step_info())
        bar.update()
    assert "loss=" in stream.getvalue()


def test_step_is_found_or_asked_for():
    writer = Function()
    ja.reporting.log(writer, {"train": step_info(steps=2), "learning_rate": 0.1})
    assert writer.calls[0][0] == 2
    assert writer.calls[0][1]["learning_rate"] == 0.1
    with pytest.raises(ValueError, match="`step` is needed"):
        ja.reporting.log(writer, {"loss": 1.0})
    with pytest.raises(TypeError, match="`writer` must have one of the methods"):
        ja.reporting.log(3, {"loss": 1.0}, step=1)


def test_csv(tmp_path):
    path = tmp_path / "run.csv"
    with ja.reporting.CsvWriter(path) as writer:
        for steps in (1, 2):
            ja.reporting.log(writer, step_info(steps=steps))
    with ja.reporting.CsvWriter(path) as writer:  # continues
        ja.reporting.log(writer, {"loss": math.nan}, step=3)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert float(rows[1]["loss"]) == float(step_info(steps=2).loss)
    assert (rows[2]["loss"], rows[2]["weight"]) == ("nan", "")


def test_csv_columns_stay(tmp_path):
    path = tmp_path / "run.csv"
    with ja.reporting.CsvWriter(path, names=["loss", "noise"]) as writer:
        writer.write_scalars(1, {"loss": 1.0})
        with pytest.raises(ValueError, match=r"has weight, for which run\.csv has no column"):
            writer.write_scalars(2, {"weight": 1.0})
    assert path.read_text() == "step,loss,noise\n1,1.0,\n"
    with pytest.raises(ValueError, match="has the columns step, loss, noise"):
        ja.reporting.CsvWriter(path, names=["loss"])
    (tmp_path / "other.csv").write_text("name,age\n")
    with pytest.raises(ValueError, match="has the columns name, age"):
        ja.reporting.CsvWriter(tmp_path / "other.csv")


def test_no_logger_is_imported():
    source = "".join(
        inspect.getsource(module)
        for name, module in sys.modules.items()
        if name.startswith("jaxaccum.reporting")
    )
    for name in ("tensorboard", "wandb", "clu", "mlflow", "tqdm", "torch"):
        assert f"import {name}" not in source
    code = "import sys, jaxaccum.reporting; print('matplotlib' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


# Summaries


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"loss": 0.123456}, "loss 0.1235"),
        ({"loss": math.nan, "grad_norm": math.inf}, "loss nan, grad_norm inf"),
        ({"optimizer_step": 0, "loss": 0.0}, "step 0, loss 0"),
        ({"tokens_seen": 123_456_789_012}, "tokens 123.5G"),
        ({"num_skipped": 0, "num_empty": 2}, "empty 2"),
        ({"updated": False, "loss": 1.0}, "loss 1, updated no"),
        ({"updated": False, "micro_step": 3}, "micro_step 3"),
        ({"noise_scale": {"value": -12345.6}}, "noise -12.35k"),
        ({}, ""),
    ],
)
def test_summary(record, expected):
    assert ja.reporting.summary(record) == expected


# Reports of windows


def report(**options):
    info = step_info()
    return ja.reporting.window_report(info, microbatch_weights=info.aux["weights"], **options)


def test_window_report():
    made = report(capacity=8, noise_scale=40.0)
    assert (made.weight, made.num_microbatches, made.num_skipped) == (5.0, 2, 0)
    # The cut is strided: rows 0 and 2, rows 1 and 3.
    assert made.microbatch_weights == (2.0, 3.0)
    assert (made.optimizer_step, made.updated, made.padding) == (1, True, 3 / 8)
    x, where = (np.asarray(a) for a in BATCH)
    grad = 2 * (1 - x)[where].sum() / where.sum()
    assert made.grad_norm == pytest.approx(abs(grad), rel=1e-6)
    text = str(made)
    assert "padding 37.5% of 8" in text
    assert "noise scale 40, 8 of this window" in text
    bars = [line.count("#") for line in text.splitlines() if "#" in line]
    assert bars == [round(32 * 2 / 3), 32]
    assert json.loads(json.dumps(made.as_dict()))["padding"] == 3 / 8


def test_window_report_of_a_window_and_of_several_terms():
    def terms(w, x):
        return {"fit": ja.mean(w * x), "penalty": ja.Mean(w * w, 1.0)}

    sums = ja.accumulate(terms, num_microbatches=3)(jnp.float32(2), jnp.arange(6.0))
    made = ja.reporting.window_report(ja.finalize(sums))
    assert (made.weight, made.num_microbatches) == (6.0, 3)
    assert made.grad_norm == pytest.approx(2.5 + 2 * 2)
    assert (made.optimizer_step, made.updated, made.noise_scale, made.padding) == (None,) * 4


def test_window_report_of_what_was_skipped_or_empty():
    init, step = ja.train_step(
        lambda w, x: ja.mean(w * x), optax.sgd(0.1), num_microbatches=4, skip_nonfinite=True
    )
    x = jnp.array([1.0, jnp.nan, 3.0, 4.0])
    info = step(jnp.float32(1), init(jnp.float32(1)), x)[2]
    made = ja.reporting.window_report(info)
    assert (made.num_skipped, made.weight) == (1, 3.0)
    assert made.num_microbatches == int(info.num_microbatches)
    assert "1 skipped" in str(made)
    empty = ja.reporting.window_report(
        {"loss": math.nan, "weight": 0, "num_microbatches": 1, "updated": False},
        microbatch_weights=[0], capacity=4, noise_scale=1.0,
    )  # fmt: skip
    assert "no optimizer step was applied" in str(empty)
    assert empty.padding == 1.0


def test_window_report_takes_the_records_noise_scale():
    info = step_info(noise_scale=True)
    made = ja.reporting.window_report(info)
    assert made.noise_scale == float(info.noise_scale.value)
    assert ja.reporting.window_report(info, noise_scale=info.noise_scale) == made


@pytest.mark.parametrize(
    ("info", "options", "message"),
    [
        ({"loss": 1.0}, {}, "must have a `loss` and a `weight`"),
        ({"loss": 1.0, "weight": 1}, {"microbatch_weights": [[1]]}, "one axis"),
        ({"loss": 1.0, "weight": 1}, {"capacity": 0}, "`capacity` must be at least 1"),
        ({"loss": 1.0, "weight": 9}, {"capacity": 8}, "at least the window's weight, 9"),
    ],
)
def test_window_report_refuses(info, options, message):
    with pytest.raises(ValueError, match=message):
        ja.reporting.window_report(info, **options)


def test_a_window_with_a_weight_that_is_not_finite_prints():
    bad = {"loss": np.nan, "weight": np.nan}
    report = ja.reporting.window_report(bad, microbatch_weights=[np.nan, 3, np.inf], capacity=8)
    assert "nan" in str(report)


def test_picture_of_many_windows(tmp_path):
    pytest.importorskip("matplotlib")
    reports = [report(capacity=8, noise_scale=float(n)) for n in range(5)]
    figure = ja.reporting.plot(reports)
    names = [ax.get_ylabel() for ax in figure.axes]
    assert names == [
        "loss", "gradient norm", "weight of a micro-batch", "noise scale", "padding share",
    ]  # fmt: skip
    drawn = {ax.get_ylabel(): ax.lines[0].get_ydata().tolist() for ax in figure.axes}
    assert drawn["noise scale"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert drawn["weight of a micro-batch"] == [2.5] * 5
    assert drawn["padding share"] == [3 / 8] * 5
    figure.savefig(tmp_path / "windows.png")
    assert (tmp_path / "windows.png").read_bytes()[:4] == b"\x89PNG"
    bare = ja.reporting.window_report({"loss": 1.0, "weight": 2, "num_skipped": 3})
    assert [ax.get_ylabel() for ax in ja.reporting.plot([bare]).axes] == ["loss", "skipped"]


def test_picture_of_one_window(tmp_path):
    pytest.importorskip("matplotlib")
    figure = ja.reporting.plot(report(capacity=8))
    assert [bar.get_height() for bar in figure.axes[0].patches] == [2.0, 3.0]
    figure.savefig(tmp_path / "window.png")
    with pytest.raises(ValueError, match="`reports` is empty"):
        ja.reporting.plot([])


def test_picture_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        ja.reporting.plot(report())
