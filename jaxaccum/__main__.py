"""The command line: `python -m jaxaccum audit module:function`."""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxaccum.auditing import Audit, audit
from jaxaccum.core import checks


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments after the program's name; `None` for those of the process.

    Returns:
      The exit status: 0, 1 where a check failed, 2 for arguments that make no sense.
    """
    parser = argparse.ArgumentParser(prog="python -m jaxaccum", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except _UsageError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


class _UsageError(Exception):
    """What the user wrote cannot be run; the message says why."""


def _add_audit(commands: Any) -> None:
    parser = commands.add_parser("audit", help="compile a step and report what it really does")
    parser.add_argument(
        "target",
        metavar="module:function",
        help="a function without arguments that returns (fn, args) or (fn, args, kwargs)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument(
        "--axis-name", metavar="AXES", help="the mesh axes that count, separated by commas"
    )
    parser.add_argument(
        "--assert-deferred",
        action="store_true",
        help="exit with status 1 unless gradients are reduced once, outside of loops",
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="compile for N virtual CPU devices"
    )
    parser.set_defaults(run=_audit)


_COMMANDS: tuple[Callable[[Any], None], ...] = (_add_audit,)


def _audit(options: argparse.Namespace) -> int:
    if options.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    fn, args, kwargs = _step(_load(options.target), options.target)
    axes = tuple(options.axis_name.split(",")) if options.axis_name else None
    report: Audit = audit(fn, *args, axis_name=axes, **kwargs)
    print(json.dumps(report.as_dict(), indent=2) if options.json else report)
    if options.assert_deferred:
        try:
            report.assert_deferred()
        except AssertionError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def _load(target: str) -> Callable[[], Any]:
    """The function that `module:function` names."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise _UsageError(
            f"expected `module:function`, got {target!r}. For example, train:example_step."
        )
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise _UsageError(
            f"there is no module {module!r}. Run the command where `import {module}` works."
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise _UsageError(f"{module!r} has no {name!r}, which {target!r} names.")
        found = getattr(found, part)
    if not callable(found):
        raise _UsageError(f"{target!r} must be a function, got {checks.describe(found)}.")
    return found


def _step(make: Callable[[], Any], target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The step to audit, its arguments and its keyword arguments."""
    made = make()
    given: list[Any] = list(made) if isinstance(made, tuple) else []
    fn, args, kwargs = [*given, {}][:3] if len(given) in (2, 3) else (None, None, None)
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise _UsageError(
            f"{target!r} must return (fn, args) or (fn, args, kwargs), with a tuple of arguments, "
            f"got {checks.describe(made)}."
        )
    return fn, tuple(args), kwargs


if __name__ == "__main__":
    sys.exit(main())
