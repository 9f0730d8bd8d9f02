"""Division of one rank's DRAM. Pure arithmetic; all sizes and offsets are bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import DramTooSmallError
from vllm_ssdkv.base.sizes import MIB, approximate_size, format_size
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, SlotGeometry, round_up
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS
from vllm_ssdkv.store.memory.summary_rows import (
    ChannelTier,
    device_row_bytes,
    only_kernels_read,
    row_bytes,
)

PageEvictionPolicy = Literal["lru", "frequency", "decay"]
"""``lru``: used longest ago. ``frequency``: least score of Swarm (equation 6 in the corrected form
``f * (T_base + s * T_transfer) / s``, with s = 1: pages), f being how often it was chosen lately
(S-7: one more per step with a query that chose it, one less per step in the cache without).
``decay``: least ``f = 0.7 f + chosen``, per step."""


IN_FLIGHT = 2
"""Groups in flight: one is being written while the next one is sealed."""


CHUNKS = 4
"""Chunks that share the staging buffer: one is attended to while the others are being read."""


PIECES = 2
"""Slots of memory: one is read, and one may be held by a read that does not end."""


PROBE_BYTES: Final = len(COPY_OFFSETS) * BLOCK_BYTES
"""Memory of one probe of a device that is out of use: both copies of its superblock."""

PROBES: Final = 4
"""Devices that are probed at a time; a probe that hangs keeps its memory until it ends."""


GROUP = 64
"""Most whole slots per submission."""

HEADERS = 2 * GROUP
"""Room for headers: a group of them, and as many again that are read ahead, or that overdue reads
hold."""


MIN_FRAMES: Final = 8

STAGING: Final = 64 * MIB
"""Default size of staging, if DRAM allows it."""

STAGING_SHARE: Final = 1 / 4
"""Maximum share of a worker's DRAM that staging takes by default."""

MIN_PLACES: Final = 16
"""Least single pages that DRAM holds. Pages that do not fit into half of them are fetched in turns,
and a turn has the 8 pages at least that attention takes together."""

MIN_IMAGES: Final = 4
"""Least slots that can be encrypted at a time."""

MIN_TAILS: Final = 4
"""Least tails that can be made at a time."""

TAIL_SHARE: Final = 1 / 16
"""Share of staging for tails that are made for tables in DRAM; images of tails take the same
again."""

SUMMARY_SHARE: Final = 2 / 5
"""Maximum share of the DRAM to divide that summaries take, or more if that is their share of a
context's needs: a request without summaries reads its whole context for every token. So the
codes of 2 bits of all contexts fit if DRAM holds a fifth of their KV."""

CACHE_SHARE: Final = 4 / 5
"""Share of the remaining DRAM for single pages; the rest is for more frames. A step mostly chooses
the pages of the step before. A smaller cache has dropped each page before its turn comes again;
and only the budget's share of a slot in a frame is used."""

KEPT_SHARE: Final = 1 / 32
"""Share of the places for single pages that never serve as frames: about the pages that a layer of
one request chooses, which would have to be read in turns. All other places are frames while
selectors need less: if a few of the blocks that are attended to as a whole have no room, steps
take five times as long."""

CHOSEN: Final = 5 / 4
"""Room that one step's choice takes, in budgets: pages are kept longer than a step, and some are
read ahead."""


