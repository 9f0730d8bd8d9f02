"""Settings of an engine in page mode whose requests all choose, however short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.rig.engine import transfer_config

CHUNK: Final = 512
"""Tokens of a step, and so of a chunk of prefill."""
STAGING: Final = 4 * MIB


@dataclass(frozen=True, slots=True)
class PageEngine:
    """One engine's life.

    Attributes:
        model: Directory of the checkpoint.
        stores: One directory per device.
        capacity: Bytes of each device.
        dram_bytes: Option dram_gib.
        window: Option hbm_window_tokens.
        selector, sparse: Options.
        block_tokens: Of vLLM's blocks.
        throttle: Option io.throttle.
        deadline: Option io.deadline; None: its default.
    """

    model: Path
    stores: Sequence[str]
    capacity: int
    dram_bytes: int
    window: int
    selector: str
    sparse: Mapping[str, object]
    block_tokens: int
    throttle: Sequence[Mapping[str, object]] = field(default=())
    deadline: float | None = None

    def settings(self, longest: int, rows: int, dtype: str) -> dict[str, object]:
        """Keyword arguments of ``vllm.LLM``, for ``rows`` requests of ``longest`` tokens."""
        held = self.window + CHUNK + 2 * self.block_tokens
        return {
            "model": str(self.model),
            "dtype": dtype,
            "max_model_len": longest,
            "block_size": self.block_tokens,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": rows,
            "kv_cache_memory_bytes": rows * held * bytes_per_token(self.model),
            "distributed_executor_backend": "uni",
            "enforce_eager": True,
            "disable_log_stats": False,
            **transfer_config(self.options()),
        }

    def options(self) -> dict[str, object]:
        """Options of this package."""
        io: dict[str, object] = {"staging": STAGING, "throttle": list(self.throttle)}
        if self.deadline is not None:
            io["deadline"] = self.deadline
        return {
            "mode": "page",
            "devices": [
                {"path": path, "capacity": self.capacity, "weight": 1} for path in self.stores
            ],
            "dram_gib": f"{self.dram_bytes}B",
            "hbm_window_tokens": self.window,
            "selector": self.selector,
            "sparse": {"exact_below": 0, **self.sparse},
            "io": io,
        }
