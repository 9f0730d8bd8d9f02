"""Check of a whole store that nobody uses: ``ssdkv fsck``. Its repair is in ``repair.py``.

Everything is read that a start of the engine believes: manifest, superblocks, journal, and of every
stored block, on every rank, the header and the checksum of each page. What is known of the store
comes from its own files; neither options nor a model are needed.

A device that is absent is a finding, and what lies on the others is checked. Blocks that need it
are not wrong: they are counted apart, and nothing is repaired before it is back. If the store has
been opened without it since, it is no finding, and a repair keeps those blocks.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import DeviceError, FormatError
from vllm_ssdkv.store.devices.data_file import is_empty, peek_superblock, read_copies
from vllm_ssdkv.store.format.manifest import NAME, locked
from vllm_ssdkv.store.format.superblock import COPY_OFFSETS, Superblock
from vllm_ssdkv.store.index.slot_index import EPOCH_COUNTER_BITS
from vllm_ssdkv.store.io.slot_io import ReadFrom
from vllm_ssdkv.store.maintenance.catalog import slots_to_come
from vllm_ssdkv.store.maintenance.fsck_report import FROM_HEADERS, REPAIR, Problem, Report
from vllm_ssdkv.store.maintenance.header_scan import scan_headers
from vllm_ssdkv.store.maintenance.offline_store import (
    DataFile,
    StoredStore,
    find_store,
    open_data_file,
    open_journal,
    read_journal,
)
from vllm_ssdkv.store.maintenance.slot_check import BatchPlan, Entry, SlotChecker, Verdict
from vllm_ssdkv.store.maintenance.slot_reader import open_slots
from vllm_ssdkv.store.placement.placement import placement_of

_DATA_NAME = re.compile(r"rank(\d+)\.data")

Verdicts: TypeAlias = dict[int, Verdict]
"""Problems of slots, by their places in an :class:`Entry`."""

Progress: TypeAlias = Callable[[int, int], None]
"""Hears how many slots are done, of how many; a slot counts once per rank."""


@dataclass(slots=True)
class CheckedFile:
    """One data file and what is wrong with it.

    Attributes:
        file: None when it is missing, or its device is absent.
        identity: UUID of the file, None when nobody knows it.
        epoch: Highest epoch of a valid superblock, 0 without one.
        problem: Of its superblocks, or that it is missing or empty.
        size_problem: Of its size.
        proven: Whether a block on it was found to be right, so that it is certainly the store's.
    """

    device: int
    rank: int
    file: DataFile | None
    identity: UUID | None
    epoch: int = 0
    problem: Problem | None = None
    size_problem: Problem | None = None
    proven: bool = False


@dataclass(frozen=True, slots=True)
class BadCopy:
    """A copy of a slot that is wrong, all of it or on one device; the other one is right there."""

    rank: int
    slot: int
    copy: int
    device: int | None = None


@dataclass(slots=True)
class Examination:
    """A locked store after its check.

    Attributes:
        entry: What the journal says, in the order of eviction, behind what it does not say and
            headers of slots do.
        found: Per entry whether it is from a header only, bool.
        good: Per entry whether it is right on every rank, bool; also where it is out of reach.
        absent: Per device whether it is, bool.
        stale: Problems of the manifest.
        orphans: Data files of ranks that the store does not have.
        bad_copies: Of slots whose other copy is right.
        crossed: Rank, and slots of which no copy is right, but one of each page is.
    """

    store: StoredStore
    report: Report
    files: list[CheckedFile]
    entry: Entry
    found: NDArray[np.bool_]
    good: NDArray[np.bool_]
    absent: NDArray[np.bool_]
    stale: list[Problem] = field(default_factory=list)
    orphans: list[tuple[Path, Problem]] = field(default_factory=list)
    bad_copies: list[BadCopy] = field(default_factory=list)
    crossed: list[tuple[int, Entry]] = field(default_factory=list)


@contextlib.contextmanager
def examined(
    directories: Sequence[Path],
    state_dir: Path | None = None,
    *,
    write: bool = False,
    from_headers: bool = False,
    progress: Progress = lambda done, total: None,
) -> Iterator[Examination]:
    """Check a store, and keep it locked for what the caller does next. Blocks on I/O.

    Args:
        directories: See :func:`find_store`; likewise ``state_dir``.
        write: Open the data files for writing, for a repair.
        from_headers: Believe the headers of slots, also where the journal is whole.
        progress: Called in this thread.

    Raises:
        StoreLockedError: somebody uses it.
        DeviceError: a device is absent, and a repair would drop what lies there.
        StoreError: it cannot be checked; the text says why and the way out.
    """
    with contextlib.ExitStack() as stack:
        state = find_store(directories, state_dir).state
        stack.enter_context(locked(state, None))
        store = find_store(directories, state_dir)  # as it is now that nobody changes it
        store.refuse_foreign(write=write)
        store.refuse_remote()
        journal = open_journal(store)
        if journal is not None:
            stack.callback(os.close, journal)
        files: list[CheckedFile] = []
        devices = store.manifest.devices
        absent = np.array([store.absent(device) for device in range(len(devices))], dtype=np.bool_)
        for rank in range(store.manifest.tp_size):
            for device, known in enumerate(devices):
                file = None
                if not absent[device]:
                    file = open_data_file(store, device, rank, write=write)
                if file is not None:
                    stack.callback(file.close)
                identity = UUID(known.files[rank]) if known.files[rank] else None
                files.append(CheckedFile(device, rank, file, identity))
        examination = _new(store, files, absent)
        _check_journal(examination, journal)
        _check_absent(examination, write=write)
        _check_manifest(examination)
        for checked in files:
            _check_file(examination, checked)
        _look_for_orphans(examination)
        _look_for_blocks(examination, from_headers=from_headers)
        _check_slots(examination, progress)
        if from_headers and examination.report.found:
            text = f"it does not name {examination.report.found} block(s) that slots hold"
            examination.report.add("journal", store.journal, text, FROM_HEADERS)
        for checked in files:
            _name_cure(checked)
        yield examination


def _new(store: StoredStore, files: list[CheckedFile], absent: NDArray[np.bool_]) -> Examination:
    to_come = slots_to_come(store)
    report = Report(
        store.manifest.store,
        str(store.state),
        [str(path) for path in store.paths],
        store.manifest.tp_size,
        store.manifest.slots + to_come,
        to_come,
    )
    nothing = np.zeros(0, dtype=np.int64)
    entry, none = Entry(nothing, nothing, []), nothing.astype(np.bool_)
    return Examination(store, report, files, entry, none, none, absent)


def _check_journal(this: Examination, fd: int | None) -> None:
    report, path = this.report, this.store.journal
    if this.store.journal_void:
        report.add("journal", path, "it is older than the manifest that counts")
        return
    found = read_journal(this.store, fd)
    if found.damage:
        report.add("journal", path, found.damage)
    slots = found.replay.slots
    if found.replay.corrupt:
        text = f"{found.replay.corrupt} record(s) do not match their checksums or are incomplete"
        report.add("journal", path, text)
    this.entry = Entry(slots, found.replay.epochs, found.replay.keys)
    this.found = np.zeros(len(slots), dtype=np.bool_)
    this.good = np.ones(len(slots), dtype=np.bool_)
    report.stored = len(slots)
    beyond = found.replay.out_of_range
    if beyond:
        have = this.store.manifest.slots
        text = f"{beyond} record(s) name slots that the store of {have} does not have"
        report.add("journal", path, text)


def _check_absent(this: Examination, *, write: bool) -> None:
    """Say which devices are absent, and how many of the blocks that are out of reach each has a
    part of; raises DeviceError if the store is to be repaired without it."""
    placement, slots = this.store.placement, this.entry.slots
    slots = slots[placement.lost(this.absent, slots)]
    for device in np.flatnonzero(this.absent).tolist():
        parts = int(placement.touches(device, slots).sum())
        if not this.store.manifest.devices[device].present:
            continue  # the store goes on without it, and finds these blocks when it is back
        path = this.store.paths[device]
        if write:
            raise DeviceError(
                f"device {device} ({path}) does not exist, and a repair without it would drop what "
                "lies there: mount it, or name the directories where the store is now; without "
                "--repair the rest is checked"
            )
        text = (
            "it does not exist: mount it, or name the directories where the store is now; it has "
            f"parts of {parts} block(s) that are out of reach"
        )
        this.report.add("device", path, text)


def _check_manifest(this: Examination) -> None:
    path, manifest = this.store.state / NAME, this.store.manifest
    for damage in this.store.damage:
        this.stale.append(this.report.add("manifest", path, damage))
    known = int(this.entry.epochs.max(initial=0)) >> EPOCH_COUNTER_BITS
    if known > manifest.opened:
        text = f"it counts {manifest.opened} openings of the store, the journal {known}"
        this.stale.append(this.report.add("manifest", path, text))


# ---- data files ----


def _check_file(this: Examination, checked: CheckedFile) -> None:
    file, path = checked.file, this.store.data_path(checked.device, checked.rank)
    if file is None:
        if checked.identity is not None and not this.absent[checked.device]:
            checked.problem = this.report.add("data_file", path, "it is missing")
        return
    _check_superblocks(this, checked, file)
    needed = this.store.data_bytes(checked.device, checked.rank)
    text = (
        f"it has {file.nbytes} bytes, the store's {this.store.manifest.slots} slots need {needed}"
    )
    if file.nbytes < needed or (file.nbytes > needed and not file.raw):
        cure = "start the engine once with a capacity of this device that fits" if file.raw else ""
        checked.size_problem = this.report.add("data_file", path, text, cure)


def _check_superblocks(this: Examination, checked: CheckedFile, file: DataFile) -> None:
    """Raises FormatError for the superblock of another file: nothing may be believed then."""
    copies = read_copies(file)
    if checked.identity is None and is_empty(file):
        return  # made, but not claimed yet
    wrong: list[str] = []
    elsewhere = this.store.manifest.files_besides(checked.device)
    for offset, copy in zip(COPY_OFFSETS, copies, strict=True):
        try:
            block = Superblock.decode(copy)
        except FormatError as error:
            wrong.append(f"at {offset}: {error}")
            continue
        identity = checked.identity or block.device
        if identity != block.device:
            if str(block.device) in elsewhere:
                raise FormatError(
                    f"{file.path} is a data file of {elsewhere[str(block.device)]}: name the "
                    "directories where the devices are now"
                )
            wrong.append("the manifest knows another file here, this one was made anew")
            identity = block.device
        block.require(
            this.store.superblock(checked.device, checked.rank, identity, block.epoch),
            str(file.path),
        )
        checked.identity, checked.epoch = identity, max(checked.epoch, block.epoch)
    if wrong:
        checked.problem = this.report.add("superblock", file.path, "; ".join(wrong))


def _look_for_orphans(this: Examination) -> None:
    for path in this.store.paths:
        for entry in sorted(path.iterdir()) if path.is_dir() else ():
            name = _DATA_NAME.fullmatch(entry.name)
            if name is not None and int(name[1]) >= this.report.ranks:
                text = f"the store has {this.report.ranks} rank(s): it belongs to none of them"
                cure = "" if is_orphan(this.store, entry) else _NOT_OURS
                problem = this.report.add("orphan", entry, text, cure)
                this.orphans.append((entry, problem))


_NOT_OURS = "it has no superblock of this store: move it away, or delete it if nobody needs it"


def is_orphan(store: StoredStore, path: Path) -> bool:
    """Check whether a superblock in the file names the store. Blocks on I/O."""
    try:
        block = peek_superblock(path)
    except (FormatError, OSError):
        return False
    return block is not None and str(block.store) == store.manifest.store


def _name_cure(checked: CheckedFile) -> None:
    """Superblocks that nothing proves to be the store's are not written anew."""
    file, problem = checked.file, checked.problem
    if file is None or problem is None or problem.kind != "superblock":
        return
    if not (checked.epoch or checked.proven or is_empty(file)):
        what = "zero its first 1 MiB" if file.raw else "delete it"
        problem.cure = (
            f"nothing in it proves that it is the store's: {what} if nobody needs it, then {REPAIR}"
        )


