"""A process in which the kernel cannot start threads for a while. Run by test_uring.py.

io_uring needs a thread for a file that can only be read blocking, and cancels the request when it
gets none. Prints the stages that were reached.
"""

from __future__ import annotations

import errno
import os
import resource
import sys

import numpy as np

from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.io.engines.uring import UringEngine
from vllm_ssdkv.store.memory.arena import Arena

PAGE = 4096
PATIENCE_S = 60.0
NOBODY = 65534


def check(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(what)


def main(ending: str) -> None:
    device = os.open("/proc/kallsyms", os.O_RDONLY)
    if os.getuid() == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)  # root is above the limit
    arena = Arena(4 << 20)
    engine = UringEngine([device], arena, queue_depth=1)
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, most))
    batch = engine.submit(
        Op.READ,
        np.zeros(1, np.uint16),
        np.zeros(1, np.uint64),
        np.full(1, PAGE, np.uint32),
        np.zeros(1, np.uint64),
    )
    while engine.statistics()["ring_retries.0"] == 0:
        check(not batch.wait(0.01), f"it did not wait: {batch.results()}")
    print("waits", flush=True)
    if ending == "recovered":
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    check(batch.wait(PATIENCE_S), "it never ended")
    wanted = PAGE if ending == "recovered" else -errno.ECANCELED
    check(batch.results().tolist() == [wanted], f"result {batch.results()}")
    if ending == "recovered":
        check(arena.view(0, PAGE).any(), "nothing was read")
    print(ending, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
