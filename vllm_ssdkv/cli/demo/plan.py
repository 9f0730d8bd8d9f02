"""Plan of ``ssdkv demo``: sizes, the engines' settings, and the questions.

Both sides know it: the parent, which reports, and the phase's own process, which runs an engine.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import ceil
from typing import Final, Literal

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling.recall import recall
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.recall.recall import DTYPE
from vllm_ssdkv.profiling.rig.engine import transfer_config

Phase = Literal["page", "restart", "stock"]
PHASES: Final[tuple[Phase, ...]] = ("page", "restart", "stock")

BLOCK_TOKENS: Final = 32
WINDOW_TOKENS: Final = 128

TIMES_CAPACITY: Final = 4
"""Every context is at least this many times larger than the KV cache it is served from."""

MIN_CAPACITY: Final = 512
"""KV cache in tokens that holds a window and a chunk of prefill."""

_STAGING: Final = 4 * MIB
_JOURNAL_ROOM: Final = 16 * MIB


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """One run of the demo. Lengths are in tokens.

    Attributes:
        stores: One directory per SSD, for this demo alone.
        requests: Requests of each phase, all sent at once.
        context: Length of every prompt.
        kv_capacity: KV cache given to vLLM in the phases with this package.
    """

    stores: tuple[str, ...]
    requests: int
    context: int
    kv_capacity: int
    seed: int = 0

    @classmethod
    def from_json(cls, text: str) -> DemoPlan:
        """The plan that :meth:`to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "stores": tuple(fields["stores"])})

    def to_json(self) -> str:
        """As text, for the command line of a phase."""
        return json.dumps(asdict(self))

    def questions(self) -> list[recall.Question]:
        """One question per request, over all kinds of tasks."""
        tasks = recall.TASKS
        return [
            recall.ask(tasks[i % len(tasks)], self.context, self.seed + i)
            for i in range(self.requests)
        ]

    @property
    def chunk(self) -> int:
        """Tokens of a prefill step: a quarter of the KV cache, in whole blocks."""
        return max(BLOCK_TOKENS, self.kv_capacity // 4 // BLOCK_TOKENS * BLOCK_TOKENS)

    @property
    def max_model_len(self) -> int:
        """Context and answer, in whole blocks."""
        return self.context + 2 * BLOCK_TOKENS

    @property
    def full_blocks(self) -> int:
        """Blocks of a prompt that a restart finds; the last token is always computed again."""
        return (self.context - 1) // BLOCK_TOKENS

    @property
    def dram_bytes(self) -> int:
        """DRAM tier: a little more than one context, so that the rest must be on the SSDs."""
        return _STAGING + max(2 * MIB, ceil(1.2 * self.context * bytes_per_token()))

    def engine_settings(self, phase: Phase) -> dict[str, object]:
        """Keyword arguments of ``vllm.LLM``. Phases differ in KV memory and connector only."""
        paged = phase != "stock"
        blocks = self.requests * (self.max_model_len // BLOCK_TOKENS + 1)
        if paged:
            blocks = self.kv_capacity // BLOCK_TOKENS
        settings: dict[str, object] = {
            "model": str(recall.MODEL_DIR),
            "dtype": DTYPE,
            "max_model_len": self.max_model_len,
            "block_size": BLOCK_TOKENS,
            "max_num_batched_tokens": self.chunk,
            "max_num_seqs": self.requests,
            "kv_cache_memory_bytes": blocks * BLOCK_TOKENS * bytes_per_token(),
            # One process less to start: this engine has one worker.
            "distributed_executor_backend": "uni",
            "enforce_eager": True,
            "disable_log_stats": False,
        }
        if paged:
            settings |= transfer_config(self.options())
        return settings

    def options(self) -> dict[str, object]:
        """Options of this package."""
        content = self.requests * self.max_model_len * bytes_per_token()
        capacity = ceil(1.5 * content / len(self.stores)) + _JOURNAL_ROOM
        return {
            "mode": "page",
            # All on one disk, so there is nothing to measure.
            "devices": [{"path": path, "capacity": capacity, "weight": 1} for path in self.stores],
            "dram_gib": f"{self.dram_bytes}B",
            "hbm_window_tokens": WINDOW_TOKENS,
            "io": {"staging": _STAGING},
            "verify_hits": 0,  # every token is compared with stock vLLM anyway
        }
