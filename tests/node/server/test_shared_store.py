"""Claims, saves, loads and leases of a node, with two ranks and no vLLM."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import disk_directory
from tests.kit.waiting import until
from tests.node.server.attacker import Attacker
from vllm_ssdkv.base.errors import NodeRefusedError, StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.client.remote_store import RemoteStore
from vllm_ssdkv.node.client.session import Peer, Session
from vllm_ssdkv.node.protocol.messages import (
    MAX_ENTRIES,
    NO_ROOM,
    TAKEN,
    AskGauges,
    Bind,
    Bound,
    Claim,
    Claimed,
    Drop,
    Gauges,
    Lookup,
    Pin,
    Role,
    Slots,
    StoreSpec,
    Unpin,
    pack,
    pack_keys,
    unpack,
)
from vllm_ssdkv.node.server.daemon import Node
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome

SPEC = StoreSpec({"model": "m", "tp_size": 2}, 2, 4096, 2, 16, "m", "m")
WAIT_S = 20.0
KEYS = [bytes([n]) * 32 for n in range(1, 9)]


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="ssdkv-node-", dir=disk_directory()) as root:
        made = start(Path(root))
        yield made
        assert made.close()


def start(root: Path, **more: object) -> Node:
    """A node in this process."""
    options: dict[str, object] = {
        "listen": [f"unix://{root}/s"],
        "devices": [{"path": f"{root}/ssd", "capacity": "64MiB"}],
        "dram_gib": "16MiB",
        "lease": 2.0,
        **more,
    }
    node = Node(NodeConfig.from_options(options))
    node.start()
    return node


class Halves:
    """An engine of two ranks: its sessions, and an HBM of bytes for each rank."""

    def __init__(self, node: Node, run: str, spec: StoreSpec = SPEC):
        address = node.addresses[0]
        self.scheduler = Session.open(
            Peer(address, None, "scheduler", run, store=spec), with_bytes=False, timeout=WAIT_S
        )
        self.workers: list[RemoteStore] = []
        self.hbm: list[dict[int, bytes]] = []
        for rank in range(spec.ranks):
            role: Role = "worker"
            peer = Peer(address, None, role, run, rank, spec)
            store = RemoteStore([peer], Counters(), 5.0)
            store.open()
            store.tell_weights(run.encode())
            hbm: dict[int, bytes] = {}
            store.start(self._copier(store, hbm))
            self.workers.append(store)
            self.hbm.append(hbm)

    @staticmethod
    def _copier(
        store: RemoteStore, hbm: dict[int, bytes]
    ) -> Callable[[NDArray[np.int32], NDArray[np.int64]], None]:
        def copy(frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> None:
            for frame, block in zip(frames.tolist(), blocks.tolist(), strict=True):
                hbm[block] = store.load_frames.view(frame)[-4096:].tobytes()

        return copy

    def claim(self, keys: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = self.scheduler.call(Claim(pack_keys(keys)), Claimed)
        return unpack(found.slots), unpack(found.epochs)

    def find(self, keys: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = self.scheduler.call(Lookup(pack_keys(keys)), Slots)
        return unpack(found.slots), unpack(found.epochs)

    def save(
        self, rank: int, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: list[bytes]
    ) -> None:
        worker = self.workers[rank]
        places = worker.reserve_frames(slots, wait=False)
        assert len(places) == len(slots)
        for key, place in zip(keys, places.tolist(), strict=True):
            worker.save_frames.view(place)[:] = key[0] + rank
        worker.flush(slots, epochs, keys)

    def written(self, rank: int, count: int) -> tuple[list[int], list[int]]:
        """Slots that were written and that failed, as soon as they are so many."""
        good: list[int] = []
        bad: list[int] = []
        deadline = time.monotonic() + WAIT_S
        while len(good) + len(bad) < count and time.monotonic() < deadline:
            more, less = self.workers[rank].take_write_results()
            good += [slot for slot, _ in more]
            bad += [slot for slot, _ in less]
            time.sleep(0.005)
        return sorted(good), sorted(bad)

    def store(self, keys: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Store blocks on both ranks; their slots."""
        slots, epochs = self.claim(keys)
        for rank in range(2):
            self.save(rank, slots, epochs, keys)
        for rank in range(2):
            assert self.written(rank, len(keys)) == (sorted(slots.tolist()), [])
        self.scheduler.tell(Unpin(pack(slots), pack(epochs)))
        return slots, epochs

    def load(
        self, rank: int, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: list[bytes]
    ) -> LoadOutcome:
        blocks = np.arange(1, len(slots) + 1, dtype=np.int64)
        self.workers[rank].load(LoadJob("r", slots, epochs, tuple(keys), blocks))
        (outcome,) = self.workers[rank].take_load_outcomes(WAIT_S)
        return outcome

    def gauges(self) -> dict[str, int]:
        return dict(self.scheduler.call(AskGauges(), Gauges).gauges)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()


