"""HBM use per request is bounded by the window and one chunk, whatever the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path

import pytest

from tests.e2e.workload import LONG, kv_tokens, page_mode
from tests.kit.engine import Engine

BLOCK, WINDOW, CHUNK = 32, 192, 256
BOUND = ceil((WINDOW + CHUNK) / BLOCK) + 1
AT_ONCE = 4


@pytest.fixture(scope="module")
def engine(
    models: dict[str, Path], devices: Callable[..., list[dict[str, str]]]
) -> Iterator[Engine]:
    with Engine(
        models["llama"],
        ssdkv=page_mode(devices(), window=WINDOW),
        kv_tokens=AT_ONCE * kv_tokens(WINDOW, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_num_seqs=AT_ONCE,
    ) as engine:
        yield engine


def blocks_in_use(engine: Engine) -> dict[str, int]:
    """HBM blocks of each running request, and of all of them, as vLLM's block pool counts."""
    manager = engine.scheduler.kv_cache_manager
    (group,) = manager.coordinator.single_type_managers
    held = {
        name: sum(not block.is_null for block in blocks)
        for name, blocks in group.req_to_blocks.items()
    }
    pool = manager.block_pool
    assert sum(held.values()) == pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return held


@pytest.mark.parametrize("cold", [True, False], ids=["computed", "from the store"])
@pytest.mark.parametrize("which", range(len(LONG)), ids=[f"{len(p)} tokens" for p in LONG])
def test_alone(engine: Engine, which: int, cold: bool) -> None:
    peak = 0

    def look(_: int) -> None:
        nonlocal peak
        peak = max(peak, *blocks_in_use(engine).values(), 0)

    engine.add("alone", LONG[which], 8)
    engine.run(look)
    assert 0 < peak <= BOUND
    if not cold:
        # A hit brings in the window only, however long the prefix.
        assert peak <= ceil(WINDOW / BLOCK) + 2


def test_together(engine: Engine) -> None:
    peaks: dict[str, int] = {}
    most = 0

    def look(_: int) -> None:
        nonlocal most
        held = blocks_in_use(engine)
        most = max(most, len(held))
        for name, count in held.items():
            peaks[name] = max(peaks.get(name, 0), count)

    fresh = [[*reversed(prompt)] for prompt in LONG[1:7]]
    for number, prompt in enumerate(fresh):
        engine.add(str(number), prompt, 8)
    engine.run(look)
    assert len(peaks) == len(fresh)
    assert max(peaks.values()) <= BOUND
    assert most == AT_ONCE
