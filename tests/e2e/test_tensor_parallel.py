"""Two ranks: each has half of the KV heads and its own files; one index serves both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.engine import Engine
from tests.e2e.stock import Stock
from tests.e2e.workload import LONG, kv_tokens, page_mode, reuse_mode

CHUNK = 256
PROMPTS = LONG[1:5]


def data_files(devices: list[dict[str, str]]) -> set[tuple[str, str]]:
    return {
        (Path(d["path"]).name, file.name)
        for d in devices
        for file in Path(d["path"]).iterdir()
        if file.suffix == ".data"
    }


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_two_ranks(
    mode: str,
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
) -> None:
    wanted = [a.tokens for a in stock.answers("llama", PROMPTS)]
    places = devices(2)
    options = page_mode(places, dram="12MiB") if mode == "page" else reuse_mode(places)
    with Engine(
        models["llama"],
        ssdkv=options,
        kv_tokens=2 * kv_tokens(128, CHUNK) if mode == "page" else 16384,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        in_process=False,
    ) as engine:
        first = engine.answers(PROMPTS)
        again = engine.answers(PROMPTS)
        assert [a.tokens for a in first] == wanted
        assert [a.tokens for a in again] == wanted
        assert [a.cached for a in again] == [(len(p) - 1) // 32 * 32 for p in PROMPTS]
        assert (engine.ssdkv("context_pages_streamed", tier="ssd") > 0) is (mode == "page")
        for name in ("checksum_failures", "header_mismatches", "load_failures"):
            assert engine.ssdkv(name) == 0, name
    assert data_files(places) == {
        (Path(d["path"]).name, f"rank{rank}.data") for d in places for rank in (0, 1)
    }
