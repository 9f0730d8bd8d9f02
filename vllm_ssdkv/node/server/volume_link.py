"""Bytes of a volume session: reads and writes of stretches, each drive on its own."""

from __future__ import annotations

import collections
import errno
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import NodeError, ProtocolError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.protocol.channel import Channel, Frame
from vllm_ssdkv.node.protocol.messages import MoveBytes, Moved, pack, unpack
from vllm_ssdkv.node.server.volumes import VolumeSet
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN
from vllm_ssdkv.store.io.engines.protocol import PENDING, Batch, Op
from vllm_ssdkv.store.memory.arena import Arena

logger = logging.getLogger(__name__)

MOST_WINDOW: Final = 32 << 20
LEAST_WINDOW: Final = 4 << 20
"""Memory for what is on its way to and from one drive, in bytes."""

CREDIT: Final = 1 << 36
"""Bytes of payload that a side may send before it is given more; windows bound what is on its way
at a time."""

PAYLOAD_S: Final = 30.0
"""Deadline of a payload that has begun, in seconds."""

I64 = NDArray[np.int64]


def window_of(config: NodeConfig) -> int:
    """Bytes of each drive's window, from the option ``transfer`` of the node."""
    wanted = config.transfer // max(1, len(config.devices))
    window = min(MOST_WINDOW, max(LEAST_WINDOW, wanted))
    return window - window % (4 * PAGE_ALIGN)


@dataclass(slots=True)
class _Job:
    """Stretches that a drive was asked for.

    Attributes:
        call_id: Of the frame.
        begin, nbytes: Place of the bytes in the lane's memory.
        lengths: Of the stretches, [n].
        write: Direction.
        batch: None: the drive is out of use.
        until: When it fails, of the monotonic clock.
    """

    call_id: int
    begin: int
    nbytes: int
    lengths: I64
    write: bool
    batch: Batch | None
    until: float


@dataclass(slots=True, eq=False)
class _Write:
    """Bytes of a frame on their way to a drive, until they are there or cannot come there."""

    batch: Batch | None = None
    failed: bool = False

    def done(self) -> bool:
        """Check whether it has ended. Never blocks."""
        return self.failed or (self.batch is not None and self.batch.done())


