"""Requests that are given up leave nothing behind and do not disturb the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import kv_tokens, page_mode
from tests.kit.engine import Engine

CHUNK = 256
GIVEN_UP, KEPT, SMALL = prompts((3000, 1500, 300), seed=9)


@pytest.fixture(scope="module")
def engine(
    models: dict[str, Path], stock: Stock, devices: Callable[..., list[dict[str, str]]]
) -> Iterator[Engine]:
    stock.answers("llama", [GIVEN_UP, KEPT, SMALL])
    with Engine(
        models["llama"],
        ssdkv=page_mode(devices(), window=128),
        kv_tokens=3 * kv_tokens(128, CHUNK),
        max_num_batched_tokens=CHUNK,
    ) as engine:
        yield engine


def in_prefill(engine: Engine) -> None:
    for _ in range(4):
        assert "given up" not in engine.step()


def in_decode(engine: Engine) -> None:
    while len(engine.step().get("given up", ())) < 5:
        pass


def while_queued(engine: Engine) -> None:
    """Before any step has seen it."""


def while_loading(engine: Engine) -> None:
    """Its prefix was stored by the test before; one step later the load is under way."""
    engine.step()
    status = {r.status.name for r in engine.scheduler.requests.values()}
    assert "WAITING_FOR_REMOTE_KVS" in status


# The order matters: nothing must be stored before the first, and much before the last.
@pytest.mark.parametrize("moment", [while_queued, in_prefill, in_decode, while_loading])
def test_abort(engine: Engine, stock: Stock, moment: Callable[[Engine], None]) -> None:
    kept, small = (a.tokens for a in stock.answers("llama", [KEPT, SMALL]))
    engine.add("given up", GIVEN_UP)
    engine.add("kept", KEPT)
    moment(engine)
    engine.abort("given up")
    engine.add("small", SMALL)
    assert engine.run() == {"kept": kept, "small": small}

    engine.settle()
    assert engine.ssdkv("slots_pinned") == 0
    assert engine.ssdkv("dram_frames_dirty") == 0
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    ours = engine.scheduler.connector.scheduler
    assert ours.remembers() == {}
    assert ours.index.gauges()["reserved"] == 0


def test_the_same_prompt_afterwards(engine: Engine, stock: Stock) -> None:
    (wanted,) = stock.answers("llama", [GIVEN_UP])
    (got,) = engine.answers([GIVEN_UP])
    assert got.tokens == wanted.tokens
    # What was computed before the request was given up is used.
    assert got.cached > 0
