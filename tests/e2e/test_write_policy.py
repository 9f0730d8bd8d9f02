"""Writes to the drives with the real workers: counted, limited, and never missed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT, kv_tokens, page_mode, reuse_mode
from tests.kit.engine import Engine, Tokens
from vllm_ssdkv.base.sizes import MIB

BUDGET = 16 * MIB
MANY = prompts((2000, 2001, 2002), seed=30)
NEWS = prompts((500,), seed=31)

Devices = Callable[..., list[dict[str, str]]]


def ask(engine: Engine, stock: Stock, batch: list[Tokens]) -> list[int]:
    """Tokens that were found of each prompt; answers are those of stock vLLM."""
    got = engine.answers(batch)
    assert [a.tokens for a in got] == [a.tokens for a in stock.answers("llama", batch)]
    engine.settle()
    return [a.cached for a in got]


def test_bytes_and_budgets_outlive_an_engine(
    models: dict[str, Path], stock: Stock, devices: Devices
) -> None:
    (place,) = devices(1)
    store = reuse_mode([{**place, "daily_write_budget": BUDGET, "tbw": "1GiB"}])
    for batch in (MANY, NEWS):
        stock.answers("llama", batch)
    with Engine(models["llama"], ssdkv=store, kv_tokens=8192) as engine:
        for prompt in MANY:
            assert ask(engine, stock, [prompt]) == [0]
        written = engine.ssdkv("wear_bytes")
        assert written == engine.ssdkv("bytes_written")
        assert BUDGET / 2 < written <= BUDGET
        assert engine.ssdkv("wear_used") == written / 2**30
        assert engine.ssdkv("write_budget_used") == written / BUDGET
        assert engine.ssdkv("stores_skipped", cause="budget") > 0
    with Engine(models["llama"], ssdkv=store, kv_tokens=8192) as engine:
        assert ask(engine, stock, NEWS) == [0]
        assert engine.ssdkv("wear_bytes") == written
        assert engine.ssdkv("stores_skipped", cause="budget") == len(NEWS[0]) // 32 + 1
        assert ask(engine, stock, MANY[:1])[0] > 1900, "what is stored is found"


def test_page_mode_attends_to_what_it_holds_back(
    models: dict[str, Path], stock: Stock, devices: Devices
) -> None:
    stock.answers("llama", SHORT)
    with Engine(
        models["llama"],
        ssdkv=page_mode(devices(2), window=512, dram="64MiB", admission="second_use"),
        kv_tokens=kv_tokens(512, 512) * 3,
    ) as engine:
        assert ask(engine, stock, SHORT) == [0] * len(SHORT)
        blocks = sum((len(prompt) + 40 - 1) // 32 for prompt in SHORT)
        stored = engine.ssdkv("slots_stored")
        assert 0 < stored < blocks
        assert engine.ssdkv("stores_skipped", cause="admission") > 0
        found = ask(engine, stock, SHORT)
        # Long prompts are found up to the window that they had when they ended.
        assert found[0] > 2000
        assert engine.ssdkv("dram_frames_dirty") == 0
