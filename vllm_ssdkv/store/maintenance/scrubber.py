"""Scrub: stored slots are read again and verified while nobody else uses the devices.

A bit that has flipped on a drive is found before a request asks for the block, and a drive that
fails is noticed while it is idle. Which slots hold a block is the scheduler's knowledge; here a
slot counts if its header is one of this store's. What is wrong is reported with the epoch that the
header names, so that a report about an older life of a slot has no effect: a free slot of a segment
that was striped anew may have its old header, and other bytes behind it. So no device is charged
before the scheduler has said that the slot is stored (:meth:`Scrubber.confirm`).

Of slots with two copies both are read. One that is wrong, or older than the other, is written anew
from the one that is right: so a drive that was away, or was replaced, is filled again.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.slot_header import SlotHeader, decode, epoch_of
from vllm_ssdkv.store.integrity.page_verification import wrong_pages
from vllm_ssdkv.store.integrity.slot_codec import Digests
from vllm_ssdkv.store.io.buffer_pool import BufferPool
from vllm_ssdkv.store.io.digest_source import SlotExtents, Which
from vllm_ssdkv.store.io.engines.protocol import U64, Op
from vllm_ssdkv.store.io.slot_io import ReadFrom, SlotIO
from vllm_ssdkv.store.io.slot_request import SlotRequest
from vllm_ssdkv.store.io.verified_read import VerifiedRead
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.memory_plan import PIECES

logger = logging.getLogger(__name__)


COPIES = (ReadFrom(0), ReadFrom(1))

PASS_S = 3600.0
"""Least time from the start of a pass over all slots to the next one."""

MEND_RATE = 64 << 20
"""Bytes per second at which suspect copies are looked at where nothing else is scrubbed."""

_AGAIN_S = 60.0
"""Least time between two looks at one suspect copy."""

_LOOK_S = 0.05
"""Interval at which the thread checks whether the devices are idle."""

_MOST_SUSPECTS = 256
"""Slots with faults that nobody has confirmed; the oldest are forgotten."""

_MOST_UNTOLD = 32
"""Number of faults found before an idle engine is told: only the engine decides whether the devices
can be trusted."""

_MOST_CREDIT = 256
"""Right pieces of each device that count for it before a fault: more make up for any."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """Fault of a slot, or of one copy of it, and the read that brought it."""

    text: str
    read: VerifiedRead | None = None
    header: bool = False

    def charge(self, files: SlotIO) -> None:
        """The slot is stored: count it, and hold it against the devices it came from."""
        files.counters.add("header_mismatches", int(self.header))
        if self.read is not None and (pages := int(self.read.wrong.sum())):
            self.read.charge_devices()
            files.counters.add("checksum_failures", pages)
            files.counters.add("scrub_bad_pages", pages)


_UNREADABLE = _Fault("it cannot be read")


@dataclass(frozen=True, slots=True)
class _Suspect:
    """Faults of a slot that holds a block, if it is of this epoch."""

    epoch: int
    faults: Sequence[_Fault]
    lost: bool
    """True if no copy is right."""
    credit: NDArray[np.int64]
    """Pieces of each device that were right since the fault before, [devices]."""


class Scrubber:
    """Reads slot after slot in a thread of its own, from a random one on, round and round.

    One read is in flight at most, of one slot, and none is started unless ``idle`` says that loads,
    streams and writes rest: a request waits for one slot at worst.
    """

    def __init__(
        self,
        files: SlotIO,
        arena: Arena,
        pieces: BufferPool,
        num_slots: int,
        bytes_per_s: float | None,
        *,
        idle: Callable[[], bool],
        writing: Callable[[int], bool],
        visit: Callable[[int, Callable[[], None], float], bool],
    ):
        """Args:
        files: The slots.
        arena: Memory of the engine.
        pieces: :data:`PIECES` of ``slot_bytes`` in it; only the scrubber uses them.
        num_slots: Slots of the store.
        bytes_per_s: Upper bound of the rate; None: only slots with a suspect copy are read.
        idle: Whether nobody else uses the devices; any thread.
        writing: Whether a slot is, or is about to be, written; any thread.
        visit: Has something done while nobody writes a slot, see :meth:`Flusher.visit`.
        """
        self._files = files
        self._arena = arena
        self._pieces = pieces
        self._num_slots = num_slots
        self._rate = bytes_per_s or MEND_RATE
        self._reads_all = bytes_per_s is not None
        self._looked: dict[int, float] = {}
        """Suspect slots, and when they were looked at."""
        self._idle = idle
        self._writing = writing
        self._visit = visit
        self._lock = threading.Lock()
        self._bad: list[tuple[int, int]] = []
        self._mended: list[tuple[int, int]] = []
        self._suspects: dict[int, _Suspect] = {}
        """By slot, until they are confirmed."""
        self._right = np.zeros(len(files.health.paths), dtype=np.int64)
        """Pieces of each device that were right since the last fault."""
        self._known: dict[int, int] = {}
        """Slots that were reported, with their epochs."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ssdkv-scrub", daemon=True)
        self._thread.start()

    def take_bad(self) -> list[tuple[int, int]]:
        """(slot, epoch) pairs found bad since the last call. Any thread; never blocks."""
        with self._lock:
            bad, self._bad = self._bad, []
            return bad

    def take_mended(self) -> list[tuple[int, int]]:
        """(slot, epoch) pairs of which a copy was wrong, since the last call: are they stored? Any
        thread; never blocks."""
        with self._lock:
            mended, self._mended = self._mended, []
            return mended

    def confirm(self, stored: Iterable[tuple[int, int]]) -> None:
        """These (slot, epoch) pairs, of those that were told, are stored. Any thread; never
        blocks."""
        for slot, epoch in stored:
            with self._lock:
                suspect = self._suspects.get(slot)
                if suspect is None or suspect.epoch != epoch:
                    continue
                del self._suspects[slot]
            devices = np.arange(len(suspect.credit), dtype=np.intp)
            credit = np.repeat(devices, suspect.credit)
            self._files.health.judge_content(credit, devices[:0])
            for fault in suspect.faults:
                fault.charge(self._files)
            if suspect.lost:
                text = suspect.faults[0].text
                logger.error("ssdkv: slot %d is dropped by the scrub: %s", slot, text)

    def _untold(self) -> int:
        with self._lock:
            return len(self._bad) + len(self._mended)

    def close(self, timeout_s: float) -> bool:
        """End the thread. Blocks; False when a read did not end in time."""
        end = time.monotonic() + timeout_s
        self._stop.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        # A read of a device that was given up ends late, or never.
        while self._pieces.free() < PIECES and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return self._pieces.free() == PIECES

    # ---- the thread ----

    def _run(self) -> None:
        slot = random.randrange(self._num_slots)  # restarts must not favour the first slots
        left = self._num_slots
        pass_end = time.monotonic() + PASS_S
        while not self._stop.is_set():
            if not self._idle() or self._untold() >= _MOST_UNTOLD:
                self._stop.wait(_LOOK_S)
                continue
            suspect = self._next_suspect()
            if suspect is None and not self._reads_all:
                self._stop.wait(1.0)
                continue
            if suspect is None and left == 0:
                self._stop.wait(max(0.0, pass_end - time.monotonic()))
                left, pass_end = self._num_slots, time.monotonic() + PASS_S
                continue
            start = time.monotonic()
            try:
                nbytes = self._scrub(slot if suspect is None else suspect)
            except Exception:  # whatever it is, the store works without a scrub
                self._files.counters.add("scrub_failures", 1)
                logger.exception("ssdkv: the scrub ends")
                return
            if suspect is None:
                slot, left = (slot + 1) % self._num_slots, left - 1
            self._stop.wait(max(0.0, start + nbytes / self._rate - time.monotonic()))

    def _next_suspect(self) -> int | None:
        """A slot with a suspect copy, while all devices can be written: it is mended first."""
        if self._files.health.any_avoided(Op.WRITE):
            return None
        now = time.monotonic()
        self._looked = {s: t for s, t in self._looked.items() if now - t < _AGAIN_S}
        found = (s for s in self._files.replicas.suspects().tolist() if s not in self._looked)
        slot = next(found, None)
        if slot is not None:
            self._looked[slot] = now
            self._known.pop(slot, None)
        return slot

    def _scrub(self, slot: int) -> int:
        """Verify one slot; bytes read."""
        taken = self._pieces.take(1)
        if taken is None:  # reads that do not end hold the memory
            self._stop.wait(1.0)
            return 0
        reader = _Reader(self._files, self._arena, slot, taken, self._right)
        try:
            if self._files.placement.doubled(np.array([slot], dtype=np.int64))[0]:
                self._verify_copies(slot, reader)
            else:
                self._verify(slot, reader)
        finally:
            reader.give_back(self._pieces)
        self._files.counters.add("scrub_bytes", reader.nbytes)
        return reader.nbytes

    def _verify(self, slot: int, reader: _Reader) -> None:
        """Read a slot, and report it if it is wrong twice.

        A slot that is written meanwhile proves nothing. If a write begins after we have looked, the
        second read sees a header of the old epoch, which nobody confirms any more, or a new one.
        """
        epoch = reader.epoch() if reader.read_header() else None
        if epoch is None or self._known.get(slot) == epoch:
            return
        if reader.read_whole() is None:
            return
        if reader.hopeless() or self._writing(slot):
            return
        fault = reader.read_whole()
        if fault is None or reader.hopeless():
            return
        if self._may_come_back(slot, [fault]):
            return
        if fault is not _UNREADABLE and reader.epoch() != epoch:
            return
        self._report(slot, epoch, [fault], lost=True)

    def _may_come_back(self, slot: int, faults: Sequence[_Fault]) -> bool:
        """Check whether a slot of which no copy is right is only one that cannot be read now."""
        if all(fault is not _UNREADABLE for fault in faults):
            return False
        whole = np.array([[slot], [0], [self._files.geometry.slot_bytes]], dtype=np.int64)
        return not self._files.health.give_up(*whole)[0]

    def _report(self, slot: int, epoch: int, faults: Sequence[_Fault], *, lost: bool) -> None:
        suspect = _Suspect(epoch, faults, lost, self._right.clip(max=_MOST_CREDIT))
        self._right[:] = 0
        if suspect.lost:
            self._known[slot] = suspect.epoch
        with self._lock:
            self._suspects.pop(slot, None)
            self._suspects[slot] = suspect
            if len(self._suspects) > _MOST_SUSPECTS:
                del self._suspects[next(iter(self._suspects))]
            (self._bad if suspect.lost else self._mended).append((slot, suspect.epoch))

    def _verify_copies(self, slot: int, reader: _Reader) -> None:
        """Look at both copies of a slot, and mend what is wrong.

        What is wrong is looked at again while nobody can write it, so that no newer content is
        taken for damage, or overwritten.
        """
        found = reader.look(COPIES)
        epoch = _newest(found)
        if epoch is None or self._known.get(slot) == epoch:
            return
        if all(look.right(epoch) for look in found):
            return
        failures: list[Exception] = []

        def mend() -> None:
            try:
                self._mend(slot, reader)
            except Exception as error:  # noqa: BLE001 - the writer's thread must not end by it
                failures.append(error)

        self._visit(slot, mend, self._files.deadline_s)
        if failures:
            raise failures[0]

    def _mend(self, slot: int, reader: _Reader) -> None:
        found = reader.look(COPIES)
        if any(look.hopeless for look in found):
            return
        epoch = _newest(found)
        if epoch is None:
            return
        right = [look.right(epoch) for look in found]
        if not any(right):
            # One copy may have one page wrong, and the other one another.
            claimed = sorted({look.epoch for look in found if look.epoch is not None}, reverse=True)
            whole = next((claim for claim in claimed if reader.gather(claim)), None)
            if whole is None and reader.hopeless():
                return
            epoch = epoch if whole is None else whole
            right += [whole is not None]
        faults = [look.fault for look in found if look.fault is not None]
        if not any(right) and self._may_come_back(slot, faults):
            return
        if faults:
            self._report(slot, epoch, faults, lost=not any(right))
        if any(right):
            self._write_anew(slot, epoch, reader, found)

    def _write_anew(self, slot: int, epoch: int, reader: _Reader, found: Sequence[_Look]) -> None:
        """Write the copies that are wrong from the one that is right, or from both."""
        source = next((copy for copy in COPIES if found[copy.copy].right(epoch)), None)
        for copy in COPIES:
            look = found[copy.copy]
            if look.right(epoch):
                continue
            if source is not None and not reader.fetch(source, epoch):
                return  # no longer right: the next pass looks again
            if not reader.write(copy):
                self._known[slot] = epoch  # its device takes no writes
                return
            self._files.counters.add("mended_copies", 1)
            logger.warning(
                "ssdkv: copy %d of slot %d is written anew from the other one: %s",
                copy.copy,
                slot,
                "it was out of date" if look.fault is None else look.fault.text,
            )


