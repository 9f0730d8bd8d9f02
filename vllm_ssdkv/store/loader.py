"""The load path: slots of a prefix hit are read, checked and handed to HBM, in a thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.errors import FormatError
from vllm_ssdkv.store.cache import NO_FRAME, FrameCache, FrameState
from vllm_ssdkv.store.checksum_table import ChecksumTable
from vllm_ssdkv.store.engine.protocol import Op
from vllm_ssdkv.store.files import GROUP, SlotBatch, SlotFiles
from vllm_ssdkv.store.header import SlotHeader, decode
from vllm_ssdkv.store.staging import Staging
from vllm_ssdkv.store.verify import wrong_pages
from vllm_ssdkv.store.writer import frame_checksums

logger = logging.getLogger(__name__)

HEADERS = 2 * GROUP
"""Room for headers: a group of them, and as many again that overdue reads may hold."""

_LOOK_S = 0.1
"""How often the thread looks whether an overdue read has ended."""

CopyIn = Callable[[NDArray[np.int32], NDArray[np.int64]], None]
"""Copies frames [n] into HBM blocks [n]; returns when the blocks may be used."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One request's hit. The last ``len(block_ids)`` slots go to HBM; 0 is no block."""

    request_id: str
    slots: NDArray[np.int64]
    epochs: NDArray[np.int64]
    keys: tuple[bytes, ...]
    block_ids: NDArray[np.int64]

    @property
    def first_in_hbm(self) -> int:
        """Index of the first slot that goes to HBM."""
        return len(self.slots) - len(self.block_ids)


@dataclass(slots=True)
class LoadOutcome:
    """What became of a job. ``bad`` are (slot, epoch) pairs that must not be found again.

    Seconds: ``queued_s`` behind other jobs, ``ssd_s`` for what was read from devices, ``dram_s``
    for what was found in frames; copies to HBM included.
    """

    request_id: str
    complete: bool = True
    bad: list[tuple[int, int]] = field(default_factory=list)
    tokens_from_dram: int = 0
    tokens_from_ssd: int = 0
    queued_s: float = 0.0
    dram_s: float = 0.0
    ssd_s: float = 0.0


