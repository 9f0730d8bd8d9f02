"""Model of reads over drives: the longest of ``max(bytes / bandwidth, requests / IOPS)``.

Pages are places of one layer: KV head h, page p, slot ``s = p // slot pages``. A slot's pages of a
head lie in a row, so neighbours that are chosen are read by one request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_ssdkv.profiling.clusters.trace import I64, Bools


@dataclass(frozen=True, slots=True)
class Drive:
    """Limits of one drive, bytes and requests per second."""

    name: str
    bandwidth: float
    iops: float


DRIVES: Final = (Drive("PM9A3", 6.9e9, 1.1e6), Drive("900P", 2.5e9, 0.55e6))
PAGE_BYTES: Final = 8192
"""Bytes of a page of one KV head at head size 128 and 16 bits."""
MOST_JOINED: Final = 64
"""Pages of a request: 512 KiB."""

Place = Callable[[I64, I64, int], I64]
"""Drive of a head's slot, from heads, slots and the number of drives."""


def by_slot(head: I64, slot: I64, drives: int) -> I64:
    """Placement of version 1: all pages of a slot's unit on one drive."""
    return slot % drives


def by_slot_and_head(head: I64, slot: I64, drives: int) -> I64:
    """KV head h of slot s on drive s + h. A layer's unit moves all of its heads alike."""
    return (slot + head) % drives


def by_page_and_head(head: I64, page: I64, drives: int) -> I64:
    """Page p of head h on drive p + h, for slots of one page: runs are broken."""
    return (page + head) % drives


PLACEMENTS: Final[dict[str, Place]] = {"slot": by_slot, "slot + head": by_slot_and_head}


@dataclass(frozen=True, slots=True)
class Load:
    """Pages and requests of each drive, int64 [steps, drives]."""

    pages: I64
    requests: I64

    @property
    def imbalance(self) -> float:
        """Pages of the busiest drive, of the mean; mean of steps that read."""
        busy = self.pages[self.pages.sum(1) > 0]
        return float((busy.max(1) / busy.mean(1)).mean()) if len(busy) else 1.0

    def seconds(self, drive: Drive, page_bytes: int = PAGE_BYTES) -> float:
        """Mean time of a step."""
        moving = self.pages * page_bytes / drive.bandwidth
        return float(np.maximum(moving, self.requests / drive.iops).max(1).mean())


def load(chosen: Bools, place: Place, drives: int, slot_pages: int) -> Load:
    """Load of each step for ``chosen`` pages, [heads, steps, pages]."""
    pages, requests = [], []
    for step in range(chosen.shape[1]):
        head, page = np.nonzero(chosen[:, step])
        slot = page // slot_pages
        where = place(head, slot, drives)
        pages.append(np.bincount(where, minlength=drives))
        # Pages of a head's slot are neighbours on its drive; a gap or another slot ends a run.
        run_ends = (np.diff(page) != 1) | (np.diff(head) != 0) | (np.diff(slot) != 0)
        begin = np.concatenate([[True], run_ends]) if len(page) else np.zeros(0, np.bool_)
        run = np.cumsum(begin) - 1
        length = np.bincount(run) if len(page) else np.zeros(0, np.int64)
        count = -(-length // MOST_JOINED)
        spread = np.bincount(where[begin], weights=count, minlength=drives)
        requests.append(spread.astype(np.int64))
    return Load(np.stack(pages), np.stack(requests))


def singly(where: list[I64], drives: int) -> Load:
    """Load of entries that lie apart, one request each: the drive of each, step by step."""
    pages = np.stack([np.bincount(one, minlength=drives) for one in where])
    return Load(pages, pages)


def pool_bandwidth(drive: Drive, drives: int, entry_bytes: int) -> float:
    """Bytes per second of evenly loaded drives that read entries of a size one by one."""
    return drives * min(drive.bandwidth, drive.iops * entry_bytes)
