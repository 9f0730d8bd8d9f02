"""The engine on aiofiles, to compare with: system calls in Python threads behind an event loop."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import EngineUnavailableError
from vllm_ssdkv.store.io.engines.coroutine import (
    CoroutineEngine,
    Device,
    Transfers,
    check_arguments,
)
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena


class _AiofilesTransfers(Transfers[NDArray[np.uint8]]):
    def __init__(self, fds: Sequence[int], memory: NDArray[np.uint8], queue_depth: int) -> None:
        try:
            import aiofiles.os
        except ImportError as error:
            raise EngineUnavailableError(
                f"the package aiofiles is missing ({error}); pip install aiofiles"
            ) from error
        self._read = aiofiles.os.wrap(os.preadv)
        self._write = aiofiles.os.wrap(os.pwritev)
        super().__init__(fds, memory, queue_depth)

    async def move(
        self, device: Device[NDArray[np.uint8]], op: Op, offset: int, memory: NDArray[np.uint8]
    ) -> int:
        call = self._write if op is Op.WRITE else self._read
        return int(await call(device.fd, [memory.data], offset, executor=device.threads))


class AiofilesEngine(CoroutineEngine):
    """See :class:`CoroutineEngine`.

    Args:
        fds: Open descriptors, one per device.
        arena: Memory of all requests.
        queue_depth: Requests, and so threads, in flight per device, 1 to 1024.

    Raises:
        EngineUnavailableError: aiofiles is not installed, or a descriptor is not open.
        ValueError: an argument is out of range.
    """

    name = "aiofiles"

    def __init__(self, fds: Sequence[int], arena: Arena, queue_depth: int) -> None:
        check_arguments(fds, queue_depth)
        memory = arena.view(0, arena.nbytes)
        super().__init__(_AiofilesTransfers(fds, memory, queue_depth))
