"""The engine on KvikIO, NVIDIA's library for GPUDirect Storage.

For memory of the host KvikIO is a pool of threads with POSIX calls (its compatibility mode). Memory
of a GPU goes straight to and from the drive where GPUDirect Storage is set up, and through a buffer
of KvikIO's where it is not. It loads the CUDA driver library in any case.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import EngineUnavailableError
from vllm_ssdkv.store.io.engines.coroutine import (
    CoroutineEngine,
    Device,
    Transfers,
    check_arguments,
)
from vllm_ssdkv.store.io.engines.gpu_memory import GpuMemory
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena

_Memory: TypeAlias = "NDArray[np.uint8] | GpuMemory"

_ERRNO = {os.strerror(code): code for code in errno.errorcode}


class _KvikioTransfers(Transfers[_Memory]):
    def __init__(self, fds: Sequence[int], memory: _Memory, queue_depth: int) -> None:
        self._kvikio = _load()
        super().__init__(fds, memory, queue_depth)
        defaults = self._kvikio.defaults
        # One pool serves all devices of the process: with fewer threads a hung one takes them all.
        threads = max(len(fds) * queue_depth, defaults.get("num_threads"))
        defaults.set("num_threads", threads)
        self._files: dict[int, Any] = {}
        try:
            for device in self._devices:
                self._files[device.fd] = self._open(device.fd)
        except RuntimeError as error:
            self.close(0.0)
            raise EngineUnavailableError(f"kvikio cannot open a device: {error}") from error

    def _open(self, fd: int) -> Any:  # noqa: ANN401  # an untyped package
        writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        return self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r+" if writable else "r")

    def _release(self) -> None:
        for file in self._files.values():
            file.close()
        super()._release()

    async def move(self, device: Device[_Memory], op: Op, offset: int, memory: _Memory) -> int:
        return await self._loop.run_in_executor(
            device.threads, self._move, device.fd, op, offset, memory
        )

    def _move(self, fd: int, op: Op, offset: int, memory: _Memory) -> int:
        _check(fd, op)
        file = self._files[fd]
        try:
            if op is Op.WRITE:
                return int(file.pwrite(memory, len(memory), offset).get())
            # Reading past the end is an error of KvikIO's; a device has no size in its inode.
            size = os.fstat(fd).st_size or os.lseek(fd, 0, os.SEEK_END)
            length = min(len(memory), max(size - offset, 0))
            return int(file.pread(memory, length, offset).get()) if length else 0
        except RuntimeError as error:
            raise OSError(
                _ERRNO.get(str(error).rpartition(": ")[2], errno.EIO), str(error)
            ) from error


def _check(fd: int, op: Op) -> None:
    """Raise the errors that KvikIO reports as others."""
    writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    if op is Op.WRITE and not writable:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))


def _load() -> Any:  # noqa: ANN401  # an untyped package
    try:
        import kvikio
        import kvikio.defaults

        # It loads the driver at the first transfer, and every one would fail.
        with kvikio.CuFile("/dev/zero", "r") as file:
            file.pread(np.empty(1, np.uint8), 1).get()
    except ImportError as error:
        raise EngineUnavailableError(
            f"the package kvikio is missing ({error}); pip install kvikio-cu12"
        ) from error
    except RuntimeError as error:
        raise EngineUnavailableError(
            f"kvikio cannot start: {error}; it needs NVIDIA's driver (libcuda.so.1), also for "
            "files and memory of the host"
        ) from error
    return kvikio


class KvikioEngine(CoroutineEngine):
    """See :class:`CoroutineEngine`.

    Args:
        fds: Open descriptors, one per device. KvikIO opens their files once more, by name.
        arena: Memory of all requests; or a GPU's, which is moved without passing through the
            host's where GPUDirect Storage is set up.
        queue_depth: Requests, and so threads, in flight per device, 1 to 1024.

    Raises:
        EngineUnavailableError: kvikio or the CUDA driver is missing, or a file cannot be opened.
        ValueError: an argument is out of range.
    """

    name = "kvikio"

    def __init__(self, fds: Sequence[int], arena: Arena | GpuMemory, queue_depth: int) -> None:
        check_arguments(fds, queue_depth)
        memory = arena if isinstance(arena, GpuMemory) else arena.view(0, arena.nbytes)
        super().__init__(_KvikioTransfers(fds, memory, queue_depth))