# ---- slots ----


def _look_for_blocks(this: Examination, *, from_headers: bool) -> None:
    """A lost or damaged journal is made good by the headers of slots; a whole one, too, where
    these are to be believed rather than what it says was given up."""
    if not (from_headers or "journal" in this.report.counts):
        return
    ranks = range(this.report.ranks)
    files = [[checked.file for checked in this.files if checked.rank == rank] for rank in ranks]
    seen = scan_headers(this.store, files, this.absent)
    if from_headers:
        _forget_older(this, seen)
    known = set(this.entry.keys)
    which = np.flatnonzero(~np.isin(seen.slots, this.entry.slots))
    which = which[[seen.keys[i] not in known for i in which.tolist()]]
    new = seen.part(which)
    this.entry = Entry(
        np.concatenate([new.slots, this.entry.slots]),
        np.concatenate([new.epochs, this.entry.epochs]),
        [*new.keys, *this.entry.keys],
    )
    this.found = np.arange(len(this.entry.slots)) < len(which)
    this.good = np.ones(len(this.entry.slots), dtype=np.bool_)


def _forget_older(this: Examination, seen: Entry) -> None:
    """Leave out what the journal says of slots and keys of which a header says something newer."""
    slot = dict(zip(seen.slots.tolist(), seen.epochs.tolist(), strict=True))
    key = dict(zip(seen.keys, seen.epochs.tolist(), strict=True))
    mine = zip(this.entry.slots.tolist(), this.entry.epochs.tolist(), this.entry.keys, strict=True)
    newer = [max(slot.get(number, 0), key.get(name, 0)) > epoch for number, epoch, name in mine]
    this.entry = this.entry.part(np.flatnonzero(~np.array(newer, dtype=np.bool_)))
    this.report.stored = len(this.entry.slots)


