"""Resets of the cache, after which ranks digest their weights before anything is found or stored.

vLLM resets its prefix cache when weights are replaced, and tells connectors of it only where it is
asked to. A reset of HBM's cache is seen by the block pool, which begins a new table of hashes.

Weights may be away while an engine sleeps, and may be replaced at any time until it serves again.
So ranks digest them no earlier than vLLM asks for a request's hit or schedules one: it computes
with them then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_ssdkv.connector.messages import RankReport

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class CacheResets:
    """Counts resets, and knows which ranks have digested their weights since the last one.

    Used by the scheduler's thread.
    """

    def __init__(self, ranks: int):
        """``ranks``: number of workers, which have digested their weights at the start."""
        self.count = 0
        self.ordered = 0
        """Resets after which the workers have been told to digest their weights."""
        self._digested = [0] * ranks
        self._pool: BlockPool | None = None
        self._table: object = None

    def bind(self, pool: BlockPool) -> None:
        """Watch this pool from now on."""
        self._pool, self._table = pool, pool.cached_block_hash_to_block

    @property
    def hidden(self) -> bool:
        """Check whether a rank has not digested its weights since the last reset."""
        return min(self._digested) < self.count

    def look(self) -> bool:
        """Check whether HBM's cache was reset since the last look, and count that."""
        if self._pool is None or self._pool.cached_block_hash_to_block is self._table:
            return False
        self._table = self._pool.cached_block_hash_to_block
        self.count += 1
        return True

    def begin(self) -> None:
        """Count a reset that vLLM tells of, whether or not HBM's cache was reset with it."""
        if not self.look():
            self.count += 1

    def order(self) -> None:
        """Have the next plan tell the workers to digest their weights, which can be read now."""
        self.ordered = self.count

    def told(self, reports: Iterable[tuple[int, RankReport]]) -> None:
        """Take in which ranks have digested their weights."""
        for rank, report in reports:
            self._digested[rank] = max(self._digested[rank], report.resets)
