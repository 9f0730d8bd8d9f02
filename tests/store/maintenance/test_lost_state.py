"""The device with the state directory is lost: what has a copy elsewhere is found again."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kit.waiting import PATIENCE_S
from tests.store.checked_store import check
from tests.store.conftest import array, key_of
from tests.store.filled_store import GEOMETRY, FilledStore, flip, loop_devices
from tests.store.opening import close
from vllm_ssdkv.base.errors import DeadlineError, DeviceError, FormatError, StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.devices.manifest_copies import AREAS, CopySpreader, read_copy
from vllm_ssdkv.store.format import slot_geometry
from vllm_ssdkv.store.format.journal_record import JOURNAL
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest
from vllm_ssdkv.store.maintenance import journal_rebuild
from vllm_ssdkv.store.maintenance.offline_store import find_store
from vllm_ssdkv.store.open import open_index, open_rank

SLOTS = (0, 1, 2, 5, 8, 13, 21, 34, 55)

Make = Callable[..., FilledStore]


@pytest.fixture
def make(tmp_devices: Callable[[int], list[Path]]) -> Make:
    """A filled store whose state is on its first device. Each device is below a mount point."""

    def filled(count: int = 3, replicas: int = 2, **options: Any) -> FilledStore:  # noqa: ANN401 - any option
        devices = tuple(root / "kv" / "store" for root in tmp_devices(count))
        for device in devices:
            device.mkdir(parents=True)
        given = {"state_dir": None} | options
        store = FilledStore(devices, devices[0], SLOTS, replicas=replicas, options=given)
        store.fill()
        return store

    return filled


def pull(store: FilledStore, device: int = 0) -> Callable[[], object]:
    """A drive is gone, mount point and all; puts it back."""
    mounted = store.devices[device].parent
    away = mounted.with_name("away")
    mounted.rename(away)
    return lambda: away.rename(mounted)


def on(store: FilledStore, device: int) -> set[int]:
    """Slots with a part on the device that has no copy elsewhere."""
    out = np.arange(len(store.devices)) == device
    lost = store.placement.lost(out, array(SLOTS))
    return {slot for slot, gone in zip(SLOTS, lost.tolist(), strict=True) if gone}


@pytest.mark.parametrize("how", ["gone", "replaced"])
@pytest.mark.parametrize("recover", ["quiet", "strict"])
def test_what_has_a_copy_elsewhere_is_found(make: Make, how: str, recover: str) -> None:
    store = make(recover=recover)
    back = None
    if how == "gone":
        back = pull(store)
    else:
        shutil.rmtree(store.devices[0])
        store.devices[0].mkdir()
    where = store.place
    home = store.devices[1] if how == "gone" else store.devices[0]
    assert where.state == home
    assert store.served() == set(SLOTS)
    assert (home / NAME).exists()
    moved = replace(store, state=home)
    if how == "replaced":
        check(moved, mend=True)  # brings copies to the new drive
        assert check(moved).clean
    # It goes on like that, and with the drive back where the newest state is.
    assert store.served() == set(SLOTS)
    if back is not None:
        back()
    assert store.served() == set(SLOTS)
    assert store.place.state == home
    assert sum((device / NAME).exists() for device in store.devices) == 1


@pytest.mark.parametrize("unit", [16384, 524288], ids=["striped", "whole"])
def test_with_one_copy_the_rest_is_found(
    make: Make, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_geometry, "STRIPE_UNIT", unit)
    store = make(replicas=1)
    gone = on(store, 0)
    assert gone == set(SLOTS) if unit < GEOMETRY.slot_bytes else 0 < len(gone) < len(SLOTS)
    back = pull(store)
    assert store.served() == set(SLOTS) - gone
    back()
    assert store.served() == set(SLOTS) - gone
    assert check(replace(store, state=store.place.state)).clean


def test_it_is_said_and_counted(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    store = make()
    pull(store)
    place = store.place
    for rank in range(store.ranks):
        close(open_rank(place, rank, Counters()))
    index, _ = open_index(place)
    assert index.gauges()["ready"] == len(SLOTS)
    index.close()
    counters = place.counters
    assert counters.total("manifest_restores") == counters.total("journal_rebuilds") == 1
    assert f"restored from its copy on {store.devices[1]}" in caplog.text
    assert f"which name {len(SLOTS)} stored blocks" in caplog.text


def test_two_kills_while_the_journal_is_made_anew(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make()
    pull(store)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name in ("scan_headers", "write_journal"):
        with monkeypatch.context() as patch:
            patch.setattr(journal_rebuild, name, killed)
            with pytest.raises(KeyboardInterrupt):
                open_index(store.place)
    assert store.served() == set(SLOTS)


def test_an_older_state_that_comes_back_alone_is_no_match_for_the_newer(make: Make) -> None:
    """Each drive was away for a time: the state that was used last counts."""
    store = make()
    back = pull(store, 0)
    assert store.served() == set(SLOTS)
    newest = store.place.stored().revision
    back()
    # The first drive is back before the others are: it knows nothing of what has happened.
    returns = [pull(store, device) for device in (1, 2)]
    older = Manifest.load(store.devices[0])
    assert older is not None
    assert older.revision < newest
    for put_back in returns:
        put_back()
    place = store.place
    assert place.state == store.devices[1]
    assert store.served() == set(SLOTS)
    assert not (store.devices[0] / NAME).exists()
    assert (store.devices[0] / f"{JOURNAL}.rejected").exists()


def test_a_state_directory_of_its_own_is_lost(make: Make, tmp_path: Path) -> None:
    state = tmp_path / "state"
    store = make(state_dir=state)
    assert (state / NAME).exists()
    shutil.rmtree(state)
    assert store.served() == set(SLOTS)
    assert (state / NAME).exists()
    # Another place, or none, is one as well.
    without = replace(store, options={"state_dir": None})
    assert without.place.state == store.devices[0]
    assert without.served() == set(SLOTS)
    elsewhere = tmp_path / "other"
    moved = replace(store, options={"state_dir": elsewhere})
    assert moved.served() == set(SLOTS)
    assert (elsewhere / NAME).exists()


def test_a_state_from_a_backup_is_not_believed(make: Make, tmp_path: Path) -> None:
    state = tmp_path / "state"
    store = make(state_dir=state)
    shutil.copytree(state, tmp_path / "backup")
    assert store.served() == set(SLOTS)
    opened = store.place.stored().opened
    shutil.rmtree(state)
    (tmp_path / "backup").rename(state)
    strict = replace(store, options=store.options | {"recover": "strict"})
    with pytest.raises(FormatError, match=r"is older than its copy on .*like one from a backup"):
        strict.served()
    assert store.served() == set(SLOTS)
    assert store.place.stored().opened == opened + 1
    assert strict.served() == set(SLOTS)


def test_every_device_has_a_copy_and_it_is_up_to_date(make: Make) -> None:
    store = make()
    data = (store.state / NAME).read_bytes()
    assert {(device / COPY).read_bytes() for device in store.devices} == {data}
    # What belongs to somebody else is not written over.
    (store.devices[2] / "rank0.data").unlink()
    (store.devices[2] / "rank1.data").unlink()
    manifest = Manifest.load(store.state)
    assert manifest is not None
    manifest.save(store.state)
    CopySpreader(Counters()).spread(manifest)
    assert (store.devices[1] / COPY).read_bytes() == (store.state / NAME).read_bytes() != data
    assert (store.devices[2] / COPY).read_bytes() == data


def test_a_device_that_takes_no_copy_is_told_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    store = make()
    counters = Counters()
    (store.devices[1] / f"{COPY}.tmp").mkdir()
    manifest = Manifest.load(store.state)
    assert manifest is not None
    spreader = CopySpreader(counters)
    for _ in range(2):
        manifest.save(store.state)
        spreader.spread(manifest)
    assert counters.total("manifest_copy_errors") == 2
    assert caplog.text.count("has no up-to-date copy of store.json") == 1
    assert (store.devices[2] / COPY).read_bytes() == (store.state / NAME).read_bytes()


def test_a_copy_that_raises_is_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ssdkv.store.devices import manifest_copies

    def fail(*_: object) -> None:
        raise ValueError("nobody thought of this")

    store, counters = make(), Counters()
    manifest = Manifest.load(store.state)
    assert manifest is not None
    monkeypatch.setattr(manifest_copies, "write_copy", fail)
    CopySpreader(counters).spread(manifest)
    assert counters.total("manifest_copy_errors") == len(store.devices) - 1


def test_a_device_that_hangs_delays_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ssdkv.store.devices import manifest_copies

    store = make()
    counters, never, ended = Counters(), threading.Event(), threading.Event()
    write = manifest_copies.write_copy
    stuck: list[Path] = []

    def hanging(place: Path, manifest: Manifest) -> None:
        if place == store.devices[1]:
            stuck.append(place)
            never.wait()
        write(place, manifest)
        if place == store.devices[1]:
            ended.set()

    class Writer(threading.Thread):
        """It has all the time that it needs, but where the device hangs."""

        def __init__(self, *, args: tuple[str, Manifest], **more: Any) -> None:  # noqa: ANN401 - a thread's
            super().__init__(args=args, **more)
            self.hangs = Path(args[0]) == store.devices[1]

        def join(self, timeout: float | None = None) -> None:
            super().join(timeout if self.hangs else PATIENCE_S)

    threads = SimpleNamespace(Thread=Writer, Lock=threading.Lock)
    monkeypatch.setattr(manifest_copies, "threading", threads)
    monkeypatch.setattr(manifest_copies, "write_copy", hanging)
    manifest = Manifest.load(store.state)
    assert manifest is not None
    spreader = CopySpreader(counters, deadline_s=0.1)
    for _ in range(3):
        manifest.save(store.state)
        spreader.spread(manifest)
    assert stuck == [store.devices[1]]
    assert counters.total("manifest_copy_errors") == 1
    assert (store.devices[2] / COPY).read_bytes() == (store.state / NAME).read_bytes()
    never.set()
    assert ended.wait(PATIENCE_S)  # what it writes must not meet the removal of its folder


# ---- what must not be found by a header ----


def test_a_slot_that_was_being_overwritten_is_not_served_by_a_sample(make: Make) -> None:
    """Its header is the old one, and a page the new one's: of 16 pages one is looked at."""
    store = make(replicas=1, io={"staging": "4MiB", "verify": "sampled"})
    device, at = store.at(5, GEOMETRY.page_offset(2))
    for rank in range(store.ranks):
        flip(store.data(device, rank), at + 9)
    (store.state / JOURNAL).unlink()
    place = store.place
    ranks = [open_rank(place, rank, Counters()) for rank in range(store.ranks)]
    index, _ = open_index(place)
    found = {slot for slot in SLOTS if len(index.lookup([key_of(slot)]))}
    index.close()
    for rank in ranks:
        close(rank)
    assert found == set(SLOTS) - {5}


