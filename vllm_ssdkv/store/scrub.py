"""Scrub: stored slots are read again and verified while nobody else uses the devices.

A bit that has flipped on a drive is found before a request asks for the block, and a drive that
fails is noticed while it is idle. Which slots hold a block is the scheduler's knowledge; here a
slot counts if its header is one of this store's. What is wrong is reported with the epoch that the
header names, so that a report about an older life of a slot has no effect.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.errors import FormatError
from vllm_ssdkv.store.arena import Arena
from vllm_ssdkv.store.engine.protocol import Op
from vllm_ssdkv.store.files import SlotBatch, SlotFiles
from vllm_ssdkv.store.header import decode, epoch_of
from vllm_ssdkv.store.staging import Staging
from vllm_ssdkv.store.verify import wrong_pages

logger = logging.getLogger(__name__)

PIECES = 2
"""Slots of memory: one is read, and one may be held by a read that does not end."""

PASS_S = 3600.0
"""Least time from the start of a pass over all slots to the next one."""

_LOOK_S = 0.05
"""How often the thread looks whether the devices are idle."""


class Scrubber:
    """Reads slot after slot in a thread of its own, from a random one on, round and round.

    One read is in flight at most, of one slot, and none is started unless ``idle`` says that loads,
    streams and writes rest: a request waits for one slot at worst.
    """

    def __init__(
        self,
        files: SlotFiles,
        arena: Arena,
        pieces: Staging,
        num_slots: int,
        bytes_per_s: float,
        *,
        idle: Callable[[], bool],
        writing: Callable[[int], bool],
    ):
        """Args:
        files: The slots.
        arena: Memory of the engine.
        pieces: :data:`PIECES` of ``slot_bytes`` in it; only the scrubber uses them.
        num_slots: Slots of the store.
        bytes_per_s: Upper bound of the rate.
        idle: Whether nobody else uses the devices; any thread.
        writing: Whether a slot is, or is about to be, written; any thread.
        """
        self._files = files
        self._arena = arena
        self._pieces = pieces
        self._num_slots = num_slots
        self._rate = bytes_per_s
        self._idle = idle
        self._writing = writing
        self._lock = threading.Lock()
        self._bad: list[tuple[int, int]] = []
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
            if not self._idle():
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
        reader = _Reader(self._files, self._arena, slot, taken)
        try:
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
        if reader.read_whole() and reader.judge(final=False) is None:
            return
        if reader.hopeless() or self._writing(slot):
            return
        fault = "it cannot be read"
        if reader.read_whole():
            found = reader.judge(final=True)
            if found is None or epoch_of(reader.view, slot) != epoch:
                return
            fault = found
        elif reader.hopeless():
            return
        logger.error("ssdkv: slot %d is dropped by the scrub: %s", slot, fault)
        self._known[slot] = epoch
        with self._lock:
            self._bad.append((slot, epoch))


class _Reader:
    """Reads one slot into one piece of memory, one read after the other."""

    def __init__(self, files: SlotFiles, arena: Arena, slot: int, piece: NDArray[np.uint64]):
        self._files = files
        self._slot = slot
        self._piece = piece
        self._batch: SlotBatch | None = None
        self.view = arena.view(int(piece[0]), files.geometry.slot_bytes)
        self._address = np.uint64(arena.address) + piece
        self.nbytes = 0

    def read(self, nbytes: int) -> bool:
        """Read the first bytes of the slot; whether they arrived. Blocks up to the deadline."""
        slots = np.array([self._slot], dtype=np.int64)
        self._batch = self._files.submit(Op.READ, slots, 0, nbytes, self._piece)
        self.nbytes += nbytes
        return bool(self._batch.wait()[0])

    def read_whole(self) -> bool:
        """As :meth:`read`, all of it."""
        return self.read(self._files.geometry.slot_bytes)

    def hopeless(self) -> bool:
        """Whether the last read did not end, or went to a device out of use."""
        return self._batch is not None and bool(
            (self._batch.held() | self._batch.out_of_reach()).any()
        )

    def give_back(self, pieces: Staging) -> None:
        """Return the memory, when the last read has ended."""
        if self._batch is None:
            pieces.give(self._piece)
        else:
            pieces.lend(self._piece, self._batch.held(), self._batch)

    def judge(self, *, final: bool) -> str | None:
        """What is wrong with the slot that was read, None for nothing; counted when ``final``."""
        geometry, counters = self._files.geometry, self._files.counters
        try:
            header = decode(
                self.view,
                geometry,
                self._files.fingerprint,
                slot=self._slot,
                rank=self._files.rank,
            )
        except FormatError as error:
            if final:
                counters.add("header_mismatches", 1)
            return str(error)
        first = self._address + np.uint64(geometry.header_bytes)
        _, wrong = wrong_pages(geometry, first, header.checksums[None, :])
        if self._batch is not None and (final or not len(wrong)):
            right = np.array([not len(wrong)])
            offsets = geometry.header_bytes + wrong * geometry.page_bytes
            self._batch.verified(right, np.zeros(len(wrong), dtype=np.intp), offsets)
        if not len(wrong):
            return None
        if final:
            counters.add("checksum_failures", len(wrong))
            counters.add("scrub_bad_pages", len(wrong))
        return f"{len(wrong)} page(s) do not match their checksums"
