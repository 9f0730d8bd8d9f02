"""Silent connections: those before a hello, and those to ``/metrics``, which takes no keys."""

from __future__ import annotations

import contextlib
import socket
import urllib.request
from collections.abc import Iterator

import pytest

from tests.cli.metric_pages import node_collector
from vllm_ssdkv.base.metrics import Counters, counter_key
from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.streams import PlainStream
from vllm_ssdkv.node.server import node_metrics
from vllm_ssdkv.node.server.newcomers import Newcomers

LIMIT = counter_key("node_refusals", cause="limit")
WAIT_S = 60.0


class Peers:
    """Peers that connect and say nothing."""

    def __init__(self, newcomers: Newcomers):
        self._newcomers = newcomers
        self._ends: list[socket.socket] = []
        self.channels: list[Channel] = []

    def connect(self, host: str) -> None:
        ours, theirs = socket.socketpair()
        peer = f"tcp://{host}:{5000 + len(self.channels)}"
        self.channels.append(Channel(PlainStream(ours, peer), peer, is_unix=False))
        theirs.setblocking(False)
        self._ends.append(theirs)
        self._newcomers.add(self.channels[-1])

    def ended(self) -> list[int]:
        """Numbers of those whose connection was ended, in the order in which they came."""
        found = []
        for number, end in enumerate(self._ends):
            with contextlib.suppress(BlockingIOError):
                if end.recv(1) == b"":
                    found.append(number)
        return found

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for end in self._ends:
            end.close()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def peers(counters: Counters) -> Iterator[Peers]:
    found = Peers(Newcomers(counters))
    yield found
    found.close()


def test_the_ninth_of_one_address_ends_its_oldest(peers: Peers, counters: Counters) -> None:
    peers.connect("10.0.0.1")
    for _ in range(8):
        peers.connect("10.0.0.2")
    assert peers.ended() == []
    peers.connect("10.0.0.2")
    peers.connect("[fd00::1]")
    assert peers.ended() == [1]
    assert counters.totals()[LIMIT] == 1


def test_of_many_addresses_the_oldest_goes(peers: Peers, counters: Counters) -> None:
    for number in range(66):
        peers.connect(f"10.0.0.{number}")
    assert peers.ended() == [0, 1]
    assert counters.totals()[LIMIT] == 2


def test_who_has_said_hello_is_no_newcomer(peers: Peers) -> None:
    newcomers = peers._newcomers
    for _ in range(8):
        peers.connect("10.0.0.1")
    newcomers.remove(peers.channels[0])
    newcomers.remove(peers.channels[0])
    assert len(newcomers) == 7
    peers.connect("10.0.0.1")
    assert peers.ended() == []


@pytest.fixture
def port(counters: Counters) -> Iterator[int]:
    """Port of a page with metrics."""
    collector = node_collector({}, {})[0]
    server, found = node_metrics.serve_metrics("127.0.0.1:0", collector, counters)
    yield found
    server.shutdown()
    server.server_close()


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
        return str(answer.read())


def silent(stack: contextlib.ExitStack, port: int) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))


def test_sixteen_read_metrics_at_a_time(
    port: int, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_metrics, "READER_S", WAIT_S)
    with contextlib.ExitStack() as stack:
        readers = [silent(stack, port) for _ in range(40)]
        for reader in readers[:24]:
            assert reader.recv(1) == b""
        assert counters.totals()[LIMIT] == 24
        page(port)  # which ends one more
        assert readers[24].recv(1) == b""
        readers[25].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert readers[25].recv(4).startswith(b"HTTP")


def test_a_reader_has_so_many_seconds(
    port: int, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that says something now and then."""
    monkeypatch.setattr(node_metrics, "READER_S", 0.0)
    with contextlib.ExitStack() as stack:
        reader = silent(stack, port)
        with contextlib.suppress(ConnectionError):
            reader.sendall(b"GET /met")
        assert reader.recv(1) == b""
    assert counters.totals()[LIMIT] == 1
