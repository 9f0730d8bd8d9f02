"""Frames, single pages and rows for summaries with a border between them, over one arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tests.store.conftest import array
from vllm_ssdkv.store.cache.dram_balancer import DramBalancer
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameCache, FrameState
from vllm_ssdkv.store.cache.selected_pages import Pages, SelectedPageCache
from vllm_ssdkv.store.cache.summaries import NO_ROW, SummaryTable
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.memory_plan import MemoryPlan, SparseMemory
from vllm_ssdkv.store.memory.summary_rows import with_summaries

GEOMETRY = SlotGeometry("paged", layers=2, heads=2, groups=2, payload_bytes=4000, summary_pages=1)
DEEP = with_summaries(replace(GEOMETRY, summary_pages=0), 16, channels=True)
"""Of its summaries a few are as long as a frame."""
SLOTS = 40
DEADLINE_S = 0.2


class Rig:
    """Frames, single pages, summaries and their border, over an arena."""

    def __init__(self, dram: int = 30, *, rows: bool = False) -> None:
        """``dram``: frames that all of it could hold, with ``rows`` whole slots. Without them
        summaries are lent to nobody, and so few that they do not count."""
        self.geometry = DEEP if rows else GEOMETRY
        self.choice = SparseMemory(16, SLOTS, summaries=None if rows else 1 << 16)
        begin = MemoryPlan(self.geometry, 1 << 30, 0, choice=self.choice).page_offset
        size = self.geometry.slot_bytes if rows else self.geometry.frame_bytes
        nbytes = begin + dram * size
        self.plan = plan = MemoryPlan(self.geometry, nbytes, 0, choice=self.choice)
        self.arena = Arena(plan.nbytes)
        self.arena.view(0, plan.nbytes)[:] = 0xEE
        frame_bytes = self.geometry.frame_bytes
        self.frames = FrameCache(
            self.arena, plan.frame_offset, frame_bytes, plan.frames, SLOTS, plan.lent_offsets
        )
        self.pages = SelectedPageCache(
            self.arena, plan.page_offset, self.geometry, plan.page_places, SLOTS, "lru"
        )
        self.summaries = SummaryTable(
            self.arena,
            plan.summary_offset,
            self.geometry,
            self.choice.page_tokens,
            plan.summary_rows,
            SLOTS,
            channels=rows,
        )
        self.busy = False
        self.balancer = DramBalancer(
            self.geometry,
            plan,
            self.frames,
            self.pages,
            self.summaries,
            lambda: self.busy,
            DEADLINE_S,
        )

    def summarize(self, slots: Sequence[int]) -> None:
        """The summaries of these slots are taken in, made of their numbers."""
        count = len(self.summaries.pages)
        sources = np.repeat(array(slots).astype(np.uint8), count * self.geometry.payload_bytes)
        addresses = np.arange(len(slots) * count, dtype=np.uint64).reshape(len(slots), count)
        addresses *= np.uint64(self.geometry.payload_bytes)
        self.summaries.put(array(slots), addresses + np.uint64(sources.ctypes.data))

    def row_bytes(self, row: int) -> NDArray[np.uint8]:
        """What a selector sees of a row: the last layer's sums of V, and its channels."""
        rows = array([row]).astype(np.int32)
        layer = self.geometry.layers - 1
        sums = self.summaries.values(rows, layer, 8).view(np.uint8).ravel()
        at = int(self.summaries.channels(rows, layer)[0]) - self.arena.address
        return np.concatenate([sums, self.arena.view(at, 2 * self.geometry.payload_bytes)])

    def known(self, slots: Sequence[int]) -> list[int]:
        """Those of these slots whose summaries are there, as they were put."""
        rows = self.summaries.pin(array(slots))
        for row, slot in zip(rows.tolist(), slots, strict=True):
            assert row == NO_ROW or (self.row_bytes(row) == slot).all()
        self.summaries.unpin(rows)
        return [slot for row, slot in zip(rows.tolist(), slots, strict=True) if row != NO_ROW]

    def fill(self, slots: Sequence[int]) -> list[int]:
        """These slots are in frames, as far as there is room."""
        self.balancer.make_room(array(slots))
        frames = self.frames.take(array(slots), FrameState.LOADING)
        for frame, slot in zip(frames.tolist(), slots, strict=False):
            self.frames.view(frame)[:] = slot
        self.frames.finish_io(frames, FrameState.CLEAN)
        return slots[: len(frames)]

    def choose(self, pages: Sequence[tuple[int, int]]) -> None:
        """A layer's queries choose these pages, which are read and used."""
        asked = self.pages.acquire(wanted(pages))
        read, places = asked.keys[asked.held :], asked.places[asked.held :]
        self.pages.complete(
            read, places, np.ones(len(read), np.bool_), np.zeros(len(read), np.uint16)
        )
        self.pages.release(asked.places)

    def in_frames(self, slots: Sequence[int]) -> int:
        return sum(self.frames.frame_of(slot) != NO_FRAME for slot in slots)


def wanted(pages: Sequence[tuple[int, int]]) -> Pages:
    numbers = np.array(pages, dtype=np.int64).reshape(-1, 2)
    nowhere = np.zeros(len(numbers), dtype=np.uint64)
    return Pages(numbers[:, 0].copy(), numbers[:, 1].copy(), nowhere)
