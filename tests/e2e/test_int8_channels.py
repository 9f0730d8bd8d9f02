"""Channels in int8 in the real engine: the same answers, from half of the bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.test_sparf import BLOCK, HARD, OPTIONS, assert_sound, context_bytes, fetched, kept
from tests.e2e.test_sparse import QUESTIONS, Recall


def test_the_same_answers_from_fewer_bytes(
    devices: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """All that a token reads, from wherever it is: less than 0.16 of what exact attention does."""
    options: dict[str, object] = OPTIONS | {"channel_dtype": "int8"}
    control = tmp_path / "faults.json"
    recall = Recall(devices(4), "sparf", control, options, dram="40MiB", block=BLOCK)
    recall.start()
    try:
        questions = [*QUESTIONS, *HARD]
        assert recall.right(questions) == len(questions)
        whole = context_bytes(recall)
        tokens = sum(fetched(recall, "token", tier) for tier in ("dram", "page_cache", "ssd"))
        # An eighth of K in 8 bit of its 16, and a scale of 4 bytes for each channel of a block.
        channels = whole / 32 * (1 + 4 / BLOCK)
        assert fetched(recall, "channel", "dram") == kept(recall, "channel") == channels
        assert 0 < fetched(recall, "token", "ssd") <= tokens
        assert tokens + channels <= 0.16 * whole
        assert recall.engine.ssdkv("sparse_rows_exact") == 0
        assert_sound(recall)
    finally:
        recall.engine.close()