@pytest.fixture
def engines(node: Node) -> Iterator[list[Halves]]:
    made = [Halves(node, run) for run in ("one", "two")]
    yield made
    for engine in made:
        engine.close()


def test_a_block_is_found_when_all_ranks_have_saved_it(engines: list[Halves]) -> None:
    one, two = engines
    slots, epochs = one.claim(KEYS[:3])
    assert len(two.find(KEYS)[0]) == 0
    one.save(0, slots, epochs, KEYS[:3])
    assert one.written(0, 3) == (sorted(slots.tolist()), [])
    assert len(two.find(KEYS)[0]) == 0
    assert two.claim(KEYS[:1])[0].tolist() == [TAKEN]
    one.save(1, slots, epochs, KEYS[:3])
    assert one.written(1, 3) == (sorted(slots.tolist()), [])
    found, uses = two.find(KEYS)
    assert found.tolist() == slots.tolist()
    for rank in range(2):
        outcome = two.load(rank, found, uses, KEYS[:3])
        assert outcome.complete
        assert outcome.tokens_from_dram == 3 * SPEC.block_tokens
        wanted = [bytes([key[0] + rank]) * 4096 for key in KEYS[:3]]
        assert [two.hbm[rank][block] for block in (1, 2, 3)] == wanted


def test_a_load_of_what_is_not_there_any_more_fails(engines: list[Halves]) -> None:
    one, two = engines
    slots, epochs = one.store(KEYS[:2])
    outcome = two.load(0, slots, epochs + 1, KEYS[:2])
    assert not outcome.complete
    assert not two.load(0, slots, epochs, KEYS[2:4]).complete
    assert two.load(0, slots, epochs, KEYS[:2]).complete


def test_of_a_load_only_what_is_not_there_is_called_wrong(engines: list[Halves]) -> None:
    one, two = engines
    slots, epochs = one.store(KEYS[:4])
    one.scheduler.tell(Drop(pack(slots[1:2]), pack(epochs[1:2]), "weights"))
    until(lambda: len(two.find(KEYS[:4])[0]) == 1)
    outcome = two.load(0, slots, epochs, KEYS[:4])
    assert not outcome.complete
    assert outcome.bad == [(int(slots[1]), int(epochs[1]))]


def test_what_an_engine_has_not_wholly_saved_goes_with_it(
    engines: list[Halves], node: Node
) -> None:
    one, two = engines
    kept, _ = one.store(KEYS[:2])
    slots, epochs = one.claim(KEYS[2:5])
    one.save(0, slots, epochs, KEYS[2:5])
    assert one.written(0, 3)[0] == sorted(slots.tolist())
    one.scheduler.tell(Pin(pack(kept), pack(one.find(KEYS[:2])[1])))
    until(lambda: one.gauges()["pinned"] == 5)
    one.close()
    until(lambda: two.gauges()["pinned"] == 0)
    assert two.find(KEYS)[0].tolist() == kept.tolist()
    until(lambda: node.counters.total("node_pins_released") == 5)
    # Their place and their keys are free again.
    two.store(KEYS[2:5])
    assert len(two.find(KEYS)[0]) == 5


def test_all_pins_of_a_slot_go_with_the_session(engines: list[Halves], node: Node) -> None:
    """More than one message, or one part of the release, has."""
    one, two = engines
    kept, epochs = one.store(KEYS[:1])
    for _ in range(2):
        many = Pin(pack(np.repeat(kept, MAX_ENTRIES)), pack(np.repeat(epochs, MAX_ENTRIES)))
        one.scheduler.tell(many)
    until(lambda: one.gauges()["pinned"] == 1)
    one.scheduler.tell(Pin(pack(kept), pack(epochs)))
    one.gauges()  # all of them have come
    one.close()
    until(lambda: two.gauges()["pinned"] == 0)
    until(lambda: node.counters.total("node_pins_released") == 2 * MAX_ENTRIES + 1)
    assert two.find(KEYS[:1])[0].tolist() == kept.tolist()


