"""The one checksum of the store: xxh3-64 with seed 0, computed by the native module."""

from __future__ import annotations

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
