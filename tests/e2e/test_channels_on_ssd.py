"""Channels of K on SSD in the real engine: what a token reads, answers, and a device that dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.models import make_llama, prompts
from tests.e2e.test_sparf import TIERS, assert_sound, context_bytes, fetched, kept
from tests.e2e.test_sparse import PAGE_BYTES, Recall
from tests.e2e.workload import kv_tokens, page_mode
from tests.kit.engine import Engine
from tests.kit.waiting import until
from vllm_ssdkv.connector import active_worker
from vllm_ssdkv.profiling.recall.recall import ask
from vllm_ssdkv.store.cache.frames import FrameState

DIRTY = (FrameState.HELD, FrameState.WRITING)

LARGE = 512
"""The least block for a channel page of 4 of a head's 64 channels."""
LONG = [ask("copy", 8000, seed) for seed in (1, 2)]
TOKENS = {"budget": 0.25, "granularity": "token", "channel_pages": "ssd"}


@pytest.mark.parametrize(("block", "most"), [(2048, 0.25), (1024, 0.34)])
def test_bytes_of_channels_on_ssd_and_an_eighth_of_the_pages(
    block: int, most: float, devices: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """16 of 128 channels, of which 2 or 4 share a page, as a share of what exact attention reads.

    The window counts in the budget, which therefore is an eighth of the context and the window.
    """
    model = make_llama(tmp_path / "model", layers=1, heads=4, head_dim=128, hidden=128)
    (prompt,) = prompts((4 * 2048 + block + 8,), 5)
    sparse = {"exact_below": 0, "channel_pages": "ssd", "page_cache": "4MiB", "prefetch": False}
    sparse["budget"] = (block + 1024) / (len(prompt) + 8)
    with Engine(
        model,
        ssdkv=page_mode(devices(4), window=block, dram="40MiB", selector="sparf", sparse=sparse),
        kv_tokens=2 * kv_tokens(block, 1024, block),
        dtype="bfloat16",
        block_size=block,
        max_num_batched_tokens=1024,
        max_model_len=12288,
    ) as engine:
        store = active_worker.worker().store

        def forget(step: int) -> None:
            # What is durable is read from the devices.
            until(lambda: store.frames.count(*DIRTY) == 0)
            store.frames.forget(np.arange(engine.scheduler.connector.scheduler.index.num_slots))

        engine.add("long", prompt, 12)
        engine.run(forget)
        whole = engine.ssdkv("sparse_pages_in_context") * 16 * 128 * 4
        token, channel = (
            [engine.ssdkv("sparse_bytes_fetched", pages=one, tier=tier) for tier in TIERS]
            for one in ("token", "channel")
        )
    assert 0.115 * whole <= sum(token) <= 0.125 * whole
    assert 0.18 * whole < sum(token + channel) <= most * whole
    assert token[2] > 0
    assert channel[2] > 0


@pytest.fixture(scope="module")
def large(
    devices: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recall]:
    """A store of large blocks, which was filled with channels in DRAM."""
    control = tmp_path_factory.mktemp("faults") / "faults.json"
    made = Recall(devices(4), "sparf", control, {"budget": 0.25, "summaries": "20MiB"}, "40MiB")
    made.block = made.window = LARGE
    made.longest = 10240
    made.start()
    assert made.right(LONG) == len(LONG)
    assert fetched(made, "channel", "ssd") == 0
    made.engine.close()
    made.options, made.dram = TOKENS, "16MiB"
    made.start()
    yield made
    made.faults()
    made.engine.close()


def test_channels_on_ssd_and_single_tokens_after_a_restart(large: Recall) -> None:
    """The same store: only the sums of V are brought when decode begins."""
    engine = large.engine
    assert large.right(LONG) == len(LONG)
    assert engine.ssdkv("hit_tokens", tier="ssd") >= sum(len(q.prompt) - LARGE for q in LONG)
    whole = context_bytes(large)
    assert 0 < kept(large, "token") <= 0.25 * whole
    assert kept(large, "token") < sum(fetched(large, "token", tier) for tier in TIERS)
    channels = [fetched(large, "channel", tier) for tier in TIERS]
    assert channels[2] > 0
    # The chosen 8 channels of each head lie in 2 to 8 of its 16 pages.
    assert whole / 16 <= sum(channels) <= whole / 4
    assert kept(large, "channel") == whole / 16
    blocks = sum(len(question.prompt) // LARGE for question in LONG)
    summaries = [fetched(large, "summary", tier) for tier in TIERS]
    assert 0 < sum(summaries) <= blocks * PAGE_BYTES
    assert_sound(large)


def test_a_device_that_dies_while_channels_are_read_from_it(large: Recall) -> None:
    def strike(step: int) -> None:
        if fetched(large, "channel", "ssd") > read:
            large.faults({"kind": "eio", "device": 2})

    read = fetched(large, "channel", "ssd")
    assert large.right(LONG, after_step=strike) == len(LONG)
    assert large.engine.ssdkv("device_lost", device=large.places[2]["path"]) == 1
    assert large.engine.ssdkv("recomputed_requests") > 0
