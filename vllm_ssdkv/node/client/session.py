"""One session with a node: its connections, and calls on the first of them."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from vllm_ssdkv.base.errors import NodeError, NodeGoneError, NodeRefusedError, ProtocolError
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.credentials import Credentials
from vllm_ssdkv.node.protocol.frames import DEFAULT_LIMITS, VERSIONS, negotiate
from vllm_ssdkv.node.protocol.messages import Hello, Message, Role, StoreSpec, Welcome
from vllm_ssdkv.node.protocol.sockets import connect

CALL_S: Final = 2.0
"""Deadline of a call. A node answers in some tenths of a millisecond; one that is stopped costs the
engine this once."""

LONGEST_NAME: Final = 256
"""Characters of a name in a message."""

Answer = TypeVar("Answer", bound=Message)


def as_name(text: str) -> str:
    """A text as a name in a message: its end, without what is not printable."""
    return "".join(c if c.isprintable() else "?" for c in text[-LONGEST_NAME:])


@dataclass(frozen=True, slots=True)
class Peer:
    """Name of a client, and the address of its node.

    Attributes:
        address: Of the node.
        credentials: Keys of an engine; None: none.
        role: Half of the engine.
        run: Name of the engine's run.
        rank: Of a worker.
        store: What the session is about.
    """

    address: Address
    credentials: Credentials | None
    role: Role
    run: str
    rank: int = 0
    store: StoreSpec | None = None

    def hello(self, *, session: bytes = b"") -> Hello:
        """First frame of a connection: the second one of a session names it."""
        return Hello(
            VERSIONS[0],
            VERSIONS[-1],
            self.role,
            "bytes" if session else "calls",
            self.run,
            self.rank,
            self.store,
            session,
        )


@dataclass(frozen=True, slots=True)
class PendingCall(Generic[Answer]):
    """A call that was sent, and whose answer was not taken yet.

    Attributes:
        session: That has sent it.
        name: Of its message.
        answer: Type of the answer.
        deadline: Of the monotonic clock.

    Example:
        pending = [session.ask(Find(keys), Slots) for session in sessions]
        answers = [call.take() for call in pending]
    """

    session: Session
    name: str
    answer: type[Answer]
    deadline: float

    def take(self) -> Answer:
        """Wait for the answer, once; anything but an answer ends the session.

        Raises:
            NodeRefusedError: the node refused this call alone; the session goes on.
            NodeError: the session is over.
        """
        return self.session.take(self)


class Session:
    """Connections of one session. It ends as a whole, once, and never comes back.

    Any thread may call :meth:`call`, :meth:`tell` and :meth:`end`. The owner's thread receives on
    :attr:`bytes`.

    Attributes:
        welcome: The node's answer, of the connection that carries bytes where there is one.
        calls: Connection for calls.
        bytes: Connection for bytes and for what the node tells by itself; a worker's.
        arena: Descriptor of the node's DRAM, which whoever maps it closes; -1: none came.

    Example:
        session = Session.open(peer, with_bytes=False, timeout=5.0)
        session.call(Lookup(keys), Slots)
    """

    def __init__(self, peer: Peer, calls: Channel, welcome: Welcome):
        self.peer, self.calls, self.welcome = peer, calls, welcome
        self.bytes: Channel | None = None
        self.arena = -1
        self._lock = threading.Lock()
        self._number = 0
        self._ended = False

    @classmethod
    def open(cls, peer: Peer, *, with_bytes: bool, timeout: float) -> Session:
        """Connect and say hello, on both connections.

        Raises:
            NodeError: the node does not answer, or refuses; the text has its reason.
        """
        deadline = time.monotonic() + timeout
        calls, welcome, _ = _greet(peer, peer.hello(), deadline)
        session = cls(peer, calls, welcome)
        if not with_bytes:
            return session
        try:
            second, told, descriptors = _greet(peer, peer.hello(session=welcome.session), deadline)
        except NodeError:
            session.close()
            raise
        session.bytes, session.arena = second, descriptors[0] if descriptors else -1
        session.welcome = told
        return session

    @property
    def ended(self) -> bool:
        """Check whether the session is over."""
        return self._ended

    @property
    def busy(self) -> bool:
        """Check whether a call is under way."""
        return self._lock.locked()

    def call(self, message: Message, answer: type[Answer], timeout: float = CALL_S) -> Answer:
        """Call the node and wait for its answer; anything but an answer ends the session.

        Raises:
            NodeRefusedError: the node refused this call alone; the session goes on.
            NodeError: the session is over.
        """
        return self.ask(message, answer, timeout).take()

    def ask(
        self, message: Message, answer: type[Answer], timeout: float = CALL_S
    ) -> PendingCall[Answer]:
        """Send a call, so that others can be sent to other nodes before its answer is taken.

        No other call of this session goes out until :meth:`PendingCall.take`, which must follow.

        Raises:
            NodeError: the session is over.
        """
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            self.end()
            raise NodeGoneError(f"{self.calls.peer} answered no call for {timeout:g} s")
        self._number += 1
        try:
            self.calls.send(message, call_id=self._number, timeout=_left(deadline))
        except BaseException:
            self.end()
            self._lock.release()
            raise
        return PendingCall(self, type(message).__name__, answer, deadline)

    def take(self, call: PendingCall[Answer]) -> Answer:
        """See :meth:`PendingCall.take`."""
        try:
            frame = self.calls.receive(_left(call.deadline))
            if frame.call_id != self._number or not frame.is_answer or frame.payload_bytes:
                raise ProtocolError("answer", f"{self.calls.peer} answered another call")
        except NodeError:
            self.end()
            raise
        finally:
            self._lock.release()
        if frame.message is None:
            raise NodeRefusedError(f"{self.calls.peer}: {frame.error}")
        if not isinstance(frame.message, call.answer):
            self.end()
            got = type(frame.message).__name__
            text = f"{self.calls.peer} answered {call.name} with {got}"
            raise ProtocolError("answer", text)
        return frame.message

    def open_attention(self, timeout: float) -> Channel:
        """A third connection, for attention: of a session with volumes. The caller closes it.

        Raises:
            NodeError: the node does not answer, or refuses.
        """
        peer = self.peer
        hello = Hello(
            VERSIONS[0],
            VERSIONS[-1],
            peer.role,
            "attend",
            peer.run,
            peer.rank,
            peer.store,
            self.welcome.session,
        )
        channel, _, descriptors = _greet(peer, hello, time.monotonic() + timeout)
        for descriptor in descriptors:
            os.close(descriptor)
        return channel

    def tell(self, message: Message) -> None:
        """Send what has no answer, behind the calls before it; where it cannot go, the session
        ends."""
        if not self._lock.acquire(timeout=CALL_S):
            self.end()
            return
        try:
            self.calls.send(message, timeout=CALL_S)
        except NodeError:
            self.end()
        finally:
            self._lock.release()

    def end(self) -> None:
        """End the session from any thread; who waits in it gets a NodeGoneError. Never blocks."""
        self._ended = True
        self.calls.abort()
        if self.bytes is not None:
            self.bytes.abort()

    def close(self) -> None:
        """Give the connections back; idempotent. No other thread uses that for bytes any more."""
        self.end()
        with self._lock:  # whoever has it fails at once
            self.calls.close()
        if self.bytes is not None:
            self.bytes.close()
        if self.arena >= 0:
            os.close(self.arena)
            self.arena = -1


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _greet(peer: Peer, hello: Hello, deadline: float) -> tuple[Channel, Welcome, list[int]]:
    """Connect and say hello. The channel, the welcome, and descriptors that came with it."""
    channel = connect(peer.address, peer.credentials, _left(deadline))
    channel.most_descriptors = 1
    try:
        channel.send(hello, call_id=1, timeout=_left(deadline))
        frame = channel.receive(_left(deadline))
        if not isinstance(frame.message, Welcome):
            for descriptor in frame.descriptors:
                os.close(descriptor)
            raise NodeRefusedError(f"{peer.address}: {frame.error or 'no welcome'}")
        welcome = frame.message
        negotiate(VERSIONS, welcome.version, welcome.version)
    except ProtocolError as error:
        channel.refuse(str(error))
        channel.close()
        raise
    except NodeError:
        channel.close()
        raise
    channel.agree(welcome.version, DEFAULT_LIMITS)
    if welcome.beat_s:
        channel.start_heartbeat(welcome.beat_s)
    return channel, welcome, frame.descriptors
