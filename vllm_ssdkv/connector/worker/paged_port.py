"""Copies whole blocks of page mode: packed into padded pages by the device's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.connector.worker.block_copy import LeavingBlocks
from vllm_ssdkv.connector.worker.token_ordering import TokenOrdering
from vllm_ssdkv.kernels.dense import AttentionKernels, CpuKernels, wait_for
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.paged import CpuPageKernels, Packing, PageKernels, select_page_kernels
from vllm_ssdkv.store.cache.frames import FrameCache
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.summary_rows import SummaryRows


class PagedPort:
    """A :class:`BlockPort` of blocks in our own layout, for slots of pages."""

    def __init__(
        self,
        kernels: AttentionKernels,
        caches: Sequence[torch.Tensor],
        layout: BlockLayout,
        geometry: SlotGeometry,
        frames: FrameCache,
        ordering: TokenOrdering | None = None,
    ):
        """Tokens keep the order of their positions if there is no ``ordering``."""
        self._kernels = kernels
        self._page_kernels: PageKernels | None = None
        if geometry.tail_pages:
            self._page_kernels = select_page_kernels(kernels.device)
        # For other threads than that of the forward pass, whose team of OpenMP is at work. With a
        # second team in the process, those threads would sleep between two operations of the model.
        self._beside = CpuKernels(threads=1) if kernels.device.type == "cpu" else kernels
        self._pages_beside = self._page_kernels
        if isinstance(self._page_kernels, CpuPageKernels):
            self._pages_beside = CpuPageKernels(threads=1)
        self._caches = list(caches)
        self._layout = layout
        self._slot_layout = layout.with_page_stride(geometry.page_bytes)
        self._geometry = geometry
        self._frames = frames
        self._ordering = ordering
        self._packing: tuple[LeavingBlocks, Packing] | None = None
        """Blocks that went last, with their addresses."""

    def save(self, blocks: LeavingBlocks) -> None:
        """See :class:`BlockPort`."""
        self._copy(blocks, range(len(self._caches)), self._kernels, self._page_kernels)

    def save_layer(self, layer: int, blocks: LeavingBlocks) -> None:
        """See :class:`BlockPort`."""
        layers = range(layer, layer + 1)
        self._copy(blocks, layers, self._beside, self._pages_beside)

    def _copy(
        self,
        blocks: LeavingBlocks,
        layers: range,
        kernels: AttentionKernels,
        page_kernels: PageKernels | None,
    ) -> None:
        if blocks.rows is not None and page_kernels is not None:
            order = None
            if self._ordering is not None and blocks.index is not None:
                order = self._ordering.order(blocks.block_ids, blocks.index, layers)
            packing = self._packing_of(blocks, blocks.rows)
            page_kernels.pack_summarized(packing, layers, order)
        else:
            first = np.uint64(self._geometry.layer_offset(layers.start))
            kernels.pack(
                self._caches[layers.start : layers.stop],
                blocks.block_ids,
                self._frames.address(blocks.frames) + first,
                self._geometry.layer_bytes,
                layout=self._layout,
                slot_layout=self._slot_layout,
            )
        wait_for(self._kernels.device)

    def _packing_of(self, blocks: LeavingBlocks, rows: SummaryRows) -> Packing:
        """The blocks' addresses, which all their layers share."""
        if self._packing is None or self._packing[0] is not blocks:
            frames = self._frames.address(blocks.frames)
            made = Packing(
                self._caches, blocks.block_ids, frames, rows, self._layout, self._geometry
            )
            self._packing = blocks, made
        return self._packing[1]

    def load(self, frames: NDArray[np.int32], block_ids: NDArray[np.int64]) -> None:
        """See :class:`BlockPort`."""
        self._beside.unpack(
            self._caches,
            block_ids,
            self._pages(frames),
            self._geometry.layer_bytes,
            layout=self._layout,
            slot_layout=self._slot_layout,
        )
        wait_for(self._kernels.device)

    def _pages(self, frames: NDArray[np.int32]) -> NDArray[np.uint64]:
        return self._frames.address(frames) + np.uint64(self._geometry.layer_offset(0))
