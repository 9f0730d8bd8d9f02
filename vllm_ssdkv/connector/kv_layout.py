"""Shape of one rank's KV: layers, heads and numbers, and the slots that hold them. No vLLM."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, PageRecord, SlotGeometry
from vllm_ssdkv.store.memory.summary_rows import with_summaries

JOINED_PAGES: Final = 128
"""Pages of a slot of layers of several sizes, at least, where these fill so many: the last page is
partly unused, which is then less than 1 % of the slot. Half as many more at most, unless layers are
so small that pages are of 4096 bytes: their checksums fit a header of 4096, tags one of 8192."""

FLOAT8_TYPES: Final = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Element types by their names in ``--kv-cache-dtype``; in vLLM's caches they are bytes."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV of one rank: the layers of its largest KV cache group, in order of execution.

    ``overlaid``: layers of each other group, the first of which lies where the first of the largest
    group does, and so on. ``has_states``: some have a state in place of KV. ``padded``: of some
    layers what a block holds need not fill it.
    """

    layer_names: tuple[str, ...]
    block_tokens: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    geometry: SlotGeometry
    ranks: int
    """Number of ranks that write: tensor-parallel ones of all pipeline stages, of :attr:`sharers`
    the first."""
    num_blocks: int
    """Number of blocks in HBM."""
    overlaid: tuple[tuple[str, ...], ...] = ()
    has_states: bool = False
    cache_dtype: str = "auto"
    """vLLM's name of what numbers are stored as."""
    query_heads: int = 0
    """Number of query heads of this rank; 0: not known."""
    padded: bool = False
    chain_tokens: int = 0
    """Tokens of a block in HBM of the first group that attends to everything; 0: as many as
    ``block_tokens``, which are whole blocks of every group."""
    chain_dtype: torch.dtype | None = None
    """Dtype of that group; None: ``dtype``, that of the first with attention."""
    chain_layers: tuple[str, ...] = ()
    """Layers of that group, which lie in the first ones of a slot. A stage of a pipeline may have
    none."""
    layer_bytes: tuple[int, ...] = ()
    """Bytes of a block of each layer, where they are of several sizes: in a slot they then lie back
    to back, whatever its pages are. Empty: a page holds one layer."""
    sharers: int = 1
    """Number of tensor-parallel ranks that have the same KV, of which one copy is stored."""

    @property
    def all_layers(self) -> tuple[str, ...]:
        """Layers of every group."""
        return self.layer_names + tuple(name for group in self.overlaid for name in group)


def joined_geometry(layer_bytes: Sequence[int]) -> SlotGeometry:
    """Geometry of slots of layers of several sizes, not encrypted: these lie back to back, and are
    cut into pages that are all as large.

    Example:
        >>> joined_geometry([73728, 8448] * 61).slot_bytes / sum([73728, 8448] * 61) < 1.002
        True
    """
    whole = sum(layer_bytes)
    page = max(1, whole // JOINED_PAGES // PAGE_ALIGN) * PAGE_ALIGN
    return SlotGeometry("opaque", -(-whole // page), 1, 1, page)


def layer_offsets(geometry: SlotGeometry, layer_bytes: Sequence[int] = ()) -> list[int]:
    """Offset of each layer in a slot, with :attr:`KVLayout.layer_bytes` ``layer_bytes``."""
    if not layer_bytes:
        return [geometry.layer_offset(layer) for layer in range(geometry.layers)]
    return list(itertools.accumulate(layer_bytes[:-1], initial=geometry.header_bytes))


@functools.lru_cache(maxsize=8)
def block_layout(layout: KVLayout, page_tokens: int) -> BlockLayout:
    """Layout of a block in HBM: pages back to back, ordered head, group."""
    return BlockLayout.unpadded(
        layout.block_tokens, page_tokens, layout.kv_heads, layout.head_size, layout.dtype
    )


def paged_geometry(
    config: SSDKVConfig,
    layers: int,
    kv_heads: int,
    head_size: int,
    block_tokens: int,
    dtype: torch.dtype,
) -> SlotGeometry:
    """Geometry of page mode's slots, not encrypted. ``block_tokens`` are whole pages."""
    payload = 2 * config.page_tokens * head_size * dtype.itemsize
    groups = block_tokens // config.page_tokens
    geometry = SlotGeometry("paged", layers, kv_heads, groups, payload)
    if config.selector == "exact":
        return geometry
    return with_summaries(
        geometry,
        config.page_tokens,
        channels=config.scores_channels,
        scaled_from=dtype.itemsize if config.scorer == "codes" else 0,
        record=_record(config),
    )


def _record(config: SSDKVConfig) -> PageRecord:
    if config.scorer == "codes":
        records: dict[int, PageRecord] = {1: "codes_1", 2: "codes_2", 4: "codes_4"}
        return records[config.sparse.code_bits]
    if config.scorer != "spread":
        return "bounds"
    return "spread_with_values" if config.sparse.estimate_rest else "spread"
