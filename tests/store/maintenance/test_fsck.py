"""The check of a store: whatever is damaged is found, named, and nothing else."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import disk_directory
from tests.store.checked_store import (
    SLOTS,
    check,
    copied,
    kinds,
    make,
    mended,
    on_device,
    order_of,
)
from tests.store.conftest import array, key_of
from tests.store.filled_store import GEOMETRY, RANKS, FilledStore, flip, loop_devices
from tests.store.index.test_recovery import of_version
from tests.store.opening import close
from vllm_ssdkv.base.checksum import checksum_bytes
from vllm_ssdkv.base.errors import (
    DeadlineError,
    DeviceError,
    FormatError,
    StoreError,
    StoreLockedError,
)
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.io_engine import EngineOptions, FaultRule
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, JOURNAL, RECORD_BYTES, VERSION
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest
from vllm_ssdkv.store.format.segment import Extent, Segment
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.engines.protocol import IoEngine
from vllm_ssdkv.store.maintenance import slot_check, slot_reader
from vllm_ssdkv.store.maintenance.fsck import examined
from vllm_ssdkv.store.maintenance.fsck_report import REPAIR, Problem, Report
from vllm_ssdkv.store.maintenance.remove import plan_removal, remove
from vllm_ssdkv.store.maintenance.repair import repair
from vllm_ssdkv.store.open import open_index, open_rank


@pytest.fixture(scope="module")
def original() -> Iterator[FilledStore]:
    """A store that every test leaves as it was."""
    with tempfile.TemporaryDirectory(prefix="ssdkv-fsck-", dir=disk_directory()) as root:
        yield make(Path(root))


@pytest.fixture
def store(original: FilledStore) -> Iterator[FilledStore]:
    with copied(original) as copy:
        yield copy


def test_a_good_store_is_clean(original: FilledStore) -> None:
    report = check(original)
    assert report.clean, report.problems
    assert (report.stored, report.bad, report.ranks) == (len(SLOTS), 0, RANKS)
    assert report.checked_slots == len(SLOTS) * RANKS
    assert report.checked_bytes == len(SLOTS) * RANKS * GEOMETRY.slot_bytes
    assert report.devices == [str(path) for path in original.devices]
    assert report.slots == original.placement.slots


def test_a_check_changes_nothing(original: FilledStore) -> None:
    files = [f for d in (*original.devices, original.state) for f in d.iterdir()]
    before = {f: (f.stat().st_mtime_ns, f.stat().st_size) for f in files}
    check(original)
    assert {f: (f.stat().st_mtime_ns, f.stat().st_size) for f in files} == before
    content = {f: checksum_bytes(f.read_bytes()) for f in files}
    check(original, mend=True)  # a repair of nothing changes nothing either
    assert {f: checksum_bytes(f.read_bytes()) for f in files} == content


def test_many_batches_are_as_one(original: FilledStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_check, "_BATCH_BYTES", 2 * GEOMETRY.slot_bytes)
    heard: list[tuple[int, int]] = []
    device, at = original.at(13, GEOMETRY.header_bytes)
    flip(original.data(device, 1), at)
    with examined(
        original.devices, original.state, progress=lambda *step: heard.append(step)
    ) as found:
        report = found.report
    flip(original.data(device, 1), at)
    assert [(p.kind, p.subject) for p in report.problems] == [("page", "slot 13, rank 1")]
    total = RANKS * len(SLOTS)
    assert heard[0] == (0, total)
    assert heard[-1] == (total, total)
    assert len(heard) == 1 + RANKS * -(-len(SLOTS) // 2)


def test_an_encrypted_store_needs_no_key() -> None:
    """Damage is found, and repaired, by whoever can read the drives."""
    with tempfile.TemporaryDirectory(prefix="ssdkv-fsck-", dir=disk_directory()) as root:
        store = make(Path(root), encrypted=True)
        assert check(store).clean
        shape = store.geometry
        # Pages begin behind tags, too. The last tag is the header's own.
        damage = {(5, shape.page_offset(3) + 7), (21, shape.header_used - 1)}
        for slot, offset in damage:
            device, at = store.at(slot, offset)
            flip(store.data(device, 1), at)
        device, _ = store.at(0, 0)
        flip(store.data(device, 0), COPY_OFFSETS[1])
        report = check(store, mend=True)
        assert {(p.kind, p.subject) for p in report.problems} == {
            ("page", "slot 5, rank 1"),
            ("header", "slot 21, rank 1"),
            ("superblock", str(store.data(device, 0))),
        }
        assert check(store).clean
        assert store.served() == set(SLOTS) - {5, 21}


# ---- a flipped byte anywhere ----


def meaning(store: FilledStore, device: int, rank: int, offset: int) -> tuple[str, str] | None:
    """Kind and subject of the problem that one wrong byte of a data file is; None for none."""
    if offset < SUPERBLOCK_BYTES:
        inside = any(0 <= offset - copy < BLOCK_BYTES for copy in COPY_OFFSETS)
        return ("superblock", str(store.data(device, rank))) if inside else None
    whole = store.placement.extents(array(store.slots), 0, GEOMETRY.slot_bytes)
    for one in np.flatnonzero(whole.device == device).tolist():
        begin = int(whole.offset[one])
        if not begin <= offset < begin + int(whole.length[one]):
            continue
        index = int(whole.slot_index[one])
        byte = int(whole.buffer[one]) - index * GEOMETRY.slot_bytes + offset - begin
        subject = f"slot {store.slots[index]}, rank {rank}"
        if byte < GEOMETRY.header_bytes:
            return "header", subject
        used = (byte - GEOMETRY.header_bytes) % GEOMETRY.page_bytes < GEOMETRY.payload_bytes
        return ("page", subject) if used else None
    return None


Place = tuple[str, int, int, int, int]
"""A part of the store, and where in it: device, rank, slot, position from 0 to 1 in 2^20."""


@st.composite
def places(draw: st.DrawFn) -> Place:
    part = draw(
        st.sampled_from(
            ("header", "page", "padding", "superblock", "gap", "anywhere", NAME, COPY, "journal")
        )
    )
    position = draw(st.integers(0, (1 << 20) - 1))
    return (
        part,
        draw(st.integers(0, 1)),
        draw(st.integers(0, RANKS - 1)),
        draw(st.sampled_from(SLOTS)),
        position,
    )


def locate(store: FilledStore, place: Place) -> tuple[Path, int, int, int]:
    """File, offset, device (or -1), rank of a place."""
    part, device, rank, slot, position = place

    def within(begin: int, length: int) -> int:
        return begin + position * length // (1 << 20)

    if part in (NAME, COPY, "journal"):
        path = store.state / part
        return path, within(0, path.stat().st_size), -1, rank
    match part:
        case "header":
            device, at = store.at(slot, within(0, GEOMETRY.header_bytes))
        case "page" | "padding":
            page = position % GEOMETRY.pages
            start = GEOMETRY.page_offset(page)
            length = GEOMETRY.payload_bytes
            if part == "padding":
                start, length = start + length, GEOMETRY.page_bytes - length
            device, at = store.at(slot, within(start, length))
        case "superblock":
            at = within(0, BLOCK_BYTES) + COPY_OFFSETS[position % 2]
        case "gap":
            at = within(BLOCK_BYTES, COPY_OFFSETS[1] - BLOCK_BYTES)
        case _:
            at = within(0, store.data(device, rank).stat().st_size)
    return store.data(device, rank), at, device, rank


def expected(store: FilledStore, path: Path, at: int, device: int, rank: int) -> set[str]:
    if device < 0:
        return {"journal" if path.name == "journal" else "manifest"}
    found = meaning(store, device, rank, at)
    return set() if found is None else {found[0]}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=places(), bit=st.integers(0, 7))
def test_every_flipped_bit_is_found_and_named(
    original: FilledStore, place: Place, bit: int
) -> None:
    path, at, device, rank = locate(original, place)
    flip(path, at, 1 << bit)
    try:
        report = check(original)
    finally:
        flip(path, at, 1 << bit)
    assert report.counts.keys() == expected(original, path, at, device, rank)
    if device >= 0 and (named := meaning(original, device, rank, at)):
        assert [(p.kind, p.subject) for p in report.problems] == [named]
        assert report.bad == (named[0] in ("header", "page"))


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(damage=st.lists(st.tuples(places(), st.integers(0, 7)), min_size=1, max_size=4))
def test_a_repaired_store_is_clean_and_serves_what_was_good(
    original: FilledStore, damage: list[tuple[Place, int]]
) -> None:
    lost: set[int] = set()
    with copied(original) as store:
        manifests: set[Path] = set()
        for place, bit in damage:
            path, at, device, rank = locate(store, place)
            if path.name in (NAME, COPY):
                manifests.add(path)
                if len(manifests) == 2:  # one of the two is always left
                    continue
            flip(path, at, 1 << bit)
            if path.name == "journal" and at >= HEADER_BYTES:
                # A clean close leaves one record per slot, the first one the oldest.
                lost.add(order_of(original)[(at - HEADER_BYTES) // RECORD_BYTES])
            found = None if device < 0 else meaning(store, device, rank, at)
            if found is not None and found[0] in ("header", "page"):
                lost.add(int(found[1].removeprefix("slot ").partition(",")[0]))
        report = check(store, mend=True)
        assert report.unrepaired == 0, report.problems
        assert all(problem.repaired for problem in report.problems)
        again = check(store)
        assert again.clean, again.problems
        assert again.stored == report.stored - report.bad
        assert store.served() >= set(SLOTS) - lost  # two flips may undo each other


# ---- files ----


def test_both_superblocks_are_restored_when_a_block_proves_the_file(store: FilledStore) -> None:
    for offset in COPY_OFFSETS:
        flip(store.data(1, 0), offset + 100)
    with pytest.raises(FormatError, match="ssdkv fsck --repair"):
        open_rank(store.place, 0, Counters())
    assert mended(store, superblock=1) == set(SLOTS)


def test_a_file_that_nothing_proves_is_left_alone(store: FilledStore) -> None:
    """It may be anybody's."""
    data = store.data(1, 0)
    size = data.stat().st_size
    data.write_bytes(np.random.default_rng(5).bytes(size))
    before = data.read_bytes()
    gone = on_device(store, 1)
    report = check(store, mend=True)
    assert kinds(report) == {"superblock": 1, "header": len(gone)}
    assert report.unrepaired == 1
    assert data.read_bytes() == before
    again = check(store)
    assert kinds(again) == {"superblock": 1}
    assert again.stored == len(SLOTS) - len(gone)
    data.unlink()
    assert mended(store, data_file=1) == set(SLOTS) - gone


