"""A worker's view of two nodes: loads that fail or are late, and what comes too late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.waiting import until
from tests.node.client.scripted_node import FRAME, Connection, ScriptedNode
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client import remote_store
from vllm_ssdkv.node.client.hedging import LEAST_SAMPLES, HedgeBudget, LoadTimes
from vllm_ssdkv.node.client.remote_store import RemoteStore
from vllm_ssdkv.node.client.rendezvous import Rendezvous
from vllm_ssdkv.node.protocol.channel import Frame
from vllm_ssdkv.node.protocol.messages import (
    Arrived,
    Copied,
    Load,
    LoadEnded,
    Message,
    pack,
    unpack,
)
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome

DEADLINE_S = 5.0
NONE = pack([])


class Script:
    """Answers of a node whose frames all hold its ``mark``; tests change them."""

    def __init__(self, mark: int):
        self.mark = mark
        self.late = False
        self.complete = True
        self.at_once = False
        """The end of a load comes with its blocks."""
        self.held: list[tuple[Connection, Load, int]] = []
        """Loads that came while it was late."""
        self.copied = 0

    def __call__(self, connection: Connection, message: Message, frame: Frame) -> Message | None:
        match message:
            case Load():
                self.held.append((connection, message, frame.call_id))
                if not self.late:
                    self.go_on()
            case Copied():
                self.copied += 1
                if self.at_once:
                    return None
                connection.push(LoadEnded(True, NONE, NONE, 16), frame.call_id)
            case _:
                pass
        return None

    def go_on(self) -> None:
        """Answer what was held."""
        while self.held:
            connection, load, call = self.held.pop()
            blocks = [block for block in unpack(load.blocks).tolist() if block]
            if not self.complete:
                connection.push(LoadEnded(False, NONE, NONE), call)
                continue
            offsets = np.arange(len(blocks)) * FRAME
            connection.node.arena[:] = self.mark
            ended = LoadEnded(True, NONE, NONE, 16) if self.at_once else None
            connection.push(Arrived(0, pack(blocks), pack(offsets), ended), call)


class Worker:
    """A store in two nodes, and an HBM of bytes."""

    def __init__(self, nodes: list[ScriptedNode]):
        self.counters = Counters()
        peers = [node.peer("worker") for node in nodes]
        self.store = RemoteStore(peers, self.counters, DEADLINE_S)
        self.store.open()
        self.store.tell_weights(b"weights")
        self.hbm: dict[int, int] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        """Called before a copy reads its frames."""
        self.store.start(self._copy_in)

    def _copy_in(self, frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> None:
        self.meanwhile()
        for frame, block in zip(frames.tolist(), blocks.tolist(), strict=True):
            self.hbm[block] = int(self.store.load_frames.view(frame)[0])

    def load(self, blocks: list[int], *, node: int, other: bool) -> None:
        """Ask for blocks of this node, which the other one has, too."""
        slots = np.arange(len(blocks), dtype=np.int64) * 2 + node
        keys = tuple(bytes([i]) * 32 for i in range(len(blocks)))
        others = np.arange(len(blocks) if other else 0, dtype=np.int64) * 2 + 1 - node
        targets = np.array(blocks, dtype=np.int64)
        self.store.load(
            LoadJob(
                *("request", slots, slots, keys, targets, len(blocks)),
                others=others,
                other_epochs=others,
            )
        )

    def loaded(self) -> LoadOutcome:
        """Outcome of the oldest load that has ended."""
        found = until(lambda: self.store.take_load_outcomes(0.01))
        return found[0]


@pytest.fixture
def scripts() -> list[Script]:
    return [Script(11), Script(22)]


@pytest.fixture
def worker(tmp_path: Path, scripts: list[Script]) -> Iterator[Worker]:
    nodes = []
    for number, script in enumerate(scripts):
        place = tmp_path / str(number)
        place.mkdir()
        nodes.append(ScriptedNode(place, script))
    made = Worker(nodes)
    yield made
    made.store.close()
    for node in nodes:
        node.kill()


def know_times(worker: Worker) -> None:
    """Have the store measure what loads take."""
    for _ in range(LEAST_SAMPLES):
        for node in (0, 1):
            worker.load([1], node=node, other=False)
            assert worker.loaded().complete
    worker.hbm.clear()


def test_a_late_node_is_overtaken_and_its_bytes_land_nowhere(
    worker: Worker, scripts: list[Script]
) -> None:
    know_times(worker)
    scripts[0].late = True
    worker.load([5, 6], node=0, other=True)
    outcome = worker.loaded()
    assert outcome.complete
    assert outcome.tokens_from_dram == 16, "counted once"
    assert worker.hbm == {5: 22, 6: 22}
    assert worker.counters.total("pool_loads", kind="hedged") == 1
    assert worker.counters.total("pool_loads", kind="overtaken") == 1
    # Another request has the blocks by now.
    before = scripts[0].copied
    worker.hbm.update({5: 0, 6: 0})
    until(lambda: scripts[0].held)
    scripts[0].go_on()
    until(lambda: scripts[0].copied > before)
    assert worker.hbm == {5: 0, 6: 0}
    scripts[0].late = False
    worker.load([7], node=0, other=False)  # a busy machine could overtake it again
    assert worker.loaded().complete
    assert worker.hbm[7] == 11, "it is still in use"


def test_before_anything_was_measured_nobody_is_overtaken(
    worker: Worker, scripts: list[Script]
) -> None:
    scripts[0].late = True
    worker.load([5], node=0, other=True)
    time.sleep(0.1)
    assert worker.store.take_load_outcomes() == []
    until(lambda: scripts[0].held)
    scripts[0].go_on()
    assert worker.loaded().complete
    assert worker.hbm == {5: 11}


def test_what_a_node_does_not_bring_another_one_brings(
    worker: Worker, scripts: list[Script]
) -> None:
    scripts[0].complete = False
    worker.load([5, 6], node=0, other=True)
    assert worker.loaded().complete
    assert worker.hbm == {5: 22, 6: 22}
    assert worker.counters.total("pool_loads", kind="failed_over") == 1
    worker.load([7], node=0, other=False)
    assert not worker.loaded().complete
    scripts[1].complete = False
    worker.load([8], node=0, other=True)
    assert not worker.loaded().complete
    assert worker.hbm == {5: 22, 6: 22}


def test_the_time_of_a_node_begins_when_it_is_asked(
    worker: Worker, scripts: list[Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that takes over from a slow one is not slow for that."""
    recorded: list[float] = []
    monkeypatch.setattr(LoadTimes, "record", lambda _, seconds, blocks: recorded.append(seconds))
    scripts[0].late, scripts[0].complete = True, False
    late_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0])
    monkeypatch.setattr(remote_store, "time", clock)
    worker.load([5], node=0, other=True)
    until(lambda: scripts[0].held)
    late_s[0] = 3600.0
    scripts[0].go_on()
    assert worker.loaded().complete
    assert len(recorded) == 1
    assert recorded[0] < late_s[0]


