"""Memory of the device that attends: for pages that were chosen lately, and for summaries of
pages."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import approximate_size
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.kernels.dense import select_kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.device_memory import DeviceMemory

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """Memory that is held for the summaries of this process's next worker.

    Attributes:
        asked: Bytes that the options gave.
        memory: As many; None: the device has none, or no room.
    """

    asked: int = 0
    memory: torch.Tensor | None = None


_HELD: Final = _Held()


def hold_summary_memory(config: SSDKVConfig, device: torch.device) -> None:
    """Take what the options give to summaries of the device's memory, unless it is held already.

    vLLM must not have measured yet how much is left for its KV cache. Where there is no room, or
    the device is a CPU, one line of the log says so, and summaries lie in DRAM.
    """
    nbytes = config.sparse.hbm_summaries if config.keeps_page_records else 0
    if nbytes == _HELD.asked:
        return
    _HELD.asked, _HELD.memory = nbytes, None
    if nbytes and _is_host(device):
        logger.warning("ssdkv: sparse.hbm_summaries has no effect on a CPU: summaries lie in DRAM")
    elif nbytes:
        try:
            _HELD.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # CUDA's out of memory is one
            logger.warning(
                "ssdkv: no room for %s of sparse.hbm_summaries on %s: summaries lie in DRAM (%s)",
                approximate_size(nbytes),
                device,
                str(error).splitlines()[0],
            )


def held_for_summaries() -> int:
    """Bytes that are held for summaries."""
    return 0 if _HELD.memory is None else _HELD.memory.nbytes


def take_summary_memory() -> torch.Tensor | None:
    """Hand over what is held, bytes; None: nothing is."""
    memory, _HELD.memory, _HELD.asked = _HELD.memory, None, 0
    return memory


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def summary_memory(
    held: torch.Tensor, places: int, layout: BlockLayout, geometry: SlotGeometry
) -> DeviceMemory:
    """So many pages of summaries in memory that :func:`take_summary_memory` gave, back to back and
    without their padding.

    A copy blocks until it has ended: the frames and places that pages come from are used again.
    """
    size = places * geometry.payload_bytes
    memory = held[:size].view(layout.dtype).view(places, -1)
    return _pages(memory, layout, geometry, wait=True)


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
        ConfigError: the device has no more memory.
    """
    places = max(1, nbytes // geometry.page_bytes)
    elements = geometry.page_bytes // layout.dtype.itemsize
    try:
        memory = torch.empty((places, elements), dtype=layout.dtype, device=device)
    except RuntimeError as error:  # CUDA's out of memory is one; on CPUs there is no own type
        raise ConfigError(
            f"no room for {approximate_size(places * geometry.page_bytes)} of sparse.hbm_pages on "
            f"{device} beside the model and vLLM's KV cache; lower it, or lower "
            "--gpu-memory-utilization"
        ) from error
    return _pages(memory, layout, geometry, wait=False)


def _pages(
    memory: torch.Tensor, layout: BlockLayout, geometry: SlotGeometry, *, wait: bool
) -> DeviceMemory:
    device, tokens = memory.device, layout.page_tokens
    kernels = select_kernels(device)
    # A page is a block of one page of one KV head.
    stride_bytes = memory.shape[1] * layout.dtype.itemsize
    here = BlockLayout(tokens, tokens, 1, layout.head_size, stride_bytes, layout.dtype)
    there = here.with_page_stride(geometry.page_bytes)

    def copy(source: NDArray[np.uint64], to: NDArray[np.int32]) -> None:
        kernels.unpack([memory], to.astype(np.int64), source, 0, here, there)
        if wait and memory.is_cuda:
            torch.cuda.current_stream(device).synchronize()

    return DeviceMemory(memory.data_ptr(), len(memory), copy)
