"""One engine's clients and several real nodes, without models: homes, replicas, nodes that go."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import disk_directory
from tests.kit.waiting import until
from tests.node.waits import new_keys, unknown
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.client.remote_index import RemoteIndex
from vllm_ssdkv.node.client.remote_store import RemoteStore
from vllm_ssdkv.node.client.rendezvous import Rendezvous
from vllm_ssdkv.node.client.session import Peer, Session
from vllm_ssdkv.node.protocol.messages import Role, StoreSpec
from vllm_ssdkv.node.server.daemon import Node
from vllm_ssdkv.store.index.computed_blocks import RUN_BLOCKS, ComputedBlocks
from vllm_ssdkv.store.index.slot_index import TAKEN
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome

LAYERS, PAGE = 2, 4096
BLOCK = LAYERS * PAGE
DEADLINE_S = 20.0
WORD = b"a key of names, 32 bytes long  \n"


class Site:
    """Nodes of one machine that are ended and started again."""

    def __init__(self, place: Path, count: int, **options: object):
        self.addresses = [f"unix://{place}/{i}" for i in range(count)]
        self._given = [
            {
                "listen": [address],
                "devices": [{"path": str(place / f"ssd{i}"), "capacity": "64MiB"}],
                "dram_gib": "48MiB",
                "store_share": 1.0,
                **options,
            }
            for i, address in enumerate(self.addresses)
        ]
        self.nodes: list[Node | None] = [None] * count

    def start(self, which: int) -> None:
        node = Node(NodeConfig.from_options(self._given[which], "options"))
        node.start()
        self.nodes[which] = node

    def end(self, which: int) -> None:
        node, self.nodes[which] = self.nodes[which], None
        if node is not None:
            node.close()

    def status(self, which: int) -> object:
        node = self.nodes[which]
        assert node is not None
        return node.status()


class Engine:
    """Scheduler and worker of an engine of one rank, and an HBM of bytes."""

    def __init__(self, addresses: list[str], run: str, replicas: int = 1, patience_s: float = 20):
        self.counters = Counters()
        self._addresses, self._run = addresses, run
        self._spec = StoreSpec({"model": "none"}, LAYERS, PAGE, 1, 16, "none", "none")
        self.store = RemoteStore(self._peers("worker"), self.counters, DEADLINE_S)
        self._header = self.store.open(patience_s).frame_bytes - BLOCK
        self.store.tell_weights(b"weights")
        self.store.start(self._copy_in)
        peers = self._peers("scheduler")
        self.index = RemoteIndex.open(peers, addresses, self.counters, replicas, patience_s)
        assert self.index.bind(5.0) == [b"weights"]
        self.hbm: dict[int, bytes] = {}
        self.copies: list[int] = []
        """HBM blocks that something was copied into, in order."""

    def _peers(self, role: Role) -> list[Peer]:
        return [
            Peer(Address.parse(a), None, role, self._run, 0, self._spec) for a in self._addresses
        ]

    def _copy_in(self, frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> None:
        assert len(self.store.load_frames.address(frames)) == len(blocks)
        for frame, block in zip(frames.tolist(), blocks.tolist(), strict=True):
            self.hbm[block] = self.store.load_frames.view(frame)[self._header :].tobytes()
            self.copies.append(block)

    def claim(self, keys: list[bytes]) -> NDArray[np.int64]:
        """Claim the blocks of a request that begins with them, as often as there are replicas."""
        self.step()
        times = range(self.index.node_replicas)
        runs = [keys[i // RUN_BLOCKS * RUN_BLOCKS] for i in range(len(keys)) for _ in times]
        keys = [key for key in keys for _ in times]
        return self.index.claim(keys, of=ComputedBlocks("request", runs))

    def save(self, keys: list[bytes]) -> tuple[int, int]:
        """Store blocks, each of which holds its key over and over; slots written and failed."""
        keys_of = [key for key in keys for _ in range(self.index.node_replicas)]
        claimed = self.claim(keys)
        wanted = np.flatnonzero(claimed >= 0)
        slots, named = claimed[wanted], [keys_of[i] for i in wanted.tolist()]
        places = self.store.reserve_frames(slots, wait=False)
        assert len(places) == len(slots)
        for place, key in zip(places.tolist(), named, strict=True):
            view = self.store.save_frames.view(place)[self._header :]
            view[:] = np.frombuffer(key * (BLOCK // len(key)), dtype=np.uint8)
        self.store.flush(slots, self.index.epochs(slots), named)
        done = failed = 0
        deadline = time.monotonic() + DEADLINE_S
        while done + failed < len(slots):
            good, bad = self.store.take_write_results()
            done, failed = done + len(good), failed + len(bad)
            assert time.monotonic() < deadline
            time.sleep(0.002)
        self.index.unpin(slots)
        return done, failed

    def step(self) -> None:
        self.index.step()

    def find(self, keys: list[bytes]) -> int:
        """Count those of these that are found."""
        self.step()
        return len(self.index.lookup(keys))

    def load(self, keys: list[bytes]) -> LoadOutcome:
        """Load what is found of these into HBM blocks 1, 2, ..."""
        self.step()
        self.ask(keys)
        return self.loaded()

    def ask(self, keys: list[bytes]) -> None:
        slots = self.index.lookup(keys)
        blocks = np.arange(1, len(slots) + 1, dtype=np.int64)
        epochs, (others, theirs) = self.index.epochs(slots), self.index.others(slots)
        named = tuple(keys[: len(slots)])
        self.store.load(
            LoadJob(
                *("request", slots, epochs, named, blocks, len(slots)),
                others=others,
                other_epochs=theirs,
            )
        )

    def loaded(self) -> LoadOutcome:
        found = until(lambda: self.store.take_load_outcomes(0.02))
        return found[0]

    def holds(self, keys: list[bytes]) -> bool:
        """Check whether HBM has these blocks, and nothing else was copied."""
        return [self.hbm.get(i + 1) for i in range(len(keys))] == [k * (BLOCK // 32) for k in keys]

    def connected(self) -> int:
        """Count nodes that both halves have a session with."""
        both = zip(self.index.members, self.store.stores, strict=True)
        self.store.take_write_results()  # takes new sessions up
        return sum(node.connected and store.usable for node, store in both)

    def close(self) -> None:
        self.store.close()
        self.index.close()


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ssdkv-pool-", dir=disk_directory()) as found:
        yield Path(found)


@pytest.fixture
def site(place: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    made = Site(place, 3, **getattr(request, "param", {}))
    for node in range(3):
        made.start(node)
    yield made
    for node in range(3):
        made.end(node)


@pytest.fixture
def engines(site: Site) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def start(replicas: int = 1, patience_s: float = 20) -> Engine:
        made.append(Engine(site.addresses, f"run {len(made)}", replicas, patience_s))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def homes(site: Site, keys: list[bytes]) -> list[tuple[int, ...]]:
    """Order of the nodes for each block of a request."""
    order = Rendezvous(site.addresses)
    return [order.ranked(keys[i // RUN_BLOCKS * RUN_BLOCKS]) for i in range(len(keys))]


def test_a_prefix_lies_in_runs_on_all_nodes_and_is_found_whole(
    engines: Callable[..., Engine], site: Site
) -> None:
    first, second = engines(), engines()
    keys = new_keys(8 * RUN_BLOCKS + 3)
    assert first.save(keys) == (len(keys), 0)
    assert second.find(keys) == len(keys)
    nodes = (second.index.lookup(keys) % 3).tolist()
    assert nodes == [ranked[0] for ranked in homes(site, keys)]
    assert second.load(keys).complete
    assert second.holds(keys)
    assert sorted(second.copies) == list(range(1, len(keys) + 1))
    assert first.save(keys) == (0, 0), "all of them are stored"


@pytest.mark.parametrize(
    "site",
    [{"encryption": {"key_env": "SSDKV_TEST_KEY"}}],
    indirect=True,
)
def test_nodes_that_encrypt_hide_names_each_under_its_own_key(
    engines: Callable[..., Engine],
) -> None:
    first, second = engines(), engines()
    keys = new_keys(3 * RUN_BLOCKS)
    assert first.save(keys) == (len(keys), 0)
    assert second.find(keys) == len(keys)
    assert second.load(keys).complete
    assert second.holds(keys)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSDKV_TEST_KEY", WORD.hex())


def test_replicas_lie_on_the_two_first_nodes_and_serve_each_other(
    engines: Callable[..., Engine], site: Site
) -> None:
    engine = engines(2)
    keys = new_keys(4 * RUN_BLOCKS)
    assert engine.save(keys) == (2 * len(keys), 0)
    engine.step()
    slots = engine.index.lookup(keys)
    others, _ = engine.index.others(slots)
    pairs = zip((slots % 3).tolist(), (others % 3).tolist(), strict=True)
    assert [set(pair) for pair in pairs] == [set(r[:2]) for r in homes(site, keys)]
    engine.ask(keys)
    assert engine.loaded().complete
    # What was found is gone when it is asked for.
    engine.step()
    engine.index.lookup(keys)
    site.end(0)
    engine.ask(keys)
    assert engine.loaded().complete
    assert engine.holds(keys)
    until(lambda: engine.connected() == 2)
    assert engine.find(keys) == len(keys)


@pytest.mark.soak
def test_sixteen_nodes_of_which_some_go_and_come_back(place: Path) -> None:
    site = Site(place, 16)
    for node in range(16):
        site.start(node)
    engine = Engine(site.addresses, "many", replicas=2)
    try:
        keys = new_keys(96 * RUN_BLOCKS)
        assert engine.save(keys) == (2 * len(keys), 0)
        order = homes(site, keys)
        assert {home for ranked in order for home in ranked[:2]} == set(range(16))
        gone = {5, 6, 7}
        for node in gone:
            site.end(node)
        until(lambda: engine.connected() == 13)
        lost = [set(ranked[:2]) <= gone for ranked in order]
        assert engine.find(keys) == (lost.index(True) if any(lost) else len(keys))
        kept = [key for key, none in zip(keys, lost, strict=True) if not none]
        assert engine.load(kept).complete
        assert engine.holds(kept)
        for node in gone:
            site.start(node)
        until(lambda: engine.connected() == 16)
        assert engine.load(keys).complete
        assert engine.holds(keys)
    finally:
        engine.close()
        for node in range(16):
            site.end(node)


def test_without_replicas_the_part_of_a_lost_node_is_missing_and_comes_back(
    engines: Callable[..., Engine], site: Site
) -> None:
    engine = engines()
    keys = new_keys(6 * RUN_BLOCKS)
    engine.save(keys)
    order = [ranked[0] for ranked in homes(site, keys)]
    lost = order[-1]
    site.end(lost)
    until(lambda: engine.connected() == 2)
    assert engine.find(keys) == order.index(lost)
    # Others keep its runs meanwhile.
    again = [key for key, home in zip(keys, order, strict=True) if home == lost]
    written, failed = engine.save(keys)
    assert (written, failed) == (len(again), 0)
    assert engine.find(keys) == len(keys)
    site.start(lost)
    until(lambda: engine.connected() == 3)
    assert engine.find(keys) == len(keys)
    assert engine.load(keys).complete
    assert engine.holds(keys)


def test_a_hit_is_stored_again_where_it_belongs(engines: Callable[..., Engine], site: Site) -> None:
    engine = engines(2)
    keys = new_keys(2 * RUN_BLOCKS)
    site.end(1)
    until(lambda: engine.connected() == 2)
    engine.save(keys)
    site.start(1)
    until(lambda: engine.connected() == 3)
    lacking = sum(1 in ranked[:2] for ranked in homes(site, keys))
    assert engine.save(keys) == (lacking, 0)
    assert engine.save(keys) == (0, 0)


def test_blocks_of_a_node_that_ends_before_they_are_saved_fail(
    engines: Callable[..., Engine], site: Site
) -> None:
    engine = engines()
    keys = new_keys(6 * RUN_BLOCKS)
    slots = engine.claim(keys)
    lost = int(slots[0] % 3)
    site.end(lost)
    until(lambda: engine.connected() == 2)
    places = engine.store.reserve_frames(slots, wait=False)
    assert len(places) == len(slots)
    engine.store.flush(slots, engine.index.epochs(slots), keys)
    ended: list[tuple[int, int]] = []
    wrong: list[tuple[int, int]] = []

    def all_told() -> bool:
        good, bad = engine.store.take_write_results()
        ended.extend(good)
        wrong.extend(bad)
        return len(ended) + len(wrong) == len(slots)

    until(all_told)
    assert {slot % 3 for slot, _ in wrong} == {lost}
    assert {slot for slot, _ in ended} == {s for s in slots.tolist() if s % 3 != lost}


def test_an_engine_starts_while_a_node_is_away(engines: Callable[..., Engine], site: Site) -> None:
    keys = new_keys(4 * RUN_BLOCKS)
    engines(2).save(keys)
    site.end(2)
    late = engines(2, 3.0)
    until(lambda: late.connected() == 2)
    assert late.find(keys) == len(keys)
    site.start(2)
    until(lambda: late.connected() == 3)
    assert late.load(keys).complete
    for node in range(3):
        site.end(node)
    with pytest.raises(StoreError, match="cannot be used"):
        engines(2, 0.1)


def test_requests_of_two_engines_that_ask_at_once_compute_once(
    engines: Callable[..., Engine],
) -> None:
    first, second = engines(), engines()
    keys = new_keys(3 * RUN_BLOCKS)
    first.step()
    assert not first.index.awaits("a", keys, unknown), "nobody computes them"
    for begin in range(0, len(keys), RUN_BLOCKS):  # chunks of a prompt, which has come so far
        second.step()
        assert second.index.awaits("b", keys, unknown)
        assert first.save(keys[: begin + RUN_BLOCKS]) == (RUN_BLOCKS, 0)
        time.sleep(0.01)
    second.step()
    until(lambda: not second.index.awaits("b", keys, unknown))
    assert second.find(keys) == len(keys)
    assert second.counters.total("prefix_waits", end="served") == 1
    first.index.computes_no_more("a")


def test_a_request_takes_over_when_the_other_ends(engines: Callable[..., Engine]) -> None:
    first, second = engines(), engines()
    keys = new_keys(2 * RUN_BLOCKS)
    first.step()
    second.step()
    assert not first.index.awaits("a", keys, unknown)
    assert second.index.awaits("b", keys[4:], unknown, head=keys[0]), "its first blocks are in HBM"
    first.index.computes_no_more("a")
    until(lambda: not second.index.awaits("b", keys[4:], unknown, head=keys[0]))
    assert (second.claim(keys) >= 0).all()


def test_no_node_at_all(engines: Callable[..., Engine], site: Site) -> None:
    engine = engines()
    keys = new_keys(RUN_BLOCKS)
    engine.save(keys)
    for node in range(3):
        site.end(node)
    until(lambda: engine.connected() == 0)
    assert engine.find(keys) == 0
    engine.step()
    assert not engine.index.awaits("a", keys, unknown)
    assert engine.claim(keys).tolist() == [TAKEN] * len(keys)
    engine.index.touch_chain(keys)


def test_a_reset_is_of_one_engine_on_every_node(engines: Callable[..., Engine]) -> None:
    first, second = engines(), engines()
    keys = new_keys(3 * RUN_BLOCKS)
    second.save(keys)
    assert first.find(keys) == len(keys)
    first.index.forget_stored()
    first.step()
    assert first.find(keys) == 0
    assert second.find(keys) == len(keys)
    assert first.save(keys) == (len(keys), 0), "computed anew, they take the place of the old"
    assert first.find(keys) == second.find(keys) == len(keys)


def test_a_session_that_begins_while_the_engine_ends(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, too, and so do its threads."""
    before = set(threading.enumerate())
    engine = Engine(site.addresses, "ends")
    late = engine.store.stores[1].link
    opened, begun = Session.open, threading.Event()

    def slow(peer: Peer, *, with_bytes: bool, timeout: float) -> Session:
        session = opened(peer, with_bytes=with_bytes, timeout=timeout)
        if with_bytes:
            begun.set()
        late._stopping.wait(DEADLINE_S)
        return session

    monkeypatch.setattr(Session, "open", slow)  # before the first try, which may be late
    site.end(1)
    until(lambda: late.session is None)
    lost = late._session
    site.start(1)
    assert begun.wait(DEADLINE_S)
    engine.close()
    assert late._session is not lost
    assert late.session is None
    mine = {thread for thread in set(threading.enumerate()) - before if _is_clients(thread)}
    until(lambda: not any(thread.is_alive() for thread in mine))


def _is_clients(thread: threading.Thread) -> bool:
    names = ("ssdkv-node-bytes", "ssdkv-node-link", "ssdkv-node-watch", "ssdkv-pool")
    return thread.name.startswith(names)
