"""A checksum inside a JSON file: bits that flipped must not pass for other numbers.

It is a member ``checksum`` on a line of its own: the xxh3-64 of the whole file, with 16 zeros in
the place of its 16 hexadecimal digits (``docs/format.md``).
"""

from __future__ import annotations

import re

from vllm_ssdkv.base.checksum import checksum_bytes

NO_DIGITS = "0" * 16
"""A placeholder for the digits until :func:`sealed` puts them in."""

_SEAL = re.compile(rb'^ "checksum": "([0-9a-f]{16})",?$', re.MULTILINE)


def sealed(data: bytes) -> bytes:
    """The text with the checksum that belongs to it.

    Raises:
        ValueError: the text has no such member.
    """
    found = _SEAL.search(data)
    if found is None:
        raise ValueError("it has no checksum")
    blank = data[: found.start(1)] + NO_DIGITS.encode() + data[found.end(1) :]
    return blank[: found.start(1)] + b"%016x" % checksum_bytes(blank) + blank[found.end(1) :]


def has_checksum(data: bytes) -> bool:
    """Check whether the text has such a member, right or wrong."""
    return _SEAL.search(data) is not None


def check_seal(data: bytes) -> None:
    """Raise ValueError unless the text has the checksum that belongs to it."""
    if sealed(data) != data:
        raise ValueError("its checksum is not that of its content")
