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
    """X of a block, in the payloads of the first pages of a layer; the others are zeros.

    Example:
        layout = InputLayout(geometry, block_tokens=32, hidden=4096, dtype=torch.bfloat16)

    Attributes:
        geometry: Of the slots.
        block_tokens: Tokens of a block.
        hidden: Channels of X.
        dtype: Of its numbers.

    Raises:
        ValueError: X is larger than K and V.
    """

    geometry: SlotGeometry
    block_tokens: int
    hidden: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.pages > self.geometry.pages_per_layer:
            raise ValueError(
                f"X of a block has {self.nbytes} bytes in {self.pages} pages, a layer's K and V "
                f"have {self.geometry.pages_per_layer}"
            )

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of X of a block in a layer."""
        return self.block_tokens * self.hidden * self.dtype.itemsize

    @functools.cached_property
    def pages(self) -> int:
        """Pages of a layer that hold X."""
        return -(-self.nbytes // self.geometry.payload_bytes)

    def put(self, inputs: torch.Tensor, frame: NDArray[np.uint8]) -> None:
        """Write X of a block, [layers, block_tokens, hidden] on any device, to a frame."""
        geometry = self.geometry
        kept = torch.from_numpy(frame[geometry.header_bytes : geometry.frame_bytes]).view(
            geometry.layers, geometry.pages_per_layer, geometry.page_bytes
        )
        raw = inputs.cpu().contiguous().view(torch.uint8).view(geometry.layers, self.nbytes)
        payload = geometry.payload_bytes
        full, rest = divmod(self.nbytes, payload)
        kept[:, :full, :payload] = raw[:, : full * payload].view(geometry.layers, full, payload)
        kept[:, :full, payload:] = 0
        kept[:, full:] = 0
        if rest:
            kept[:, full, :rest] = raw[:, full * payload :]

    def get(self, arena: Arena, base: NDArray[np.uint64]) -> torch.Tensor:
        """X of blocks whose layer begins at absolute addresses ``base`` [n] in the arena.

        Returns:
            [n * block_tokens, hidden], a copy on the host.
        """
        geometry = self.geometry
        lines = torch.from_numpy(arena.view(0, arena.nbytes)).view(-1, PAGE_ALIGN)
        first = ((base - np.uint64(arena.address)) // np.uint64(PAGE_ALIGN)).astype(np.int64)
        count = self.pages * geometry.page_bytes // PAGE_ALIGN
        index = torch.from_numpy((first[:, None] + np.arange(count)).ravel())
        found = lines.index_select(0, index).view(len(base), self.pages, geometry.page_bytes)
        raw = found[:, :, : geometry.payload_bytes].reshape(len(base), -1)[:, : self.nbytes]
        return raw.contiguous().view(self.dtype).view(-1, self.hidden)