@pytest.mark.parametrize("loss", ["missing", "empty", "zeros"])
def test_a_lost_data_file_costs_what_was_on_it(store: FilledStore, loss: str) -> None:
    data, size = store.data(0, 1), store.data(0, 1).stat().st_size
    gone = on_device(store, 0)
    data.unlink()
    if loss == "missing":
        expected = {"data_file": 1, "unreadable": len(gone)}
    else:
        data.touch(mode=0o600)
        expected = {"data_file": 1, "superblock": 1, "unreadable": len(gone)}
        if loss == "zeros":
            os.truncate(data, size)
            expected = {"superblock": 1, "header": len(gone)}
    assert mended(store, **expected) == set(SLOTS) - gone


def test_the_state_directory_is_no_device(tmp_path: Path) -> None:
    """Named alone it stands for the store, also where that has one device."""
    device, state = tmp_path / "ssd", tmp_path / "state"
    for place in (device, state):
        place.mkdir()
    store = FilledStore((device,), state, (0, 1, 2), ranks=1)
    store.fill()
    for named in ([state], [state, device], [device, state]):
        with examined(named, write=True) as found:
            assert found.report.clean, found.report.problems
            assert found.report.stored == 3
            repair(found)
    assert store.served() == {0, 1, 2}
    assert store.data(0, 0) in plan_removal([state]).files


