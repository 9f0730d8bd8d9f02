"""Loads in pieces: several are in flight while one is checked and copied, and none is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.kit.waiting import until
from tests.store.conftest import (
    ALL,
    OPAQUE,
    PAGED,
    PAGED_ENCRYPTED,
    MakeStore,
    StoreRig,
    array,
)
from tests.store.read.test_prefix_loader import assert_hbm, ok
from tests.store.unhurried import PATIENCE_S
from vllm_ssdkv import _io
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.io import slot_request
from vllm_ssdkv.store.read import prefix_loader
from vllm_ssdkv.store.read.prefix_loader import READ_AHEAD


def submitted(rig: StoreRig) -> int:
    """Reads that the engine was given so far."""
    totals = rig.files.engine.statistics()
    return sum(n for name, n in totals.items() if name.startswith("read_submitted."))


@pytest.mark.parametrize("geometry", [g for g in ALL if g is not OPAQUE])
def test_the_next_pieces_are_being_read_while_one_is_copied(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry, frames=READ_AHEAD * 4)
    names = {slot: 100 + slot for slot in range(30)}
    rig.write(names)
    before = submitted(rig)
    seen: list[int] = []
    rig.before_copy = lambda: seen.append(submitted(rig) - before)
    ok(rig.load(names, range(1, 31)), dram=0, ssd=30)
    assert_hbm(rig, {slot + 1: name for slot, name in names.items()})
    whole = submitted(rig) - before
    # Pieces of four slots; of the first one nothing is copied before four are on their way.
    assert len(seen) >= 8
    assert seen[0] >= whole * 16 // 30
    assert seen[-1] == whole
    rig.assert_no_leak()


def test_two_pieces_are_being_read_however_large_a_slot_is(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot of more than all that is to be read ahead: the next one is read beside its copy."""
    monkeypatch.setattr(prefix_loader, "GROUP_BYTES", 1)
    rig = make_store(PAGED, frames=READ_AHEAD * 4)
    names = {slot: 100 + slot for slot in range(6)}
    rig.write(names)
    before = submitted(rig)
    seen: list[int] = []
    rig.before_copy = lambda: seen.append(submitted(rig) - before)
    ok(rig.load(names, range(1, 7)), dram=0, ssd=6)
    whole = submitted(rig) - before
    assert whole % 6 == 0
    assert seen[0] == 2 * whole // 6


def test_what_has_arrived_is_copied_while_the_rest_of_its_piece_is_read(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_request, "PART_BYTES", 1)
    rig = make_store(OPAQUE, frames=64)
    names = {slot: 100 + slot for slot in range(16)}
    rig.write(names)
    late = rig.files.placement.touches(0, array(list(names)))
    early = {slot + 1: names[slot] for slot in range(16) if not late[slot]}
    assert 0 < len(early) < 16
    rig.faults({"kind": "stall", "op": "read", "device": 0})
    rig.start_load(names, range(1, 17))
    until(lambda: len(rig.hbm) == len(early), "the copy of what has arrived")
    assert_hbm(rig, early)
    rig.faults()
    ok(rig.finish_load(), dram=0, ssd=16)
    assert_hbm(rig, {slot + 1: name for slot, name in names.items()})
    rig.assert_no_leak()


def test_the_next_pieces_are_being_read_while_native_code_copies_one(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_store(OPAQUE, frames=READ_AHEAD * 4)
    names = {slot: 100 + slot for slot in range(30)}
    rig.write(names)
    before = submitted(rig)
    seen: list[int] = []
    feed = slot_request.SlotRequest.feed

    def fed(
        batch: slot_request.SlotRequest,
        verifier: _io.ArrivalVerifier,
        beside: Sequence[slot_request.SlotRequest] = (),
    ) -> None:
        seen.append(submitted(rig) - before)
        feed(batch, verifier, beside)

    monkeypatch.setattr(slot_request.SlotRequest, "feed", fed)
    ok(rig.load(names, range(1, 31)), dram=0, ssd=30)
    assert_hbm(rig, {slot + 1: name for slot, name in names.items()})
    whole = submitted(rig) - before
    assert len(seen) >= 8
    assert seen[0] >= whole * 16 // 30
    assert seen[-1] == whole
    rig.assert_no_leak()


def test_what_is_found_is_not_evicted_by_what_is_read(make_store: MakeStore) -> None:
    """More is read than DRAM has room for, and what is there is the oldest of the hit."""
    rig = make_store(frames=8)
    names = {slot: 500 + slot for slot in range(30)}
    rig.write(names)
    ok(rig.load({slot: names[slot] for slot in range(6)}, range(1, 7)), dram=0, ssd=6)
    rig.hbm.clear()
    ok(rig.load(names, range(1, 31)), dram=6, ssd=24)
    assert_hbm(rig, {slot + 1: name for slot, name in names.items()})
    rig.assert_no_leak()


def test_an_error_while_others_are_being_read_leaks_nothing(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_store(frames=16)
    names = {slot: 500 + slot for slot in range(30)}
    rig.write(names)

    def fail() -> None:
        raise RuntimeError("HBM is on fire")

    rig.before_copy = fail
    assert not rig.load(names, range(1, 31)).complete
    assert caplog.text.count("load of request r failed") == 1  # nothing is copied after it
    assert rig.hbm == {}
    rig.before_copy = lambda: None
    assert rig.load(names, range(1, 31)).complete
    rig.assert_no_leak()


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
def test_headers_of_long_contexts_pass_through_little_memory(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry, slots=420, frames=8)
    names = {slot: slot for slot in range(400)}
    rig.write(names)
    rig.store.extend_context("r", 0, array(list(names)))
    ok(rig.load(names, [5]), dram=0, ssd=400)
    read = sum(rig.total("bytes_read", device=path) for path in rig.paths)
    assert read == 8 * geometry.slot_bytes + 392 * geometry.header_bytes
    rig.assert_rows(rig.walk(range(150, 160)), list(range(150, 160)))
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_who_waits_for_a_load_gets_it_when_it_ends(make_store: MakeStore) -> None:
    rig = make_store()
    rig.write({0: 10})
    assert rig.store.take_load_outcomes(PATIENCE_S) == []  # at once: none is under way
    rig.start_load({0: 10}, [1])
    (outcome,) = rig.store.take_load_outcomes(PATIENCE_S)
    ok(outcome, dram=0, ssd=1)
    assert_hbm(rig, {1: 10})
