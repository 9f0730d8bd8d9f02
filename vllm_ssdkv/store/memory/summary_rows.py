"""Sizes of what selectors look at: one row per slot, of records of pages or channels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.format.slot_geometry import PageRecord, SlotGeometry, round_up

ChannelTier = Literal["dram", "ssd"]
"""Tier of the slots' channel pages, for selectors."""


ROW_ALIGN = 64
"""Bytes, of which a row is a multiple."""


@dataclass(frozen=True, slots=True)
class SummaryRows:
    """Rows of a table of summaries that are being written.

    Attributes:
        address: Absolute address of each row, uint64 [n], which kernels reach; 0: there is none.
        channels: Byte of a row at which channel-major K begins, layer by layer; -1: rows have none.
    """

    address: NDArray[np.uint64]
    channels: int = -1


def with_summaries(
    geometry: SlotGeometry,
    page_tokens: int,
    *,
    channels: bool,
    scaled_from: int = 0,
    record: PageRecord = "bounds",
) -> SlotGeometry:
    """A slot of ``geometry`` with what a selector needs beside its KV.

    Args:
        geometry: Of KV alone.
        page_tokens: Tokens of a page.
        channels: Channel-major K and sums of V, else records of pages.
        scaled_from: Bytes of a number of K, to have it as codes; 0: no codes.
        record: What a record is.
    """
    records = geometry.layers * geometry.heads
    if record.startswith("codes"):
        # Some page, so that this is a geometry; how many, it says itself.
        coded = replace(geometry, summary_pages=1, scaled_from=scaled_from, record=record)
        pages = -(-summary_bytes(coded, page_tokens) // geometry.payload_bytes)
        return replace(coded, summary_pages=pages)
    if not channels:
        of_head = geometry.groups + (record == "spread_with_values")
        pages = -(-records * of_head // page_tokens)
        return replace(geometry, summary_pages=pages, record=record)
    return replace(
        geometry,
        summary_pages=-(-records // page_tokens),
        channel_pages=-(-geometry.pages_per_layer // 2),
    )


def _records(geometry: SlotGeometry) -> int:
    """Records of one layer."""
    if not geometry.channel_pages:
        return geometry.pages_per_layer + geometry.heads * (geometry.record == "spread_with_values")
    return geometry.heads


CODE_TILE = 16
"""Tokens whose codes lie side by side."""


def code_bytes(geometry: SlotGeometry, page_tokens: int) -> int:
    """Bytes of the codes of one layer and head: of tokens, their weights, and the mean."""
    head_size = geometry.payload_bytes // (2 * page_tokens * geometry.scaled_from)
    tokens = round_up(geometry.groups * page_tokens, CODE_TILE)
    of_token = -(-head_size * geometry.code_bits // 32) * 4
    return tokens * (of_token + 2) + round_up(head_size, 4) + 4


def summary_bytes(geometry: SlotGeometry, page_tokens: int) -> int:
    """Bytes of the summaries of one slot, without padding."""
    if geometry.code_bits:
        return geometry.layers * geometry.heads * code_bytes(geometry, page_tokens)
    return geometry.layers * _records(geometry) * (geometry.payload_bytes // page_tokens)


def channel_bytes(geometry: SlotGeometry) -> int:
    """Bytes of one layer's K in the channel pages of a slot, without padding."""
    if not geometry.channel_pages:
        return 0
    return geometry.pages_per_layer * geometry.payload_bytes // 2


def channels_offset(geometry: SlotGeometry, page_tokens: int) -> int:
    """Byte of a row of a table at which channel-major K begins, if it is kept there."""
    return round_up(summary_bytes(geometry, page_tokens), ROW_ALIGN)


def only_kernels_read(geometry: SlotGeometry) -> bool:
    """Check whether the host needs nothing of the summaries: no sum of V, which it adds up."""
    records_only = geometry.summary_pages > 0 and not geometry.channel_pages
    return records_only and geometry.record != "spread_with_values"


def device_row_bytes(geometry: SlotGeometry) -> int:
    """Bytes that the summaries of one slot take in memory of a device: whole pages."""
    return geometry.summary_pages * geometry.payload_bytes


def row_bytes(geometry: SlotGeometry, page_tokens: int, *, channels: bool) -> int:
    """Bytes that one slot takes in a table, which holds the slot's ``channels``, or does not."""
    size = channels_offset(geometry, page_tokens)
    return size + channels * round_up(geometry.layers * channel_bytes(geometry), ROW_ALIGN)
