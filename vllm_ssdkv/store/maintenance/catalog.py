"""Catalog of stores and of their content, without touching or locking them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vllm_ssdkv.base.errors import FormatError, StoreError
from vllm_ssdkv.base.file_lock import is_locked
from vllm_ssdkv.store.devices.data_file import read_copies
from vllm_ssdkv.store.devices.owner import files_named_alike
from vllm_ssdkv.store.format.manifest import Manifest
from vllm_ssdkv.store.format.superblock import COPY_OFFSETS, Superblock
from vllm_ssdkv.store.location import holds_manifest, is_state_directory
from vllm_ssdkv.store.maintenance.offline_store import (
    StoredJournal,
    StoredStore,
    open_data_file,
    open_journal,
    read_journal,
)
from vllm_ssdkv.store.placement.reconcile import division_of

_DEPTH = 2
"""Folders below a cache root: one per model, and in it one per data-parallel engine."""


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """One line of ``ssdkv ls``.

    Attributes:
        mode: The mode that makes such slots.
        stored: Blocks in the store, but for those that need a device which is not there.
        slots: Blocks that it has room for on the devices that are there, and may grow to.
        slots_to_come: Those of ``slots`` that it has yet to grow by.
        block_bytes: Bytes of a block on one rank.
        disk_bytes: Space that the store's files have on disk, as ``du`` counts it: data files have
            that of their slots from the beginning, whatever is stored.
        last_opened: Seconds since 1970 (UTC), 0 for never.
        in_use: Whether an engine, or a command, has it open.
        suspended: Why it is suspended, see ``ssdkv resume``; empty: it is not.
    """

    state_dir: str
    store: str
    model: str
    mode: Literal["reuse", "page"]
    devices: tuple[str, ...]
    ranks: int
    stored: int
    slots: int
    slots_to_come: int
    block_bytes: int
    disk_bytes: int
    last_opened: int
    in_use: bool
    suspended: str


@dataclass(frozen=True, slots=True)
class FileDetails:
    """One data file. ``superblocks``: the epoch of each valid copy, or what is wrong with it."""

    path: str
    rank: int
    nbytes: int
    expected_bytes: int
    superblocks: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class DeviceDetails:
    """One device. ``problem``: why it cannot be looked at, empty when it can."""

    path: str
    capacity: int
    weight: float
    files: tuple[FileDetails, ...]
    problem: str


@dataclass(frozen=True, slots=True)
class StoreDetails:
    """Details that ``ssdkv inspect`` shows.

    Attributes:
        problem: What is wrong with the manifest or the journal, empty when nothing is.
        journal_bytes: Size of the journal.
        damaged_records: Records of it that fail their checksums.
        opened: How often a scheduler has opened the store.
        key_id: Names the key that it is encrypted with; empty when it is not.
        doubled_slots: Slots that have two copies.
    """

    summary: StoreSummary
    problem: str
    geometry: dict[str, str | int]
    stripe_unit_bytes: int
    fingerprint: dict[str, str | int]
    devices: tuple[DeviceDetails, ...]
    journal_bytes: int
    damaged_records: int
    opened: int
    key_id: str
    doubled_slots: int


def stores_below(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """State directories of the stores in a directory and below it. Blocks on I/O.

    Directories that cannot be read are passed over: they are other users'.
    """
    return (path for path in _folders(root, depth) if _is_state(path))


def _is_state(path: Path) -> bool:
    try:
        return is_state_directory(path)
    except OSError:
        return False


def without_state_below(root: Path, depth: int = _DEPTH) -> Iterator[tuple[Path, Manifest]]:
    """Devices in a directory and below it whose store's state directory is nowhere, and the copy of
    its manifest there. Blocks on I/O."""
    for path in _folders(root, depth):
        if _is_state(path):
            continue
        try:
            copy = Manifest.load_copy(path)
        except StoreError:
            continue  # a device's: who uses the store says what is wrong with it
        if copy is None or (copy.state and holds_manifest(Path(copy.state), copy.store)):
            continue
        yield path, copy


def _folders(root: Path, depth: int) -> Iterator[Path]:
    yield root
    if depth == 0:
        return
    try:
        children = sorted(child for child in root.iterdir() if child.is_dir())
    except OSError:
        return
    for child in children:
        yield from _folders(child, depth - 1)


def summarize(store: StoredStore) -> StoreSummary:
    """Summarize a store in one line. Blocks on I/O.

    Raises:
        StoreError: the journal cannot be read.
    """
    journal, in_use = _look_at_journal(store)
    return _summary(store, journal, in_use=in_use)


def _look_at_journal(store: StoredStore) -> tuple[StoredJournal, bool]:
    fd = open_journal(store, lock=False)
    if fd is None:
        return read_journal(store, None), False
    try:
        return read_journal(store, fd), is_locked(fd)
    finally:
        os.close(fd)


def _room(store: StoredStore, journal: StoredJournal) -> tuple[int, int]:
    """Blocks that are stored, and that there is room for, on the devices that are there."""
    manifest, placement = store.manifest, store.placement
    away = [
        not device.present or store.absent(number) for number, device in enumerate(manifest.devices)
    ]
    out = np.array(away, dtype=np.bool_)
    slots = journal.replay.slots
    stored = int((placement.holds(slots) & ~placement.lost(out, slots)).sum())
    every = [segment.all_slots() for segment in manifest.segments]
    there = sum(len(some) - int(placement.lost(out, some).sum()) for some in every)
    return stored, there + slots_to_come(store)


def slots_to_come(store: StoredStore) -> int:
    """Count the slots that a store which grows as it fills has yet to grow by."""
    manifest = store.manifest
    if not manifest.grows:
        return 0
    return max(0, division_of(manifest, store.state).slots - manifest.slots)


def _summary(store: StoredStore, journal: StoredJournal, *, in_use: bool) -> StoreSummary:
    manifest = store.manifest
    stored, slots = _room(store, journal)
    files = {file for place in (*store.paths, store.state) for file in files_named_alike(place)}
    return StoreSummary(
        state_dir=str(store.state),
        store=manifest.store,
        model=manifest.model or str(manifest.fingerprint.get("model", "")),
        mode="page" if manifest.kind == "paged" else "reuse",
        devices=tuple(str(path) for path in store.paths),
        ranks=manifest.tp_size,
        stored=stored,
        slots=slots,
        slots_to_come=slots_to_come(store),
        block_bytes=max(one.slot_bytes for one in manifest.geometries),
        disk_bytes=sum(file.stat().st_blocks * 512 for file in files),
        last_opened=manifest.last_opened,
        in_use=in_use,
        suspended=manifest.suspended,
    )


def inspect_store(store: StoredStore) -> StoreDetails:
    """Everything about a store but its blocks. Blocks on I/O.

    Raises:
        StoreError: the journal cannot be read.
    """
    journal, in_use = _look_at_journal(store)
    manifest, geometry = store.manifest, store.manifest.geometry
    return StoreDetails(
        summary=_summary(store, journal, in_use=in_use),
        problem="; ".join(text for text in (*store.damage, journal.damage) if text),
        geometry={
            "kind": geometry.kind,
            "layers": geometry.layers,
            "heads": geometry.heads,
            "groups": geometry.groups,
            "payload_bytes": geometry.payload_bytes,
            "page_bytes": geometry.page_bytes,
            "pages": geometry.pages,
            "summary_pages": geometry.summary_pages,
            "channel_pages": geometry.channel_pages,
            "scaled_from": geometry.scaled_from,
            "record": geometry.record,
            "header_bytes": geometry.header_bytes,
            "slot_bytes": geometry.slot_bytes,
        },
        stripe_unit_bytes=store.manifest.geometry.unit_bytes,
        fingerprint=dict(manifest.fingerprint),
        devices=tuple(_device(store, number) for number in range(len(store.paths))),
        journal_bytes=journal.nbytes,
        damaged_records=journal.replay.corrupt,
        opened=manifest.opened,
        key_id=manifest.key_id,
        doubled_slots=sum(s.slots for s in manifest.segments if s.copies > 1),
    )


def _device(store: StoredStore, number: int) -> DeviceDetails:
    entry = store.manifest.devices[number]
    files: list[FileDetails] = []
    problem = ""
    for rank in range(store.manifest.tp_size):
        try:
            files.extend(_file(store, number, rank))
        except StoreError as error:
            problem = str(error)
    return DeviceDetails(
        str(store.paths[number]), entry.capacity, entry.weight, tuple(files), problem
    )


def _file(store: StoredStore, device: int, rank: int) -> Iterator[FileDetails]:
    """The file, if it exists."""
    file = open_data_file(store, device, rank, lock=False)
    if file is None:
        return
    try:
        copies = read_copies(file)
    finally:
        file.close()
    found: list[int | str] = []
    for offset, copy in zip(COPY_OFFSETS, copies, strict=True):
        try:
            found.append(Superblock.decode(copy).epoch)
        except FormatError as error:
            found.append(f"at {offset}: {error}")
    expected = store.data_bytes(device, rank)
    yield FileDetails(str(file.path), rank, file.nbytes, expected, tuple(found))
