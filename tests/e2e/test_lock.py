"""Two engines on one directory: the second refuses, the first notices nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import kv_tokens, page_mode
from tests.kit.engine import Engine
from tests.kit.engine_process import EngineProcess

CHUNK = 256


def test_the_second_engine_refuses(
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    tmp_path: Path,
) -> None:
    batch = prompts((1500, 700), seed=31)
    wanted = [a.tokens for a in stock.answers("llama", batch)]
    places, log = devices(), tmp_path / "second.log"
    options = page_mode(places)
    with Engine(
        models["llama"],
        ssdkv=options,
        kv_tokens=2 * kv_tokens(128, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_model_len=2048,
    ) as engine:
        assert [a.tokens for a in engine.answers(batch)] == wanted
        second = EngineProcess(
            models["llama"], options, log, max_num_batched_tokens=CHUNK, max_model_len=2048
        )
        with second, pytest.raises(RuntimeError, match="the engine has ended"):
            second.result()
        (line, *_) = [s for s in log.read_text().splitlines() if "StoreLockedError: " in s]
        assert places[0]["path"] in line
        assert str(os.getpid()) in line
        assert [a.tokens for a in engine.answers(batch)] == wanted
        for name in ("checksum_failures", "header_mismatches", "slots_dropped"):
            assert engine.ssdkv(name) == 0
