"""The repair of a store after its check: what is wrong is dropped, what is right stays.

Each step leaves a store that is no worse than before, so that a repair may be interrupted and
started again. The journal comes last: until then nothing that it names is given up.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.durable_file import sync_directory
from vllm_ssdkv.base.errors import DeviceError, StoreError
from vllm_ssdkv.base.file_lock import lock_file
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.devices.data_file import is_empty, write_both
from vllm_ssdkv.store.devices.manifest_copies import CopySpreader
from vllm_ssdkv.store.devices.preallocate import reserve_space
from vllm_ssdkv.store.index.slot_index import EPOCH_COUNTER_BITS
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.maintenance.fsck import CheckedFile, Examination, is_orphan
from vllm_ssdkv.store.maintenance.journal_rebuild import write_journal
from vllm_ssdkv.store.maintenance.offline_store import set_aside
from vllm_ssdkv.store.maintenance.slot_check import BatchPlan, Entry, SlotChecker, refuse_hanging
from vllm_ssdkv.store.maintenance.slot_reader import open_slots
from vllm_ssdkv.store.placement.placement import placement_of
from vllm_ssdkv.store.placement.stripe_map import Extents


def repair(this: Examination) -> None:
    """Repair what :func:`vllm_ssdkv.store.maintenance.fsck.examined` found. Blocks on I/O.

    Problems that are gone afterwards are marked in the report. Not repaired are: a data file with
    neither a superblock nor a single right block, a raw device that is too small, an orphan that is
    in use or has no superblock, a short file on a full file system, and copies on a device that
    cannot be written.

    Raises:
        StoreError: something cannot be written; what was done so far holds.
    """
    if this.report.clean:
        return
    for device, path in enumerate(this.store.paths):
        if not this.absent[device]:  # copies of the manifest go there
            this.store.manifest.devices[device].path = str(path)
    _note_new_files(this)
    for checked in this.files:
        _repair_superblocks(this, checked)
        _repair_size(this, checked)
    _mend_copies(this)
    _rewrite_manifest(this)
    for path, problem in this.orphans:
        try:
            _remove_orphan(this, path)
        except (StoreError, OSError) as error:
            problem.text += f"; not repaired: {error}"
        else:
            this.report.repaired(problem)
    _rewrite_journal(this)


def _note_new_files(this: Examination) -> None:
    """Files that are missing or empty will be new ones: the manifest must know it first, or copies
    that are not on them would be believed to be."""
    manifest, noted = this.store.manifest, False
    for checked in this.files:
        if checked.problem is not None and (checked.file is None or is_empty(checked.file)):
            entry = manifest.devices[checked.device]
            entry.fresh = sorted({*entry.fresh, checked.rank})
            entry.missed(0, manifest.opened + 1)
            noted = True
    if noted:
        manifest.save(this.store.state)


def _repair_superblocks(this: Examination, checked: CheckedFile) -> None:
    file = checked.file
    if checked.problem is None:
        return
    if file is None:
        checked.identity = None  # the next start makes it
        this.report.repaired(checked.problem)
        return
    if not (checked.epoch or checked.proven or is_empty(file)):
        return  # it may be anybody's
    identity = checked.identity or uuid4()
    checked.identity = identity
    block = this.store.superblock(checked.device, checked.rank, identity, checked.epoch + 1)
    write_both(file, block)
    this.report.repaired(checked.problem)


def _repair_size(this: Examination, checked: CheckedFile) -> None:
    file, problem = checked.file, checked.size_problem
    if file is None or problem is None or file.raw:
        return
    needed = this.store.data_bytes(checked.device, checked.rank)
    try:
        if file.nbytes > needed:
            os.ftruncate(file.fd, needed)
        else:
            reserve_space(file.fd, file.path, f"device {checked.device}", needed, created=False)
    except DeviceError as error:
        problem.text += f"; not repaired: {error}"
        return
    except OSError as error:
        raise StoreError(f"{file.path}: {error.strerror}") from error
    this.report.repaired(problem)


def _mend_copies(this: Examination) -> None:
    """Write what is wrong in one copy from the other, which was read and verified just now."""
    geometries = this.store.manifest.geometries
    left = sum(_mend_crossed(this, rank, entry) for rank, entry in this.crossed)
    with mmap.mmap(
        -1, max(one.unit_bytes for one in geometries)
    ) as buffer:  # page-aligned, as O_DIRECT wants
        for bad in this.bad_copies:
            slots = np.array([bad.slot], dtype=np.int64)
            placement = placement_of(this.store.manifest, bad.rank)
            copies = placement.copies(slots, 0, geometries[bad.rank].slot_bytes)
            source, target = copies[1 - bad.copy], copies[bad.copy]
            mine = {c.device: c for c in this.files if c.rank == bad.rank}
            if source is None or target is None:
                continue
            which = np.arange(len(target.device))
            if bad.device is not None:
                which = np.flatnonzero(target.device == bad.device)
            which = which[~(this.absent[source.device] | this.absent[target.device])[which]]
            left += not _mend_copy(mine, source, target, which, buffer)
    if not left:
        this.report.repaired_all("copy")


def _mend_crossed(this: Examination, rank: int, entry: Entry) -> int:
    """Write both copies of slots from what is right in either; how many were not written.

    Raises:
        DeadlineError: a device does not answer.
    """
    geometry = this.store.manifest.geometries[rank]
    plan, mended = BatchPlan(geometry), 0
    files = [checked.file for checked in this.files if checked.rank == rank]
    with open_slots(this.store, rank, files, plan.nbytes) as (slots, _):
        for which, at in SlotChecker(slots, plan).gather(entry):
            if len(which):
                request = slots.submit(Op.WRITE, entry.slots[which], 0, geometry.slot_bytes, at)
                mended += int(np.count_nonzero(request.wait()))
                refuse_hanging(slots, request.held(), "write")
    for file in files:
        if file is not None:
            os.fdatasync(file.fd)
    return len(entry.slots) - mended


def _mend_copy(
    files: dict[int, CheckedFile],
    source: Extents,
    target: Extents,
    which: NDArray[np.int64],
    buffer: mmap.mmap,
) -> bool:
    """Check whether all pieces ``which`` were written; ``files`` of one rank by device."""
    for i in which.tolist():
        length = int(source.length[i])
        origin, goal = files[int(source.device[i])].file, files[int(target.device[i])]
        problems = [p for p in (goal.problem, goal.size_problem) if p is not None]
        if origin is None or goal.file is None or not all(p.repaired for p in problems):
            return False
        piece = memoryview(buffer)[:length]
        try:
            done = os.preadv(origin.fd, [piece], int(source.offset[i]))
            done = min(done, os.pwritev(goal.file.fd, [piece], int(target.offset[i])))
            os.fdatasync(goal.file.fd)
        except OSError:
            return False
        finally:
            piece.release()
        if done != length:
            return False
    return True


def _rewrite_manifest(this: Examination) -> None:
    manifest = this.store.manifest
    renamed = False
    for checked in this.files:
        identity = "" if checked.identity is None else str(checked.identity)
        files = manifest.devices[checked.device].files
        renamed |= files[checked.rank] != identity
        files[checked.rank] = identity
    if not (renamed or this.stale):
        return
    newest_opening = int(this.entry.epochs.max(initial=0)) >> EPOCH_COUNTER_BITS
    if this.stale:
        # A copy may be one opening behind: epochs must not be used twice.
        manifest.opened = max(manifest.opened, newest_opening) + 1
    manifest.save(this.store.state)
    counters = Counters()
    CopySpreader(counters).spread(manifest)
    if counters.total("manifest_copy_errors"):
        return
    for problem in this.stale:
        this.report.repaired(problem)


def _remove_orphan(this: Examination, path: Path) -> None:
    """Remove a data file that belongs to no rank. Raises StoreError or OSError when somebody uses
    it, or when it has no superblock of this store: then it may be anything.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        lock_file(fd, path, "orphan")
        if not is_orphan(this.store, path):
            raise StoreError("it has no superblock of this store")
        path.unlink()
        sync_directory(path.parent)
    finally:
        os.close(fd)


def _rewrite_journal(this: Examination) -> None:
    """Write the right entries, in their order, in the place of the journal."""
    if this.good.all() and not this.report.counts.get("journal"):
        return
    if this.found.any():
        set_aside(this.store.journal)
    write_journal(this.store, this.entry.part(np.flatnonzero(this.good)))
    this.report.repaired_all("journal", "header", "page", "unreadable")
