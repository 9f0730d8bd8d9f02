"""The portable engine: ``queue_depth`` native threads per device that read and write blocking.

Works on every file system and in every container. Each device has its own queue and threads, so
a slow or hung one delays no other; reads overtake waiting writes, up to 32 in a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import EngineUnavailableError
from vllm_ssdkv.store.io.engines.native import NativeEngine
from vllm_ssdkv.store.memory.arena import Arena


class ThreadsEngine(NativeEngine):
    """See :class:`NativeEngine`.

    Args:
        fds: Open descriptors, one per device.
        arena: Memory of all requests.
        queue_depth: Requests in flight per device, 1 to 1024.

    Raises:
        EngineUnavailableError: a descriptor is not open, or the system has no threads left.
        ValueError: an argument is out of range.
    """

    name = "threads"

    def __init__(self, fds: Sequence[int], arena: Arena, queue_depth: int) -> None:
        memory = arena.view(0, arena.nbytes)
        try:
            native = _io.ThreadsEngine(list(fds), arena.address, arena.nbytes, queue_depth)
        except RuntimeError as error:
            raise EngineUnavailableError(
                f"cannot start {queue_depth} I/O threads for each of {len(fds)} devices: {error}; "
                "lower io.queue_depth or raise the limit on threads (ulimit -u, cgroup pids.max)"
            ) from error
        super().__init__(native, memory)
