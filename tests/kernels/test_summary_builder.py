"""Tails of slots: what devices hold of them, and what is made from frames alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tests.attention.test_sparse import (
    BLOCK,
    CHANNELS,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    LAYOUT,
    Rows,
    make_rows,
    make_store,
)
from tests.store.tails import addresses
from vllm_ssdkv.kernels.summary_builder import KernelSummaryBuilder
from vllm_ssdkv.store.memory.summary_rows import channel_bytes

__all__ = ["make_rows", "make_store"]


def tail(rows: Rows) -> torch.Tensor:
    """Payloads of the first slot of row 1 that its devices have behind KV, [pages, 4096]."""
    geometry, data = rows.rig.geometry, bytearray()
    slot = int(rows.contexts()[1][0])
    for offset in range(geometry.frame_bytes, geometry.slot_bytes, geometry.page_bytes):
        device, begin = rows.rig.place(slot, offset)
        data += rows.rig.devices[device].path.read_bytes()[begin : begin + geometry.page_bytes]
    return torch.frombuffer(data, dtype=torch.uint8).view(-1, geometry.page_bytes)


def test_slots_hold_sums_and_channels_as_documented(make_rows: Callable[..., Rows]) -> None:
    """``docs/format.md``, Geometry: a summary page, then two channel pages a layer."""
    rows = make_rows(geometry=CHANNELS)
    pages = tail(rows)
    for layer in range(LAYERS):
        keys, values = (kv[1][layer, :BLOCK] for kv in (rows.keys, rows.values))
        sums = pages[0].view(16, 256)[2 * layer : 2 * layer + 2].view(torch.float32)
        torch.testing.assert_close(sums[:, :HEAD_SIZE], values.sum(0))
        assert not sums[:, HEAD_SIZE:].any()
        channels = pages[1 + 2 * layer : 3 + 2 * layer].reshape(-1).view(torch.float32)
        assert torch.equal(channels.view(HEADS, HEAD_SIZE, BLOCK), keys.permute(1, 2, 0))


def test_channels_of_a_layer_are_those_of_the_tail() -> None:
    geometry = CHANNELS
    count, size = 3, channel_bytes(geometry)
    frames = np.random.default_rng(4).normal(size=(count, geometry.frame_bytes // 4))
    frames = frames.astype(np.float32)
    tails = np.zeros((count, geometry.tail_pages, geometry.page_bytes), dtype=np.uint8)
    made = np.zeros((count, size), dtype=np.uint8)
    summaries = KernelSummaryBuilder(LAYOUT, geometry)
    summaries.make_tails(addresses(frames), addresses(tails))
    for layer in range(LAYERS):
        summaries.make_channels(
            addresses(frames) + np.uint64(geometry.layer_offset(layer)), addresses(made)
        )
        first = geometry.first_channel_page(layer) - geometry.kv_pages
        pages = tails[:, first : first + geometry.channel_pages, : geometry.payload_bytes]
        np.testing.assert_array_equal(made, pages.reshape(count, -1)[:, :size])
        assert made.any()
