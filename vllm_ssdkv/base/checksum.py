"""The one checksum of the store: xxh3-64 with seed 0, computed by the native module.

A JSON file carries it as a member ``checksum`` on a line of its own: that of the whole file, with
16 zeros in the place of its 16 hexadecimal digits (``docs/format.md``).
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io


def checksum_bytes(data: bytes | bytearray | memoryview | NDArray[np.uint8]) -> int:
    """xxh3-64 of contiguous bytes. Any thread.

    Raises:
        ValueError: the data is not contiguous.
    """
    array = np.frombuffer(data, dtype=np.uint8)  # keeps `data` alive during the call
    address = np.array([array.ctypes.data], dtype=np.uint64)
    return int(_io.checksum(address, array.nbytes, 1)[0])


def checksum_pages(addresses: NDArray[np.uint64], nbytes: int) -> NDArray[np.uint64]:
    """xxh3-64 of ``nbytes`` bytes at each absolute address. Releases the GIL. Any thread.

    Args:
        addresses: Addresses, uint64, shape [n]. The caller keeps that memory alive and unchanged.
        nbytes: Bytes at each address.

    Returns:
        Checksums, uint64, shape [n].
    """
    return _io.checksum(addresses, nbytes)


def wrong_checksums(
    addresses: NDArray[np.uint64], expected: NDArray[np.uint64], nbytes: int
) -> NDArray[np.int64]:
    """Ascending positions at which :func:`checksum_pages` is not ``expected``; both arrays [n]."""
    return _io.verify(addresses, expected, nbytes)


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
