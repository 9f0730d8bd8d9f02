"""Removing a store: all of it, nothing else, and never one that is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.filled_store import RANKS, FilledStore, flip, loop_devices
from tests.store.opening import close
from vllm_ssdkv.base.errors import StoreError, StoreLockedError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.devices.manifest_copies import read_copy
from vllm_ssdkv.store.devices.owner import files_named_alike, owner_of, owners_of_data
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest, sealed
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS
from vllm_ssdkv.store.maintenance import remove as removing
from vllm_ssdkv.store.maintenance.remove import plan_left_over, plan_removal, remove
from vllm_ssdkv.store.open import JOURNAL, open_index, open_rank


@pytest.fixture
def store(tmp_devices: Callable[[int], list[Path]]) -> FilledStore:
    *devices, state = tmp_devices(3)
    store = FilledStore(tuple(devices), state, (0, 1, 2))
    store.fill()
    return store


@pytest.fixture
def other(tmp_devices: Callable[[int], list[Path]]) -> FilledStore:
    """Another store, elsewhere."""
    *devices, state = tmp_devices(3)
    store = FilledStore(tuple(devices), state, (0, 1, 2))
    store.fill()
    return store


def content(store: FilledStore) -> set[Path]:
    return {file for place in (*store.devices, store.state) for file in place.iterdir()}


def name_of(store: FilledStore) -> str:
    found = owner_of(store.state / NAME)
    assert found is not None
    return found


def test_all_of_it_goes_and_nothing_else(store: FilledStore) -> None:
    theirs = [
        store.devices[0] / "rank0.data.bak",
        store.state / "notes",
        store.devices[1] / "rankx.data",
    ]
    for file in theirs:
        file.write_text("mine")
    (store.state / "journal.rejected").touch()
    (store.state / "store.json.tmp").touch()
    (store.state / "wear.json").touch()
    found = plan_removal(store.devices, store.state)
    assert (found.store, found.model) == (name_of(store), "some/model")
    assert found.last_opened > 0
    assert len(found.files) == 2 * (RANKS + 1) + len((NAME, COPY, "journal")) + 3
    assert found.files[-1] == store.state / NAME, "the manifest goes last"
    assert {file.name for file in found.files[: 2 * RANKS]} == {"rank0.data", "rank1.data"}
    assert found.nbytes == sum(f.stat().st_blocks * 512 for f in found.files)
    assert (found.raw, found.missing, found.kept) == ((), (), ())
    remove(found)
    assert content(store) == set(theirs)
    with pytest.raises(StoreError, match=NAME):
        plan_removal(store.devices, store.state)
    store.fill()  # the directories are as good as new
    assert store.served() == {0, 1, 2}


@pytest.mark.parametrize("how", ["by its state directory", "one of several devices", "links"])
def test_devices_that_say_they_belong_to_it_need_no_name(
    store: FilledStore, tmp_path: Path, how: str
) -> None:
    named = [store.state]
    if how == "one of several devices":
        named.append(store.devices[0])
    elif how == "links":
        named = [tmp_path / "link", store.state]
        named[0].symlink_to(store.state)
    remove(plan_removal(named))
    assert content(store) == set()


def test_a_store_in_use_stays_whole(store: FilledStore) -> None:
    found, before = plan_removal([], store.state), content(store)
    opened = open_rank(store.place, 1, Counters())
    with pytest.raises(StoreLockedError, match="in use"):
        remove(found)
    close(opened)
    index, _ = open_index(store.place)
    with pytest.raises(StoreLockedError, match="in use"):
        remove(found)
    index.close()
    assert content(store) == before
    assert store.served() == {0, 1, 2}


def test_an_interrupted_removal_can_be_started_again(store: FilledStore) -> None:
    files = plan_removal([], store.state).files
    for count in (1, 3, 5, 6, len(files) - 1):
        for file in files[:count]:
            file.unlink(missing_ok=True)
        left = plan_removal([], store.state)
        assert set(left.files) == set(files[count:])
    remove(left)
    assert content(store) == set()


def test_a_device_that_is_away_is_named(store: FilledStore) -> None:
    away = store.devices[1].with_name("away")
    store.devices[1].rename(away)
    found = plan_removal([], store.state)
    assert found.missing == (store.devices[1],)
    remove(found)
    assert files_named_alike(store.devices[0]) == files_named_alike(store.state) == []
    assert len(files_named_alike(away)) == RANKS + 1


# ---- whose is it ----


def refused(before: set[Path], store: FilledStore, text: str, *named: Path) -> None:
    with pytest.raises(StoreError, match=text):
        plan_removal(named)
    assert content(store) == before


def test_a_backup_of_the_state_is_not_the_store(store: FilledStore, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(store.state, backup)
    before = content(store)
    refused(before, store, "may be a copy or a backup, and nothing was removed", backup)
    # Also where it is mounted in the place of the original.
    original = store.state.with_name("original")
    assert store.served() == {0, 1, 2}
    store.state.rename(original)
    backup.rename(store.state)
    refused(set(content(store)), store, "may be a copy or a backup", store.state)
    shutil.rmtree(store.state)
    original.rename(store.state)
    assert store.served() == {0, 1, 2}


def test_a_copied_store_is_not_the_original(store: FilledStore, tmp_path: Path) -> None:
    copies = [tmp_path / place.name for place in (*store.devices, store.state)]
    for place, copy in zip((*store.devices, store.state), copies, strict=True):
        shutil.copytree(place, copy)
    before = content(store)
    for named in ([copies[-1]], copies[1:], [copies[-1], copies[0]]):
        refused(before, store, "name them: ", *named)
    remove(plan_removal(copies))
    assert [list(copy.iterdir()) for copy in copies] == [[], [], []]
    assert content(store) == before
    assert store.served() == {0, 1, 2}


def test_a_store_that_was_moved_is_named_whole(store: FilledStore, tmp_path: Path) -> None:
    state = store.state.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="name them: ") as refusal:
        plan_removal([state])
    named = [Path(p) for p in str(refusal.value).split("name them: ")[1].split(". ")[0].split()]
    assert named == list(store.devices)
    remove(plan_removal([*named, state]))
    assert content(replace(store, state=state)) == set()


def test_a_drive_that_was_given_to_another_store_stays(store: FilledStore, tmp_path: Path) -> None:
    """The old store's state directory is cleaned up."""
    for file in store.devices[0].iterdir():
        file.unlink()
    state = tmp_path / "new"
    state.mkdir()
    new = FilledStore(store.devices[:1], state, (0, 1, 2))
    new.fill()
    before = content(new)
    found = plan_removal([store.state])
    assert found.kept == (removing.Kept(store.devices[0], f"it is of the store {name_of(new)}"),)
    remove(found)
    assert content(new) == before
    assert list(store.devices[1].iterdir()) == list(store.state.iterdir()) == []
    assert new.served() == {0, 1, 2}


