"""Staging pieces: taken, given back, and kept back while a read may touch them."""

from __future__ import annotations

import threading
import time

import numpy as np

from tests.store.conftest import PATIENCE_S, SHORT_S, MakeStore, StoreRig, array
from vllm_ssdkv.store.io.buffer_pool import BufferPool
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.io.slot_request import SlotRequest

PIECE = 8192


def offsets(pieces: np.ndarray | None) -> list[int] | None:
    return None if pieces is None else pieces.tolist()


def test_pieces_lie_one_after_the_other_and_run_out() -> None:
    staging = BufferPool(4096, PIECE, 3)
    assert staging.usable() == 3
    assert offsets(staging.take(2)) == [4096, 4096 + PIECE]
    assert staging.take(2) is None
    assert offsets(staging.take(1)) == [4096 + 2 * PIECE]
    assert staging.take(1) is None
    assert offsets(staging.take(0)) == []
    assert staging.usable() == 3


def test_given_pieces_are_taken_again() -> None:
    staging = BufferPool(0, PIECE, 4)
    taken = staging.take(4)
    assert taken is not None
    staging.give(taken[1:3])
    assert sorted(offsets(staging.take(2)) or []) == taken[1:3].tolist()


def stalled_read(rig: StoreRig, slots: list[int]) -> SlotRequest:
    size = rig.geometry.layer_bytes
    buffers = np.arange(len(slots), dtype=np.uint64) * np.uint64(size)
    return rig.files.submit(Op.READ, array(slots), 0, size, buffers)


def test_a_piece_that_a_read_may_touch_stays_out_of_use(make_store: MakeStore) -> None:
    rig = make_store()
    rig.deadline(SHORT_S)
    rig.faults({"kind": "stall", "device": rig.device_of(1)})
    batch = stalled_read(rig, [0, 1, 2, 3])
    assert batch.wait().tolist() == [True, False, True, True]
    held = batch.held()
    assert held.tolist() == [False, True, False, False]
    staging = BufferPool(0, PIECE, 4)
    pieces = staging.take(4)
    assert pieces is not None
    staging.lend(pieces, held, batch)
    assert staging.usable() == 3
    assert staging.take(4) is None
    assert sorted(offsets(staging.take(3)) or []) == pieces[~held].tolist()
    rig.faults()
    assert batch.batch.wait(30)
    assert staging.usable() == 4
    assert offsets(staging.take(1)) == pieces[held].tolist()


def test_reads_in_time_are_waited_for_and_overdue_ones_are_not(make_store: MakeStore) -> None:
    rig = make_store()
    rig.write({slot: slot for slot in range(4)})
    rig.faults({"kind": "stall", "device": rig.device_of(2), "op": "read"})
    slow = stalled_read(rig, [2])
    staging = BufferPool(0, PIECE, 3)
    pieces = staging.take(3)
    assert pieces is not None
    staging.lend(pieces, np.array([True, False, True]), slow)
    assert staging.take(2) is None
    assert staging.usable() == 3
    threading.Timer(0.05, rig.faults).start()
    assert staging.wait(2)
    assert offsets(staging.take(3)) is not None
    rig.deadline(SHORT_S)
    rig.faults({"kind": "stall", "device": rig.device_of(1)})
    hung = stalled_read(rig, [1])
    staging.lend(pieces, np.array([True, False, True]), hung)
    assert staging.wait(1)
    begin = time.monotonic()
    assert not staging.wait(2)
    assert time.monotonic() - begin < PATIENCE_S
    assert staging.usable() == 1
    assert not staging.wait(2)
    rig.faults()
    assert hung.batch.wait(PATIENCE_S)
    assert staging.wait(3)