class _Lane:
    """One drive of a session: its memory, a ring, and the thread that answers.

    Frames of a drive end in the order in which they came, so that a ring is all that is needed. A
    drive that hangs holds up nobody but itself.
    """

    def __init__(self, link: VolumeLink, drive: int, begin: int, window: int):
        self._link, self.drive = link, drive
        self._begin, self._window = begin, window
        self._head = self._tail = self._used = 0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._overdue: list[Batch] = []
        self._writes: collections.deque[_Write] = collections.deque()
        self.dead = link.volumes.is_dead(drive)
        self._thread = threading.Thread(target=self._run, name=f"ssdkv-volume-{drive}", daemon=True)
        self._thread.start()

    def reserve(self, nbytes: int) -> int:
        """Place of a frame's bytes in the arena.

        Raises:
            ProtocolError: the engine has asked for more than the window.
        """
        with self._lock:
            at = self._head
            room = self._window - at if at >= self._tail else self._tail - at
            skipped = 0
            if self._used == 0:
                self._head = self._tail = at = 0
                room = self._window
            elif at >= self._tail and room < nbytes:
                skipped, at, room = room, 0, self._tail
            if nbytes > room or self._used + skipped + nbytes > self._window:
                raise ProtocolError("credit", f"more is asked of drive {self.drive} than may be")
            self._head = at + nbytes
            self._used += skipped + nbytes
            return self._begin + at

    def _release(self, job: _Job) -> None:
        with self._lock:
            end = job.begin - self._begin + job.nbytes
            # What was skipped at the end of the memory comes back with what lies behind it.
            self._used -= end - self._tail if end >= self._tail else self._window - self._tail + end
            self._tail = end

    def begin_write(self) -> _Write:
        """A write whose bytes come from now on. One thread calls this."""
        while self._writes and self._writes[0].done():
            self._writes.popleft()
        write = _Write()
        if not self.dead:  # else nothing comes to the drive
            self._writes.append(write)
        return write

    def writes(self) -> list[_Write]:
        """Writes that have not ended, also those that nobody waits for. Any thread."""
        return [write for write in tuple(self._writes) if not write.done()]

    def put(self, job: _Job | None) -> None:
        """Have a job answered; None: end."""
        self._jobs.put(job)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    @property
    def hangs(self) -> bool:
        """Check whether I/O of the drive has not ended, after :meth:`join`."""
        if self._thread.is_alive():
            return True
        return any(not batch.done() for batch in self._overdue)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._answer(job)
            except NodeError:
                self._link.abort()  # who receives finds the end
            except Exception:
                logger.exception("ssdkv node: a drive of a volume session ends")
                self._link.abort()

    def _answer(self, job: _Job) -> None:
        results = self._results(job)
        if job.write:
            self._link.answer(job.call_id, Moved(pack(results)), [])
        else:
            view = self._link.memory.data
            ends = job.begin + np.cumsum(job.lengths)
            if np.array_equal(results, job.lengths):
                payload = [view[job.begin : job.begin + job.nbytes]]
            else:
                payload = [
                    view[end - length : end - length + result]
                    for end, length, result in zip(
                        ends.tolist(), job.lengths.tolist(), results.tolist(), strict=True
                    )
                    if result > 0
                ]
            self._link.answer(job.call_id, Moved(pack(results)), payload)
        self._release(job)

    def _results(self, job: _Job) -> I64:
        if job.batch is None:
            return np.full(len(job.lengths), -errno.EIO, dtype=np.int64)
        left_s = 0.0 if self.dead else max(0.0, job.until - time.monotonic())
        if not job.batch.wait(left_s):
            self._overdue.append(job.batch)
            # Its memory may still be written to: nothing more is asked of this drive.
            if not self.dead:
                logger.error(
                    "ssdkv node: drive %s does not answer within %g s: it fails until its session "
                    "ends",
                    self._link.volumes.paths[self.drive],
                    self._link.deadline_s,
                )
            self.dead = True
        results = job.batch.results().astype(np.int64)
        results[results == PENDING] = -errno.EIO
        return results


