"""Bytes on disk never exceed the capacity that was configured, whatever is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import kv_tokens, page_mode
from tests.kit.engine import Engine

CAPACITY = 16 << 20
CHUNK = 256
LONG = prompts((1900,), seed=21)[0]
MAX_MODEL_LEN = 2048
TOKENS = 140
OTHERS = 20

Devices = Callable[..., list[dict[str, str]]]


def disk_usage(paths: list[str]) -> list[int]:
    """As ``du`` counts: allocated bytes of everything below each directory."""
    return [
        sum(
            os.lstat(os.path.join(folder, name)).st_blocks * 512
            for folder, folders, files in os.walk(path)
            for name in [*folders, *files]
        )
        for path in paths
    ]


def test_three_times_the_capacity_is_written(
    models: dict[str, Path], stock: Stock, devices: Devices
) -> None:
    """A long request runs all the while: its slots stay, and its tokens are those of stock."""
    entries = devices(2, "16MiB")
    paths = [entry["path"] for entry in entries]
    (wanted,) = stock.answers("llama", [LONG], max_tokens=TOKENS)
    most = [0, 0]
    with Engine(
        models["llama"],
        ssdkv=page_mode(entries),
        kv_tokens=4 * kv_tokens(128, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_model_len=MAX_MODEL_LEN,
    ) as engine:

        def after_step(number: int) -> None:
            most[:] = map(max, most, disk_usage(paths))
            if number % 6 == 0 and number // 6 <= OTHERS:
                (prompt,) = prompts((1500,), seed=100 + number)
                engine.add(f"other {number}", prompt, max_tokens=4)

        engine.add("long", LONG, max_tokens=TOKENS)
        got = engine.run(after_step)
        engine.settle()
        assert engine.ssdkv("bytes_written") >= 3 * 2 * CAPACITY
        assert got["long"] == wanted.tokens
        assert engine.ssdkv("slots_evicted") > 0
    most[:] = map(max, most, disk_usage(paths))
    assert all(CAPACITY // 2 < used <= CAPACITY for used in most), most
