"""Channels: messages to and from one peer over a Unix socket, TCP or TLS, with deadlines."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm_ssdkv.base.errors import NodeError, NodeGoneError, NodeRefusedError, ProtocolError
from vllm_ssdkv.node.protocol.credits import Credits
from vllm_ssdkv.node.protocol.frames import (
    FIRST_MESSAGE_KIND,
    HEADER_BYTES,
    HELLO_LIMITS,
    MOST_REASON_BYTES,
    VERSIONS,
    Control,
    Flag,
    FrameLimits,
    Header,
    negotiate,
)
from vllm_ssdkv.node.protocol.messages import Done, Message, decode, encode, kind_of
from vllm_ssdkv.node.protocol.outgoing import Outgoing, Pulse
from vllm_ssdkv.node.protocol.streams import Stream, TlsStream, WouldBlockError

_FAREWELL_S = 0.5
"""Deadline of the last frame of a channel, in seconds."""

_SCRATCH_BYTES = 1 << 20

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(slots=True)
class Frame:
    """One received message; its payload is still to be received.

    Attributes:
        message: None: the call failed, and ``error`` says why.
        call_id: Of the call, or of the call that this answers; 0: neither.
        is_answer: This answers a call.
        payload_bytes: Bytes that :meth:`Channel.receive_payload` must take next.
        descriptors: File descriptors; the receiver closes them.
    """

    message: Message | None
    call_id: int = 0
    is_answer: bool = False
    error: str = ""
    payload_bytes: int = 0
    descriptors: list[int] = field(default_factory=list)


class Channel:
    """One connection, as messages.

    Any thread may call :meth:`send`, :meth:`send_error`, :meth:`grant`, :meth:`start_heartbeat`
    and :meth:`abort`. One thread at a time receives; it also closes, once no other thread sends.
    An error of any method ends the channel: a stream that lost its place has no next frame.

    Every wait has a deadline. A frame that has begun must go on every ``stall_s`` seconds, however
    late its deadline is.

    Attributes:
        peer: Address of the other side, for messages.
        limits: Largest frames that are taken.
        credits: Bytes of payload that this side may still send.
        most_descriptors: File descriptors that a frame of the peer may bring; those beyond are
            closed, and the frame refused.
        silence_s: Longest time in seconds without a frame of the peer while a thread receives;
            None: any.

    Example:
        channel = connect(Address.parse("unix:///run/ssdkv.sock"), None, timeout=3.0)
        channel.send(hello, call_id=1, timeout=3.0)
        frame = channel.receive(timeout=3.0)
    """

    def __init__(self, stream: Stream, peer: str, *, is_unix: bool) -> None:
        self.peer = peer
        self.is_unix = is_unix
        self.limits = HELLO_LIMITS
        self.credits = Credits()
        self.most_descriptors = 0
        self.silence_s: float | None = None
        self._stream = stream
        self._version: int | None = None
        self._outgoing = Outgoing(stream, peer)
        self._received = 0
        self._header = bytearray(HEADER_BYTES)
        self._payload_left = 0
        self._granted = 0
        self._grants = threading.Lock()
        self._pulse: Pulse | None = None
        self._closed = False
        self._ends_on_error = _EndsOnError(self)

    def handshake(self, timeout: float) -> None:
        """Exchange keys where the channel has TLS; nothing elsewhere.

        Raises:
            NodeRefusedError: one side does not take the other's certificate.
            NodeGoneError: the other side does not answer, or speaks no TLS.
        """
        if isinstance(self._stream, TlsStream):
            with self._ends_on_error:
                self._stream.handshake(time.monotonic() + timeout)

    def agree(self, version: int, limits: FrameLimits) -> None:
        """Take and send frames of ``version`` only, as large as ``limits``; after the hellos."""
        self._version = self._outgoing.version = version
        self.limits = limits

    def send(
        self,
        message: Message,
        payload: Sequence[Buffer] = (),
        *,
        call_id: int = 0,
        answer: bool = False,
        descriptors: Sequence[int] = (),
        timeout: float,
    ) -> None:
        """Send one message; returns when the kernel has all of it.

        Args:
            payload: C-contiguous buffers, sent from where they lie. The peer must have given
                credit for their bytes.
            call_id: Number of a call, or of the call that this answers; 0: neither.
            descriptors: File descriptors for a peer on a Unix socket; the caller keeps its own.
            timeout: Seconds.

        Raises:
            NodeGoneError: the connection is broken, or the deadline passed.
        """
        deadline = time.monotonic() + timeout
        views = [memoryview(buffer).cast("B") for buffer in payload]
        payload_bytes = sum(view.nbytes for view in views)
        body = encode(message)
        header = Header(
            kind_of(message),
            flags=Flag.ANSWER if answer else Flag.NONE,
            descriptors=len(descriptors),
            call_id=call_id,
            body_bytes=len(body),
            payload_bytes=payload_bytes,
        )
        with self._ends_on_error:
            if payload_bytes:
                self.credits.take(payload_bytes, deadline=deadline)
            self._outgoing.send(header, [memoryview(body), *views], descriptors, deadline)

    def send_error(self, call_id: int, reason: str, *, timeout: float) -> None:
        """Answer a call that failed; the connection goes on.

        Raises:
            NodeGoneError: the connection is broken, or the deadline passed.
        """
        body = _cut(reason)
        flags = Flag.ANSWER | Flag.ERROR
        header = Header(_FAILED, flags=flags, call_id=call_id, body_bytes=len(body))
        with self._ends_on_error:
            self._outgoing.send(header, [memoryview(body)], (), time.monotonic() + timeout)

    def receive(self, timeout: float | None) -> Frame:
        """Receive the next message; heartbeats and credits are taken on the way.

        The payload of the message before must have been received or discarded.

        Args:
            timeout: Seconds until the message must have begun; None: any, while the peer is not
                silent for longer than ``silence_s``.

        Raises:
            NodeGoneError: nothing came until the deadline, or the connection ended.
            NodeRefusedError: the peer refused this side; the text has its reason.
            ProtocolError: the frame is refused; :meth:`refuse` tells the peer.
        """
        if self._payload_left:
            raise ValueError(f"{self._payload_left} bytes of payload were not received")
        if timeout is None and self.silence_s is None:
            raise ValueError("a wait needs a deadline: a timeout, or silence_s of the channel")
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._ends_on_error:
            while True:
                header, descriptors = self._receive_header(self._begin_by(deadline))
                body = bytearray(header.body_bytes)
                self._fill(memoryview(body), time.monotonic() + self.stall_s)
                if header.kind >= FIRST_MESSAGE_KIND:
                    return self._frame(header, body, descriptors)
                self._obey(header, body)

    def _begin_by(self, deadline: float | None) -> float:
        silence = math.inf if self.silence_s is None else time.monotonic() + self.silence_s
        return silence if deadline is None else min(deadline, silence)

    def _receive_header(self, begin_by: float) -> tuple[Header, list[int]]:
        """Receive and check a header, and the descriptors that come with it."""
        view = memoryview(self._header)
        count, descriptors = self._receive_first(view, begin_by)
        try:
            self._fill(view[count:], time.monotonic() + self.stall_s)
            header = Header.unpack(view)
            header.check(self.limits, self._received)
            self._check_agreed(header, descriptors)
        except NodeError:
            _close_all(descriptors)
            raise
        self._received = (self._received + 1) & 0xFFFFFFFF
        return header, descriptors

    def _check_agreed(self, header: Header, descriptors: Sequence[int]) -> None:
        """Check what depends on this connection: version, descriptors, credit."""
        if self._version is not None and header.version != self._version:
            raise ProtocolError(
                "version",
                f"a frame is of version {header.version}; {self._version} was agreed on",
            )
        if header.descriptors > self.most_descriptors:
            raise ProtocolError(
                "files",
                f"a frame brings {header.descriptors} descriptors; {self.most_descriptors} may be",
            )
        if len(descriptors) != header.descriptors:
            raise ProtocolError(
                "files",
                f"a frame came with {len(descriptors)} descriptors and says {header.descriptors}",
            )
        if not header.payload_bytes:
            return
        with self._grants:
            if header.payload_bytes > self._granted:
                raise ProtocolError(
                    "credit",
                    f"a payload of {header.payload_bytes} bytes came with credit for "
                    f"{self._granted}",
                )
            self._granted -= header.payload_bytes

    def _receive_first(self, into: memoryview, begin_by: float) -> tuple[int, list[int]]:
        while True:
            try:
                count, descriptors = self._stream.receive_first(into)
            except WouldBlockError as blocked:
                self._stream.wait(blocked, sending=False, deadline=begin_by)
                continue
            if count == 0:
                early = self._version is None and not self.is_unix
                hint = " before the hellos; one side may have keys, and the other none"
                raise NodeGoneError(f"{self.peer} ended the connection{hint if early else ''}")
            return count, descriptors

    def _fill(self, view: memoryview, deadline: float) -> None:
        """Receive exactly the bytes of ``view``; what comes goes on every ``stall_s`` seconds."""
        stall_at = time.monotonic() + self.stall_s
        while view.nbytes:
            try:
                count = self._stream.receive(view)
            except WouldBlockError as blocked:
                self._stream.wait(blocked, sending=False, deadline=min(deadline, stall_at))
                continue
            if count == 0:
                raise NodeGoneError(f"{self.peer} ended the connection within a frame")
            view = view[count:]
            stall_at = time.monotonic() + self.stall_s

    def _frame(self, header: Header, body: bytearray, descriptors: list[int]) -> Frame:
        """Decode a message."""
        frame = Frame(
            None,
            header.call_id,
            bool(header.flags & Flag.ANSWER),
            payload_bytes=header.payload_bytes,
            descriptors=descriptors,
        )
        if header.flags & Flag.ERROR:
            frame.error = body[:MOST_REASON_BYTES].decode(errors="replace") or "no reason given"
        else:
            try:
                frame.message = decode(header.kind, body)
            except ValueError as error:
                _close_all(descriptors)
                if self._version is None:  # the hello of another release may have another shape
                    negotiate(VERSIONS, header.version, header.version)
                raise ProtocolError("body", str(error)) from error
        self._payload_left = header.payload_bytes
        return frame

    def _obey(self, header: Header, body: bytearray) -> None:
        """Do what a frame of the channel itself says."""
        if header.kind == Control.CREDIT:
            self.credits.add(header.call_id)
        elif header.kind == Control.REFUSED:
            reason = body.decode(errors="replace") or "no reason given"
            raise NodeRefusedError(f"{self.peer} refused the connection: {reason}")

    def receive_payload(self, into: Sequence[Buffer], timeout: float) -> None:
        """Receive the payload of the last frame.

        Args:
            into: Writable C-contiguous buffers, filled in order; of exactly its bytes together.
            timeout: Seconds.

        Raises:
            NodeGoneError: it did not come until the deadline, or the connection ended.
        """
        views = [memoryview(buffer).cast("B") for buffer in into]
        if sum(view.nbytes for view in views) != self._payload_left:
            raise ValueError(
                f"buffers of {sum(view.nbytes for view in views)} bytes for a payload of "
                f"{self._payload_left}"
            )
        deadline = time.monotonic() + timeout
        with self._ends_on_error:
            for view in views:
                self._fill(view, deadline)
        self._payload_left = 0

    def discard_payload(self, timeout: float) -> None:
        """Receive the payload of the last frame and forget it."""
        scratch = memoryview(bytearray(min(self._payload_left, _SCRATCH_BYTES)))
        deadline = time.monotonic() + timeout
        with self._ends_on_error:
            while self._payload_left:
                part = scratch[: self._payload_left]
                self._fill(part, deadline)
                self._payload_left -= part.nbytes

    @property
    def stall_s(self) -> float:
        """Seconds within which a frame that has begun must go on, in both directions."""
        return self._outgoing.stall_s

    @stall_s.setter
    def stall_s(self, seconds: float) -> None:
        self._outgoing.stall_s = seconds

    def grant(self, nbytes: int) -> None:
        """Let the peer send ``nbytes`` more of payload; never waits.

        A thread of the channel sends it: two sides that wait to give credit to each other would
        wait forever.
        """
        with self._grants:
            self._granted += nbytes
        self._with_pulse().grant(nbytes)

    @property
    def peer_left(self) -> bool:
        """Check whether the peer has ended the connection. For a thread that does not receive."""
        return self._stream.peer_left()

    def start_heartbeat(self, interval_s: float) -> None:
        """Send a heartbeat whenever nothing was sent for ``interval_s`` seconds.

        Only to a peer that receives all the time: nobody else takes them from the socket.
        """
        self._with_pulse().start_heartbeat(interval_s)

    def refuse(self, reason: str) -> None:
        """Tell the peer why the channel ends, and end it; at most half a second.

        By the thread that receives.
        """
        body, deadline = _cut(reason), time.monotonic() + _FAREWELL_S
        with contextlib.suppress(NodeError):
            header = Header(Control.REFUSED, body_bytes=len(body))
            self._outgoing.send(header, [memoryview(body)], (), deadline)
            # A socket that is closed with unread bytes takes back what it has sent.
            self._stream.shutdown_sending()
            scratch = memoryview(bytearray(_SCRATCH_BYTES))
            while self._receive_first(scratch, deadline)[0] and time.monotonic() < deadline:
                pass
        self.abort()

    def abort(self) -> None:
        """End the channel from any thread; whoever waits in it gets a NodeGoneError."""
        self.credits.close()
        self._outgoing.abort()

    def close(self) -> None:
        """Give the socket back, once; idempotent. No other thread uses the channel any more."""
        if self._closed:
            return
        self._closed = True
        self.abort()
        if self._pulse is not None:
            self._pulse.close()
        self._stream.close()

    def _with_pulse(self) -> Pulse:
        with self._grants:
            if self._pulse is None:
                self._pulse = Pulse(self._outgoing, self.peer)
            return self._pulse


class _EndsOnError:
    """Ends a channel where an error leaves a ``with`` of this. Made once: frames cost less so."""

    __slots__ = ("_channel",)

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        if issubclass(kind, ProtocolError):
            self._channel.credits.close()  # the socket stays open for the reason
        elif issubclass(kind, NodeError):
            self._channel.abort()


_FAILED = kind_of(Done())
"""Kind of the answer to a call that failed; its body is a text."""


def _cut(reason: str) -> bytes:
    """Text of a refusal, no longer than a frame of one may be."""
    text = reason.encode(errors="replace")[:MOST_REASON_BYTES]
    return text.decode(errors="ignore").encode()


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
