"""The combinations of options that are refused: one table, with the reason and the remedy of each.

What shows where a function is made is checked there, once, by `check`. What only a call shows is
refused there, by `refused` and its name in the table. `docs/refusals.md` is this table.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

PLACES = ("param_specs", "grad_specs", "local_params")


class Refusal(NamedTuple):
    """One combination that has no meaning.

    Attributes:
      options: the combination, for the documentation.
      reason: what is wrong; `{name}` stands for the value of that name.
      remedy: what to do instead.
      holds: whether options of a factory are such; `None` where only a call shows it.
      kind: the type of the error.
    """

    options: str
    reason: str
    remedy: str
    holds: Callable[[Mapping[str, Any]], bool] | None = None
    kind: type[Exception] = ValueError


def _given(options: Mapping[str, Any], *names: str) -> list[str]:
    """Those of some options that say something."""
    values = {name: options.get(name) for name in names}
    return [name for name, x in values.items() if x is not None and x is not False]


def _shares_axis(options: Mapping[str, Any]) -> bool:
    names = [options.get(name) or () for name in ("axis_name", "spmd_axis_name")]
    every = [name for some in names for name in ([some] if isinstance(some, str) else some)]
    return options.get("window_axis_name") in every


TABLE = {
    "both cuts": Refusal(
        "`num_microbatches` with `microbatch_size`",
        "exactly one of `num_microbatches` and `microbatch_size` is needed, got "
        "{num_microbatches!r} and {microbatch_size!r}.",
        "Leave one of them out.",
        lambda o: len(_given(o, "num_microbatches", "microbatch_size")) == 2,
    ),
    "no cut": Refusal(
        "neither `num_microbatches` nor `microbatch_size`",
        "exactly one of `num_microbatches` and `microbatch_size` is needed, got none.",
        "Pass one of them.",
        lambda o: "num_microbatches" in o and not _given(o, "num_microbatches", "microbatch_size"),
    ),
    "two kinds of axes": Refusal(
        "`axis_name` with `spmd_axis_name`",
        "`axis_name`, got {axis_name!r}, is for code inside `shard_map` or `pmap`, "
        "`spmd_axis_name`, got {spmd_axis_name!r}, for plain `jit`.",
        "Of the two pass one of them.",
        lambda o: len(_given(o, "axis_name", "spmd_axis_name")) == 2,
    ),
    "places without axes": Refusal(
        "`param_specs`, `grad_specs` or `local_params` without `axis_name` and `spmd_axis_name`",
        "`{place}` says how parameters lie over the axes of the window, but there are none.",
        "Pass `spmd_axis_name` under plain `jit`, or `axis_name` inside `shard_map` or `pmap`.",
        lambda o: bool(_given(o, *PLACES)) and not _given(o, "axis_name", "spmd_axis_name"),
    ),
    "noise of parts": Refusal(
        "`noise_scale=True` with `axis_name` and `param_specs`, `grad_specs` or `local_params`",
        "`noise_scale=True` needs whole gradient sums, but `axis_name`, got {axis_name!r}, with "
        "`{place}` leaves each device a part.",
        "Use `spmd_axis_name` under plain `jit`, whose sums are global arrays.",
        lambda o: bool(_given(o, "noise_scale") and _given(o, "axis_name") and _given(o, *PLACES)),
    ),
    "a limit of nothing": Refusal(
        "`max_bad_windows` without `skip_nonfinite` and `loss_scale`",
        "`max_bad_windows` counts windows that are left out, but none is.",
        'Pass `skip_nonfinite="window"` or `skip_nonfinite=True` as well.',
        lambda o: (
            bool(_given(o, "max_bad_windows")) and not _given(o, "skip_nonfinite", "loss_scale")
        ),
    ),
    "a skip over the window's axis": Refusal(
        "`skip_nonfinite=True` in `ja.window_axis`",
        "over the window's axis a micro-batch that is not finite reaches all others through the "
        "collectives.",
        'Leave out the whole window, `skip_nonfinite="window"`.',
        lambda o: "window_axis_name" in o and o.get("skip_nonfinite") in (True,),
    ),
    "one name for two axes": Refusal(
        "`window_axis_name` that is among `axis_name` or `spmd_axis_name`",
        "`window_axis_name` and `axis_name` or `spmd_axis_name` both name the axis "
        "{window_axis_name!r}.",
        "Give the window's axis a name of its own.",
        _shares_axis,
    ),
    "noise of divided gradients": Refusal(
        "`noise_scale=True` with `denominators=` in the call",
        "`noise_scale=True` needs undivided gradients, but `denominators=` divides them in the "
        "fold.",
        "Leave it out: sums of one term merge without it.",
    ),
    "noise of several terms": Refusal(
        "`noise_scale=True` with a loss of several terms",
        "`noise_scale=True` needs a loss of one term, got {number}: the micro-batches of several "
        "terms have no common weight.",
        "Measure it with the main term alone, in a call of its own.",
    ),
    "a state without a policy": Refusal(
        "`model_state=` in the call without `model_state` in the factory",
        "a model state was given, but what a window does to it was not said.",
        "Pass `model_state=` to `{function}`: {choices}.",
        kind=TypeError,
    ),
    "a policy without a state": Refusal(
        "`model_state` in the factory without `model_state=` in the call",
        'made with `model_state="{policy}"`, it needs the state itself.',
        "Pass `model_state=state` to the call.",
        kind=TypeError,
    ),
    "rounding without a key": Refusal(
        "`accumulator=ja.accumulators.stochastic()` without `key=` in the call",
        "the accumulator rounds stochastically and needs `key=`, a PRNG key.",
        "Pass one to the call, for example `key=jax.random.key(step)`.",
    ),
    "scatter of unequal windows": Refusal(
        '`reduction="scatter"` or `whole_params=False` with `num_real=` that differs per device',
        '`num_real` differs per device, but with reduction="scatter" or `whole_params=False` the '
        "devices meet in every micro-step and would wait for each other.",
        "Use the defaults of both, or the same number everywhere.",
    ),
    "parts that differ": Refusal(
        "`param_specs` with other `grad_specs` for a parameter in parts",
        "`grad_specs` {grad_specs} differs from `param_specs` {param_specs} of a sharded "
        "parameter.",
        "Leave `grad_specs` out: gradients lie like such parameters.",
    ),
    "parts of its own": Refusal(
        "`param_specs` or `grad_specs` with `local_params` over the same axis",
        "`{called}` is split over {axes} by `param_specs` or `grad_specs`, and each device's own "
        "there by `local_params`.",
        "Name an axis in one of them.",
    ),
}


def check(function: str, options: Mapping[str, Any]) -> None:
    """Refuses the combinations in the table that show in the options of a factory.

    Args:
      function: the public function's name, for messages.
      options: what was given, by name; what was not may be missing, or `None`.
    """
    for name, refusal in TABLE.items():
        if refusal.holds is not None and refusal.holds(options):
            place = next(iter(_given(options, *PLACES)), "")
            raise refused(name, function, **{**options, "place": place})


def refused(name: str, function: str, **values: Any) -> Exception:
    """The error of a combination in the table.

    Args:
      name: which one.
      function: the public function's name.
      values: what its reason tells.
    """
    _, reason, remedy, _, kind = TABLE[name]
    text = f"{function}: {reason} {remedy}"
    return kind(text.format_map({**values, "function": function}))
