"""TieredAttentionSpec and its manager: HBM keeps a window, vLLM's scheduler frees what is behind.

The scheduler sees full attention as a sliding window and so admits requests whose KV never fits.
What it frees is still attended to: it lies in the store (architecture of vLLM 0.32: a backend's
``customize_spec`` may return a registered subclass of ``SlidingWindowSpec``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    SlidingWindowManager,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request, RequestStatus

UNALLOCATABLE = 1 << 40


class TieredManager(SlidingWindowManager):
    """Block manager of page mode: no HBM prefix hits, and requests that can be sent back.

    Runs in the scheduler process, on its thread.
    """

    def __init__(self, kv_cache_spec: SlidingWindowSpec, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own signature, passed through
        super().__init__(kv_cache_spec, **kwargs)
        self.send_back: dict[str, Request] = {}
        """Requests to preempt: their context could not be read. While they run no block is ever
        enough for them, which makes the scheduler preempt them at their next turn. Sessions that
        wait for more input cannot be preempted, and must not be kept from running."""
        self.waits: set[str] = set()
        """Requests that the store has no room for yet. No block is enough for them either."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Never a hit: the tail of a window in HBM says nothing about the context before it.

        Hits come from the store's index, which knows whether the whole prefix exists.
        """
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        *args: Any,  # noqa: ANN401 - the rest of vLLM's own signature, passed through
        apply_admission_cap: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> int:
        """As vLLM's, but without end for a request in :attr:`send_back` or :attr:`waits`.

        And right about what a whole request needs (``apply_admission_cap``): vLLM takes the blocks
        of its table off the cap on what it holds in HBM at a time, null blocks behind the window
        included. With loads admitted on that ground nobody may be left who can go on.
        """
        leaving = self.send_back.get(request_id)
        if leaving is not None and leaving.status == RequestStatus.RUNNING:
            return UNALLOCATABLE
        if request_id in self.waits:
            return UNALLOCATABLE
        blocks: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            *args,
            apply_admission_cap=apply_admission_cap,
            **kwargs,
        )
        cap = self.max_admission_blocks_per_request
        if not apply_admission_cap or cap is None:
            return blocks
        behind = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        newest = reversed(self.req_to_blocks.get(request_id, ()))
        held = sum(1 for _ in takewhile(lambda block: not block.is_null, newest))
        needed: int = min(-(-num_tokens // self.block_size) - behind, cap) - held
        return max(blocks, needed)

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own signature, passed through
        """Blocks are not kept in HBM for other requests: the store serves them."""
        self.num_cached_block.setdefault(request.request_id, 0)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """The request's blocks, on their way to the pool; a request sent back has now left."""
        self.send_back.pop(request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks


@dataclass(frozen=True, kw_only=True)
class TieredAttentionSpec(SlidingWindowSpec):
    """Attention whose HBM part is the newest ``sliding_window`` tokens, whatever it reaches.

    A layer with a sliding window of its own has it, too: the layers are alike, and vLLM gives them
    one table of blocks.
    """

    @classmethod
    def like(
        cls, spec: FullAttentionSpec | SlidingWindowSpec, window_tokens: int
    ) -> TieredAttentionSpec:
        """The tiered form of a layer's spec, keeping ``window_tokens`` tokens in HBM."""
        return cls(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=spec.dtype,
            kv_quant_mode=spec.kv_quant_mode,
            sliding_window=window_tokens,
        )


def register_spec() -> None:
    """Make vLLM know the spec, in this process. Idempotent."""
    # The registry fills itself only while empty: ours going in first would hide vLLM's own.
    register_all_kvcache_specs(get_current_vllm_config_or_none())
    KVCacheSpecRegistry.register(TieredAttentionSpec, manager_class=TieredManager)
