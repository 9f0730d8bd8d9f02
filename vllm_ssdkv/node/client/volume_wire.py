"""Traffic of one volume session: stretches of volumes to and from an arena."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import NodeError, ProtocolError
from vllm_ssdkv.node.client.session import Session
from vllm_ssdkv.node.protocol.channel import Channel, Frame
from vllm_ssdkv.node.protocol.messages import MoveBytes, Moved, pack, unpack
from vllm_ssdkv.store.io.engines.protocol import Op

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]

CREDIT: Final = 1 << 36
"""Bytes of payload that the node may send before it is given more: it sends what it was asked
for."""

SEND_S: Final = 5.0
"""Deadline of sending one frame, in seconds."""

SILENCES: Final = 4
"""Heartbeats that may be missing before the node counts as gone."""

LEAST_SILENCE_S: Final = 2.0

_LATE: Final = 0.9
"""Part of the deadline after which a session ends that has not answered: whoever waits for a batch
finds its requests failed before the deadline, and its memory free."""

_READS_PER_WRITE: Final = 32
_LOOK_S: Final = 0.25
"""Pause between looks at what has been asked for longest, in seconds."""


class Ended(Protocol):
    """Takes results of stretches."""

    def __call__(self, part: WirePart, results: I64) -> None:
        """Results of the stretches of ``part``: bytes or negative ``errno``, [n]."""


@dataclass(slots=True, eq=False)
class WirePart:
    """Stretches of one volume, which are asked for in one frame.

    Attributes:
        op: Direction.
        drive: Number of the drive.
        offsets: In the volume, [n].
        lengths: Bytes, [n].
        buffers: Offset of each stretch in the arena, [n].
        ended: Called once, from any thread.
        asked: When it was submitted, of the monotonic clock.
    """

    op: Op
    drive: int
    offsets: I64
    lengths: I64
    buffers: I64
    ended: Ended
    asked: float
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = int(self.lengths.sum())

    def fail(self, code: int) -> None:
        """End all of it with an ``errno``."""
        self.ended(self, np.full(len(self.lengths), -code, dtype=np.int64))


@dataclass(slots=True)
class _Lane:
    """One drive: what waits for it, and how many bytes are under way."""

    reads: deque[WirePart] = field(default_factory=deque)
    writes: deque[WirePart] = field(default_factory=deque)
    reads_in_row: int = 0
    under_way: int = 0

    def next(self, most: int) -> WirePart | None:
        """Take what is to be sent now; None: nothing."""
        late = bool(self.writes) and self.reads_in_row >= _READS_PER_WRITE
        if not (self.reads or self.writes):
            return None
        waiting = self.writes if late or not self.reads else self.reads
        if self.under_way and self.under_way + waiting[0].nbytes > most:
            return None
        self.reads_in_row = self.reads_in_row + 1 if waiting is self.reads else 0
        part = waiting.popleft()
        self.under_way += part.nbytes
        return part


class VolumeWire:
    """One session's traffic, by a thread that sends and one that receives.

    Any thread submits. When the session ends all that is under way fails at once; nothing comes
    into the arena afterwards.

    Example:
        wire = VolumeWire(session, channel, memory, drives=2, window=1 << 24, deadline_s=10.0,
                          over=print)
        wire.submit([part])
    """

    def __init__(
        self,
        session: Session,
        channel: Channel,
        memory: NDArray[np.uint8],
        *,
        drives: int,
        window: int,
        deadline_s: float,
        over: Callable[[VolumeWire], None],
    ):
        """
        Args:
            session: Closed by this.
            channel: Its connection for bytes.
            memory: The arena.
            drives: Of the node.
            window: Bytes that may be asked of each drive at a time.
            deadline_s: Of each request.
            over: Called once when the session has ended, before what is under way fails.
        """
        self.session, self._channel = session, channel
        self._memory = memory.data
        self._most = window // 2
        self._deadline_s, self._on_over = deadline_s, over
        self._lanes = [_Lane() for _ in range(drives)]
        self._pending: dict[int, WirePart] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self.over = False
        self._credit = CREDIT
        self._sender = threading.Thread(
            target=self._send_all, name="ssdkv-volume-send", daemon=True
        )
        self._receiver = threading.Thread(
            target=self._receive_all, name="ssdkv-volume-receive", daemon=True
        )

    def start(self) -> None:
        """Start both threads, once."""
        beat_s = self.session.welcome.beat_s
        self._channel.silence_s = max(LEAST_SILENCE_S, SILENCES * beat_s)
        self._channel.grant(CREDIT)
        self._sender.start()
        self._receiver.start()

    def submit(self, parts: list[WirePart]) -> None:
        """Send these when there is room for them; at once failed where the session is over."""
        with self._changed:
            over = self.over
            if not over:
                for part in parts:
                    lane = self._lanes[part.drive]
                    (lane.writes if part.op is Op.WRITE else lane.reads).append(part)
                self._changed.notify_all()
        if over:
            for part in parts:
                part.fail(errno.ENOTCONN)

    def end(self) -> None:
        """End the session; any thread, does not block."""
        self.session.end()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of both threads; False when it did not come in time."""
        self._receiver.join(timeout_s)
        return not self._receiver.is_alive()

    # ---- the thread that sends ----

    def _send_all(self) -> None:
        try:
            while (found := self._next()) is not None:
                self._send(*found)
        except NodeError as error:
            logger.debug("ssdkv: a volume session ends: %s", error)
        except Exception:
            logger.exception("ssdkv: a volume session ends")
        self.session.end()

    def _next(self) -> tuple[int, WirePart] | None:
        """The next frame, with its number; None: the session is over."""
        with self._changed:
            while not self.over:
                for lane in self._lanes:
                    part = lane.next(self._most)
                    if part is not None:
                        number = next(self._numbers)
                        self._pending[number] = part
                        return number, part
                self._check_deadline()
                self._changed.wait(_LOOK_S)
        return None

    def _check_deadline(self) -> None:
        """End a session that does not answer. The lock is held."""
        oldest = min((part.asked for part in self._pending.values()), default=None)
        if oldest is not None and time.monotonic() - oldest > _LATE * self._deadline_s:
            logger.error(
                "ssdkv: the node %s does not answer within %g s",
                self.session.peer.address,
                _LATE * self._deadline_s,
            )
            self.session.end()

    def _send(self, number: int, part: WirePart) -> None:
        payload = list(self._views(part)) if part.op is Op.WRITE else []
        message = MoveBytes(part.drive, part.op is Op.WRITE, pack(part.offsets), pack(part.lengths))
        self._channel.send(message, payload, call_id=number, timeout=SEND_S)

    def _views(self, part: WirePart, lengths: I64 | None = None) -> list[memoryview]:
        """Memory of a part's stretches, neighbours as one."""
        lengths = part.lengths if lengths is None else lengths
        begins, ends = part.buffers, part.buffers + lengths
        first = np.flatnonzero(np.concatenate([[True], begins[1:] != ends[:-1]]))
        last = np.concatenate([first[1:], [len(begins)]]) - 1
        return [
            self._memory[begin:end]
            for begin, end in zip(begins[first].tolist(), ends[last].tolist(), strict=True)
            if end > begin
        ]

    # ---- the thread that receives ----

    def _receive_all(self) -> None:
        try:
            while True:
                self._take(self._channel.receive(None))
        except NodeError as error:
            logger.debug("ssdkv: a volume session ends: %s", error)
        except Exception:
            logger.exception("ssdkv: a volume session ends")
        finally:
            self._finish()

    def _take(self, frame: Frame) -> None:
        with self._changed:
            part = self._pending.get(frame.call_id)
        message = frame.message
        if part is None or not isinstance(message, Moved) or not frame.is_answer:
            raise ProtocolError("answer", f"{self._channel.peer} answered what nobody asked for")
        results = unpack(message.results)
        moved = results.clip(min=0)
        wrong = len(results) != len(part.lengths) or bool((results > part.lengths).any())
        expected = 0 if part.op is Op.WRITE else int(moved.sum())
        if wrong or frame.payload_bytes != expected:
            raise ProtocolError("answer", f"{self._channel.peer} answered with other stretches")
        if expected:
            self._channel.receive_payload(self._views(part, moved), self._deadline_s)
            self._credit -= expected
            if self._credit < CREDIT // 2:
                self._channel.grant(CREDIT - self._credit)
                self._credit = CREDIT
        with self._changed:
            del self._pending[frame.call_id]
            self._lanes[part.drive].under_way -= part.nbytes
            self._changed.notify_all()
        part.ended(part, results)

    def _finish(self) -> None:
        """Fail what is under way; the last deed of the session."""
        self.session.end()
        with self._changed:
            self.over = True
            self._changed.notify_all()
        self._sender.join()  # it may still read what is to be written
        left = [*self._pending.values()]
        for lane in self._lanes:
            left += [*lane.reads, *lane.writes]
        with contextlib.suppress(Exception):
            self._on_over(self)
        for part in left:
            part.fail(errno.ENOTCONN)
        self.session.close()
