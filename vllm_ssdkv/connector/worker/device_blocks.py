"""Blocks in the memory of a GPU, all layers of a block gathered into one stretch, as in a frame.

A block's layers lie far apart in HBM. A few blocks at a time are gathered into a buffer on the
device, from which each goes to its frame in one copy over PCIe; back it is the same. Written with
torch alone: the same code runs on tensors of the CPU, where tests run it. Not run on a GPU yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from vllm_ssdkv.kernels.dense import wait_for

BUFFER_BYTES = 16 << 20
"""Bytes of each buffer, and of the data gathered for it; at least one block. vLLM leaves more of a
GPU's memory free."""


class DeviceBlocks:
    """Moves blocks in one direction at a time: a thread that saves and one that loads have one
    object each. Calls return when the bytes are there, and what the thread's stream has to do
    before: where that is the forward pass's, the pass that makes them."""

    def __init__(self, caches: Sequence[torch.Tensor], offsets: Sequence[int], block_bytes: int):
        """
        Args:
            caches: Cache of each layer, [num_blocks, ...], a block being one stretch.
            offsets: Offset of each layer in a frame, behind its header.
            block_bytes: Bytes of a frame behind its header.
        """
        self._layers = [cache.flatten(1).view(torch.uint8) for cache in caches]
        device = caches[0].device
        self._at_once = max(1, BUFFER_BYTES // block_bytes)
        shape = (self._at_once, block_bytes)
        self._buffer = torch.zeros(shape, dtype=torch.uint8, device=device)
        ends = (begin + layer.shape[1] for begin, layer in zip(offsets, self._layers, strict=True))
        self._parts = [self._buffer[:, begin:end] for begin, end in zip(offsets, ends, strict=True)]
        self._all, self._all_parts = _as_one(self._layers), _as_one(self._parts)

    def save(self, block_ids: torch.Tensor, frames: Sequence[torch.Tensor]) -> None:
        """Copy blocks [n] into as many frames behind their headers, [block_bytes], uint8."""
        for first in range(0, len(frames), self._at_once):
            part = frames[first : first + self._at_once]
            self._gather(block_ids[first : first + len(part)])
            for block, frame in zip(self._buffer, part, strict=False):
                frame.copy_(block, non_blocking=True)
        wait_for(self._buffer.device)

    def save_layer(
        self, layer: int, block_ids: torch.Tensor, places: Sequence[torch.Tensor]
    ) -> None:
        """Copy one layer of blocks [n] to as many places in frames, [bytes of the layer], uint8."""
        cache = self._layers[layer]
        at_once = max(1, BUFFER_BYTES // cache.shape[1])
        for first in range(0, len(places), at_once):
            index = block_ids[first : first + at_once].to(cache.device)
            for row, place in zip(cache.index_select(0, index), places[first:], strict=False):
                place.copy_(row, non_blocking=True)
        wait_for(cache.device)

    def load(self, frames: Sequence[torch.Tensor], block_ids: torch.Tensor) -> None:
        """Copy frames, behind their headers, into blocks [n]."""
        for first in range(0, len(frames), self._at_once):
            part = frames[first : first + self._at_once]
            for block, frame in zip(self._buffer, part, strict=False):
                block.copy_(frame, non_blocking=True)
            self._scatter(block_ids[first : first + len(part)])
        wait_for(self._buffer.device)

    def _gather(self, block_ids: torch.Tensor) -> None:
        index = block_ids.to(self._buffer.device)
        count = len(index)
        if self._all is not None and self._all_parts is not None:
            self._all_parts[:, :count] = self._all.index_select(1, index)
            return
        for part, cache in zip(self._parts, self._layers, strict=True):
            part[:count] = cache.index_select(0, index)

    def _scatter(self, block_ids: torch.Tensor) -> None:
        index = block_ids.to(self._buffer.device)
        count = len(index)
        if self._all is not None and self._all_parts is not None:
            self._all.index_copy_(1, index, self._all_parts[:, :count])
            return
        for part, cache in zip(self._parts, self._layers, strict=True):
            cache.index_copy_(0, index, part[:count])


def _as_one(layers: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The layers as one tensor, [layers, blocks, bytes], where they lie in one allocation at equal
    distances, as vLLM lays them; else None."""
    first = layers[0]
    storage = first.untyped_storage()
    offsets = [layer.storage_offset() for layer in layers]
    distances = {later - sooner for sooner, later in itertools.pairwise(offsets)}
    alike = all(
        layer.untyped_storage().data_ptr() == storage.data_ptr()
        and layer.shape == first.shape
        and layer.stride() == first.stride()
        for layer in layers
    )
    if not alike or len(distances) > 1:
        return None
    distance = distances.pop() if distances else 0
    return first.as_strided((len(layers), *first.shape), (distance, *first.stride()))
