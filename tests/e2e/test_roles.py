"""Engines that only store, and engines that only load, alone and beside a transfer connector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT, reuse_mode
from tests.kit.engine import Engine

OTHERS = prompts((300, 100), seed=45)
BLOCK = 32


def alone(role: str, options: dict[str, object], transfers: Path) -> dict[str, Any]:
    return {
        "kv_connector": "SSDKVConnector",
        "kv_role": role,
        "kv_connector_extra_config": options,
    }


def beside_a_transfer(role: str, options: dict[str, object], transfers: Path) -> dict[str, Any]:
    """vLLM's example of a connector that hands KV from one engine to another, behind ours."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(transfers)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": [alone(role, options, transfers), example]},
    }


@pytest.mark.parametrize("transfer", [alone, beside_a_transfer])
def test_one_engine_stores_and_another_finds(
    transfer: Callable[[str, dict[str, object], Path], dict[str, Any]],
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    tmp_path: Path,
) -> None:
    places = reuse_mode(devices(2))

    def started(role: str) -> Engine:
        return Engine(
            models["llama"],
            kv_tokens=16384,
            enable_prefix_caching=False,
            max_num_batched_tokens=8192,  # vLLM's example does not know of parts of prompts
            kv_transfer_config=transfer(role, places, tmp_path),
        )

    wanted = [a.tokens for a in stock.answers("llama", SHORT)]
    unknown = [a.tokens for a in stock.answers("llama", OTHERS)]
    with started("kv_producer") as engine:
        for _ in range(2):
            assert [a.tokens for a in engine.answers(SHORT)] == wanted
        engine.settle()
        stored = engine.ssdkv("slots_ready")
        assert stored > sum(len(prompt) // BLOCK for prompt in SHORT) * 0.9
        assert engine.ssdkv("hit_tokens") == 0
        assert engine.ssdkv("slots_pinned") == 0
    with started("kv_consumer") as engine:
        for _ in range(2):
            assert [a.tokens for a in engine.answers(OTHERS)] == unknown
        found = engine.answers(SHORT)
        assert [a.tokens for a in found] == wanted
        hits = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in SHORT]
        assert [a.cached for a in found] == hits
        engine.settle()
        assert engine.ssdkv("hit_tokens") == sum(hits)
        assert engine.ssdkv("slots_ready") == stored
        assert engine.ssdkv("bytes_written") == 0
        assert engine.ssdkv("slots_pinned") == 0
    with started("kv_both") as engine:
        found = [engine.answers(OTHERS) for _ in range(2)]
        assert [[a.tokens for a in answers] for answers in found] == [unknown] * 2
        engine.settle()
        assert engine.ssdkv("hit_tokens") == sum((len(p) - 1) // BLOCK * BLOCK for p in OTHERS)
        assert engine.ssdkv("slots_ready") > stored
