"""Weights and adapters that requests compute with: which blocks are theirs to find and to store."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.wait_reason import WaitReason
from vllm_ssdkv.connector.messages import Adapter, RankReport
from vllm_ssdkv.connector.scheduler.block_keys import BlockKeys
from vllm_ssdkv.connector.scheduler.cache_resets import CacheResets
from vllm_ssdkv.connector.scheduler.identities import TELLING_STEPS, HbmIdentities, RankIdentities
from vllm_ssdkv.connector.scheduler.media_contents import MediaContents
from vllm_ssdkv.connector.scheduler.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ssdkv.connector.scheduler.scheduler_parts import EngineFacts

logger = logging.getLogger(__name__)


class RequestIdentities:
    """Identities of requests and of their blocks in HBM. Used by the scheduler's thread.

    Attributes:
        ranks: Weights and adapters as the workers have told them.
        keys: Keys of blocks in the store.
        hbm: Identities of blocks in vLLM's own cache.
        resets: Resets of the cache.
    """

    def __init__(
        self, ranks: RankIdentities, engine: EngineFacts, name_key: bytes, counters: Counters
    ):
        """``name_key``: :meth:`StorePlace.name_key`."""
        self.ranks = ranks
        self.keys = BlockKeys(
            ranks.namespace,
            name_key,
            apart=engine.speculation.drafts,
            adapter=ranks.adapter_digest,
            media=MediaContents(engine.block_tokens, seen=engine.sees_media),
            hashes_per_block=engine.hashes_per_block,
        )
        self._per_block = engine.hashes_per_block
        self._telling_steps = TELLING_STEPS + engine.steps_ahead
        self.hbm = HbmIdentities(ranks.namespace)
        self.resets = CacheResets(len(ranks.weights))
        self._counters = counters
        # Requests that have ended since the workers last told of their step.
        self._ended: list[RequestState] = []
        # Step in which a request first waited for what the workers have to tell.
        self._waits_since: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Check whether anything is remembered of a request that has not ended."""
        return bool(self.keys or self._waits_since)

    def awaits(self, request: Request, step: int) -> WaitReason | None:
        """Reason for a request to wait for what the workers tell within a few steps; None: it does
        not.

        After a reset they tell whose weights they hold with the next step, and of an adapter that
        they hold. One that they do not hold is loaded when its first request runs."""
        self.resets.order()
        adapter = request.lora_request
        if self.resets.hidden:
            reason = WaitReason.DIGEST
        elif adapter is not None and self.ranks.adapter(adapter.lora_int_id) is None:
            reason = WaitReason.ADAPTER
        else:
            self._waits_since.pop(request.request_id, None)
            return None
        since = self._waits_since.setdefault(request.request_id, step)
        return reason if step - since < self._telling_steps else None

    def began_alike(self, request: Request, blocks: int) -> bool:
        """Check whether a request's first blocks, in HBM, were computed with its own identity."""
        identity = self.keys.identity(request)
        hashes = self._vllm_hashes(request, 0, blocks)
        return bool(identity) and not self.hbm.began_with(hashes, identity)

    def adapter_of(self, request: Request) -> Adapter | None:
        """Digests of a request's adapter; None where it has none, or workers have not told."""
        if request.lora_request is None:
            return None
        return self.ranks.adapter(request.lora_request.lora_int_id)

    def to_store(self, request: Request) -> bytes:
        """Identity of the blocks that a request computes; empty: of several, or not known yet."""
        return b"" if self.keys.private(request) else self.keys.identity(request)

    def allocated(self, request: Request, first: int, block_ids: Sequence[Sequence[int]]) -> None:
        """A request has HBM blocks, of which it computes those from ``first`` on. vLLM takes them
        for cached from now on: others find them in this very step."""
        self._waits_since.pop(request.request_id, None)
        self.computes(request, first, None, block_ids)

    def computes(
        self, request: Request, first: int, stop: int | None, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """A request computes its blocks ``first`` to ``stop``, which HBM keeps for others."""
        hashes, known = self._vllm_hashes(request, first, stop), self.keys.known_blocks(request)
        border = len(hashes) if known is None else max(0, known - first) * self._per_block
        self.hbm.holds(hashes[:border], self.to_store(request), block_ids)
        self.hbm.holds(hashes[border:], b"", block_ids)

    def loads(
        self, request: Request, first: int, stop: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """A request's blocks ``first`` to ``stop`` come from the store."""
        hashes = self._vllm_hashes(request, first, stop)
        self.hbm.holds(hashes, self.keys.identity(request), block_ids)

    def _vllm_hashes(self, request: Request, first: int, stop: int | None) -> Sequence[bytes]:
        """vLLM's hashes of blocks, under one of which each block of a KV cache group lies in HBM's
        cache."""
        last = None if stop is None else stop * self._per_block
        hashes: Sequence[bytes] = request.block_hashes[first * self._per_block : last]
        return hashes

    def look_for_reset(self) -> bool:
        """Check whether HBM's cache was reset since the last look: the store is hidden then."""
        found = self.resets.look()
        self.keys.hidden = self.resets.hidden
        return found

    def reset(self) -> None:
        """Hide the store until the workers have digested their weights: the cache was reset."""
        self.resets.begin()
        self.keys.hidden = True

    def told(
        self, reports: Sequence[tuple[int, RankReport]], states: Collection[RequestState]
    ) -> tuple[bool, Collection[int]]:
        """Take in which weights and adapters have changed under the running requests, and which
        ranks have digested their weights after a reset. Whether weights have, and which adapters.
        """
        self.resets.told(reports)
        self.keys.hidden = self.resets.hidden
        weights, adapters = self.ranks.told(reports)
        if not weights and not adapters:
            self._ended.clear()
            return weights, adapters
        running = [state.request for state in states]
        for state in (*states, *self._ended):
            adapter = state.request.lora_request
            if weights or (adapter is not None and adapter.lora_int_id in adapters):
                # Some of them, this step's at least, are not what the scheduler took them for.
                self.hbm.holds(self._vllm_hashes(state.request, state.hit, None), b"")
        self._ended.clear()
        if weights:
            self._counters.add("weights_changed")
            logger.warning(
                "ssdkv: the weights in memory have changed: what was stored before is not found "
                "any more, and what the %d running request(s) compute is not stored",
                len(running),
            )
            self.keys.rebind(self.ranks.namespace, running)
            self.hbm.weights_changed(self.ranks.namespace)
        for number in adapters:
            users = [r for r in running if r.lora_request and r.lora_request.lora_int_id == number]
            self.keys.adapter_changed(users)
        return weights, adapters

    def ended(self, state: RequestState) -> None:
        """An admitted request has ended; what it computed last may still be told of."""
        self._ended.append(state)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._waits_since.pop(request_id, None)
        self.keys.forget(request_id)
