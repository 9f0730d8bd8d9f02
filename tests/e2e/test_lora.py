"""Adapters: KV of an adapter serves that adapter's weights only, whatever its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from tests.e2e.identity_table import RANK, make_adapter
from tests.e2e.models import prompts
from tests.e2e.workload import kv_tokens, page_mode, reuse_mode
from tests.kit.engine import Engine

PROMPT = prompts((700,), seed=12)[0]
HIT = (len(PROMPT) - 1) // 32 * 32


@pytest.mark.parametrize("mode", ["reuse", "page"])
def test_adapters_do_not_share_kv(
    mode: str,
    models: dict[str, Path],
    devices: Callable[..., list[dict[str, str]]],
    tmp_path: Path,
) -> None:
    adapters = {
        seed: make_adapter(models["llama"], tmp_path / f"adapter{seed}", seed) for seed in (1, 2)
    }
    one, two = (LoRARequest("helpful", i, str(path)) for i, path in adapters.items())
    options = {
        "max_num_batched_tokens": 256,
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": RANK,
        "enable_prefix_caching": False,
    }
    kinds = (None, one, two)
    with Engine(models["llama"], kv_tokens=8192, **options) as engine:
        wanted = [engine.answers([PROMPT], lora=kind)[0].tokens for kind in kinds]
    assert len(set(wanted)) == len(kinds)

    place = devices()
    store = reuse_mode(place) if mode == "reuse" else page_mode(place)
    size = 8192 if mode == "reuse" else kv_tokens(128, 256)
    with Engine(models["llama"], ssdkv=store, kv_tokens=size, **options) as engine:
        for cached in (0, HIT):
            got = [engine.answers([PROMPT], lora=kind)[0] for kind in kinds]
            assert [a.tokens for a in got] == wanted
            assert [a.cached for a in got] == [cached] * len(kinds)