def _check_slots(this: Examination, progress: Progress) -> None:
    out_of_reach = this.store.placement.lost(this.absent, this.entry.slots)
    this.report.out_of_reach = int(out_of_reach.sum())
    inside = np.flatnonzero(~out_of_reach)
    entry = this.entry.part(inside)
    ranks = range(this.report.ranks)
    total = sum(len(inside) + int(_read_twice(this, rank, entry.slots).sum()) for rank in ranks)
    done = 0

    def step(slots: int) -> None:
        nonlocal done
        done += slots
        progress(done, total)

    step(0)
    for rank in ranks:
        right = np.ones(len(inside), dtype=np.bool_)
        mine = [checked for checked in this.files if checked.rank == rank]
        if len(inside):
            _check_rank(this, mine, entry, right, this.found[inside], step)
        for checked in mine:
            on_it = this.store.placement.touches(checked.device, entry.slots)
            on_it &= ~np.isin(entry.slots, [bad.slot for bad in this.bad_copies])
            for _, crossed in this.crossed:
                on_it &= ~np.isin(entry.slots, crossed.slots)
            checked.proven = bool((right & on_it).any())
        this.good[inside] &= right
    this.report.bad = int((~this.good & ~this.found).sum())
    this.report.found = int((this.good & this.found).sum())
    this.report.lost = int((~this.good & this.found).sum())
    this.report.stored += this.report.found


