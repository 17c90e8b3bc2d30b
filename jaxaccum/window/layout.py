"""Where the parameters of a window, and the sums of their gradients, lie over its devices."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxaccum.core import compat
from jaxaccum.core.checks import is_inexact
from jaxaccum.devices import shards
from jaxaccum.window import refusals
from jaxaccum.window.gradients import Differentiated


class Layout(NamedTuple):
    """What is known of each parameter that has a gradient.

    Attributes:
      param_shards: the part of it that a device holds and the loss sees whole, or `None`.
      grad_shards: the part of its gradient's sum that a device is left with, or `None`.
      own: the axes over which each device has its own, so that no sum is taken there.
    """

    param_shards: list[shards.Shard | None]
    grad_shards: list[shards.Shard | None]
    own: list[tuple[str, ...]]


def find_layout(
    tree: Differentiated, axes: tuple[str, ...], whole: Sequence[Any], *, refuses: bool
) -> Layout:
    """The layout that a window's options give.

    Args:
      tree: the parameters.
      axes: the axes of the window.
      whole: those that have a gradient, as they are where no part is gathered.
      refuses: whether it has to be said of each that differs over the devices.

    Raises:
      ValueError: options contradict each other, a dimension does not divide by its devices, or a
        parameter is typed as different over an axis of which no option says why.
    """
    options = tree.options
    moves = [is_inexact(x) for x in tree.leaves]

    def moving(values: Sequence[Any]) -> list[Any]:
        return [value for value, moving in zip(values, moves, strict=True) if moving]

    by_grads = options.param_specs if options.grad_specs is None else options.grad_specs
    found = Layout(
        moving(tree.shards("param_specs", options.param_specs, axes)),
        moving(tree.shards("grad_specs", by_grads, axes)),
        moving([shards.axes_in(spec) for spec in tree.local_specs(axes)]),
    )
    if axes:
        places: list[Any]
        for called, x, *places in zip(moving(tree.names()), whole, *found, strict=True):
            _check(options.function, called, x, *places)
    if axes and refuses:
        differ = [compat.varying_axes(x) & set(axes) for x in tree.moving]
        for called, over, *places in zip(moving(tree.names()), differ, *found, strict=True):
            _check_said(options.function, called, over, *places)
    return found


def _check(name: str, called: str, x: Any, shard: Any, out: Any, own: Sequence[str]) -> None:
    """Refuses places of one parameter that contradict each other."""
    if shard is None:
        shards.check_divides(name, called, x, out)
    elif shard != out:
        specs = {"grad_specs": out and out.spec(), "param_specs": shard.spec()}
        raise refusals.refused("parts that differ", name, **specs)
    both = sorted({*(out.axes if out else ()), *(shard.axes if shard else ())} & set(own))
    if both:
        raise refusals.refused("parts of its own", name, called=called, axes=both)


def _check_said(
    name: str, called: str, over: frozenset[str], shard: Any, out: Any, own: Sequence[str]
) -> None:
    """Refuses a parameter that differs over the devices for no known reason."""
    del out
    unsaid = sorted(over - {*own, *(shard.axes if shard else ())})
    if unsaid:
        raise ValueError(
            f"{name}: `{called}` differs over {unsaid} by its type, so that the sum of its "
            "gradients over the window would mix those of different parameters. Where each device "
            f"has its own there (experts, stages) pass `local_params=P({unsaid[0]!r})` for it; "
            f"where it is a part of one that the loss sees whole, `param_specs=P({unsaid[0]!r})`."
        )
