"""What the functions of a window take, and what they say of a keyword that they do not.

The declarations are in `jaxaccum.window.options`; here they become signatures for `help`.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, Signature
from typing import Any, TypeVar

from jaxaccum.window.arguments import Given, Options
from jaxaccum.window.options import CutOptions, StepCall

Function = TypeVar("Function", bound=Callable[..., Any])

# Of each option, in order; `None` where there is none before the check.
_DEFAULTS = {
    field.name: None if field.default is dataclasses.MISSING else field.default
    for field in dataclasses.fields(Options)
}
_LEADING = ("params", "batch")

# In the place of a positional argument that was not given.
NOTHING: Any = object()


def factory(function: str, options: type, call: type) -> Callable[[Function], Function]:
    """Gives a factory that takes `**options` their signature, and refuses all others.

    Args:
      function: the public function's name, for messages.
      options: the declaration of its options; the cut is added.
      call: that of the keywords of the functions that it makes.
    """
    types = {**CutOptions.__annotations__, **options.__annotations__}

    def decorate(fn: Function) -> Function:
        signature = inspect.signature(fn)
        own = {
            p.name: p for p in signature.parameters.values() if p.kind is not Parameter.VAR_KEYWORD
        }
        others = {name: kind for name, kind in types.items() if name not in own}
        added = _keywords(others, _DEFAULTS)
        signature = signature.replace(parameters=[*own.values(), *added])

        @signed(signature)
        @functools.wraps(fn)
        def factory_fn(*args: Any, **named: Any) -> Any:
            check_known(function, named, signature.parameters, call)
            return fn(*args, **named)

        return factory_fn  # type: ignore[return-value]

    return decorate


def batch_fn(
    options: Options, call: type, run_fn: Callable[[tuple[Any, ...], Given], Any]
) -> Callable[..., Any]:
    """A function of a batch, `f(params, batch, *args, ...)`, that takes the keywords of `call`.

    Args:
      options: those of the factory that returns it.
      call: the declaration of its keywords.
      run_fn: from the positional arguments and the keywords to what it returns.
    """

    @signed(call_signature(call))
    def fn(params: Any, batch: Any = NOTHING, *args: Any, **named: Any) -> Any:
        every = params, batch, *args
        return run_fn(*taken(options.function, every, named, call, options.batch_argnums))

    fn.__name__ = fn.__qualname__ = f"{options.function.rpartition('.')[2]}_fn"
    return fn


def call_signature(call: type, *leading: str) -> Signature:
    """That of a function of a batch: `(params, batch, *args, ...)`.

    Args:
      call: the declaration of its keywords.
      leading: the positional arguments, where these are others than `params` and `batch`.
    """
    positional = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in leading or _LEADING]
    return Signature(
        [
            *positional,
            Parameter("args", Parameter.VAR_POSITIONAL),
            *_keywords(call.__annotations__, Given._field_defaults),
        ]
    )


def check_known(function: str, given: Iterable[str], known: Iterable[str], call: type) -> None:
    """Refuses keywords that a factory does not know, and says where they belong.

    Raises:
      TypeError: there is one.
    """
    known = list(known)
    for name in sorted(set(given) - set(known)):
        if name in call.__annotations__:
            raise TypeError(
                f"{function}: `{name}` is a keyword of the call, but came where the function is "
                f"made. Pass it each time, `f(params, batch, {name}=...)`."
            )
        if name in _DEFAULTS:
            raise TypeError(
                f"{function}: `{name}` has no meaning here, but in `ja.accumulate`. Leave it out."
            )
        close = difflib.get_close_matches(name, known, 1)
        remedy = f"Did you mean `{close[0]}`?" if close else f"`help(ja.{function})` lists them."
        raise TypeError(f"{function}: `{name}` is none of its options. {remedy}")


def taken(
    function: str, args: tuple[Any, ...], named: Mapping[str, Any], call: type, batch_argnums: Any
) -> tuple[tuple[Any, ...], Given]:
    """The positional arguments of a call, of which `NOTHING` is none, and its keywords.

    Args:
      function: the public function's name, for messages.
      args: what came by position.
      named: what came by keyword.
      call: the declaration of the keywords that the call has.
      batch_argnums: those of the factory; `None` where they were not given.

    Raises:
      TypeError: there are other keywords, those of the factory among them, or there is no batch.
    """
    known = call.__annotations__
    others = [name for name in named if name not in known]
    for name in sorted(set(others) & Options.__dataclass_fields__.keys()):
        raise TypeError(
            f"{function}: `{name}` is a keyword of where the function is made, but came in the "
            f"call. Pass it there, `f = ja.{function}(loss_fn, {name}=...)`."
        )
    for name in sorted(set(others) & set(Given._fields)):
        if call is StepCall:
            raise TypeError(
                f"{function}: `{name}` comes with the step's state, not with the call. Pass "
                f"`{name}=` where the step or its state is made."
            )
        raise TypeError(
            f"{function}: `{name}` is no keyword of this call, but of that of `ja.accumulate`, "
            "whose sums `ja.finalize` divides. Use these two, or leave it out."
        )
    if others:
        raise TypeError(
            f"{function}: the loss function's own arguments are passed by position, got the "
            f"keywords {_listed(others)}. Pass a batch as one tree, `f(params, inputs)` with "
            "`lambda params, inputs: loss_fn(params, **inputs)`; bind options with "
            f"`functools.partial`. The call's own keywords are {_listed(known)}."
        )
    args = args[:-1] if args[-1] is NOTHING else args
    if batch_argnums is None and len(args) < 2:
        raise TypeError(
            f"{function}: the batch must be an argument of the loss, but only `params` was given. "
            "Pass it second, `f(params, batch)`; what the loss function closes over cannot be cut."
        )
    return args, Given(**named)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _keywords(types: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Parameter]:
    """The parameters of a declaration, in the order of `defaults`; others come first."""
    names = [n for n in types if n not in defaults] + [n for n in defaults if n in types]
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=types[name])
        for name in names
    ]


def signed(signature: Signature) -> Callable[[Function], Function]:
    """Gives a function the signature that `help` shows."""

    def decorate(fn: Any) -> Any:
        fn.__signature__ = signature
        return fn

    return decorate
