"""Comparison of a block in HBM with the stored one, which another step computed."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.connector.kv_layout import FLOAT8_TYPES, KVLayout, layer_offsets
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

TOLERANCE: Final = {
    torch.float32: 0.001,
    torch.float16: 0.01,
    torch.bfloat16: 0.05,
    torch.float8_e4m3fn: 0.1,
    torch.float8_e5m2: 0.2,
}
"""Tolerance between a block and the stored one, by the dtype of KV: rounding differs with the sizes
of chunks and batches, and adds up from layer to layer. See :meth:`BlockComparer.deviation`."""

TOKEN_TOLERANCE: Final = 0.75
"""Distance of a quarter of the elements of one token from the stored ones, at most, in units of the
layer's size. Elements of another token are some 1.2 apart or more in half of the cases.

Measured as :meth:`BlockComparer.deviation` takes it, 36 blocks each, computed alone and in batches
of six, in chunks of 96 and 256 tokens: float32 5.3e-6 in the fourth layer of Llama, bfloat16 0.017
in the same and 0.0065, 0.0092 and 0.0043 in the second of Mixtral, Gemma 3 and Qwen3; nothing in
any first layer. In bfloat16 a layer adds 0.0043, so :data:`TOKEN_LAYERS` of them make 0.07: the
limit is ten times that. One step of float8_e5m2 takes 0.75 only from elements of three sizes or
more, which is fewer than a quarter."""

TOKEN_LAYERS: Final = 16
"""Number of a model's first layers in which single tokens count."""

MOST_BYTES: Final = 32 << 20
"""Bytes of stored blocks of which copies are kept; one block, if it is larger."""


def element_type(layout: KVLayout) -> torch.dtype | None:
    """Dtype of the numbers in blocks of the chain, which are compared; None: they cannot be."""
    dtype = layout.chain_dtype or layout.dtype
    if dtype == torch.uint8:
        return FLOAT8_TYPES.get(layout.cache_dtype)
    return dtype if dtype in TOLERANCE else None


def layers_of_tokens(names: Sequence[str], *, routed: bool) -> frozenset[int]:
    """Find the layers in which single tokens count: the first ones of a model.

    Args:
        names: Names of layers, as ``model.layers.3.self_attn.attn``.
        routed: The model has experts. By rounding alone it may send a token to another one, so
            only its first layer counts, which lies before them.
    """
    most = 1 if routed else TOKEN_LAYERS
    found = [re.search(r"\.(\d+)\.", name) for name in names]
    return frozenset(i for i, one in enumerate(found) if one and int(one[1]) < most)


class StoredBlocks:
    """Copies of stored blocks until requests have computed theirs. Used by the worker's thread.

    Of requests that ended before that they stay until others need the room.
    """

    def __init__(self) -> None:
        self._frames: dict[tuple[str, int, int], NDArray[np.uint8]] = {}

    def keep(self, load: str, slot: int, epoch: int, frame: NDArray[np.uint8]) -> None:
        """A load has brought a block; the oldest ones may have to go."""
        self._frames.pop((load, slot, epoch), None)
        while self._frames and (len(self._frames) + 1) * frame.nbytes > MOST_BYTES:
            del self._frames[next(iter(self._frames))]
        self._frames[load, slot, epoch] = frame

    def take(self, load: str, slot: int, epoch: int) -> NDArray[np.uint8] | None:
        """The frame of a block, uint8; None: it had to go, or did not come."""
        return self._frames.pop((load, slot, epoch), None)


