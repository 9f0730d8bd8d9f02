"""The sending half of a channel: whole frames, one after the other, and a pulse beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from vllm_ssdkv.base.errors import NodeError, NodeGoneError
from vllm_ssdkv.node.protocol.frames import VERSIONS, Control, Header
from vllm_ssdkv.node.protocol.streams import Stream, WouldBlockError

STALL_S = 10.0

_PULSE_S = 5.0
"""Deadline of a heartbeat or a credit, in seconds."""


class Outgoing:
    """Frames on their way out. Any thread may call :meth:`send`; frames never mix.

    Attributes:
        version: Of the protocol, in each header.
        stall_s: A frame that has begun goes on at least so often, in seconds.
        sent_at: Time of ``time.monotonic`` when the last frame left.
    """

    def __init__(self, stream: Stream, peer: str) -> None:
        self.version = VERSIONS[-1]
        self.stall_s = STALL_S
        self.sent_at = time.monotonic()
        self._stream = stream
        self._peer = peer
        self._lock = threading.Lock()
        self._sequence = 0
        self._broken = False

    def send(
        self,
        header: Header,
        views: Sequence[memoryview],
        descriptors: Sequence[int],
        deadline: float,
    ) -> None:
        """Send a frame; its version and sequence are filled in here.

        Raises:
            NodeGoneError: the connection is broken, or ``deadline`` passed.
        """
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise NodeGoneError(f"{self._peer} took nothing until the deadline")
        try:
            self._send(header, views, descriptors, deadline)
        except NodeError:
            # A frame that ends in the middle leaves no place for another.
            self.abort()
            raise
        finally:
            self._lock.release()

    def _send(
        self,
        header: Header,
        views: Sequence[memoryview],
        descriptors: Sequence[int],
        deadline: float,
    ) -> None:
        if self._broken:
            raise NodeGoneError(f"the connection to {self._peer} has ended")
        header.version, header.sequence = self.version, self._sequence
        parts = [memoryview(header.pack()), *(view for view in views if view.nbytes)]
        first, moved_at = 0, time.monotonic()
        while first < len(parts):
            try:
                count = self._stream.send(parts[first:] if first else parts, descriptors)
            except WouldBlockError as blocked:
                until = min(deadline, moved_at + self.stall_s)
                self._stream.wait(blocked, sending=True, deadline=until)
                continue
            descriptors, moved_at = (), time.monotonic()
            while count and count >= parts[first].nbytes:
                count -= parts[first].nbytes
                first += 1
            if count:
                parts[first] = parts[first][count:]
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        self.sent_at = time.monotonic()

    def abort(self) -> None:
        """End the connection: no frame begins from here on. Any thread; does not wait."""
        self._broken = True
        self._stream.abort()


class Pulse:
    """Thread of a channel that sends credits, and heartbeats while nothing else is sent.

    A thread that receives must never wait to send: two sides that wait for each other's credits
    would wait forever.
    """

    def __init__(self, outgoing: Outgoing, peer: str) -> None:
        self._outgoing = outgoing
        self._changed = threading.Condition(threading.Lock())
        self._granted = 0
        self._interval_s: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"ssdkv-pulse {peer}", daemon=True)
        self._thread.start()

    def grant(self, nbytes: int) -> None:
        with self._changed:
            self._granted += nbytes
            self._changed.notify_all()

    def start_heartbeat(self, interval_s: float) -> None:
        with self._changed:
            self._interval_s = interval_s
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread. The stream must have been aborted: the thread may wait in it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (granted := self._next_grant()) is not None:
            control = Control.CREDIT if granted else Control.HEARTBEAT
            try:
                self._outgoing.send(
                    Header(control, call_id=granted), (), (), time.monotonic() + _PULSE_S
                )
            except NodeError:
                # Whoever receives finds the end of the connection.
                self._outgoing.abort()
                return

    def _next_grant(self) -> int | None:
        """Bytes of credit to give, 0 for a heartbeat, as soon as one is due; None at the end."""
        with self._changed:
            while not self._closed:
                if self._granted:
                    granted, self._granted = self._granted, 0
                    return granted
                left = self._until_heartbeat()
                if left is not None and left <= 0:
                    return 0
                self._changed.wait(left)
            return None

    def _until_heartbeat(self) -> float | None:
        if self._interval_s is None:
            return None
        return self._outgoing.sent_at + self._interval_s - time.monotonic()
