"""The scrub of slots with two copies: the one that is wrong is written anew from the other."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tests.kit.waiting import until
from tests.store.conftest import (
    ALL,
    PAGED,
    PATIENCE_S,
    MakeStore,
    StoreRig,
    array,
)
from tests.store.maintenance.test_scrubber import scrubbing
from vllm_ssdkv.store import tiered_store
from vllm_ssdkv.store.format import slot_geometry
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.io.slot_io import ReadFrom
from vllm_ssdkv.store.maintenance import scrubber

FAST = 1 << 40
SLOTS = 16
NAMES = {slot: 100 + slot for slot in range(0, SLOTS, 2)}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_store, "QUIET_S", 0.0)
    monkeypatch.setattr(scrubber, "_LOOK_S", 0.001)
    monkeypatch.setattr(scrubber, "PASS_S", 0.0)


def bytes_of(here: StoreRig, slot: int, copy: int) -> bytes:
    """One copy of a slot as it lies on its devices."""
    extents = here.files.placement.copies(array([slot]), 0, here.geometry.slot_bytes)[copy]
    assert extents is not None
    parts = []
    for device, offset, length in zip(
        extents.device, extents.offset.tolist(), extents.length.tolist(), strict=True
    ):
        with open(here.devices[device].path, "rb") as file:
            file.seek(offset)
            parts.append(file.read(length))
    return b"".join(parts)


def pass_over(here: StoreRig) -> None:
    """At least one whole pass begins and ends from here on."""
    whole = SLOTS * 4 * (here.geometry.slot_bytes + here.geometry.header_bytes)
    end = here.total("scrub_bytes") + 2 * whole
    until(lambda: here.total("scrub_bytes") >= end, "two passes of the scrub")


@pytest.mark.parametrize("geometry", ALL)
@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("where", ["magic", "epoch", "checksum", "page"])
def test_a_bad_copy_is_mended(
    make_store: MakeStore, geometry: SlotGeometry, copy: int, where: str
) -> None:
    here = make_store(geometry, slots=SLOTS, devices=3, replicas=2, scrub_rate=FAST)
    here.write(NAMES)
    offset = {"magic": 3, "epoch": 45, "checksum": 130}.get(where, geometry.page_offset(1) + 5)
    here.flip(4, offset, copy=copy, bits=64)
    until(lambda: here.total("mended_copies") == 1, "the repair")
    assert bytes_of(here, 4, 0) == bytes_of(here, 4, 1)
    assert here.load(NAMES, list(range(1, len(NAMES) + 1))).complete
    assert here.store.take_scrubbed() == []
    assert len(here.files.replicas.suspects()) == 0
    # The device that it came from is charged when the scheduler knows that the slot is stored.
    assert here.total("scrub_bad_pages") == 0
    mended = here.store.take_mended()
    assert mended == [(4, 1)]
    here.store.confirm([(4, 2), (5, 1)])
    assert here.total("scrub_bad_pages") == 0
    here.store.confirm(mended)
    found = here.total("scrub_bad_pages"), here.total("header_mismatches")
    # Without its magic it is no header of ours.
    assert found == {"page": (1, 0), "magic": (0, 0)}.get(where, (0, 1))


def test_what_is_bad_twice_is_reported(make_store: MakeStore) -> None:
    here = make_store(PAGED, slots=SLOTS, devices=3, replicas=2, scrub_rate=FAST)
    here.write(NAMES)
    for copy in (0, 1):
        here.flip(6, PAGED.page_offset(3), copy=copy)
    bad: list[tuple[int, int]] = []
    until(lambda: bool(bad.extend(here.store.take_scrubbed()) or bad), "the report")
    assert bad == [(6, 1)]
    pass_over(here)
    assert here.store.take_scrubbed() == []


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("pages", [(0, 1), (3, 0)])
def test_pages_wrong_in_different_copies_are_mended_in_both(
    make_store: MakeStore, devices: int, pages: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy is right, and of every page one is."""
    monkeypatch.setattr(slot_geometry, "STRIPE_UNIT", 16384)
    monkeypatch.setattr(tiered_store, "QUIET_S", 3600.0)
    here = make_store(PAGED, slots=SLOTS, devices=devices, replicas=2, scrub_rate=FAST)
    here.write(NAMES)
    for copy, page in enumerate(pages):
        here.flip(6, PAGED.page_offset(page) + 9, copy=copy)
    monkeypatch.setattr(tiered_store, "QUIET_S", 0.0)
    until(lambda: bytes_of(here, 6, 0) == bytes_of(here, 6, 1), "the repair of both")
    pass_over(here)
    assert here.store.take_scrubbed() == []
    assert here.load(NAMES, list(range(1, len(NAMES) + 1))).complete
    mended = here.store.take_mended()
    assert set(mended) == {(6, 1)}
    here.store.confirm(mended)
    assert here.total("scrub_bad_pages") > 0


