"""Room of KV on drives and in DRAM, by the product's own slots and its division of DRAM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape, bytes_of
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.memory_plan import MemoryPlan, SparseMemory

BLOCK_TOKENS: Final = 16
"""Tokens of vLLM's blocks by default."""
CPU_BLOCK_TOKENS: Final = 128
"""Tokens of vLLM's blocks by default on a processor."""
LARGEST_READ: Final = 512 * 1024
"""Bytes of a request: neighbours on a drive are joined up to this."""


def reuse_slot_bytes(model: ModelShape, block_tokens: int) -> int:
    """Bytes of a block's slot in mode reuse."""
    layers = model.attention_layers()
    payload = math.ceil(model.kv_bytes_per_token() * block_tokens / layers)
    return SlotGeometry("opaque", layers, 1, 1, payload).slot_bytes


@dataclass(frozen=True, slots=True)
class Division:
    """DRAM of page mode.

    Attributes:
        frames: Tokens whose KV frames hold.
        pages: Single pages that are kept.
        summaries: Tokens of contexts whose summaries are kept.
        nbytes: Of frames, of single pages, of summaries, and of what passes through.
    """

    frames: int
    pages: int
    summaries: int
    nbytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Slots of page mode.

    Example:
        PagedLayout.of(model, {"mode": "page", "selector": "bounds"}, BLOCK_TOKENS)
    """

    config: SSDKVConfig
    geometry: SlotGeometry
    block_tokens: int

    @classmethod
    def of(cls, model: ModelShape, options: dict[str, Any], block_tokens: int) -> PagedLayout:
        """The slots that the engine would make.

        Raises:
            ConfigError: page mode does not serve the model, or options contradict each other.
        """
        # torch takes a second: only those who ask for page mode wait for it.
        import torch

        from vllm_ssdkv.connector.kv_layout import paged_geometry

        sizes = {layer.numbers for layer in model.layers if layer.numbers}
        plain = {2 * model.kv_heads * model.head_size}
        kinds = {layer.kind for layer in model.layers}
        if sizes != plain or kinds & {"latent", "state", "chunked"}:
            raise ConfigError(
                f"{model.name}: mode page serves attention layers that are alike; this model has "
                f"{', '.join(sorted(kinds))}"
            )
        config = SSDKVConfig.from_extra_config(options)
        number = bytes_of(model.kv_dtype or model.dtype)
        if number == 1 and config.selector not in ("exact", "window"):
            raise ConfigError("--kv-dtype: of KV in fp8 mode page chooses no pages")
        if number not in (1, bytes_of(model.dtype)):
            raise ConfigError(
                f"--kv-dtype: mode page keeps KV in fp8 or the type of the model, {model.dtype}"
            )
        dtype = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}[number]
        shape = (model.attention_layers(), model.kv_heads, model.head_size)
        return cls(config, paged_geometry(config, *shape, block_tokens, dtype), block_tokens)

    @property
    def slot_bytes_per_token(self) -> float:
        """Bytes on drives of a token."""
        return self.geometry.slot_bytes / self.block_tokens

    @property
    def padding(self) -> float:
        """Bytes that are read, by those that are asked for."""
        return self.geometry.page_bytes / self.geometry.payload_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of one request: a layer of a slot, or a page where pages are chosen."""
        if self.config.selector == "exact":
            return min(LARGEST_READ, self.geometry.layer_bytes)
        return self.geometry.page_bytes

    def chosen_pages(self, tokens: int) -> int:
        """Pages that a step chooses from a context of so many tokens, of all layers and heads.

        The window counts in the budget.
        """
        chosen = max(0.0, self.config.sparse.budget * tokens - self.config.window_tokens)
        heads = self.geometry.layers * self.geometry.heads
        return math.ceil(chosen / self.config.page_tokens) * heads

    def divide(self, dram_bytes: float, tokens: float) -> Division:
        """DRAM for contexts of so many tokens together, as the engine divides it.

        Raises:
            DramTooSmallError: it does not hold the least that an engine needs.
        """
        slots = math.ceil(tokens / self.block_tokens) + 1
        choice = None
        if self.geometry.summary_pages:
            sparse = self.config.sparse
            choice = SparseMemory(
                self.config.page_tokens,
                slots,
                sparse.page_cache,
                sparse.summaries,
                sparse.page_policy,
                sparse.channel_pages,
                slots,
                sparse.budget,
            )
        plan = MemoryPlan.of(self.geometry, int(dram_bytes), self.config.io.staging, choice=choice)
        row = 0 if choice is None else choice.row_bytes(self.geometry)
        nbytes = {
            "frames": plan.frames * self.geometry.frame_bytes,
            "pages": plan.page_places * self.geometry.page_bytes,
            "summaries": plan.summary_rows * row,
            "passing": plan.page_offset,
        }
        held = plan.summary_rows if choice is not None else slots
        return Division(
            plan.frames * self.block_tokens, plan.page_places, held * self.block_tokens, nbytes
        )
