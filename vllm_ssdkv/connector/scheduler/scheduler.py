"""The scheduler's half: which blocks exist in the store, who needs them, what this step does.

Runs in the engine core's process on its one thread; nothing here touches a device or blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.registry import Registry
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.messages import FETCH, RankReport
from vllm_ssdkv.connector.metadata import SSDKVMetadata
from vllm_ssdkv.connector.metrics.stats import SSDKVStats
from vllm_ssdkv.connector.scheduler.admission_slots import AdmissionSlots
from vllm_ssdkv.connector.scheduler.block_keys import BlockKeys
from vllm_ssdkv.connector.scheduler.hit_verifier import HitVerifier
from vllm_ssdkv.connector.scheduler.identities import RankIdentities
from vllm_ssdkv.connector.scheduler.kv_groups import BlockGroups
from vllm_ssdkv.connector.scheduler.load_or_recompute import LoadOrRecompute
from vllm_ssdkv.connector.scheduler.load_queue import LoadQueue
from vllm_ssdkv.connector.scheduler.load_retries import LoadRetries
from vllm_ssdkv.connector.scheduler.match import Match, Wait, WaitCounter
from vllm_ssdkv.connector.scheduler.mode_policy import ModePolicy
from vllm_ssdkv.connector.scheduler.prefix_lookup import PrefixLookup
from vllm_ssdkv.connector.scheduler.report_intake import ReportIntake
from vllm_ssdkv.connector.scheduler.request_identities import RequestIdentities
from vllm_ssdkv.connector.scheduler.request_overrides import RequestOverrides
from vllm_ssdkv.connector.scheduler.request_state import RequestState
from vllm_ssdkv.connector.scheduler.rewriter import NoRewrites, Rewriter
from vllm_ssdkv.connector.scheduler.scheduler_metrics import SchedulerMetrics
from vllm_ssdkv.connector.scheduler.scheduler_parts import (
    EngineFacts,
    SchedulerParts,
    SchedulerStore,
)
from vllm_ssdkv.connector.scheduler.slot_ledger import SlotLedger
from vllm_ssdkv.connector.scheduler.step_draft import StepDraft
from vllm_ssdkv.store.devices.health import WriteState
from vllm_ssdkv.store.own_store import owned
from vllm_ssdkv.store.placement.rebalancer import Rebalancer
from vllm_ssdkv.store.tier import TierIndex

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_POLICIES: Final[Registry[Any]] = Registry(
    "mode", "vllm_ssdkv.connector.scheduler.mode_policy:ModePolicy"
)
for _mode in ("reuse", "page"):
    _POLICIES.register(
        _mode,
        f"vllm_ssdkv.connector.scheduler.{_mode}_policy:{_mode.capitalize()}Policy",
    )


class SSDKVScheduler:
    """Core of both modes: lookup, loads, reports, and the plan of each step.

    Everything that the modes do differently is asked of a :class:`ModePolicy`.

    Attributes:
        asked: Options of requests.
        keys: Keys of blocks in the store.
        groups: KV cache groups of the model.
        verifier: Comparison of hits with computed blocks.
        loads: Loads under way.
        policy: Everything that the modes do differently.
    """

    def __init__(
        self,
        config: SSDKVConfig,
        engine: EngineFacts,
        store: SchedulerStore,
        identities: RankIdentities,
        choice: LoadOrRecompute,
        seats: AdmissionSlots,
    ):
        """``store`` is closed by :meth:`close`."""
        self._parts = parts = _make_parts(config, engine, store, identities, choice)
        self.policy: ModePolicy = _POLICIES.resolve(config.mode)(parts)
        self._seats = seats
        self._lookup = PrefixLookup(parts, self.policy, seats)
        self._intake = ReportIntake(parts, self.policy)
        self._metrics = SchedulerMetrics(parts)
        self._waits = WaitCounter(store.counters)
        self._step = 0
        self._settled = True
        self._asked = False
        """True if vLLM has asked for a hit since the last step."""
        self.asked, self.groups, self.loads = parts.asked, parts.groups, parts.loads
        self.keys: BlockKeys = parts.identities.keys
        self.verifier: HitVerifier = parts.verifier

    @property
    def counters(self) -> Counters:
        """Metrics of this process."""
        return self._parts.store.counters

    @property
    def index(self) -> TierIndex:
        """Key to slot, of everything that is stored."""
        return self._parts.store.index

    @property
    def rebalancer(self) -> Rebalancer:
        """Placement of slots on the devices of this engine, and its changes."""
        return owned(self._parts.store.own).rebalancer

    @property
    def requests(self) -> Mapping[str, RequestState]:
        """Requests that hold HBM blocks, by id."""
        return self._parts.requests

    def keys_of(self, request: Request, stop: int | None = None, start: int = 0) -> list[bytes]:
        """As :meth:`BlockKeys.of`."""
        return self.keys.of(request, stop, start)

    def bind_hbm(self, hbm: KVCacheManager) -> None:
        """vLLM's block manager exists now."""
        identities, groups = self._parts.identities, self._parts.groups
        groups.bind(hbm)
        identities.keys.resumable_apart |= groups.has_states
        identities.hbm.pool = hbm.block_pool
        identities.resets.bind(hbm.block_pool)
        identities.hbm.groups = len(hbm.kv_cache_config.kv_cache_groups)
        self.policy.bind(hbm)

    # ---- admission ----

    def arrived(self, request: Request) -> None:
        """A new request: what it asks for, and its media."""
        self.asked.arrived(request)
        self.keys.arrived(request)

    def matched_tokens(self, request: Request, computed: int) -> Match:
        """Part that the store holds of a request beyond ``computed`` tokens.

        Raises:
            StoreFailedError: the request can never be served any more.
        """
        self._look_for_reset()
        request_id = str(request.request_id)
        earlier = self._parts.requests.pop(request_id, None)
        if earlier is not None:
            # Preempted, or its load failed: what it holds must not keep it from coming back.
            self._release(earlier)
        self.keys.forget(request_id)
        self.verifier.forget(request_id)
        self._asked = True
        match = self._lookup.match(request, computed, self._step)
        self.policy.answered(request_id, waits=isinstance(match, Wait))
        self._waits.answered(request_id, match)
        return match

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM has allocated HBM blocks; ``external`` tokens are to come from the store."""
        request_id = str(request.request_id)
        if request_id in self._parts.requests:
            return  # second call, after an asynchronous load
        state = RequestState(request, born=self._step + 1)
        self._parts.requests[request_id] = state
        self._seats.wait(request_id)
        self.policy.allocated(state, found=external > 0)
        self._lookup.allocated(state, blocks, external)
        if self._parts.events is not None:
            self._parts.events.look(
                request, 0, request.num_tokens // self._parts.engine.block_tokens
            )

    # ---- the plan of a step ----

    def plan(self, output: SchedulerOutput) -> SSDKVMetadata:
        """The message to the workers for the step that vLLM has just scheduled."""
        self._step += 1
        self._look_for_reset()
        self.policy.begin_step()
        own, loads, draft = self._parts.store.own, self.loads, self._parts.draft
        self._parts.store.steps.step()
        for request_id in output.preempted_req_ids or ():
            state = self._parts.requests.get(request_id)
            if state is not None and state.born < self._step:
                del self._parts.requests[request_id]
                self._release(state)
        idle = output.total_num_scheduled_tokens == 0
        awake, self._asked = self._asked or not idle, False
        identities = self._parts.identities
        if awake:
            identities.resets.order()
        plan = SSDKVMetadata(
            self._step,
            identities.ranks.changes,
            identities.resets.ordered,
            awake,
            idle=idle,
        )
        for state, computed in self._scheduled(output):
            self._schedule(plan, state, computed, output)
        self.policy.end_step()
        self._rewrite(output)
        plan.timed = loads.choice.step(self._step, draft.shape)
        loads.choice.saved(copy[0] for copy in draft.copies)
        draft.move_into(plan)
        # Not requests that wait for more input, or because the engine is paused: nobody works.
        busy = self._parts.slots.writing or loads or self._parts.rewriter.unfinished
        plan.settled = self._settled = plan.idle and not busy
        plan.segments = None if own is None else own.rebalancer.take_segments()
        return plan

    def _scheduled(self, output: SchedulerOutput) -> Iterator[tuple[RequestState, int]]:
        """Requests of a step, with their HBM blocks brought up to date, and computed tokens."""
        for new in output.scheduled_new_reqs:
            state = self._parts.requests[new.req_id]
            state.block_ids = [list(ids) for ids in new.block_ids]
            yield state, new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            state = self._parts.requests[request_id]
            new_ids = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                state.block_ids = [list(ids) for ids in new_ids or ()]
            elif new_ids:
                for ids, more in zip(state.block_ids, new_ids, strict=True):
                    ids.extend(more)
            yield state, cached.num_computed_tokens[i]

    def _schedule(
        self, plan: SSDKVMetadata, state: RequestState, computed: int, output: SchedulerOutput
    ) -> None:
        if not state.running:
            state.running, state.hit = True, computed // self._parts.engine.block_tokens
        self._seats.leave(state.request_id)
        self.loads.retries.scheduled(state.request_id)
        count = output.num_scheduled_tokens[state.request_id]
        after = state.computed = computed + count
        drafts = len(output.scheduled_spec_decode_tokens.get(state.request_id, ()))
        # Drafts read the context as so many tokens that are decoded do.
        rows = [(computed, 1)] * count if count == 1 + drafts else [(computed, count)]
        self._parts.draft.shape += rows
        adapter = self._parts.identities.adapter_of(state.request)
        if adapter is not None:
            plan.adapters[adapter.number] = adapter
        if self.keys.is_mixed(state.request):
            self.verifier.forget(state.request_id)  # that a block differs would say nothing
        block, groups, config = self._parts.engine.block_tokens, self.groups, self._parts.config
        window = config.window_tokens if config.mode == "page" else computed
        oldest = (computed - window + 1) // block if window < computed else 0
        compared = self.verifier.computed(state, oldest, after // block, groups)
        if compared is not None:
            plan.compare.append(compared)
        self.policy.schedule(plan, state, computed, count, output)

    def _rewrite(self, output: SchedulerOutput) -> None:
        """Store blocks of hits again, behind the step's new blocks."""
        choice, draft = self.loads.choice, self._parts.draft
        own = self._parts.store.own
        if own is None or own.pauses.state is not WriteState.OPEN:
            self._parts.rewriter.pause(output.num_scheduled_tokens)
            return
        for item in self._parts.rewriter.plan(output.num_scheduled_tokens, choice.frames):
            self._parts.slots.unverified.rewrite(item.old, item.new)
            self._parts.slots.undigested.rewrite(item.old, item.new)
            if item.block_id:
                draft.copies.append((item.new, item.epoch, item.block_id, -1))
                draft.flushes.append((item.new, item.epoch, item.key))
            else:
                draft.frame_copies.append(item[:5])
        choice.saved(item[2] for item in draft.frame_copies)
        spare = choice.frames - len(self.policy.context_slots())
        wanted = self._parts.rewriter.fetch(spare, choice.frames)
        if wanted is not None:
            self._parts.store.index.pin(wanted.slots)
            self.loads.start(FETCH, wanted)

    # ---- results ----

    def reported(self, reports: Sequence[tuple[int, RankReport]], received: Iterable[str]) -> None:
        """Take in what the workers say, and which requests' loads have ended."""
        self._metrics.take_in(reports)
        self._intake.take(reports, received)

    def load_failed(self, request_ids: Iterable[str]) -> None:
        """Loads that failed: vLLM asks again. Comes before :meth:`reported` of their end."""
        self._intake.load_failed(request_ids)

    # ---- the end of a request ----

    def finished(self, request: Request) -> None:
        """The request has ended, well or badly; its blocks will be freed."""
        request_id = str(request.request_id)
        self.index.computes_no_more(request_id)
        self.loads.retries.forget(request_id)
        self.policy.forget(request_id)
        self._waits.forget(request_id)
        self.verifier.forget(request_id)
        state = self._parts.requests.pop(request_id, None)
        if state is not None:
            self._release(state)
            self._parts.identities.ended(state)
            self.policy.finished(state)
        self._parts.identities.forget(request_id)

    def _release(self, state: RequestState) -> None:
        self._seats.leave(state.request_id)
        self.verifier.forget(state.request_id)
        self._parts.rewriter.forget(state.request_id)
        self.policy.release(state)
        state.running = False

    # ---- state of the whole ----

    def reset(self) -> bool:
        """Hide what is stored until the weights are digested again: somebody resets the cache.

        Requests and loads that are under way go on. With the option ``on_reset: "forget"`` what is
        stored now is never found again.
        """
        self._parts.identities.reset()
        self._begin_after_reset()
        if self._parts.config.on_reset == "forget":
            store = self._parts.store
            store.steps.forget_stored()
            if store.own is not None:
                self._parts.draft.trim = store.own.index.free_slots()
            logger.warning(
                "ssdkv: the cache was reset: nothing that was stored before is found any more "
                "(on_reset)"
            )
        return True

    def _look_for_reset(self) -> None:
        """vLLM tells connectors of a reset of HBM's cache only where it is asked to."""
        if self._parts.identities.look_for_reset():
            self._begin_after_reset()

    def _begin_after_reset(self) -> None:
        self.verifier.restart()
        if self._parts.events is not None:
            self._parts.events.hide()
        logger.info(
            "ssdkv: the cache was reset: the store is hidden until the weights have been digested"
        )

    def unfinished(self) -> bool:
        """Check whether the workers owe reports: vLLM keeps stepping until they are in."""
        rewrites = self._parts.rewriter.unfinished
        owed = self._parts.slots.writing or rewrites or self.loads.in_background
        return bool(owed or self._parts.draft or not self._settled)

    def remembers(self) -> dict[str, int]:
        """Number of things remembered of requests, by name; empty when all have ended and the
        workers have reported."""
        draft = self._parts.draft
        found = {
            "requests": len(self._parts.requests),
            "waits": len(self._waits),
            "seats": len(self._seats),
            "slots without a key": len(self._parts.slots),
            "loads": len(self.loads) + len(draft.loads),
            "loads to retry": int(bool(self.loads.retries)),
            "contexts to tell": len(draft.contexts),
            "identities": int(bool(self._parts.identities)),
            "hits to verify": int(bool(self.verifier)),
            "hits to rewrite": len(self._parts.rewriter),
            **self.policy.remembers(),
        }
        return {name: count for name, count in found.items() if count}

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Events of stored blocks since the last call."""
        return () if self._parts.events is None else self._parts.events.take()

    def take_stats(self) -> SSDKVStats | None:
        """Counts of all processes of the engine, when it is time to tell."""
        return self._metrics.take(running=bool(self._parts.requests) and not self._settled)

    def update_gauges(self) -> None:
        """Refresh what is told of index and devices."""
        self._metrics.update_gauges()

    def close(self) -> None:
        """Make journal, manifest and the count of what was written durable."""
        self._parts.store.close()


def _make_rewriter(
    store: SchedulerStore, slots: SlotLedger, *, stores: bool
) -> Rewriter | NoRewrites:
    """Rewrites of blocks that lie in slow places, where the devices are this engine's and it
    ``stores`` at all."""
    own = store.own
    if own is None or own.alone is None or not stores:
        return NoRewrites()
    policy, counters = store.write_policy, store.counters
    return Rewriter(own.alone, own.rebalancer, policy, counters, slots.writing, slots.unpin)


def _make_parts(
    config: SSDKVConfig,
    engine: EngineFacts,
    store: SchedulerStore,
    ranks: RankIdentities,
    choice: LoadOrRecompute,
) -> SchedulerParts:
    """Parts of both modes, wired together."""
    counters, speculation = store.counters, engine.speculation
    requests: dict[str, RequestState] = {}
    draft = StepDraft()
    alone = None if store.own is None else store.own.alone
    asked = RequestOverrides(config, counters, engine.selects, alone is not None, engine.captures)
    identities = RequestIdentities(ranks, engine, store.name_key, counters)
    identities.keys.suspended = bool(store.suspension)
    own_index = None if store.own is None else store.own.index
    slots = SlotLedger(store.index, own_index, engine.ranks, draft, counters)
    if alone is not None and engine.sharers > 1:
        alone.unwritten = slots.writing
    retries = LoadRetries(engine.block_tokens, speculation.step_blocks)
    groups = BlockGroups((), store.index, engine.block_tokens, speculation, engine.hashes_per_block)
    events: KVEvents | None = None
    if engine.kv_events and alone is not None:
        from vllm_ssdkv.connector.scheduler.kv_events import KVEvents

        events = KVEvents(alone, groups, identities.keys, slots.writing, choice, store.suspension)
    return SchedulerParts(
        config,
        engine,
        store,
        requests,
        asked,
        draft,
        identities,
        groups,
        slots,
        LoadQueue(choice, retries, store.index, requests, identities, asked, draft),
        HitVerifier(
            config.verify_hits,
            max(1, choice.chunk_tokens // engine.block_tokens),
            store.index,
            slots.unpin,
            counters,
        ),
        _make_rewriter(store, slots, stores=engine.stores),
        events,
    )