@dataclass(frozen=True, slots=True)
class _Look:
    """Result of a look at one copy of a slot."""

    epoch: int | None
    fault: _Fault | None
    hopeless: bool

    def right(self, epoch: int) -> bool:
        return self.epoch == epoch and self.fault is None


def _newest(looks: Sequence[_Look]) -> int | None:
    """Epoch of the slot's content: of a copy that is right, or of what claims to be one."""
    right = [look.epoch for look in looks if look.epoch is not None and look.fault is None]
    return max(right or [look.epoch for look in looks if look.epoch is not None], default=None)


class _Claims:
    """Digests in a slot's header, whichever block that names: checksums of what lies on devices,
    which need no key. See :class:`~vllm_ssdkv.store.io.verified_read.DigestSource`."""

    def __init__(self, files: SlotIO, arena: Arena, extents: SlotExtents, epoch: int | None):
        """``epoch``: the only one that is looked for; None: any."""
        self.codec = self
        self._files = files
        self._arena = arena
        self._extents = extents
        self._epoch = epoch

    def digests(self, which: Which | slice) -> tuple[Digests, NDArray[np.bool_]]:
        """Digests of the only extent, or of none."""
        count, pages = len(self._extents.slots[which]), self._extents.pages
        marks = np.zeros((count, pages, 1), dtype=np.uint64)
        known = np.zeros(count, dtype=np.bool_)
        if count and not self.why_refused(0):
            marks[0, :, 0] = self._header().checksums[:pages]
            known[0] = True
        return Digests(np.zeros((count, 0), dtype=np.uint64), marks), known

    def why_refused(self, which: int) -> str:
        """See ``DigestSource``; empty if it is not."""
        try:
            epoch = self._header().epoch
        except FormatError as error:
            return str(error)
        return "" if self._epoch in (None, epoch) else f"slot header: its epoch is {epoch}"

    def _header(self) -> SlotHeader:
        geometry, slot = self._files.geometry, int(self._extents.slots[0])
        view = self._arena.view(int(self._extents.at[0]), geometry.header_bytes)
        return decode(view, geometry, self._files.fingerprint, slot=slot, rank=self._files.rank)

    def unseal(
        self, seals: Digests, first_page: int, at: U64, *, final: bool = False
    ) -> NDArray[np.bool_]:
        """See ``PageCodec``: nothing is decrypted, and all of it is checked."""
        same = np.ones(seals.marks.shape[:2], dtype=np.bool_)
        base = np.uint64(self._arena.address) + at
        same[wrong_pages(self._files.geometry, base, seals.marks[:, :, 0])] = False
        return same


