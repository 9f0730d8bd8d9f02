"""A node and an engine's halves on two hosts: the cable is pulled out, and put in again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.node.networks import NO_NAMESPACES, Host, two_hosts
from tests.node.server.attacker import SPEC, Attacker
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.node.client.remote_index import RemoteIndex
from vllm_ssdkv.node.client.session import Peer
from vllm_ssdkv.node.protocol.credentials import Credentials
from vllm_ssdkv.node.protocol.messages import Claim, Claimed, Save, Taken, unpack

pytestmark = [
    pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES or "it runs"),
    pytest.mark.slow,
]

LEASE_S = 1.5
KEY = bytes(31) + b"k"


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as found:
        yield found


def store_a_block(address: Address, keys: Path) -> None:
    """Store a block, as an engine of one worker does."""
    with (
        Attacker(address, "scheduler", "first", keys=keys) as scheduler,
        Attacker(address, "worker", "first", keys=keys) as worker,
    ):
        claimed = scheduler.call(Claim(KEY)).message
        assert isinstance(claimed, Claimed)
        frame_bytes = worker.welcome.frame_bytes
        assert worker.bytes is not None
        worker.bytes.credits.add(frame_bytes)  # the node gives more
        save = Save(claimed.slots, claimed.epochs, KEY, b"")
        answer = worker.tell(save, payload=[bytes(frame_bytes)]).message
        assert isinstance(answer, Taken)
        assert len(unpack(answer.lost)) == 0


def test_an_engine_outlives_its_network(
    hosts: tuple[Host, Host], tmp_path: Path, keys: Path
) -> None:
    """Without it nothing is found, nobody waits long, and the node gives up the engine's pins;
    with it again the same is found."""
    here, there = hosts
    address = Address(None, here.address, 7070)
    node = NodeProcess(tmp_path, keys, listen=[str(address)], lease=LEASE_S)
    here.run(node.start)
    try:
        there.run(lambda: store_a_block(address, keys))
        credentials = Credentials.load(keys, "engine")
        peer = Peer(address, credentials, "scheduler", "second", store=SPEC)
        index = there.run(lambda: RemoteIndex.open([peer], [str(address)], Counters()))
        (slot,) = index.lookup([KEY])
        index.pin(index.lookup([KEY]))
        until(lambda: pins(here, node, "second") == 1)

        there.set_link("down")
        index.step()
        begin = time.monotonic()
        assert len(index.lookup([KEY])) == 0
        assert time.monotonic() < begin + 5
        until(lambda: pins(here, node, "second") is None, 5 * LEASE_S)

        there.set_link("up")
        index.step()
        until(lambda: index.lookup([KEY]).tolist() == [slot])
        index.close()
    finally:
        node.kill()
    assert "Traceback" not in node.log()


def pins(host: Host, node: NodeProcess, run: str) -> int | None:
    """Pins of a run; None: the node knows no session of it."""
    sessions = [one for one in host.run(node.status).sessions if one.run == run]
    return sessions[0].pins if sessions else None
