"""A store too small for everything: old blocks give way, requests wait, answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import kv_tokens, page_mode, reuse_mode
from tests.kit.engine import Engine

BLOCK, CHUNK = 32, 256
LARGE = prompts((1500, 1800, 1200, 1600, 900, 1700), seed=11)
MAX_MODEL_LEN = 2048

Devices = Callable[..., list[dict[str, str]]]


def test_page_mode_waits_for_slots(models: dict[str, Path], stock: Stock, devices: Devices) -> None:
    """HBM has room for all six requests, the store only for one or two at a time."""
    wanted = [a.tokens for a in stock.answers("llama", LARGE)]
    with Engine(
        models["llama"],
        ssdkv=page_mode(devices(1, "16MiB")),
        kv_tokens=6 * kv_tokens(128, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_model_len=MAX_MODEL_LEN,
    ) as engine:
        slots = engine.scheduler.connector.scheduler.index.num_slots
        assert MAX_MODEL_LEN // BLOCK < slots < sum(map(len, LARGE[:3])) // BLOCK
        most = 0

        def look(_: int) -> None:
            nonlocal most
            most = max(most, len(engine.scheduler.running))

        for turn in range(2):
            for number, prompt in enumerate(LARGE):
                engine.add(f"{turn} {number}", prompt)
            got = engine.run(look)
            assert [got[f"{turn} {number}"] for number in range(len(LARGE))] == wanted
        assert most < len(LARGE)
        engine.settle()
        assert engine.ssdkv("slots_evicted") > 0
        assert engine.ssdkv("slots_pinned") == 0
        assert engine.ssdkv("slots_ready") + engine.ssdkv("slots_free") == slots


def test_reuse_mode_evicts(models: dict[str, Path], stock: Stock, devices: Devices) -> None:
    wanted = [a.tokens for a in stock.answers("llama", LARGE)]
    with Engine(
        models["llama"],
        ssdkv=reuse_mode(devices(1, "16MiB"), dram="8MiB"),
        kv_tokens=8192,
        max_num_batched_tokens=CHUNK,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
    ) as engine:
        for _ in range(2):
            got = engine.answers(LARGE)
            assert [a.tokens for a in got] == wanted
            engine.settle()
        assert engine.ssdkv("slots_evicted") > 0
        # The newest prompts are still known.
        (last,) = engine.answers(LARGE[-1:])
        assert last.tokens == wanted[-1]
        assert last.cached > 0
        engine.settle()
        assert engine.ssdkv("slots_pinned") == 0
        assert engine.ssdkv("dram_frames_dirty") == 0


def test_reuse_mode_completes_what_hbm_still_has(
    models: dict[str, Path], stock: Stock, devices: Devices
) -> None:
    """vLLM's own prefix cache drops tails first: the head comes from HBM, the rest from us."""
    first, *others = LARGE
    wanted = [a.tokens for a in stock.answers("llama", LARGE)]
    with Engine(
        models["llama"],
        ssdkv=reuse_mode(devices()),
        kv_tokens=2048,
        max_num_batched_tokens=CHUNK,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1,
    ) as engine:
        for prompt, answer in zip([first, others[3]], [wanted[0], wanted[4]], strict=True):
            assert engine.answers([prompt])[0].tokens == answer
        local, ours = (
            engine.metric("vllm:prefix_cache_hits"),
            engine.metric("vllm:external_prefix_cache_hits"),
        )
        (again,) = engine.answers([first])
        assert again.tokens == wanted[0]
        from_hbm = engine.metric("vllm:prefix_cache_hits") - local
        from_store = engine.metric("vllm:external_prefix_cache_hits") - ours
        assert from_hbm > 0
        assert from_store > 0
        assert from_hbm + from_store == (len(first) - 1) // BLOCK * BLOCK
