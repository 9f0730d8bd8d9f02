"""A node that answers as a test says, over real sockets: for what no real node does."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import NodeError
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.node.client.session import Peer
from vllm_ssdkv.node.protocol.channel import Channel, Frame
from vllm_ssdkv.node.protocol.frames import DEFAULT_LIMITS, VERSIONS
from vllm_ssdkv.node.protocol.messages import (
    AskGauges,
    Done,
    Gauges,
    Hello,
    Message,
    Region,
    Role,
    StoreSpec,
    TellWeights,
    Welcome,
)
from vllm_ssdkv.node.protocol.shared_memory import make_shared, map_shared
from vllm_ssdkv.node.protocol.sockets import Listener

FRAME = 4096
FRAMES = 8
SLOTS = 32
WAIT_S = 30.0
SPEC = StoreSpec({"model": "none"}, 1, FRAME, 1, 16, "none", "none")

Script = Callable[["Connection", Message, Frame], Message | None]
"""Answer to a message; None: the script has sent what it wants."""


class Connection:
    """One connection of an engine."""

    def __init__(self, node: ScriptedNode, channel: Channel, hello: Hello):
        self.node, self.channel, self.hello = node, channel, hello
        self.region: mmap.mmap | None = None

    def push(self, message: Message, call_id: int = 0, payload: list[bytes] | None = None) -> None:
        """Send what is no answer."""
        self.channel.send(message, payload or [], call_id=call_id, timeout=WAIT_S)


class ScriptedNode:
    """Listens at a Unix socket until :meth:`kill`; every start is another node."""

    def __init__(self, directory: Path, script: Script):
        self.address = Address.parse(f"unix://{directory}/node.sock")
        self.script = script
        self.version = VERSIONS[-1]
        self.beat_s = 1.0
        self.beats = True
        self.encrypted = False
        self.slots = SLOTS
        self.connections: list[Connection] = []
        self.told: list[Message] = []
        self.looks = 0
        """Questions for its numbers, which are not in :attr:`told`."""
        self.arena_fd = make_shared("arena", FRAME * FRAMES)
        mapping = map_shared(self.arena_fd, FRAME * FRAMES, writable=True)
        self.arena: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self.stopped = threading.Event()
        """Set: nothing is read or answered until it is cleared, as by a process that is stopped."""
        self._listener: Listener | None = None
        self.start()

    def peer(self, role: Role) -> Peer:
        """An engine's half."""
        return Peer(self.address, None, role, "run", 0, SPEC)

    def start(self) -> None:
        """Listen."""
        self._listener = Listener(self.address, None)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def kill(self) -> None:
        """End all connections, and listen no more."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
            os.unlink(str(self.address.path))
        for connection in self.connections:
            connection.channel.abort()
        self.connections = []

    def _accept(self, listener: Listener) -> None:
        while (channel := listener.accept()) is not None:
            threading.Thread(target=self._serve, args=(channel,), daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        channel.most_descriptors = 1
        try:
            frame = channel.receive(WAIT_S)
            assert isinstance(frame.message, Hello)
            connection = Connection(self, channel, frame.message)
            self.connections.append(connection)  # who is welcome knows that it can be cut off
            self._welcome(connection, frame.call_id)
            while True:
                self._take(connection, channel.receive(WAIT_S))
        except NodeError:
            channel.abort()

    def _welcome(self, connection: Connection, call_id: int) -> None:
        hello, channel = connection.hello, connection.channel
        welcome = Welcome(
            self.version,
            b"session",
            b"node",
            10.0,
            self.beat_s,
            self.slots,
            encrypted=self.encrypted,
            frames=FRAMES,
            frame_bytes=FRAME,
            arena_bytes=FRAME * FRAMES,
            in_flight=4 * FRAME,
        )
        fds = [self.arena_fd] if hello.part == "bytes" else []
        channel.send(welcome, call_id=call_id, answer=True, descriptors=fds, timeout=WAIT_S)
        channel.agree(VERSIONS[-1], DEFAULT_LIMITS)
        channel.grant(64 * FRAME)
        if hello.part == "bytes" and self.beats:
            channel.start_heartbeat(self.beat_s)

    def _take(self, connection: Connection, frame: Frame) -> None:
        while self.stopped.is_set():
            self.stopped.wait(0)
            threading.Event().wait(0.01)
        message = frame.message
        assert message is not None
        if isinstance(message, Region):
            (fd,) = frame.descriptors
            connection.region = map_shared(fd, message.nbytes, writable=True)
            os.close(fd)
            return
        answer: Message | None
        if isinstance(message, AskGauges):
            self.looks += 1
            answer = Gauges({"ready": 1, "free": 2}, {})
        elif isinstance(message, TellWeights):
            answer = Done()
        else:
            self.told.append(message)
            answer = self.script(connection, message, frame)
        if answer is not None:
            connection.channel.send(answer, call_id=frame.call_id, answer=True, timeout=WAIT_S)