def test_what_was_stored_before_a_reset_is_gone(make: Make) -> None:
    """And what was stored after it, too, which was computed with weights that are not on disk."""
    store = make()
    place = store.place
    ranks = [open_rank(place, rank, Counters()) for rank in range(store.ranks)]
    counters = Counters()
    index, rebalancer = open_index(place, counters)
    rebalancer.forget_stored()
    assert index.gauges()["ready"] == 0
    assert counters.total("slots_dropped", cause="reset") == len(SLOTS)
    assert rebalancer.close()
    index.close()
    for rank in ranks:
        close(rank)
    opened = place.stored().opened
    assert {s.since for s in place.stored().segments} == {(opened + 1) << 40}
    (store.state / JOURNAL).unlink()
    assert store.served() == set()
    # What is stored from now on is found again.
    store.fill()
    (store.state / JOURNAL).unlink()
    assert store.served() == set(SLOTS)


def test_a_drive_that_was_away_has_no_say_in_what_it_missed(make: Make) -> None:
    """With one copy: the header may be on another drive, whole, and the pages gone."""
    store = make(replicas=1, count=2)
    shutil.rmtree(store.devices[1])
    store.devices[1].mkdir()
    kept = store.served()
    assert kept == set(SLOTS) - on(store, 1)
    (store.state / JOURNAL).unlink()
    counters = Counters()
    assert store.served() == kept
    assert counters.total("header_mismatches") == 0


