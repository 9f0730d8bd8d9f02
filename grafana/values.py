"""Numbers as Grafana writes them, with their units."""

from __future__ import annotations

from typing import Final

_FIXED: Final = {"percentunit": (100.0, " %")}
_SUFFIX: Final = {"ops": "/s", "iops": "/s", "decbytes": "B", "Bps": "B/s", "short": "", "none": ""}
_CUSTOM: Final = "si:"
_PREFIXES: Final = ("", "k", "M", "G", "T", "P")
_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES: Final = (
    (31_536_000.0, "years"),
    (86400.0, "d"),
    (3600.0, "h"),
    (60.0, "min"),
    (1.0, "s"),
    (1e-3, "ms"),
)


def format_value(value: float, unit: str) -> str:
    """A number with its unit. ``unit`` is Grafana's name of it."""
    if unit in _FIXED:
        factor, suffix = _FIXED[unit]
        return f"{_digits(value * factor, 4)}{suffix}"
    if unit == "s":
        return _time(value)
    if unit == "bytes":
        return _scaled(value, 1024, _BINARY)
    suffix = unit.removeprefix(_CUSTOM) if unit.startswith(_CUSTOM) else _SUFFIX[unit]
    if unit == "none" and abs(value) < 10_000:
        return _digits(value, 4)
    is_word = suffix[:1].isalpha()
    names = [f"{prefix}{suffix}" if prefix or is_word else suffix for prefix in _PREFIXES]
    return _scaled(value, 1000, names)


def _scaled(value: float, base: int, names: list[str] | tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value, power = value / base, power + 1
    name = names[power]
    space = " " if name[:1].isalpha() else ""
    return f"{_digits(value, 3)}{space}{name}"


def _time(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    for length, name in _TIMES:
        if abs(seconds) >= length:
            return f"{_digits(seconds / length, 3)} {name}"
    return f"{_digits(seconds * 1e6, 3)} µs"


def _digits(value: float, figures: int) -> str:
    """So many figures, and all of those before the point: no exponent."""
    whole = abs(value) >= 10**figures - 0.5
    return f"{value:.0f}" if whole else f"{value:.{figures}g}"
