"""A rank's store in page mode below a KV cache on a device, driven as the worker drives it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.io_engine import EngineKind
from vllm_ssdkv.connector.worker.block_copy import LeavingBlocks
from vllm_ssdkv.connector.worker.paged_port import PagedPort
from vllm_ssdkv.connector.worker.pinning import pin_arena, unpin_arena
from vllm_ssdkv.connector.worker.stream_fence import StreamFence
from vllm_ssdkv.kernels.dense import select_kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.summary_builder import KernelSummaryBuilder
from vllm_ssdkv.profiling.rig.store import StoreRig
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.summary_rows import with_summaries
from vllm_ssdkv.store.read.load_job import LoadOutcome

PATIENCE_S: Final = 60.0

REQUEST: Final = "request"
"""It refers to all slots once they are stored."""

Slots = NDArray[np.int64]


class PagedRig(StoreRig):
    """A store of ``blocks`` slots, and a cache of twice as many blocks on ``device``.

    One thread calls all methods. Closing it ends the store; its files stay.

    Attributes:
        layout: Of a block in the cache.
        geometry: Of a slot.
        caches: Of each layer, [2 * blocks, block elements], on the device.
        store: The store.
        fence: Set it when what writes to the cache is queued.
    """

    def __init__(
        self,
        directory: Path,
        layout: BlockLayout,
        layers: int,
        blocks: int,
        device: torch.device,
        *,
        engine: EngineKind = "auto",
        channels: bool = False,
        seed: int = 1,
    ):
        """``channels``: slots have channel pages, else bounds."""
        self.device, self.layout = device, layout
        plain = SlotGeometry(
            "paged", layers, layout.kv_heads, layout.groups, layout.page_payload_bytes
        )
        geometry = with_summaries(plain, layout.page_tokens, channels=channels)
        slot = geometry.slot_bytes
        capacity = max((blocks + 16) * slot * 2, 32 * MIB)
        config = SSDKVConfig.from_extra_config(
            {
                "mode": "page",
                "selector": "sparf" if channels else "bounds",
                "page_tokens": layout.page_tokens,
                "devices": [{"path": str(directory), "capacity": capacity}],
                "state_dir": str(directory),
                "dram_gib": f"{max(6 * blocks * slot, 256 * MIB)} B",
                "io": {"engine": engine},
            }
        )
        random = torch.Generator(device).manual_seed(seed)
        elements = layout.block_bytes // layout.dtype.itemsize
        self.caches = [
            torch.randn((2 * blocks, elements), generator=random, device=device).to(layout.dtype)
            for _ in range(layers)
        ]
        self.fence = StreamFence(device)
        super().__init__(
            config,
            geometry,
            blocks,
            block_tokens=layout.block_tokens,
            name=seed,
            copy_in=self._copy_in,
            summarizer=KernelSummaryBuilder(layout, geometry),
        )
        if device.type == "cuda":
            pin_arena(self.opened.arena, device)
        self._port = PagedPort(
            select_kernels(device), self.caches, layout, self.geometry, self.store.frames
        )

    @property
    def engine(self) -> str:
        """Name of the engine that reads and writes."""
        return self.opened.files.engine.name

    def _copy_in(self, frames: NDArray[np.int32], block_ids: Slots) -> None:
        self.fence.follow()
        self._port.load(frames, block_ids)

    def save(self) -> float:
        """Store the first half of the cache's blocks, once; seconds until all are on the disk.

        Raises ``BenchError`` if one could not be written.
        """
        begin = time.perf_counter()
        self.write(self._fill)
        # Checksums of pages are kept of what a running request refers to.
        self.store.extend_context(REQUEST, 0, self.slots)
        return time.perf_counter() - begin

    def _fill(self, slots: Slots, frames: NDArray[np.int32]) -> None:
        self._port.save(LeavingBlocks(slots, frames, self.store.summary_rows(slots)))
        self.store.filled(slots)

    def load_back(self) -> LoadOutcome:
        """Bring all slots into the second half of the cache.

        Raises ``BenchError`` if that fails.
        """
        return self.load(to=self.slots + len(self.slots), name=REQUEST)

    def pages(self, layer: int) -> NDArray[np.uint8]:
        """Payloads of the stored blocks' pages of a layer, [blocks, pages, bytes], as saved."""
        saved = self.caches[layer][: len(self.slots)].view(torch.uint8).cpu().numpy()
        return saved.reshape(len(self.slots), self.geometry.pages_per_layer, -1)

    def close(self) -> None:
        """End the store, with what is in flight."""
        self.store.close()
        if self.device.type == "cuda":
            unpin_arena(self.opened.arena, self.device)
        self.opened.close()


def bytes_at(addresses: NDArray[np.uint64], nbytes: int, device: torch.device) -> NDArray[np.uint8]:
    """Bytes at absolute addresses that ``device`` reaches, [n, nbytes]; both must be multiples of
    8."""
    words = np.arange(nbytes // 8, dtype=np.uint64) * np.uint64(8)
    places = (addresses[:, None] + words[None, :]).ravel()
    if device.type == "cpu":
        from vllm_ssdkv import _io

        found = _io.read_words(places)
    else:
        from vllm_ssdkv.triton_kernels.digest import read_words

        there = torch.from_numpy(places.view(np.int64)).to(device)
        found = read_words(there).cpu().numpy().view(np.uint64)
    return np.ascontiguousarray(found).view(np.uint8).reshape(len(addresses), nbytes)