class SlotLoader:
    """Runs load jobs in order, one at a time, each reading from all devices at once.

    Every slot that is read is verified: header against key, epoch, slot and rank, pages (all, or by
    option a sample of them) against their checksums. Slots that need not go to HBM (page mode) are
    read whole while spare frames last, afterwards only their headers: their pages are streamed and
    checked when attended to.

    No wait for a frame or a read is longer than the deadline.
    """

    def __init__(
        self,
        files: SlotFiles,
        frames: FrameCache,
        checksums: ChecksumTable,
        headers: Staging,
        copy_in: CopyIn,
        block_tokens: int,
    ):
        """``headers`` are pieces of ``header_bytes`` each; only the loader uses them."""
        self._files = files
        self._frames = frames
        self._checksums = checksums
        self._headers = headers
        self._copy_in = copy_in
        self._block_tokens = block_tokens
        self._jobs: queue.SimpleQueue[tuple[LoadJob, float] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[LoadOutcome] = queue.SimpleQueue()
        self._overdue: list[tuple[SlotBatch, NDArray[np.int32]]] = []
        self._active = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ssdkv-loader", daemon=True)
        self._thread.start()

    def load(self, job: LoadJob) -> None:
        """Queue a job. Never blocks. One thread calls this and :meth:`take_outcomes`."""
        self._active += 1
        self._jobs.put((job, time.monotonic()))

    def take_outcomes(self) -> list[LoadOutcome]:
        """Jobs that ended since the last call."""
        outcomes: list[LoadOutcome] = []
        while True:
            try:
                outcomes.append(self._outcomes.get_nowait())
            except queue.Empty:
                self._active -= len(outcomes)
                return outcomes

    def active(self) -> int:
        """Jobs queued or running whose outcome was not taken yet."""
        return self._active

    def close(self, timeout_s: float) -> bool:
        """End the thread; jobs that are queued fail. False when a read did not end in time."""
        self._stopping = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._overdue

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            try:
                entry = self._jobs.get(timeout=_LOOK_S if self._overdue else None)
            except queue.Empty:
                self._collect_overdue()
                continue
            if entry is None:
                self._collect_overdue()
                return
            job, since = entry
            self._outcomes.put(self._load(job, time.monotonic() - since))

    def _load(self, job: LoadJob, queued_s: float) -> LoadOutcome:
        outcome = LoadOutcome(job.request_id, queued_s=queued_s)
        try:
            self._load_ranges(job, outcome)
        except Exception:  # whatever it is, the request must not wait for ever
            logger.exception("ssdkv: load of request %s failed", job.request_id)
            outcome.complete = False
        if not outcome.complete:
            self._files.counters.add("load_failures", 1)
            outcome.tokens_from_dram = outcome.tokens_from_ssd = 0
        return outcome

    def _load_ranges(self, job: LoadJob, outcome: LoadOutcome) -> None:
        # The newest slots first: their frames matter most, to HBM and to the next steps.
        end = len(job.slots)
        while end > 0 and outcome.complete:
            if self._stopping:
                outcome.complete = False
                return
            begin = max(0, end - GROUP)
            if begin < job.first_in_hbm < end:
                begin = job.first_in_hbm
            self._load_range(job, outcome, np.arange(begin, end))
            end = begin

    def _load_range(self, job: LoadJob, outcome: LoadOutcome, which: NDArray[np.int64]) -> None:
        """Load slots ``which`` of the job, all of which go to HBM or none."""
        begun = time.monotonic()
        frames = self._frames.borrow(job.slots[which])
        here = frames != NO_FRAME
        try:
            self._remember(job, outcome, which[here], frames[here])
            if outcome.complete:
                self._copy(job, which[here], frames[here])
        finally:
            self._frames.give_back(frames)
        missing = which[~here]
        copied = time.monotonic()
        if which[0] >= job.first_in_hbm:
            self._read_to_hbm(job, outcome, missing)
        else:
            self._read_to_dram(job, outcome, missing)
        if len(missing):
            outcome.ssd_s += time.monotonic() - copied
        if here.any():
            outcome.dram_s += copied - begun
        if outcome.complete:
            outcome.tokens_from_dram += int(here.sum()) * self._block_tokens
            outcome.tokens_from_ssd += len(missing) * self._block_tokens

    def _remember(
        self,
        job: LoadJob,
        outcome: LoadOutcome,
        which: NDArray[np.int64],
        frames: NDArray[np.int32],
    ) -> None:
        """Keep the checksums of slots in DRAM: their frames may go while they are streamed."""
        slots = job.slots[which]
        wanted = self._frames.referenced(slots) & ~self._checksums.known(slots)
        for index, frame in zip(which[wanted].tolist(), frames[wanted].tolist(), strict=True):
            if self._frames.state(frame) is FrameState.CLEAN:
                if self._header(job, index, self._frames.view(frame), final=True) is None:
                    self._blame(job, outcome, index)
                continue
            # It has no header yet, or the writer is just making it; the pages do not change.
            one = np.array([frame], dtype=np.int32)
            sums = frame_checksums(self._frames, one, self._files.geometry)[0]
            self._checksums.put(int(job.slots[index]), sums)

    def _copy(self, job: LoadJob, which: NDArray[np.int64], frames: NDArray[np.int32]) -> None:
        """Copy frames into the HBM blocks of slots ``which``, where they have one."""
        inside = which >= job.first_in_hbm
        block_ids = job.block_ids[which[inside] - job.first_in_hbm]
        wanted = block_ids != 0
        if wanted.any():
            self._copy_in(frames[inside][wanted], block_ids[wanted])

    # ---- reading ----

    def _read_to_hbm(self, job: LoadJob, outcome: LoadOutcome, which: NDArray[np.int64]) -> None:
        while len(which) and outcome.complete:
            deadline = time.monotonic() + self._files.deadline_s
            part = job.slots[which[: self._files.group]]
            frames = self._frames.wait_for_frames(part, FrameState.LOADING, deadline)
            if len(frames) == 0:
                logger.error("ssdkv: no DRAM frame for request %s in time", job.request_id)
                outcome.complete = False
                return
            self._read_frames(job, outcome, which[: len(frames)], frames)
            which = which[len(frames) :]

    def _read_to_dram(self, job: LoadJob, outcome: LoadOutcome, which: NDArray[np.int64]) -> None:
        while len(which) and outcome.complete:
            part = job.slots[which[: self._files.group]]
            frames = self._frames.take(part, FrameState.LOADING, spare_contexts=True)
            if len(frames) == 0:
                self._read_headers(job, outcome, which)
                return
            self._read_frames(job, outcome, which[: len(frames)], frames)
            which = which[len(frames) :]

    def _read_frames(
        self,
        job: LoadJob,
        outcome: LoadOutcome,
        which: NDArray[np.int64],
        frames: NDArray[np.int32],
    ) -> None:
        """Read slots ``which`` into frames that are ``LOADING``, and copy them into HBM."""
        try:
            batch = self._submit(job, which, frames)
        except ValueError:
            self._frames.settle(frames, FrameState.FREE)
            raise
        arrived = batch.wait()
        held = batch.held()
        if held.any():
            self._overdue.append((batch, frames[held]))
        good = np.zeros(len(which), dtype=np.bool_)
        try:
            for i in np.flatnonzero(arrived).tolist():
                good[i] = self._check(job, int(which[i]), int(frames[i]))
            batch.verified(good, np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.int64))
            end = time.monotonic() + self._files.deadline_s
            for i in np.flatnonzero(~good & ~held & ~batch.out_of_reach()).tolist():
                if time.monotonic() >= end:
                    break
                good[i], held[i] = self._read_again(job, outcome, which[i : i + 1], frames[i])
            if good.all():
                self._copy(job, which, frames)
            else:
                outcome.complete = False
        finally:
            self._frames.abandon(frames[held])
            self._frames.settle(frames[good], FrameState.CLEAN)
            self._frames.settle(frames[~good & ~held], FrameState.FREE)

    def _submit(
        self, job: LoadJob, which: NDArray[np.int64], frames: NDArray[np.int32]
    ) -> SlotBatch:
        buffers = self._frames.buffer_offset(frames)
        size = self._files.geometry.slot_bytes
        return self._files.submit(Op.READ, job.slots[which], 0, size, buffers)

    def _read_again(
        self, job: LoadJob, outcome: LoadOutcome, which: NDArray[np.int64], frame: np.int32
    ) -> tuple[bool, bool]:
        """Read one slot alone: the block layer fails neighbours of a bad sector too.

        Returns whether it is good, and whether the read is overdue and holds the frame.
        """
        one = np.array([frame], dtype=np.int32)
        batch = self._submit(job, which, one)
        arrived = bool(batch.wait()[0])
        if not batch.ended():
            self._overdue.append((batch, one))
            return False, True
        index = int(which[0])
        if arrived and self._check(job, index, int(frame), batch):
            return True, False
        self._blame(job, outcome, index)
        return False, False

    def _blame(self, job: LoadJob, outcome: LoadOutcome, index: int) -> None:
        outcome.complete = False
        outcome.bad.append((int(job.slots[index]), int(job.epochs[index])))

    def _check(
        self, job: LoadJob, index: int, frame: int, last_try: SlotBatch | None = None
    ) -> bool:
        """Whether a frame holds the job's slot. On the ``last_try`` failures are counted."""
        view, final = self._frames.view(frame), last_try is not None
        header = self._header(job, index, view, final=final)
        if header is None:
            return False
        geometry = self._files.geometry
        first = self._frames.address(np.array([frame])) + np.uint64(geometry.header_bytes)
        which = slice(None) if final else self._files.sampler.choose()
        _, wrong = wrong_pages(geometry, first, header.checksums[None, :], which)
        if last_try is not None:
            offsets = geometry.header_bytes + wrong * geometry.page_bytes
            right = np.array([len(wrong) == 0])
            last_try.verified(right, np.zeros(len(wrong), dtype=np.intp), offsets)
        if final and len(wrong):
            self._files.counters.add("checksum_failures", len(wrong))
            logger.error(
                "ssdkv: slot %d is dropped: %d page(s) do not match their checksums",
                header.slot,
                len(wrong),
            )
        return len(wrong) == 0

    def _header(
        self, job: LoadJob, index: int, view: NDArray[np.uint8], *, final: bool
    ) -> SlotHeader | None:
        """The slot's header, if it is the one that the job names; its checksums are kept."""
        slot = int(job.slots[index])
        try:
            header = decode(
                view,
                self._files.geometry,
                self._files.fingerprint,
                key=job.keys[index],
                slot=slot,
                epoch=int(job.epochs[index]),
                rank=self._files.rank,
            )
        except FormatError as error:
            if final:
                self._refuse(slot, str(error))
            return None
        if bool(self._frames.referenced(np.array([slot], dtype=np.int64))[0]):
            self._checksums.put(slot, header.checksums)
        return header

    def _refuse(self, slot: int, why: str) -> None:
        self._files.counters.add("header_mismatches", 1)
        logger.error("ssdkv: slot %d is dropped: %s", slot, why)

    def _read_headers(self, job: LoadJob, outcome: LoadOutcome, which: NDArray[np.int64]) -> None:
        count = min(GROUP, self._headers.usable())
        if count == 0:
            logger.error("ssdkv: reads that do not end hold the memory for headers")
            outcome.complete = False
            return
        for begin in range(0, len(which), count):
            self._read_header_group(job, outcome, which[begin : begin + count])
            if not outcome.complete:
                return

    def _read_header_group(
        self, job: LoadJob, outcome: LoadOutcome, which: NDArray[np.int64]
    ) -> None:
        for final in (False, True):
            pieces = self._headers.take(len(which))
            if pieces is None:
                outcome.complete = False
                return
            size = self._files.geometry.header_bytes
            batch = self._files.submit(Op.READ, job.slots[which], 0, size, pieces)
            good = batch.wait()
            held = batch.held()
            for i in np.flatnonzero(good).tolist():
                view = self._frames.arena.view(int(pieces[i]), size)
                good[i] = self._header(job, int(which[i]), view, final=final) is not None
            self._headers.lend(pieces, held, batch)
            if (held | batch.out_of_reach()).any():
                outcome.complete = False
                return
            which = which[~good]
            if len(which) == 0:
                return
        for index in which.tolist():
            self._blame(job, outcome, index)

    def _collect_overdue(self) -> None:
        for entry in [e for e in self._overdue if e[0].ended()]:
            self._overdue.remove(entry)
            self._frames.settle(entry[1], FrameState.FREE)
