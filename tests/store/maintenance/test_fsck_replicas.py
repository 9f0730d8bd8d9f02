"""The check of a store with two copies of each block: one that is bad is named, and mended."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import disk_directory
from tests.store.conftest import array
from tests.store.filled_store import GEOMETRY, RANKS, FilledStore, flip
from tests.store.maintenance.test_fsck import SLOTS, check
from vllm_ssdkv.base.errors import DeviceError
from vllm_ssdkv.store.format import slot_geometry
from vllm_ssdkv.store.format.manifest import Manifest
from vllm_ssdkv.store.maintenance.catalog import inspect_store
from vllm_ssdkv.store.maintenance.journal_rebuild import rebuild_journal
from vllm_ssdkv.store.maintenance.offline_store import find_store

PAGE = GEOMETRY.page_offset(2) + 100


@pytest.fixture(params=["plain", "encrypted", "striped"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FilledStore]:
    """``striped``: over two devices, so that each has parts of both copies."""
    if request.param == "striped":
        monkeypatch.setattr(slot_geometry, "STRIPE_UNIT", 16384)
        assert GEOMETRY.units_per_slot == 3
    with tempfile.TemporaryDirectory(prefix="ssdkv-fsck-", dir=disk_directory()) as root:
        count = 2 if request.param == "striped" else 3
        yield make(Path(root), count, encrypted=request.param == "encrypted")


def make(root: Path, count: int, *, encrypted: bool = False) -> FilledStore:
    paths = tuple(Path(root, f"ssd{i}") for i in range(count))
    state = Path(root, "state")
    for path in (*paths, state):
        path.mkdir(mode=0o700)
    made = FilledStore(paths, state, SLOTS, encrypted=encrypted, replicas=2)
    made.fill()
    return made


def strike(store: FilledStore, slot: int, copy: int, rank: int = 0, offset: int = PAGE) -> None:
    device, at = store.at(slot, offset, copy)
    flip(store.data(device, rank), at)


def give_up(store: FilledStore, device: int) -> None:
    """The store was opened without a device."""
    manifest = Manifest.load(store.state)
    assert manifest is not None
    manifest.devices[device].present = False
    manifest.save(store.state)


def test_both_copies_are_read(store: FilledStore) -> None:
    report = check(store)
    assert report.clean, report.problems
    assert report.checked_slots == len(SLOTS) * RANKS
    assert report.checked_bytes == 2 * len(SLOTS) * RANKS * GEOMETRY.slot_bytes
    assert store.served() == set(SLOTS)
    details = inspect_store(find_store(store.devices, store.state))
    assert details.doubled_slots == details.summary.slots > 0


@pytest.mark.parametrize("offset", [70, PAGE], ids=["header", "page"])
def test_bad_copies_are_mended(store: FilledStore, offset: int) -> None:
    strike(store, 5, 0, offset=offset)
    strike(store, 13, 1, rank=1, offset=offset)
    report = check(store)
    assert report.counts == {"copy": 2}
    assert report.bad == 0
    assert {p.subject for p in report.problems} == {"slot 5, rank 0", "slot 13, rank 1"}
    mended = check(store, mend=True)
    assert (mended.counts, mended.unrepaired) == ({"copy": 2}, 0)
    assert check(store).clean
    assert store.served() == set(SLOTS)


def test_both_copies_bad(store: FilledStore) -> None:
    for copy in (0, 1):
        strike(store, 8, copy, rank=1)
    report = check(store, mend=True)
    assert report.counts == {"page": 1}
    assert report.bad == 1
    assert check(store).clean
    assert store.served() == set(SLOTS) - {8}


@pytest.mark.parametrize("pages", [(0, 1), (3, 0)])
def test_pages_wrong_in_different_copies_are_mended_in_both(
    store: FilledStore, pages: tuple[int, int]
) -> None:
    """No copy is right, and of every page one is."""
    for copy, page in enumerate(pages):
        strike(store, 8, copy, rank=1, offset=GEOMETRY.page_offset(page) + 100)
    strike(store, 5, 0)
    report = check(store)
    assert (report.counts, report.bad) == ({"copy": 2}, 0)
    mended = check(store, mend=True)
    assert (mended.counts, mended.unrepaired) == ({"copy": 2}, 0)
    assert check(store).clean
    assert store.served() == set(SLOTS)
    strike(store, 8, 1, rank=1, offset=GEOMETRY.page_offset(2) + 100)
    strike(store, 8, 0, rank=1, offset=GEOMETRY.page_offset(1) + 100)
    assert check(store).bad == 0  # as each copy was mended


def test_a_rebuilt_journal_has_blocks_that_are_right_in_both_copies_together(
    store: FilledStore,
) -> None:
    for copy in (0, 1):
        strike(store, 8, copy, offset=GEOMETRY.page_offset(copy) + 100)
        strike(store, 13, copy)
    (store.state / "journal").unlink()
    found = find_store(store.devices, store.state)
    assert rebuild_journal(found, whole=True) == len(SLOTS) - 1
    assert store.served() == set(SLOTS) - {13}


def test_a_replaced_drive_is_filled(store: FilledStore) -> None:
    """The engine makes the data file, the repair brings what was on it."""
    store.data(1, 0).unlink()
    store.data(1, 1).unlink()
    assert store.served() == set(SLOTS)
    touched = [s for s in SLOTS if store.placement.touches(1, array([s]))[0]]
    report = check(store, mend=True)
    assert report.counts == {"copy": RANKS * len(touched)}
    assert report.unrepaired == 0
    assert check(store).clean


def test_a_missing_data_file_drops_nothing(store: FilledStore) -> None:
    store.data(1, 1).unlink()
    report = check(store, mend=True)
    assert set(report.counts) == {"copy", "data_file"}
    assert report.bad == 0
    assert report.unrepaired == report.counts["copy"]
    assert store.served() == set(SLOTS)


def test_an_absent_device_leaves_the_other_copies(store: FilledStore) -> None:
    """They are read, each once, and what is wrong with them is said."""
    away = store.devices[1].with_name("elsewhere")
    store.devices[1].rename(away)
    near = {s for s in SLOTS if store.placement.touches(1, array([s]))[0]}
    report = check(store)
    assert report.counts == {"device": 1}
    assert (report.bad, report.out_of_reach) == (0, 0)
    assert "parts of 0 block(s)" in report.problems[0].text
    assert report.checked_slots == RANKS * len(SLOTS)
    read = RANKS * (2 * len(SLOTS) - len(near))
    assert report.checked_bytes == read * GEOMETRY.slot_bytes
    slot = next(
        s for s in sorted(near) if {store.at(s, PAGE, copy)[0] for copy in (0, 1)} == {0, 1}
    )
    copy = next(copy for copy in (0, 1) if store.at(slot, PAGE, copy)[0] == 0)
    strike(store, slot, copy)
    report = check(store)
    assert report.counts == {"device": 1, "page": 1}
    assert (report.bad, report.problems[1].subject) == (1, f"slot {slot}, rank 0")
    with pytest.raises(DeviceError, match="mount it"):
        check(store, mend=True)
    away.rename(store.devices[1])
    report = check(store, mend=True)
    assert (report.counts, report.unrepaired) == ({"copy": 1}, 0)
    assert store.served() == set(SLOTS)


def test_parts_of_both_copies_are_on_an_absent_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still there twice is read twice, the rest once."""
    monkeypatch.setattr(slot_geometry, "STRIPE_UNIT", 16384)
    store = make(tmp_path, 3)
    store.devices[1].rename(store.devices[1].with_name("elsewhere"))
    assert check(store).counts == {"device": 1}
    assert store.placement.touches(1, array(SLOTS)).all()
    places = [(slot, offset) for slot in SLOTS for offset in (16384 + 99, 32768 + 99)]
    for there, kind, bad in (([2, 0], "copy", 0), ([0, 1], "page", 1)):
        slot, offset = next(
            at for at in places if [store.at(*at, copy)[0] for copy in (0, 1)] == there
        )
        strike(store, slot, 0, offset=offset)
        report = check(store)
        assert report.counts == {"device": 1, kind: 1}
        assert report.bad == bad
        strike(store, slot, 0, offset=offset)
    give_up(store, 1)
    slot, offset = next(
        at for at in places if [store.at(*at, copy)[0] for copy in (0, 1)] == [2, 0]
    )
    strike(store, slot, 0, offset=offset)
    report = check(store, mend=True)
    assert (report.counts, report.unrepaired) == ({"copy": 1}, 0)
    assert check(store).clean


