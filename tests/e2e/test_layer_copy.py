"""Layer by layer, KV leaves HBM while later layers compute: through real vLLM, in both modes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.e2e.engine import Engine
from tests.e2e.stock import Stock
from tests.e2e.workload import LONG, kv_tokens, page_mode, reuse_mode
from vllm_ssdkv.connector.worker.layer_copy import MOST_WAITING

PROMPTS = LONG[1:6]
Devices = Callable[..., list[dict[str, str]]]


@pytest.mark.parametrize("mode", ["reuse", "page"])
def test_tokens(mode: str, models: dict[str, Path], stock: Stock, devices: Devices) -> None:
    wanted = stock.answers("llama", PROMPTS)
    options = reuse_mode(devices(2)) if mode == "reuse" else page_mode(devices(2))
    with Engine(
        models["llama"],
        ssdkv=options,
        kv_tokens=16384 if mode == "reuse" else kv_tokens(128, 512),
        enable_prefix_caching=False,
    ) as engine:
        get_kv_transfer_group().worker.layers.least_bytes = 1
        for _ in range(2):
            got = engine.answers(PROMPTS)
            assert [a.tokens for a in got] == [a.tokens for a in wanted]
        engine.settle()
        for m in engine.llm.get_metrics():
            if "copi" in m.name or "copy" in m.name or "layers_w" in m.name:
                print(m.name, m.labels, m.value)
