"""Traffic of one volume session: stretches of volumes to and from an arena."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import threading
import time
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
from vllm_ssdkv.store.io.engines.reads_first import ReadsFirst

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
"""Share of the deadline after which a part fails, and after which a session ends that has answered
nothing: whoever waits for a batch finds it failed before the deadline, and its memory free."""

_UNSENT: Final = 0.7
"""Share of the deadline after which a part is not sent any more: its answer would be late."""

_LAST: Final = 0.95
"""Share of the deadline until which bytes may move that began to in time."""

_LOOK_S: Final = 0.25
"""Longest pause between looks at what is late, in seconds."""

_LOOKS: Final = 40
"""Looks within a deadline, at least."""


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
        over: It has failed, and its answer is for nobody.
    """

    op: Op
    drive: int
    offsets: I64
    lengths: I64
    buffers: I64
    ended: Ended
    asked: float
    nbytes: int = field(init=False)
    over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.nbytes = int(self.lengths.sum())

    def fail(self, code: int) -> None:
        """End all of it with an ``errno``."""
        self.ended(self, np.full(len(self.lengths), -code, dtype=np.int64))


@dataclass(slots=True)
class _Lane:
    """One drive: what waits for it, and how many bytes are under way."""

    waiting: ReadsFirst[WirePart] = field(default_factory=ReadsFirst)
    under_way: int = 0
    late: bool = False
    """Something failed for it was late, and the drive has not answered all since."""

    def next(self, most: int) -> WirePart | None:
        """Take what is to be sent now; None: nothing."""
        if not self.waiting:
            return None
        if self.under_way and self.under_way + self.waiting.peek().nbytes > most:
            return None
        part = self.waiting.take()
        self.under_way += part.nbytes
        return part


