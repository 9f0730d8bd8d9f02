"""Loads of this rank: which are under way, which of them may be used, and blocks to compare."""

from __future__ import annotations

import math
import time

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.messages import (
    BACKGROUND,
    PROMOTION,
    Comparison,
    Load,
    LoadTime,
    RankReport,
)
from vllm_ssdkv.connector.worker.block_comparison import BlockComparer, StoredBlocks
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome
from vllm_ssdkv.store.tier import TierStore

PROMOTION_PAUSE_S = 10.0
"""Delay before the next promotion after one that failed."""


class Loads:
    """Loads of requests and of the background from the store of this rank.

    Used by the worker's thread.
    """

    def __init__(
        self,
        store: TierStore,
        comparer: BlockComparer | None,
        block_tokens: int,
        counters: Counters | None,
    ):
        """
        Args:
            store: Where blocks come from.
            comparer: Compares computed blocks with stored ones; None: this rank has nothing to
                compare.
            block_tokens: Number of tokens of a block.
            counters: Counters of what happens to a request, not to a rank; None: another rank
                counts it.
        """
        self._store, self._comparer = store, comparer
        self._block_tokens, self._counters = block_tokens, counters
        self._stored = StoredBlocks()
        self._under_way: set[str] = set()
        self._distrusted: set[str] = set()
        """Loads under way of what this rank would compute otherwise."""
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._promoting_from = 0.0

    @property
    def may_promote(self) -> bool:
        """Check whether blocks may be brought into DRAM now."""
        return PROMOTION not in self._under_way and time.monotonic() >= self._promoting_from

    def start(self, load: Load) -> None:
        """Begin with a load."""
        self._under_way.add(load.request_id)
        self._store.load(
            LoadJob(
                load.request_id,
                load.slots,
                load.epochs,
                load.keys,
                load.block_ids,
                load.chain,
                load.behind,
                load.compared,
                load.others,
                load.other_epochs,
            ),
            whole=load.whole,
        )

    def refuse(self, load: Load, report: RankReport) -> None:
        """Fail a load of what this rank would compute otherwise: it is computed."""
        report.loads.append(LoadTime(load.request_id, 0, 0, 0.0, 0.0, 0.0))
        self._finished.add(load.request_id)
        self._failed.add(load.request_id)

    def distrust(self) -> None:
        """Fail the loads of requests that are under way, when they end."""
        self._distrusted |= self._under_way - BACKGROUND

    def compare(self, comparison: Comparison, report: RankReport, *, bound: bool) -> bool:
        """Compare a block in HBM with the stored one, unless the copy of that had to go; True
        where they differ.

        Not where it is not ``bound``, computed with other weights than those of its key or from a
        context that could not be read: that it differs says nothing of the store. A rank that has
        nothing to compare leaves the answer to the others.
        """
        stored = self._stored.take(comparison.load, comparison.slot, comparison.epoch)
        if self._comparer is None:
            return False
        deviation, differs = math.nan, False
        if bound and stored is not None:
            deviation = self._comparer.deviation(comparison.block_id, stored)
            differs = deviation > self._comparer.tolerance
        report.compared.append((comparison.request_id, deviation, differs))
        if differs:
            self.distrust()
        return differs

    def collect(self, wait_s: float, report: RankReport) -> None:
        """Report the loads that have ended; wait up to ``wait_s`` for one, if any is under way."""
        for outcome in self._store.take_load_outcomes(wait_s):
            self._under_way.discard(outcome.request_id)
            report.loads.append(_load_time(outcome))
            report.bad.extend(outcome.bad)
            report.unread.extend(outcome.unread)
            if outcome.request_id != PROMOTION and outcome.copy is not None and outcome.complete:
                self._stored.keep(outcome.request_id, *outcome.copy)
            if outcome.request_id == PROMOTION:
                self._promotion_ended(outcome)
            elif outcome.request_id not in BACKGROUND:
                self._request_ended(outcome)

    def _request_ended(self, outcome: LoadOutcome) -> None:
        self._finished.add(outcome.request_id)
        if self._counters is not None:
            self._counters.add("hit_tokens", outcome.hit_tokens_from_dram, tier="dram")
            self._counters.add("hit_tokens", outcome.hit_tokens_from_ssd, tier="ssd")
            self._counters.add("load_seconds", outcome.dram_s, tier="dram")
            self._counters.add("load_seconds", outcome.ssd_s, tier="ssd")
        if not outcome.complete or outcome.request_id in self._distrusted:
            self._failed.add(outcome.request_id)
        self._distrusted.discard(outcome.request_id)

    def _promotion_ended(self, outcome: LoadOutcome) -> None:
        if self._counters is not None:
            blocks = outcome.tokens_from_ssd // self._block_tokens
            self._counters.add("context_blocks_promoted", blocks)
        if not outcome.complete:
            self._promoting_from = time.monotonic() + PROMOTION_PAUSE_S

    def take(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended, and those of them that failed, since the last call."""
        finished, failed = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return finished, failed


def _load_time(outcome: LoadOutcome) -> LoadTime:
    return LoadTime(
        outcome.request_id,
        outcome.tokens_from_dram,
        outcome.tokens_from_ssd,
        outcome.queued_s,
        outcome.dram_s,
        outcome.ssd_s,
    )
