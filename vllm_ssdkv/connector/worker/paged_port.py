"""Copies whole blocks of page mode: packed into padded pages by the device's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.connector.worker.token_ordering import TokenOrdering
from vllm_ssdkv.kernels.dense import AttentionKernels, CpuKernels, wait_for
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.paged import select_page_kernels
from vllm_ssdkv.store.cache.frames import FrameCache
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry


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
        # For other threads than that of the forward pass, whose team of OpenMP is at work. With a
        # second team in the process, those threads would sleep between two operations of the model.
        self._beside = CpuKernels(threads=1) if kernels.device.type == "cpu" else kernels
        self._caches = list(caches)
        self._layout = layout
        self._slot_layout = layout.with_page_stride(geometry.page_bytes)
        self._geometry = geometry
        self._frames = frames
        self._ordering = ordering

    def save(
        self,
        block_ids: NDArray[np.int64],
        frames: NDArray[np.int32],
        tails: NDArray[np.uint64],
        index: NDArray[np.int64] | None = None,
    ) -> None:
        """See :class:`BlockPort`."""
        geometry, order = self._geometry, None
        if self._ordering is not None and index is not None:
            order = self._ordering.order(block_ids, index)
        if geometry.tail_pages:
            select_page_kernels(self._kernels.device).pack_summarized(
                self._caches,
                block_ids,
                self._frames.address(frames),
                tails,
                self._layout,
                geometry,
                order,
            )
        else:
            self._kernels.pack(
                self._caches,
                block_ids,
                self._pages(frames),
                geometry.layer_bytes,
                layout=self._layout,
                slot_layout=self._slot_layout,
            )
        wait_for(self._kernels.device)

    def save_layer(
        self, layer: int, block_ids: NDArray[np.int64], frames: NDArray[np.int32]
    ) -> None:
        """See :class:`BlockPort`."""
        geometry = self._geometry
        self._beside.pack(
            self._caches[layer : layer + 1],
            block_ids,
            self._frames.address(frames) + np.uint64(geometry.layer_offset(layer)),
            geometry.layer_bytes,
            layout=self._layout,
            slot_layout=self._slot_layout,
        )
        wait_for(self._kernels.device)

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
