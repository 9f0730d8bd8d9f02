"""Lookup of a request's beginning: how much of it to load, or why it has to wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_ssdkv.base.wait_reason import WaitReason
from vllm_ssdkv.connector.messages import COMPARED
from vllm_ssdkv.connector.scheduler.admission_slots import AdmissionSlots
from vllm_ssdkv.connector.scheduler.match import Hit, Match, Miss, Wait
from vllm_ssdkv.connector.scheduler.mode_policy import ModePolicy
from vllm_ssdkv.connector.scheduler.request_state import RequestState, being_computed
from vllm_ssdkv.connector.scheduler.scheduler_parts import SchedulerParts

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class PrefixLookup:
    """Finds hits, and plans their loads once vLLM has room for them. Used by the scheduler's
    thread."""

    def __init__(self, parts: SchedulerParts, policy: ModePolicy, seats: AdmissionSlots):
        self._parts, self._policy, self._seats = parts, policy, seats
        self._index, self._suspension = parts.store.index, parts.store.suspension
        self._identities, self._groups = parts.identities, parts.groups
        self._loads, self._verifier = parts.loads, parts.verifier
        self._block = parts.engine.block_tokens
        # Blocks that the request that was asked for last has in HBM.
        self._in_hbm = 0

    def match(self, request: Request, computed: int, step: int) -> Match:
        """Part that the store holds of a request beyond ``computed`` tokens, before step ``step``.

        Raises:
            StoreFailedError: the request can never be served any more.
        """
        own = self._parts.store.own
        if own is not None:
            own.unread.step()
        reason = self._must_wait(request, step)
        if reason is not None:
            return Wait(reason)
        first = self._in_hbm = computed // self._block
        if first and not self._identities.began_alike(request, first):
            self._identities.keys.mix([request])
            return Miss()
        if (
            self._suspension
            or self._identities.resets.hidden
            or not self._parts.engine.finds
            or not self._policy.may_find(request.request_id)
            or self._loads.retries.given_up(request.request_id)
            or request.skip_reading_prefix_cache
        ):
            return Miss()
        # The last token is computed again in any case: its logits are needed.
        last = (request.num_tokens - 1) // self._block
        if self._seats.enough_wait:
            beginning = self._identities.keys.of(request, min(first + 1, last), first)
            if len(self._index.lookup(beginning)):
                return Wait(WaitReason.SEATS)
        keys = self._keys(request, last)
        if first < len(keys) and self._index.awaits(
            request.request_id, keys[first:], lambda: self._seconds(request, computed), keys[0]
        ):
            return Wait(WaitReason.ELSEWHERE)
        return self._match(request, computed, keys)

    def _keys(self, request: Request, last: int) -> list[bytes]:
        """Keys of a request's blocks before ``last``.

        Behind what any request may find there may be blocks that one has decoded which chose as
        this one does.
        """
        keys = self._identities.keys
        plain, choice = keys.of(request, last), self._parts.asked.choice(request.request_id)
        if choice is None:
            return plain
        found = len(self._index.lookup(plain))
        decoded = keys.chosen(request, found, choice.digest) if found < len(plain) else []
        if not len(self._index.lookup(decoded)):
            return plain
        keys.bind_choice(request, found, choice.digest)
        return keys.of(request, last)

    def _seconds(self, request: Request, computed: int) -> float | None:
        """Time to compute what HBM does not have of a request; None: nobody knows yet."""
        prefill = self._loads.choice.prefill
        if not prefill.known:
            return None
        return prefill.seconds(computed, request.num_tokens)

    def _must_wait(self, request: Request, step: int) -> WaitReason | None:
        """Reason not even to ask the store."""
        told_soon = self._identities.awaits(request, step)
        if told_soon is not None:
            return told_soon
        retries, others = self._loads.retries, bool(self._parts.requests)
        if retries.must_wait(request, self._groups.hbm, others):
            own = request.request_id in retries
            return WaitReason.RETRY_HBM if own else WaitReason.RETRY_TURN
        return self._policy.admit(request)

    def _match(self, request: Request, computed: int, keys: Sequence[bytes]) -> Match:
        first = computed // self._block
        hit = self._groups.hit(keys, first)
        self._groups.mark_shared(request, hit)
        blocks = self._loads.choice.blocks(
            request.request_id,
            hit.slots,
            computed,
            request.num_tokens,
            being_computed(self._parts.requests.values(), self._loads),
            hit.besides,
        )
        decoded = self._identities.keys.decoded_from(request)
        if decoded is None or first + blocks <= decoded:  # others are not what a prompt makes
            blocks = self._verifier.shorten(
                request, keys, first, blocks, lambda count: self._usable(keys, first, count)
            )
        reason = self._policy.admit_hit(request, first, first + blocks) if blocks else None
        if reason is not None:
            return Wait(reason)
        self._loads.retries.record_lookup(request.request_id)
        return Hit(blocks * self._block) if blocks else Miss()

    def _usable(self, keys: Sequence[bytes], first: int, count: int) -> int:
        """Number of blocks of a hit after which all layers can go on, up to ``count``."""
        if len(self._groups) == 1:
            return count
        return len(self._groups.hit(keys[: first + count], first).slots)

    def allocated(self, state: RequestState, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM has allocated HBM blocks for the request that was asked for last: plan the load of
        its hit of ``external`` tokens, if any."""
        block_ids = blocks.get_block_ids()
        if external:
            self._plan_load(state, block_ids, external // self._block)
        else:
            compared = self._verifier.load_beside(state.request_id)
            if compared is not None:
                self._index.pin(compared.slots)
                self._loads.start(COMPARED, compared)
        own = self._in_hbm + external // self._block
        self._identities.allocated(state.request, own, block_ids)
        self._loads.probe(state.request)

    def _plan_load(self, state: RequestState, block_ids: tuple[list[int], ...], count: int) -> None:
        end = state.hit = self._in_hbm + count
        keys = self._identities.keys.of(state.request, end)
        load = self._groups.load(keys, end - count, block_ids, whole=self._policy.whole_hits)
        self._index.touch_chain(load.keys)
        self._index.pin(load.slots)
        state.loaded_from = end - count
        self._identities.loads(state.request, end - count, end, block_ids)
        state.load = load
        self._policy.load_begins(state, load, count)
        whole = self._verifier.extend(state.request_id, load)
        self._index.pin(whole.slots[len(load.slots) :])
        self._loads.start(state.request_id, whole)
