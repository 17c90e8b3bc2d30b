"""The lines of a report."""

from collections.abc import Iterable, Sequence

from jaxaccum.auditing.findings import Collective, DonatedBuffer, LoopSum


def total(collectives: Iterable[Collective]) -> int:
    """The bytes of one call."""
    return sum(c.total_bytes for c in collectives)


def size(donated: Iterable[DonatedBuffer]) -> int:
    """The bytes of some buffers."""
    return sum(d.bytes for d in donated)


def trips(what: Collective | LoopSum) -> str:
    """How often something runs."""
    if isinstance(what, Collective) and not what.in_loop:
        return "once"
    return f"x {what.trip_count}" if what.trip_count is not None else "x ? (counted once)"


def origin(c: Collective) -> str:
    """Where an operation comes from, and what it moves."""
    moves = f"(moves {', '.join(c.moves)})" if c.moves else ""
    return f"{c.op_name} {moves}".strip()


def _row(c: Collective) -> tuple[str, ...]:
    axes = ", ".join(c.axes) if c.axes is not None else "axes unknown"
    shown = list(c.arrays[:3]) + ([f"and {len(c.arrays) - 3} more"] if len(c.arrays) > 3 else [])
    return (
        "*" if c.gradient_sized else " ",
        c.kind,
        f"over {axes}" if axes else "over nothing",
        " ".join(shown),
        f"{c.bytes} bytes",
        trips(c),
        f"= {c.total_bytes}",
        "in a branch" if c.in_branch else "",
        origin(c),
    )


def table(collectives: Sequence[Collective]) -> list[str]:
    """A line for each operation, a star for the gradient-sized ones."""
    return columns([_row(c) for c in collectives])


def lines(collectives: Sequence[Collective]) -> list[str]:
    """The same without the stars."""
    return columns([_row(c)[1:] for c in collectives])


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text with aligned columns, empty columns left out."""
    used = [column for column in zip(*rows, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in used]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)) for row in zip(*used)]
    return [f"  {line.rstrip()}" for line in lines]
