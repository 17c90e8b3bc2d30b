"""Assertions for a user's own tests: a window is its full batch, a step keeps its types.

Import it by name, `import jaxaccum.testing`; the root does not. `assert_stable_step` needs chex.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccum.core import checks
from jaxaccum.diagnostics.equivalence import check_equivalence
from jaxaccum.window.windows import value_and_grad

__all__ = ["assert_same_window", "assert_stable_step"]


def assert_same_window(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *args: Any,
    cuts: Iterable[int | Mapping[str, int]] = (2, 3, {"microbatch_size": 1}),
    rtol: float | None = None,
    atol: float = 0.0,
    **window_options: Any,
) -> None:
    """Asserts that a loss and its gradient are the full batch's for every cut of the batch.

    `value_and_grad(loss_fn, **cut)(params, batch, *args)` against the same in one micro-batch:
    structure, shapes and dtypes are equal, and no entry differs by more than `atol + rtol *
    largest`, where `largest` is the largest entry of the loss and of all gradients. Unlike
    `ja.check_equivalence`, whose report it shows where a window differs, it raises, and checks the
    cuts that are asked for.

    Args:
      loss_fn: as in `ja.accumulate`; without a key, since each micro-batch has one of its own.
      params: the parameters.
      batch: a small batch.
      *args: what else `loss_fn` takes.
      cuts: numbers of micro-batches, or mappings with `num_microbatches` or `microbatch_size`.
      rtol: the deviation allowed, relative to the largest entry; by default 256 times the epsilon
        of float32, or 8 times that of the narrowest floating dtype among parameters and rows.
      atol: the deviation allowed, absolute.
      **window_options: the other keywords of `ja.value_and_grad`: `batch_argnums`, `argnums`,
        `has_aux` (the outputs are not compared), `accumulator` and so on.

    Returns:
      None.

    Raises:
      AssertionError: a window differs; the message names the cut, the leaf and the deviation, and
        what `ja.check_equivalence` found.
      TypeError: `cuts` holds something else, or as `ja.value_and_grad`.
      ValueError: `cuts` is empty, or as `ja.value_and_grad`.

    Example:
      >>> import jax.numpy as jnp, jaxaccum as ja, jaxaccum.testing
      >>> rows = jnp.arange(6.0)
      >>> ja.testing.assert_same_window(
      ...     lambda w, x: ja.mean((w - x) ** 2), jnp.float32(1), rows, cuts=(2, 4))
      >>> try:  # a mean inside, given back as a sum
      ...     ja.testing.assert_same_window(
      ...         lambda w, x: ja.Mean(jnp.mean(w * x), 1), jnp.float32(1), rows, cuts=(4,))
      ... except AssertionError as error:
      ...     print(str(error).splitlines()[0])
      assert_same_window: num_microbatches=4: the loss is 3.0, the full batch's is 2.5.
    """
    function = "testing.assert_same_window"
    chosen = [_cut(function, cut) for cut in cuts]
    if not chosen:
        raise ValueError(f"{function}: `cuts` must hold at least one cut, got {cuts!r}.")
    rtol = _tolerance((params, batch)) if rtol is None else rtol

    def window(cut: Mapping[str, int]) -> tuple[Any, Any]:
        options: dict[str, Any] = {**cut, **window_options}
        out, grads = value_and_grad(loss_fn, **options)(params, batch, *args)
        return (out[0] if window_options.get("has_aux") else out), grads

    whole = window({"num_microbatches": 1})
    largest = max((_largest(leaf) for leaf in jax.tree.leaves(whole)), default=0.0)
    for cut in chosen:
        for deviation in _deviations(window(cut), whole, atol + rtol * largest):
            name = ", ".join(f"{key}={value}" for key, value in cut.items())
            found = _causes(loss_fn, (params, batch, *args), window_options)
            raise AssertionError(f"assert_same_window: {name}: {deviation}{found}")


def assert_stable_step(
    step_fn: Callable[..., Any], params: Any, state: Any, batches: Iterable[Any]
) -> tuple[Any, Any]:
    """Asserts that a training step keeps the types of what it carries, and is traced once.

    A step whose parameters or state change a shape, a dtype or the structure is compiled again at
    its second call, and can't be the body of a scan. Both are found by chex:
    `chex.assert_trees_all_equal_shapes_and_dtypes` and `chex.assert_max_traces(step_fn, n=1)`.

    Args:
      step_fn: `step_fn(params, state, batch)`, which returns `(params, state, ...)`, such as the
        `step` of a `ja.train_step(..., donate=False)`.
      params: the parameters.
      state: the state.
      batches: two or more batches of the same types.

    Returns:
      The last parameters and state.

    Raises:
      AssertionError: a type changed, or the step was traced more than once.
      ModuleNotFoundError: chex is not installed.

    Example:
      >>> import jax.numpy as jnp, jaxaccum as ja, jaxaccum.testing, optax
      >>> init, step = ja.train_step(
      ...     lambda w, x: ja.mean((w - x) ** 2), optax.sgd(0.5), num_microbatches=2, donate=False)
      >>> w = jnp.float32(0)
      >>> w, state = ja.testing.assert_stable_step(step, w, init(w), [jnp.ones(4), jnp.zeros(4)])
      >>> print(w)
      0.0
    """
    try:
        chex = importlib.import_module("chex")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "testing.assert_stable_step: chex is not installed; `pip install chex`."
        ) from error
    traced_fn = jax.jit(chex.assert_max_traces(lambda *args: step_fn(*args), n=1))
    for batch in batches:
        after = traced_fn(params, state, batch)[:2]
        chex.assert_trees_all_equal_shapes_and_dtypes(after, (params, state))
        params, state = after
    return params, state


def _cut(function: str, cut: Any) -> Mapping[str, int]:
    if isinstance(cut, Mapping):
        return cut
    return {"num_microbatches": checks.integer(function, "cuts", cut)}


def _tolerance(tree: Any) -> float:
    floats = [x.dtype for x in map(jnp.asarray, jax.tree.leaves(tree)) if _inexact(x)]
    narrow = max((float(jnp.finfo(dtype).eps) for dtype in floats), default=0.0)
    return max(256 * float(jnp.finfo(jnp.float32).eps), 8 * narrow)


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _largest(leaf: Any) -> float:
    return float(jnp.max(jnp.abs(leaf), initial=0.0)) if _inexact(leaf) else 0.0


def _deviations(got: tuple[Any, Any], want: tuple[Any, Any], allowed: float) -> Iterable[str]:
    """What differs, one sentence for each leaf."""
    types = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (got, want)]
    if types[0] != types[1]:
        yield f"the result's types are {types[0]}, the full batch's are {types[1]}."
        return
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want))
    for (path, leaf), right in pairs:
        if not _inexact(leaf):
            continue
        a, b = np.asarray(leaf), np.asarray(right)
        same = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= allowed)
        if same.all():
            continue
        where = "the loss" if path[0].idx == 0 else f"the gradient {jax.tree_util.keystr(path[1:])}"
        worst = tuple(np.argwhere(~same)[0])
        at = f" at {[int(i) for i in worst]}" if worst else ""
        yield f"{where} is {a[worst]}{at}, the full batch's is {b[worst]}."


def _causes(loss_fn: Any, every: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    """What `ja.check_equivalence` says, where the batch is large enough for it."""
    params, batch, *args = every
    known = {name: options[name] for name in ("batch_argnums", "has_aux") if name in options}
    try:
        report = check_equivalence(loss_fn, params, batch, num_microbatches=2, args=args, **known)
    except (TypeError, ValueError):  # too few rows for it, or arguments that it does not take
        return ""
    return f"\n{report}"
