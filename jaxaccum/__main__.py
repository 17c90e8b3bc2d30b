"""The command line: `jaxaccum`, or `python -m jaxaccum`, with `plan`, `memory` or `audit`."""

import argparse
import contextlib
import importlib
import importlib.metadata
import inspect
import json
import os
import pathlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax

from jaxaccum.auditing import Audit, audit
from jaxaccum.core import checks
from jaxaccum.core.text import parse_bytes
from jaxaccum.planning import MemoryFit, fit_microbatch, plan_window


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    The result alone goes to stdout; what user code prints there goes to stderr.

    Args:
      argv: the arguments after the program's name; `None` for those of the process.

    Returns:
      The exit status: 0, 1 where a check failed or nothing fits, 2 for arguments that make no
      sense and for user code that raises or exits.
    """
    parser = _Parser(prog=_program(), description=__doc__)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for add in _COMMANDS:
        add(commands)
    try:
        options = parser.parse_args(argv)
        with _prints_aside(), _in_one_line(getattr(options, "target", None)):
            result = options.run(options)
    except _UsageError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result.report.as_dict(), indent=2) if options.json else result.report)
    if result.complaint:
        print(result.complaint, file=sys.stderr)
    return int(result.failed)


def _program() -> str:
    """What the user has typed: the installed command, or the module."""
    return "jaxaccum" if pathlib.Path(sys.argv[0]).stem == "jaxaccum" else "python -m jaxaccum"


def _version() -> str:
    return f"jaxaccum {importlib.metadata.version('jaxaccum')}"


class _Result(NamedTuple):
    """What a command has found, whether that is a failure, and what is to be said of it."""

    report: Any
    failed: bool = False
    complaint: str = ""


class _UsageError(Exception):
    """What the user wrote cannot be run; the message says why."""


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}. See `{self.prog} --help`.")


def _add(commands: Any, name: str, meaning: str) -> Any:
    return commands.add_parser(
        name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}."
    )


def _add_plan(commands: Any) -> None:
    parser = _add(commands, "plan", "the number of micro-batches for a window")
    for name, meaning in _PLAN.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=meaning)
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.set_defaults(run=_plan)


_PLAN = {
    "tokens_per_step": "tokens of an optimizer step over all devices",
    "sequences_per_step": "the same in sequences",
    "examples_per_step": "the same in examples",
    "sequence_length": "tokens of a sequence",
    "sequences_per_microbatch": "sequences that one device holds at a time",
    "examples_per_microbatch": "the same in examples",
    "data_parallel": "devices that share the window (1)",
}


def _add_memory(commands: Any) -> None:
    parser = _add(commands, "memory", "find the largest micro-batch that fits, by compiling alone")
    parser.add_argument(
        "target",
        metavar="module:function",
        help="a function of the number of micro-batches that returns (fn, args)",
    )
    parser.add_argument(
        "--examples-per-step", type=int, metavar="N", required=True,
        help="examples of an optimizer step over all devices",
    )  # fmt: skip
    parser.add_argument("--limit", metavar="SIZE", help="what a device may hold, such as 16GiB")
    parser.add_argument(
        "--data-parallel", type=int, default=1, metavar="N", help="devices that share the window"
    )
    parser.add_argument("--stream", action="store_true", help="fn is a call with one micro-batch")
    parser.add_argument("--uneven", action="store_true", help="try sizes that do not divide")
    parser.add_argument("--curve", action="store_true", help="compile every candidate")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="compile for N virtual CPU devices"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.set_defaults(run=_memory)


def _add_audit(commands: Any) -> None:
    parser = _add(commands, "audit", "compile a step and report what it really does")
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
        help="exit with status 1 if more than about one gradient is reduced",
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="compile for N virtual CPU devices"
    )
    parser.set_defaults(run=_audit)


_COMMANDS: tuple[Callable[[Any], None], ...] = (_add_plan, _add_memory, _add_audit)


def _plan(options: argparse.Namespace) -> _Result:
    given = {name: getattr(options, name) for name in _PLAN}
    return _Result(plan_window(**{name: x for name, x in given.items() if x is not None}))


def _memory(options: argparse.Namespace) -> _Result:
    try:
        limit = parse_bytes(options.limit) if options.limit is not None else None
    except ValueError as error:
        raise _UsageError(f"--limit: {error}") from error
    _use_devices(options)
    fit: MemoryFit = fit_microbatch(
        _load(options.target),
        examples_per_step=options.examples_per_step,
        limit_bytes=limit,
        data_parallel=options.data_parallel,
        stream=options.stream,
        uneven=options.uneven,
        curve=options.curve,
    )
    return _Result(fit, failed=fit.best is None)


def _audit(options: argparse.Namespace) -> _Result:
    _use_devices(options)
    fn, args, kwargs = _step(_load(options.target), options.target)
    axes = tuple(options.axis_name.split(",")) if options.axis_name else None
    report: Audit = audit(fn, *args, axis_name=axes, **kwargs)
    try:
        if options.assert_deferred:
            report.assert_deferred()
    except AssertionError as error:
        return _Result(report, failed=True, complaint=str(error))
    return _Result(report)


def _use_devices(options: argparse.Namespace) -> None:
    if options.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)


@contextlib.contextmanager
def _prints_aside() -> Iterator[None]:
    """Sends to stderr what is printed to stdout, by other programs that are started too."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _in_one_line(target: str | None) -> Iterator[None]:
    """Tells in one line what the library refuses, and what user code raises, with its place."""
    try:
        yield
    except _UsageError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not _is_installed(frame.filename)]
        places = [f"{os.path.basename(f.filename)}:{f.lineno} in {f.name}" for f in own[-3:]]
        refused = isinstance(error, TypeError | ValueError) and _is_ours(frames[-1].filename)
        known = refused or isinstance(error, SyntaxError | jax.errors.JaxRuntimeError)
        if not (places or known):
            raise  # a mistake of the library's own
        first, *more = str(error).strip().splitlines() or [""]
        said = f"{first} […]" if more else first
        if isinstance(error, SystemExit):
            said = f"{target} exited with {said or 'status 0'}"
        elif not refused:
            said = f"{target} raised {type(error).__name__}{said and ': '}{said}"
        raise _UsageError(f"{said} ({', '.join(places)})" if places else said) from error


def _is_ours(filename: str) -> bool:
    return pathlib.Path(__file__).parent in pathlib.Path(filename).parents


def _is_installed(filename: str) -> bool:
    """Whether a file belongs to Python, to this library or to an installed one."""
    parents = pathlib.Path(filename).parents
    places = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    libraries = [pathlib.Path(jax.__file__).parents[1], *map(pathlib.Path, places)]
    inside = any(library in parents for library in libraries)
    return filename.startswith("<frozen ") or inside or _is_ours(filename)


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
    try:
        inspect.signature(make).bind()
    except ValueError:
        pass  # a function without a signature
    except TypeError as error:
        raise _UsageError(f"{target!r} must need no arguments: {error}.") from error
    made = make()
    given: list[Any] = list(made) if isinstance(made, tuple) else []
    fn, args, kwargs = [*given, {}][:3] if len(given) in (2, 3) else (None, None, None)
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise _UsageError(
            f"{target!r} must return (fn, args) or (fn, args, kwargs), with a tuple of arguments, "
            f"got {checks.describe(made)}."
        )
    return fn, tuple(args), kwargs


def run() -> NoReturn:
    """Runs the command of this process's arguments, and ends the process with its status."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough, as `head` has
        status = 0
    os.dup2(2, 1)  # what user code prints when Python exits
    sys.exit(status)


if __name__ == "__main__":
    run()
