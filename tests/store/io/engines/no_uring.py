"""A process that may not use io_uring, or lock memory. Run by test_uring.py.

Prints the engines that open under ``auto``, after everything that they log.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import struct
import sys

import numpy as np

from vllm_ssdkv.config.io_engine import ENGINES, EngineOptions
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena

IO_URING_SETUP = 425  # on every architecture
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD_NUMBER, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
RET_ERRNO, RET_ALLOW = 0x00050000, 0x7FFF0000
PAGE = 4096
NOBODY = 65534


def forbid_io_uring(error: int) -> None:
    """Let io_uring_setup fail from now on, as container runtimes and old kernels do."""
    code = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in [
            (LOAD_NUMBER, 0, 0, 0),
            (IF_EQUAL, 0, 1, IO_URING_SETUP),
            (RETURN, 0, 0, RET_ERRNO | error),
            (RETURN, 0, 0, RET_ALLOW),
        ]
    )
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = ctypes.c_ulong(0)
    done = libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), nothing, nothing, nothing)
    done |= libc.prctl(
        PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.create_string_buffer(program)
    )
    if done:
        raise OSError(ctypes.get_errno(), "seccomp")


def forbid_locked_memory() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
    if os.getuid() == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)  # root is above the limit


def main(how: str) -> None:
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    ENGINES.resolve("uring")  # imported while this process may still read any file
    if how == "memlock":
        forbid_locked_memory()
    else:
        forbid_io_uring(getattr(errno, how))
    arena, device = Arena(4 << 20), os.memfd_create("device")
    os.write(device, b"x" * PAGE)
    engine = open_engine(EngineOptions(), [device], ["device"], arena)
    n = 2048  # twice as many bytes as the arena has
    where = np.zeros(n, np.uint64)
    length = np.full(n, PAGE, np.uint32)
    batch = engine.submit(Op.READ, np.zeros(n, np.uint16), where, length, where)
    if not batch.wait(20.0) or (batch.results() != PAGE).any():
        raise SystemExit("it does not read")
    if bytes(arena.view(0, PAGE)) != b"x" * PAGE:
        raise SystemExit("it reads other bytes")
    print(engine.statistics().get("ring_refused.0", 0), "part refused")
    engine.close(20.0)
    print(engine.name)


if __name__ == "__main__":
    main(sys.argv[1])
