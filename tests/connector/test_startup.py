"""Limits of the engine, and the contexts that requests choose from."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from tests.connector.simulation import engine_config
from tests.e2e.models import make_llama
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.cli.explain.catalog import entry_for
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector import startup
from vllm_ssdkv.connector.startup import _context_blocks, _tell_costly_tokens

BLOCK = 16
COSTLY = (
    'ssdkv: sparse.granularity "token" with sparse.channel_pages "ssd" reads about {percent} % of '
    "the bytes that exact attention reads, with --block-size {block}: set selector "
    '"codes" or "adaptive"'
)


@pytest.mark.parametrize(
    ("options", "longest", "rows", "hbm_blocks", "blocks"),
    [
        # As many requests as may run, or as there are windows of 256 tokens in HBM, and a part.
        ({}, 8192, 4, 1000, 4 * 513),
        ({}, 8192, 100, 1000, 63 * 513),
        ({"hbm_window_tokens": 1024}, 8192, 100, 1000, 16 * 513),
        # A budget of its own may let a shorter request choose than the engine's does.
        ({}, 4096, 4, 1000, 4 * 257),
        ({}, 4095, 4, 1000, 0),
        ({"sparse": {"exact_below": 0}}, 500, 4, 1000, 4 * 32),
        ({"sparse": {"exact_below": 10_000}}, 8192, 4, 1000, 0),
        ({"selector": "exact"}, 8192, 4, 1000, 0),
    ],
)
def test_blocks_that_may_be_chosen_from(
    options: dict[str, object], longest: int, rows: int, hbm_blocks: int, blocks: int
) -> None:
    config = SSDKVConfig.from_extra_config({"mode": "page", "selector": "bounds", **options})
    layout: Any = SimpleNamespace(block_tokens=BLOCK)
    engine: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        model_config=SimpleNamespace(max_model_len=longest),
    )
    caches: Any = SimpleNamespace(num_blocks=hbm_blocks)
    assert _context_blocks(config, layout, engine, caches) == blocks


@pytest.mark.parametrize(
    ("block", "head_size", "options", "percent"),
    [
        (512, 64, {}, None),
        (1024, 128, {}, None),
        (512, 64, {"budget": 0.25}, 104),
        (1024, 128, {"budget": 0.25}, 104),
        (1024, 64, {"budget_tokens": 2048, "exact_below": 2048}, 112),
        (1024, 64, {"channels": 64}, 106),
        (512, 64, {"budget": 0.25, "granularity": "page"}, None),
        (512, 64, {"budget": 0.25, "channel_pages": "dram"}, None),
        (512, 64, {"budget": 0.25, "selector": "adaptive", "scorer": "sparf"}, None),
    ],
)
def test_single_tokens_that_cost_more_than_all_are_told(
    caplog: pytest.LogCaptureFixture,
    block: int,
    head_size: int,
    options: dict[str, object],
    percent: int | None,
) -> None:
    sparse = {"granularity": "token", "channel_pages": "ssd", **options}
    selector = sparse.pop("selector", "sparf")
    config = SSDKVConfig.from_extra_config({"mode": "page", "selector": selector, "sparse": sparse})
    layout: Any = SimpleNamespace(block_tokens=block, head_size=head_size)
    _tell_costly_tokens(config, layout)
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ([] if percent is None else [COSTLY.format(percent=percent, block=block)])
    assert percent is None or entry_for(texts[0]) is not None


@pytest.mark.parametrize("name", ["open_write_policy", "Suspension", "SSDKVScheduler"])
def test_a_scheduler_that_does_not_start_lets_go_of_the_store(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssd").mkdir()
    device = {"path": str(tmp_path / "ssd"), "capacity": "32MiB", "weight": 1}
    vllm = engine_config(make_llama(tmp_path / "model", layers=1), "reuse", devices=[device])
    shape: Any = {"block_size": vllm.cache_config.block_size, "num_kv_heads": 2, "head_size": 32}
    spec = FullAttentionSpec(**shape, dtype=torch.float32)
    caches = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)])
    options = SSDKVConfig.from_extra_config(vllm.kv_transfer_config.kv_connector_extra_config)
    place = startup._identify(options, vllm, caches, of_worker=False).place
    place.prepare()
    place.manifest()
    place.tell_weights(0, bytes(16))
    threads = set(threading.enumerate())

    def fail(*_: object, **__: object) -> None:
        raise StoreError("no luck")

    with monkeypatch.context() as patch:
        patch.setattr(startup, name, fail)
        with pytest.raises(StoreError, match="no luck") as caught:
            startup.open_scheduler(options, vllm, caches)
    assert not set(threading.enumerate()) - threads
    startup.open_scheduler(options, vllm, caches).close()
    del caught  # until here, nothing was closed by being forgotten
