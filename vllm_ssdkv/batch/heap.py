"""Memory of this process that is free, given back to the system.

Bodies, lines and answers come and go in many threads. glibc keeps a heap for each, and of a heap
only the end goes back by itself: one small block above holds all that is free below it.
"""

from __future__ import annotations

import ctypes


def trim() -> bool:
    """Give back whole free pages of all heaps; whether the C library can. Takes milliseconds."""
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if call is None:
        return False
    call(0)
    return True