def test_two_absent_devices_cost_what_lies_on_these_two(store: FilledStore) -> None:
    devices = len(store.devices)
    for device in (0, 1):
        store.devices[device].rename(store.devices[device].with_name(f"elsewhere{device}"))
    out = np.arange(devices) < 2
    gone = int(store.placement.lost(out, array(SLOTS)).sum())
    assert gone == len(SLOTS) if devices == 2 else 0 < gone < len(SLOTS)
    report = check(store)
    assert report.counts == {"device": 2}
    assert all(f"parts of {gone} block(s)" in problem.text for problem in report.problems)
    assert (report.bad, report.out_of_reach) == (0, gone)
    assert report.checked_slots == RANKS * (len(SLOTS) - gone)


def test_copies_are_mended_while_a_device_that_was_given_up_is_absent(store: FilledStore) -> None:
    give_up(store, 1)
    store.devices[1].rename(store.devices[1].with_name("elsewhere"))
    assert check(store).clean
    for slot in [s for s in SLOTS if not store.placement.touches(1, array([s]))[0]][:1]:
        strike(store, slot, 0)
        report = check(store, mend=True)
        assert (report.counts, report.unrepaired) == ({"copy": 1}, 0)
        assert check(store).clean


def test_superblocks_that_nothing_proves(store: FilledStore) -> None:
    """Without a right copy on it, a device is not written to: it may be anybody's."""
    data = store.data(0, 0)
    data.write_bytes(b"\x11" * data.stat().st_size)
    report = check(store, mend=True)
    assert set(report.counts) == {"copy", "superblock"}
    assert report.bad == 0
    assert report.unrepaired == sum(report.counts.values())
    assert set(data.read_bytes()) == {0x11}
