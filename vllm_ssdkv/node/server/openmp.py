"""OpenMP runtime of a node: in an engine torch brings one, a node loads the system's."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from typing import Final

from vllm_ssdkv import _kernels

logger = logging.getLogger(__name__)

_LIBRARY: Final = "libgomp.so.1"


@functools.cache
def team_threads(asked: int | None) -> int:
    """Threads of a call of a kernel: ``asked``, or half of the CPUs; 1 where there is no runtime.

    The first call of a process decides which runtime its kernels use.
    """
    threads = asked or max(1, (os.cpu_count() or 1) // 2)
    reason = ""
    if threads > 1 and "torch" not in sys.modules:
        try:
            ctypes.CDLL(_LIBRARY, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            reason = f": {error}"
    if threads > 1 and not _kernels.team_available():
        logger.warning(
            "ssdkv node: there is no OpenMP runtime here: attention of each worker runs on one "
            "thread of %d; install libgomp1%s",
            threads,
            reason,
        )
        return 1
    return threads
