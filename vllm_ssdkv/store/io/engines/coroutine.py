"""Base of the engines that go through Python packages: a coroutine per request in flight.

One thread runs the event loop. Each device has its own queue, limit and threads, so a slow or hung
one delays no other; reads overtake waiting writes, up to 32 in a row.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import EngineUnavailableError
from vllm_ssdkv.store.io.engines.abandoned import GRACE_S, abandon
from vllm_ssdkv.store.io.engines.daemon_executor import DaemonExecutor
from vllm_ssdkv.store.io.engines.protocol import (
    I32,
    PENDING,
    U16,
    U32,
    U64,
    Op,
    depth_bound,
    latency_bound,
    zero_totals,
)
from vllm_ssdkv.store.io.engines.reads_first import ReadsFirst

_ALIGN = 4096
_MAX_QUEUE_DEPTH = 1024


class _Bytes(Protocol):
    @property
    def size(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Any: ...  # noqa: ANN401  # the same again


Memory = TypeVar("Memory", bound=_Bytes)
"""An array of bytes, or something that is sliced like one."""


class CoroutineBatch:
    """See :class:`vllm_ssdkv.store.io.engines.protocol.Batch`."""

    def __init__(self, requests: int) -> None:
        self._results = np.full(requests, PENDING, dtype=np.int32)
        self._left = requests
        self._ended = threading.Event()
        if not requests:
            self._ended.set()

    def end(self, index: int, result: int) -> None:
        """Called once per request, by the engine, with its lock held."""
        self._results[index] = result
        self._left -= 1
        if not self._left:
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))

    def results(self) -> I32:
        return self._results.copy()


@dataclass(frozen=True, slots=True)
class Request(Generic[Memory]):
    """One entry of a batch."""

    batch: CoroutineBatch
    index: int
    op: Op
    offset: int
    memory: Memory


@dataclass(slots=True)
class Device(Generic[Memory]):
    """A file, what waits for it, and the threads that may block in it."""

    fd: int
    threads: DaemonExecutor
    waiting: ReadsFirst[Request[Memory]] = field(default_factory=ReadsFirst)
    in_flight: int = 0


class Transfers(ABC, Generic[Memory]):
    """The moving part, which the loop's thread keeps alive; an engine can be forgotten."""

    def __init__(self, fds: Sequence[int], memory: Memory, queue_depth: int) -> None:
        self._memory: Memory | None = memory
        self._queue_depth = queue_depth
        self._devices: list[Device[Memory]] = []
        self._totals = zero_totals(len(fds))
        self._lock = threading.Lock()  # guards batches, queues and totals
        self._idle = threading.Condition(self._lock)
        self._outstanding = 0
        self._closed = False
        self._owner = os.getpid()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        try:
            for fd in fds:
                copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
                self._devices.append(Device(copy, DaemonExecutor(queue_depth)))
            self._thread = threading.Thread(target=self._loop.run_forever, name="ssdkv-loop")
            self._thread.daemon = True
            self._thread.start()
        except OSError as error:
            self._release()
            raise EngineUnavailableError(f"duplicating a descriptor: {error}") from error
        except BaseException:
            self._release()
            raise

    @abstractmethod
    async def move(self, device: Device[Memory], op: Op, offset: int, memory: Memory) -> int:
        """Move bytes between ``memory`` and the file; fewer only where the file ends.

        Raises:
            OSError: as of the system call.
        """

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> CoroutineBatch:
        if os.getpid() != self._owner:
            raise ValueError("the engine is closed: it belongs to the parent")
        with self._lock:
            if self._closed or self._memory is None:
                raise ValueError("the engine is closed")
            _io.check_requests(
                device, offset, length, buffer, len(self._devices), self._memory.size
            )
            batch = CoroutineBatch(len(device))
            for index, (which, at, size, place) in enumerate(
                zip(device.tolist(), offset.tolist(), length.tolist(), buffer.tolist(), strict=True)
            ):
                memory = self._memory[place : place + size]
                request = Request(batch, index, Op(op), at, memory)
                self._devices[which].waiting.put(request.op, request)
                self._totals[f"{Op(op).name.lower()}_submitted.{which}"] += 1
            self._outstanding += len(device)
            self._loop.call_soon_threadsafe(self._start)
        return batch

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)

    def close(self, timeout_s: float) -> bool:
        if os.getpid() != self._owner:
            return True
        with self._lock:
            self._closed = True
            patience = min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
            done = self._idle.wait_for(lambda: self._outstanding == 0, patience)
            if not done:
                self._cancel_waiting()
            elif self._memory is None:
                return True
            memory, self._memory = self._memory, None
        if not done:
            if memory is not None:
                abandon(memory)
            return False
        if memory is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._release()
        return True

    def _release(self) -> None:
        for device in self._devices:
            device.threads.shutdown(wait=False)
            os.close(device.fd)
        self._loop.close()

    def _cancel_waiting(self) -> None:
        for number, device in enumerate(self._devices):
            for request in device.waiting.take_while(lambda _: True):
                self._end(number, request, -errno.ECANCELED, 0)

    def _start(self) -> None:
        with self._lock:
            for number, device in enumerate(self._devices):
                while device.in_flight < self._queue_depth and device.waiting:
                    device.in_flight += 1
                    self._totals[f"depth_{depth_bound(device.in_flight)}.{number}"] += 1
                    self._totals[f"depth_sum.{number}"] += device.in_flight
                    task = self._loop.create_task(self._run(number, device.waiting.take()))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, request: Request[Memory]) -> None:
        device, begin = self._devices[number], time.perf_counter_ns()
        try:
            result = await self._transfer(device, request)
        except OSError as error:
            result = -(error.errno or errno.EIO)
        spent = time.perf_counter_ns() - begin
        with self._lock:
            device.in_flight -= 1
            self._end(number, request, result, spent)
        self._start()

    async def _transfer(self, device: Device[Memory], request: Request[Memory]) -> int:
        length, moved = len(request.memory), 0
        while moved < length:
            begin = moved
            try:
                count = await self._part(device, request, begin)
            except OSError as error:
                if error.errno != errno.EINVAL or begin % _ALIGN == 0:
                    raise
                # O_DIRECT cannot go on inside a block; after a transfer cut there, repeat it.
                begin -= begin % _ALIGN
                count = await self._part(device, request, begin)
            if begin + count <= moved:
                break  # no progress: the end of the file
            moved = begin + count
        return moved

    async def _part(self, device: Device[Memory], request: Request[Memory], begin: int) -> int:
        return await self.move(device, request.op, request.offset + begin, request.memory[begin:])

    def _end(self, number: int, request: Request[Memory], result: int, spent_ns: int) -> None:
        direction = request.op.name.lower()
        self._totals[f"{direction}_requests.{number}"] += 1
        self._totals[f"{direction}_nanoseconds.{number}"] += spent_ns
        self._totals[f"{direction}_latency_{latency_bound(spent_ns)}.{number}"] += 1
        if result < 0:
            self._totals[f"{direction}_errors.{number}"] += 1
        else:
            self._totals[f"{direction}_bytes.{number}"] += result
        self._outstanding -= 1
        request.batch.end(request.index, result)
        if not self._outstanding:
            self._idle.notify_all()


