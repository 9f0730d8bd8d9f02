"""What the engine's limits say about the contexts that requests choose from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.startup import _context_blocks

BLOCK = 16


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