def test_devices_that_have_changed_places_are_found(tmp_path: Path) -> None:
    """By what their files say: repairing them in the wrong order would cost everything."""
    store = make(tmp_path)
    first, second = store.devices
    spare = first.with_name("spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    with examined([], store.state, write=True) as found:
        assert found.store.paths == (second, first)
        assert found.report.clean, found.report.problems
        repair(found)
    # A directory with files of both is for people to sort out.
    shutil.copy(second / "rank0.data", first / "rank0.data")
    for rank in range(RANKS):
        (second / f"rank{rank}.data").unlink()
    with pytest.raises(FormatError, match="is a data file of"), examined([], store.state):
        pass


def test_short_and_long_files(store: FilledStore) -> None:
    short, long = store.data(0, 0), store.data(1, 1)
    size, half = long.stat().st_size, SUPERBLOCK_BYTES + 6 * GEOMETRY.slot_bytes
    gone = {s for s in on_device(store, 0) if store.at(s, GEOMETRY.slot_bytes - 1)[1] >= half}
    assert 0 < len(gone) < len(on_device(store, 0))
    os.truncate(short, half)
    os.truncate(long, size + 12345)
    assert mended(store, data_file=2, unreadable=len(gone)) == set(SLOTS) - gone
    assert (short.stat().st_size, long.stat().st_size) == (size, size)


def test_data_files_of_no_rank(store: FilledStore) -> None:
    """A leftover of ours goes, what may be somebody's document stays."""
    ours, theirs = store.data(0, 7), store.data(1, 8)
    shutil.copyfile(store.data(0, 1), ours)
    theirs.write_text("dear diary")
    report = check(store, mend=True)
    assert kinds(report) == {"orphan": 2}
    assert [p.repaired for p in report.problems] == [True, False]
    assert "has no superblock of this store" in report.problems[1].text
    assert not ours.exists()
    assert theirs.read_text() == "dear diary"
    theirs.unlink()
    assert check(store).clean
    assert store.served() == set(SLOTS)


def test_a_file_made_anew_before_a_crash(store: FilledStore) -> None:
    """The worker had claimed it, and was killed before it saved the manifest."""
    manifest = Manifest.load(store.state)
    assert manifest is not None
    manifest.devices[0].files[0] = str(UUID(int=7))
    manifest.save(store.state)
    assert mended(store, superblock=1) == set(SLOTS)


# ---- whose it is ----


def test_a_store_in_use_is_not_checked(store: FilledStore) -> None:
    opened = open_rank(store.place, 1, Counters())
    with pytest.raises(StoreLockedError, match=r"rank1\.data is in use"):
        check(store)
    opened.files.engine.close(1.0)
    opened.close()
    index, _ = open_index(store.place)
    with pytest.raises(StoreLockedError, match="journal is in use"):
        check(store, mend=True)
    index.close()
    assert check(store).clean
    with examined(store.devices, store.state), pytest.raises(StoreLockedError):
        check(store)


def test_other_stores_files_are_never_repaired(store: FilledStore, original: FilledStore) -> None:
    with tempfile.TemporaryDirectory(prefix="ssdkv-fsck-", dir=disk_directory()) as root:
        other = make(Path(root))
        foreign = other.moved((store.devices[0], other.devices[1]), store.state)
        before = other.data(1, 0).read_bytes()
        with pytest.raises(FormatError, match="belongs to another store"):
            check(foreign, mend=True)
        assert other.data(1, 0).read_bytes() == before
        shutil.copyfile(other.state / "journal", store.state / "journal")
        with pytest.raises(StoreError, match="is not the journal of this store"):
            check(store, mend=True)
        later = of_version((original.state / "journal").read_bytes(), VERSION + 1)
        (store.state / "journal").write_bytes(later)
        with pytest.raises(FormatError, match=f"has format version {VERSION + 1}, this release"):
            check(store, mend=True)
        assert (store.state / "journal").read_bytes() == later
    swapped = original.moved(original.devices[::-1], original.state)
    assert check(swapped).clean


def test_raw_devices(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with loop_devices(tmp_path, 2) as devices:
        store = FilledStore(tuple(devices), state, SLOTS, ranks=1)
        store.fill()
        assert check(store).clean
        flip(devices[0], COPY_OFFSETS[0] + 50)
        device, at = store.at(21, GEOMETRY.header_bytes)
        flip(devices[device], at)
        assert mended(store, superblock=1, page=1) == set(SLOTS) - {21}
        for offset in COPY_OFFSETS:
            flip(devices[1], offset + 50)
        assert mended(store, superblock=1) == set(SLOTS) - {21}
        remove(plan_removal([], state))
        assert list(state.iterdir()) == []
        store.fill()  # the devices are new
        assert store.served() == set(SLOTS)


@pytest.mark.parametrize("at", [4096, 65536, 1 << 19 | 4096], ids=["raid", "btrfs", "volume"])
def test_a_raw_device_with_something_else_is_left_alone(tmp_path: Path, at: int) -> None:
    """Not all file systems, RAIDs and volumes begin where superblocks of ours lie."""
    state = tmp_path / "state"
    state.mkdir()
    with loop_devices(tmp_path, 2) as devices:
        store = FilledStore(tuple(devices), state, SLOTS, ranks=1, options={"trim": True})
        store.fill()
        with devices[1].open("r+b") as device:
            device.write(bytes(16 << 20))
            device.seek(at)
            device.write(b"_BHRfS_M")
        before = devices[1].read_bytes()
        with pytest.raises(FormatError, match=r"is not empty and holds no superblock.*raw device"):
            store.served()
        assert devices[1].read_bytes() == before
        report = check(store, mend=True)
        assert devices[1].read_bytes() == before
        assert report.unrepaired > 0


def test_a_raw_device_that_is_too_small_is_left_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with loop_devices(tmp_path, 2) as devices:
        store = FilledStore(tuple(devices), state, SLOTS, ranks=1)
        store.fill()
        manifest = Manifest.load(state)
        assert manifest is not None
        last = manifest.segments[-1]
        more = tuple(Extent(e.device, e.begin, e.units + 1000) for e in last.extents)
        manifest.segments[-1] = Segment(last.first, last.numbers, last.slots, last.lanes, more)
        manifest.save(state)
        report = check(store, mend=True)
        assert kinds(report) == {"data_file": 2}
        assert report.unrepaired == 2
        assert "16777216 bytes" in report.problems[0].text
        assert "start the engine once with a capacity" in report.problems[0].cure
        store.served()
        assert check(store).clean


# ---- devices that fail ----


@contextmanager
def faulty(monkeypatch: pytest.MonkeyPatch, *rules: FaultRule) -> Iterator[None]:
    """Engines of checks have these faults."""

    def opener(options: EngineOptions, *rest: Any, **more: Any) -> IoEngine:  # noqa: ANN401 - handed on
        return open_engine(replace(options, faults=rules), *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(slot_reader, "open_engine", opener)
        yield


def test_an_unreadable_slot_costs_itself_only(
    store: FilledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch fails, then one slot alone: a neighbour of the bad sector is read again."""
    with faulty(monkeypatch, FaultRule(kind="eio", op="read", device=0, count=1)):
        assert check(store).clean
    fails = len(on_device(store, 0)) + 1  # each of the first batch, and one of the second tries
    with faulty(monkeypatch, FaultRule(kind="eio", op="read", device=0, count=fails)):
        report = check(store, mend=True)
    assert kinds(report) == {"unreadable": RANKS}  # each rank's engine has these faults
    assert (report.bad, report.unrepaired) == (1, 0)
    assert len(store.served()) == len(SLOTS) - 1


def test_a_device_that_hangs_is_said_and_repairs_nothing(
    store: FilledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall = FaultRule(kind="stall", op="read", device=1, seconds=1.5)
    with monkeypatch.context() as hurried, faulty(monkeypatch, stall):
        hurried.setattr(slot_reader, "DEADLINE_S", 0.3)
        with pytest.raises(DeadlineError, match=r"did not end within 0\.3"):
            check(store, mend=True)
    assert check(store).clean


# ---- the check of a store while a device is absent: it is no reason to drop what lies there ----


@contextmanager
def unmounted(store: FilledStore, device: int) -> Iterator[None]:
    """The directory of a device is not there."""
    away = store.devices[device].with_name("elsewhere")
    store.devices[device].rename(away)
    yield
    away.rename(store.devices[device])


def test_what_is_on_an_absent_device_is_counted_apart(tmp_path: Path) -> None:
    store = make(tmp_path)
    gone = on_device(store, 1)
    here = sorted(set(SLOTS) - gone)
    device, at = store.at(here[0], GEOMETRY.header_bytes)
    flip(store.data(device, 1), at)
    with unmounted(store, 1):
        report = check(store)
    assert kinds(report) == {"device": 1, "page": 1}
    assert report.problems[0].subject == str(store.devices[1])
    assert "mount it" in report.problems[0].text
    assert f"parts of {len(gone)} block(s) that are out of reach" in report.problems[0].text
    assert report.problems[1].subject == f"slot {here[0]}, rank 1"
    assert (report.stored, report.bad, report.out_of_reach) == (len(SLOTS), 1, len(gone))
    assert report.checked_slots == RANKS * len(here)
    assert report.checked_bytes == RANKS * len(here) * GEOMETRY.slot_bytes


def test_nothing_is_repaired_while_a_device_is_absent(tmp_path: Path) -> None:
    """It is no reason to drop what lies there."""
    store = make(tmp_path)
    journal = store.state / "journal"
    flip(journal, 40)
    before = journal.read_bytes()
    with unmounted(store, 1):
        with pytest.raises(DeviceError, match=f"{store.devices[1]}.* would drop.* mount it"):
            check(store, mend=True)
        assert journal.read_bytes() == before
        assert not store.devices[1].exists()
    assert mended(store, journal=1) == set(SLOTS)


def test_what_an_opened_store_goes_on_without_is_no_finding(tmp_path: Path) -> None:
    """It has been started without the device: what lies there is kept, by a repair as well."""
    store = make(tmp_path)
    gone = on_device(store, 1)
    with unmounted(store, 1):
        one = replace(store, devices=store.devices[:1])
        assert one.served() == set(SLOTS) - gone
        report = check(one)
        assert report.clean, report.problems
        assert report.devices == [str(path) for path in store.devices]
        assert (report.stored, report.out_of_reach) == (len(SLOTS), len(gone))
        lost = min(set(SLOTS) - gone)
        device, at = store.at(lost, GEOMETRY.header_bytes)
        flip(store.data(device, 0), at)
        assert mended(one, page=1) == set(SLOTS) - gone - {lost}
    assert store.served() == set(SLOTS) - {lost}


# ---- every finding names a cure, and who takes it has a store that is clean ----


FEW = (0, 1, 2, 5, 8, 13)

Cure = Callable[[], object] | None
"""Advice of the finding besides a repair."""


def device_away(store: FilledStore) -> Cure:
    away = store.devices[1].rename(store.devices[1].with_name("away"))
    return lambda: away.rename(store.devices[1])


def device_dead(store: FilledStore) -> Cure:
    shutil.rmtree(store.devices[1])
    without = replace(store, devices=store.devices[:1], replicas=1)
    return without.served


def manifest_damaged(store: FilledStore) -> Cure:
    flip(store.state / NAME, 9)
    return None


def manifest_gone(store: FilledStore) -> Cure:
    for name in (NAME, COPY):
        (store.state / name).unlink()
    return None


def copy_beside_damaged(store: FilledStore) -> Cure:
    flip(store.state / COPY, 9)
    return None


def copy_on_device_missing(store: FilledStore) -> Cure:
    (store.devices[1] / COPY).unlink()
    return None


def state_of_a_backup(store: FilledStore) -> Cure:
    backup = {file.name: file.read_bytes() for file in store.state.iterdir()}
    store.served()
    for name, data in backup.items():
        (store.state / name).write_bytes(data)
    return None


def one_superblock(store: FilledStore) -> Cure:
    flip(store.data(0, 1), COPY_OFFSETS[1] + 50)
    return None


def both_superblocks(store: FilledStore) -> Cure:
    for offset in COPY_OFFSETS:
        flip(store.data(0, 1), offset + 50)
    return None


def somebody_s_file(store: FilledStore) -> Cure:
    data = store.data(1, 0)
    data.write_bytes(b"\x11" * data.stat().st_size)
    return data.unlink


def data_file_missing(store: FilledStore) -> Cure:
    store.data(1, 0).unlink()
    return None


def data_file_short(store: FilledStore) -> Cure:
    os.truncate(store.data(1, 0), SUPERBLOCK_BYTES + 4096)
    return None


def data_file_long(store: FilledStore) -> Cure:
    os.truncate(store.data(1, 0), store.data(1, 0).stat().st_size + 8192)
    return None


def journal_missing(store: FilledStore) -> Cure:
    (store.state / "journal").unlink()
    return None


def journal_header(store: FilledStore) -> Cure:
    flip(store.state / "journal", 30)
    return None


def journal_records(store: FilledStore) -> Cure:
    for record in (0, 2):
        flip(store.state / "journal", 128 + 72 * record + 40)
    return None


def slot_header(store: FilledStore) -> Cure:
    device, at = store.at(5, 60)
    flip(store.data(device, 1), at)
    return None


def slot_page(store: FilledStore) -> Cure:
    for copy in range(store.replicas):
        device, at = store.at(5, GEOMETRY.page_offset(1), copy)
        flip(store.data(device, 1), at)
    return None


def leftover_of_ours(store: FilledStore) -> Cure:
    shutil.copyfile(store.data(0, 1), store.data(0, 5))
    return None


def leftover_of_others(store: FilledStore) -> Cure:
    store.data(0, 5).write_text("a diary")
    return store.data(0, 5).unlink


FAULTS = {
    device_away: "mount it",
    device_dead: "if it is dead, start the engine once without it",
    manifest_damaged: REPAIR,
    manifest_gone: REPAIR,
    copy_beside_damaged: REPAIR,
    copy_on_device_missing: REPAIR,
    state_of_a_backup: REPAIR,
    one_superblock: REPAIR,
    both_superblocks: REPAIR,
    somebody_s_file: "delete it if nobody needs it, then ssdkv fsck --repair",
    data_file_missing: REPAIR,
    data_file_short: REPAIR,
    data_file_long: REPAIR,
    journal_missing: REPAIR,
    journal_header: REPAIR,
    journal_records: REPAIR,
    slot_header: REPAIR,
    slot_page: REPAIR,
    leftover_of_ours: REPAIR,
    leftover_of_others: "move it away, or delete it if nobody needs it",
}


TWICE = (device_away, device_dead, somebody_s_file, data_file_missing, journal_missing, slot_page)
"""Findings that are others where blocks have two copies."""

CASES = [*((fault, 1) for fault in FAULTS), *((fault, 2) for fault in TWICE)]


@pytest.mark.parametrize(
    ("fault", "replicas"), CASES, ids=lambda it: it if isinstance(it, int) else it.__name__
)
def test_who_takes_the_cure_has_a_clean_store(
    fault: Callable[[FilledStore], Cure], replicas: int, tmp_path: Path
) -> None:
    places = [tmp_path / name for name in ("ssd0", "ssd1", "state")]
    for place in places:
        place.mkdir()
    store = FilledStore(tuple(places[:2]), places[2], FEW, replicas=replicas)
    store.fill()
    cure = fault(store)
    problems: list[Problem] = check(store).problems
    assert problems
    assert any(FAULTS[fault] in problem.cure for problem in problems), problems
    if cure is not None:
        cure()
    for _ in range(3):  # what a file that is made anew does not hold is found afterwards
        found = check(store)
        cures = {problem.cure for problem in found.problems}
        if any("start the engine" in text for text in cures):
            store.served()
        if any(REPAIR in text for text in cures):
            check(store, mend=True)
    assert found.clean, found.problems
    if fault is not device_dead:  # its directory is made anew, as that of another drive
        store.served()
        assert check(store).clean


# ---- ``ssdkv fsck --from-headers``: blocks that a whole journal says were given up ----


def give_up(store: FilledStore, slots: Sequence[int], *, erase: bool = False) -> None:
    """Take blocks out of the journal, as earlier releases did when a drive was out of use."""
    ranks = [open_rank(store.place, rank, Counters()) for rank in range(store.ranks)]
    index, rebalancer = open_index(store.place)
    for slot in slots:
        index.drop(index.lookup([key_of(slot)]))
    if erase:
        rebalancer.forget_stored()
    assert rebalancer.close()
    assert index.close()
    for rank in ranks:
        close(rank)


def look(store: FilledStore, *, mend: bool = False) -> Report:
    with examined(store.devices, store.state, write=mend, from_headers=True) as found:
        if mend:
            repair(found)
        return found.report


def test_they_are_found_again(tmp_path: Path) -> None:
    store = make(tmp_path)
    give_up(store, SLOTS)
    assert check(store).clean
    assert store.served() == set()
    before = (store.state / JOURNAL).read_bytes()
    report = look(store)
    assert report.counts == {"journal": 1}
    assert f"{len(SLOTS)} block(s) that slots hold" in report.problems[0].text
    assert "--repair --from-headers" in report.problems[0].cure
    assert (store.state / JOURNAL).read_bytes() == before, "it says first what it would do"
    assert look(store, mend=True).unrepaired == 0
    assert (store.state / "journal.rejected").read_bytes() == before
    assert look(store).clean
    assert store.served() == set(SLOTS)


def test_what_was_to_be_erased_stays_erased(tmp_path: Path) -> None:
    store = make(tmp_path)
    give_up(store, [], erase=True)
    report = look(store, mend=True)
    assert (report.clean, report.found) == (True, 0)
    assert store.served() == set()
    store.fill()
    give_up(store, SLOTS[:1])
    assert look(store, mend=True).found == 1
    assert store.served() == set(SLOTS)


def test_what_is_not_whole_stays_given_up(tmp_path: Path) -> None:
    store = make(tmp_path)
    give_up(store, SLOTS[:2])
    device, at = store.at(SLOTS[0], GEOMETRY.header_bytes)
    flip(store.data(device, 0), at)
    report = look(store, mend=True)
    assert (report.found, report.lost, report.bad) == (1, 1, 0)
    assert store.served() == set(SLOTS) - {SLOTS[0]}


def test_the_newest_block_of_a_slot_and_of_a_key_counts(tmp_path: Path) -> None:
    """Written to the end, and not journalled any more: the headers know better."""
    store = make(tmp_path)
    old = (store.state / JOURNAL).read_bytes()
    give_up(store, SLOTS)
    store.fill()  # the same keys, in the same slots, with later epochs
    assert store.served() == set(SLOTS)
    (store.state / JOURNAL).write_bytes(old)
    report = look(store, mend=True)
    assert (report.stored, report.found, report.bad) == (len(SLOTS), len(SLOTS), 0)
    assert store.served() == set(SLOTS)
