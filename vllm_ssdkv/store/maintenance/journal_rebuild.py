"""A journal made anew from the headers of slots, when the old one was lost with its drive.

It is written whole and renamed into place before anybody opens it, so that a kill leaves none, and
the next start begins again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.durable_file import replacement, write_all
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.store.devices.direct_io import turn_on_direct
from vllm_ssdkv.store.format.journal_record import (
    Kind,
    encode_header,
    encode_records,
)
from vllm_ssdkv.store.index.journal import WRITE_RECORDS
from vllm_ssdkv.store.index.recovery import LOG_INTERVAL_S
from vllm_ssdkv.store.io.slot_io import ReadFrom
from vllm_ssdkv.store.maintenance.header_scan import scan_headers, suspect_slots
from vllm_ssdkv.store.maintenance.offline_store import DataFile, StoredStore, open_data_file
from vllm_ssdkv.store.maintenance.slot_check import BatchPlan, Entry, SlotChecker
from vllm_ssdkv.store.maintenance.slot_reader import open_slots

logger = logging.getLogger(__name__)


def rebuild_journal(store: StoredStore, *, whole: bool) -> int:
    """Put a journal of the blocks that slot headers name in place; how many they are.

    Reads the headers of all slots, and every page of blocks of which a part may be missing; logs
    how far it is. Nothing is locked: the caller's workers hold the data files, and do not write.

    Args:
        store: The store; its journal is replaced.
        whole: Read every page of every block: where reads check a sample of the pages only, a slot
            that was being overwritten when its engine died must not be found.

    Raises:
        DeadlineError, DeviceError: a device does not answer, or cannot be read.
        StoreError: the journal cannot be written.
    """
    devices = range(len(store.paths))
    absent = np.array([store.absent(device) for device in devices], dtype=np.bool_)
    with contextlib.ExitStack() as stack:
        files: list[list[DataFile | None]] = []
        for rank in range(store.manifest.tp_size):
            mine: list[DataFile | None] = []
            for device in devices:
                file = None
                if not absent[device]:
                    file = open_data_file(store, device, rank, lock=False)
                if file is not None:
                    stack.callback(file.close)
                    turn_on_direct(file.fd, str(file.path), "auto")
                mine.append(file)
            files.append(mine)
        entry = scan_headers(store, files, absent, _Progress("headers of slots read"))
        entry = entry.part(np.flatnonzero(~store.placement.lost(absent, entry.slots)))
        everything = np.ones(len(entry.slots), dtype=np.bool_)
        suspect = everything if whole else suspect_slots(store, entry)
        entry = entry.part(np.flatnonzero(_right(store, files, absent, entry, suspect)))
    write_journal(store, entry)
    return len(entry.slots)


def _right(
    store: StoredStore,
    files: Sequence[Sequence[DataFile | None]],
    absent: NDArray[np.bool_],
    entry: Entry,
    doubtful: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Mask of blocks, [n], that are right, of those that are ``doubtful``; the others are taken to
    be."""
    right = np.ones(len(entry.slots), dtype=np.bool_)
    which = np.flatnonzero(doubtful)
    if not len(which):
        return right
    out = tuple(np.flatnonzero(absent).tolist())
    sources = [ReadFrom(copy, out) for copy in range(store.placement.most_copies)]
    if len(sources) > 1:  # each copy may miss another part of what a device has missed
        missed = [d for d, known in enumerate(store.manifest.devices) if any(known.gap)]
        sources += [ReadFrom(0, (device, *out)) for device in missed]
    progress = _Progress("blocks in doubt read")
    for rank, mine in enumerate(files):
        wrong, plan = (
            np.ones(len(which), dtype=np.bool_),
            BatchPlan(store.manifest.geometries[rank]),
        )
        with open_slots(store, rank, mine, plan.nbytes) as (slots, _):
            for source in sources:
                left = np.flatnonzero(wrong)
                checker = SlotChecker(slots, plan, source)
                bad = [
                    verdict.index
                    for verdict in checker.check(entry.part(which[left]), lambda _: None)
                ]
                wrong[np.delete(left, bad)] = False
            left = np.flatnonzero(wrong & store.placement.doubled(entry.slots[which]))
            for whole, _ in SlotChecker(slots, plan).gather(entry.part(which[left])):
                wrong[left[whole]] = False
        right[which[wrong]] = False
        progress((rank + 1) * len(which), len(files) * len(which))
    return right


def write_journal(store: StoredStore, entry: Entry) -> None:
    """Put a journal of these blocks, the oldest first, in the place of the one there is. Blocks.

    Raises:
        StoreError: it cannot be written; nothing was replaced.
    """
    header = encode_header(UUID(store.manifest.store), store.fingerprint.digest)
    path = store.journal
    try:
        with replacement(path) as fd:
            write_all(fd, header, 0)
            at = len(header)
            for begin in range(0, len(entry.slots), WRITE_RECORDS):
                part = slice(begin, begin + WRITE_RECORDS)
                records = encode_records(
                    Kind.PUT,
                    entry.slots[part],
                    entry.epochs[part],
                    entry.keys[part],
                    begin + 1,
                )
                write_all(fd, records, at)
                at += len(records)
    except OSError as error:
        raise StoreError(f"journal {path}: {error.strerror}") from error


class _Progress:
    """Logs how far the reading of all slots is, every few seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next = time.monotonic() + LOG_INTERVAL_S

    def __call__(self, done: int, total: int) -> None:
        """Called after each batch."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LOG_INTERVAL_S
            logger.info("ssdkv: making the journal anew: %d of %d %s", done, total, self._what)
