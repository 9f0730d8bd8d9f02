"""Whole blocks between HBM and frames, in page mode."""

from __future__ import annotations

import os
import threading

import numpy as np
import torch

from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.kv_layout import paged_geometry
from vllm_ssdkv.connector.worker.block_copy import LeavingBlocks
from vllm_ssdkv.connector.worker.paged_port import PagedPort
from vllm_ssdkv.kernels.dense import CpuKernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.store.cache.frames import FrameCache, FrameState
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, round_up
from vllm_ssdkv.store.memory.arena import Arena

BLOCKS, LAYERS, HEADS, TOKENS, SIZE = 32, 2, 4, 32, 64


def test_the_loaders_thread_starts_no_team() -> None:
    """The threads of a second team of OpenMP would stay, and slow down those of the first."""
    config = SSDKVConfig.from_extra_config({"mode": "page", "devices": ["/nowhere"]})
    geometry = paged_geometry(config, LAYERS, HEADS, SIZE, TOKENS, torch.float32)
    layout = BlockLayout.unpadded(TOKENS, config.page_tokens, HEADS, SIZE, torch.float32)
    caches = [torch.randn(BLOCKS, layout.block_bytes // 4) for _ in range(LAYERS)]
    arena = Arena(round_up(BLOCKS * geometry.frame_bytes, PAGE_ALIGN))
    frames = FrameCache(arena, 0, geometry.frame_bytes, BLOCKS, BLOCKS)
    port = PagedPort(CpuKernels(threads=2), caches, layout, geometry, frames)
    blocks = np.arange(BLOCKS)
    held = frames.take(blocks, FrameState.HELD)
    port.save(LeavingBlocks(blocks, held))
    kept, started = [cache.clone() for cache in caches], set[str]()

    def load() -> None:
        before = set(os.listdir("/proc/self/task"))
        port.load(held, blocks)
        started.update(set(os.listdir("/proc/self/task")) - before)

    for cache in caches:
        cache.zero_()
    loader = threading.Thread(target=load)
    loader.start()
    loader.join()
    assert all(map(torch.equal, caches, kept))
    assert not started
    arena.close()
