"""Byte sizes as people write them: ``64GiB``, ``1.5TiB``, ``10GB`` or a number of bytes."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

_UNITS: Final[dict[str, int]] = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
}
_PATTERN: Final = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*\Z")
_MAX_BYTES: Final = 1 << 60
"""More than any store; keeps every later product of sizes and counts inside 64 bits."""

SIZE_TEXT: Final = 'a number of bytes or a text such as "64GiB", "1.5TiB", "512MiB" or "10GB"'


def parse_size(value: object) -> int:
    """Bytes meant by ``value``: an int (bytes) or a text with a unit.

    ``KiB MiB GiB TiB`` are powers of 1024, ``KB MB GB TB`` powers of 1000, in either case of
    letter. Fractions are exact and rounded down to a byte.

    Raises:
        ValueError: not a size; the text says which part is wrong.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        if not isinstance(value, str):
            # Not TypeError: validators of options turn ValueError into a line for the user.
            raise ValueError("neither an integer nor a text")  # noqa: TRY004
        match = _PATTERN.match(value)
        if match is None:
            raise ValueError("not a number followed by a unit")
        number, unit = match.groups()
        if not unit:
            raise ValueError("the unit is missing; for bytes give an integer, not a text")
        if unit.upper() not in _UNITS:
            raise ValueError(f"unknown unit {unit!r}; known: KiB, MiB, GiB, TiB, KB, MB, GB, TB, B")
        nbytes = int(Fraction(number) * _UNITS[unit.upper()])
    if not 0 <= nbytes <= _MAX_BYTES:
        raise ValueError("a size is between 0 and 2^60 bytes")
    return nbytes


def size_or_none(value: object) -> int | None:
    """:func:`parse_size` for options that may be null."""
    return None if value is None else parse_size(value)


def format_size(nbytes: int) -> str:
    """Shortest text in binary units that :func:`parse_size` turns back into ``nbytes``."""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= unit and nbytes * 100 % unit == 0:
            number = f"{nbytes * 100 // unit / 100:.2f}".rstrip("0").rstrip(".")
            return f"{number}{name}"
    return f"{nbytes}B"


def approximate_size(nbytes: int) -> str:
    """Text for people, rounded to one decimal of the largest fitting unit."""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"
