"""Permission to use AMX tiles, which Linux gives to a process only where it asks.

vLLM's attention on CPUs uses tiles without asking: in general oneDNN has asked before it, in the
first large matrix product. After a restart the first step may compute a single token, whose
products are small, and the process would end by a signal (``--enforce-eager``, which leaves the
warm-up out). So workers ask at start; threads that exist and processes that are forked have it too.

``Documentation/arch/x86/xstate.rst`` of Linux has the calls.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from vllm_ssdkv.base.metrics import Counters

logger = logging.getLogger(__name__)

_ARCH_PRCTL: Final = 158
"""Number of the system call on x86-64."""
_GET_SUPPORTED: Final = 0x1021
_GET_PERMITTED: Final = 0x1022
_REQUEST: Final = 0x1023
_TILE_DATA: Final = 18

Call = Callable[[int, object], int]
"""``arch_prctl`` with its code and argument: 0 or the error's number."""


class Amx(StrEnum):
    """Permission of a process to use AMX."""

    ABSENT = "absent"
    """The processor or the kernel has none."""
    PERMITTED = "permitted"
    REFUSED = "refused"


def _arch_prctl(code: int, argument: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(code), argument)
    return ctypes.get_errno() if failed else 0


def _has_tiles(call: Call, code: int) -> bool:
    mask = ctypes.c_uint64()
    return call(code, ctypes.byref(mask)) == 0 and bool(mask.value >> _TILE_DATA & 1)


def request_amx(counters: Counters, call: Call = _arch_prctl) -> Amx:
    """Ask for tiles where there are some. Idempotent, takes microseconds.

    A refusal is counted and logged: this engine may do without tiles.
    """
    if platform.machine() != "x86_64" or not _has_tiles(call, _GET_SUPPORTED):
        return Amx.ABSENT
    if _has_tiles(call, _GET_PERMITTED):
        return Amx.PERMITTED
    error = call(_REQUEST, ctypes.c_ulong(_TILE_DATA))
    if error == 0 and _has_tiles(call, _GET_PERMITTED):
        logger.info("this process may use AMX tiles now")
        return Amx.PERMITTED
    counters.add("amx_refusals")
    logger.warning(
        "Linux refuses AMX tiles to this process (%s): if vLLM's attention ends it by a signal, "
        "start with --block-size 16, which uses none",
        os.strerror(error) if error else "without a reason",
    )
    return Amx.REFUSED