def test_recover_none_starts_empty(make: Make) -> None:
    store = make(recover="none")
    (store.state / JOURNAL).unlink()
    assert store.served() == set()


# ---- block devices ----


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[FilledStore]:
    with loop_devices(tmp_path, 2) as devices:
        state = tmp_path / "state"
        state.mkdir()
        store = FilledStore(
            tuple(devices), state, (0, 1, 2), ranks=1, options={"devices": plain(devices)}
        )
        store.fill()
        yield store


def plain(devices: list[Path]) -> list[dict[str, Any]]:
    return [{"path": str(d), "capacity": "16MiB", "weight": 1} for d in devices]


def test_raw_devices_have_copies_too(raw: FilledStore, tmp_path: Path) -> None:
    data = json.loads((raw.state / NAME).read_bytes())
    for device in raw.devices:
        copy = read_copy(device)
        assert copy is not None
        assert (copy.store, copy.revision) == (data["store"], data["revision"])
    assert check(raw).clean
    shutil.rmtree(raw.state)
    raw.state.mkdir()
    assert raw.served() == {0, 1, 2}
    # A torn write leaves the other area.
    newest = read_copy(raw.devices[0])
    assert newest is not None
    found: set[int] = set()
    for area in AREAS:
        flip(raw.devices[0], area + 100)
        left = read_copy(raw.devices[0])
        assert left is not None
        found.add(left.revision)
        flip(raw.devices[0], area + 100)
    assert len(found) == 2
    assert max(found) == newest.revision
    # Without any the store cannot be told from another one's.
    shutil.rmtree(raw.state)
    raw.state.mkdir()
    for device in raw.devices:
        for area in AREAS:
            flip(device, area + 100)
    with pytest.raises(StoreError, match=r"no store\.json"):
        find_store(raw.devices, raw.state)


def test_a_scan_that_fails_is_no_empty_store(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    (store.state / JOURNAL).unlink()

    def hangs(*_: object, **__: object) -> int:
        raise DeadlineError("a read did not end within 60 s on /mnt/a: check the drives")

    with monkeypatch.context() as patch:
        patch.setattr(journal_rebuild, "rebuild_journal", hangs)
        with pytest.raises(DeviceError, match=r"journal is missing.*/mnt/a.*devices.*recover"):
            open_index(store.place)
        place = replace(store, options=store.options | {"recover": "none"}).place
        journal = open_index(place)[0]  # what the message names as a way out
        journal.close()
        assert not journal.counters["recovered"]


def test_after_a_scan_that_failed_the_next_one_counts(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make()
    (store.state / JOURNAL).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(journal_rebuild, "rebuild_journal", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_index(store.place)
    assert store.served() == set(SLOTS)
