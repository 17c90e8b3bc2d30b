"""Bytes and tables as text."""

import re
from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZES = {"": 1, "B": 1}
_SIZES |= {name: 1024**i for i, name in enumerate(_BINARY) if i}
_SIZES |= {name: 1000**i for i, name in enumerate(("B", "KB", "MB", "GB", "TB")) if i}


def bytes_text(number: int) -> str:
    """Bytes for a reader.

    Example:
      >>> bytes_text(1536), bytes_text(16 * 2**30)
      ('1.5 KiB', '16 GiB')
    """
    value, unit = float(number), 0
    while value >= 1024 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {_BINARY[unit]}" if value < 1000 else f"{value:.0f} {_BINARY[unit]}"


def parse_bytes(text: str) -> int:
    """The number of bytes that a text such as `16GiB`, `80 GB` or `4096` names.

    Raises:
      ValueError: it is not a positive number with one of these units.

    Example:
      >>> parse_bytes("16GiB"), parse_bytes("1.5 MB")
      (17179869184, 1500000)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
    units = {name.lower(): size for name, size in _SIZES.items()}
    if found is None or found[2].lower() not in units:
        raise ValueError(f"expected a number of bytes such as 16GiB, 80GB or 4096, got {text!r}.")
    number = int(float(found[1]) * units[found[2].lower()])
    if not number:
        raise ValueError(f"expected more than 0 bytes, got {text!r}.")
    return number


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text with aligned columns, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
