"""A process whose I/O thread hangs in the kernel. Run by test_threads.py; exits 77 if impossible.

The kernel copies what it reads into a page that userfaultfd guards and nobody fills, so the call
does not return. This is how a thread looks that waits for a device that never answers.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import struct
import sys
import threading

import numpy as np

from vllm_ssdkv.store.io.engines.protocol import PENDING, Batch, Op
from vllm_ssdkv.store.io.engines.threads import ThreadsEngine
from vllm_ssdkv.store.memory.arena import Arena

PAGE = 4096
PATIENCE_S = 60.0
IMPOSSIBLE = 77

# linux/userfaultfd.h
NEW, API, REGISTER = 0xAA00, 0xC018AA3F, 0xC020AA00
MODE_MISSING = 1


def guard(address: int, nbytes: int) -> int:
    """Make the first touch of that memory hang; closing the descriptor lets everybody go on."""
    try:
        maker = os.open("/dev/userfaultfd", os.O_RDWR | os.O_CLOEXEC)
        fd = fcntl.ioctl(maker, NEW, os.O_CLOEXEC | os.O_NONBLOCK)
        fcntl.ioctl(fd, API, struct.pack("QQQ", 0xAA, 0, 0))
        fcntl.ioctl(fd, REGISTER, struct.pack("QQQQ", address, nbytes, MODE_MISSING, 0))
    except OSError as error:
        print(error)
        sys.exit(IMPOSSIBLE)
    return fd


def read(engine: ThreadsEngine, device: int, buffer: int, count: int = 1) -> Batch:
    return engine.submit(
        Op.READ,
        np.full(count, device, np.uint16),
        np.zeros(count, np.uint64),
        np.full(count, PAGE, np.uint32),
        np.full(count, buffer, np.uint64),
    )


def check(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(what)


def main(ending: str) -> None:
    fds = [os.memfd_create("device") for _ in range(2)]
    for device in fds:
        os.write(device, b"x" * PAGE)
    arena = Arena(4 << 20)
    arena.view(2 << 20, PAGE)[:] = 0
    fd = guard(arena.address, PAGE)
    engine = ThreadsEngine(fds, arena, queue_depth=2)

    hung = read(engine, 0, 0)
    check(not hung.wait(0.2), "it did not hang")
    behind = read(engine, 0, 2 << 20, 50)  # by the other thread of that device
    other = read(engine, 1, 2 << 20, 50)
    check(other.wait(PATIENCE_S) and behind.wait(PATIENCE_S), "not isolated")
    read(engine, 0, 0)  # now both threads of the device hang
    queued = read(engine, 0, 2 << 20)
    check(not queued.wait(0.1), "not both hang")
    print("isolated", flush=True)

    if ending == "interrupt":
        # A shell starts background jobs with the signal ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("abandoned", flush=True)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        hung.wait(3600.0)  # Ctrl-C must end this, and the process
        raise SystemExit("the wait ignored the signal")
    if ending == "forget":
        print("abandoned", flush=True)
        return  # the interpreter ends with engine, arena and threads as they are
    check(not engine.close(0.1), "close did not notice")
    check(hung.results().tolist() == [PENDING], "reported too early")
    check(queued.results().tolist() == [-errno.ECANCELED], "not cancelled")
    address = arena.address
    arena.close()
    del arena
    print("abandoned", flush=True)
    if ending == "recover":
        os.close(fd)
        check(hung.wait(PATIENCE_S), "did not come back")
        check(hung.results().tolist() == [PAGE], "wrong result")
        check(ctypes.string_at(address, PAGE) == b"x" * PAGE, "the memory was given away")
        check(engine.close(PATIENCE_S), "threads remain")
        print("recovered", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
