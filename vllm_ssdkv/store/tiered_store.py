"""DRAM and SSD of one rank as one interface: hold, commit, load.

The worker process owns residency: which slots are in DRAM is decided here and nowhere else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameCache, FrameState
from vllm_ssdkv.store.format.slot_header_batch import key_rows
from vllm_ssdkv.store.integrity.checksum_table import ChecksumTable
from vllm_ssdkv.store.io.async_verifier import AsyncVerifier
from vllm_ssdkv.store.io.buffer_pool import BufferPool
from vllm_ssdkv.store.io.device_prober import DeviceProber, Identity
from vllm_ssdkv.store.io.slot_io import SlotIO
from vllm_ssdkv.store.maintenance.scrubber import Scrubber
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.memory_plan import MemoryPlan
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome
from vllm_ssdkv.store.read.prefix_loader import CopyIn, PrefixLoader
from vllm_ssdkv.store.write.flusher import Flusher, Pending
from vllm_ssdkv.store.write.summary_builder import SummaryBuilder
from vllm_ssdkv.store.write.trim import SlotTrimmer

logger = logging.getLogger(__name__)

QUIET_S = 0.5
"""Idle time before the scrub reads: longer than the gap between two steps of a request that is
being decoded."""

CHOICE_GAUGES: Final = (
    *("hot_pages_places", "hot_pages_held", "page_cache_places", "page_cache_pages"),
    *("summaries_places", "summaries_held"),
)
"""Gauges of what a :class:`ContextStore` has beside frames."""


class TieredStore:
    """The store of one rank; in mode ``page`` a :class:`ContextStore`.

    ``load``, ``take_load_outcomes`` and ``reserve_frames`` belong to the thread that runs the
    forward pass; the rest is thread-safe. Only ``reserve_frames``, ``drain``, ``close`` and, if
    asked to, ``take_load_outcomes`` block, with a deadline.
    """

    def __init__(
        self,
        files: SlotIO,
        arena: Arena,
        plan: MemoryPlan,
        num_slots: int,
        block_tokens: int,
        copy_in: CopyIn,
        *,
        summarizer: SummaryBuilder | None = None,
        trimmer: SlotTrimmer | None = None,
        scrub_rate: int | None = None,
        mends: bool = False,
        stretches: _io.Stretches | None = None,
        identities: Mapping[int, Identity] = MappingProxyType({}),
        keeps_unwritten: bool = False,
    ):
        """``summarizer``: for slots with a tail, and for no others. ``scrub_rate``: bytes per
        second; the plan has memory for it. None: no scrub. ``mends``: suspect copies are mended
        in any case; the plan has memory for that, too. ``stretches``: what ``copy_in`` copies,
        where plain copies are all that it does. ``identities`` as in :class:`OpenStore`;
        ``keeps_unwritten`` as ``keeps`` in :class:`Flusher`."""
        geometry = files.geometry
        self.files = files
        self.arena = arena
        self.frames = FrameCache(
            arena,
            plan.frame_offset,
            geometry.frame_bytes,
            plan.frames,
            num_slots,
            plan.lent_offsets,
        )
        codec = files.codec
        self._seals = ChecksumTable(
            num_slots, geometry.pages, codec.opening_words, codec.mark_words
        )
        self._verifier = AsyncVerifier()
        headers = BufferPool(plan.staging_bytes, geometry.header_bytes, plan.header_pieces)
        images = None
        if plan.images:
            # Padding between pages is written as it lies here: it must never hold plain bytes.
            arena.view(plan.image_offset, plan.frame_offset - plan.image_offset)[:] = 0
            images = BufferPool(plan.image_offset, plan.image_bytes, plan.images)
        self._block_tokens = block_tokens
        self._more_loaders: list[PrefixLoader] = []
        self._used = time.monotonic()
        self._scrubber: Scrubber | None = None
        self._divide(plan, num_slots, summarizer)
        with ExitStack() as stack:  # last, since these are threads
            self._prober = DeviceProber(files, arena, plan.probe_offset, identities)
            stack.callback(self._prober.close, files.deadline_s)
            self._writer = Flusher(
                files,
                self.frames,
                self._seals,
                images,
                summarizer,
                trimmer,
                keeps=keeps_unwritten,
            )
            stack.callback(self._writer.close, files.deadline_s)
            self._loader = PrefixLoader(
                files, self.frames, self._seals, headers, copy_in, block_tokens, stretches
            )
            stack.callback(self._loader.close, files.deadline_s)
            if scrub_rate is not None or mends:
                pieces = BufferPool(plan.scrub_offset, geometry.slot_bytes, plan.scrub_pieces)
                self._scrubber = Scrubber(
                    files,
                    arena,
                    pieces,
                    num_slots,
                    scrub_rate,
                    idle=self.idle,
                    writing=self._writer.writes,
                    visit=self._writer.visit,
                )
            stack.pop_all()

    def _divide(self, plan: MemoryPlan, num_slots: int, summarizer: SummaryBuilder | None) -> None:
        """Take what the plan has beside frames, before there are threads: nothing here."""

    @property
    def open_frames(self) -> int:
        """Frames that DRAM has now; the least it ever has is ``frames.frames``."""
        return self.frames.frames

    @property
    def save_frames(self) -> FrameCache:
        """Frames that :meth:`reserve_frames` gives."""
        return self.frames

    @property
    def load_frames(self) -> FrameCache:
        """Frames that hits are copied from."""
        return self.frames

    # ---- write path ----

    def reserve_frames(
        self, slots: NDArray[np.int64], *, wait: bool, spare_contexts: bool = False
    ) -> NDArray[np.int32]:
        """Frames for the first of these slots, [k], k <= n, for the caller to fill.

        They are ``HELD`` until written or discarded. Fewer than asked for is normal: commit those,
        which lets the writer free frames, and ask again for the rest.

        Args:
            slots: Distinct slots whose content changes, [n]; what DRAM has of them is forgotten.
            wait: Where there is no frame at all, wait for writes to free one, up to the I/O
                deadline (page mode: the data is needed). None after that means there is none.
            spare_contexts: Evict no frame of a running context, as before a step that reads them.
        """
        self._used = time.monotonic()
        self._forget_content(slots)
        self.frames.forget(slots)
        self._make_room(slots)
        held = self.frames.take(slots, FrameState.HELD, spare_contexts=spare_contexts)
        if len(held) or len(slots) == 0 or not wait:
            return held
        started = time.monotonic()
        held = self.frames.wait_for_frames(slots, FrameState.HELD, started + self.files.deadline_s)
        self.files.counters.add("write_stalls", 1)
        self.files.counters.add("write_stall_seconds", time.monotonic() - started)
        return held

    def flush(
        self,
        slots: NDArray[np.int64],
        epochs: NDArray[np.int64],
        keys: Sequence[bytes],
        *,
        bound: bool = True,
    ) -> None:
        """Write held slots to the devices in the background. ``bound``: False where the keys are
        nobody's, which the index has to know, not this store."""
        self._writer.flush(
            Pending(slot, epoch, key)
            for slot, epoch, key in zip(slots.tolist(), epochs.tolist(), keys, strict=True)
        )

    def copy(
        self,
        old: NDArray[np.int64],
        old_epochs: NDArray[np.int64],
        new: NDArray[np.int64],
        keys: Sequence[bytes],
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Copy frames of ``old`` slots into frames of ``new`` ones, ``HELD`` for :meth:`flush`.

        Each source is checked first, all of it: the copy gets checksums of its own, which would say
        that it is right. No frame of a running context is evicted.

        Returns:
            Slots that were copied, and frames with wrong bytes, both bool, [n]. The others are not
            in DRAM any more, or there is no room for their copies.
        """
        self._forget_content(new)
        self.frames.forget(new)
        found = self.frames.borrow(old)
        try:
            here = np.array([self._is_clean(frame) for frame in found.tolist()], dtype=np.bool_)
            right = here.copy()
            right[here] = self.files.codec.intact(
                old[here],
                old_epochs[here],
                key_rows(keys)[here],
                self.frames.buffer_offset(found[here]),
            )
            which = np.flatnonzero(right)
            held = self.frames.take(new[which], FrameState.HELD, spare_contexts=True)
            which = which[: len(held)]
            source, target = self.frames.address(found[which]), self.frames.address(held)
            _io.copy(source, target, self.files.geometry.frame_bytes)
        finally:
            self.frames.give_back(found)
        copied = np.zeros(len(found), dtype=np.bool_)
        copied[which] = True
        return copied, here & ~right

    def _is_clean(self, frame: int) -> bool:
        return frame != NO_FRAME and self.frames.state(frame) is FrameState.CLEAN

    def abandon(self, slots: NDArray[np.int64]) -> None:
        """Forget what is held for these slots; queued writes are dropped."""
        self._forget_content(slots)
        self._writer.abandon(slots)

    def _forget_content(self, slots: NDArray[np.int64]) -> None:
        """Forget what memory has of slots whose content changes, beside their frames."""
        self._seals.forget(slots)

    def _make_room(self, slots: NDArray[np.int64]) -> None:
        """Have frames for these slots, as far as memory has other uses: it has none here."""

    def trim(self, slots: NDArray[np.int64]) -> None:
        """Slots that hold nothing: their devices may know, if the option ``trim`` is on."""
        self._writer.trim(slots)

    def take_write_results(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(slot, epoch) pairs written and failed since the last call."""
        return self._writer.take_results()

    def wait_write_results(self, timeout_s: float) -> bool:
        """Wait until :meth:`take_write_results` has something to give, or the store is closed;
        False when the time ran out."""
        return self._writer.wait_results(timeout_s)

    # ---- load path ----

    def open_loader(self, copy_in: CopyIn, on_end: Callable[[LoadOutcome], None]) -> PrefixLoader:
        """One more loader over the same frames and devices, beside the others, for somebody with
        blocks of his own, which ``copy_in`` fills. ``on_end`` is told each outcome in the loader's
        thread. :meth:`close_loader` ends it.

        Raises:
            ValueError: slots are paged: there is memory for the headers of one loader only.
        """
        if self.files.geometry.kind != "opaque":
            raise ValueError("slots of pages: one loader is all that there can be")
        headers = BufferPool(0, self.files.geometry.header_bytes, 0)
        loader = PrefixLoader(
            self.files,
            self.frames,
            self._seals,
            headers,
            copy_in,
            self._block_tokens,
            on_end=on_end,
        )
        self._more_loaders.append(loader)
        return loader

    def close_loader(self, loader: PrefixLoader, timeout_s: float) -> bool:
        """End a loader of :meth:`open_loader`; False when a read of it did not end in time: frames
        of that stay out of use. Blocks."""
        ended = loader.close(timeout_s)
        if ended:
            self._more_loaders.remove(loader)
        return ended

    def load(self, job: LoadJob, *, whole: bool = False) -> None:
        """Bring a hit in, in the background. ``whole``: it will be attended to as a whole, in every
        step: all of it should be in DRAM; else it will be chosen from."""
        self._used = time.monotonic()
        self._loader.load(job)

    def take_load_outcomes(self, patience_s: float = 0.0) -> list[LoadOutcome]:
        """Loads that ended since the last call; waits so long for the first one, if any is under
        way."""
        return self._loader.take_outcomes(patience_s)

    def busy(self) -> bool:
        """Check whether writes or loads are under way."""
        loaders = (self._loader, *self._more_loaders)
        return self._writer.pending() > 0 or any(loader.running() > 0 for loader in loaders)

    def idle(self) -> bool:
        """Check whether nothing is under way, and nobody has asked for anything for a while."""
        return not self.busy() and time.monotonic() - self._used > QUIET_S

    def take_scrubbed(self) -> list[tuple[int, int]]:
        """(slot, epoch) pairs that the scrub found bad since the last call."""
        return [] if self._scrubber is None else self._scrubber.take_bad()

    def take_mended(self) -> list[tuple[int, int]]:
        """(slot, epoch) pairs of which the scrub found a copy bad, since the last call."""
        return [] if self._scrubber is None else self._scrubber.take_mended()

    def confirm(self, stored: Iterable[tuple[int, int]]) -> None:
        """Confirm that these pairs, of those that the scrub has told, are stored: it was right."""
        if self._scrubber is not None:
            self._scrubber.confirm(stored)

    def gauges(self) -> dict[str, int]:
        """Frames that DRAM has, those in use and those not written; single pages and summaries that
        memory holds, and has room for, none here; by metric."""
        there, frames = self.open_frames, self.frames
        return {
            "dram_frames": there,
            "dram_frames_used": there - frames.count(FrameState.FREE),
            "dram_frames_dirty": frames.count(FrameState.HELD, FrameState.WRITING),
            **dict.fromkeys(CHOICE_GAUGES, 0),
        }

    # ---- end ----

    def drain(self, timeout_s: float) -> bool:
        """Wait until every committed slot is written or failed."""
        return self._writer.drain(timeout_s)

    def close(self, *, read_elsewhere: bool = False) -> None:
        """Write what is committed and stop. Memory that an I/O may still touch, or that is
        ``read_elsewhere``, is leaked, not freed."""
        timeout = self.files.deadline_s
        ended = self._scrubber is None or self._scrubber.close(timeout)
        ended = self._prober.close(2 * timeout) and ended
        ended = self._writer.close(timeout) and ended
        for loader in (self._loader, *self._more_loaders):
            ended = loader.close(timeout) and ended
        ended = self._verifier.close(timeout) and ended
        ended = self.files.engine.close(timeout) and ended
        if ended and not read_elsewhere:
            self.arena.close()
        elif not ended:
            logger.error("ssdkv: I/O is still in flight at shutdown; its memory stays allocated")
