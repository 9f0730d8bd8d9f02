"""`--kv-transfer-config` with nothing but the connector's name: reuse mode, in the user's cache."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import disk_directory
from tests.e2e.engine import Engine, environment
from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT

BLOCK = 128
"""What vLLM chooses on the CPU when nobody names a block size."""


@pytest.fixture
def cache_home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ssdkv-cache-", dir=disk_directory()) as root:
        yield Path(root)


def test_no_option_at_all(models: dict[str, Path], stock: Stock, cache_home: Path) -> None:
    wanted = [a.tokens for a in stock.answers("llama", SHORT)]
    with environment(XDG_CACHE_HOME=str(cache_home)):
        for cached in ([0] * len(SHORT), [(len(p) - 1) // BLOCK * BLOCK for p in SHORT]):
            with Engine(models["llama"], ssdkv={}, kv_tokens=16384, block_size=None) as engine:
                got = engine.answers(SHORT)
                assert [a.tokens for a in got] == wanted
                assert [a.cached for a in got] == cached
                engine.settle()
                assert engine.ssdkv("info", mode="reuse") == 1
    (store,) = Path(cache_home, "ssdkv").iterdir()
    assert {file.name for file in store.iterdir()} >= {"store.json", "journal", "rank0.data"}
    assert store.stat().st_mode & 0o777 == 0o700
