"""The two roads of a window under plain `jit`: by `shard_map`, or as groups by `vmap`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxaccum.core import compat, programs
from jaxaccum.devices import constraints, groups
from jaxaccum.window.arguments import Options

Result = TypeVar("Result")


# By `shard_map`; as groups whose constraints keep them apart; as groups.
MANUAL, SPMD, GROUPS = "manual", "spmd", "groups"


@dataclasses.dataclass(frozen=True)
class Road:
    """How a function is run on each device's own rows.

    Attributes:
      kind: which road it is.
      mesh: the mesh.
      names: the axes over which the rows are split.
      is_typed: whether JAX checks replication over them, where they are manual.
    """

    kind: str
    mesh: Any
    names: tuple[str, ...]
    is_typed: bool

    @property
    def in_parts(self) -> bool:
        """Whether parts of parameters and sums are the window's own affair, not the compiler's."""
        return self.kind == MANUAL

    def map(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`fn` over the devices, as `jax.shard_map` takes it."""
        if self.kind != MANUAL:
            return groups.grouped(
                fn,
                mesh=self.mesh,
                names=self.names,
                in_specs=in_specs,
                out_specs=out_specs,
                spmd=self.kind == SPMD,
            )
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.names),
            check_vma=self.is_typed,
        )

    def check(self, program: programs.Program) -> None:
        """Stops where the program of a loss needs another road."""
        if self.kind == MANUAL:
            constraints.check_no_map(program)

    def laid(self, x: Any, spec: PartitionSpec) -> Any:
        """`x` laid out over `names` as `spec` says."""
        if not any(spec) or x.dtype == jax.dtypes.float0:
            return x
        if all(compat.is_explicit(self.mesh, name) for name in self.names):
            return jax.sharding.reshard(x, NamedSharding(self.mesh, spec))
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*[e or free for e in spec], *[free] * (x.ndim - len(spec)))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


class _Watched:
    """A loss function of which is known whether it was called."""

    def __init__(self, loss_fn: Callable[..., Any], refuse_fn: Callable[..., None]):
        self.loss_fn, self.refuse_fn, self.called = loss_fn, refuse_fn, False
        functools.update_wrapper(self, loss_fn)

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.called = True
        try:
            return self.loss_fn(*args, **named)
        except Exception:
            self.refuse_fn(args, named)
            raise


def either(
    options: Options,
    mesh: Any,
    names: tuple[str, ...],
    run_fn: Callable[[Options, Road], Result],
    *,
    rows: Sequence[int],
    is_typed: bool = True,
) -> Result:
    """`run_fn` by `shard_map`; as groups where the loss cannot be traced in it.

    Such are losses that constrain values over the axes of the window, or hold a `shard_map`. A
    loss that fails for other reasons fails as it did.

    Args:
      options: those of the window.
      mesh: the mesh.
      names: the axes over which the rows are split.
      run_fn: from the options, with another loss function, and the road to the result.
      rows: the positions of the arguments that are cut.
      is_typed: whether JAX can type the collectives of the window.
    """

    def run(kind: str, loss_fn: Callable[..., Any]) -> Result:
        own = dataclasses.replace(options, loss_fn=loss_fn)
        return run_fn(own, Road(kind, mesh, names, is_typed))

    def refuse(args: Any, named: Any) -> None:
        if any(compat.is_explicit(mesh, name) for name in names):
            constraints.check_unnamed(
                options.function,
                options.loss_fn,
                args,
                named,
                rows=rows,
                mesh=mesh,
                names=names,
            )

    watched = _Watched(options.loss_fn, refuse)
    first: Exception
    try:
        return run(MANUAL, watched)
    except constraints.HoldsMapError as error:
        kinds, first = [GROUPS], error
    except Exception as error:
        if not watched.called:
            raise
        kinds, first = [SPMD, GROUPS], error
    for kind in kinds:
        free = constraints.Free(options.function, options.loss_fn, mesh, names, maps=kind == GROUPS)
        try:
            result = run(kind, free)
        except constraints.HoldsMapError:
            continue
        except Exception:
            if free.found:
                raise
            break
        if free.found:
            return result
        break
    raise first