class BlockComparer:
    """Compares KV element by element, whatever order a backend has laid it out in.

    Used by the worker's thread, between steps.
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        geometry: SlotGeometry,
        dtype: torch.dtype,
        tokens: int,
        token_layers: Container[int],
        reordered: BlockLayout | None = None,
        layer_bytes: Sequence[int] = (),
    ):
        """
        Args:
            caches: Cache of each layer of the chain, [num_blocks, ...], a block's elements in the
                order of memory. A slot begins with these layers.
            geometry: Geometry of slots.
            dtype: Type of the numbers, one of :data:`TOLERANCE`.
            tokens: Number of tokens of a block.
            token_layers: Layers of ``caches`` in which single tokens count.
            reordered: Layout of blocks of which slots have the tokens in another order, for each
                head (``sparse.token_order``); None: they are where they are in HBM.
            layer_bytes: :attr:`KVLayout.layer_bytes`. Layers of another type of numbers than the
                largest are not compared.
        """
        self._caches = caches
        self._tokens, self._token_layers = tokens, token_layers
        self._geometry, self._layer_bytes = geometry, layer_bytes
        self._offsets = layer_offsets(geometry, layer_bytes)
        self._reordered = reordered
        self._dtype = dtype
        kind = max(caches, key=lambda cache: cache[0].nbytes).dtype
        self._compared = [i for i, cache in enumerate(caches) if cache.dtype == kind]
        self.tolerance = TOLERANCE[dtype]

    def deviation(self, block_id: int, frame: NDArray[np.uint8]) -> float:
        """Distance of an HBM block from the stored one in ``frame``: of all layers the largest
        median of |computed - stored|, each in units of the layer's own size.

        The median does not see single tokens that a mixture of experts sent another way, nor
        padding; of other weights nearly all elements are far. NaN in one of the two is far. In some
        layers, see :func:`layers_of_tokens`, a high percentile counts, too, which a quarter of the
        elements of one token moves: at :data:`TOKEN_TOLERANCE` it counts as much as a median at
        the tolerance. Blocks for some milliseconds.
        """
        return max(self._of_layer(layer, block_id, frame) for layer in self._compared)

    def _of_layer(self, layer: int, block_id: int, frame: NDArray[np.uint8]) -> float:
        geometry = self._geometry
        computed = self._caches[layer][block_id].flatten().cpu().view(torch.uint8)
        begin = self._offsets[layer]
        if self._layer_bytes:
            stored = torch.from_numpy(frame[begin : begin + self._layer_bytes[layer]])
        else:
            pages = torch.from_numpy(frame[begin : begin + geometry.layer_bytes])
            stored = pages.view(-1, geometry.page_bytes)[:, : geometry.payload_bytes].flatten()
        count = min(len(computed), len(stored))
        one = computed[:count].view(self._dtype).float()
        other = stored[:count].view(self._dtype).float()
        if self._reordered is not None:
            one, other = _nearest_tokens(one, other, self._reordered)
        size = float(other.square().nanmean().sqrt())
        apart = (one - other).abs().nan_to_num(nan=torch.inf)
        found = float(apart.median())
        if layer in self._token_layers:
            rank = len(apart) - len(apart) // (4 * self._tokens)
            of_token = float(apart.kthvalue(max(1, rank)).values)
            found = max(found, of_token * self.tolerance / TOKEN_TOLERANCE)
        if not found:
            return 0.0
        return found / size if size else math.inf


def _nearest_tokens(
    computed: torch.Tensor, stored: torch.Tensor, layout: BlockLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest computed token for each stored one, K and V together, and the stored
    tokens themselves, both [elements].

    Nobody knows the order in which they were stored: it follows from what was computed then, and
    rounding may change it. A token that was computed otherwise is far from all of these.
    """

    def tokens(elements: torch.Tensor) -> torch.Tensor:
        shape = (layout.kv_heads, layout.groups, 2, layout.page_tokens, layout.head_size)
        pages = elements.view(shape).transpose(2, 3)
        return pages.reshape(layout.kv_heads, layout.block_tokens, 2 * layout.head_size)

    ours, theirs = tokens(computed), tokens(stored)
    nearest = torch.cdist(theirs, ours).nan_to_num(nan=torch.inf).argmin(dim=2, keepdim=True)
    return ours.take_along_dim(nearest, dim=1).flatten(), theirs.flatten()