@pytest.mark.parametrize("unit", [slot_geometry.STRIPE_UNIT, 16384], ids=["whole", "striped"])
@pytest.mark.parametrize("geometry", ALL)
def test_a_copy_that_is_out_of_date_is_filled(
    make_store: MakeStore, geometry: SlotGeometry, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a drive that was away: what it has is right, but of an older epoch.

    Striped over two devices, it has parts of both copies.
    """
    monkeypatch.setattr(slot_geometry, "STRIPE_UNIT", unit)
    here = make_store(geometry, slots=SLOTS, devices=2, replicas=2, scrub_rate=FAST)
    here.write(NAMES, epoch=1)
    before = Path(here.devices[1].path).read_bytes()
    here.write({2: 777}, epoch=2)
    where = here.files.placement.copies(array([2]), 0, geometry.slot_bytes)
    with open(here.devices[1].path, "r+b") as file:
        for extents in where:
            assert extents is not None
            for piece in np.flatnonzero(extents.device == 1).tolist():
                begin, size = int(extents.offset[piece]), int(extents.length[piece])
                file.seek(begin)
                file.write(before[begin : begin + size])
    until(lambda: here.total("mended_copies") > 0, "the repair")
    until(lambda: bytes_of(here, 2, 0) == bytes_of(here, 2, 1), "the whole repair")
    assert here.load({2: 777}, [1], epoch=2).complete
    assert here.store.take_scrubbed() == []


def test_a_source_that_fails_once_is_read_again_in_the_next_pass(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was right when the scrub looked, and is not when it is to be copied."""
    here = make_store(PAGED, slots=SLOTS, devices=3, replicas=2, scrub_rate=FAST)
    here.write(NAMES)
    fetch = scrubber._Reader.fetch
    failed: list[int] = []

    def fetch_once_bad(reader: scrubber._Reader, source: ReadFrom, epoch: int) -> bool:
        if failed:
            return fetch(reader, source, epoch)
        failed.append(source.copy)
        here.flip(6, PAGED.page_offset(3), copy=source.copy)
        fetched = fetch(reader, source, epoch)
        here.flip(6, PAGED.page_offset(3), copy=source.copy)
        return fetched

    monkeypatch.setattr(scrubber._Reader, "fetch", fetch_once_bad)
    here.flip(6, PAGED.page_offset(1), copy=1)
    until(lambda: here.total("mended_copies") > 0, "the repair")
    assert failed == [0]
    until(lambda: bytes_of(here, 6, 0) == bytes_of(here, 6, 1), "the whole repair")
    assert here.store.take_scrubbed() == []


def test_a_device_out_of_use_is_left_alone(make_store: MakeStore) -> None:
    here = make_store(PAGED, slots=SLOTS, devices=3, replicas=2, scrub_rate=FAST)
    here.write(NAMES)
    here.files.health.quarantine(1, "a test")
    end = here.total("scrub_bytes") + 40 * PAGED.slot_bytes
    until(lambda: here.total("scrub_bytes") >= end, "the scrub")
    assert here.store.take_scrubbed() == []
    assert here.total("mended_copies") == 0


def test_a_slot_that_is_being_written_is_not_visited(make_store: MakeStore) -> None:
    here = make_store(PAGED, slots=SLOTS, devices=3, replicas=2)
    done: list[int] = []
    here.faults({"kind": "stall", "op": "write"})
    here.hold({3: 1, 4: 2})
    here.commit({3: 1, 4: 2})
    until(lambda: here.store._writer.writes(3), "the write")
    assert not here.store._writer.visit(3, lambda: done.append(3), 0.05)
    here.faults()
    assert here.store.drain(PATIENCE_S)
    assert here.store._writer.visit(3, lambda: done.append(3), PATIENCE_S)
    assert done == [3]


def test_a_device_that_is_back_is_filled_and_nothing_else_is_read(make_store: MakeStore) -> None:
    """Without a scrub of everything, and not before all devices are there."""
    here = make_store(ALL[0], slots=SLOTS, devices=3, replicas=2, scrub_rate=1)
    assert here.store._scrubber is not None
    here.store._scrubber._stop.set()
    here.store._scrubber._thread.join(PATIENCE_S)
    first, later = dict(list(NAMES.items())[:2]), dict(list(NAMES.items())[2:])
    here.write(first)
    here.files.health.quarantine(1, "its node is gone")
    here.write(later)
    missed = here.files.replicas.suspects().tolist()
    assert missed
    assert set(missed) <= set(later)
    before = here.total("scrub_bytes")
    with scrubbing(here, rate=None):
        time.sleep(0.05)
        assert here.total("scrub_bytes") == before
        assert here.files.health.restore(1)
        until(lambda: not len(here.files.replicas.suspects()), "the repair")
    assert here.total("mended_copies") == len(missed)
    for slot in NAMES:
        assert bytes_of(here, slot, 0) == bytes_of(here, slot, 1)
    # Both copies are read twice at most, the second time under the writer's eyes, and once more.
    assert here.total("scrub_bytes") - before <= 6 * len(missed) * (
        here.geometry.slot_bytes + here.geometry.header_bytes
    )
