"""Removing a store: all of it, nothing else, and never one that is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.filled_store import RANKS, FilledStore, flip
from vllm_ssdkv.errors import StoreError, StoreLockedError
from vllm_ssdkv.metrics import Counters
from vllm_ssdkv.store import removal as removing
from vllm_ssdkv.store.manifest import COPY, NAME
from vllm_ssdkv.store.open import open_index, open_rank
from vllm_ssdkv.store.removal import files_of_store, plan_removal, remove
from vllm_ssdkv.store.superblock import BLOCK_BYTES, COPY_OFFSETS


@pytest.fixture
def store(tmp_devices: Callable[[int], list[Path]]) -> FilledStore:
    *devices, state = tmp_devices(3)
    store = FilledStore(tuple(devices), state, (0, 1, 2))
    store.fill()
    return store


def content(store: FilledStore) -> set[Path]:
    return {file for place in (*store.devices, store.state) for file in place.iterdir()}


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
    assert len(found.files) == 2 * RANKS + len((NAME, COPY, "journal")) + 3
    assert {file.name for file in found.files[-2:]} == {NAME, COPY}, "the manifest goes last"
    assert found.nbytes == sum(f.stat().st_blocks * 512 for f in found.files)
    assert (found.raw, found.missing) == ((), ())
    remove(found)
    assert content(store) == set(theirs)
    with pytest.raises(StoreError, match=NAME):
        plan_removal(store.devices, store.state)
    store.fill()  # the directories are as good as new
    assert store.served() == {0, 1, 2}


def test_a_store_in_use_stays_whole(store: FilledStore) -> None:
    found, before = plan_removal([], store.state), content(store)
    opened = open_rank(store.place, 1, Counters())
    with pytest.raises(StoreLockedError, match="in use"):
        remove(found)
    opened.files.engine.close(1.0)
    opened.close()
    index, _ = open_index(store.place)
    with pytest.raises(StoreLockedError, match="in use"):
        remove(found)
    index.close()
    assert content(store) == before
    assert store.served() == {0, 1, 2}


def test_an_interrupted_removal_can_be_started_again(store: FilledStore) -> None:
    files = plan_removal([], store.state).files
    for count in (1, 3, len(files) - 1):
        for file in files[:count]:
            file.unlink(missing_ok=True)
        left = plan_removal([], store.state)
        assert set(left.files) == set(files[count:])
    remove(left)
    assert content(store) == set()


def test_without_a_manifest_that_can_be_read(store: FilledStore) -> None:
    """What lies in the directories named goes."""
    for name in (NAME, COPY):
        flip(store.state / name, 5)
    remove(plan_removal([store.devices[0]], store.state))
    assert content(store) == {store.data(1, rank) for rank in range(RANKS)}


def test_a_device_that_is_away_is_named(store: FilledStore) -> None:
    away = store.devices[1].with_name("away")
    store.devices[1].rename(away)
    found = plan_removal([], store.state)
    assert found.missing == (store.devices[1],)
    remove(found)
    assert files_of_store(store.devices[0]) == files_of_store(store.state) == []
    assert len(files_of_store(away)) == RANKS


def test_what_only_looks_like_ours_stays(store: FilledStore) -> None:
    """Of a store whose manifest is gone, only data files with a superblock are known for sure."""
    remove(plan_removal([], store.state))
    store.fill()
    for name in (NAME, COPY, "journal"):
        (store.state / name).unlink()
    theirs = store.devices[0] / "rank7.data"
    theirs.write_bytes(b"mine" * 1000)
    with pytest.raises(StoreError, match=f"no {NAME}"):  # perhaps its state is elsewhere
        plan_removal(store.devices)
    found = plan_removal(store.devices, left_over=True)
    assert set(found.files) == content(store) - {theirs}
    assert found.nbytes > 0
    remove(found)
    assert content(store) == {theirs}
    store.fill()
    with pytest.raises(StoreError, match="manifest"):
        plan_removal([*store.devices, store.state], left_over=True)
    with pytest.raises(StoreError, match=f"{store.state} has the manifest"):
        plan_removal(store.devices, store.state, left_over=True)
    for name in (NAME, COPY):
        (store.state / name).unlink()
    found = plan_removal(store.devices[:1], store.devices[1], left_over=True)
    assert set(found.files) == {store.data(d, rank) for d in (0, 1) for rank in range(RANKS)}


def test_a_raw_device_is_as_new(store: FilledStore) -> None:
    """Both superblocks of ours are zeros then; without one, nothing is written."""
    data = store.data(0, 0)
    before = data.read_bytes()
    with data.open("r+b") as file:
        removing._wipe(file.fileno(), data)
    after = data.read_bytes()
    for offset in COPY_OFFSETS:
        assert after[offset : offset + BLOCK_BYTES] == bytes(BLOCK_BYTES)
    assert after[2 * COPY_OFFSETS[1] :] == before[2 * COPY_OFFSETS[1] :]
    data.write_bytes(b"a file system" * 100_000)
    before = data.read_bytes()
    with data.open("r+b") as file:
        removing._wipe(file.fileno(), data)
    assert data.read_bytes() == before
