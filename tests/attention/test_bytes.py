"""Bytes that a token reads by SparF at a budget of an eighth, of those of exact attention.

A layer of a real model's sizes in 16 bit, from a store that has nothing in DRAM but summaries.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.attention.newest import newest_values
from tests.store.conftest import MakeStore, array, key_of, make_store
from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.attention.mean_value import RunningMeanV
from vllm_ssdkv.attention.sparse import SparseDecode
from vllm_ssdkv.connector.worker.block_copy import LeavingBlocks
from vllm_ssdkv.connector.worker.paged_port import PagedPort
from vllm_ssdkv.kernels.dense import select_kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, BlockSource, PartialState
from vllm_ssdkv.kernels.paged import select_page_kernels
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.kernels.step_clock import AttentionClock
from vllm_ssdkv.kernels.summary_builder import KernelSummaryBuilder
from vllm_ssdkv.sparse.protocol import Budget
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.summary_rows import with_summaries

__all__ = ["make_store"]

CPU = torch.device("cpu")
HEADS, QUERY_HEADS, HEAD_SIZE, CHANNELS = 2, 8, 128, 16
CONTEXT = 8192
SCALE = HEAD_SIZE**-0.5


def shares(make_store: MakeStore, block: int, page: int, *, ssd: bool) -> tuple[float, float]:
    """Of all that is read, and of what is read from SSD, for blocks and pages of so many tokens."""
    layout = BlockLayout.unpadded(block, page, HEADS, HEAD_SIZE, torch.float16)
    plain = SlotGeometry("paged", 1, HEADS, block // page, 4 * page * HEAD_SIZE)
    geometry = with_summaries(plain, page, channels=True)
    slots = np.arange(CONTEXT // block)
    count = len(slots)
    rig = make_store(
        geometry,
        block_tokens=block,
        channels="ssd" if ssd else "dram",
        slots=count,
        frames=max(8, count),
        summary_rows=count,
        places=geometry.tail_pages,
        summarizer=KernelSummaryBuilder(layout, geometry),
    )
    torch.manual_seed(1)
    cache = torch.randn(count + 1, layout.block_bytes // 2).half()
    port = PagedPort(select_kernels(CPU), [cache], layout, geometry, rig.store.frames)
    rig.store.extend_context("r", 0, slots)
    port.save(LeavingBlocks(slots, rig.store.reserve_frames(slots, wait=False)))
    rig.store.flush(slots, array([1] * count), [key_of(slot) for slot in slots.tolist()])
    assert rig.store.drain(30)
    rig.store.frames.forget(slots)

    batch = RowBatch.build(
        np.arange(2),
        np.array([CONTEXT + 1]),
        np.arange(count + 1, dtype=np.int32)[None],
        np.array([count]),
        np.arange(1),
        block,
    )
    query = torch.randn(1, QUERY_HEADS, HEAD_SIZE)
    state = PartialState.empty(1, QUERY_HEADS, HEAD_SIZE, CPU)
    source = BlockSource.of_cache(cache, batch.window_ids, batch.window_position)
    select_kernels(CPU).attend(query, state, batch.window, source, layout=layout, scale=SCALE)
    selector = SparfSelector(Budget(share=0.125), CHANNELS, "page", 0, CpuScoringKernels())
    chosen = rig.store.choose([slots], [0])
    decode = SparseDecode({0: selector}, chosen, layout, [0], RunningMeanV(1, layout), ["r"])
    kernels, clock = select_page_kernels(CPU), AttentionClock()
    clock.start()
    value = newest_values(cache, layout, batch)
    decode.attend(kernels, clock, 0, query, value, state, batch, cache, SCALE)
    chosen.close()
    assert chosen.poisoned == set()
    assert chosen.fetched.cache == chosen.fetched_channels.cache == 0
    pages = chosen.fetched.ssd + chosen.fetched_channels.ssd
    in_dram = 0 if ssd else decode.counts.channel_bytes
    whole = decode.counts.context * geometry.payload_bytes
    assert whole == CONTEXT * HEADS * HEAD_SIZE * 4
    read = pages * geometry.page_bytes
    return (read + in_dram) / whole, read / whole


@pytest.mark.parametrize("block", [16, 128])
def test_with_channels_in_dram(make_store: MakeStore, block: int) -> None:
    """An eighth of the tokens, and an eighth of K, which is half of the KV."""
    everything, ssd = shares(make_store, block, 16, ssd=False)
    assert (everything, ssd) == (1 / 8 + 1 / 16, 1 / 8)


def test_with_channels_on_ssd_one_to_a_page(make_store: MakeStore) -> None:
    """All of what is read is used."""
    everything, ssd = shares(make_store, 2048, 8, ssd=True)
    assert everything == ssd == 1 / 8 + 1 / 16


def test_channels_on_ssd_bring_others_along(make_store: MakeStore) -> None:
    everything, _ = shares(make_store, 1024, 8, ssd=True)
    assert 1 / 8 + 1 / 16 < everything < 1 / 8 + 1 / 8
