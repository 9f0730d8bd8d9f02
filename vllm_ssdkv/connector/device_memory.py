"""Memory of the device that attends: for pages that were chosen lately, and for K's channels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.blocks import BlockLayout
from vllm_ssdkv.attention.kernels import select_kernels
from vllm_ssdkv.store.device_memory import DeviceMemory
from vllm_ssdkv.store.layout import SlotGeometry


def hot_memory(
    nbytes: int, layout: BlockLayout, geometry: SlotGeometry, device: torch.device
) -> DeviceMemory:
    """Take ``nbytes`` of the device's memory, or a page if that is more, for chosen pages.

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
    places = max(1, nbytes // geometry.page_bytes)
    return _take(places, geometry.page_bytes, layout, geometry, device, wait=False)


def channel_memory(
    places: int, layout: BlockLayout, geometry: SlotGeometry, device: torch.device
) -> DeviceMemory:
    """The same for so many channel pages, back to back and without their padding.

    A copy blocks until it has ended: the frames and places that pages come from are used again.
    """
    return _take(places, geometry.payload_bytes, layout, geometry, device, wait=True)


def _take(
    places: int,
    stride_bytes: int,
    layout: BlockLayout,
    geometry: SlotGeometry,
    device: torch.device,
    *,
    wait: bool,
) -> DeviceMemory:
    kernels = select_kernels(device)
    # A page is a block of one page of one KV head.
    tokens = layout.page_tokens
    here = BlockLayout(tokens, tokens, 1, layout.head_size, stride_bytes, layout.dtype)
    there = here.with_page_stride(geometry.page_bytes)
    memory = torch.empty((places, here.page_stride), dtype=layout.dtype, device=device)

    def copy(source: NDArray[np.uint64], to: NDArray[np.int32]) -> None:
        kernels.unpack([memory], to.astype(np.int64), source, 0, here, there)
        if wait and memory.is_cuda:
            torch.cuda.current_stream(device).synchronize()

    return DeviceMemory(memory.data_ptr(), places, copy)
