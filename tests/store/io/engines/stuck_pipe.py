"""A process whose read hangs in a pipe that nobody fills. Run by test_uring.py.

io_uring reads pipes as if they were devices, so this is a request that the kernel has and does not
end. Prints the stages that were reached.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading

import numpy as np

from vllm_ssdkv.store.io.engines.protocol import PENDING, Batch, Op
from vllm_ssdkv.store.io.engines.uring import UringEngine
from vllm_ssdkv.store.memory.arena import Arena

PAGE = 4096
PATIENCE_S = 60.0


def read(engine: UringEngine, device: int, buffer: int, count: int = 1) -> Batch:
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
    hanging, writer = os.pipe()
    healthy = os.memfd_create("device")
    os.write(healthy, b"y" * PAGE)
    arena = Arena(4 << 20)
    engine = UringEngine([hanging, healthy], arena, queue_depth=1)
    hung, queued = read(engine, 0, 0), read(engine, 0, PAGE)
    check(not hung.wait(0.1), "it did not hang")
    check(read(engine, 1, 2 * PAGE, 50).wait(PATIENCE_S), "not isolated")
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
        return  # the interpreter ends with engine, arena and request as they are
    check(not engine.close(0.1), "close did not notice")
    check(hung.results().tolist() == [PENDING], "reported too early")
    check(queued.results().tolist() == [-errno.ECANCELED], "not cancelled")
    view = arena.view(0, PAGE)
    arena.close()
    del arena
    print("abandoned", flush=True)
    if ending == "recover":
        os.write(writer, b"x" * PAGE)
        check(hung.wait(PATIENCE_S), "did not come back")
        check(hung.results().tolist() == [PAGE], "wrong result")
        check(view.tobytes() == b"x" * PAGE, "other bytes")
        check(engine.close(PATIENCE_S), "requests remain")
        print("recovered", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
