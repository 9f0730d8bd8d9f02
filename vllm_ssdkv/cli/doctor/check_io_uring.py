"""``ssdkv doctor``: io_uring, and the memory that it may lock."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

from vllm_ssdkv.base.errors import EngineUnavailableError, StoreError
from vllm_ssdkv.base.host import DEFAULT_DRAM_LIMIT, available_memory, lockable_memory
from vllm_ssdkv.base.sizes import MIB, approximate_size
from vllm_ssdkv.cli.doctor.check_result import Finding, ok, warn

_SETUP: Final = 425
"""System call number; the same on every 64-bit architecture that Linux has."""
_PARAMS_BYTES: Final = 120
_INSTEAD: Final = "the threads engine serves, with more CPU per request"


def io_uring_errno() -> int:
    """0 when this process may set up an io_uring, else the error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(_PARAMS_BYTES)
    fd = libc.syscall(ctypes.c_long(_SETUP), ctypes.c_uint(1), params)
    if fd < 0:
        return ctypes.get_errno()
    os.close(fd)
    return 0


def kernel(error: int) -> Finding:
    """Check whether the kernel lets this process use io_uring, by the error number of trying."""
    if error == 0:
        return ok("io_uring", "available")
    reason, cure = {
        errno.ENOSYS: ("the kernel has none", "Linux 5.13 or later"),
        errno.EPERM: (
            "forbidden",
            "sysctl kernel.io_uring_disabled=0; in containers a seccomp profile that allows "
            "io_uring_setup, io_uring_enter and io_uring_register",
        ),
        errno.ENOMEM: ("no memory for it may be locked", "ulimit -l unlimited"),
    }.get(error, (os.strerror(error), "Linux 5.13 or later"))
    return warn("io_uring", f"not available ({reason}); {_INSTEAD}", cure)


def build(has_uring: bool) -> Finding:
    """Check whether this build can use it."""
    if has_uring:
        return ok("io_uring engine", "built in")
    return warn(
        "io_uring engine",
        f"left out of this build; {_INSTEAD}",
        "install liburing 2.3 or later (Debian: liburing-dev) and install this package again",
    )


def ring() -> Finding:
    """Check the limits of a ring, by starting the engine on a little memory."""
    from vllm_ssdkv.store.io.engines.uring import UringEngine
    from vllm_ssdkv.store.memory.arena import Arena

    device = os.memfd_create("ssdkv-doctor")
    try:
        arena = Arena(2 * MIB)
        engine = UringEngine([device], arena, queue_depth=1)
    except (EngineUnavailableError, StoreError) as error:
        return warn("io_uring ring", f"cannot start ({error}); {_INSTEAD}", "see the reason")
    finally:
        os.close(device)
    engine.close(1.0)
    arena.close()
    (setup,) = engine.setups
    text = f"completions by {setup.task_run}"
    if setup.register_files_errno:
        text += f", files not registered ({os.strerror(setup.register_files_errno)})"
    if setup.register_buffers_errno:
        text += f", buffers cannot be registered ({os.strerror(setup.register_buffers_errno)})"
    return ok("io_uring ring", text)


def memlock(lockable: int | None, buffers: int) -> Finding:
    """Check whether the buffers of a default configuration can be registered with io_uring.

    Args:
        lockable: Bytes that the process may lock; None is no limit.
        buffers: Bytes that would be registered.
    """
    if lockable is None:
        return ok("locked memory", "no limit")
    if lockable >= buffers:
        return ok("locked memory", f"up to {approximate_size(lockable)}")
    return warn(
        "locked memory",
        f"RLIMIT_MEMLOCK is {approximate_size(lockable)}, less than buffers of "
        f"{approximate_size(buffers)}: io_uring takes the rest unregistered, with more CPU per "
        "request",
        "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1",
    )


def io_uring() -> list[Finding]:
    """Everything about io_uring on this machine and in this build."""
    found = [kernel(io_uring_errno())]
    try:
        from vllm_ssdkv import _io
    except ImportError:
        return found  # a finding of its own says so
    found.append(build(_io.has_uring))
    if not found[0].cure and _io.has_uring:
        found.append(ring())
        # The default of dram_gib, see docs/options.md.
        found.append(memlock(lockable_memory(), min(available_memory() // 10, DEFAULT_DRAM_LIMIT)))
    return found
