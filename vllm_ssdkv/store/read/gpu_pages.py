"""Pages in the memory of the device that attends: what was chosen lately need not come again.

Kernels of a GPU read pages of DRAM over PCIe whenever a query chooses them. Those that were chosen
lately are kept in a fixed piece of the GPU's own memory, above the tiers that
``store/read/page_fetcher.py`` brings pages from. A page gets there by a copy from where that has
it, checked and decrypted, so its bytes are the same and no answer depends on where it is. The table
is that of the page cache in DRAM, by the same policies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.cache.selected_pages import NO_PLACE, Asked, Pages, SelectedPageCache
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.device_memory import DeviceMemory
from vllm_ssdkv.store.memory.memory_plan import PageEvictionPolicy
from vllm_ssdkv.store.read.page_fetcher import Fetch, PageFetcher

_RATES = np.ones(1)
"""All pages come the same way."""


@dataclass(slots=True)
class GpuFetch:
    """Pages that were asked for, some of them still on their way. Belongs to who asked.

    Attributes:
        asked: What is known of them in the device's memory.
        address: Absolute address of each, uint64 [n], once they have arrived; 0 where one has not.
            Of the device's memory or of DRAM.
        others: Which of the pages the device did not have, int64 [k].
        below: These pages, from DRAM or a drive.
    """

    pages: Pages
    asked: Asked
    address: NDArray[np.uint64]
    others: NDArray[np.int64]
    below: Fetch
    _owner: GpuPageCache
    coming: bool = True
    """True if places are still waiting for their pages."""

    @property
    def from_ssd(self) -> int:
        """Distinct pages that are read for this, or were ahead of it."""
        return self.below.from_ssd

    def finish(self) -> NDArray[np.bool_]:
        """See :meth:`GpuPageCache.finish`."""
        return self._owner.finish(self)

    def release(self) -> None:
        """See :meth:`GpuPageCache.release`."""
        self._owner.release(self)


class GpuPageCache:
    """Pages in a device's memory, and those below it. Used by the thread of the forward pass."""

    def __init__(
        self,
        memory: DeviceMemory,
        fetcher: PageFetcher,
        geometry: SlotGeometry,
        slots: int,
        policy: PageEvictionPolicy,
    ):
        """``fetcher`` brings what the memory does not have; ``slots`` are those of the store."""
        self.memory = memory
        self._fetcher = fetcher
        self._cache = SelectedPageCache(memory, 0, geometry, memory.places, slots, policy)

    @property
    def places(self) -> int:
        """Pages that the memory has room for."""
        return self._cache.places

    def held(self) -> int:
        """Pages in it."""
        return self._cache.held()

    def forget(self, slots: NDArray[np.int64]) -> None:
        """The content of these slots changes."""
        self._cache.forget(slots)

    def step(self) -> None:
        """Queries of the next token follow."""
        self._cache.step(_RATES)

    def start(self, pages: Pages) -> GpuFetch:
        """Start to bring pages that queries chose. Does not block. Pages may repeat."""
        # A frame in DRAM is no reason to read it again over PCIe.
        asked = self._cache.acquire(replace(pages, frames=np.zeros_like(pages.frames)))
        others = np.flatnonzero(asked.which >= asked.held)
        below = self._fetcher.start(pages.part(others))
        return GpuFetch(pages, asked, np.zeros(len(pages), np.uint64), others, below, self)

    def finish(self, fetch: GpuFetch) -> NDArray[np.bool_]:
        """Wait for the pages as ``PageFetcher.finish`` does; which of them are there, [n].

        Their memory stays as it is until :meth:`release`.
        """
        asked, others = fetch.asked, fetch.others
        good = np.ones(len(fetch.pages), dtype=np.bool_)
        good[others] = self._fetcher.finish(fetch.below)
        _, first = np.unique(asked.which[others], return_index=True)
        keys, places = asked.keys[asked.held :], asked.places[asked.held :]
        usable = good[others[first]] & (places != NO_PLACE)
        if usable.any():
            self.memory.copy(fetch.below.address[first[usable]], places[usable])
        self._cache.complete(keys, places, usable, np.zeros(len(keys), dtype=np.uint16))
        fetch.coming = False
        fetch.address, here = self._cache.find(asked, fetch.pages)
        elsewhere = ~here[others]
        fetch.address[others[elsewhere]] = fetch.below.address[elsewhere]
        return good

    def release(self, fetch: GpuFetch) -> None:
        """The pages are not read any more. Also ends a fetch that nobody waits for."""
        asked = fetch.asked
        if fetch.coming:
            keys, places = asked.keys[asked.held :], asked.places[asked.held :]
            nothing = np.zeros(len(keys), dtype=np.bool_)
            self._cache.complete(keys, places, nothing, np.zeros(len(keys), dtype=np.uint16))
            fetch.coming = False
        self._cache.release(asked.places)
        asked.places[:] = NO_PLACE
        self._fetcher.release(fetch.below)

    def wanted_below(self, pages: Pages) -> Pages:
        """The same pages; those that the device has look as if they lay in a frame, so that they
        are not read ahead."""
        held = self._cache.holds(pages)
        return replace(pages, frames=np.where(held, np.uint64(1), pages.frames))
