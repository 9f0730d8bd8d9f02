"""Arrivals, aborts and preemptions in random order over a small store: tokens stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.stock import Stock
from tests.e2e.turmoil import ANSWER, PROMPTS, Turmoil
from tests.e2e.workload import kv_tokens, page_mode, reuse_mode
from tests.kit.engine import Engine

CHUNK = 128
ACTIONS = 80


@pytest.mark.parametrize("mode", ["page", "reuse"])
@pytest.mark.parametrize("seed", [1, 2])
def test_turmoil(
    seed: int,
    mode: str,
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
) -> None:
    wanted = [a.tokens for a in stock.answers("llama", PROMPTS, ANSWER)]
    place = devices(1, "16MiB")
    options = page_mode(place, window=96) if mode == "page" else reuse_mode(place, dram="8MiB")
    with Engine(
        models["llama"],
        ssdkv=options,
        kv_tokens=2 * kv_tokens(96, CHUNK) if mode == "page" else 2400,
        max_num_batched_tokens=CHUNK,
        max_model_len=2048,
        max_num_seqs=5,
    ) as engine:
        likely = {"add": 5, "step": 8, "abort": 1, "preempt": 3}
        turmoil = Turmoil(engine, random.Random(seed), wanted, likely)
        # The run was as eventful as it is meant to be.
        assert turmoil.run(ACTIONS) > ACTIONS // 10
        assert engine.ssdkv("hit_tokens") > 0
        assert turmoil.preempted > 0
        assert engine.ssdkv("slots_pinned") == 0
        assert engine.ssdkv("dram_frames_dirty") == 0
        engine.assert_nothing_held()
        for name in ("checksum_failures", "header_mismatches", "load_failures", "slots_dropped"):
            assert engine.ssdkv(name) == 0, name
