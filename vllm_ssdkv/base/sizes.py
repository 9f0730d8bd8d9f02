"""Byte sizes as people write them: ``64GiB``, ``64 GB``, ``64g``, ``1.5TiB`` or plain bytes.

And durations: ``90s``, ``15m``, ``24h`` or ``7d``.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

_BINARY: Final = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_DECIMAL: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_LETTERS: Final = {name[0]: factor for name, factor in _BINARY.items()}
"""Single letters as units, with the meaning that fio, Docker, systemd, QEMU and ``dd`` give
them."""
_UNITS: Final[dict[str, int]] = {
    unit.upper(): factor for unit, factor in ({"B": 1} | _BINARY | _DECIMAL | _LETTERS).items()
}
_PRINTED: Final = sorted((_BINARY | _DECIMAL).items(), key=lambda unit: -unit[1])
_PATTERN: Final = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*\Z")
_COMMA: Final = re.compile(r"\s*\d+(?:,\d+)+")
_BITS: Final = re.compile(r"[KMGT]i?b|[KMGTkmgt]i?bits?")
_MAX_BYTES: Final = 1 << 60
"""More than any store; keeps every later product of sizes and counts inside 64 bits."""

SIZE_TEXT: Final = 'a number of bytes or a text such as "64GiB", "1.5TiB", "500M" or "10GB"'


def parse_size(value: object) -> int:
    """Bytes meant by ``value``: a whole number (bytes) or a text with or without a unit.

    ``KiB MiB GiB TiB`` and the letters ``K M G T`` are powers of 1024, ``KB MB GB TB`` powers of
    1000, in either case of letter; no unit is bytes. Fractions are exact and rounded down to a
    byte.

    Raises:
        ValueError: no size, or one with two meanings; the text says which part is wrong.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value != value // 1:
            raise ValueError("not a whole number of bytes; give a text with a unit")
        nbytes = int(value)
    elif isinstance(value, str):
        nbytes = _parsed(value)
    else:
        # Not TypeError: validators of options turn ValueError into a line for the user.
        raise ValueError("neither a number nor a text")  # noqa: TRY004
    if not 0 <= nbytes <= _MAX_BYTES:
        raise ValueError("a size is between 0 and 2^60 bytes")
    return nbytes


def _parsed(text: str) -> int:
    if _COMMA.match(text):
        raise ValueError(
            "a comma may begin decimals or separate thousands; write 1.5 or 1500 instead"
        )
    match = _PATTERN.match(text)
    if match is None:
        raise ValueError("not a number followed by a unit")
    number, unit = match.groups()
    if _BITS.fullmatch(unit):
        letter = unit[0].upper()
        raise ValueError(f"{unit!r} may mean bits; for bytes write {letter}iB or {letter}B")
    if not unit:
        if "." in number:
            raise ValueError("a fraction needs a unit")
        return int(number)
    factor = _UNITS.get(unit.upper())
    if factor is None:
        known = ", ".join([*_BINARY, *_DECIMAL, *_LETTERS, "B"])
        raise ValueError(f"unknown unit {unit!r}; known: {known}")
    return int(Fraction(number) * factor)


def size_or_none(value: object) -> int | None:
    """:func:`parse_size` for options that may be null."""
    return None if value is None else parse_size(value)


def format_size(nbytes: int) -> str:
    """Shortest text that :func:`parse_size` turns back into ``nbytes``: for values to be copied."""
    for name, unit in _PRINTED:
        if nbytes >= unit and nbytes * 100 % unit == 0:
            return _text(nbytes * 100 // unit / 100, 2, name)
    return f"{nbytes} B"


def approximate_size(nbytes: int) -> str:
    """The same rounded to one decimal of the largest binary unit that fits: for figures."""
    for name, unit in reversed(_BINARY.items()):
        if nbytes >= unit:
            return _text(nbytes / unit, 1, name)
    return f"{nbytes} B"


def _text(number: float, decimals: int, unit: str) -> str:
    digits = f"{number:.{decimals}f}"
    return f"{digits.rstrip('0').rstrip('.')} {unit}"


def blocks_of(used: int, slots: int, to_come: int = 0) -> str:
    """Blocks of a store, and its room for some: ``176 of 180 blocks now, up to 6,202``.

    Args:
        used: Blocks that it has.
        slots: Blocks that it has room for when it has grown as far as it may.
        to_come: Those of ``slots`` that it has yet to grow by.
    """
    if not to_come:
        return f"{used:,} of {slots:,} blocks"
    return f"{used:,} of {slots - to_come:,} blocks now, up to {slots:,}"


DAY_S: Final = 86400
MAX_DURATION_S: Final = 30 * DAY_S

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}
_DURATION: Final = re.compile(r"([1-9][0-9]{0,6})([smhd])")


def parse_duration(value: object) -> int:
    """Seconds meant by a text: a whole number and its unit, at most 30 days.

    Raises:
        ValueError: it means none.
    """
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a whole number followed by s, m, h or d")
    seconds = int(match[1]) * _SECONDS[match[2]]
    if seconds > MAX_DURATION_S:
        raise ValueError("more than 30d")
    return seconds
