"""Memory of the device that attends, for pages that were chosen lately."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.blocks import BlockLayout
from vllm_ssdkv.attention.kernels import select_kernels
from vllm_ssdkv.store.hot_pages import DeviceMemory
from vllm_ssdkv.store.layout import SlotGeometry


def hot_memory(
    nbytes: int, layout: BlockLayout, geometry: SlotGeometry, device: torch.device
) -> DeviceMemory:
    """Take ``nbytes`` of the device's memory, or a page if that is more.

    Pages are copied on the device's current stream, so what attends to them on that stream comes
    after. The memory lives as long as the result.

    Args:
        nbytes: Its size.
        layout: Of blocks in HBM.
        geometry: Of the slots that pages come from.
        device: That attends. On a CPU this is DRAM like all else.

    Raises:
        torch.OutOfMemoryError: the device has no more memory.
    """
    kernels = select_kernels(device)
    # A page is a block of one page of one KV head.
    page = BlockLayout(
        layout.page_tokens,
        layout.page_tokens,
        1,
        layout.head_size,
        geometry.page_bytes,
        layout.dtype,
    )
    places = max(1, nbytes // geometry.page_bytes)
    shape = (places, page.page_stride)
    memory = torch.empty(shape, dtype=layout.dtype, device=device)

    def copy(source: NDArray[np.uint64], to: NDArray[np.int32]) -> None:
        kernels.unpack([memory], to.astype(np.int64), source, 0, page, page)

    return DeviceMemory(memory.data_ptr(), places, copy)
