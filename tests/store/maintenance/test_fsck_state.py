"""The check of a store's journal and manifest: what is lost is found by headers and by copies."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace as replace_segment

from tests.store.checked_store import SLOTS, check, copied, kinds, make, mended, order_of
from tests.store.filled_store import GEOMETRY, RANKS, FilledStore, flip
from vllm_ssdkv.base.errors import FormatError, StoreError
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest
from vllm_ssdkv.store.format.segment import Extent, Segment
from vllm_ssdkv.store.open import open_index
from vllm_ssdkv.store.placement.stripe_map import StripeMap


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> FilledStore:
    """A store that every test leaves as it was."""
    return make(tmp_path_factory.mktemp("ssdkv-fsck"))


@pytest.fixture
def store(original: FilledStore) -> Iterator[FilledStore]:
    with copied(original) as copy:
        yield copy


# ---- the journal ----


def test_a_journal_with_a_bad_header_keeps_its_records(store: FilledStore) -> None:
    flip(store.state / "journal", 40)
    assert mended(store, journal=1) == set(SLOTS)


def test_a_record_cut_off(store: FilledStore) -> None:
    """Its block is found by the header of its slot."""
    path = store.state / "journal"
    os.truncate(path, path.stat().st_size - 10)
    report = check(store)
    assert (report.stored, report.found, report.lost) == (len(SLOTS), 1, 0)
    assert mended(store, journal=1) == set(SLOTS)


@pytest.mark.parametrize("loss", ["missing", "empty", "garbage"])
def test_a_lost_journal_is_made_anew(store: FilledStore, loss: str) -> None:
    """Find whole blocks by the headers of slots, and count the others."""
    path = store.state / "journal"
    size = path.stat().st_size
    path.unlink()
    if loss != "missing":
        path.write_bytes(b"" if loss == "empty" else np.random.default_rng(1).bytes(size))
    for slot in (5, 21):
        device, at = store.at(slot, GEOMETRY.page_offset(1) + 5)
        flip(store.data(device, 1), at)
    report = check(store)
    assert report.counts["journal"] == (2 if loss == "garbage" else 1)
    assert (report.stored, report.found, report.lost, report.bad) == (7, 7, 2, 0)
    assert mended(store, journal=report.counts["journal"]) == set(SLOTS) - {5, 21}
    again = check(store)
    assert (again.stored, again.found, again.lost) == (7, 0, 0)


def test_blocks_of_a_segment_that_was_striped_anew_are_not_found(store: FilledStore) -> None:
    """Their headers are there, and what was behind them may be another block's."""
    index, _ = open_index(store.place)
    epochs = {slot: index.epoch(slot) for slot in SLOTS}
    index.close()
    manifest = Manifest.load(store.state)
    assert manifest is not None
    kept = {slot for slot in SLOTS if epochs[slot] >= epochs[8]}
    assert 0 < len(kept) < len(SLOTS)
    manifest.segments = [replace_segment(s, since=epochs[8]) for s in manifest.segments]
    manifest.save(store.state)
    (store.state / "journal").unlink()
    assert mended(store, journal=1) == kept


def cut_to(manifest: Manifest, slots: int) -> None:
    """The store has only the first slots any more, all in its first segment."""
    segment = manifest.segments[0]
    assert slots <= segment.slots
    stripes = StripeMap(GEOMETRY, segment.lanes, len(manifest.devices))
    extents = tuple(
        Extent(e.device, e.begin, stripes.device_units(e.device, slots)) for e in segment.extents
    )
    manifest.segments = [Segment(0, slots, slots, segment.lanes, extents)]
    manifest.numbers = slots


def test_records_of_slots_that_do_not_exist(store: FilledStore) -> None:
    manifest = Manifest.load(store.state)
    assert manifest is not None
    cut_to(manifest, 22)
    manifest.save(store.state)
    beyond = {slot for slot in SLOTS if slot >= 22}
    report = check(store, mend=True)
    assert kinds(report) == {"journal": 1, "data_file": 2 * RANKS}
    assert report.stored == len(SLOTS) - len(beyond)
    assert (report.bad, report.unrepaired) == (0, 0)
    assert check(store).clean
    assert store.served() == set(SLOTS) - beyond


def test_the_order_of_eviction_survives(store: FilledStore) -> None:
    before = order_of(store)
    device, at = store.at(8, 200)
    flip(store.data(device, 0), at)
    check(store, mend=True)
    assert order_of(store) == [slot for slot in before if slot != 8]


# ---- the manifest ----


@pytest.mark.parametrize("name", [NAME, COPY])
def test_one_of_two_manifests_is_enough(store: FilledStore, name: str) -> None:
    (store.state / name).unlink()
    assert mended(store, manifest=1) == set(SLOTS)
    assert (store.state / NAME).read_bytes() == (store.state / COPY).read_bytes()


def test_a_copy_that_is_behind_does_not_use_epochs_twice(store: FilledStore) -> None:
    """It was written before the last opening, and the original is gone."""
    manifest = Manifest.load_copy(store.state)
    assert manifest is not None
    newest = manifest.opened
    manifest.opened -= 1
    manifest.save(store.state)
    (store.state / NAME).unlink()
    assert mended(store, manifest=2) == set(SLOTS)
    restored = Manifest.load(store.state)
    assert restored is not None
    assert restored.opened > newest


def test_without_any_manifest_there_is_nothing_to_check(store: FilledStore) -> None:
    for name in (NAME, COPY):
        flip(store.state / name, 7)
    for device in store.devices:
        flip(device / COPY, 7)
    with pytest.raises(FormatError, match=f"{store.state / NAME} is damaged"):
        check(store, mend=True)
    for name in (NAME, COPY):
        (store.state / name).unlink()
    with pytest.raises(StoreError, match=f"no {NAME} in {store.state}"):
        check(store)


@pytest.mark.parametrize("device", [0, 1])
def test_a_copy_on_a_device_is_enough(store: FilledStore, device: int) -> None:
    for name in (NAME, COPY):
        flip(store.state / name, 7)
    flip(store.devices[1 - device] / COPY, 7)
    assert mended(store, manifest=3) == set(SLOTS)
    wanted = (store.state / NAME).read_bytes()
    places = (store.state, *store.devices)
    assert all((place / COPY).read_bytes() == wanted for place in places[:1])
    assert check(store).clean


def test_a_manifest_from_a_backup_is_brought_up_to_date(store: FilledStore) -> None:
    """Copies on the devices are newer, and its journal is void: headers say what is stored."""
    backup = {name: (store.state / name).read_bytes() for name in (NAME, COPY, "journal")}
    assert store.served() == set(SLOTS)  # another opening
    for name, data in backup.items():
        (store.state / name).write_bytes(data)
    report = check(store)
    assert "is older than its copy on" in report.problems[1].text
    assert mended(store, journal=1, manifest=1) == set(SLOTS)
