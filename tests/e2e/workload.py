"""Prompts and options that several tests share. Stock vLLM answers each prompt once per session."""

from __future__ import annotations

from collections.abc import Sequence

from tests.e2e.models import prompts

LONG = prompts((6000, 4100, 2048, 1000, 300, 129, 128, 127, 33, 32, 20), seed=1)
"""From 20 to 6000 tokens, some of them exactly at block borders."""

SHORT = prompts((3000, 1025, 1024, 300, 32, 20), seed=2)
"""The same in small, for models and settings that need no long run."""

SMALL_DRAM = "8MiB"
"""Half of it is frames: the contexts of LONG and SHORT must come from the devices."""

ROOMY_DRAM = "128MiB"
"""Frames for every context of the workload."""


def page_mode(
    devices: Sequence[object], *, window: int = 128, dram: str = SMALL_DRAM, **others: object
) -> dict[str, object]:
    """Options of the connector for page mode. No hit is verified, which costs its last block."""
    return {
        "mode": "page",
        "verify_hits": 0,
        "devices": list(devices),
        "hbm_window_tokens": window,
        "dram_gib": dram,
        "io": {"staging": "4MiB"},
        **others,
    }


def reuse_mode(
    devices: Sequence[object], *, dram: str = ROOMY_DRAM, **others: object
) -> dict[str, object]:
    """Options of the connector for reuse mode. Hits are loaded whatever is faster here and now, and
    none is verified, which costs its last block."""
    return {
        "mode": "reuse",
        "verify_hits": 0,
        "load": "always",
        "devices": list(devices),
        "dram_gib": dram,
        "io": {"staging": "4MiB"},
        **others,
    }


def kv_tokens(window: int, chunk: int, block: int = 32) -> int:
    """The least KV capacity of page mode: a window, a chunk, and blocks that are not full."""
    return window + chunk + 2 * block
