"""Start of a load by who asks for it, where the loader's thread has nothing else to do."""

from __future__ import annotations

import pytest

from tests.kit.waiting import until
from tests.store.conftest import ALL, OPAQUE, PAGED, MakeStore, StoreRig, array
from tests.store.read.test_prefix_loader import assert_hbm, ok
from vllm_ssdkv.store.cache.frames import FrameState
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.io.slot_io import SlotIO
from vllm_ssdkv.store.read.load_job import LoadOutcome

NAMES = {slot: 100 + slot for slot in range(6)}


def begun(rig: StoreRig, first: int, request: str) -> int:
    """Slots that are being read when the call that asks for a load of three has returned."""
    names = {slot: NAMES[slot] for slot in range(first, first + 3)}
    before = rig.store.frames.count(FrameState.LOADING)
    rig.start_load(names, range(first + 1, first + 4), request=request)
    return rig.store.frames.count(FrameState.LOADING) - before


def ended(rig: StoreRig, count: int) -> list[LoadOutcome]:
    outcomes: list[LoadOutcome] = []
    until(lambda: bool(outcomes.extend(rig.store.take_load_outcomes()) or len(outcomes) == count))
    return outcomes


@pytest.mark.parametrize("geometry", ALL)
def test_devices_begin_before_the_call_returns(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry)
    rig.write(NAMES)
    rig.faults({"kind": "stall", "op": "read"})
    assert begun(rig, 0, "first") == 3
    # The loader's thread is at work by now: the next one waits for its turn.
    assert begun(rig, 3, "second") == 0
    rig.faults()
    first, second = ended(rig, 2)
    assert (first.request_id, second.request_id) == ("first", "second")
    ok(first, dram=0, ssd=3)
    ok(second, dram=0, ssd=3)
    assert first.queued_s <= second.queued_s
    assert_hbm(rig, {slot + 1: name for slot, name in NAMES.items()})
    rig.assert_no_leak()


def test_what_is_in_dram_is_copied_by_the_thread(make_store: MakeStore) -> None:
    rig = make_store(OPAQUE)
    rig.write(NAMES)
    ok(rig.load(NAMES, range(1, 7)), dram=0, ssd=6)
    assert begun(rig, 0, "r") == 0
    ok(rig.finish_load(), dram=3, ssd=0)
    rig.assert_no_leak()


@pytest.mark.parametrize("geometry", [OPAQUE, PAGED])
def test_an_error_at_the_start_ends_the_load_and_leaks_nothing(
    make_store: MakeStore, geometry: SlotGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_store(geometry)
    rig.write(NAMES)

    def refused(*_: object, **__: object) -> None:
        raise ValueError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(SlotIO, "submit", refused)
        rig.start_load(NAMES, range(1, 7))
        outcome = rig.finish_load()
    assert not outcome.complete
    assert outcome.bad == []
    assert outcome.tokens_from_ssd == 0
    rig.assert_no_leak()
    ok(rig.load(NAMES, range(1, 7)), dram=0, ssd=6)
    rig.assert_no_leak()


@pytest.mark.parametrize("geometry", ALL)
def test_an_engine_without_twins_loads_and_finds_what_is_wrong(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry, faulty=False)
    rig.write(NAMES)
    ok(rig.load(NAMES, range(1, 7)), dram=0, ssd=6)
    assert_hbm(rig, {slot + 1: name for slot, name in NAMES.items()})
    rig.store.frames.forget(array(list(NAMES)))
    rig.flip(4, geometry.header_bytes + 5)
    outcome = rig.load(NAMES, range(1, 7))
    assert not outcome.complete
    assert outcome.bad == [(4, 1)]
    rig.assert_no_leak()
