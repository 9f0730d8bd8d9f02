"""Place of X, the input of a layer's QKV projection, in a slot made for K and V."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, SlotGeometry
from vllm_ssdkv.store.memory.arena import Arena


@dataclass(frozen=True)
class InputLayout:
    """X of consecutive blocks, back to back in the payloads of a layer's first pages; the others
    are zeros.

    Example:
        layout = InputLayout(geometry, block_tokens=32, hidden=4096, dtype=torch.bfloat16, blocks=2)

    Attributes:
        geometry: Of the slots.
        block_tokens: Tokens of a block.
        hidden: Channels of X.
        dtype: Of its numbers.
        blocks: Blocks in a slot.

    Raises:
        ValueError: X is larger than K and V of a slot.
    """

    geometry: SlotGeometry
    block_tokens: int
    hidden: int
    dtype: torch.dtype
    blocks: int = 1

    def __post_init__(self) -> None:
        if self.pages > self.geometry.pages_per_layer:
            raise ValueError(
                f"X of {self.blocks} block(s) has {self.blocks * self.nbytes} bytes in "
                f"{self.pages} pages, a layer's K and V have {self.geometry.pages_per_layer}"
            )

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of X of a block in a layer."""
        return self.block_tokens * self.hidden * self.dtype.itemsize

    @functools.cached_property
    def pages(self) -> int:
        """Pages of a layer that hold X."""
        return -(-self.blocks * self.nbytes // self.geometry.payload_bytes)

    @functools.cached_property
    def _stretches(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """As many pages of a layer for each block of a slot: the first one, [blocks], bytes of
        payload in them before X of the block, [blocks], and their number."""
        payload = self.geometry.payload_bytes
        begin = np.arange(self.blocks) * self.nbytes
        count = int((-(-(begin + self.nbytes) // payload) - begin // payload).max())
        first = np.minimum(begin // payload, self.pages - count)
        return first, begin - first * payload, count

    def put(self, inputs: torch.Tensor, frame: NDArray[np.uint8]) -> None:
        """Write X of a slot's blocks to a frame: [layers, blocks * block_tokens, hidden] on any
        device."""
        geometry = self.geometry
        kept = torch.from_numpy(frame[geometry.header_bytes : geometry.frame_bytes]).view(
            geometry.layers, geometry.pages_per_layer, geometry.page_bytes
        )
        nbytes, payload = self.blocks * self.nbytes, geometry.payload_bytes
        raw = inputs.cpu().contiguous().view(torch.uint8).view(geometry.layers, nbytes)
        full, rest = divmod(nbytes, payload)
        kept[:, :full, :payload] = raw[:, : full * payload].view(geometry.layers, full, payload)
        kept[:, :full, payload:] = 0
        kept[:, full:] = 0
        if rest:
            kept[:, full, :rest] = raw[:, full * payload :]

    def get(self, arena: Arena, base: NDArray[np.uint64], index: NDArray[np.int64]) -> torch.Tensor:
        """X of blocks, copied to the host.

        Args:
            arena: Has them.
            base: Absolute addresses of the layer in the blocks' slots, [n].
            index: Of each block in its request, [n].

        Returns:
            [n * block_tokens, hidden].
        """
        geometry = self.geometry
        lines = torch.from_numpy(arena.view(0, arena.nbytes)).view(-1, PAGE_ALIGN)
        first = ((base - np.uint64(arena.address)) // np.uint64(PAGE_ALIGN)).astype(np.int64)
        page, before, count = self._stretches
        per_page, place = geometry.page_bytes // PAGE_ALIGN, index % self.blocks
        first += page[place] * per_page
        wanted = torch.from_numpy((first[:, None] + np.arange(count * per_page)).ravel())
        found = lines.index_select(0, wanted).view(len(base), count, geometry.page_bytes)
        raw = found[:, :, : geometry.payload_bytes].reshape(len(base), -1)
        if before.any():
            begins = before[place].tolist()
            raw = torch.stack([x[at : at + self.nbytes] for x, at in zip(raw, begins, strict=True)])
        return raw[:, : self.nbytes].contiguous().view(self.dtype).view(-1, self.hidden)
