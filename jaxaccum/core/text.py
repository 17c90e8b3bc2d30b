"""Bytes and tables as text."""

import re
from collections.abc import Sequence

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{name}ib": 1024**i for i, name in enumerate("kmgt", start=1)}
_UNITS |= {f"{name}b": 1000**i for i, name in enumerate("kmgt", start=1)}


def bytes_text(number: int) -> str:
    """Bytes for a reader.

    Example:
      >>> bytes_text(1536), bytes_text(16 * 2**30)
      ('1.5 KiB', '16 GiB')
    """
    power = min((number.bit_length() - 1) // 10, 4) if number else 0
    value = number / 1024**power
    return f"{value:{'.3g' if value < 1000 else '.0f'}} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def parse_bytes(text: str) -> int:
    """The number of bytes that a text such as `16GiB`, `80 GB` or `4096` names.

    Raises:
      ValueError: it is not a positive number with one of these units.

    Example:
      >>> parse_bytes("16GiB"), parse_bytes("1.5 MB")
      (17179869184, 1500000)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
    number = int(float(found[1]) * _UNITS.get(found[2].lower(), 0)) if found else 0
    if not number:
        raise ValueError(f"expected a number of bytes such as 16GiB, 80GB or 4096, got {text!r}.")
    return number


def columns(rows: Sequence[Sequence[str]], *, names: int = 0) -> list[str]:
    """Rows of text with aligned columns, the first `names` of them to the left, numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        [
            cell.ljust(w) if i < names else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        ]
        for row in rows
    ]
    return ["  ".join(line).rstrip() for line in lines]
