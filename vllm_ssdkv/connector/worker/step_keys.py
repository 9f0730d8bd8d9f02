"""Keys of what every step of page mode counts, in the order in which it does."""

from __future__ import annotations

from typing import Final

from vllm_ssdkv.base.metrics import counter_key
from vllm_ssdkv.kernels.step_clock import PARTS

_TIERS: Final = ("hbm", "dram", "page_cache", "ssd")

STEP_KEYS: Final[tuple[str, ...]] = (
    counter_key("context_pages_streamed", tier="dram"),
    counter_key("context_pages_streamed", tier="ssd"),
    counter_key("context_steps", attention="exact"),
    counter_key("bytes_used"),
    counter_key("context_steps_native"),
    counter_key("sparse_rows_exact"),
    *(counter_key("attention_seconds", part=part) for part in PARTS),
)
"""Metric keys for streamed context."""

CHOICE_KEYS: Final[tuple[str, ...]] = (
    counter_key("context_steps", attention="sparse"),
    counter_key("bytes_used"),
    counter_key("sparse_selections"),
    counter_key("sparse_selections_reused"),
    counter_key("sparse_pages_selected"),
    counter_key("sparse_pages_in_context"),
    counter_key("sparse_missing_mass"),
    counter_key("sparse_selections_short"),
    *(counter_key("sparse_pages_fetched", tier=tier) for tier in _TIERS),
    counter_key("sparse_pages_read_ahead"),
    counter_key("sparse_read_ahead_hits"),
    *(
        counter_key("sparse_bytes_fetched", pages=pages, tier=tier)
        for pages in ("token", "channel", "summary")
        for tier in _TIERS
    ),
    *(counter_key("sparse_bytes_kept", pages=pages) for pages in ("token", "channel")),
)
"""Metric keys for chosen pages."""
