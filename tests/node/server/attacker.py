"""A client that says whatever it likes to a node."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.kit.node import NodeProcess
from tests.node.protocol.frame_samples import framed
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.node.protocol.channel import Channel, Frame
from vllm_ssdkv.node.protocol.credentials import Credentials
from vllm_ssdkv.node.protocol.frames import DEFAULT_LIMITS, HEADER_BYTES, VERSIONS, Header
from vllm_ssdkv.node.protocol.messages import (
    Hello,
    Message,
    Part,
    Role,
    StoreSpec,
    Welcome,
    decode,
)
from vllm_ssdkv.node.protocol.sockets import connect

WAIT_S = 30.0
SPEC = StoreSpec({"model": "attacked", "dtype": "bfloat16"}, 2, 4096, 1, 16, "attacked", "")


class Attacker:
    """One half of an engine that is not ours: sessions as they should be, then anything.

    Example:
        with Attacker(node, "worker") as attacker:
            attacker.call(TellWeights(b"digest"))
    """

    def __init__(
        self,
        address: Address,
        role: Role,
        run: str = "attack",
        *,
        spec: StoreSpec | None = SPEC,
        keys: Path | None = None,
        beats: bool = True,
    ):
        self._address = address
        self._credentials = None if keys is None else Credentials.load(keys, "engine")
        self._role: Role = role
        self._run, self._spec, self._beats = run, spec, beats
        self.calls, self.welcome = self._greeted("calls", b"")
        self.arena = -1
        self.bytes: Channel | None = None
        if role == "worker":
            self.bytes, self.welcome = self._greeted("bytes", self.welcome.session)

    def _greeted(self, part: Part, session: bytes) -> tuple[Channel, Welcome]:
        channel = connect(self._address, self._credentials, WAIT_S)
        channel.most_descriptors = 1
        hello = Hello(
            VERSIONS[0], VERSIONS[-1], self._role, part, self._run, 0, self._spec, session
        )
        try:
            channel.send(hello, call_id=1, timeout=WAIT_S)
            frame = channel.receive(WAIT_S)
        except BaseException:
            channel.close()
            raise
        assert isinstance(frame.message, Welcome)
        for descriptor in frame.descriptors:
            self.arena = descriptor
        channel.agree(frame.message.version, DEFAULT_LIMITS)
        if self._beats:
            channel.start_heartbeat(frame.message.beat_s)
        return channel, frame.message

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in (self.calls, self.bytes):
            if channel is not None:
                channel.close()
        if self.arena >= 0:
            os.close(self.arena)

    def call(self, message: Message, timeout: float = WAIT_S) -> Frame:
        """Answer to a call."""
        self.calls.send(message, call_id=7, timeout=timeout)
        return self.calls.receive(timeout)

    def tell(self, message: Message, **fields: object) -> Frame:
        """Next frame that comes on the connection for bytes after this message."""
        assert self.bytes is not None
        self.bytes.send(message, call_id=7, timeout=WAIT_S, **fields)  # type: ignore[arg-type]
        return self.bytes.receive(WAIT_S)


def connected(address: Address) -> socket.socket:
    """A bare socket that is connected to a node."""
    if address.path is None:
        return socket.create_connection((address.host, address.port), WAIT_S)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S)
    sock.connect(address.path)
    return sock


@contextlib.contextmanager
def raw(node: NodeProcess) -> Iterator[socket.socket]:
    """A bare socket that is connected to a node."""
    with connected(Address.parse(node.address)) as sock:
        yield sock


def raw_worker(address: Address, run: str) -> tuple[socket.socket, socket.socket, Welcome]:
    """Bare sockets of a worker's session after its hellos: for calls, and for bytes."""
    calls, stream = connected(address), connected(address)
    hello = Hello(VERSIONS[0], VERSIONS[-1], "worker", "calls", run, 0, SPEC)
    welcome = _greet(calls, hello)
    hello = msgspec.structs.replace(hello, part="bytes", session=welcome.session)
    return calls, stream, _greet(stream, hello)


def _greet(sock: socket.socket, hello: Hello) -> Welcome:
    sock.sendall(framed(hello, 0))
    header = Header.unpack(sock.recv(HEADER_BYTES, socket.MSG_WAITALL))
    message = decode(header.kind, sock.recv(header.body_bytes, socket.MSG_WAITALL))
    assert isinstance(message, Welcome)
    return message
