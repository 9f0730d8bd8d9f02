"""Traffic of a volume session: turns of the drives, and what is late."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.clock import Clock
from tests.kit.waiting import until
from tests.node.client.scripted_node import Connection, ScriptedNode
from vllm_ssdkv.node.client import volume_wire
from vllm_ssdkv.node.client.session import Session
from vllm_ssdkv.node.client.volume_wire import VolumeWire, WirePart
from vllm_ssdkv.node.protocol.channel import Frame
from vllm_ssdkv.node.protocol.messages import Message, MoveBytes, Moved, unpack
from vllm_ssdkv.store.io.engines.protocol import Op

DEADLINE_S = 1.5
STEP_S = 0.05
"""Time that passes at once: less than is left from when a part fails to the deadline."""
WAIT_S = 10.0
PAGE = 4096
MIB = 1 << 20


class Drives:
    """A node's drives, which hold one byte each: 1 more than their number. Tests hold answers."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        """Drive of each frame."""
        self.hung: set[int] = set()
        self.pause: Callable[[], None] = lambda: None
        """Before each answer."""
        self.held: list[Callable[[], None]] = []
        """Answers of hung drives."""

    def __call__(self, connection: Connection, message: Message, frame: Frame) -> Message | None:
        assert isinstance(message, MoveBytes)
        self.asked.append(message.drive)
        if frame.payload_bytes:
            connection.channel.discard_payload(WAIT_S)
        self.pause()

        def answer() -> None:
            nbytes = 0 if message.write else int(unpack(message.lengths).sum())
            connection.channel.send(
                Moved(message.lengths),
                [bytes([message.drive + 1]) * nbytes] if nbytes else [],
                call_id=frame.call_id,
                answer=True,
                timeout=WAIT_S,
            )

        if message.drive in self.hung:
            self.held.append(answer)
        else:
            answer()
        return None


class Engine:
    """An arena, and a wire of two drives, for which time passes when a test lets it."""

    def __init__(self, node: ScriptedNode, clock: Clock):
        self.clock, self.looks = clock, 0
        self.memory = np.zeros(32 * MIB, dtype=np.uint8)
        self.session = Session.open(node.peer("volume"), with_bytes=True, timeout=WAIT_S)
        self.ended: dict[WirePart, tuple[int, float]] = {}
        """First result of each part, and the seconds that it took."""
        self.over = threading.Event()
        self.caught_up: list[int] = []
        self.wire: VolumeWire | None = None

    def start(self, window: int = 32 * MIB) -> None:
        assert self.session.bytes is not None
        self.wire = VolumeWire(
            self.session,
            self.session.bytes,
            self.memory,
            drives=2,
            window=window,
            deadline_s=DEADLINE_S,
            over=lambda _: self.over.set(),
            caught_up=self.caught_up.append,
        )
        take_late = self.wire._take_late

        def counted() -> list[WirePart]:
            self.looks += 1
            return take_late()

        self.wire._take_late = counted  # type: ignore[method-assign]
        self.wire.start()

    def pass_time(self, seconds: float = STEP_S) -> None:
        """Let time pass, and what is late by then be found: by the second look from now on, which
        has told of it before the third."""
        wire = self.wire
        assert wire is not None
        for _ in range(round(seconds / STEP_S)):
            self.clock.sleep(STEP_S)
            looks = self.looks + 3
            until(lambda: wire.over or (self.looks >= looks and not self.session.ended))  # noqa: B023

    def _ended(self, part: WirePart, results: NDArray[np.int64]) -> None:
        assert part not in self.ended, "a part ends once"
        self.ended[part] = int(results[0]), self.clock.now - part.asked

    def part(self, drive: int, place: int = 0, nbytes: int = PAGE, op: Op = Op.READ) -> WirePart:
        one = np.ones(1, dtype=np.int64)
        return WirePart(op, drive, 0 * one, nbytes * one, place * one, self._ended, self.clock.now)

    def submit(self, *parts: WirePart) -> None:
        assert self.wire is not None
        self.wire.submit(list(parts))

    def result(self, part: WirePart) -> int:
        until(lambda: part in self.ended)
        return self.ended[part][0]


