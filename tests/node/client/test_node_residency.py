"""A worker's view of a node: saves and hits, and a node that dies, stalls or lies."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.waiting import until
from tests.node.client.scripted_node import FRAME, FRAMES, Connection, ScriptedNode
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client import node_residency
from vllm_ssdkv.node.client.node_links import start_links
from vllm_ssdkv.node.client.node_residency import NodeResidency
from vllm_ssdkv.node.protocol.channel import Frame
from vllm_ssdkv.node.protocol.messages import (
    Arrived,
    Copied,
    Discard,
    Load,
    LoadEnded,
    Message,
    Save,
    Taken,
    WriteFailed,
    Written,
    pack,
    unpack,
)
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome

DEADLINE_S = 1.0
NONE = pack([])


class Script:
    """Answers of a node; tests change them."""

    def __init__(self) -> None:
        self.saved: dict[int, bytes] = {}
        """Bytes of saved slots."""
        self.lost: list[int] = []
        """Positions of each save that are not kept."""
        self.silent = False
        self.blocks: list[int] | None = None
        """Blocks that come of a load, in place of those that were asked for."""
        self.complete = True
        self.at_once = False
        """The end of a load comes with its blocks."""
        self.loads: list[Load] = []
        self.copied: list[int] = []

    def __call__(self, connection: Connection, message: Message, frame: Frame) -> Message | None:
        if self.silent:
            return None
        match message:
            case Save(slots, epochs, places=places):
                self._save(connection, unpack(slots), unpack(places))
                kept = [i for i in range(len(unpack(slots))) if i not in self.lost]
                connection.push(Taken(pack(self.lost)), frame.call_id)
                pairs = pack(unpack(slots)[kept]), pack(unpack(epochs)[kept])
                connection.push(Written(*pairs))
            case Load():
                self.loads.append(message)
                blocks = self.blocks or [b for b in unpack(message.blocks).tolist() if b]
                offsets = np.arange(len(blocks)) * FRAME
                for at, block in zip(offsets.tolist(), blocks, strict=True):
                    connection.node.arena[at : at + FRAME] = block
                ended = LoadEnded(self.complete, NONE, NONE, 16) if self.at_once else None
                arrived = Arrived(0, pack(blocks), pack(offsets), ended)
                connection.push(arrived, frame.call_id)
            case Copied(part):
                self.copied.append(part)
                if self.at_once:
                    return None
                copied = self.loads[-1].compared
                ended = LoadEnded(self.complete, NONE, NONE, 16, copied=copied)
                connection.push(ended, frame.call_id, [bytes([77]) * FRAME] if copied else [])
            case _:
                pass
        return None

    def _save(
        self, connection: Connection, slots: NDArray[np.int64], places: NDArray[np.int64]
    ) -> None:
        assert connection.region is not None
        for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
            self.saved[slot] = bytes(connection.region[place : place + FRAME])


class Engine:
    """A worker's store, and an HBM of bytes."""

    def __init__(self, node: ScriptedNode):
        self.counters = Counters()
        self.ended: queue.SimpleQueue[LoadOutcome] = queue.SimpleQueue()
        self.store = NodeResidency(
            node.peer("worker"),
            self.counters,
            DEADLINE_S,
            self.ended.put,
            lambda _connected: None,
            pooled=False,
        )
        start_links([self.store.link])
        self.store.adopt()
        self.store.tell_weights(b"weights")
        self.hbm: dict[int, bytes] = {}
        self._ended: deque[LoadOutcome] = deque()
        self.breaks = False
        self.meanwhile: Callable[[], None] = lambda: None
        """Called before a copy reads its frames."""
        self.store.start(self._copy_in)

    def _copy_in(self, frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> None:
        if self.breaks:
            raise RuntimeError("HBM is gone")
        self.meanwhile()
        assert len(self.store.load_frames.address(frames)) == len(blocks)
        for frame, block in zip(frames.tolist(), blocks.tolist(), strict=True):
            self.hbm[block] = self.store.load_frames.view(frame).tobytes()

    def save(self, *slots: int) -> list[int]:
        """Save as many of these slots as there are places for."""
        wanted = np.array(slots, dtype=np.int64)
        places = self.store.reserve_frames(wanted)
        for slot, place in zip(slots, places.tolist(), strict=False):
            self.store.save_frames.view(place)[:] = slot
        done = wanted[: len(places)]
        self.store.flush(done, done + 100, [bytes([s]) * 32 for s in done.tolist()])
        return [int(slot) for slot in done]

    def written(self, count: int) -> tuple[list[int], list[int]]:
        """Slots that were written and that failed, as soon as they are so many."""
        written: list[int] = []
        failed: list[int] = []
        deadline = time.monotonic() + 20
        while len(written) + len(failed) < count and time.monotonic() < deadline:
            more, less = self.store.take_write_results()
            written += [slot for slot, epoch in more if epoch == slot + 100]
            failed += [slot for slot, epoch in less if epoch == slot + 100]
            time.sleep(0.005)
        return sorted(written), sorted(failed)

    def load(self, *blocks: int, compared: bool = False) -> None:
        """Ask for a hit of as many blocks."""
        slots = np.arange(len(blocks), dtype=np.int64)
        keys = tuple(bytes([s]) * 32 for s in slots.tolist())
        ids = np.array(blocks, dtype=np.int64)
        job = LoadJob("request", slots, slots + 100, keys, ids, len(blocks), compared=compared)
        self.store.load(job)

    def outcomes(self) -> list[LoadOutcome]:
        """Loads that have ended since the last call."""
        self.store.end_if_still()
        return [self.ended.get() for _ in range(self.ended.qsize())]

    def outcome(self, patience_s: float = 20.0) -> LoadOutcome:
        """The next load that ends."""
        until(
            lambda: self._ended,
            "a load hangs",
            seconds=patience_s,
            between=lambda: self._ended.extend(self.outcomes()),
        )
        return self._ended.popleft()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def node(tmp_path: Path, script: Script) -> Iterator[ScriptedNode]:
    made = ScriptedNode(tmp_path, script)
    yield made
    made.kill()


@pytest.fixture
def engine(node: ScriptedNode) -> Iterator[Engine]:
    made = Engine(node)
    yield made
    made.store.close()


def test_blocks_go_through_the_region(engine: Engine, script: Script) -> None:
    for first in (0, 4, 8):  # the places are used again
        slots = engine.save(*range(first, first + 6))
        assert len(slots) == 4, "there are four places"
        assert engine.written(4) == (slots, [])
        assert all(script.saved[slot] == bytes([slot]) * FRAME for slot in slots)
    assert engine.store.open_frames == FRAMES


def test_what_the_node_does_not_keep_has_failed(engine: Engine, script: Script) -> None:
    script.lost = [1]
    engine.save(1, 2, 3)
    assert engine.written(3) == ([1, 3], [2])


def test_a_write_that_failed_is_told_once(engine: Engine, node: ScriptedNode) -> None:
    node.script = _fails
    engine.save(5)
    assert engine.written(1) == ([], [5])
    assert engine.store.take_write_results() == ([], [])


def _fails(connection: Connection, message: Message, frame: Frame) -> None:
    if isinstance(message, Save):
        connection.push(Taken(NONE), frame.call_id)
        for _ in range(2):
            connection.push(WriteFailed(message.slots, message.epochs))


def test_abandoned_blocks_are_not_told_of(engine: Engine, node: ScriptedNode) -> None:
    slots = np.array([1, 2], dtype=np.int64)
    assert len(engine.store.reserve_frames(slots)) == 2
    engine.store.abandon(slots)
    assert len(engine.store.reserve_frames(np.arange(4, dtype=np.int64))) == 4
    engine.store.abandon(np.arange(4, dtype=np.int64))
    node.script = lambda *_: None
    engine.save(7)
    engine.store.abandon(np.array([7], dtype=np.int64))
    until(lambda: Discard(pack([7]), pack([107])) in node.told)
    assert engine.store.take_write_results() == ([], [])


def test_a_hit_is_copied_from_the_nodes_memory(engine: Engine, script: Script) -> None:
    script.blocks = [3, 5]
    engine.load(3, 0, 5)
    outcome = engine.outcome()
    assert outcome.complete
    assert outcome.tokens_from_dram == 16
    assert engine.hbm == {3: bytes([3]) * FRAME, 5: bytes([5]) * FRAME}
    assert script.copied == [0]


def test_a_hit_may_end_with_its_blocks(engine: Engine, script: Script) -> None:
    script.at_once = True
    for block in (3, 4):
        engine.load(block, 0)
        outcome = engine.outcome()
        assert outcome.complete
        assert outcome.tokens_from_dram == 16
        assert outcome.dram_s > 0, "the copy, which the node did not wait for"
        assert engine.hbm[block] == bytes([block]) * FRAME
    until(lambda: script.copied == [0, 0])


def test_a_hit_that_ends_too_early_has_failed(engine: Engine, script: Script) -> None:
    script.at_once = True
    script.blocks = [3]
    engine.load(3, 5)
    assert not engine.outcome().complete
    script.blocks, script.complete = None, False
    engine.load(6)
    assert not engine.outcome().complete
    engine.breaks, script.complete = True, True
    engine.load(7)
    assert not engine.outcome().complete
    until(lambda: len(script.copied) == 3)


@pytest.mark.parametrize("who", ["node", "engine"])
def test_frames_that_a_node_may_have_filled_anew_complete_no_load(
    engine: Engine, node: ScriptedNode, script: Script, who: str
) -> None:
    script.at_once = True

    def end() -> None:
        until(lambda: len(script.loads) == 2)  # the second one is told of, and not yet received
        if who == "node":
            for connection in node.connections:
                connection.channel.abort()
        elif engine.store.link.session is not None:
            engine.store.link.session.end()
        node.arena[:] = 99

    engine.meanwhile = end
    engine.load(3)
    engine.load(4)
    assert [engine.outcome().complete for _ in range(2)] == [False, False]


def test_a_load_may_wait_while_the_node_does_others(
    engine: Engine, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    now = [time.monotonic()]
    monkeypatch.setattr(node_residency, "time", clock)
    still_s = DEADLINE_S + node_residency.CALL_S
    loads: list[tuple[Connection, int, int]] = []

    def hold(connection: Connection, message: Message, frame: Frame) -> None:
        if isinstance(message, Load):
            loads.append((connection, frame.call_id, int(unpack(message.blocks)[0])))

    def bring() -> None:
        connection, call, block = loads.pop(0)
        ended = LoadEnded(True, NONE, NONE, 16)
        connection.push(Arrived(0, pack([block]), pack([0]), ended), call)

    node.script = hold
    engine.load(3)
    engine.load(4)
    until(lambda: len(loads) == 2)
    for _ in range(2):
        now[0] += 0.8 * still_s
        assert engine.outcomes() == []
        bring()
        assert engine.outcome().complete
    engine.load(5)
    until(lambda: len(loads) == 1)
    now[0] += 1.2 * still_s
    assert not engine.outcome().complete, "nothing has come for so long"


@pytest.mark.parametrize(("bound", "value"), [("MAX_LOADING", 5), ("MAX_LOADS", 2)])
def test_a_node_is_asked_for_as_many_loads_as_it_takes(
    engine: Engine, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(node_residency, bound, value)
    loads: list[tuple[Connection, int, list[int]]] = []

    def hold(connection: Connection, message: Message, frame: Frame) -> None:
        if isinstance(message, Load):
            loads.append((connection, frame.call_id, unpack(message.blocks).tolist()))

    node.script = hold
    for first in (3, 5, 7, 9, 11):
        engine.load(first, first + 1)
    for first in (3, 5, 7):
        until(lambda: len(loads) == 2)
        time.sleep(0.05)
        assert engine.outcomes() == []
        assert [blocks[0] for _, _, blocks in loads] == [first, first + 2]
        connection, call, blocks = loads.pop(0)
        ended = LoadEnded(True, NONE, NONE, 16)
        connection.push(Arrived(0, pack(blocks), pack([0, FRAME]), ended), call)
        assert engine.outcome().complete
        engine.outcomes()
    until(lambda: len(loads) == 2)
    engine.load(13, 14)
    node.kill()
    outcomes: list[LoadOutcome] = []

    def all_ended() -> bool:
        outcomes.extend(engine.outcomes())
        return len(outcomes) == 3

    until(all_ended)
    assert not any(outcome.complete for outcome in outcomes)


def test_a_node_calls_wrong_only_what_it_was_asked_for(engine: Engine, node: ScriptedNode) -> None:
    def lie(connection: Connection, message: Message, frame: Frame) -> None:
        if isinstance(message, Load):
            connection.push(LoadEnded(False, pack([1 << 40]), pack([1])), frame.call_id)

    node.script = lie
    engine.load(3)
    outcome = engine.outcome()
    assert (outcome.complete, outcome.bad) == (False, [])


def test_memory_of_a_session_is_unpinned_before_it_goes(engine: Engine, node: ScriptedNode) -> None:
    pinned: list[int] = []

    def pin(address: int, nbytes: int, *, writable: bool) -> Callable[[], bool]:
        assert nbytes > 0
        pinned.append(address)

        def unpin() -> bool:
            pinned.remove(address)
            return True

        return unpin

    engine.store.pin_with(pin)
    assert len(pinned) == 2, "the region and the arena"
    first = set(pinned)
    node.kill()
    node.start()
    until(lambda: engine.store.take_write_results() == ([], []) and first.isdisjoint(pinned))
    assert len(pinned) == 2
    assert engine.store.usable
    engine.store.close()
    assert pinned == []


def test_a_load_that_is_over_brings_no_more_blocks(
    engine: Engine, node: ScriptedNode, script: Script
) -> None:
    script.at_once = True
    engine.load(3)
    assert engine.outcome().complete
    engine.hbm.clear()
    (stream,) = (c for c in node.connections if c.hello.part == "bytes")
    stream.push(Arrived(0, pack([3]), pack([0])), 1)
    until(lambda: engine.counters.total("node_sessions_lost") == 1)
    assert engine.hbm == {}


def test_a_block_to_compare_comes_with_the_end(engine: Engine) -> None:
    engine.load(3, 0, compared=True)
    outcome = engine.outcome()
    assert outcome.complete
    assert outcome.copy is not None
    slot, epoch, copy = outcome.copy
    assert (slot, epoch, copy.tobytes()) == (1, 101, bytes([77]) * FRAME)


def test_a_hit_of_which_a_block_is_missing_has_failed(engine: Engine, script: Script) -> None:
    script.blocks = [3]
    engine.load(3, 5)
    assert not engine.outcome().complete


def test_a_block_that_was_not_asked_for_is_never_copied(engine: Engine, script: Script) -> None:
    script.blocks = [3, 6]
    engine.load(3, 5)
    assert not engine.outcome().complete
    assert engine.hbm == {}
    until(lambda: engine.counters.total("node_sessions_lost") == 1)


def test_a_copy_that_fails_fails_its_load_alone(engine: Engine) -> None:
    engine.breaks = True
    engine.load(3)
    assert not engine.outcome().complete
    engine.breaks = False
    engine.load(4)
    assert engine.outcome().complete


def test_a_node_that_dies_fails_what_is_under_way(
    engine: Engine, node: ScriptedNode, script: Script
) -> None:
    script.silent = True
    engine.save(1, 2)
    engine.load(3)
    until(lambda: len(node.told) == 2)
    node.kill()
    assert not engine.outcome().complete
    assert engine.written(2) == ([], [1, 2])
    assert engine.save(3) == [], "while it is gone there are no places"
    engine.load(4)
    assert not engine.outcome().complete
    script.silent = False
    node.start()
    until(lambda: engine.store.take_write_results() == ([], []) and engine.save(9) == [9])
    assert engine.written(1) == ([9], [])
    engine.load(5)
    assert engine.outcome().complete


def test_places_of_a_session_are_never_those_of_the_next(
    engine: Engine, node: ScriptedNode
) -> None:
    slots = np.array([1], dtype=np.int64)
    (place,) = engine.store.reserve_frames(slots)
    address = engine.store.save_frames.address(np.array([place]))
    node.kill()
    node.start()
    until(lambda: engine.counters.total("node_sessions_lost") == 1)
    time.sleep(0.5)
    engine.store.take_write_results()
    assert engine.store.save_frames.address(np.array([place])) == address, "it is held"
    engine.store.flush(slots, slots + 100, [bytes(32)])
    assert engine.written(1) == ([], [1])
    until(lambda: engine.store.take_write_results() == ([], []) and engine.save(2) == [2])


@pytest.mark.parametrize("beats", [True, False])
def test_a_node_that_stalls_is_given_up(node: ScriptedNode, script: Script, beats: bool) -> None:
    """A node with hanging drives sends heartbeats; a stopped one sends none."""
    node.beats, node.beat_s = beats, 0.2
    engine = Engine(node)
    script.silent = True
    engine.save(1, 2)
    engine.load(3)
    begun = time.monotonic()
    assert not engine.outcome().complete
    assert engine.written(2) == ([], [1, 2])
    assert time.monotonic() - begun < 10 * DEADLINE_S
    engine.store.close()


def test_a_node_with_other_frames_is_not_used(engine: Engine, node: ScriptedNode) -> None:
    """As of a store that is encrypted by now: blocks would lie elsewhere in them."""
    node.kill()
    node.encrypted = True
    node.start()
    until(lambda: engine.counters.total("node_sessions_lost") >= 1)
    time.sleep(1.0)
    engine.store.take_write_results()
    assert engine.save(1) == []
    engine.load(3)
    assert not engine.outcome().complete
    node.encrypted = False
    until(lambda: engine.store.take_write_results() == ([], []) and engine.save(2) == [2])


def test_the_end_waits_for_what_was_flushed(engine: Engine, script: Script) -> None:
    engine.save(1, 2, 3)
    engine.store.close()
    assert sorted(script.saved) == [1, 2, 3]
