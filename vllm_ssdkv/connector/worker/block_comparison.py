"""Comparison of a block in HBM with the stored one, which another step computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

TOLERANCE: Final = {
    torch.float32: 0.001,
    torch.float16: 0.01,
    torch.bfloat16: 0.05,
    torch.float8_e4m3fn: 0.1,
    torch.float8_e5m2: 0.2,
}
"""How far a block may be from the stored one, by the dtype of KV: rounding differs with the sizes
of chunks and batches, and adds up from layer to layer. See :meth:`BlockComparer.deviation`."""

MOST_BYTES: Final = 32 << 20
"""Of copies of stored blocks that are kept; of one, where a block is larger."""

_FP8: Final = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def element_type(dtype: torch.dtype, cache_dtype: str) -> torch.dtype | None:
    """Dtype of the numbers of KV that vLLM keeps as ``dtype``; None: they cannot be compared."""
    if dtype == torch.uint8:
        return _FP8.get(cache_dtype)
    return dtype if dtype in TOLERANCE else None


class StoredBlocks:
    """Copies of stored blocks until requests have computed theirs. Used by the worker's thread.

    Of requests that ended before that they stay until others need the room.
    """

    def __init__(self) -> None:
        self._frames: dict[tuple[str, int, int], NDArray[np.uint8]] = {}

    def keep(self, request_id: str, slot: int, epoch: int, frame: NDArray[np.uint8]) -> None:
        """A block was loaded for a request; the oldest ones may have to go."""
        self._frames.pop((request_id, slot, epoch), None)
        while self._frames and (len(self._frames) + 1) * frame.nbytes > MOST_BYTES:
            del self._frames[next(iter(self._frames))]
        self._frames[request_id, slot, epoch] = frame

    def take(self, request_id: str, slot: int, epoch: int) -> NDArray[np.uint8] | None:
        """The frame of a block, uint8; None: it had to go."""
        return self._frames.pop((request_id, slot, epoch), None)


class BlockComparer:
    """Compares KV element by element, whatever order a backend has laid it out in.

    Used by the worker's thread, between steps.
    """

    def __init__(self, caches: Sequence[torch.Tensor], geometry: SlotGeometry, dtype: torch.dtype):
        """``caches``: of each layer, [num_blocks, ...], a block's elements in the order of memory;
        ``dtype``: of the numbers, one of :data:`TOLERANCE`."""
        self._caches = caches
        self._geometry = geometry
        self._dtype = dtype
        self.tolerance = TOLERANCE[dtype]

    def deviation(self, block_id: int, frame: NDArray[np.uint8], layers: int) -> float:
        """Distance of an HBM block from the stored one in ``frame``: of the first ``layers`` layers
        the largest median of |computed - stored|, each in units of the layer's own size.

        The median does not see single tokens that a mixture of experts sent another way, nor
        padding; of other weights nearly all elements are far. NaN in one of the two is far. Blocks
        for some milliseconds.
        """
        return max(self._of_layer(layer, block_id, frame) for layer in range(layers))

    def _of_layer(self, layer: int, block_id: int, frame: NDArray[np.uint8]) -> float:
        geometry = self._geometry
        computed = self._caches[layer][block_id].flatten().cpu().view(torch.uint8)
        begin = geometry.layer_offset(layer)
        pages = torch.from_numpy(frame[begin : begin + geometry.layer_bytes])
        stored = pages.view(-1, geometry.page_bytes)[:, : geometry.payload_bytes].flatten()
        count = min(len(computed), len(stored))
        one = computed[:count].view(self._dtype).float()
        other = stored[:count].view(self._dtype).float()
        size = float(other.square().nanmean().sqrt())
        median = float((one - other).abs().nan_to_num(nan=torch.inf).median())
        if not median:
            return 0.0
        return median / size if size else math.inf
