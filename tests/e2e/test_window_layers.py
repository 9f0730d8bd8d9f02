"""Page mode with layers that attend to a sliding window: it is in HBM whole, and they read nothing.

Gemma 3 has them beside layers with full attention; gpt-oss has sinks in all of its layers as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.models import GEMMA3_WINDOW, GPT_OSS_WINDOW, prompts
from tests.e2e.stock import Stock
from tests.e2e.test_refusals import refusal
from tests.e2e.workload import SMALL_DRAM, kv_tokens, page_mode
from tests.faults import set_faults
from tests.kit.engine import Engine

PROMPTS = prompts((3000, 1025, 640, 300, 77, 64, 33, 20), seed=5)
WINDOW, CHUNK, BLOCK = 128, 256, 32
REACHES = {"gemma3": (2, 4), "gpt_oss": (1, 3)}
"""Layers with full attention."""

Devices = Callable[..., list[dict[str, Any]]]


def start(
    model: Path, place: list[dict[str, Any]], dram: str = SMALL_DRAM, **options: object
) -> Engine:
    return Engine(
        model,
        ssdkv=page_mode(place, window=WINDOW, dram=dram, **options),
        kv_tokens=2 * kv_tokens(WINDOW, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_model_len=4096,
    )


def full_hits() -> list[int]:
    return [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]


def test_a_window_that_hbm_does_not_hold(models: dict[str, Path], devices: Devices) -> None:
    text = refusal(models["gpt_oss"], page_mode(devices(1), window=64))
    assert f"a sliding window of {GPT_OSS_WINDOW} tokens, and hbm_window_tokens is 64" in text
    assert f"set it to {GPT_OSS_WINDOW} or more" in text
    assert GEMMA3_WINDOW <= 64


@dataclass
class Paged:
    """An engine in page mode; tests end it and start another on its devices."""

    model: str
    path: Path
    place: list[dict[str, Any]]
    control: Path
    engine: Engine

    def restart(self, **options: object) -> None:
        self.engine.settle()
        self.engine.close()
        self.engine = start(self.path, self.place, SMALL_DRAM, **options)


@pytest.fixture(scope="module", params=REACHES)
def paged(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    stock: Stock,
    devices: Devices,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Paged]:
    name: str = request.param
    stock.answers(name, PROMPTS)
    place, control = devices(2), tmp_path_factory.mktemp("faults") / "faults.json"
    set_faults(control)
    rig = Paged(name, models[name], place, control, start(models[name], place))
    yield rig
    rig.engine.close()


def test_tokens_are_those_of_stock_vllm(paged: Paged, stock: Stock) -> None:
    got = paged.engine.answers(PROMPTS)
    assert [a.tokens for a in got] == [a.tokens for a in stock.answers(paged.model, PROMPTS)]
    (group,) = paged.engine.scheduler.kv_cache_config.kv_cache_groups
    assert len(group.layer_names) > len(REACHES[paged.model])
    paged.engine.settle()
    paged.engine.assert_nothing_held()


def test_a_restart_reads_contexts_for_full_attention_only(paged: Paged, stock: Stock) -> None:
    paged.restart()
    engine = paged.engine
    got = engine.answers(PROMPTS[:1])
    assert [a.tokens for a in got] == [a.tokens for a in stock.answers(paged.model, PROMPTS[:1])]
    assert got[0].cached == full_hits()[0]
    geometry = engine.scheduler.connector.scheduler.rebalancer.placement.geometry
    decoded = range(len(PROMPTS[0]), len(PROMPTS[0]) + len(got[0].tokens) - 1)
    behind = sum((n - WINDOW + 1) // BLOCK for n in (got[0].cached, *decoded))
    pages = behind * geometry.pages_per_layer * len(REACHES[paged.model])
    assert engine.ssdkv("context_pages_streamed") == pages


def test_nothing_wrong_is_answered_when_reads_fail(paged: Paged, stock: Stock) -> None:
    io = {"staging": "4MiB", "fault_file": str(paged.control)}
    paged.restart(io=io)
    set_faults(paged.control, {"kind": "corrupt", "op": "read", "count": 30})
    got = paged.engine.answers(PROMPTS)
    set_faults(paged.control)
    assert [a.tokens for a in got] == [a.tokens for a in stock.answers(paged.model, PROMPTS)]
    assert paged.engine.ssdkv("checksum_failures") > 0
    paged.engine.settle()
    paged.engine.assert_nothing_held()


def choosing(paged: Paged, devices: Devices, **sparse: object) -> Engine:
    """The engine that has followed: it chooses, on directories of its own."""
    paged.engine.settle()
    paged.engine.close()
    sparse = {"exact_below": 0, "page_cache": "1MiB", "summaries": "2MiB", **sparse}
    paged.place = devices(2)
    paged.engine = start(paged.path, paged.place, "10MiB", selector="sparf", sparse=sparse)
    return paged.engine


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_choosing_everything_is_exact(
    paged: Paged, stock: Stock, devices: Devices, dense_layers: int
) -> None:
    engine = choosing(paged, devices, budget=1, dense_layers=dense_layers)
    got = engine.answers(PROMPTS)
    assert [a.tokens for a in got] == [a.tokens for a in stock.answers(paged.model, PROMPTS)]
    lists = engine.ssdkv("sparse_selections")
    assert lists % (2 * (len(REACHES[paged.model]) - dense_layers)) == 0 < lists


def test_pages_are_read_ahead_for_the_next_layer_that_chooses(
    paged: Paged, devices: Devices
) -> None:
    engine = choosing(paged, devices, budget=0.25)
    engine.answers(PROMPTS)
    assert 0 < engine.ssdkv("sparse_read_ahead_hits") <= engine.ssdkv("sparse_pages_read_ahead")
