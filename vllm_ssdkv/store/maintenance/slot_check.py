"""Reads many slots of one rank in large batches and says which of them are not what they should be.

Several batches are in flight while one is being verified, so that the devices never wait for the
checksums; memory is bounded by :data:`MEMORY_BYTES`, or one slot where slots are larger.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import DeadlineError
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.format.slot_header_batch import key_rows
from vllm_ssdkv.store.io.digest_source import HeaderDigests, SlotExtents
from vllm_ssdkv.store.io.engines.protocol import U64, Op
from vllm_ssdkv.store.io.slot_io import ReadFrom, SlotIO
from vllm_ssdkv.store.io.slot_request import SlotRequest
from vllm_ssdkv.store.io.verified_read import VerifiedRead

MEMORY_BYTES = 192 << 20
_BATCH_BYTES = 32 << 20
_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Entry:
    """Slots as the journal has them; arrays and keys of one length."""

    slots: NDArray[np.int64]
    epochs: NDArray[np.int64]
    keys: list[bytes]

    def part(self, which: NDArray[np.int64]) -> Entry:
        """Entries at these places."""
        return Entry(self.slots[which], self.epochs[which], [self.keys[i] for i in which.tolist()])


@dataclass(frozen=True, slots=True)
class Verdict:
    """Fault of one slot. ``index`` is its place in the :class:`Entry`."""

    index: int
    kind: Literal["header", "page", "unreadable"]
    text: str


class BatchPlan:
    """Division of a check's memory.

    Attributes:
        slots: Slots of one batch.
        batches: Batches in flight.
        nbytes: Memory of all of them.
    """

    def __init__(self, geometry: SlotGeometry):
        self.slots = max(1, _BATCH_BYTES // geometry.slot_bytes)
        one = self.slots * geometry.slot_bytes
        self.batches = max(1, min(_IN_FLIGHT, MEMORY_BYTES // one))
        self.nbytes = self.batches * one


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    which: NDArray[np.int64]
    pieces: U64
    batch: SlotRequest


def refuse_hanging(files: SlotIO, held: NDArray[np.bool_], what: str = "read") -> None:
    """Raise DeadlineError where an I/O that nobody waits for any more ``held`` its memory."""
    if held.any():
        raise DeadlineError(
            f"a {what} did not end within {files.deadline_s:g} s on "
            f"{', '.join(files.health.paths)}: check the drives"
        )


class SlotChecker:
    """Checks slots of one rank's open files. Used by one thread; blocks on I/O."""

    def __init__(self, files: SlotIO, plan: BatchPlan, source: ReadFrom | None = None):
        """The first ``plan.nbytes`` of the files' arena belong to this. ``source``: which copies
        are checked; the first ones by default."""
        self._source = source or ReadFrom()
        self._files = files
        self._plan = plan

    def check(self, entry: Entry, progress: Callable[[int], None]) -> Iterator[Verdict]:
        """Yield the fault of each slot that is wrong, while ``progress`` hears of slots done.

        Slots are read in ascending order, as they lie on the devices. What fails is read once more,
        alone: the block layer fails neighbours of a bad sector too.

        Raises:
            DeadlineError: a device does not answer.
        """
        order = np.argsort(entry.slots, kind="stable")
        size = self._files.geometry.slot_bytes
        per = self._plan.slots
        reading: collections.deque[_Reading] = collections.deque()
        for number, begin in enumerate(range(0, len(order), per)):
            if len(reading) == self._plan.batches:
                yield from self._finish(entry, reading.popleft(), progress)
            which = order[begin : begin + per]
            first = number % self._plan.batches * per
            pieces = np.arange(first, first + len(which), dtype=np.uint64) * np.uint64(size)
            reading.append(self._read(entry, which, pieces))
        while reading:
            yield from self._finish(entry, reading.popleft(), progress)

    def gather(self, entry: Entry) -> Iterator[tuple[NDArray[np.int64], U64]]:
        """Read slots of which no copy is right, page by page from both; those that are whole then.

        Yields:
            Batch by batch: places in the entry, [n], and the arena offset of each one's bytes.

        Raises:
            DeadlineError: a device does not answer.
        """
        geometry = self._files.geometry
        for begin in range(0, len(entry.slots), self._plan.slots):
            which = np.arange(begin, min(begin + self._plan.slots, len(entry.slots)))
            part = entry.part(which)
            at = np.arange(len(which), dtype=np.uint64) * np.uint64(geometry.slot_bytes)
            extents = SlotExtents(part.slots, 0, geometry.pages, at, headed=True)
            source = HeaderDigests(
                self._files.codec, extents, part.epochs, key_rows(part.keys), lambda *_: None
            )
            read = VerifiedRead(self._files, extents, source, charge=False)
            if not read.finish(again=False).all():
                read.read_again(math.inf)
            refuse_hanging(self._files, read.held())
            yield which[read.good], at[read.good]

    def _read(self, entry: Entry, which: NDArray[np.int64], pieces: U64) -> _Reading:
        size = self._files.geometry.slot_bytes
        slots = entry.slots[which]
        batch = self._files.submit(Op.READ, slots, 0, size, pieces, source=self._source)
        return _Reading(which, pieces, batch)

    def _finish(
        self, entry: Entry, reading: _Reading, progress: Callable[[int], None]
    ) -> Iterator[Verdict]:
        found = self._verify(entry, reading)
        for at in sorted(found):
            again = slice(at, at + 1)
            if reading.batch.out_of_reach()[at]:
                yield found[at]
                continue
            alone = self._read(entry, reading.which[again], reading.pieces[again])
            yield from self._verify(entry, alone).values()
        progress(len(reading.which))

    def _verify(self, entry: Entry, reading: _Reading) -> dict[int, Verdict]:
        """Verdicts by place in the batch."""
        arrived = reading.batch.wait()
        refuse_hanging(self._files, reading.batch.held())
        found: dict[int, Verdict] = {}
        for at in np.flatnonzero(~arrived).tolist():
            found[at] = Verdict(int(reading.which[at]), "unreadable", "cannot be read")
        here = np.flatnonzero(arrived)
        which = reading.which[here]
        keys = key_rows([entry.keys[index] for index in which.tolist()])
        codec = self._files.codec
        seals, headed = codec.read_headers(
            entry.slots[which], entry.epochs[which], keys, reading.pieces[here]
        )
        for at in here[~headed].tolist():
            index = int(reading.which[at])
            slot, epoch = int(entry.slots[index]), int(entry.epochs[index])
            why = codec.why_refused(slot, epoch, entry.keys[index], int(reading.pieces[at]))
            found[at] = Verdict(index, "header", why)
        whole = here[headed]
        if len(whole) == 0:
            return found
        geometry = self._files.geometry
        first = reading.pieces[whole] + np.uint64(geometry.header_bytes)
        row, page = np.nonzero(~codec.unseal(seals.part(headed), 0, first, final=True))
        for one in np.unique(row).tolist():
            pages = page[row == one].tolist()
            text = f"page {pages[0]} does not match its checksum"
            if len(pages) > 1:
                text = f"{len(pages)} pages do not match their checksums, the first is {pages[0]}"
            at = int(whole[one])
            found[at] = Verdict(int(reading.which[at]), "page", text)
        return found
