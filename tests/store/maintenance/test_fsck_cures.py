"""Every finding names a cure, and who takes it has a store that is clean."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.checked_store import check
from tests.store.filled_store import GEOMETRY, FilledStore, flip
from vllm_ssdkv.store.format.manifest import COPY, NAME
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES
from vllm_ssdkv.store.format.superblock import COPY_OFFSETS
from vllm_ssdkv.store.maintenance.fsck_report import REPAIR, Problem

SLOTS = (0, 1, 2, 5, 8, 13)

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
    store = FilledStore(tuple(places[:2]), places[2], SLOTS, replicas=replicas)
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
