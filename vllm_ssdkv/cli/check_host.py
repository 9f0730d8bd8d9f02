"""``ssdkv doctor``: memory, huge pages, limits and system calls of this machine."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from pathlib import Path
from typing import Final

from vllm_ssdkv.cli.findings import Finding, ok, warn
from vllm_ssdkv.host import available_memory
from vllm_ssdkv.sizes import MIB, approximate_size

THP: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LOW_MEMORY: Final = 640 * MIB
"""Below this a tenth of the memory cannot hold the default ``io.staging``."""
_IO_URING_SETUP: Final = 425
"""System call number; the same on every 64-bit architecture that Linux has."""
_IO_URING_PARAMS_BYTES: Final = 120


def memory() -> Finding:
    """Memory that the DRAM tier could take."""
    available = available_memory()
    text = f"{approximate_size(available)} available"
    if available < _LOW_MEMORY:
        return warn("memory", text, "free some, or set dram_gib and a smaller io.staging")
    return ok("memory", text)


def huge_pages(setting: Path = THP) -> Finding:
    """Transparent huge pages, which the buffers ask for with madvise."""
    try:
        text = setting.read_text().strip()
    except OSError:
        text = ""
    chosen = text.partition("[")[2].partition("]")[0] or "not supported"
    if chosen in {"always", "madvise"}:
        return ok("huge pages", chosen)
    return warn("huge pages", chosen, f"as root: echo madvise > {THP}")


def memlock(limit: int) -> Finding:
    """How much memory a process may lock. Nothing of this version locks any, so never a fault.

    Args:
        limit: Bytes, or ``resource.RLIM_INFINITY``.
    """
    text = "unlimited" if limit == resource.RLIM_INFINITY else approximate_size(limit)
    return ok("RLIMIT_MEMLOCK", f"{text}; this version locks no memory")


def io_uring_errno() -> int:
    """0 when this process may set up an io_uring, else the error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    fd = libc.syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(1), params)
    if fd < 0:
        return ctypes.get_errno()
    os.close(fd)
    return 0


def io_uring(error: int) -> Finding:
    """Whether io_uring may be used. No engine of this version needs it, so never a fault."""
    if error == 0:
        return ok("io_uring", "available; this version uses threads")
    reason = {
        errno.ENOSYS: "the kernel has none",
        errno.EPERM: "forbidden by kernel.io_uring_disabled or the container's seccomp profile",
    }.get(error, os.strerror(error))
    return ok("io_uring", f"not available ({reason}); this version does not need it")


def host() -> list[Finding]:
    """Everything about this machine but its devices."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [memory(), huge_pages(), memlock(soft), io_uring(io_uring_errno())]