def test_two_stores_are_never_named_as_one(store: FilledStore, other: FilledStore) -> None:
    before = content(store) | content(other)
    for named in (
        [store.devices[0], other.devices[1], store.state],
        [*store.devices, store.state, other.devices[0]],
    ):
        with pytest.raises(StoreError, match=f"holds data of the store {name_of(other)}, not of"):
            plan_removal(named)
    assert content(store) | content(other) == before


def test_a_second_drive_alone_is_no_store(store: FilledStore) -> None:
    before = content(store)
    refused(before, store, f"state directory of this store is {store.state}", store.devices[1])
    away = store.state.rename(store.state.with_name("unmounted"))
    text = f"ssdkv rm --left-over {owners_of_data(store.devices[1]).pop()} {store.devices[1]}"
    with pytest.raises(StoreError, match=text):
        plan_removal([store.devices[1]])
    away.rename(store.state)
    assert content(store) == before


@pytest.mark.parametrize("state", ["state", "first device"])
def test_without_a_manifest_that_can_be_read(
    tmp_devices: Callable[[int], list[Path]], other: FilledStore, state: str
) -> None:
    """Superblocks say which store it is, and devices that are not named stay."""
    *devices, last = tmp_devices(3)
    where = last if state == "state" else devices[0]
    store = FilledStore(tuple(devices), where, (0, 1, 2))
    store.fill()
    for place in {*devices, where}:
        for name in (NAME, COPY):
            if (place / name).exists():
                flip(place / name, 5)
    found = plan_removal([devices[0], where])
    assert found.store in owners_of_data(devices[1])
    remove(found)
    assert content(store) == set(devices[1].iterdir())
    assert len(content(store)) == RANKS + 1
    # What tells nothing, or of two stores, is for people.
    flip(other.state / NAME, 5)
    (other.state / COPY).unlink()
    (other.state / JOURNAL).unlink()
    with pytest.raises(StoreError, match="the other files name none"):
        plan_removal([other.state])
    with pytest.raises(StoreError, match=r"the other files name .* and "):
        plan_removal([other.state, other.devices[0], devices[1]])


