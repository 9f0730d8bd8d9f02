"""The load path: slots of a prefix hit are read, checked and handed to HBM, in a thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.metrics import counter_key
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameCache, FrameState
from vllm_ssdkv.store.format.slot_header_batch import key_rows
from vllm_ssdkv.store.integrity.checksum_table import ChecksumTable
from vllm_ssdkv.store.integrity.slot_codec import Digests
from vllm_ssdkv.store.io.buffer_pool import BufferPool
from vllm_ssdkv.store.io.digest_source import HeaderDigests, SlotExtents
from vllm_ssdkv.store.io.engines.protocol import U64
from vllm_ssdkv.store.io.slot_io import GROUP_BYTES, SlotIO
from vllm_ssdkv.store.io.slot_request import SlotRequest
from vllm_ssdkv.store.io.thread_errors import ThreadErrors
from vllm_ssdkv.store.io.verified_read import VerifiedRead, union
from vllm_ssdkv.store.memory.memory_plan import GROUP
from vllm_ssdkv.store.read.load_job import Hit, LoadJob, LoadOutcome, LoadRead

logger = logging.getLogger(__name__)


READ_AHEAD = 4
"""Pieces in flight: when the oldest is over, the devices work on the others."""

_BYTES_USED = (counter_key("bytes_used"),)

_LOOK_S = 0.1
"""Interval at which the thread checks whether an overdue read has ended."""

CopyIn = Callable[[NDArray[np.int32], NDArray[np.int64]], None]
"""Copies frames [n] into HBM blocks [n]; returns when the blocks may be used."""


class PrefixLoader:
    """Runs load jobs in order, one at a time, each reading from all devices at once.

    A job is cut into pieces, which are read beside each other. What has arrived of the oldest one
    is checked and copied while the rest of it, and the next ones, are being read.

    Of a slot what a frame holds is read, its header and its pages of KV. Every slot that is read is
    verified: header against key, epoch, slot and rank, pages (all, or by option a sample of them)
    against their seals (``store/integrity/slot_codec.py``). Slots that need not go to HBM (page
    mode) are read whole while spare frames last, afterwards only their headers: their pages are
    streamed and checked when attended to.

    No wait for a frame or a read is longer than the deadline.
    """

    def __init__(
        self,
        files: SlotIO,
        frames: FrameCache,
        seals: ChecksumTable,
        headers: BufferPool,
        copy_in: CopyIn,
        block_tokens: int,
        stretches: _io.Stretches | None = None,
        on_end: Callable[[LoadOutcome], None] | None = None,
    ):
        """``headers`` are pieces of ``header_bytes`` each; only the loader uses them.
        ``stretches`` are what ``copy_in`` copies, if they are all that it does. ``on_end`` is told
        each outcome, in the loader's thread, in place of :meth:`take_outcomes`; it raises
        nothing."""
        self._files = files
        self._errors = ThreadErrors(files.counters, "loader")
        self._frames = frames
        self._seals = seals
        self._headers = headers
        self._copy_in = copy_in
        self._stretches = stretches
        self._block_tokens = block_tokens
        # Slots to read at once: as many as leave room for the reads that follow.
        most = min(files.group, frames.frames // READ_AHEAD)
        in_bytes = GROUP_BYTES // READ_AHEAD // files.geometry.frame_bytes
        self._piece = max(1, min(in_bytes, most))
        self._jobs: queue.SimpleQueue[Hit | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[LoadOutcome] = queue.SimpleQueue()
        self._overdue: list[tuple[SlotRequest, NDArray[np.int32]]] = []
        self._on_end = on_end
        self._active = 0
        self._guard = threading.Lock()
        """Guards the number of active jobs."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ssdkv-loader", daemon=True)
        self._thread.start()

    def load(self, job: LoadJob) -> None:
        """Queue a job. Never blocks. One thread calls this and :meth:`take_outcomes`."""
        hit = Hit(job, LoadOutcome(job.request_id), time.monotonic())
        if self._active == 0 and not self._overdue:
            # The loader's thread has nothing to do: the devices begin before it wakes up.
            self._try(hit, self._begin)
        self._count(1)
        self._jobs.put(hit)

    def _count(self, jobs: int) -> None:
        with self._guard:
            self._active += jobs

    def take_outcomes(self, patience_s: float = 0.0) -> list[LoadOutcome]:
        """Jobs that ended since the last call; waits so long for one, if any are under way."""
        outcomes: list[LoadOutcome] = []
        while len(outcomes) < self._active:
            try:
                timeout = 0.0 if outcomes else patience_s
                outcomes.append(self._outcomes.get(timeout > 0, timeout))
            except queue.Empty:
                break
        self._count(-len(outcomes))
        return outcomes

    def active(self) -> int:
        """Jobs queued or running whose outcome was not taken yet."""
        return self._active

    def running(self) -> int:
        """Number of jobs that have not ended."""
        return self._active - self._outcomes.qsize()

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
            outcome = self._load(entry)
            if self._on_end is None:
                self._outcomes.put(outcome)
            else:
                self._count(-1)
                self._on_end(outcome)

    def _load(self, hit: Hit) -> LoadOutcome:
        outcome = hit.outcome
        if hit.begun is None:
            self._try(hit, self._begin)
        self._try(hit, self._load_all)
        while hit.reads:  # it failed: take their memory back
            self._try(hit, self._finish)
        if not outcome.complete:
            outcome.tokens_from_dram = outcome.tokens_from_ssd = 0
            outcome.hit_tokens_from_dram = outcome.hit_tokens_from_ssd = 0
        outcome.ended = time.monotonic()
        return outcome

    def _try(self, hit: Hit, work: Callable[[Hit], None]) -> None:
        try:
            work(hit)
        except Exception:  # whatever it is, the request must not wait for ever
            self._files.counters.add("thread_errors", 1, thread="loader")
            logger.exception("ssdkv: load of request %s failed", hit.job.request_id)
            hit.outcome.complete = False

    def _begin(self, hit: Hit) -> None:
        """Start the first reads. Where the loader's thread is idle, who asks for the load does."""
        outcome = hit.outcome
        hit.begun = time.monotonic()
        outcome.queued_s = hit.begun - hit.since
        hit.keys = key_rows(hit.job.keys)
        # All at once: what the hit reads must not take the frames that it finds.
        hit.frames = self._frames.borrow(hit.job.slots)
        hit.todo = np.flatnonzero(hit.frames == NO_FRAME)
        outcome.tokens_from_ssd = len(hit.todo) * self._block_tokens
        outcome.hit_tokens_from_ssd = hit.job.tokens_of(hit.todo, self._block_tokens)
        self._read_ahead(hit, wait=False)

    def _load_all(self, hit: Hit) -> None:
        outcome, frames = hit.outcome, hit.frames
        try:
            self._prepare(hit)
            found = np.flatnonzero(frames != NO_FRAME)
            outcome.tokens_from_dram = len(found) * self._block_tokens
            outcome.hit_tokens_from_dram = hit.job.tokens_of(found, self._block_tokens)
            for end in range(len(found), 0, -GROUP):
                which = found[max(0, end - GROUP) : end]
                self._use_frames(hit, which, frames[which])
                self._frames.give_back(frames[which])
                frames[which] = NO_FRAME
                self._read_ahead(hit, wait=False)
                self._prepare(hit)
        finally:
            self._frames.give_back(frames)
        while outcome.complete and (hit.reads or len(hit.todo)):
            self._read_ahead(hit, wait=True)
            self._prepare(hit)
            if hit.reads:
                self._finish(hit)
        if outcome.tokens_from_ssd and hit.begun is not None:
            outcome.ssd_s = time.monotonic() - hit.begun

    def _use_frames(self, hit: Hit, which: NDArray[np.int64], frames: NDArray[np.int32]) -> None:
        """Slots ``which`` are in DRAM, in these borrowed frames."""
        if not hit.outcome.complete:
            return
        begun = time.monotonic()
        self._remember(hit, which, frames)
        self._copy(hit, which, frames)
        self._keep(hit, which, frames)
        hit.outcome.dram_s += time.monotonic() - begun

    def _remember(self, hit: Hit, which: NDArray[np.int64], frames: NDArray[np.int32]) -> None:
        """Keep the seals of slots in DRAM: their frames may go while they are streamed."""
        slots = hit.job.slots[which]
        wanted = self._frames.referenced(slots)
        wanted[wanted] = ~self._seals.adopt(slots[wanted])
        # One that is not clean was not sealed yet, and the writer will see that it is
        # referred to; or its write failed, and the frame stays until it is discarded.
        for at in np.flatnonzero(wanted).tolist():
            wanted[at] = self._frames.state(int(frames[at])) is FrameState.CLEAN
        which, places = which[wanted], self._frames.buffer_offset(frames[wanted])
        job, codec = hit.job, self._files.codec
        slots, epochs = job.slots[which], job.epochs[which]
        digests, good = codec.read_headers(slots, epochs, hit.keys[which], places)
        self._seals.put(slots[good], digests.part(good))
        for at in np.flatnonzero(~good).tolist():
            index, slot = int(which[at]), int(slots[at])
            self._files.counters.add("header_mismatches", 1)
            why = codec.why_refused(slot, int(epochs[at]), job.keys[index], int(places[at]))
            logger.error("ssdkv: slot %d is dropped: %s", slot, why)
        self._invalidate(hit, which[~good])

    def _copy(self, hit: Hit, which: NDArray[np.int64], frames: NDArray[np.int32]) -> None:
        """Copy frames into the HBM blocks of slots ``which``, where they have one, as long as
        nothing has failed."""
        if not hit.outcome.complete:
            return
        job = hit.job
        inside = which >= job.first_in_hbm
        block_ids = job.block_ids[which[inside] - job.first_in_hbm]
        wanted = block_ids != 0
        if wanted.any():
            self._copy_in(frames[inside][wanted], block_ids[wanted])

    def _keep(self, hit: Hit, which: NDArray[np.int64], frames: NDArray[np.int32]) -> None:
        """Copy the last slot's frame, if it is among these, for a job that asks for it."""
        if hit.job.compared:
            job = hit.job
            for frame in frames[which == len(job.slots) - 1].tolist():
                copy = self._frames.view(frame).copy()
                hit.outcome.copy = int(job.slots[-1]), int(job.epochs[-1]), copy

    # ---- reading ----

    def _read_ahead(self, hit: Hit, *, wait: bool) -> None:
        """Start reads until enough are in flight, or memory for them is in use.

        With ``wait``, and nothing in flight, wait for memory.
        """
        while len(hit.todo) and hit.outcome.complete:
            piece = self._piece
            in_flight = piece * self._files.geometry.frame_bytes
            if len(hit.reads) >= max(2, min(READ_AHEAD, GROUP_BYTES // in_flight)):
                return
            if self._stopping:
                hit.outcome.complete = False
                return
            patient = wait and not hit.reads
            # The newest slots first: their frames matter most, to HBM and to the next steps.
            first = max(0, len(hit.todo) - piece)
            inside = int(np.searchsorted(hit.todo, hit.job.first_in_hbm))
            if inside < len(hit.todo):
                started = self._start_to_hbm(hit, max(first, inside), wait=patient)
            else:
                started = self._start_to_dram(hit, first, wait=patient)
            if not started:
                return

    def _start_to_hbm(self, hit: Hit, first: int, *, wait: bool) -> bool:
        slots = hit.job.slots[hit.todo[first:]]
        if not wait:
            frames = self._frames.take(slots, FrameState.LOADING)
        else:
            deadline = time.monotonic() + self._files.deadline_s
            frames = self._frames.wait_for_frames(slots, FrameState.LOADING, deadline)
        if len(frames):
            self._start_whole(hit, first, frames)
        elif wait:
            logger.error("ssdkv: no DRAM frame for request %s in time", hit.job.request_id)
            hit.outcome.complete = False
        return len(frames) > 0

    def _start_to_dram(self, hit: Hit, first: int, *, wait: bool) -> bool:
        slots = hit.job.slots[hit.todo[first:]]
        frames = self._frames.take(slots, FrameState.LOADING, spare_contexts=True)
        if len(frames):
            self._start_whole(hit, first, frames)
            return True
        count = min(GROUP, self._headers.usable(), len(hit.todo))
        pieces = self._headers.take(count) if count else None
        if pieces is not None:
            which, hit.todo = hit.todo[-count:], hit.todo[:-count]
            hit.reads.append(self._start_headers(hit, which, pieces))
            return True
        if wait:
            logger.error("ssdkv: reads that do not end hold the memory for headers")
            hit.outcome.complete = False
        return False

    def _start_whole(self, hit: Hit, first: int, frames: NDArray[np.int32]) -> None:
        """Read the slots from ``first`` on, in the order of ``todo``, into frames that are
        ``LOADING``."""
        end = first + len(frames)
        which = hit.todo[first:end]
        try:
            read = self._submit(hit, which, self._frames.buffer_offset(frames), whole=True)
        except Exception:
            self._frames.finish_io(frames, FrameState.FREE)
            raise
        hit.todo = np.concatenate([hit.todo[:first], hit.todo[end:]])
        hit.reads.append(LoadRead(which, frames, read))

    def _start_headers(self, hit: Hit, which: NDArray[np.int64], pieces: U64) -> LoadRead:
        try:
            return LoadRead(which, None, self._submit(hit, which, pieces, whole=False))
        except Exception:
            self._headers.give(pieces)
            raise

    def _submit(
        self, hit: Hit, which: NDArray[np.int64], places: U64, *, whole: bool
    ) -> VerifiedRead:
        """Read slots ``which``, as frames have them, or their headers."""
        files = self._files
        slots, epochs = hit.job.slots[which], hit.job.epochs[which]
        files.replicas.stored_in(slots, epochs)
        pages = files.geometry.kv_pages if whole else 0
        extents = SlotExtents(slots, 0, pages, places, headed=True)
        source = HeaderDigests(files.codec, extents, epochs, hit.keys[which], self._keep_digests)
        # Native code checks and copies what has arrived while its neighbours are being read.
        merged = self._stretches is None or files.geometry.encrypted
        return VerifiedRead(files, extents, source, merged=merged, errors=self._errors)

    def _keep_digests(self, slots: NDArray[np.int64], digests: Digests) -> None:
        """Keep the digests of slots where a context needs them."""
        wanted = self._frames.referenced(slots)
        if wanted.any():
            self._seals.put(slots[wanted], digests.part(wanted))

    def _finish(self, hit: Hit) -> None:
        """Wait for the oldest read, check what it brought, and copy it into HBM."""
        entry = hit.reads.popleft()
        beside = [later.read.request for later in hit.reads]
        if entry.frames is None:
            self._finish_headers(hit, entry, beside)
        else:
            self._finish_whole(hit, entry, entry.frames, beside)

    def _finish_whole(
        self, hit: Hit, entry: LoadRead, frames: NDArray[np.int32], beside: Sequence[SlotRequest]
    ) -> None:
        which, read = entry.which, entry.read
        held = np.ones(len(which), dtype=np.bool_)
        try:
            try:
                for part in read.parts(beside):
                    if read.prepared:
                        read.find_digests(part[self._frames.referenced(hit.job.slots[which[part]])])
                    else:
                        self._copy(hit, which[part], frames[part])
                first = read.finish(beside, again=False).copy()
                if not first.all():
                    read.read_again(hit.retry_until(self._files.deadline_s))
                    again = np.flatnonzero(read.good & ~first)
                    self._copy(hit, which[again], frames[again])
            finally:
                overdue = read.holders()
                held = union(overdue, len(which))
                self._overdue += [(request, frames[mask]) for request, mask in overdue]
            self._take_failures(hit, entry)
            good = read.good
            self._keep(hit, which[good], frames[good])
            geometry = self._files.geometry
            used = int(np.count_nonzero(good)) * geometry.kv_pages * geometry.payload_bytes
            self._files.counters.add_keyed(_BYTES_USED, (used,))
        finally:
            good = read.good
            self._frames.abandon(frames[held])
            self._frames.finish_io(frames[good], FrameState.CLEAN)
            self._frames.finish_io(frames[~good & ~held], FrameState.FREE)

    def _finish_headers(self, hit: Hit, entry: LoadRead, beside: Sequence[SlotRequest]) -> None:
        read = entry.read
        try:
            if not read.finish(beside, again=False).all():
                read.read_again(hit.retry_until(self._files.deadline_s))
            self._take_failures(hit, entry)
        finally:
            read.give_back(self._headers)

    def _take_failures(self, hit: Hit, entry: LoadRead) -> None:
        """Read slots that hang once more, elsewhere; fail the hit for others that are not good."""
        read = entry.read
        if read.good.all():
            return
        if not (read.good | read.hanging).all():
            hit.outcome.complete = False
        if hit.outcome.complete:
            hit.todo = np.union1d(hit.todo, entry.which[read.hanging])
        self._invalidate(hit, entry.which[read.bad])
        hit.outcome.unread += _pairs(hit, entry.which[read.unread])

    def _invalidate(self, hit: Hit, which: NDArray[np.int64]) -> None:
        """Have slots ``which`` not found again; the hit fails."""
        if len(which):
            hit.outcome.complete = False
            hit.outcome.bad += _pairs(hit, which)

    def _prepare(self, hit: Hit) -> None:
        """Give reads that are under way what checks and copies their slots without the interpreter,
        where checksums and plain copies are all that it takes."""
        for entry in hit.reads:
            if not entry.read.prepared and entry.frames is not None and self._stretches is not None:
                job, which = hit.job, entry.which
                blocks = np.zeros(len(which), dtype=np.uint64)
                if hit.outcome.complete:
                    inside = which >= job.first_in_hbm
                    blocks[inside] = job.block_ids[which[inside] - job.first_in_hbm]
                entry.read.prepare(self._frames.address(entry.frames), blocks, self._stretches)

    def _collect_overdue(self) -> None:
        """Take back the frames of overdue reads that have ended."""
        for entry in list(self._overdue):
            with self._errors.swallowed("frames of an overdue read are out of use"):
                if entry[0].ended():
                    self._overdue.remove(entry)
                    self._frames.finish_io(entry[1], FrameState.FREE)


def _pairs(hit: Hit, which: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Numbers and epochs of slots ``which`` of a hit."""
    job = hit.job
    return list(zip(job.slots[which].tolist(), job.epochs[which].tolist(), strict=True))
