"""Blocks on their way to slots, as kernels of sparse stores pack them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.kernels.dense import block_addresses
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, IntArray, on_device
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.summary_rows import SummaryRows, channel_bytes, summary_bytes


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAddresses:
    """Addresses of a :class:`Packing` on a device, int64.

    Attributes:
        source: Each layer's part of each block, [L, n].
        pages: Each layer's first page in each slot, [L, n].
        known: Blocks whose slots have rows, [m].
        records: Each layer's records in each of these rows, [L, m].
        channels: Each layer's channel-major K in these rows, [L, m].
    """

    source: torch.Tensor
    pages: torch.Tensor
    known: torch.Tensor
    records: torch.Tensor
    channels: torch.Tensor


class Packing:
    """n blocks of the caches of L layers, on their way to slots and to rows of summaries.

    Layers may be packed one by one: addresses go to a device once, with the first of them. Used by
    one thread at a time, and on a device on streams that have ended when the next one is used.

    Attributes:
        caches: Cache of each layer, [num_blocks, ...].
        layout: Layout of the blocks.
        geometry: Geometry of the slots.
        source: Absolute addresses of each layer's part of each block, uint64 [L, n].
        pages: Absolute addresses of the first page of each slot, uint64 [n].
        rows: Rows of the table of summaries, [n].
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        block_ids: IntArray,
        frames: NDArray[np.uint64],
        rows: SummaryRows,
        layout: BlockLayout,
        geometry: SlotGeometry,
    ):
        """``frames``: absolute addresses, [n].

        Raises:
            ValueError: a cache does not hold blocks of this layout, or not these; the numbers of
                blocks, frames and rows differ.
        """
        self.source = block_addresses(caches, block_ids, layout)
        self.caches, self.layout, self.geometry = caches, layout, geometry
        if not self.source.shape[1] == len(frames) == len(rows.address):
            raise ValueError(
                f"{self.source.shape[1]} blocks cannot go to {len(frames)} frames and "
                f"{len(rows.address)} rows"
            )
        self.pages = frames + np.uint64(geometry.header_bytes)
        self.rows = rows
        self._there: DeviceAddresses | None = None

    def first_pages(self, layer: int) -> NDArray[np.uint64]:
        """Absolute addresses of a layer's first page in each slot, [n]."""
        pages: NDArray[np.uint64] = self.pages + np.uint64(layer * self.geometry.layer_bytes)
        return pages

    def on_device(self, device: torch.device) -> DeviceAddresses:
        """The addresses on a device: sent once, in one copy that nobody waits for."""
        if self._there is not None:
            return self._there
        geometry, layers = self.geometry, np.arange(len(self.source), dtype=np.uint64)[:, None]
        known = np.flatnonzero(self.rows.address)
        rows = self.rows.address[known][None, :]
        record_bytes = summary_bytes(geometry, self.layout.page_tokens) // geometry.layers
        keys = rows + np.uint64(max(0, self.rows.channels))
        parts = (
            self.source,
            self.pages[None, :] + layers * np.uint64(geometry.layer_bytes),
            known.astype(np.uint64)[None, :],
            rows + layers * np.uint64(record_bytes),
            keys + layers * np.uint64(channel_bytes(geometry)),
        )
        sent = on_device(np.concatenate([part.ravel() for part in parts]), torch.int64, device)
        begin = np.cumsum([0, *(part.size for part in parts)]).tolist()
        source, pages, which, records, channels = (
            sent[begin[i] : begin[i + 1]].view(part.shape) for i, part in enumerate(parts)
        )
        self._there = DeviceAddresses(source, pages, which[0], records, channels)
        return self._there
