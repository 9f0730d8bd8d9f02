"""Makes tails of slots from their frames in DRAM, on the CPU whatever device attends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.paged import CpuPageKernels
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry


class KernelSummaryBuilder:
    """The store's ``SummaryBuilder``. One thread per call: the writer
    calls it beside the forward pass."""

    def __init__(self, layout: BlockLayout, geometry: SlotGeometry):
        """``layout``: of the blocks in vLLM's cache; ``geometry``: of slots with a tail."""
        self._kernels = CpuPageKernels(1)
        self._layout = layout.with_page_stride(geometry.page_bytes)
        self._geometry = geometry

    def make_tails(self, frames: NDArray[np.uint64], tails: NDArray[np.uint64]) -> None:
        """See :class:`vllm_ssdkv.store.write.summary_builder.SummaryBuilder`."""
        self._kernels.make_tails(frames, tails, self._layout, self._geometry)

    def make_channels(self, pages: NDArray[np.uint64], channels: NDArray[np.uint64]) -> None:
        """See :class:`vllm_ssdkv.store.write.summary_builder.SummaryBuilder`."""
        self._kernels.summarize(pages, self._layout, channels=channels)