class VolumeLink:
    """Serves the connection for bytes of a volume session.

    Example:
        link = VolumeLink(channel, volumes, config, counters)
        link.serve(count_call)
        link.close()
    """

    def __init__(
        self, channel: Channel, volumes: VolumeSet, config: NodeConfig, counters: Counters
    ):
        """
        Args:
            channel: The connection.
            volumes: Of the session.
            config: Options of the node.
            counters: Of the node.
        """
        self.volumes, self.deadline_s = volumes, volumes.deadline_s
        self._channel, self._counters, self._lease_s = channel, counters, config.lease
        window = window_of(config)
        drives = len(config.devices)
        self._window = window
        self._arena = Arena(window * drives)
        self._engine = volumes.open_engine(self._arena)
        self.memory = self._arena.view(0, self._arena.nbytes)
        self._lanes = [_Lane(self, drive, drive * window, window) for drive in range(drives)]
        self._credit = CREDIT

    def writes(self) -> list[_Write]:
        """Writes of all drives that have not ended. Any thread, also after :meth:`close`."""
        return [write for lane in self._lanes for write in lane.writes()]

    def serve(self, count: Callable[[str], None]) -> None:
        """Serve until the connection ends.

        Raises:
            NodeError: the end, or a frame that is refused.
        """
        self._channel.grant(CREDIT)
        while True:
            frame = self._channel.receive(None)
            message = frame.message
            if not isinstance(message, MoveBytes) or frame.is_answer or frame.descriptors:
                raise ProtocolError("order", "what came on a connection for bytes moves none")
            count("MoveBytes")
            self._take(frame, message)

    def _take(self, frame: Frame, message: MoveBytes) -> None:
        offsets, lengths = unpack(message.offsets), unpack(message.lengths)
        nbytes = self._check(frame, message, offsets, lengths)
        lane = self._lanes[message.drive]
        begin = lane.reserve(nbytes)
        if message.write:
            batch = self._write(lane, message, offsets, lengths, begin)
        else:
            batch = None if lane.dead else self._submit(message, offsets, lengths, begin)
        direction = "saved" if message.write else "loaded"
        self._counters.add("node_bytes", nbytes, direction=direction)
        until = time.monotonic() + self.deadline_s
        lane.put(_Job(frame.call_id, begin, nbytes, lengths, message.write, batch, until))

    def _write(
        self, lane: _Lane, message: MoveBytes, offsets: I64, lengths: I64, begin: int
    ) -> Batch | None:
        """Receive the bytes of a write and begin it; None: the drive is out of use."""
        write, nbytes = lane.begin_write(), int(lengths.sum())
        try:
            self._channel.receive_payload([self.memory[begin : begin + nbytes].data], PAYLOAD_S)
            self._give_credit(nbytes)
            if not lane.dead:
                write.batch = self._submit(message, offsets, lengths, begin)
        finally:
            write.failed = write.batch is None
        return write.batch

    def _check(self, frame: Frame, message: MoveBytes, offsets: I64, lengths: I64) -> int:
        """Check a frame; the bytes that it is about.

        Raises:
            ProtocolError: it cannot be what it says.
        """
        if message.drive >= len(self._lanes):
            raise ProtocolError("body", f"there is no drive {message.drive}")
        if len(offsets) != len(lengths) or not len(offsets):
            raise ProtocolError("body", f"{len(offsets)} offsets with {len(lengths)} lengths")
        room = self.volumes.nbytes(message.drive)
        inside = (offsets >= 0) & (lengths > 0) & (lengths <= self._window)
        inside &= (offsets | lengths) % PAGE_ALIGN == 0
        inside &= offsets <= room - lengths
        if not inside.all():
            raise ProtocolError("body", f"a stretch is outside the volume of {room} bytes")
        nbytes = int(lengths.sum())
        if nbytes > self._window // 2:
            raise ProtocolError("size", f"a frame asks for {nbytes} bytes")
        if frame.payload_bytes != (nbytes if message.write else 0):
            raise ProtocolError("body", f"{frame.payload_bytes} bytes came with {nbytes} to write")
        return nbytes

    def _submit(self, message: MoveBytes, offsets: I64, lengths: I64, begin: int) -> Batch:
        at = begin + np.cumsum(lengths) - lengths
        return self._engine.submit(
            Op.WRITE if message.write else Op.READ,
            np.full(len(offsets), message.drive, dtype=np.uint16),
            offsets.astype(np.uint64),
            lengths.astype(np.uint32),
            at.astype(np.uint64),
        )

    def _give_credit(self, nbytes: int) -> None:
        self._credit -= nbytes
        if self._credit < CREDIT // 2:
            self._channel.grant(CREDIT - self._credit)
            self._credit = CREDIT

    def answer(self, call_id: int, message: Moved, payload: list[memoryview]) -> None:
        """Answer a frame. Any thread.

        Raises:
            NodeError: the connection is over.
        """
        self._channel.send(
            message, payload, call_id=call_id, answer=True, timeout=max(PAYLOAD_S, self._lease_s)
        )

    def abort(self) -> None:
        """End the connection. Any thread."""
        self._channel.abort()

    def close(self) -> None:
        """End threads and engine. Blocks until I/O has ended, or its deadline: no volume is given
        to another session before, and one whose I/O has not ended then not even after."""
        self._channel.abort()
        for lane in self._lanes:
            lane.put(None)
        end = time.monotonic() + self.deadline_s
        ended = self._engine.close(self.deadline_s)
        for lane in self._lanes:
            lane.join(max(1.0, end - time.monotonic()))
        if not ended:
            self.volumes.hang([lane.drive for lane in self._lanes if lane.hangs])
        self.memory = np.zeros(0, dtype=np.uint8)
        if ended:
            self._arena.close()