@dataclass(frozen=True, slots=True)
class SparseMemory:
    """DRAM that choosing pages needs, as the options give it.

    Attributes:
        page_tokens: Tokens of a page.
        slots: Slot numbers of the store are below this.
        page_cache, summaries: Bytes of each; None: as much as ``contexts`` can use, within what
            :data:`CACHE_SHARE` and :data:`SUMMARY_SHARE` say.
        page_policy: Which single page makes room for another.
        channels: Where channel pages are kept, where slots have any: with the summaries, or nowhere
            but on SSD.
        contexts: Slots from which running requests choose at most; None: all.
        budget: Share of a context that is chosen; about, where the options give tokens instead.
        hbm_summaries: Bytes of the device that attends which are held for summaries of pages.
    """

    page_tokens: int
    slots: int
    page_cache: int | None = None
    summaries: int | None = None
    page_policy: PageEvictionPolicy = "lru"
    channels: ChannelTier = "dram"
    contexts: int | None = None
    budget: float = 0.125
    hbm_summaries: int = 0

    def rows(self, geometry: SlotGeometry, nbytes: int) -> int:
        """Slots whose summaries are kept, given the bytes for these, single pages and frames."""
        row = self.row_bytes(geometry)
        if self.summaries is not None:
            return max(1, min(self.slots, self.summaries // row))
        chosen = self.chosen_places(geometry) * geometry.page_bytes
        share = max(SUMMARY_SHARE, row / (row + chosen))
        return max(1, min(self._most_slots, int(share * nbytes) // row))

    def rows_on_device(self, geometry: SlotGeometry) -> int:
        """Slots whose summaries the device that attends has memory for, if it may have them."""
        if not only_kernels_read(geometry):
            return 0
        return min(self._most_slots, self.hbm_summaries // device_row_bytes(geometry))

    def places(self, geometry: SlotGeometry, nbytes: int) -> int:
        """Single pages that are kept, given the bytes for these and frames."""
        if self.page_cache is not None:
            return self.page_cache // geometry.page_bytes
        most = self._most_slots * geometry.pages
        return min(most, int(CACHE_SHARE * nbytes) // geometry.page_bytes)

    def chosen_places(self, geometry: SlotGeometry) -> float:
        """Single pages that choosing from one slot takes."""
        return CHOSEN * self.budget * geometry.kv_pages

    def least_places(self, geometry: SlotGeometry) -> int:
        """Single pages that are kept in any case: what a summary is made of is read at once, and so
        are the channels of a layer."""
        once = geometry.tail_pages
        if self.channels == "ssd":
            once = max(geometry.summary_pages, geometry.channel_pages)
        return max(MIN_PLACES, once)

    def row_bytes(self, geometry: SlotGeometry) -> int:
        """Bytes of one slot's summaries in DRAM."""
        return row_bytes(geometry, self.page_tokens, channels=self.channels == "dram")

    @property
    def _most_slots(self) -> int:
        return self.slots if self.contexts is None else min(self.slots, self.contexts)


@dataclass(frozen=True, slots=True)
class FrameRuns:
    """Pieces of memory that may serve as frames (``store/cache/dram_balancer.py``): ``length`` of
    them from each of ``firsts`` on, int32 [n], ``step`` of them on average from one to the next:
    neighbours may share a piece. The frames begin at ``offsets`` of the arena, uint64 [n]."""

    firsts: NDArray[np.int32]
    length: int
    step: float
    offsets: NDArray[np.uint64]

    @classmethod
    def at_end(
        cls, offset: int, pieces: int, piece_bytes: int, frame_bytes: int, lendable: int
    ) -> FrameRuns:
        """Frames, one behind the other, in the last ``lendable`` of ``pieces`` from ``offset``
        on."""
        begin = round_up(offset + (pieces - lendable) * piece_bytes, PAGE_ALIGN) - offset
        count = max(0, (pieces * piece_bytes - begin) // frame_bytes)
        begins = begin + np.arange(count, dtype=np.int64) * frame_bytes
        firsts = begins // piece_bytes
        ends = -(-(begins + frame_bytes) // piece_bytes)
        length = int((ends - firsts).max(initial=0))
        firsts = np.maximum(0, np.minimum(firsts, pieces - length))
        offsets = (offset + begins).astype(np.uint64)
        return cls(firsts.astype(np.int32), length, frame_bytes / piece_bytes, offsets)


class MemoryPlan:
    """Division of one rank's DRAM: staging buffer, headers, the scrub's, probes, images, tails,
    single pages, summaries, frames.

    Images, of ``image_bytes`` each, are on their way to the devices: encrypted slots, or tails of
    slots. ``tails`` are made for the table of summaries. ``page_runs`` and ``summary_runs`` are
    those of the single pages and of the summaries that may serve as frames; ``kept_places`` never
    do. A choice takes ``chosen_places`` single pages per slot of its context. With
    ``summaries_on_device`` summaries take no DRAM: the device holds those of as many slots as DRAM
    would, or more.

    Raises DramTooSmallError when the DRAM given is too small for the slot size.
    """

    @classmethod
    def of(
        cls,
        geometry: SlotGeometry,
        dram_bytes: int,
        staging_bytes: int | None,
        *,
        most_bytes: int = 0,
        scrub: bool = False,
        choice: SparseMemory | None = None,
    ) -> MemoryPlan:
        """The plan for sizes of which some were not given, and follow from the others.

        Args:
            geometry: Of the slots.
            dram_bytes: Of this rank.
            staging_bytes: None: as much as goes well with the DRAM.
            most_bytes: DRAM that may be taken where ``dram_bytes`` is too little.
            scrub, choice: As for the plan.

        Raises:
            DramTooSmallError: names ``io.staging`` only where its size was given.
        """
        try:
            return cls._divided(geometry, dram_bytes, staging_bytes, scrub, choice)
        except DramTooSmallError as error:
            if error.needed > most_bytes:
                raise
            return cls._divided(geometry, error.needed, staging_bytes, scrub, choice)

    @classmethod
    def _divided(
        cls,
        geometry: SlotGeometry,
        dram_bytes: int,
        staging_bytes: int | None,
        scrub: bool,
        choice: SparseMemory | None,
    ) -> MemoryPlan:
        if staging_bytes is not None:
            try:
                return cls(geometry, dram_bytes, staging_bytes, scrub=scrub, choice=choice)
            except DramTooSmallError as error:
                used = geometry.kind == "paged" or geometry.encrypted
                cure = ", or lower io.staging" if used else ""
                raise DramTooSmallError(f"{error}{cure}", error.needed) from None
        wanted = min(STAGING, int(STAGING_SHARE * dram_bytes))
        try:
            return cls(geometry, dram_bytes, wanted, scrub=scrub, choice=choice)
        except DramTooSmallError:
            return cls(geometry, dram_bytes, 0, scrub=scrub, choice=choice)

    def __init__(
        self,
        geometry: SlotGeometry,
        dram_bytes: int,
        staging_bytes: int,
        *,
        scrub: bool = False,
        choice: SparseMemory | None = None,
    ):
        """``choice``: for slots with summaries, and for no others."""
        self.tails = 0
        if geometry.tail_bytes:
            wanted = int(TAIL_SHARE * staging_bytes) // geometry.tail_bytes
            self.tails = max(MIN_TAILS, min(IN_FLIGHT * GROUP, wanted))
        self.image_bytes, self.images = geometry.tail_bytes, self.tails
        left = max(0, staging_bytes - (self.tails + self.images) * geometry.tail_bytes)
        if geometry.encrypted:
            # Beside staging: half of what passes between devices and memory is written.
            wanted = staging_bytes // 2 // geometry.slot_bytes
            self.image_bytes = geometry.slot_bytes
            self.images = max(MIN_IMAGES, min(IN_FLIGHT * GROUP, wanted))
            left = max(0, staging_bytes - self.tails * geometry.tail_bytes)
        # Opaque slots are never streamed: reuse mode spends nothing on it.
        paged = geometry.kind == "paged"
        self.staging_pieces = max(CHUNKS, left // geometry.layer_bytes) if paged else 0
        self.header_pieces = HEADERS if paged else 0
        self.staging_bytes = self.staging_pieces * geometry.layer_bytes
        self.scrub_offset = self.staging_bytes + self.header_pieces * geometry.header_bytes
        self.scrub_pieces = PIECES if scrub else 0
        self.probe_offset = self.scrub_offset + self.scrub_pieces * geometry.slot_bytes
        self.image_offset = self.probe_offset + PROBES * PROBE_BYTES
        self.tail_offset = self.image_offset + self.images * self.image_bytes
        self.page_offset = self.tail_offset + self.tails * geometry.tail_bytes
        self.choice = choice
        self.page_places = self.summary_rows = summaries = least = 0
        self.chosen_places = 0.0
        self.summaries_on_device = False
        if choice is not None:
            self.chosen_places = choice.chosen_places(geometry)
            row, page = choice.row_bytes(geometry), geometry.page_bytes
            least = choice.least_places(geometry)
            left = dram_bytes - self.page_offset - MIN_FRAMES * geometry.frame_bytes - least * page
            given = 0 if choice.page_cache is None else max(0, choice.page_cache - least * page)
            in_dram = choice.rows(geometry, max(0, left - given))
            self.summary_rows = max(in_dram, choice.rows_on_device(geometry))
            self.summaries_on_device = choice.rows_on_device(geometry) >= in_dram
            if not self.summaries_on_device:
                summaries = round_up(self.summary_rows * row, PAGE_ALIGN)
            more = choice.places(geometry, max(0, left - summaries))
            self.page_places = max(least, more)
        # Nothing is lent of what has a size that is given, or goes with memory of a device.
        places = rows = 0
        if choice is not None and choice.page_cache is None:
            places = self.page_places - max(least, int(KEPT_SHARE * self.page_places))
        if choice is not None and choice.summaries is None:
            rows = 0 if self.summaries_on_device else self.summary_rows
        self.kept_places = self.page_places - places
        page, row = geometry.page_bytes, 1 if choice is None else choice.row_bytes(geometry)
        self.summary_offset = self.page_offset + self.page_places * page
        frame = geometry.frame_bytes
        self.page_runs = FrameRuns.at_end(self.page_offset, self.page_places, page, frame, places)
        self.summary_runs = FrameRuns.at_end(
            self.summary_offset, self.summary_rows, row, frame, rows
        )
        self.frame_offset = self.summary_offset + summaries
        self.frames = (dram_bytes - self.frame_offset) // geometry.frame_bytes
        if self.frames < MIN_FRAMES:
            raise self._too_small(geometry, dram_bytes)
        self.nbytes = self.frame_offset + self.frames * geometry.frame_bytes

    def _too_small(self, geometry: SlotGeometry, dram_bytes: int) -> DramTooSmallError:
        needed = self.frame_offset + MIN_FRAMES * geometry.frame_bytes
        return DramTooSmallError(
            f"dram_gib gives each worker {approximate_size(dram_bytes)}, which holds "
            f"{max(0, self.frames)} blocks of {approximate_size(geometry.frame_bytes)}; give "
            f"at least {format_size(round_up(needed, MIB))} per worker (dram_gib)",
            needed,
        )

    @property
    def lent_offsets(self) -> NDArray[np.uint64]:
        """Offsets of the frames in the runs, those of single pages first, [n]."""
        return np.concatenate([self.page_runs.offsets, self.summary_runs.offsets])
