"""A request that did not fit into DRAM beside another one has it when that one has ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import kv_tokens, page_mode
from tests.kit.engine import Engine
from tests.kit.waiting import until
from vllm_ssdkv.connector import active_worker
from vllm_ssdkv.connector.worker import loads

WINDOW, CHUNK, BLOCK = 128, 256, 32
SHORT, LONG = prompts((1500, 1700), seed=53)
TOKENS = 90
DRAM = "14MiB"
"""Room for the long one, and for a quarter of the other one beside it."""

Devices = Callable[..., list[dict[str, str]]]


def test_what_is_streamed_is_kept_when_there_is_room(
    models: dict[str, Path], stock: Stock, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed beside the other one, then as a hit; tokens are stock vLLM's."""
    monkeypatch.setattr(loads, "PROMOTION_PAUSE_S", 0.0)
    (wanted,) = stock.answers("llama", [LONG], max_tokens=TOKENS)
    with Engine(
        models["llama"],
        ssdkv=page_mode(devices(2), window=WINDOW, dram=DRAM),
        kv_tokens=2 * kv_tokens(WINDOW, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_model_len=2048,
    ) as engine:
        for turn in ("computed", "hit"):
            read: list[int] = []

            def after_step(_: int, read: list[int] = read) -> None:
                mine = active_worker.worker()
                assert mine is not None
                stream = mine.store._stream
                read.append(0 if stream is None else stream.pages_on_ssd)
                # Steps are many enough, however long a promotion takes.
                until(lambda: not mine.store.busy(), "the end of a promotion")

            before = engine.ssdkv("context_blocks_promoted")
            engine.add(f"short {turn}", SHORT, max_tokens=20)
            engine.add(f"long {turn}", LONG, max_tokens=TOKENS)
            got = engine.run(after_step)
            engine.settle()
            assert got[f"long {turn}"] == wanted.tokens
            assert max(read) > 0, "both of them do not fit"
            assert not any(read[-20:]), "one of them does"
            assert engine.ssdkv("context_blocks_promoted") > before
