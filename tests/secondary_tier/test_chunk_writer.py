"""The thread that copies chunks goes on, whatever happens to a chunk, and is patient with each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.waiting import until
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.secondary_tier.chunk_writer import ChunkWrite, ChunkWriter, Pool

ROW = 4096
DEADLINE_S = 0.3
LOOK_S = 0.002
"""Least time between two looks for frames."""


class Frames:
    """A store with a frame for each slot, once ``looks`` have found none."""

    def __init__(self) -> None:
        self.memory = np.zeros((8, ROW), dtype=np.uint8)
        self.save_frames = SimpleNamespace(address=self._address)
        self.looks, self.at_once, self.calls = 0, 8, 0
        self.broken = self.breaks = False
        self.flushed: list[int] = []
        self.given_back: list[int] = []

    def _address(self, frames: NDArray[np.int32]) -> NDArray[np.uint64]:
        return np.array([self.memory[f].ctypes.data for f in frames.tolist()], dtype=np.uint64)

    def reserve_frames(self, slots: NDArray[np.int64], *, wait: bool) -> NDArray[np.int32]:
        if self.broken:
            raise RuntimeError("no luck")
        self.calls += 1
        self.looks -= 1
        return slots[: self.at_once if self.looks < 0 else 0].astype(np.int32)

    def flush(self, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: list[bytes]) -> None:
        if self.breaks:
            raise RuntimeError("no luck")
        self.flushed += slots.tolist()

    def abandon(self, slots: NDArray[np.int64]) -> None:
        self.given_back += slots.tolist()


@pytest.fixture
def frames() -> Frames:
    return Frames()


@pytest.fixture
def rows() -> NDArray[np.uint8]:
    return np.random.default_rng(3).integers(0, 256, (8, ROW), dtype=np.uint8)


@pytest.fixture
def writer(frames: Frames, rows: NDArray[np.uint8]) -> Iterator[ChunkWriter]:
    store: Any = frames
    made = ChunkWriter(store, Pool(rows.ctypes.data, ROW), 0, DEADLINE_S, Counters())
    yield made
    made.close()


def write_of(slot: int) -> ChunkWrite:
    return ChunkWrite(slot, 1, bytes(32), slot)


def failures(writer: ChunkWriter, count: int) -> list[tuple[int, int]]:
    """Slots and epochs of the next writes that fail, at least so many."""
    found: list[tuple[int, int]] = []
    until(lambda: len(found.extend(writer.take_failed()) or found) >= count)
    return found


def test_idle_time_is_no_patience(
    writer: ChunkWriter, frames: Frames, rows: NDArray[np.uint8]
) -> None:
    time.sleep(2 * DEADLINE_S)
    frames.looks = 3
    writer.write([write_of(slot) for slot in range(8)])
    until(lambda: len(frames.flushed) == 8)
    assert writer.take_failed() == []
    np.testing.assert_array_equal(frames.memory, rows)


def test_frames_that_come_a_few_at_a_time_go_to_the_first(
    writer: ChunkWriter, frames: Frames
) -> None:
    frames.at_once = 3
    writer.write([write_of(slot) for slot in range(8)])
    until(lambda: len(frames.flushed) >= 8)
    assert frames.flushed == list(range(8))


def test_chunks_without_a_frame_fail_in_time(writer: ChunkWriter, frames: Frames) -> None:
    frames.looks = 1 << 30
    began = time.monotonic()
    writer.write([write_of(0), write_of(1)])
    assert failures(writer, 2) == [(0, 1), (1, 1)]
    assert time.monotonic() - began >= DEADLINE_S


def test_all_that_wait_fail_together_and_later_ones_at_once_until_there_are_frames(
    writer: ChunkWriter, frames: Frames
) -> None:
    frames.looks = 1 << 30
    writer.write([write_of(slot) for slot in range(40)])
    assert len(failures(writer, 40)) == 40
    assert frames.calls < 2 * DEADLINE_S / LOOK_S  # two deadlines have as many, at most
    calls = frames.calls
    writer.write([write_of(40)])
    assert len(failures(writer, 1)) == 1
    assert frames.calls == calls + 1
    frames.looks = 0
    writer.write([write_of(1)])
    until(lambda: frames.flushed == [1])
    frames.looks = 3
    writer.write([write_of(2)])
    until(lambda: frames.flushed == [1, 2])
    assert writer.take_failed() == []


def test_an_error_gives_the_frames_back(writer: ChunkWriter, frames: Frames) -> None:
    frames.breaks = True
    writer.write([write_of(0), write_of(1)])
    failures(writer, 1)
    assert frames.given_back == [0, 1]


def test_a_slot_that_is_ordered_anew_gets_what_was_ordered_last(
    writer: ChunkWriter, frames: Frames, rows: NDArray[np.uint8]
) -> None:
    """As behind another session with a node, whose frames come late: none is asked for twice."""
    frames.looks = 1 << 30
    writer.write([write_of(0), write_of(1)])
    writer.write([ChunkWrite(0, 2, bytes(32), 3)])
    frames.looks = 2
    until(lambda: len(frames.flushed) >= 2)
    assert frames.flushed == [1, 0]
    np.testing.assert_array_equal(frames.memory[[0, 1]], rows[[3, 1]])
    assert writer.take_failed() == []


def test_an_error_fails_what_waits_and_not_what_follows(
    writer: ChunkWriter, frames: Frames
) -> None:
    def broken_order() -> Iterator[ChunkWrite]:
        yield write_of(0)
        raise RuntimeError("no luck")

    order: Any = broken_order()
    writer.write(order)
    assert failures(writer, 1) == [(0, 1)]
    frames.broken = True
    writer.write([write_of(1)])
    assert failures(writer, 1) == [(1, 1)]
    frames.broken = False
    writer.write([write_of(2)])
    until(lambda: frames.flushed == [2])
