"""Channels in int8 in the real engine: the same answers, from half of the bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_sparf import BLOCK, HARD, OPTIONS, assert_sound, context_bytes, fetched, kept
from tests.e2e.test_sparse import QUESTIONS, Recall


@pytest.mark.parametrize(("tier", "dram"), [("dram", "40MiB"), ("hbm", "24MiB")])
def test_the_same_answers_from_fewer_bytes(
    devices: Callable[..., list[dict[str, Any]]], tmp_path: Path, tier: str, dram: str
) -> None:
    """All that a token reads, from wherever it is: less than 0.16 of what exact attention does."""
    options: dict[str, object] = OPTIONS | {"channel_dtype": "int8", "channel_pages": tier}
    control = tmp_path / "faults.json"
    recall = Recall(devices(4), "sparf", control, options, dram=dram, block=BLOCK)
    recall.start()
    try:
        questions = [*QUESTIONS, *HARD]
        assert recall.right(questions) == len(questions)
        whole = context_bytes(recall)
        tokens = sum(fetched(recall, "token", tier) for tier in ("dram", "page_cache", "ssd"))
        # An eighth of K in 8 bit of its 16, and a scale of 4 bytes for each channel of a block.
        channels, scales = whole / 32, whole / 32 * 4 / BLOCK
        found = [fetched(recall, "channel", t) for t in ("hbm", "dram")]
        assert found == ([channels, scales] if tier == "hbm" else [0, channels + scales])
        assert kept(recall, "channel") == channels + scales
        assert 0 < fetched(recall, "token", "ssd") <= tokens
        assert tokens + channels + scales <= 0.16 * whole
        assert recall.engine.ssdkv("sparse_rows_exact") == 0
        assert_sound(recall)
    finally:
        recall.engine.close()
