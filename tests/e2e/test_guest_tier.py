"""A tier from outside this package keeps the blocks, with the real vLLM: whatever it does, the
tokens are those of stock vLLM."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT
from tests.kit.engine import Engine

EXAMPLES = Path(__file__).parents[2] / "examples" / "guests"
BLOCK = 32
HITS = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in SHORT]


@pytest.fixture
def start(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Engine]]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("SSDKV_FOLDER", str(tmp_path))
    options = {"tier": "folder_tier:FolderTier", "verify_hits": 0, "load": "always"}
    yield lambda: Engine(
        models["llama"],
        ssdkv={**options, "dram_gib": "64MiB"},
        kv_tokens=16384,
        enable_prefix_caching=False,
    )
    sys.modules.pop("folder_tier", None)


def fail(*_: object) -> bool:
    raise OSError("the tier is away")


def test_blocks_are_found_after_a_restart_and_not_by_another_version(
    start: Callable[[], Engine], stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [answer.tokens for answer in stock.answers("llama", SHORT)]
    for hits in ([0] * len(SHORT), HITS):
        with start() as engine:
            got = engine.answers(SHORT)
            assert [answer.tokens for answer in got] == wanted
            assert [answer.cached for answer in got] == hits
            assert engine.ssdkv("thread_errors") == 0
    monkeypatch.setattr(importlib.import_module("folder_tier").FolderTier, "version", 2)
    with start() as engine:
        got = engine.answers(SHORT[:1])
        assert [(answer.tokens, answer.cached) for answer in got] == [(wanted[0], 0)]


def test_what_fails_or_is_spoiled_is_computed_and_stored_again(
    start: Callable[[], Engine],
    stock: Stock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [answer.tokens for answer in stock.answers("llama", SHORT)]

    def ask(engine: Engine) -> list[int]:
        got = engine.answers(SHORT)
        engine.settle()
        assert [answer.tokens for answer in got] == wanted
        return [answer.cached for answer in got]

    with start() as engine:
        folder: Any = importlib.import_module("folder_tier").FolderTier
        with monkeypatch.context() as patch:
            patch.setattr(folder, "put", fail)
            assert ask(engine) == [0] * len(SHORT)
        errors = engine.ssdkv("thread_errors", thread="tier")
        assert errors >= sum(len(prompt) // BLOCK for prompt in SHORT)
        assert ask(engine) == [0] * len(SHORT), "nothing was stored"
        assert ask(engine) == HITS
        for name in ("load", "find"):
            with monkeypatch.context() as patch:
                patch.setattr(folder, name, fail)
                ask(engine)
        assert engine.ssdkv("thread_errors", thread="tier") > errors
        assert engine.ssdkv("load_failures") > 0
        ask(engine)
        assert ask(engine) == HITS, "what was computed is stored again"
        failures = engine.ssdkv("load_failures")
        for path in tmp_path.rglob("*"):
            if path.is_file():
                stored = bytearray(path.read_bytes())
                stored[-1] ^= 1
                path.write_bytes(stored)
        ask(engine)
        assert engine.ssdkv("load_failures") > failures
