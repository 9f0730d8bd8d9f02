"""Durations as people write them: ``90s``, ``15m``, ``24h`` or ``7d``."""

from __future__ import annotations

import re
from typing import Final

DAY_S: Final = 86400
MAX_DURATION_S: Final = 30 * DAY_S

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}
_PATTERN: Final = re.compile(r"([1-9][0-9]{0,6})([smhd])")


def parse_duration(value: object) -> int:
    """Seconds meant by a text: a whole number and its unit, at most 30 days.

    Raises:
        ValueError: it means none.
    """
    match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a whole number followed by s, m, h or d")
    seconds = int(match[1]) * _UNITS[match[2]]
    if seconds > MAX_DURATION_S:
        raise ValueError("more than 30d")
    return seconds
