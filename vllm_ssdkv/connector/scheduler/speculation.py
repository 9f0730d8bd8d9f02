"""Rules of speculative decoding for blocks that are stored and found again.

A block is stored once all of its tokens are known, so no token that was drafted and rejected is in
it. What is left are the layers of a drafter that works from the model's hidden states (EAGLE, MTP):
their KV at a position depends on the tokens after it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.obstacle import REUSE, Obstacle

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Speculation:
    """As vLLM handles its own prefix cache (``KVCacheCoordinator``, ``use_eagle_block_drop``).

    Attributes:
        drops_last: The last block of a hit is computed again: the drafter needs the hidden states
            before the first new token, and its KV there belongs to what came next at that time.
        not_final: Of the tokens computed last, so many have KV that a later step writes anew: a
            chain of MTP modules looks as far ahead.
        step_blocks: Blocks of each KV cache group that vLLM wants free beside a request that it
            admits for a load, for the drafts of one step.
    """

    drops_last: bool = False
    not_final: int = 0
    step_blocks: int = 0

    @property
    def drafts(self) -> bool:
        """Check whether steps compute tokens that may turn out to be others."""
        return self.step_blocks > 0

    @classmethod
    def of(cls, vllm_config: VllmConfig, block_tokens: int) -> Speculation:
        """Rules of this engine."""
        speculative = vllm_config.speculative_config
        if speculative is None:
            return NO_SPECULATION
        drafts = vllm_config.num_speculative_tokens + vllm_config.num_lookahead_tokens
        return cls(
            drops_last=speculative.use_eagle_block_drop(),
            not_final=max(0, vllm_config.num_prefill_lookahead_tokens - 1),
            step_blocks=-(-(1 + drafts) // block_tokens),
        )

    def usable(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots of a hit, [n], that are to be loaded."""
        return slots[:-1] if self.drops_last else slots

    def final(self, computed: int, known: int) -> int:
        """Number of tokens that have their last KV when the steps scheduled so far have ended, of
        ``computed``, drafts among them, of which the first ``known`` are the request's."""
        return max(0, min(computed, known) - self.not_final)


def obstacles_to_page_mode(config: SSDKVConfig, vllm_config: VllmConfig) -> Iterator[Obstacle]:
    """Obstacles that keep these drafts from page mode, each with its way out.

    One walk over the context serves all drafts of a step. What is stored lags behind what is
    computed by the drafts of a step, so a window has to hold these. The scheduler has to know where
    a step begins: with n-grams from the CPU vLLM 0.32 never schedules ahead, later versions do.
    """
    drafts = vllm_config.speculative_config
    if drafts is None:
        return
    if drafts.method != "ngram":
        yield Obstacle(
            f"drafts by {drafts.method} are not served in page mode",
            ('use the method "ngram"', REUSE),
        )
    if vllm_config.scheduler_config.async_scheduling:
        yield Obstacle(
            "page mode has to know how many drafts were right before the next step is planned",
            ("start with --no-async-scheduling", REUSE),
        )
    if config.selector != "exact":
        yield Obstacle(
            f"selector {config.selector!r} chooses for a token at a time",
            ("start without --speculative-config", 'use selector "exact"'),
        )
    if config.window_tokens < vllm_config.num_speculative_tokens + 1:
        yield Obstacle(
            f"hbm_window_tokens ({config.window_tokens}) is less than the tokens of a step with "
            f"{vllm_config.num_speculative_tokens} drafts",
            ("raise it",),
        )


NO_SPECULATION = Speculation()
