"""Channels between two hosts: keys, a slow link, delay and loss, a cable that is pulled out."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.networks import NO_NAMESPACES, NO_NETEM, WAIT_S, Host, two_hosts
from vllm_ssdkv.base.errors import CredentialsError, NodeError, NodeGoneError
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.credentials import Credentials
from vllm_ssdkv.node.protocol.frames import DEFAULT_LIMITS, VERSIONS
from vllm_ssdkv.node.protocol.messages import Copied, Done
from vllm_ssdkv.node.protocol.sockets import Listener, connect

pytestmark = pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES or "it runs")


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as found:
        yield found


@contextlib.contextmanager
def connected(hosts: tuple[Host, Host], keys: Path) -> Iterator[tuple[Channel, Channel]]:
    """An engine's channel on the second host to a node on the first, and the node's."""
    first, second = hosts
    address = Address(None, first.address, 7070)
    listener = first.run(lambda: Listener(address, Credentials.load(keys, "node")))
    accepted: list[Channel | None] = []

    def accept() -> None:
        accepted.append(listener.accept())
        if accepted[0] is not None:
            accepted[0].handshake(WAIT_S)

    thread = threading.Thread(target=accept)
    thread.start()
    engine = second.run(lambda: connect(address, Credentials.load(keys, "engine"), WAIT_S))
    thread.join(WAIT_S)
    (node,) = accepted
    assert node is not None
    for channel in (engine, node):
        channel.agree(VERSIONS[-1], DEFAULT_LIMITS)
    try:
        yield engine, node
    finally:
        for channel in (engine, node):
            channel.abort()
        for channel in (engine, node):
            channel.close()
        listener.close()


def ended(channel: Channel, after: list[float]) -> threading.Thread:
    """A thread that receives until the channel ends, and tells when."""

    def receive() -> None:
        begin = time.monotonic()
        with contextlib.suppress(NodeError):
            while True:
                channel.receive(None)
        after.append(time.monotonic() - begin)

    thread = threading.Thread(target=receive)
    thread.start()
    return thread


def moved(engine: Channel, node: Channel, nbytes: int) -> float:
    """Seconds in which a payload went from the engine to the node and was answered."""
    data, into = os.urandom(nbytes), bytearray(nbytes)
    node.grant(nbytes)

    def serve() -> None:
        frame = node.receive(WAIT_S)
        node.receive_payload([into], WAIT_S)
        node.send(Done(), call_id=frame.call_id, answer=True, timeout=WAIT_S)

    answers: list[object] = []
    threads = [
        threading.Thread(target=serve),
        threading.Thread(target=lambda: answers.append(engine.receive(WAIT_S).message)),
    ]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    engine.send(Copied(1), [data], call_id=1, timeout=WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)
    assert answers == [Done()]
    assert into == data
    return time.monotonic() - begin


def test_hosts_with_keys_exchange_bytes(hosts: tuple[Host, Host], keys: Path) -> None:
    with connected(hosts, keys) as (engine, node):
        assert engine.peer == "tcp://10.77.0.1:7070"
        assert node.peer.startswith("tcp://10.77.0.2:")
        moved(engine, node, 5 * MIB)


def test_hosts_without_keys_exchange_nothing(hosts: tuple[Host, Host], keys: Path) -> None:
    first, second = hosts
    address = Address(None, first.address, 7070)
    with pytest.raises(CredentialsError):
        first.run(lambda: Listener(address, None))
    listener = first.run(lambda: Listener(address, Credentials.load(keys, "node")))
    with pytest.raises(CredentialsError):
        second.run(lambda: connect(address, None, WAIT_S))
    listener.close()


def test_a_slow_link_is_no_silence(hosts: tuple[Host, Host], keys: Path) -> None:
    """A payload that takes longer than the lease, with no room for a heartbeat beside it."""
    second = hosts[1]
    limit = ("tbf", "rate", "40mbit", "burst", "64k", "latency", "200ms")
    second.command("tc", "qdisc", "add", "dev", second.device, "root", *limit)
    with connected(hosts, keys) as (engine, node):
        engine.silence_s = node.silence_s = 0.5
        for channel in (engine, node):
            channel.start_heartbeat(0.1)
        assert moved(engine, node, 4 * MIB) > 0.5


@pytest.mark.parametrize("busy", [False, True])
def test_a_pulled_cable_ends_both_sides(
    hosts: tuple[Host, Host], keys: Path, *, busy: bool
) -> None:
    """Nothing tells a host that the other is away: silence does, and the deadline of a send."""
    after: list[float] = []
    with connected(hosts, keys) as (engine, node):
        engine.silence_s = node.silence_s = 0.6
        for channel in (engine, node):
            channel.start_heartbeat(0.1)
        threads = [ended(engine, after), ended(node, after)]
        time.sleep(1.0)
        assert after == []
        hosts[0].set_link("down")
        if busy:
            engine.credits.add(64 * MIB)
            begin = time.monotonic()
            with pytest.raises(NodeGoneError):
                engine.send(Copied(1), [bytes(64 * MIB)], timeout=1.0)
            assert time.monotonic() < begin + 5
        for thread in threads:
            thread.join(WAIT_S)
    assert len(after) == 2
    assert all(1.0 < seconds < 8.0 for seconds in after)


def test_a_cable_that_is_out_for_a_moment_ends_nothing(
    hosts: tuple[Host, Host], keys: Path
) -> None:
    with connected(hosts, keys) as (engine, node):
        moved(engine, node, MIB)
        hosts[0].set_link("down")
        time.sleep(0.3)
        hosts[0].set_link("up")
        moved(engine, node, MIB)


@pytest.mark.skipif(bool(NO_NETEM), reason=NO_NETEM or "it runs")
def test_delay_and_loss_change_no_byte(hosts: tuple[Host, Host], keys: Path) -> None:
    for host in hosts:
        fault = ("netem", "delay", "10ms", "5ms", "loss", "2%", "reorder", "10%")
        host.command("tc", "qdisc", "add", "dev", host.device, "root", *fault)
    with connected(hosts, keys) as (engine, node):
        assert moved(engine, node, 2 * MIB) > 0.01