class VolumeWire:
    """One session's traffic, by a thread that sends, one that receives, and one that looks what is
    late.

    Any thread submits. The drives take turns. A part that is late fails alone, while other answers
    come: what still comes for it is forgotten. When none comes the session ends, and all that is
    under way fails at once; nothing comes into the arena afterwards.

    Example:
        wire = VolumeWire(session, channel, memory, drives=2, window=1 << 24, deadline_s=10.0,
                          over=print, caught_up=print)
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
        caught_up: Callable[[int], None],
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
            caught_up: Called with the number of a drive that was late, as soon as it has answered
                everything. Must not block.
        """
        self.session, self._channel = session, channel
        self._memory = memory.data
        self._most = window // 2
        self._deadline_s, self._on_over, self._caught_up = deadline_s, over, caught_up
        self._lanes = [_Lane() for _ in range(drives)]
        self._turn = 0
        self._pending: dict[int, WirePart] = {}
        """Parts that were sent, by number of their frame."""
        self._heard = 0.0
        """When the last answer came, or the first part was sent that has none."""
        self._in_use: dict[str, WirePart | None] = {}
        """Parts whose memory a thread of this has in use, by what it does: these do not fail
        alone."""
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self.over = False
        self._credit = CREDIT
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ssdkv-volume-watch", daemon=True)
        self._sender = threading.Thread(
            target=self._send_all, name="ssdkv-volume-send", daemon=True
        )
        self._receiver = threading.Thread(
            target=self._receive_all, name="ssdkv-volume-receive", daemon=True
        )

    def start(self) -> None:
        """Start the threads, once."""
        beat_s = self.session.welcome.beat_s
        self._channel.silence_s = max(LEAST_SILENCE_S, SILENCES * beat_s)
        self._channel.grant(CREDIT)
        self._watcher.start()
        self._sender.start()
        self._receiver.start()

    def submit(self, parts: list[WirePart]) -> None:
        """Send these when there is room for them; at once failed where the session is over."""
        with self._changed:
            over = self.over
            if not over:
                for part in parts:
                    self._lanes[part.drive].waiting.put(part.op, part)
                self._changed.notify_all()
        if over:
            for part in parts:
                part.fail(errno.ENOTCONN)

    def end(self) -> None:
        """End the session; any thread, does not block."""
        self.session.end()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of all threads; False when it did not come in time."""
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
            self._in_use["sends"] = None
            while not self.over:
                part = self._next_part()
                if part is not None:
                    if not self._pending:
                        self._heard = time.monotonic()
                    number = next(self._numbers)
                    self._pending[number] = self._in_use["sends"] = part
                    return number, part
                self._changed.wait()
        return None

    def _next_part(self) -> WirePart | None:
        """The part to send: each drive that has any in its turn. The lock is held."""
        drives = len(self._lanes)
        for i in range(self._turn, self._turn + drives):
            part = self._lanes[i % drives].next(self._most)
            if part is not None:
                self._turn = (i + 1) % drives
                return part
        return None

    def _send(self, number: int, part: WirePart) -> None:
        payload = list(self._views(part)) if part.op is Op.WRITE else []
        message = MoveBytes(part.drive, part.op is Op.WRITE, pack(part.offsets), pack(part.lengths))
        timeout = min(SEND_S, self._left_s(part))
        self._channel.send(message, payload, call_id=number, timeout=timeout)

    def _left_s(self, part: WirePart) -> float:
        """Seconds for which bytes of a part may move."""
        left_s = part.asked + _LAST * self._deadline_s - time.monotonic()
        return max(left_s, (1 - _LAST) * self._deadline_s)

    # ---- the thread that looks what is late ----

    def _watch(self) -> None:
        pause_s = min(_LOOK_S, self._deadline_s / _LOOKS)
        while not self._ended.wait(pause_s):
            late = self._take_late()
            if late:
                logger.warning(
                    "ssdkv: the node %s is late: %d frame(s) of its volumes fail",
                    self.session.peer.address,
                    len(late),
                )
            for part in late:
                part.fail(errno.ETIMEDOUT)

    def _take_late(self) -> list[WirePart]:
        """Parts that must fail now; ends a session that answers nothing."""
        now = time.monotonic()
        limit = now - _LATE * self._deadline_s
        with self._changed:
            if self.over:
                return []
            if self._pending and self._heard < limit:
                logger.error(
                    "ssdkv: the node %s does not answer within %g s",
                    self.session.peer.address,
                    _LATE * self._deadline_s,
                )
                self.session.end()
                return []
            in_use = tuple(self._in_use.values())
            late = [
                part
                for part in self._pending.values()
                if part.asked < limit and not part.over and part not in in_use
            ]
            unsent = now - _UNSENT * self._deadline_s
            for lane in self._lanes:
                late += lane.waiting.take_while(lambda part: part.asked < unsent)
            for part in late:
                part.over = self._lanes[part.drive].late = True
        return late

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
            wanted = part is not None and not part.over
            self._in_use["receives"] = part
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
            if wanted:
                self._channel.receive_payload(self._views(part, moved), self._left_s(part))
            else:
                self._channel.discard_payload(self._deadline_s)
            self._credit -= expected
            if self._credit < CREDIT // 2:
                self._channel.grant(CREDIT - self._credit)
                self._credit = CREDIT
        with self._changed:
            del self._pending[frame.call_id]
            self._in_use["receives"] = None
            self._heard = time.monotonic()
            lane = self._lanes[part.drive]
            lane.under_way -= part.nbytes
            caught_up = lane.late and not lane.under_way and not lane.waiting
            lane.late = lane.late and not caught_up
            self._changed.notify_all()
        if wanted:
            part.ended(part, results)
        if caught_up:
            self._caught_up(part.drive)

    def _finish(self) -> None:
        """Fail what is under way; the last deed of the session."""
        self.session.end()
        with self._changed:
            self.over = True
            self._changed.notify_all()
        self._ended.set()
        self._sender.join()  # it may still read what is to be written
        self._watcher.join()
        left = [part for part in self._pending.values() if not part.over]
        for lane in self._lanes:
            left += lane.waiting.take_while(lambda _: True)
        with contextlib.suppress(Exception):
            self._on_over(self)
        for part in left:
            part.fail(errno.ENOTCONN)
        self.session.close()
