"""An engine and its node on two hosts: a slow network, and a cable that is pulled out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.models import prompts
from tests.e2e.node_pool import eventually, whole
from tests.e2e.stock import Stock
from tests.kit.engine_process import LEASE_S, EngineProcess
from tests.kit.node import NodeProcess
from tests.node.networks import NO_NAMESPACES, Host, two_hosts
from vllm_ssdkv.node.protocol.credentials import make_keys

pytestmark = pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES or "it runs")

FIRST = prompts((900, 700, 64), seed=61)
SECOND = prompts((1500, 1300), seed=62)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as found:
        yield found


def engines(host: Host, node: NodeProcess) -> list[str]:
    """Runs of engines that the node knows."""
    sessions = host.run(node.status).sessions
    return [one.run for one in sessions if one.role != "status"]


def test_tokens_of_an_engine_whose_network_goes(
    hosts: tuple[Host, Host], root: Path, models: dict[str, Path], stock: Stock
) -> None:
    """It computes while the cable is out, the node gives up what it held, and both find each other
    again; over a link of 100 Mbit/s and with keys."""
    here, there = hosts
    wanted = [[a.tokens for a in stock.answers("llama", batch)] for batch in (FIRST, SECOND)]
    make_keys(root / "keys", 2)
    address = f"tcp://{here.address}:7070"
    node = NodeProcess(root, root / "keys", listen=[address], lease=LEASE_S)
    slow = ("tbf", "rate", "100mbit", "burst", "64k", "latency", "100ms")
    there.command("tc", "qdisc", "add", "dev", there.device, "root", *slow)
    here.run(node.start)
    options = {
        "nodes": [address],
        "node_keys": str(root / "keys"),
        "load": "always",
        "verify_hits": 0,
        "io": {"deadline": 3.0},
    }
    try:
        with EngineProcess(models["llama"], options, root / "far.log", there.namespace) as engine:
            assert engine.answers(FIRST) == [(tokens, 0) for tokens in wanted[0]]
            found = [whole(prompt) for prompt in FIRST]
            assert engine.answers(FIRST) == list(zip(wanted[0], found, strict=True))

            engine.order(prompts=SECOND)
            time.sleep(0.5)
            there.set_link("down")
            assert [tokens for tokens, _ in engine.ordered_answers()] == wanted[1]
            assert eventually(lambda: not engines(here, node), 5 * LEASE_S)
            status = here.run(node.status)
            assert sum(store.pinned for store in status.stores) == 0
            assert [tokens for tokens, _ in engine.answers(FIRST)] == wanted[0]

            there.set_link("up")
            assert eventually(lambda: engine.metric("node_connected") == 1)
            assert engine.answers(FIRST) == list(zip(wanted[0], found, strict=True))
            assert [tokens for tokens, _ in engine.answers(SECOND)] == wanted[1]
    finally:
        node.kill()
    assert "Traceback" not in node.log()
