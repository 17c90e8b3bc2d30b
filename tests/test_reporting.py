"""Records for loggers, progress bars and eyes; nothing of it runs inside of the step."""

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


def test_nothing_heavy_is_imported():
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
        ({"loss": 9999.0, "grad_norm": 1_234_567}, "loss 9999, grad_norm 1.235M"),
        ({"updated": False, "loss": 1.0}, "loss 1, updated no"),
        ({"updated": False, "micro_step": 3}, "micro_step 3"),
        ({"noise_scale": {"value": -12345.6}}, "noise -12.35k"),
        ({}, ""),
    ],
)
def test_summary(record, expected):
    assert ja.reporting.summary(record) == expected


# Pictures


def test_picture_of_many_windows(tmp_path):
    pytest.importorskip("matplotlib")
    records = [step_info(noise_scale=True)] * 2
    figure = ja.reporting.plot(records)
    names = [ax.get_ylabel() for ax in figure.axes]
    assert names == ["loss", "grad_norm", "weight", "noise_scale/value"]
    drawn = {ax.get_ylabel(): ax.lines[0].get_ydata().tolist() for ax in figure.axes}
    assert drawn["weight"] == [5.0, 5.0]
    assert drawn["noise_scale/value"] == [float(records[0].noise_scale.value)] * 2
    assert figure.axes[0].lines[0].get_xdata().tolist() == [1, 1]
    figure.savefig(tmp_path / "windows.png")
    assert (tmp_path / "windows.png").read_bytes()[:4] == b"\x89PNG"


def test_what_is_drawn():
    pytest.importorskip("matplotlib")
    bare = [{"loss": 1.0, "num_skipped": n, "padding": n / 8} for n in (0, 3)]
    bare[0]["lr"] = 0.1  # unknown later
    figure = ja.reporting.plot(bare)
    assert [ax.get_ylabel() for ax in figure.axes] == ["loss", "num_skipped"]
    assert figure.axes[1].lines[0].get_ydata().tolist() == [0, 3]
    figure = ja.reporting.plot(bare, names=["padding", "lr"])
    ys = [ax.lines[0].get_ydata() for ax in figure.axes]
    np.testing.assert_array_equal(ys, [[0, 3 / 8], [0.1, np.nan]])
    for records, names in (([], None), (bare, ["loss", "absent"]), ([{}], None)):
        with pytest.raises(ValueError, match="plot: `records` hold no"):
            ja.reporting.plot(records, names=names)


def test_picture_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        ja.reporting.plot([{"loss": 1.0}])