def _read_twice(this: Examination, rank: int, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Slots of a rank with two copies that can be told apart: some piece is there twice."""
    placement = placement_of(this.store.manifest, rank)
    twice = placement.doubled(slots)
    near = np.zeros(len(slots), dtype=np.bool_)
    for device in np.flatnonzero(this.absent).tolist():
        near |= placement.touches(device, slots)
    which = np.flatnonzero(twice & near)
    first, second = placement.copies(slots[which], 0, placement.geometry.slot_bytes)
    if second is not None:
        both = ~(this.absent[first.device] | this.absent[second.device])
        twice[which] = False
        twice[which[first.slot_index[both]]] = True
    return twice


def _check_rank(
    this: Examination,
    mine: Sequence[CheckedFile],
    entry: Entry,
    right: NDArray[np.bool_],
    found: NDArray[np.bool_],
    step: Callable[[int], None],
) -> None:
    """Clear ``right`` where a slot of this rank is not what it should be. ``step``: hears of so
    many slots that are done."""
    rank = mine[0].rank
    geometry = this.store.manifest.geometries[rank]
    plan = BatchPlan(geometry)
    with open_slots(this.store, rank, [c.file for c in mine], plan.nbytes) as (files, _):

        def count(slots: int) -> None:
            this.report.checked_bytes += slots * geometry.slot_bytes
            step(slots)

        def wrong(which: NDArray[np.int64], source: ReadFrom, *, again: bool = False) -> Verdicts:
            checker = SlotChecker(files, plan, source)
            heard = (lambda _: None) if again else count
            return {int(which[v.index]): v for v in checker.check(entry.part(which), heard)}

        def gather(which: NDArray[np.int64]) -> NDArray[np.int64]:
            parts = SlotChecker(files, plan).gather(entry.part(which))
            return np.concatenate([which[:0], *(which[whole] for whole, _ in parts)])

        _judge_copies(this, rank, entry, right, found, wrong, gather)
        this.report.checked_slots += len(entry.slots)
    for checked in mine:
        if checked.file is not None:
            read_copies(checked.file)  # a device that died meanwhile is no reason to drop slots


def _judge_copies(
    this: Examination,
    rank: int,
    entry: Entry,
    right: NDArray[np.bool_],
    found: NDArray[np.bool_],
    wrong: Callable[..., Verdicts],
    gather: Callable[[NDArray[np.int64]], NDArray[np.int64]],
) -> None:
    """Report what is wrong with the copies of slots; a slot is right if one source of it is. Those
    ``found`` by a header alone are no findings when they are not."""
    paths = [str(this.store.data_path(device, rank)) for device in range(len(this.store.paths))]
    missing = any(c.file is None and not this.absent[c.device] for c in this.files)
    cure = f"start the engine, which makes missing data files anew, then {REPAIR}"
    cure = cure if missing else ""
    twice = _read_twice(this, rank, entry.slots)
    absent = tuple(np.flatnonzero(this.absent).tolist())
    verdicts = [
        wrong(np.arange(len(entry.slots)), ReadFrom(0, absent)),
        wrong(np.flatnonzero(twice), ReadFrom(1, absent)),
    ]
    lost = {i: v for i, v in verdicts[0].items() if not twice[i] or i in verdicts[1]}
    for device, path in enumerate(paths if lost else ()):
        # Each copy may lie on several devices, of which one alone is bad.
        which = np.array([i for i in lost if twice[i]], dtype=np.int64)
        which = which[this.store.placement.touches(device, entry.slots[which])]
        still = wrong(which, ReadFrom(0, (device, *absent)), again=True)
        for index in set(which.tolist()) - still.keys():
            verdict, slot = lost.pop(index), int(entry.slots[index])
            this.bad_copies += [BadCopy(rank, slot, copy, device) for copy in (0, 1)]
            text = f"what {path} has of it: {verdict.text}; the rest is right"
            this.report.add("copy", f"slot {slot}, rank {rank}", text, cure)
    whole = gather(np.array(sorted(i for i in lost if twice[i]), dtype=np.int64))
    if len(whole):
        this.crossed.append((rank, entry.part(whole)))
    for index in whole.tolist():
        text = f"{lost.pop(index).text}; of each page one copy is right"
        this.report.add("copy", f"slot {entry.slots[index]}, rank {rank}", text, cure)
    for index, verdict in sorted(lost.items()):
        right[index] = False
        if not found[index]:
            this.report.add(verdict.kind, f"slot {entry.slots[index]}, rank {rank}", verdict.text)
    for copy, mine in enumerate(verdicts):
        for index, verdict in sorted(mine.items()):
            if twice[index] and index not in verdicts[1 - copy]:
                slot = int(entry.slots[index])
                this.bad_copies.append(BadCopy(rank, slot, copy))
                text = f"copy {copy}: {verdict.text}; the other one is right"
                this.report.add("copy", f"slot {slot}, rank {rank}", text, cure)