def test_bytes_of_a_node_that_leaves_while_they_are_copied_are_brought_again(
    worker: Worker, scripts: list[Script]
) -> None:
    scripts[0].late = scripts[0].at_once = True
    worker.load([5, 6], node=0, other=True)
    until(lambda: scripts[0].held)
    node = scripts[0].held[0][0].node

    def leave() -> None:
        worker.meanwhile = lambda: None
        for connection in node.connections:
            connection.channel.abort()
        node.arena[:] = 99

    worker.meanwhile = leave
    scripts[0].go_on()
    assert worker.loaded().complete
    assert worker.hbm == {5: 22, 6: 22}


def test_nothing_lands_after_a_load_has_failed(worker: Worker, scripts: list[Script]) -> None:
    scripts[0].late = True
    scripts[1].complete = False
    slots = np.array([0, 1], dtype=np.int64)
    keys, blocks = (b"a" * 32, b"b" * 32), np.array([5, 6], dtype=np.int64)
    worker.store.load(LoadJob("request", slots, slots, keys, blocks, 2))
    assert not worker.loaded().complete
    until(lambda: scripts[0].held)
    scripts[0].go_on()
    until(lambda: scripts[0].copied)
    assert worker.hbm == {}


def test_hedges_are_a_share_of_the_loads() -> None:
    budget = HedgeBudget()
    spent = 0
    for _ in range(400):
        budget.earn()
        spent += budget.spend()
    assert spent == 100


def test_times_of_old_loads_are_forgotten() -> None:
    times = LoadTimes()
    assert times.late(1) is None
    for _ in range(300):
        times.record(1.0, 1)
    slow = times.late(1)
    for _ in range(300):
        times.record(0.1, 1)
    assert slow == pytest.approx(1.0)
    assert times.late(1) == pytest.approx(0.1)


def test_a_node_that_leaves_moves_only_its_own_runs() -> None:
    names = [f"tcp://10.0.0.{i}:7070" for i in range(4)]
    every, fewer = Rendezvous(names), Rendezvous(names[:3])
    heads = [bytes([i % 256, i // 256]) * 16 for i in range(2000)]
    homes = [every.ranked(head)[0] for head in heads]
    assert all(400 < homes.count(node) < 600 for node in range(4))
    for head, home in zip(heads, homes, strict=True):
        kept = [node for node in every.ranked(head) if node != 3]
        assert list(fewer.ranked(head)) == kept
        assert home == 3 or fewer.ranked(head)[0] == home
