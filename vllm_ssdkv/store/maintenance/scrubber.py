"""Scrub: stored slots are read again and verified while nobody else uses the devices.

A bit that has flipped on a drive is found before a request asks for the block, and a drive that
fails is noticed while it is idle. Which slots hold a block is the scheduler's knowledge; here a
slot counts if its header is one of this store's. What is wrong is reported with the epoch that the
header names, so that a report about an older life of a slot has no effect: a free slot of a segment
that was striped anew may have its old header, and other bytes behind it. So no device is accused
before the scheduler has said that the slot is stored (:meth:`Scrubber.believe`).

Of slots with two copies both are read. One that is wrong, or older than the other, is written anew
from the one that is right: so a drive that was away, or was replaced, is filled again.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.slot_header import decode, epoch_of
from vllm_ssdkv.store.integrity.page_verification import wrong_pages
from vllm_ssdkv.store.io.buffer_pool import BufferPool
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.io.slot_io import ReadFrom, SlotIO
from vllm_ssdkv.store.io.slot_request import SlotRequest
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.memory_plan import PIECES

logger = logging.getLogger(__name__)


COPIES = (ReadFrom(0), ReadFrom(1))

PASS_S = 3600.0
"""Least time from the start of a pass over all slots to the next one."""

_LOOK_S = 0.05
"""How often the thread looks whether the devices are idle."""

_MOST_SUSPECTS = 256
"""Slots with faults that nobody has believed; the oldest are forgotten."""

_MOST_UNTOLD = 32
"""So many faults are found before the engine, which may be idle, hears of them: whether the devices
are to be trusted is for it to say."""

_MOST_CREDIT = 256
"""Right pieces of each device that count for it before a fault: more make up for any."""

_NO_PAGE: NDArray[np.intp] = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True)
class _Fault:
    """Fault of a slot, or of one copy of it, and the read that brought it."""

    text: str
    batch: SlotRequest | None = None
    pages: NDArray[np.intp] = field(default_factory=lambda: _NO_PAGE)
    header: bool = False

    def accuse(self, files: SlotIO) -> None:
        """The slot is stored: count it, and hold it against the devices it came from."""
        files.counters.add("header_mismatches", int(self.header))
        if self.batch is not None and len(self.pages):
            geometry = files.geometry
            offsets = geometry.header_bytes + self.pages * geometry.page_bytes
            wrong = np.zeros(len(self.pages), dtype=np.intp)
            self.batch.verified(np.zeros(1, dtype=np.bool_), wrong, offsets)
            files.counters.add("checksum_failures", len(self.pages))
            files.counters.add("scrub_bad_pages", len(self.pages))


_UNREADABLE = _Fault("it cannot be read")


@dataclass(frozen=True, slots=True)
class _Suspect:
    """Faults of a slot that holds a block, if it is of this epoch."""

    epoch: int
    faults: Sequence[_Fault]
    lost: bool
    """Whether no copy is right."""
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
        bytes_per_s: float,
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
        bytes_per_s: Upper bound of the rate.
        idle: Whether nobody else uses the devices; any thread.
        writing: Whether a slot is, or is about to be, written; any thread.
        visit: Has something done while nobody writes a slot, see :meth:`Flusher.visit`.
        """
        self._files = files
        self._arena = arena
        self._pieces = pieces
        self._num_slots = num_slots
        self._rate = bytes_per_s
        self._idle = idle
        self._writing = writing
        self._visit = visit
        self._lock = threading.Lock()
        self._bad: list[tuple[int, int]] = []
        self._mended: list[tuple[int, int]] = []
        self._suspects: dict[int, _Suspect] = {}
        """By slot, until they are believed."""
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

    def believe(self, stored: Iterable[tuple[int, int]]) -> None:
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
                fault.accuse(self._files)
            if suspect.lost:
                text = suspect.faults[0].text
                logger.error("ssdkv: slot %d is dropped by the scrub: %s", slot, text)

    def _untold(self) -> int:
        with self._lock:
            return len(self._bad) + len(self._mended)

    def close(self, timeout_s: float) -> bool:
        """End the thread. Blocks; False when a read did not end in time."""
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._pieces.usable() == PIECES

    # ---- the thread ----

    def _run(self) -> None:
        slot = random.randrange(self._num_slots)  # restarts must not favour the first slots
        left = self._num_slots
        pass_end = time.monotonic() + PASS_S
        while not self._stop.is_set():
            if not self._idle() or self._untold() >= _MOST_UNTOLD:
                self._stop.wait(_LOOK_S)
                continue
            if left == 0:
                self._stop.wait(max(0.0, pass_end - time.monotonic()))
                left, pass_end = self._num_slots, time.monotonic() + PASS_S
                continue
            start = time.monotonic()
            try:
                nbytes = self._scrub(slot)
            except Exception:  # whatever it is, the store works without a scrub
                self._files.counters.add("scrub_failures", 1)
                logger.exception("ssdkv: the scrub ends")
                return
            slot, left = (slot + 1) % self._num_slots, left - 1
            self._stop.wait(max(0.0, start + nbytes / self._rate - time.monotonic()))

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
        second read sees a header of the old epoch, which nobody believes any more, or a new one.
        """
        if not reader.read(self._files.geometry.header_bytes):
            return
        epoch = epoch_of(reader.view, slot)
        if epoch is None or self._known.get(slot) == epoch:
            return
        if reader.read_whole() and reader.judge() is None:
            return
        if reader.hopeless() or self._writing(slot):
            return
        fault = _UNREADABLE
        if reader.read_whole():
            found = reader.judge()
            if found is None or epoch_of(reader.view, slot) != epoch:
                return
            fault = found
        elif reader.hopeless():
            return
        self._report(slot, epoch, [fault], lost=True)

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
        sources = list(COPIES)
        if all(look.fault for look in found):
            # Each copy may lie on several devices, of which one alone is bad.
            sources += [ReadFrom(0, without=(device,)) for device in reader.devices()]
            found += reader.look(sources[len(COPIES) :])
        epoch = _newest(found)
        if epoch is None:
            return
        right = [look.right(epoch) for look in found]
        faults = [look.fault for look in found[: len(COPIES)] if look.fault is not None]
        if not any(right):
            self._report(slot, epoch, faults, lost=True)
            return
        if faults:
            self._report(slot, epoch, faults, lost=False)
        good = right.index(True)
        for copy in COPIES:
            look = found[copy.copy]
            if look.right(epoch):
                continue
            if not reader.fetch(sources[good], epoch):
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
        self._slot = slot
        self._piece = piece
        self._batch: SlotRequest | None = None
        self.view = arena.view(int(piece[0]), files.geometry.slot_bytes)
        self._address = np.uint64(arena.address) + piece
        self.nbytes = 0

    def read(self, nbytes: int, source: ReadFrom | None = None) -> bool:
        """Read the first bytes of the slot; whether they arrived. Blocks up to the deadline."""
        slots = np.array([self._slot], dtype=np.int64)
        self._batch = self._files.submit(Op.READ, slots, 0, nbytes, self._piece, source=source)
        self.nbytes += nbytes
        return bool(self._batch.wait()[0])

    def devices(self) -> list[int]:
        """Devices that hold parts of the slot."""
        slots = np.array([self._slot], dtype=np.int64)
        copies = self._files.placement.copies(slots, 0, self._files.geometry.slot_bytes)
        return sorted({int(d) for extents in copies if extents is not None for d in extents.device})

    def look(self, sources: Sequence[ReadFrom]) -> list[_Look]:
        """Read and verify the slot from each of these; none is read while the memory hangs."""
        return [self._look_at(source) for source in sources]

    def _look_at(self, source: ReadFrom) -> _Look:
        if self._batch is not None and bool(self._batch.held().any()):
            return _Look(None, _UNREADABLE, True)
        if not self.read(self._files.geometry.header_bytes, source):
            return _Look(None, _UNREADABLE, self.hopeless())
        epoch = epoch_of(self.view, self._slot)
        if epoch is None:
            return _Look(None, _Fault("it has no header"), False)
        if not self.read(self._files.geometry.slot_bytes, source):
            return _Look(epoch, _UNREADABLE, self.hopeless())
        fault = self.judge()
        if fault is None:
            self._remember(right=True)
        return _Look(epoch, fault, False)

    def fetch(self, source: ReadFrom, epoch: int) -> bool:
        """Read the whole slot from this source; whether this epoch's content arrived, right."""
        return (
            self.read(self._files.geometry.slot_bytes, source)
            and self.judge() is None
            and epoch_of(self.view, self._slot) == epoch
        )

    def write(self, copy: ReadFrom) -> bool:
        """Write what was fetched to this copy; False if a device does not take it."""
        size = self._files.geometry.slot_bytes
        slots = np.array([self._slot], dtype=np.int64)
        self._batch = self._files.submit(Op.WRITE, slots, 0, size, self._piece, source=copy)
        written = bool(self._batch.wait()[0])
        self._remember(right=written)
        return written

    def _remember(self, *, right: bool) -> None:
        """Tell those who choose between copies what became of the one just read or written."""
        if self._batch is None:
            return
        devices = self._batch.extents.device
        slots = np.full(len(devices), self._slot, dtype=np.int64)
        if right:
            self._files.replicas.trust(slots, devices)
        else:
            self._files.replicas.doubt(slots, devices)

    def read_whole(self) -> bool:
        """As :meth:`read`, all of it."""
        return self.read(self._files.geometry.slot_bytes)

    def hopeless(self) -> bool:
        """Whether the last read did not end, or went to a device out of use."""
        return self._batch is not None and bool(
            (self._batch.held() | self._batch.out_of_reach()).any()
        )

    def give_back(self, pieces: BufferPool) -> None:
        """Return the memory, when the last read has ended."""
        if self._batch is None:
            pieces.give(self._piece)
        else:
            pieces.lend(self._piece, self._batch.held(), self._batch)

    def judge(self) -> _Fault | None:
        """Judge the slot that was read; None: it is right, which its devices are given credit
        for."""
        geometry = self._files.geometry
        try:
            header = decode(
                self.view,
                geometry,
                self._files.fingerprint,
                slot=self._slot,
                rank=self._files.rank,
            )
        except FormatError as error:
            return _Fault(str(error), header=True)
        first = self._address + np.uint64(geometry.header_bytes)
        _, wrong = wrong_pages(geometry, first, header.checksums[None, :])
        if not len(wrong):
            if self._batch is not None:
                self._batch.verified(np.ones(1, dtype=np.bool_), wrong, wrong)
                self._right += np.bincount(self._batch.extents.device, minlength=len(self._right))
            return None
        text = f"{len(wrong)} page(s) do not match their checksums"
        return _Fault(text, self._batch, wrong)
