"""Arrivals, aborts and preemptions in random order over a small store: tokens stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.engine import Engine, Tokens
from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import kv_tokens, page_mode, reuse_mode

CHUNK = 128
ANSWER = 24
ACTIONS = 80


def family(seed: int) -> list[Tokens]:
    """Prompts that share prefixes of several lengths, as a tree of conversations does."""
    root, *tails = prompts((640, 33, 64, 95, 256, 700), seed)
    found = [root]
    for tail in tails:
        found += [root + tail, root[:320] + tail]
    return found


PROMPTS = [*family(20), *family(21), *prompts((20, 64, 1500), seed=22)]


def loading(engine: Engine) -> bool:
    """Whether requests that do not run hold HBM blocks; vLLM cannot reset meanwhile.

    A load may be filling them, also for a request that was aborted, or may have filled them and the
    request waits for its turn.
    """
    (manager,) = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    holders = {name for name, blocks in manager.req_to_blocks.items() if blocks}
    return not holders <= {request.request_id for request in engine.scheduler.running}


@pytest.mark.parametrize("mode", ["page", "reuse"])
@pytest.mark.parametrize("seed", [1, 2])
def test_turmoil(
    seed: int,
    mode: str,
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
) -> None:
    wanted = [a.tokens for a in stock.answers("llama", PROMPTS, ANSWER)]
    source = random.Random(seed)
    place = devices(1, "16MiB")
    options = page_mode(place, window=96) if mode == "page" else reuse_mode(place, dram="8MiB")
    with Engine(
        models["llama"],
        ssdkv=options,
        kv_tokens=2 * kv_tokens(96, CHUNK) if mode == "page" else 2400,
        max_num_batched_tokens=CHUNK,
        max_model_len=2048,
        max_num_seqs=5,
    ) as engine:
        asked: dict[str, int] = {}
        alive: set[str] = set()
        got: dict[str, tuple[int, ...]] = {}
        preempted = 0
        for number in range(ACTIONS):
            action = source.choices(["add", "step", "abort", "preempt"], [5, 8, 1, 3])[0]
            if action == "add":
                which = source.randrange(len(PROMPTS))
                asked[str(number)] = which
                alive.add(str(number))
                engine.add(str(number), PROMPTS[which], ANSWER)
            elif action == "step":
                for _ in range(source.randrange(1, 30)):
                    got |= engine.step()
            elif action == "abort" and alive:
                name = source.choice(sorted(alive))
                engine.abort(name)
                alive.discard(name)
                got.pop(name, None)
            elif action == "preempt":
                while loading(engine):
                    got |= engine.step()
                preempted += len(engine.scheduler.running)
                assert engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
            alive -= {name for name, tokens in got.items() if len(tokens) == ANSWER}
        got |= engine.run()
        engine.settle()
        finished = {name: tokens for name, tokens in got.items() if len(tokens) == ANSWER}
        assert finished == {name: wanted[asked[name]] for name in finished}
        assert alive <= finished.keys()
        # The run was as eventful as it is meant to be.
        assert len(finished) > ACTIONS // 10
        assert engine.ssdkv("hit_tokens") > 0
        assert preempted > 0
        assert engine.ssdkv("slots_pinned") == 0
        assert engine.ssdkv("dram_frames_dirty") == 0
        assert engine.scheduler.connector.scheduler._index.gauges()["reserved"] == 0
        for name in ("checksum_failures", "header_mismatches", "load_failures", "slots_dropped"):
            assert engine.ssdkv(name) == 0, name
