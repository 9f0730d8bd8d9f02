"""The scheduler's half: which blocks exist in the store, who needs them, what this step does.

Runs in the engine core's process on its one thread; nothing here touches a device or blocks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import StoreFullError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.kv_cache_spec import TieredManager
from vllm_ssdkv.connector.messages import (
    BACKGROUND,
    PROMOTION,
    ContextDelta,
    CopyFrames,
    CopyToDram,
    Flush,
    Load,
    RankReport,
)
from vllm_ssdkv.connector.metadata import SSDKVMetadata
from vllm_ssdkv.connector.metrics.index_metrics import IndexMetrics
from vllm_ssdkv.connector.metrics.stats import SSDKVStats
from vllm_ssdkv.connector.metrics.stats_collector import StatsCollector
from vllm_ssdkv.connector.scheduler.admission import PageAdmission
from vllm_ssdkv.connector.scheduler.admission_slots import AdmissionSlots
from vllm_ssdkv.connector.scheduler.background_loads import BackgroundLoads
from vllm_ssdkv.connector.scheduler.block_keys import BlockKeys
from vllm_ssdkv.connector.scheduler.context_recovery import ContextRecovery
from vllm_ssdkv.connector.scheduler.device_weights import DeviceWeights
from vllm_ssdkv.connector.scheduler.hit_verifier import HitVerifier
from vllm_ssdkv.connector.scheduler.identities import TELLING_STEPS, HbmIdentities, RankIdentities
from vllm_ssdkv.connector.scheduler.kv_groups import BlockGroups, GroupLoad
from vllm_ssdkv.connector.scheduler.load_or_recompute import LoadOrRecompute
from vllm_ssdkv.connector.scheduler.load_retries import LoadRetries
from vllm_ssdkv.connector.scheduler.pending_context_loads import PendingContextLoads
from vllm_ssdkv.connector.scheduler.pending_writes import PendingWrites
from vllm_ssdkv.connector.scheduler.request_overrides import RequestOverrides
from vllm_ssdkv.connector.scheduler.request_state import RequestState, being_computed
from vllm_ssdkv.connector.scheduler.rewriter import Rewrite, Rewriter
from vllm_ssdkv.connector.scheduler.speculation import NO_SPECULATION, Speculation
from vllm_ssdkv.connector.scheduler.suspension import Suspension
from vllm_ssdkv.connector.scheduler.unverified_blocks import UnverifiedBlocks
from vllm_ssdkv.connector.scheduler.write_policy import WritePolicy
from vllm_ssdkv.store.index.slot_index import SlotIndex, SlotState
from vllm_ssdkv.store.placement.rebalancer import Rebalancer

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class SSDKVScheduler:
    """Decides existence: lookup, admission, slot ownership, and the plan of each step."""

    def __init__(
        self,
        config: SSDKVConfig,
        index: SlotIndex,
        rebalancer: Rebalancer,
        device_paths: Sequence[str],
        block_tokens: int,
        max_model_len: int,
        seats: AdmissionSlots,
        ranks: int,
        counters: Counters,
        choice: LoadOrRecompute,
        policy: WritePolicy,
        identities: RankIdentities,
        suspension: Suspension,
        name_key: bytes = b"",
        speculation: Speculation = NO_SPECULATION,
        *,
        reuses: bool = True,
    ):
        """``name_key``: :meth:`StorePlace.name_key`. ``reuses``: whether requests may begin with
        stored blocks; there are models that need all tokens of a request in one step."""
        self._config = config
        self._paged = config.mode == "page"
        self._reuses = reuses
        self._index = index
        self._rebalancer = rebalancer
        self._shares = DeviceWeights(rebalancer, device_paths)
        self._recomputations = ContextRecovery(counters)
        self._admission = PageAdmission(
            index,
            rebalancer,
            self._shares,
            self._recomputations,
            counters,
            block_tokens,
            max_model_len,
            suspension,
        )
        self._block = block_tokens
        self._seats = seats
        self.counters = counters
        self._choice, self._policy = choice, policy
        self._index_metrics = IndexMetrics(index, rebalancer, counters)
        self._collector = StatsCollector(counters)
        self._identities, self._suspension = identities, suspension
        self._keys = BlockKeys(
            identities.namespace,
            name_key,
            apart=speculation.drafts,
            adapter=identities.adapter_digest,
        )
        self.keys_of = self._keys.of
        self._keys.suspended = bool(suspension)
        self._unverified = UnverifiedBlocks(index.num_slots)
        self._background = BackgroundLoads(index, self._keys, self._start_load)
        # Requests that hold HBM blocks.
        self._requests: dict[str, RequestState] = {}
        self._step = 0
        self._hbm: KVCacheManager | None = None
        self._speculation = speculation
        self._groups = BlockGroups((), index, block_tokens, speculation)
        # What the next plan carries.
        self._loads: list[Load] = []
        self._contexts: list[ContextDelta] = []
        self._forget: list[str] = []
        self._discard: list[int] = []
        self._believed: list[tuple[int, int]] = []
        self._trim: NDArray[np.int64] | None = None
        self._saves: list[tuple[int, int, int]] = []
        self._commits: list[tuple[int, int, bytes]] = []
        self._shape: list[tuple[int, int]] = []
        self._settled = True
        self._writing = PendingWrites(ranks)
        self._rewriter = Rewriter(index, rebalancer, policy, counters, self._writing, self._unpin)
        # Page mode: how many running requests' contexts hold a slot.
        self._in_contexts: Counter[int] = Counter()
        self._arriving = PendingContextLoads()
        self._held: dict[int, int] = {}
        self._loading: dict[str, NDArray[np.int64]] = {}
        self._no_room = False
        self._in_hbm = 0
        """Blocks that the request that was asked for last has in HBM."""
        self._hbm_identities = HbmIdentities(identities.namespace)
        self._ended: list[RequestState] = []
        """Requests that have ended since the workers last told of their step."""
        self._waits_for_adapter: dict[str, int] = {}
        self._invalid: list[int] = []
        self._verifier = HitVerifier(
            config.verify_hits,
            max(1, choice.chunk_tokens // block_tokens),
            index,
            self._unpin,
            counters,
        )
        self._failed_loads = LoadRetries(block_tokens, speculation.step_blocks)
        self.asked = RequestOverrides(config, counters)

    def bind_hbm(self, hbm: KVCacheManager) -> None:
        """vLLM's block manager; in page mode a part of it can send requests back."""
        self._hbm = hbm
        self._hbm_identities.pool = hbm.block_pool
        managers = hbm.coordinator.single_type_managers
        self._groups = BlockGroups(managers, self._index, self._block, self._speculation)
        self._keys.resumable_apart |= self._groups.has_states
        groups = hbm.kv_cache_config.kv_cache_groups
        self._hbm_identities.groups = len(groups)
        self._chain_layers = len(groups[self._groups.chain].layer_names)
        for manager in managers:
            if isinstance(manager, TieredManager):
                self._recomputations.manager = manager

    # ---- admission ----

    def matched_tokens(self, request: Request, computed: int) -> int | None:
        """Tokens beyond ``computed`` that the store holds; None: ask again, it has to wait.

        Raises:
            StoreFailedError: page mode, and the request can never be served any more.
        """
        found = self._matched_tokens(request, computed)
        self._recomputations.wait(request.request_id, waits=found is None)
        return found

    def _matched_tokens(self, request: Request, computed: int) -> int | None:
        earlier = self._requests.pop(request.request_id, None)
        if earlier is not None:
            # Preempted, or its load failed: what it holds must not keep it from coming back.
            self._release(earlier)
        self._keys.forget(request.request_id)
        self._verifier.forget(request.request_id)
        if self._is_told_of_soon(request):
            return None
        if (
            self._no_room  # Nobody behind such a request in line takes what becomes free.
            or self._failed_loads.must_wait(request, self._hbm, bool(self._requests))
            or (self._paged and not self._can_admit(request))
        ):
            return None
        first = self._in_hbm = computed // self._block
        if first and not self._is_of_now(request, first):
            self._keys.mix([request])
            return 0
        if (
            self._suspension
            or not self._reuses
            or self._failed_loads.given_up(request.request_id)
            or request.skip_reading_prefix_cache
        ):
            return 0
        # The last token is computed again in any case: its logits are needed.
        last = (request.num_tokens - 1) // self._block
        if self._seats.enough_wait:
            beginning = self.keys_of(request, min(first + 1, last), first)
            if len(self._index.lookup(beginning)):
                return None
        keys = self.keys_of(request, last)
        hit, states = self._groups.hit(keys, first), self._requests.values()
        self._groups.mark_shared(request, hit)
        blocks = self._choice.blocks(
            request.request_id,
            hit.slots,
            computed,
            request.num_tokens,
            being_computed(states, self._loading),
            hit.besides,
        )
        blocks = self._verifier.shorten(
            request, keys, first, blocks, lambda count: self._usable(keys, first, count)
        )
        if blocks and not self._paged:
            self._no_room = not self._groups.has_room(request, first, first + blocks, states)
            if self._no_room:
                return None
        self._failed_loads.ask(request.request_id)
        return blocks * self._block

    def _usable(self, keys: Sequence[bytes], first: int, count: int) -> int:
        """How many blocks of a hit all layers can go on after, up to ``count``."""
        if len(self._groups) == 1:
            return count
        return len(self._groups.hit(keys[: first + count], first).slots)

    def _is_of_now(self, request: Request, blocks: int) -> bool:
        """Whether a request's first blocks, which are in HBM, were computed with what it has."""
        identity = self._keys.identity(request)
        hashes = request.block_hashes[:blocks]
        return bool(identity) and not self._hbm_identities.began_with(hashes, identity)

    def _is_told_of_soon(self, request: Request) -> bool:
        """Whether the request has an adapter that the workers may hold and have not told of: they
        do with the next step. One that they do not hold is loaded when its first request runs."""
        adapter = request.lora_request
        if adapter is None or self._identities.adapter(adapter.lora_int_id) is not None:
            self._waits_for_adapter.pop(request.request_id, None)
            return False
        since = self._waits_for_adapter.setdefault(request.request_id, self._step)
        return self._step - since < TELLING_STEPS

    def _can_admit(self, request: Request) -> bool:
        in_use = any(state.reserved or state.slots for state in self._requests.values())
        return self._admission.admits(request, soon=bool(in_use or self._writing or self._loading))

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM has allocated HBM blocks; ``external`` tokens are to come from the store."""
        request_id = request.request_id
        state = self._requests.get(request_id)
        if state is not None:
            return  # second call, after an asynchronous load
        state = RequestState(request, born=self._step + 1)
        self._requests[request_id] = state
        self._seats.wait(request_id)
        if self._paged:
            state.reserved = self._admission.blocks_needed(request)
            self._index.reserve(state.reserved)
        self._waits_for_adapter.pop(request_id, None)
        if external:
            self._plan_load(state, blocks, external)
        # vLLM takes what it will compute for cached from now on: others find it in this very step.
        own = request.block_hashes[self._in_hbm + external // self._block :]
        self._hbm_identities.holds(own, self._identity_to_store(request), blocks.get_block_ids())
        unread = self._choice.admitted(request_id)
        if unread is not None:
            self._background.probe(request, unread)

    def _plan_load(self, state: RequestState, blocks: KVCacheBlocks, external: int) -> None:
        block_ids = blocks.get_block_ids()
        end = state.hit = len(block_ids[0])
        count = external // self._block
        keys = self.keys_of(state.request, end)
        load = self._groups.load(keys, end - count, block_ids, whole=self._paged)
        self._index.touch(load.slots)
        self._index.pin(load.slots)
        state.loaded_from = end - count
        loaded = state.request.block_hashes[end - count : end]
        self._hbm_identities.holds(loaded, self._keys.identity(state.request), block_ids)
        if self._paged:
            self._index.pin(load.slots)
            state.slots = load.slots.tolist()
            self._in_contexts.update(state.slots)
            self._arriving.add(state.request_id, state.slots)
            self._index.unreserve(count)
            state.reserved -= count
            self._contexts.append(ContextDelta(state.request_id, 0, load.slots))
        state.load = load
        whole = self._verifier.extend(state.request_id, load)
        self._index.pin(whole.slots[len(load.slots) :])
        self._start_load(state.request_id, whole)

    def _start_load(self, name: str, load: GroupLoad) -> None:
        self._loading[name] = load.slots
        self._choice.planned(name, load.slots)
        state, epochs = self._requests.get(name), self._index.epochs(load.slots)
        whole, adapter = name == PROMOTION, None
        if state is not None:
            whole = not self.asked.chooses(name, state.request.num_prompt_tokens)
            if state.request.lora_request is not None:
                adapter = self._identities.adapter(state.request.lora_request.lora_int_id)
        chain = load.chain, load.behind
        self._loads.append(
            Load(
                name,
                load.slots,
                epochs,
                load.keys,
                load.block_ids,
                *chain,
                whole,
                adapter,
                load.compared,
            )
        )

    # ---- the plan of a step ----

    def plan(self, output: SchedulerOutput) -> SSDKVMetadata:
        """The message to the workers for the step that vLLM has just scheduled."""
        self._step += 1
        self._no_room = False
        self._rebalancer.step()
        for request_id in output.preempted_req_ids or ():
            state = self._requests.get(request_id)
            if state is not None and state.born < self._step:
                del self._requests[request_id]
                self._release(state)
        plan = SSDKVMetadata(
            self._step,
            self._identities.changes,
            idle=output.total_num_scheduled_tokens == 0,
        )
        for new in output.scheduled_new_reqs:
            state = self._requests[new.req_id]
            state.block_ids = [list(ids) for ids in new.block_ids]
            self._schedule(plan, state, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            state = self._requests[request_id]
            new_ids = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                state.block_ids = [list(ids) for ids in new_ids or ()]
            elif new_ids:
                for ids, more in zip(state.block_ids, new_ids, strict=True):
                    ids.extend(more)
            self._schedule(plan, state, cached.num_computed_tokens[i], output)
        self._commit_known()
        frames = self._choice.frames
        plan.copy_frames = self._rewrite(self._rewriter.plan(output.num_scheduled_tokens, frames))
        plan.timed = self._choice.step(self._step, self._shape)
        self._shape = []
        self._choice.saved(slot for slot, _, _ in self._saves)
        plan.save = CopyToDram.of(self._saves)
        plan.commit = Flush.of(self._commits)
        self._saves, self._commits = [], []
        plan.loads, self._loads = self._loads, []
        plan.contexts, self._contexts = self._contexts, []
        plan.forget, self._forget = self._forget, []
        plan.discard, self._discard = self._discard, []
        plan.invalid, self._invalid = self._invalid, []
        plan.believed, self._believed = self._believed, []
        # Not requests that wait for more input, or because the engine is paused: nobody works.
        busy = self._writing or self._loading or self._rewriter.unfinished
        plan.settled = plan.idle and not busy
        self._settled = plan.settled
        plan.segments = self._rebalancer.take_segments()
        plan.trim, self._trim = self._trim, None
        return plan

    def _schedule(
        self, plan: SSDKVMetadata, state: RequestState, computed: int, output: SchedulerOutput
    ) -> None:
        if not state.running:
            state.running, state.hit = True, computed // self._block
        self._seats.leave(state.request_id)
        self._failed_loads.scheduled(state.request_id)
        count = output.num_scheduled_tokens[state.request_id]
        after = state.computed = computed + count
        drafts = len(output.scheduled_spec_decode_tokens.get(state.request_id, ()))
        # Drafts read the context as so many tokens that are decoded do.
        self._shape += [(computed, 1)] * count if count == 1 + drafts else [(computed, count)]
        final = self._speculation.final(after, state.request.num_tokens)
        if state.request.lora_request is not None:
            adapter = self._identities.adapter(state.request.lora_request.lora_int_id)
            if adapter is not None:
                plan.adapters[adapter.number] = adapter
        if self._keys.is_mixed(state.request):
            self._verifier.forget(state.request_id)  # that a block differs would say nothing
        compared = self._verifier.computed(
            state, after, self._block, self._groups.chain, self._chain_layers
        )
        if compared is not None:
            plan.compare.append(compared)
        if self._paged:
            asked, window = self.asked.of(state.request_id), self._config.window_tokens
            plan.rows.append(state.row(computed, count, self._block, window, asked))
            # A token that is still being sampled has its KV; a draft may be another one.
            self._save_paged(state, (final if self._speculation.drafts else after) // self._block)
        else:
            self._save_known(state, computed, final // self._block, output)

    def _save_paged(self, state: RequestState, end: int) -> None:
        """Every completed block gets a slot: it will be read from there when the window leaves."""
        begin = len(state.slots)
        if begin >= end or state.cut_off:
            return
        keys = self._keys.to_store(state.request, end, begin)
        new: list[int] = []
        for block in range(begin, end):
            known = block - begin < len(keys)  # else its tokens are still being sampled
            found = self._index.find(keys[block - begin]) if known else None
            # A session that goes on with more input needs more than it was admitted with.
            reserved = state.reserved > 0
            if found is not None and found in self._in_contexts and found not in self._arriving:
                # Another running request has this block. One that nobody runs with, or that is
                # still being loaded, is no help: the workers do not know its checksums.
                self._index.pin(np.array([found], dtype=np.int64))
                self._index.unreserve(int(reserved))
                new.append(found)
            else:
                try:
                    slot = int(self._index.allocate(1, reserved=reserved)[0])
                except StoreFullError:  # as when a lost device took reserved slots with it
                    state.cut_off = True
                    self._recomputations.send_back(state)
                    break
                self._index.pin(np.array([slot], dtype=np.int64))
                self._held[slot] = self._index.epoch(slot)
                self._saves.append((slot, self._held[slot], state.block_ids[0][block]))
                state.private[block] = slot
                new.append(slot)
            state.reserved -= reserved
        self._contexts.append(ContextDelta(state.request_id, begin, np.array(new, dtype=np.int64)))
        self._in_contexts.update(new)
        state.slots.extend(new)

    def _save_known(
        self, state: RequestState, computed: int, end: int, output: SchedulerOutput
    ) -> None:
        """Reuse mode: blocks that are computed, whose tokens are known and that are not stored."""
        first, request = state.published, state.request
        if first >= end:
            return
        identity = self._identity_to_store(request)
        hashes = request.block_hashes[max(first, state.hit) : end]
        self._hbm_identities.holds(hashes, identity, state.block_ids)
        if not (identity and self._reuses) or self._suspension:
            return
        keys = self._keys.to_store(request, end, first)
        if not request.num_preemptions:
            self._policy.see(keys)
        admitted = self._policy.admitted(keys).tolist()
        state.published = first + len(keys)  # the last tokens may still be on their way here
        blocks = self._groups.completed(state, output, keys, first, computed)
        for block, key, block_id in blocks:
            if self._index.find(key) is None:
                self._save_block(block_id, key, admitted[block - first])

    def _identity_to_store(self, request: Request) -> bytes:
        """Identity of what a request computes; empty: of several, or not known yet."""
        return b"" if self._keys.private(request) else self._keys.identity(request)

    def _save_block(self, block_id: int, key: bytes, admitted: bool) -> None:
        if not admitted:
            self._policy.skip(1, "admission")
        elif self._policy.used_up(len(self._writing)):
            self._policy.skip(1, "budget")
        else:
            try:
                slot = int(self._index.allocate(1)[0])
            except StoreFullError:
                self._policy.skip(1, "store_full")
                return
            self._held[slot] = self._index.epoch(slot)
            self._saves.append((slot, self._held[slot], block_id))
            self._publish(slot, key)

    def _rewrite(self, rewrites: Sequence[Rewrite]) -> CopyFrames | None:
        """Store blocks again: from HBM as new blocks, behind these; the others from their frames in
        DRAM, for the workers to copy."""
        beside: list[Rewrite] = []
        for item in rewrites:
            self._unverified.rewrite(item.old, item.new)
            if item.block_id:
                self._saves.append((item.new, item.epoch, item.block_id))
                self._commits.append((item.new, item.epoch, item.key))
            else:
                beside.append(item)
        self._choice.saved(item.new for item in beside)
        return CopyFrames.of([item[:5] for item in beside]) if beside else None

    def _commit_known(self) -> None:
        """Page mode: blocks whose hash is known now are written out and may be found."""
        held = sum(len(state.private) for state in self._requests.values())
        # What waits to be written, or not, must leave room in DRAM for what is written.
        hold_back = 4 * held <= self._choice.frames
        for state in self._requests.values():
            if state.private:
                self._commit_state(state, hold_back)

    def _commit_state(self, state: RequestState, hold_back: bool) -> None:
        known = len(state.request.block_hashes)
        ready = [block for block in state.private if block < known]
        if not ready:
            return
        first = min(ready)
        keys = self._keys.to_store(state.request, max(ready) + 1, first)
        if not keys:  # nobody has told of its adapter yet
            return
        new = [keys[block - first] for block in ready if block >= state.published]
        state.published = max(ready) + 1
        if not state.request.num_preemptions:
            self._policy.see(new)
        if hold_back:
            # What has left the window must be written: it is read from there.
            left = (state.known - self._config.window_tokens + 1) // self._block
            wanted = self._policy.worth_it([keys[b - first] for b in ready], len(self._writing))
            ready = [b for b, worth in zip(ready, wanted, strict=True) if worth or b < left]
        for block in ready:
            self._publish(state.private.pop(block), keys[block - first])

    def _publish(self, slot: int, key: bytes) -> None:
        epoch = self._held.pop(slot)
        if self._paged:
            self._replace(key)
        if not self._index.publish(slot, key) and not self._paged:
            # Another slot has this key: nobody will look for this one.
            self._unpin([slot])
            return
        self._unverified.add(slot)
        # In page mode the request itself needs it: what is not written would fill the DRAM.
        self._writing.add(slot, epoch)
        self._commits.append((slot, epoch, key))

    def _replace(self, key: bytes) -> None:
        """A block was computed although it is stored: its copy, or one before it, was unreadable.

        Unless somebody runs with the copy, or it is to be compared, the new block takes its place.
        """
        stored = self._index.find(key)
        if stored is None or self._verifier.keeps(stored):
            return
        if stored not in self._in_contexts:
            self._index.drop(stored)
            if self._index.state(stored) is SlotState.FREE:
                self._discard.append(stored)

    # ---- results ----

    def reported(self, reports: Sequence[tuple[int, RankReport]], received: Iterable[str]) -> None:
        """Take in what the workers say, and which requests' loads have ended."""
        written: list[int] = []
        self._collector.take_in(reports)
        self._identities_told(reports)
        for rank, report in reports:
            self._policy.wrote(report.written)
            received = [*received, *self._choice.reported(rank, report)]
            if report.streamed and PROMOTION not in self._loading:
                self._background.promote(self._requests, report.streamed)
            for device in report.lost_devices:
                dropped = self._shares.lose(device, self._index)
                self.counters.add("slots_dropped", dropped, cause="device_lost")
            self._shares.value(rank, report.speeds)
            for slot, epoch in report.durable:
                if self._writing.done(slot, epoch):
                    written.append(slot)
            for slot, epoch in report.failed_writes:
                self._write_failed(slot, epoch)
            for slot, epoch in report.skipped:
                self._write_failed(slot, epoch)
                self._send_back_users(slot, epoch)
            told = [pair for pair in (*report.bad, *report.mended) if self._index.holds(*pair)]
            self._believed.extend(told)
            for slot, epoch in report.bad:
                if epoch in (-1, self._index.epoch(slot)):
                    self._drop(slot, "read_error")
            for request_id in report.poisoned:
                state = self._requests.get(request_id)
                if state is not None:
                    self._recomputations.disown_steps(state)
                    self._recomputations.send_back(state)
        self._all_ranks_done(written)
        for request_id in received:
            slots = self._loading.pop(request_id, None)
            if slots is not None:
                self._choice.ended(request_id)
                if not self._failed_loads.failed(request_id):
                    self._arriving.end(request_id)
                    self._loaded(request_id)
                self._unpin(slots.tolist())

    def _loaded(self, request_id: str) -> None:
        """A request's hit has arrived on every rank; its slots are still pinned."""
        state = self._requests.get(request_id)
        if state is not None and state.load is not None and not self._paged:
            self._rewriter.loaded(request_id, state.load, lasting=self._groups.lasting)
            state.load = None

    def _identities_told(self, reports: Sequence[tuple[int, RankReport]]) -> None:
        """Weights or adapters have changed, or a block is not what was stored."""
        weights, adapters = self._identities.told(reports)
        running = [state.request for state in self._requests.values()]
        for state in (*self._requests.values(), *self._ended):
            adapter = state.request.lora_request
            if weights or (adapter is not None and adapter.lora_int_id in adapters):
                # Some of them, this step's at least, are not what the scheduler took them for.
                self._hbm_identities.holds(state.request.block_hashes[state.hit :], b"")
        self._ended.clear()
        if weights:
            self.counters.add("weights_changed")
            logger.warning(
                "ssdkv: the weights in memory have changed: what was stored before is not found "
                "any more, and what the %d running request(s) compute is not stored",
                len(running),
            )
            self._keys.rebind(self._identities.namespace, running)
            self._hbm_identities.weights_changed(self._identities.namespace)
        for number in adapters:
            users = [r for r in running if r.lora_request and r.lora_request.lora_int_id == number]
            self._keys.adapter_changed(users)
        for _, report in reports:
            for slot, epoch in report.unbound:
                if self._index.holds(slot, epoch):
                    self._drop(slot, "weights")
            for request_id, deviation, differs in report.compared:
                self._verifier.result(request_id, deviation, differs=differs)
                if differs:
                    self._suspend(request_id, deviation)
                elif deviation == deviation and not self._suspension:  # noqa: PLR0124 - not NaN
                    self._unverified.clear()

    def _suspend(self, request_id: str, deviation: float) -> None:
        """A stored block is not what this engine computes: have everybody who runs with stored
        blocks compute anew, as far as vLLM can.

        What this run stored unverified goes: if the engine is wrong, it must not be found when the
        store is taken back; if the store is, all of it is given up."""
        if not self._suspension:
            for slot in self._unverified.slots().tolist():
                self._drop(slot, "unverified")
            self._keys.suspended = True
            if self._hbm is not None:  # where blocks may be that were loaded, and not verified
                self._hbm.evict_blocks(set(range(self._hbm.block_pool.num_gpu_blocks)))
        users = [state for state in self._requests.values() if state.loaded_from >= 0]
        in_use = {*self._in_contexts, *(s for slots in self._loading.values() for s in slots)}
        ready = [slot for slot in in_use if self._index.state(slot) is SlotState.READY]
        self._index.pin(np.array(ready, dtype=np.int64))
        self._suspension.begin(
            f"a stored block of request {request_id} is {deviation:.2g} from what this engine "
            f"computes, which is more than rounding; requests that run with stored blocks: "
            f"{', '.join(state.request_id for state in users) or 'none'}"
        )
        for state in users:
            self._recomputations.disown_steps(state)
            self._rewriter.forget(state.request_id)  # vLLM computes into the blocks of its hit
            if self._paged:
                self._recomputations.send_back(state)
            elif len(state.block_ids) == 1 and state.running and state.request_id != request_id:
                # Of the one whose block it is, the worker has told already.
                self._invalid.append(state.block_ids[0][state.loaded_from])
            state.loaded_from = -1

    def load_failed(self, request_ids: Iterable[str]) -> None:
        """Loads that failed: vLLM asks again. Comes before :meth:`reported` of their end."""
        for request_id in request_ids:
            if request_id in self._requests:  # else it was given up meanwhile
                self.counters.add("recomputed_requests", 1, cause="hit")
                self._failed_loads.add(request_id)

    def _all_ranks_done(self, slots: Sequence[int]) -> None:
        """All ranks have written these slots: one write into the journal for all of them."""
        slots = self._rewriter.written(slots)
        # While the store is suspended nobody looks for them; a later start would keep them.
        if slots and not self._suspension:
            self._index.durable(np.array(slots, dtype=np.int64))
        for slot in slots:  # not as a chain: these are of any requests
            self._unpin([slot])

    def _write_failed(self, slot: int, epoch: int) -> None:
        if self._index.epoch(slot) != epoch or self._rewriter.failed(slot):
            return
        self._drop(slot, "write_error")
        if self._writing.drop(slot) or self._held.pop(slot, None) is not None:
            self._unpin([slot])
        for state in self._requests.values():
            for block in [b for b, private in state.private.items() if private == slot]:
                del state.private[block]  # it will never be committed

    def _send_back_users(self, slot: int, epoch: int) -> None:
        """A slot was never filled: the contexts that it belongs to have a hole."""
        if slot in self._in_contexts and self._index.epoch(slot) == epoch:
            for state in self._requests.values():
                if slot in state.slots:
                    self._recomputations.send_back(state)

    def _drop(self, slot: int, cause: str) -> None:
        # Several ranks, or a load and the scrub, may tell of the same slot.
        if self._index.holds(slot, self._index.epoch(slot)):
            self._index.drop(slot)
            self.counters.add("slots_dropped", 1, cause=cause)

    def _unpin(self, slots: Sequence[int]) -> None:
        self._index.unpin(np.array(slots, dtype=np.int64))
        # What became free without having been evicted holds nothing that anybody will read.
        gone = (SlotState.FREE, SlotState.LOST)
        self._discard.extend(slot for slot in slots if self._index.state(slot) in gone)

    # ---- the end of a request ----

    def finished(self, request: Request) -> None:
        """The request has ended, well or badly; its blocks will be freed."""
        self._failed_loads.forget(request.request_id)
        self._recomputations.forget(request.request_id)
        self._waits_for_adapter.pop(request.request_id, None)
        self._verifier.forget(request.request_id)
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._release(state)
            self._ended.append(state)
            if not self._paged:
                self._groups.touch(self.keys_of(request), state.hit)
        self._keys.forget(request.request_id)

    def _release(self, state: RequestState) -> None:
        ran, state.running = state.running, False
        self._seats.leave(state.request_id)
        self._verifier.forget(state.request_id)
        self._rewriter.forget(state.request_id)
        if not self._paged:
            return
        if ran and state.load is not None and not self._suspension:
            load = replace(state.load, block_ids=state.load.block_ids[:0])
            self._rewriter.loaded(state.request_id, load, lasting=True)
        self._forget.append(state.request_id)
        self._arriving.end(state.request_id)
        self._contexts = [c for c in self._contexts if c.request_id != state.request_id]
        self._policy.held_back(len(state.private), len(self._writing))
        for slot in state.private.values():
            self._held.pop(slot, None)
            self._index.drop(slot)
            self._unpin([slot])
        state.private.clear()
        self._unpin(state.slots)
        for slot in state.slots:
            self._in_contexts[slot] -= 1
            if not self._in_contexts[slot]:
                del self._in_contexts[slot]
        state.slots = []
        if state.reserved:
            self._index.unreserve(state.reserved)
            state.reserved = 0

    # ---- state of the whole ----

    def forget_all(self) -> bool:
        """Never find again what is stored now: somebody resets the cache.

        Requests that run keep what they hold; vLLM preempts them before it asks for this. False
        when a request's load is under way.
        """
        self._rebalancer.forget_stored()
        self._trim = self._index.free_slots()
        return not self._loading.keys() - BACKGROUND

    def unfinished(self) -> bool:
        """Whether the workers owe reports: vLLM keeps stepping until they are in."""
        owed = self._writing or self._rewriter.unfinished or self._loading.keys() & BACKGROUND
        return bool(owed or self._discard or self._forget or self._believed or not self._settled)

    def take_stats(self) -> SSDKVStats | None:
        """What was counted in all processes of the engine, when it is time to tell."""
        if not self._collector.due(running=bool(self._requests) and not self._settled):
            return None
        self.update_gauges()
        return self._collector.take()

    def update_gauges(self) -> None:
        """Refresh what is told of index and devices."""
        weights = self._rebalancer.weights
        for path, weight in zip(self._shares.paths, weights, strict=True):
            share = weight / sum(weights) if weight else 0.0
            self.counters.set("device_share", share, device=path)
        self._choice.update_gauges()
        self._policy.update_gauges(self._shares.paths)
        self._index_metrics.update()

    def close(self) -> None:
        """Make journal, manifest and the count of what was written durable."""
        self._rebalancer.close()
        self._index.close()
        self._policy.close()