@pytest.fixture
def drives() -> Drives:
    return Drives()


@pytest.fixture
def node(tmp_path: Path, drives: Drives) -> Iterator[ScriptedNode]:
    made = ScriptedNode(tmp_path, drives)
    yield made
    made.kill()


@pytest.fixture
def engine(node: ScriptedNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    clock = Clock()
    clock.govern(monkeypatch, volume_wire)
    made = Engine(node, clock)
    yield made
    assert made.wire is not None
    made.wire.end()
    assert made.wire.join(WAIT_S)


def test_drives_take_turns(engine: Engine, drives: Drives) -> None:
    engine.start()
    parts = [engine.part(drive) for drive in (0, 1) for _ in range(20)]
    engine.submit(*parts)
    assert {engine.result(part) for part in parts} == {PAGE}
    assert drives.asked == [0, 1] * 20


def test_a_late_part_fails_alone_and_its_answer_is_forgotten(
    engine: Engine, drives: Drives
) -> None:
    engine.start()
    drives.hung = {0}
    late = engine.part(0)
    engine.submit(late)
    until(lambda: drives.held)
    while late not in engine.ended:
        other = engine.part(1, PAGE)
        engine.submit(other)
        assert engine.result(other) == PAGE
        engine.pass_time()
    code, spent_s = engine.ended[late]
    assert code == -errno.ETIMEDOUT
    assert spent_s < DEADLINE_S
    assert engine.caught_up == []
    drives.hung = set()
    drives.held.pop()()
    until(lambda: engine.caught_up == [0])
    again = engine.part(0, 2 * PAGE)
    engine.submit(again)
    assert engine.result(again) == PAGE
    assert engine.memory[: 3 * PAGE].reshape(3, PAGE)[:, 0].tolist() == [0, 2, 1]
    assert not engine.over.is_set()


def test_a_long_queue_ends_no_session_while_answers_come(engine: Engine, drives: Drives) -> None:
    engine.start(window=2 * PAGE)  # one part at a time
    drives.pause = lambda: engine.pass_time(0.1)
    parts = [engine.part(0, i * PAGE) for i in range(40)]
    engine.submit(*parts)
    results = [engine.result(part) for part in parts]
    served = results.count(PAGE)
    assert 0 < served < 40
    assert results == [PAGE] * served + [-errno.ETIMEDOUT] * (40 - served)
    assert all(spent_s < DEADLINE_S for _, spent_s in engine.ended.values())
    assert (engine.memory[served * PAGE :] == 0).all()
    last = engine.part(0)
    engine.submit(last)
    assert engine.result(last) == PAGE
    assert not engine.over.is_set()


def test_a_node_that_answers_nothing_is_given_up_however_much_is_sent(
    engine: Engine, drives: Drives
) -> None:
    engine.start()
    drives.hung = {0, 1}
    parts: list[WirePart] = []
    while not engine.over.is_set():
        parts.append(engine.part(len(parts) % 2))
        engine.submit(parts[-1])
        until(lambda: len(drives.asked) == len(parts))  # it was sent before time passes
        engine.pass_time()
    assert {engine.result(part) for part in parts} == {-errno.ENOTCONN}
    assert engine.ended[parts[0]][1] < DEADLINE_S
    assert (engine.memory == 0).all()


def test_what_cannot_be_sent_fails_before_the_deadline(engine: Engine, node: ScriptedNode) -> None:
    for connection in node.connections:
        connection.channel.grant(64 * MIB)
    engine.start(window=64 * MIB)
    node.stopped.set()  # its heartbeats go on
    parts = [engine.part(i % 2, i * MIB, MIB, Op.WRITE) for i in range(20)]
    engine.submit(*parts)
    while not engine.over.is_set():
        engine.pass_time()
    assert {engine.result(part) for part in parts} <= {-errno.ENOTCONN, -errno.ETIMEDOUT}
    node.stopped.clear()
    assert all(spent_s < DEADLINE_S for _, spent_s in engine.ended.values())
