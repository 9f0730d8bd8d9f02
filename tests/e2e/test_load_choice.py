"""Hits on a slow drive are computed, on a fast one loaded, and nobody can tell by the answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import reuse_mode
from tests.kit.clock import Clock
from tests.kit.engine import Engine, Tokens
from vllm_ssdkv.connector.scheduler import load_or_recompute
from vllm_ssdkv.store.io import slot_io, slot_request
from vllm_ssdkv.store.io.testing import throttled
from vllm_ssdkv.store.read import prefix_loader

BLOCK = 32
LEARN, LONG, SHORT, PROBED, NEWS, OTHER_NEWS = prompts((1000, 2000, 300, 290, 700, 600), seed=20)
SLOW_S = 60.0
"""Of a read, in the model's time: far more than this machine needs to compute SHORT, however busy
it is."""

Devices = Callable[..., list[dict[str, str]]]


@pytest.fixture(autouse=True)
def _model_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads take the time that the drive's model says, and nobody waits for it."""
    Clock().govern(monkeypatch, slot_io, slot_request, prefix_loader, throttled)


@pytest.fixture(scope="module")
def place(models: dict[str, Path], stock: Stock, devices: Devices) -> list[dict[str, str]]:
    """A store with all prompts but the news."""
    where = devices(2)
    stored = [LEARN, LONG, SHORT, PROBED]
    stock.answers("llama", [*stored, NEWS, OTHER_NEWS])
    with Engine(models["llama"], ssdkv=reuse_mode(where), kv_tokens=8192) as engine:
        assert [ask(engine, stock, prompt) for prompt in stored] == [0, 0, 0, 0]
        engine.settle()
    return where


def ask(engine: Engine, stock: Stock, prompt: Tokens) -> int:
    """Tokens of the prompt that were found; its answer is that of stock vLLM."""
    (got,) = engine.answers([prompt])
    (right,) = stock.answers("llama", [prompt])
    assert got.tokens == right.tokens
    return got.cached


def hit(prompt: Tokens) -> int:
    return (len(prompt) - 1) // BLOCK * BLOCK


def engine_on(model: Path, place: list[dict[str, str]], latency: float) -> Engine:
    io = {"staging": "4MiB", "deadline": 2 * SLOW_S, "throttle": [{"latency": latency}]}
    options = reuse_mode(place, load="auto", io=io)
    return Engine(model, ssdkv=options, kv_tokens=8192, enable_prefix_caching=False)


def test_a_slow_drive(
    models: dict[str, Path],
    stock: Stock,
    place: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine_on(models["llama"], place, SLOW_S) as engine:
        assert ask(engine, stock, NEWS) == 0
        # Nothing is known of the drive: the first hit is loaded.
        assert ask(engine, stock, LEARN) == hit(LEARN)
        assert ask(engine, stock, SHORT) == 0
        assert engine.ssdkv("hit_tokens_computed") == hit(SHORT)
        assert engine.ssdkv("seconds_saved", by="computing") >= 1  # vLLM shows whole numbers
        assert engine.ssdkv("estimated_load_latency_seconds") > SLOW_S / 4
        # What is in DRAM needs no drive.
        assert ask(engine, stock, LEARN) == hit(LEARN)
        assert engine.ssdkv("hit_tokens", tier="dram") == hit(LEARN)
        # Beside this one a few of its blocks are read, which takes longer than its answer.
        monkeypatch.setattr(load_or_recompute, "PROBE_INTERVAL_S", 0.0)
        assert ask(engine, stock, PROBED) == 0
        engine.settle()
        assert engine.ssdkv("load_probes") == 1
        assert engine.ssdkv("hit_tokens", tier="ssd") == hit(LEARN)
        assert engine.ssdkv("slots_pinned") == 0


def test_a_fast_drive(models: dict[str, Path], stock: Stock, place: list[dict[str, str]]) -> None:
    with engine_on(models["llama"], place, 0.0) as engine:
        assert ask(engine, stock, OTHER_NEWS) == 0
        for prompt in (LEARN, LONG):
            assert ask(engine, stock, prompt) == hit(prompt)
        assert engine.ssdkv("hit_tokens_computed") == 0
        assert engine.ssdkv("hit_tokens", tier="ssd") == hit(LEARN) + hit(LONG)
        assert engine.ssdkv("estimated_prefill_tokens_per_second") > 0
