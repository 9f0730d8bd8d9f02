"""Two ends of a channel over each kind of socket, and raw ends for what no channel would send."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.credentials import Credentials
from vllm_ssdkv.node.protocol.frames import DEFAULT_LIMITS, VERSIONS
from vllm_ssdkv.node.protocol.sockets import Listener, connect
from vllm_ssdkv.node.protocol.streams import PlainStream

Kind = Literal["unix", "tcp", "tls"]
KINDS: tuple[Kind, ...] = ("unix", "tcp", "tls")
WAIT_S = 30.0
"""Longer than anything here takes on a busy machine."""


@dataclass
class Ends:
    """Both ends of one connection, after the hellos."""

    engine: Channel
    node: Channel


@contextlib.contextmanager
def linked(kind: Kind, directory: Path, keys: Path, *, agreed: bool = True) -> Iterator[Ends]:
    """Both ends of a connection of this kind; closed at the end."""
    text = f"unix://{directory}/s" if kind == "unix" else "tcp://127.0.0.1:0"
    ours = theirs = None
    if kind == "tls":
        ours, theirs = Credentials.load(keys, "node"), Credentials.load(keys, "engine")
    listener = Listener(Address.parse(text), ours)
    accepted: list[Channel] = []

    def accept() -> None:
        channel = listener.accept()
        assert channel is not None
        channel.handshake(WAIT_S)
        accepted.append(channel)

    thread = threading.Thread(target=accept)
    thread.start()
    engine = connect(listener.address, theirs, WAIT_S)
    thread.join(WAIT_S)
    (node,) = accepted
    listener.close()
    if agreed:
        for channel in (engine, node):
            channel.agree(VERSIONS[-1], DEFAULT_LIMITS)
    try:
        yield Ends(engine, node)
    finally:
        for channel in (engine, node):
            channel.abort()
        for channel in (engine, node):
            channel.close()


@contextlib.contextmanager
def raw_and_channel(*, agreed: bool = True) -> Iterator[tuple[socket.socket, Channel]]:
    """A bare Unix socket, and the channel at its other end."""
    raw, sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.settimeout(WAIT_S)
    channel = Channel(PlainStream(sock, "a test"), "a test", is_unix=True)
    if agreed:
        channel.agree(VERSIONS[-1], DEFAULT_LIMITS)
    try:
        yield raw, channel
    finally:
        raw.close()
        channel.close()


def channel_pair() -> tuple[Channel, Channel]:
    """Two ends of one channel, on a pair of Unix sockets."""
    ours, theirs = (
        Channel(PlainStream(sock, "a test"), "a test", is_unix=True)
        for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    )
    return ours, theirs