class _Reader:
    """Reads one slot into one piece of memory, one read after the other."""

    def __init__(
        self,
        files: SlotIO,
        arena: Arena,
        slot: int,
        piece: NDArray[np.uint64],
        right: NDArray[np.int64],
    ):
        """``right`` counts the pieces that are, [devices]."""
        self._right = right
        self._files = files
        self._arena = arena
        self._slots = np.array([slot], dtype=np.int64)
        self._piece = piece
        self._read: VerifiedRead | None = None
        self._written: SlotRequest | None = None
        self._view = arena.view(int(piece[0]), files.geometry.slot_bytes)
        self.nbytes = 0

    def _start(self, pages: int, source: ReadFrom | None, epoch: int | None) -> VerifiedRead:
        """Read the header of the slot and so many pages. Devices are charged by nobody until it is
        known that the slot is stored."""
        files = self._files
        extents = SlotExtents(self._slots, 0, pages, self._piece, headed=True)
        claims = _Claims(files, self._arena, extents, epoch)
        self._read = VerifiedRead(files, extents, claims, read_from=source, charge=False)
        self.nbytes += extents.nbytes(files.geometry)
        return self._read

    def epoch(self) -> int | None:
        """Epoch that the header in memory names."""
        return epoch_of(self._view, int(self._slots[0]))

    def read_header(self, source: ReadFrom | None = None) -> bool:
        """Read the header; whether it arrived, right or not. Blocks up to the deadline."""
        read = self._start(0, source, None)
        read.finish(again=False)
        return bool(read.arrived[0])

    def read_whole(self, source: ReadFrom | None = None, epoch: int | None = None) -> _Fault | None:
        """Read all of the slot; what is wrong with it. None: nothing, which its devices are given
        credit for. Blocks up to the deadline."""
        read = self._start(self._files.geometry.pages, source, epoch)
        if read.finish(again=False)[0]:
            read.charge_devices()
            self._right += np.bincount(read.request.extents.device, minlength=len(self._right))
            return None
        if not read.arrived[0]:
            return _UNREADABLE
        return _Fault(read.why(0), read, header=not read.wrong.any())

    def look(self, sources: Sequence[ReadFrom]) -> list[_Look]:
        """Read and verify the slot from each of these; none is read while the memory hangs."""
        return [self._look_at(source) for source in sources]

    def _look_at(self, source: ReadFrom) -> _Look:
        if self._read is not None and bool(self._read.held().any()):
            return _Look(None, _UNREADABLE, True)
        if not self.read_header(source):
            return _Look(None, _UNREADABLE, self.hopeless())
        epoch = self.epoch()
        if epoch is None:
            return _Look(None, _Fault("it has no header"), False)
        fault = self.read_whole(source)
        if fault is _UNREADABLE:
            return _Look(epoch, fault, self.hopeless())
        if fault is None and self._read is not None:
            self._remember(self._read.request, right=True)
        return _Look(epoch, fault, False)

    def fetch(self, source: ReadFrom, epoch: int) -> bool:
        """Read the whole slot from this source; whether this epoch's content arrived, right."""
        return self.read_whole(source, epoch) is None

    def gather(self, epoch: int) -> bool:
        """Read the slot from all copies, page by page; whether this epoch's content is there."""
        if self._read is not None and bool(self._read.held().any()):
            return False
        return bool(self._start(self._files.geometry.pages, None, epoch).finish()[0])

    def write(self, copy: ReadFrom) -> bool:
        """Write what was fetched to this copy; False if a device does not take it."""
        size = self._files.geometry.slot_bytes
        request = self._files.submit(Op.WRITE, self._slots, 0, size, self._piece, source=copy)
        self._written = request
        written = bool(request.wait()[0])
        self._remember(request, right=written)
        return written

    def _remember(self, request: SlotRequest, *, right: bool) -> None:
        """Tell those who choose between copies what became of the one just read or written."""
        devices = request.extents.device
        slots = np.full(len(devices), int(self._slots[0]), dtype=np.int64)
        if right:
            self._files.replicas.mark_valid(slots, devices)
        else:
            self._files.replicas.mark_suspect(slots, devices)

    def hopeless(self) -> bool:
        """Check whether the last read did not end, or went to a device out of use."""
        read = self._read
        return read is not None and bool((read.held() | read.request.out_of_reach()).any())

    def give_back(self, pieces: BufferPool) -> None:
        """Return the memory, when the last read, or write, has ended."""
        if self._written is not None and not self._written.ended():
            pieces.lend(self._piece, self._written.held(), self._written)
        elif self._read is not None:
            self._read.give_back(pieces)
        else:
            pieces.give(self._piece)