def test_blocks_that_are_dropped_on_their_way_are_told_as_failed(tmp_path: Path) -> None:
    node = start(tmp_path, io={"throttle": [{"latency": 0.4}]})
    one, two = Halves(node, "one"), Halves(node, "two")
    slots, epochs = one.claim(KEYS)
    one.save(0, slots, epochs, KEYS)
    until(lambda: one.gauges()["pinned"] == len(KEYS))
    time.sleep(0.1)
    two.scheduler.tell(Drop(pack(slots), pack(epochs), "weights"))
    # The one rank has saved them, the other comes too late.
    good, bad = one.written(0, len(KEYS))
    assert sorted(good + bad) == sorted(slots.tolist())
    assert len(bad) > 0
    one.save(1, slots, epochs, KEYS)
    assert one.written(1, len(KEYS)) == ([], sorted(slots.tolist()))
    one.scheduler.tell(Unpin(pack(slots), pack(epochs)))
    until(lambda: two.gauges()["pinned"] == 0)
    one.close()
    two.close()
    assert node.close()


def test_an_engine_that_is_silent_loses_its_lease(engines: list[Halves], node: Node) -> None:
    _, two = engines
    with Attacker(node.addresses[0], "scheduler", "silent", spec=SPEC, beats=False) as silent:
        silent.call(Claim(pack_keys(KEYS[:2])))
        assert two.gauges()["pinned"] == 2
        until(lambda: two.gauges()["pinned"] == 0)
    assert two.claim(KEYS[:1])[0].tolist()[0] >= 0


def test_a_store_that_is_full_evicts_what_nobody_uses(engines: list[Halves]) -> None:
    one, two = engines
    total = one.scheduler.welcome.num_slots
    keys = [n.to_bytes(32, "little") for n in range(1, total + 2)]
    slots, epochs = one.claim(keys)
    room = int((slots >= 0).sum())
    assert 0 < room <= total
    assert set(slots[room:].tolist()) == {NO_ROOM}
    one.scheduler.tell(Unpin(pack(slots[:room]), pack(epochs[:room])))
    until(lambda: one.gauges()["pinned"] == 0)
    two.store(KEYS)
    assert len(two.find(KEYS)[0]) == len(KEYS)


def test_weights_are_told_within_a_run(engines: list[Halves]) -> None:
    one, two = engines
    assert one.scheduler.call(Bind(1.0), Bound).weights == [b"one", b"one"]
    assert two.scheduler.call(Bind(1.0), Bound).weights == [b"two", b"two"]
    one.workers[0].tell_weights(b"one")
    with pytest.raises(StoreError, match="rank 0 of one has told of other weights"):
        one.workers[0].tell_weights(b"another engine's")


def test_weights_that_nobody_tells_are_waited_for(node: Node) -> None:
    alone = Session.open(
        Peer(node.addresses[0], None, "scheduler", "alone", store=SPEC),
        with_bytes=False,
        timeout=WAIT_S,
    )
    with pytest.raises(NodeRefusedError, match=r"ranks \[0, 1\] of alone have not told"):
        alone.call(Bind(0.1), Bound)
    alone.close()


def test_a_restart_finds_what_was_written(tmp_path: Path) -> None:
    first = start(tmp_path)
    engine = Halves(first, "one")
    slots, _ = engine.store(KEYS)
    engine.close()
    assert first.close()
    second = start(tmp_path)
    engine = Halves(second, "two")
    found, epochs = engine.find(KEYS)
    assert found.tolist() == slots.tolist()
    outcome = engine.load(1, found, epochs, KEYS)
    assert (outcome.complete, outcome.tokens_from_ssd) == (True, 8 * SPEC.block_tokens)
    assert [engine.hbm[1][block + 1][0] for block in range(8)] == [key[0] + 1 for key in KEYS]
    engine.close()
    assert second.close()


def test_stores_have_shares(tmp_path: Path) -> None:
    node = start(tmp_path, store_share=0.5, shares={"large": 0.75})
    engines = [Halves(node, "one")]
    slots = engines[0].scheduler.welcome.num_slots
    with pytest.raises(NodeRefusedError, match=r"no share of 0\.75 left for a store of large"):
        Halves(node, "two", _other("large"))
    engines.append(Halves(node, "two", _other("small")))
    assert engines[1].scheduler.welcome.num_slots == slots
    engines.pop(0).close()
    engines.pop(0).close()
    # Nobody uses the two any more: they give their shares up.
    until(lambda: not node.status().sessions)
    engines.append(Halves(node, "three", _other("large")))
    assert engines[0].scheduler.welcome.num_slots > slots
    assert [store.model for store in node.status().stores] == ["large"]
    engines.pop().close()
    assert node.close()


def _other(model: str) -> StoreSpec:
    return StoreSpec({"model": model, "tp_size": 2}, 2, 4096, 2, 16, model, model)
