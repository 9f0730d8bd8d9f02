"""Page mode gives the tokens of stock vLLM, for contexts many times larger than the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.stock import Stock
from tests.e2e.workload import LONG, ROOMY_DRAM, SHORT, SMALL_DRAM, kv_tokens, page_mode
from tests.kit.engine import Answer, Engine, Tokens


@dataclass(frozen=True)
class Case:
    model: str
    prompts: list[Tokens]
    window: int
    dram: str = SMALL_DRAM
    block: int = 32
    chunk: int = 256
    page: int = 16
    windowed: float = 0.0
    """Part of the layers that have sliding windows, which read no context."""

    @property
    def kv_tokens(self) -> int:
        return kv_tokens(self.window, self.chunk, self.block)


CASES = {
    "llama-ssd": Case("llama", LONG, window=128),
    "llama-dram": Case("llama", LONG, window=256, chunk=512, dram=ROOMY_DRAM),
    "qwen3-ssd": Case("qwen3", SHORT, window=128),
    "opt-ssd": Case("opt", SHORT, window=64),
    "mixtral-dram": Case("mixtral", SHORT, window=128, dram=ROOMY_DRAM),
    "gemma2-ssd": Case("gemma2", SHORT, window=128, windowed=0.5),
    "bloom-dram": Case("bloom", SHORT, window=128, dram=ROOMY_DRAM),
    "large-heads-ssd": Case("large_heads", SHORT, window=128, dram="16MiB"),
    "blocks-of-16": Case("llama", LONG[2:], window=48, block=16),
    "blocks-of-128": Case("llama", LONG[1:], window=128, block=128, dram="13MiB"),
    "pages-of-64": Case("llama", LONG[1:], window=192, block=128, page=64, dram="13MiB"),
}


@dataclass(frozen=True)
class Run:
    case: Case
    engine: Engine
    wanted: list[Answer]
    got: list[Answer]


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def run(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
) -> Iterator[Run]:
    case: Case = request.param
    wanted = stock.answers(case.model, case.prompts)
    with Engine(
        models[case.model],
        ssdkv=page_mode(devices(3), window=case.window, dram=case.dram, page_tokens=case.page),
        kv_tokens=case.kv_tokens,
        block_size=case.block,
        max_num_batched_tokens=case.chunk,
    ) as engine:
        got = engine.answers(case.prompts)
        engine.settle()
        yield Run(case, engine, wanted, got)


def test_tokens_are_those_of_stock_vllm(run: Run) -> None:
    assert [a.tokens for a in run.got] == [a.tokens for a in run.wanted]


def test_contexts_are_larger_than_the_kv_cache(run: Run) -> None:
    assert max(map(len, run.case.prompts)) >= 4 * run.engine.kv_tokens


def test_contexts_come_from_the_tier_that_has_room(run: Run) -> None:
    from_ssd = run.engine.ssdkv("context_pages_streamed", tier="ssd")
    from_dram = run.engine.ssdkv("context_pages_streamed", tier="dram")
    assert (from_ssd > 0) is (run.case.dram != ROOMY_DRAM)
    # Every decode step of the longest request walks its whole context, window excepted.
    pages = run.engine.scheduler.connector.scheduler.rebalancer.placement.geometry.pages
    outside = (max(map(len, run.case.prompts)) - run.case.window) // run.case.block
    assert from_ssd + from_dram >= (len(run.got[0].tokens) - 1) * outside * pages * (
        1 - run.case.windowed
    )


def test_layers_are_one_native_call_where_dram_has_all_contexts(run: Run) -> None:
    """Each step is run so, those of prompts without a context yet among them."""
    native = run.engine.ssdkv("context_steps_native")
    steps = run.engine.ssdkv("context_steps", attention="exact")
    assert steps >= max(len(answer.tokens) for answer in run.got) - 1
    assert (native > steps) == (run.case.dram == ROOMY_DRAM)


def test_nothing_is_held_once_idle(run: Run) -> None:
    assert run.engine.ssdkv("slots_pinned") == 0
    assert run.engine.ssdkv("dram_frames_dirty") == 0
    pool = run.engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_every_full_block_is_stored_once(run: Run) -> None:
    # The KV of the last token of an answer is never computed.
    full = sum(
        (len(prompt) + len(answer.tokens) - 1) // run.case.block
        for prompt, answer in zip(run.case.prompts, run.got, strict=True)
    )
    # A block that fills in the last step of its request is given up with the request.
    assert full - len(run.case.prompts) <= run.engine.ssdkv("slots_stored") <= full


def test_no_fault_is_counted(run: Run) -> None:
    for name in ("checksum_failures", "header_mismatches", "load_failures", "slots_dropped"):
        assert run.engine.ssdkv(name) == 0, name


def test_asking_again_reuses_every_prompt(run: Run) -> None:
    again = run.engine.answers(run.case.prompts)
    assert [a.tokens for a in again] == [a.tokens for a in run.wanted]
    block = run.case.block
    assert [a.cached for a in again] == [(len(p) - 1) // block * block for p in run.case.prompts]
