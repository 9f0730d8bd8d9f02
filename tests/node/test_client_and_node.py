"""Engines' clients and a real node, without models: blocks, ranks, leases, chains under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import disk_directory
from tests.kit.waiting import until
from tests.node.waits import new_keys, unknown
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.client.remote_index import RemoteIndex
from vllm_ssdkv.node.client.remote_store import RemoteStore
from vllm_ssdkv.node.client.session import Peer
from vllm_ssdkv.node.protocol.messages import Role, StoreSpec
from vllm_ssdkv.node.server.daemon import Node
from vllm_ssdkv.store.index.slot_index import TAKEN
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome

LAYERS, PAGE = 2, 4096
DEADLINE_S = 20.0


@pytest.fixture(params=["unix", "tcp"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ssdkv-node-", dir=disk_directory()) as place:
        listen = f"unix://{tmp_path}/s" if request.param == "unix" else "tcp://127.0.0.1:0"
        given = {
            "listen": [listen],
            "devices": [{"path": place, "capacity": "64MiB"}],
            "dram_gib": "64MiB",
            "store_share": 1.0,
        }
        made = Node(NodeConfig.from_options(given, "options"))
        made.start()
        yield made
        made.close()


class Engine:
    """Scheduler and ranks of an engine, and an HBM of bytes."""

    def __init__(self, node: Node, run: str, ranks: int = 1):
        self.counters = Counters()
        self._spec = StoreSpec({"model": "none"}, LAYERS, PAGE, ranks, 16, "none", "none")
        self._address, self._run = node.addresses[0], run
        self.stores = [self._rank(rank) for rank in range(ranks)]
        peers = [self._peer("scheduler", 0)]
        self.index = RemoteIndex.open(peers, [str(self._address)], self.counters)
        assert self.index.bind(5.0) == [b"weights"] * ranks
        self.hbm: dict[int, bytes] = {}

    def _peer(self, role: Role, rank: int) -> Peer:
        address: Address = self._address
        return Peer(address, None, role, self._run, rank, self._spec)

    def _rank(self, rank: int) -> RemoteStore:
        store = RemoteStore([self._peer("worker", rank)], self.counters, DEADLINE_S)
        self._header = store.open().frame_bytes - LAYERS * PAGE
        store.tell_weights(b"weights")

        def copy_in(frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> None:
            for frame, block in zip(frames.tolist(), blocks.tolist(), strict=True):
                self.hbm[block] = store.load_frames.view(frame)[self._header :].tobytes()

        store.start(copy_in)
        return store

    def claim(self, keys: list[bytes]) -> NDArray[np.int64]:
        return self.index.claim(keys)

    def save(self, slots: NDArray[np.int64], keys: list[bytes], rank: int = 0) -> None:
        """Save claimed blocks, each of which holds its key over and over; wait until written."""
        store, epochs = self.stores[rank], self.index.epochs(slots)
        places = store.reserve_frames(slots, wait=False)
        assert len(places) == len(slots)
        for place, key in zip(places.tolist(), keys, strict=True):
            store.save_frames.view(place)[self._header :] = np.frombuffer(
                key * (LAYERS * PAGE // len(key)), dtype=np.uint8
            )
        store.flush(slots, epochs, keys)
        written = 0
        deadline = time.monotonic() + DEADLINE_S
        while written < len(slots):
            done, failed = store.take_write_results()
            assert not failed
            written += len(done)
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def find(self, keys: list[bytes]) -> int:
        """Count those of these that are found."""
        self.index.step()
        return len(self.index.lookup(keys))

    def load(self, keys: list[bytes]) -> LoadOutcome:
        """Load what is found of these into HBM blocks 1, 2, ..."""
        slots = self.index.lookup(keys)
        store, blocks = self.stores[0], np.arange(1, len(slots) + 1, dtype=np.int64)
        epochs = self.index.epochs(slots)
        store.load(LoadJob("request", slots, epochs, tuple(keys[: len(slots)]), blocks, len(slots)))
        found = until(lambda: store.take_load_outcomes(0.02))
        return found[0]

    def die(self) -> None:
        """End all sessions without a word."""
        links = [store.stores[0].link for store in self.stores]
        for link in (self.index.members[0].link, *links):
            assert link.session is not None
            link.session.end()
            link.close()

    def close(self) -> None:
        for store in self.stores:
            store.close()
        self.index.close()


@pytest.fixture
def engines(node: Node) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def start(ranks: int = 1) -> Engine:
        made.append(Engine(node, f"run {len(made)}", ranks))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def test_one_engine_loads_what_the_other_saved(engines: Callable[..., Engine]) -> None:
    first, second = engines(), engines()
    keys = new_keys(9)
    slots = first.claim(keys)
    assert second.find(keys) == 0
    assert second.claim(keys).tolist() == [TAKEN] * 9, "it is on its way"
    first.save(slots, keys)
    assert second.find(keys) == 9
    assert second.load(keys).complete
    assert [second.hbm[i + 1] for i in range(9)] == [key * (LAYERS * PAGE // 32) for key in keys]


def test_a_block_is_found_when_every_rank_has_saved_it(engines: Callable[..., Engine]) -> None:
    first, second = engines(2), engines(2)
    keys = new_keys(3)
    slots = first.claim(keys)
    first.save(slots, keys, rank=1)
    assert second.find(keys) == 0
    first.save(slots, keys, rank=0)
    assert second.find(keys) == 3


def test_claims_of_an_engine_that_dies_are_free_again(
    engines: Callable[..., Engine], node: Node
) -> None:
    first, second = engines(), engines()
    keys, stored = new_keys(4), new_keys(2)
    first.save(first.claim(stored), stored)
    first.claim(keys)
    first.index.pin(first.index.lookup(stored))
    first.die()
    until(lambda: len(node.status().sessions) == 2)  # what they had goes a moment later
    until(lambda: node.status().stores[0].pinned == 0)
    assert second.find(stored) == 2
    assert (second.claim(keys) >= 0).all()
    status = node.status()
    assert sum(session.pins for session in status.sessions) == len(keys)


def test_a_reset_is_of_one_engine(engines: Callable[..., Engine]) -> None:
    first, second = engines(), engines()
    keys, others = new_keys(4), new_keys(2)
    second.save(second.claim(keys), keys)
    assert (first.find(keys), first.index.last(keys, 0, 4, [0])) == (4, 4)
    first.index.forget_stored()
    assert (first.find(keys), first.index.last(keys, 0, 4, [0])) == (0, 0)
    assert (second.find(keys), second.index.last(keys, 0, 4, [0])) == (4, 4)
    second.save(second.claim(others), others)
    assert first.find(others) == 2, "what is stored from then on it finds"
    assert first.claim(others).tolist() == [TAKEN] * 2
    old = second.index.lookup(keys).tolist()
    new = first.claim(keys[:2])
    assert (new >= 0).all()
    first.save(new, keys[:2])
    assert first.find(keys) == first.index.last(keys, 0, 4, [0]) == 2
    assert second.find(keys) == 4
    assert second.index.lookup(keys).tolist() == [*new.tolist(), *old[2:]]
    assert second.load(keys).complete
    assert [second.hbm[i + 1][:32] for i in range(4)] == keys


def test_a_reset_holds_in_later_sessions(engines: Callable[..., Engine]) -> None:
    engine = engines()
    keys = new_keys(2)
    engine.index.forget_stored()
    engine.save(engine.claim(keys), keys)
    assert engine.find(keys) == 2
    link = engine.index.members[0].link
    session = link.session
    assert session is not None
    session.end()
    until(lambda: link.session is not None)
    assert engine.find(keys) == 0


def test_a_request_does_not_wait_for_what_it_may_not_find(engines: Callable[..., Engine]) -> None:
    first, second = engines(), engines()
    keys = new_keys(2)
    slots = first.claim(keys)
    second.index.forget_stored()
    assert not second.index.awaits("a", keys, unknown)
    assert first.index.awaits("b", keys, unknown), "others do"
    first.save(slots, keys)


def test_a_stale_slot_is_not_loaded(engines: Callable[..., Engine]) -> None:
    engine = engines()
    keys = new_keys(2)
    engine.save(engine.claim(keys), keys)
    slots = engine.index.lookup(keys)
    engine.index.drop(slots[1:])
    until(lambda: engine.find(keys) == 1)
    job = LoadJob("request", slots, engine.index.epochs(slots), tuple(keys), np.array([1, 2]), 2)
    engine.stores[0].load(job)
    found = until(lambda: engine.stores[0].take_load_outcomes(0.02))
    assert not found[0].complete
    assert engine.hbm == {}


def test_a_request_waits_for_another_engines_and_is_served(engines: Callable[..., Engine]) -> None:
    first, second = engines(), engines()
    keys = new_keys(6)
    assert not first.index.awaits("a", keys, unknown), "nobody computes them"
    assert second.index.awaits("b", keys, unknown)
    for begin in (0, 2, 4):  # chunks of a prompt
        part = keys[begin : begin + 2]
        slots = first.claim(part)
        time.sleep(0.02)
        assert second.index.awaits("b", keys, unknown), "saved by nobody yet"
        first.save(slots, part)
    until(lambda: not second.index.awaits("b", keys, unknown))
    assert second.find(keys) == 6
    assert second.counters.total("prefix_waits", end="served") == 1


@pytest.mark.parametrize("how", ["dies", "ends"])
def test_a_request_takes_over_from_another_engines(
    engines: Callable[..., Engine], how: str
) -> None:
    first, second, third = engines(), engines(), engines()
    keys = new_keys(6)
    assert not first.index.awaits("a", keys, unknown)
    first.save(first.claim(keys[:2]), keys[:2])
    assert second.index.awaits("b", keys, unknown)
    if how == "dies":
        first.die()
    else:
        first.index.computes_no_more("a")
    until(lambda: not second.index.awaits("b", keys, unknown))
    assert third.index.awaits("c", keys, unknown), "one takes over, not all"
    assert second.find(keys) == 2
    slots = second.claim(keys[2:])
    assert (slots >= 0).all()
    second.save(slots, keys[2:])
    until(lambda: not third.index.awaits("c", keys, unknown))
    assert third.find(keys) == 6