class CoroutineEngine:
    """See :class:`vllm_ssdkv.store.io.engines.protocol.IoEngine`; any thread may call any method.

    The descriptors are duplicated, as by the native engines. A forked child has no engine.

    Args:
        transfers: What moves the bytes.
    """

    def __init__(self, transfers: Transfers[Any]) -> None:
        self._transfers = transfers
        # For engines that are dropped, or alive when the interpreter ends, without close().
        self._finalizer = weakref.finalize(self, transfers.close, GRACE_S)

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> CoroutineBatch:
        """See the protocol."""
        return self._transfers.submit(
            op,
            np.ascontiguousarray(device),
            np.ascontiguousarray(offset),
            np.ascontiguousarray(length),
            np.ascontiguousarray(buffer),
        )

    def statistics(self) -> Mapping[str, int]:
        """See the protocol; the names are those of the threads engine."""
        return self._transfers.statistics()

    def close(self, timeout_s: float) -> bool:
        """See the protocol. What is still queued at the end of the time ends with ECANCELED."""
        self._finalizer.detach()
        return self._transfers.close(timeout_s)


def check_arguments(fds: Sequence[int], queue_depth: int) -> None:
    """Check the arguments of a submission.

    Raises:
        ValueError: no devices, or a depth out of range.
    """
    if not fds:
        raise ValueError("1 to 65535 devices")
    if not 1 <= queue_depth <= _MAX_QUEUE_DEPTH:
        raise ValueError(f"queue_depth must be 1 to {_MAX_QUEUE_DEPTH}")