def test_a_document_that_is_called_like_ours_stays(tmp_path: Path) -> None:
    files = [tmp_path / name for name in (NAME, "journal", "rank0.data", "wear.json")]
    for file in files:
        file.write_text('{"store": "of a shop"}')
    with pytest.raises(StoreError, match="cannot be told which store"):
        plan_removal([tmp_path])
    assert all(file.exists() for file in files)


def test_what_only_looks_like_a_part_of_it_stays(
    store: FilledStore, other: FilledStore, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    data = store.data(0, 0)
    victim.write_bytes(data.read_bytes())
    data.unlink()
    data.symlink_to(victim)
    damaged = store.data(1, 0)
    for offset in COPY_OFFSETS:
        flip(damaged, offset + 9)
    leftover = store.devices[1] / "rank7.data"
    shutil.copyfile(other.data(0, 1), leftover)
    theirs = store.state / "journal.rejected"
    shutil.copyfile(other.state / JOURNAL, theirs)
    os.mkfifo(store.devices[0] / "rank9.data")
    found = plan_removal(store.devices, store.state)
    assert {kept.path: kept.why.split(": ")[-1] for kept in found.kept} == {
        data: "it is a symbolic link",
        store.devices[0] / "rank9.data": "it is not a regular file",
        damaged: "it has no whole superblock, so nobody knows whose it is",
        leftover: f"it is of the store {name_of(other)}",
        theirs: f"it is of the store {name_of(other)}",
    }
    remove(found)
    assert content(store) == {kept.path for kept in found.kept}
    assert victim.exists()


def test_a_superblock_of_another_version_names_its_store_too(store: FilledStore) -> None:
    """Its manifest is refused by this release, and it can be removed."""
    text = (store.state / NAME).read_bytes().replace(b'"version": 5', b'"version": 9')
    for place in (store.state, *store.devices):
        (place / COPY).write_bytes(sealed(text))
    (store.state / NAME).write_bytes(sealed(text))
    remove(plan_removal([*store.devices, store.state]))
    assert content(store) == set()


def test_what_changes_before_the_answer_is_looked_at_again(
    store: FilledStore, other: FilledStore
) -> None:
    found = plan_removal(store.devices, store.state)
    data = store.data(1, 1)
    data.unlink()
    shutil.copyfile(other.data(1, 1), data)
    before = content(store)
    with pytest.raises(StoreError, match=f"{data} has changed meanwhile, nothing was removed"):
        remove(found)
    assert content(store) == before


# ---- what is left over ----


def test_what_a_removed_store_left_on_a_drive_that_was_away(store: FilledStore) -> None:
    name = name_of(store)
    away = store.devices[1].rename(store.devices[1].with_name("away"))
    remove(plan_removal([store.state]))
    away.rename(store.devices[1])
    theirs = store.devices[1] / "rank7.data"
    theirs.write_bytes(b"mine" * 1000)
    found = plan_left_over([store.devices[1]], name)
    assert (found.store, found.model) == (name, "some/model")
    assert found.nbytes > 0
    remove(found)
    assert content(store) == {theirs}
    with pytest.raises(StoreError, match=f"nothing of the store {name} is there"):
        plan_left_over([store.devices[1]], name)


def test_the_second_drive_of_a_store_that_is_there_is_no_left_over(
    store: FilledStore, other: FilledStore
) -> None:
    before, name = content(store), name_of(store)
    for places, text in (
        ([store.devices[1]], f"the store {name} is in {store.state} still: .*ssdkv rm"),
        ([store.state], "is the state directory of the store"),
        ([other.devices[1]], f"nothing of the store {name} is there: there is data of "),
        ([store.devices[1] / "nowhere"], "does not exist: is it mounted"),
    ):
        with pytest.raises(StoreError, match=text):
            plan_left_over(places, name)
    with pytest.raises(StoreError, match=f"no UUID of a store: there is data of {name}"):
        plan_left_over([store.devices[1]], str(store.devices[1]))
    # Without its state directory a start would go on with the other drives.
    shutil.rmtree(store.state)
    before = {file for device in store.devices for file in device.iterdir()}
    with pytest.raises(StoreError, match=f"has data on {store.devices[0]}, too"):
        plan_left_over([store.devices[1]], name)
    assert {file for device in store.devices for file in device.iterdir()} == before
    remove(plan_left_over(store.devices, name))
    assert not any(file for device in store.devices for file in device.iterdir())


# ---- block devices ----


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[FilledStore]:
    with loop_devices(tmp_path, 2) as devices:
        state = tmp_path / "state"
        state.mkdir()
        store = FilledStore(tuple(devices), state, (0, 1, 2), ranks=1)
        store.fill()
        yield store


def test_a_raw_device_is_as_new(raw: FilledStore, tmp_path: Path) -> None:
    """Superblocks and manifests of ours are zeros then; those of another store stay."""
    backup = tmp_path / "backup"
    shutil.copytree(raw.state, backup)
    with pytest.raises(StoreError, match="may be a copy or a backup"):
        plan_removal([backup])
    found = plan_removal([raw.state])
    assert found.raw == raw.devices
    before = raw.devices[0].read_bytes()
    remove(found)
    after = raw.devices[0].read_bytes()
    for offset in COPY_OFFSETS:
        assert after[offset : offset + 2 * BLOCK_BYTES] == bytes(2 * BLOCK_BYTES)
    assert after[2 * COPY_OFFSETS[1] :] == before[2 * COPY_OFFSETS[1] :]
    assert read_copy(raw.devices[0]) is None
    # They are another store's now.
    state = tmp_path / "new"
    state.mkdir()
    new = replace(raw, state=state)
    new.fill()
    found = plan_removal([*raw.devices, state])
    backup.rename(raw.state.with_name("again"))
    left = plan_removal([raw.state.with_name("again")])
    assert left.raw == ()
    assert {kept.path for kept in left.kept} == set(raw.devices)
    with raw.devices[0].open("r+b") as device:
        device.write(bytes(BLOCK_BYTES))
    remove(found)


def test_a_raw_device_that_has_changed_hands_is_not_wiped(raw: FilledStore) -> None:
    found = plan_removal([raw.state])
    manifest = Manifest.load(raw.state)
    assert manifest is not None
    for offset in COPY_OFFSETS:
        flip(raw.devices[1], offset + 20)
    before = raw.devices[1].read_bytes()
    with pytest.raises(StoreError, match="has changed meanwhile, nothing was removed"):
        remove(found)
    assert raw.devices[1].read_bytes() == before
    assert (raw.state / NAME).exists()
