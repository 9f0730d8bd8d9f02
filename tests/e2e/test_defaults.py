"""`--kv-transfer-config` with nothing but the connector's name: reuse mode, in the user's cache."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import disk_directory
from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT, kv_tokens
from tests.kit.engine import Engine
from tests.kit.forks import environment
from vllm_ssdkv.base import host
from vllm_ssdkv.connector.scheduler.hit_verifier import FIRST_HITS
from vllm_ssdkv.store.placement import reconcile

BLOCK = 128
"""What vLLM chooses on the CPU when nobody names a block size."""


@pytest.fixture
def cache_home(roomy_disk: None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ssdkv-cache-", dir=disk_directory()) as root:
        yield Path(root)


def test_no_option_at_all(models: dict[str, Path], stock: Stock, cache_home: Path) -> None:
    wanted = [a.tokens for a in stock.answers("llama", SHORT)]
    with environment(XDG_CACHE_HOME=str(cache_home)):
        hits = [(len(p) - 1) // BLOCK * BLOCK for p in SHORT]
        # Of the first four a block is computed to verify them, unless there is but one.
        verified = [hit - BLOCK if hit > BLOCK else hit for hit in hits[:FIRST_HITS]]
        for cached in ([0] * len(SHORT), verified + hits[FIRST_HITS:]):
            with Engine(models["llama"], ssdkv={}, kv_tokens=16384, block_size=None) as engine:
                got = engine.answers(SHORT)
                assert [a.tokens for a in got] == wanted
                assert [a.cached for a in got] == cached
                engine.settle()
                assert engine.ssdkv("info", mode="reuse") == 1
    (store,) = Path(cache_home, "ssdkv").iterdir()
    assert {file.name for file in store.iterdir()} >= {"store.json", "journal", "rank0.data"}
    assert store.stat().st_mode & 0o777 == 0o700


def test_page_mode_waits_for_the_store_to_grow(
    models: dict[str, Path], stock: Stock, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt needs more blocks than the store has at first, and it takes no more than its
    limit: then it evicts."""
    monkeypatch.setattr(reconcile, "GROWTH_BYTES", 1 << 18)
    monkeypatch.setattr(host, "DEFAULT_CAPACITY_LIMIT", 16 << 20)
    long = prompts((1500, 1800, 1600), seed=11)
    wanted = [a.tokens for a in stock.answers("llama", long)]
    sizes: set[int] = set()

    def look(_: int) -> None:
        (data,) = cache_home.rglob("rank0.data")
        sizes.add(data.stat().st_size)

    with (
        environment(XDG_CACHE_HOME=str(cache_home)),
        Engine(
            models["llama"],
            ssdkv={"mode": "page", "hbm_window_tokens": 128, "dram_gib": "16MiB"}
            | {"io": {"staging": "4MiB"}},
            kv_tokens=3 * kv_tokens(128, 256),
            max_num_batched_tokens=256,
            max_model_len=2048,
        ) as engine,
    ):
        for number, prompt in enumerate(long):
            engine.add(str(number), prompt)
        got = engine.run(look)
        assert [got[str(number)] for number in range(len(long))] == wanted
        engine.settle()
        used = engine.ssdkv("slots") - engine.ssdkv("slots_free")
        assert used == engine.ssdkv("slots_ready")
    assert len(sizes) > 10
    assert max(sizes) <= 16 << 20
