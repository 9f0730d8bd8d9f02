"""Memory of this process that is free, given back to the system.

Bodies, lines and answers come and go in many threads. glibc keeps a heap for each, and of a heap
only the end goes back by itself: one small block above holds all that is free below it.
"""

from __future__ import annotations

import ctypes
from typing import Final

from vllm_ssdkv.base.sizes import MIB

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Names of parameters in glibc's ``malloc.h``."""
_LARGE: Final = MIB
_FREE: Final = 4 * MIB


def return_large() -> bool:
    """Give large blocks back as soon as they are freed; whether the C library can.

    By itself, glibc raises both thresholds when a large block is freed, up to 32 and 64 MiB. Then
    every thread's heap keeps that much until :func:`trim`, and how many threads do depends on how
    fast lines and answers follow each other.
    """
    call = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(call and call(_MMAP_THRESHOLD, _LARGE) and call(_TRIM_THRESHOLD, _FREE))


def trim() -> bool:
    """Give back whole free pages of all heaps; whether the C library can. Takes milliseconds."""
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if call is None:
        return False
    call(0)
    return True
