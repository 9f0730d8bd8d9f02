"""Slots on devices: where bytes land, and how waiting ends when a device does not answer."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.conftest import NEVER_S, PAGED, PATIENCE_S, SHORT_S, MakeStore, StoreRig, array
from vllm_ssdkv import _io
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES, SlotGeometry
from vllm_ssdkv.store.io.coalescing import CoalescedBatch, submit_coalesced
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.io.slot_io import GROUP_BYTES
from vllm_ssdkv.store.io.slot_request import SlotRequest
from vllm_ssdkv.store.memory.memory_plan import GROUP
from vllm_ssdkv.store.placement.stripe_map import Extents

LARGE = SlotGeometry("opaque", 9, 1, 1, 150_000)
"""Of several units."""


def submit(rig: StoreRig, op: Op, slots: list[int]) -> SlotRequest:
    """Whole slots, one after the other in the arena."""
    size = rig.geometry.slot_bytes
    buffers = np.arange(len(slots), dtype=np.uint64) * np.uint64(size)
    return rig.files.submit(op, array(slots), 0, size, buffers)


def memory(rig: StoreRig, slots: int) -> np.ndarray:
    return rig.store.arena.view(0, slots * rig.geometry.slot_bytes).reshape(slots, -1)


geometries = st.one_of(
    st.builds(
        SlotGeometry,
        st.just("opaque"),
        st.integers(1, 6),
        st.just(1),
        st.just(1),
        st.integers(1, 300_000),
    ),
    st.builds(
        SlotGeometry,
        st.just("paged"),
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(1, 2),
        st.integers(1, 20_000),
    ),
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    geometry=geometries,
    weights=st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    faulty=st.booleans(),
)
def test_what_is_written_is_read_in_any_order_and_part(
    make_store: MakeStore, geometry: SlotGeometry, weights: list[float], seed: int, faulty: bool
) -> None:
    # Without the twin that fails, requests are found and submitted in one native call.
    rig = make_store(geometry, slots=9, frames=9, weights=weights, faulty=faulty)
    random = np.random.default_rng(seed)
    slots = random.permutation(9).tolist()
    written = random.integers(0, 256, memory(rig, 9).shape, dtype=np.uint8)
    memory(rig, 9)[:] = written
    assert submit(rig, Op.WRITE, slots).wait().all()
    memory(rig, 9)[:] = 0
    order = random.permutation(9)
    assert submit(rig, Op.READ, [slots[i] for i in order]).wait().all()
    np.testing.assert_array_equal(memory(rig, 9), written[order])
    # One layer of some slots, packed.
    layer = int(random.integers(geometry.layers))
    some = random.permutation(9)[:4]
    first, size = geometry.layer_offset(layer), geometry.layer_bytes
    buffers = np.arange(4, dtype=np.uint64) * np.uint64(size)
    batch = rig.files.submit(Op.READ, array([slots[i] for i in some]), first, size, buffers)
    assert batch.wait().all()
    np.testing.assert_array_equal(
        rig.store.arena.view(0, 4 * size).reshape(4, -1), written[some, first : first + size]
    )
    read = sum(rig.total("bytes_read", device=path) for path in rig.paths)
    assert read == 9 * geometry.slot_bytes + 4 * size
    assert sum(rig.total("bytes_written", device=p) for p in rig.paths) == 9 * geometry.slot_bytes


def test_a_group_is_bounded_in_number_and_bytes(make_store: MakeStore) -> None:
    assert make_store(slots=8, frames=8).files.group == min(GROUP, GROUP_BYTES // PAGED.slot_bytes)
    large = SlotGeometry("opaque", 9, 1, 1, 4 << 20)
    rig = make_store(large, slots=1, frames=8, devices=1)
    assert rig.files.group == 1


def test_one_device_that_fails_fails_its_slots_only(make_store: MakeStore) -> None:
    rig = make_store()
    rig.faults({"kind": "eio", "device": rig.device_of(2)})
    verdict = submit(rig, Op.READ, [0, 1, 2, 3]).wait()
    assert verdict.tolist() == [True, True, False, True]


def test_a_hung_device_costs_one_deadline_and_keeps_its_buffers(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_store()
    hung = rig.device_of(1)
    rig.faults({"kind": "stall", "device": hung})
    batches = []
    for deadline in (SHORT_S, *[NEVER_S] * 4):
        rig.deadline(deadline)
        batches.append(submit(rig, Op.READ, [0, 1, 2, 3]))
    begin = time.monotonic()
    for batch in batches:
        assert batch.wait().tolist() == [True, False, True, True]
        assert batch.held().tolist() == [False, True, False, False]
        assert batch.out_of_reach().tolist() == [False, True, False, False]
        assert not batch.ended()
    assert time.monotonic() - begin < PATIENCE_S, "it waited for a second deadline"
    assert rig.total("device_lost", device=rig.paths[hung]) == 1
    assert rig.paths[hung] in caplog.text
    # Nothing more is sent there, so nothing more can hang.
    later = submit(rig, Op.READ, [0, 1, 2, 3])
    assert later.wait().tolist() == [True, False, True, True]
    assert later.ended()
    assert not later.held().any()
    nothing = submit(rig, Op.READ, [1, 5])
    assert not nothing.wait().any()
    assert nothing.ended()
    rig.faults()
    for batch in batches:
        assert batch.batch.wait(PATIENCE_S)
        assert not batch.held().any()


def test_the_deadline_counts_from_the_submission(make_store: MakeStore) -> None:
    rig = make_store()
    rig.deadline(SHORT_S)
    rig.faults({"kind": "stall", "device": rig.device_of(1)})
    batch = submit(rig, Op.READ, [1])
    time.sleep(SHORT_S)
    begin = time.monotonic()
    assert batch.over(NEVER_S)
    assert not batch.wait().any()
    assert time.monotonic() - begin < PATIENCE_S


def test_a_wait_ends_when_the_device_is_given_up_elsewhere(make_store: MakeStore) -> None:
    rig = make_store()
    rig.deadline(NEVER_S)
    rig.faults({"kind": "stall", "device": rig.device_of(1)})
    batch = submit(rig, Op.READ, [0, 1])
    rig.files.health.quarantine(rig.device_of(1), "of a test")
    begin = time.monotonic()
    assert batch.wait().tolist() == [True, False]
    assert time.monotonic() - begin < PATIENCE_S


def test_a_truncated_file_reads_short(make_store: MakeStore) -> None:
    rig = make_store()
    device, at = rig.place(6, 0)
    with open(rig.devices[device].path, "r+b") as file:
        file.truncate(at + 4096)
    assert submit(rig, Op.READ, [2, 6]).wait().tolist() == [True, False]
    assert rig.total("io_errors", device=rig.paths[device], kind="short") >= 1


@pytest.mark.parametrize("merged", [True, False])
def test_what_is_sent_in_one_step_is_what_the_placement_says(
    make_store: MakeStore, merged: bool
) -> None:
    rig = make_store(LARGE, slots=9, frames=9, weights=[1.0, 3.5, 2.0], faulty=False)
    size = rig.geometry.slot_bytes
    slots, offsets, part = array([7, 2, 5]), array([0, 4096, size - 8192]), 8192
    buffers = np.array([8192, 0, 16384], dtype=np.uint64)
    batch = rig.files.submit(Op.READ, slots, offsets, part, buffers, merged=merged)
    assert isinstance(batch.placed, _io.StripedExtents)
    asked = np.bincount(batch.extents.device, batch.extents.length, 3)
    np.testing.assert_array_equal(batch.watch.nbytes, asked)
    expected = rig.files.placement.extents(slots, offsets, part, merged=merged)
    for name in ("device", "offset", "length", "slot_index", "buffer"):
        found, wanted = getattr(batch.extents, name), getattr(expected, name)
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(batch.other, expected.device)
    assert batch.wait().all()
    assert not batch.held().any()
    assert not batch.out_of_reach().any()
    assert sum(rig.total("bytes_read", device=path) for path in rig.paths) == 3 * part


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pages=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=20))
def test_neighbours_are_one_request_with_results_of_their_own(
    make_store: MakeStore, pages: list[tuple[int, int]]
) -> None:
    rig = make_store(faulty=False, devices=2)
    memory(rig, 4)[:] = np.random.default_rng(0).integers(0, 256, memory(rig, 4).shape, np.uint8)
    written = memory(rig, 4).copy()
    assert submit(rig, Op.WRITE, [0, 1, 2, 3]).wait().all()
    size, first = rig.geometry.page_bytes, rig.geometry.header_bytes
    slots, offsets = array([s for s, _ in pages]), array([first + p * size for _, p in pages])
    buffers = np.arange(len(pages), dtype=np.uint64) * np.uint64(size)
    batch = rig.files.submit(Op.READ, slots, offsets, size, buffers, coalesced=True)
    assert batch.wait().all()
    assert batch.batch.results().tolist() == [size] * len(pages)
    read = rig.store.arena.view(0, len(pages) * size).reshape(-1, size)
    for row, (slot, page) in zip(read, pages, strict=True):
        begin = first + page * size
        np.testing.assert_array_equal(row, written[slot, begin : begin + size])
    # As the general way joins them.
    asked = batch.extents
    joined = submit_coalesced(
        rig.files.engine, Op.READ, asked.device, asked.offset, asked.length, buffers
    )
    assert joined.wait(PATIENCE_S)
    assert isinstance(batch.placed, Extents)
    assert isinstance(batch.batch, CoalescedBatch)
    assert len(batch.batch.batch.results()) == len(joined.batch.results())


def test_one_step_refuses_what_does_not_fit(make_store: MakeStore) -> None:
    rig = make_store(slots=9, frames=9, faulty=False)
    one = np.zeros(1, dtype=np.uint64)
    with pytest.raises(ValueError, match="not one place for each slot"):
        rig.files.submit(Op.READ, array([0, 1]), 0, 4096, one)
    with pytest.raises(ValueError, match="there is no slot 99"):
        rig.files.submit(Op.READ, array([99]), 0, 4096, one)
    with pytest.raises(ValueError, match="outside the arena"):
        rig.files.submit(Op.READ, array([0]), 0, 4096, np.array([1 << 40], dtype=np.uint64))


def test_a_device_that_ends_early_fails_its_slots_only_in_one_step(make_store: MakeStore) -> None:
    rig = make_store(faulty=False)
    assert submit(rig, Op.WRITE, [0, 1, 2, 3]).wait().all()
    short = rig.device_of(2)
    os.ftruncate(rig.devices[short].fd, SUPERBLOCK_BYTES)
    verdict = submit(rig, Op.READ, [0, 1, 2, 3]).wait()
    assert verdict.tolist() == [True, True, False, True]
    assert rig.total("io_errors", device=rig.paths[short], kind="short") > 0
