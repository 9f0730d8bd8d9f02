"""Mode ``page``: a request's whole context is in the store, and HBM has its newest tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from vllm_ssdkv.base.errors import StoreFullError
from vllm_ssdkv.base.wait_reason import WaitReason
from vllm_ssdkv.connector.kv_cache_spec import TieredManager
from vllm_ssdkv.connector.messages import ContextDelta
from vllm_ssdkv.connector.metadata import SSDKVMetadata
from vllm_ssdkv.connector.scheduler.context_recovery import ContextRecovery
from vllm_ssdkv.connector.scheduler.kv_groups import GroupLoad
from vllm_ssdkv.connector.scheduler.page_admission import PageAdmission
from vllm_ssdkv.connector.scheduler.pending_context_loads import PendingContextLoads
from vllm_ssdkv.connector.scheduler.request_state import RequestState
from vllm_ssdkv.connector.scheduler.scheduler_parts import SchedulerParts
from vllm_ssdkv.connector.scheduler.x_admission import XAdmission
from vllm_ssdkv.store.own_store import owned

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_ssdkv.offload.xcache.x_rule import XRates


class PagePolicy:
    """A :class:`ModePolicy`. Slots are reserved for a request's whole context before it runs.

    Attributes:
        x_admission: Choice of the requests that are stored as X.
    """

    whole_hits = True

    def __init__(self, parts: SchedulerParts):
        self._parts, self._own = parts, owned(parts.store.own)
        self._index, self._slots = self._own.index, parts.slots
        self._requests, self._draft = parts.requests, parts.draft
        self._keys = parts.identities.keys
        self._block = parts.engine.block_tokens
        self._recovery = ContextRecovery(parts.store.counters)
        self._admission = PageAdmission(parts.store, parts.engine, self._recovery)
        # How many running requests' contexts hold a slot.
        self._in_contexts: Counter[int] = Counter()
        self._arriving = PendingContextLoads()
        # Requests whose contexts a node keeps no more for this engine.
        self._unclaimed: set[str] = set()
        shape = parts.engine.x_shape
        self.x_admission = XAdmission(parts.engine.x_share, shape, parts.store.counters)
        self._per_slot = 1
        """Blocks whose X shares a slot."""
        if shape is not None:
            self._per_slot = shape.blocks_per_slot(self._block, parts.config.window_tokens)
        self._only_as_x = ""
        """Request that was admitted last, if the store has room for its X only."""

    def bind(self, hbm: KVCacheManager) -> None:
        """Find the part of the block manager that can send requests back."""
        for manager in hbm.coordinator.single_type_managers:
            if isinstance(manager, TieredManager):
                self._recovery.manager = manager

    # ---- admission ----

    def admit(self, request: Request) -> WaitReason | None:
        """Wait until the store has room for the whole context, if need be as X."""
        in_use = any(state.reserved or state.slots for state in self._requests.values())
        running = bool(in_use or self._parts.loads)
        if self._admission.awaits_writes(running=running):
            if not self._admission.stands:
                return WaitReason.WRITES_PAUSED
            self._leave_devices()
        needed, self._only_as_x = self._admission.blocks_needed(request), ""
        as_x = self._per_slot > 1 and self.x_admission.would_admit(needed)
        shared = self._own.shared
        if shared is not None:
            shared.obtain(needed)
        if as_x and self._index.available() < needed:
            needed, self._only_as_x = -(-needed // self._per_slot), request.request_id
            if shared is not None:
                shared.obtain(needed)
        soon = bool(running or self._slots.writing)
        # Other engines use slots, too, and do not say when these will be free.
        soon |= shared is not None and not self._own.weights.lost
        return self._admission.admit(request, needed, soon=soon)

    def may_find(self, request_id: str) -> bool:
        """Check whether the store has room for the context if it begins with a hit: as K and V."""
        return request_id != self._only_as_x

    def _leave_devices(self) -> None:
        """Go on without devices that take no writes: nothing can run otherwise.

        Raises:
            StoreFailedError: there are no others.
        """
        rebalancer, weights = self._own.rebalancer, self._own.weights
        devices, counters = self._own.pauses.devices, self._parts.store.counters
        weights.leave(devices)
        for device in devices:
            counters.add("device_lost", 1, device=weights.paths[device])
            counters.set("device_state", 0, device=weights.paths[device])
        slots = np.array(self._slots.writing.slots(), dtype=np.int64)
        for slot in slots[rebalancer.placement.lost(rebalancer.out_of_use(), slots)].tolist():
            self._slots.write_failed(slot)
            self.slot_write_failed(slot)

    def admit_hit(self, request: Request, first: int, end: int) -> WaitReason | None:
        """None: :class:`TieredManager` has vLLM look whether HBM has room."""
        return None

    def answered(self, request_id: str, *, waits: bool) -> None:
        """Have the block manager refuse blocks to a request that waits: vLLM does not listen where
        it reads no prefix cache (``prompt_logprobs``)."""
        self._recovery.wait(request_id, waits=waits)

    def allocated(self, state: RequestState, *, found: bool) -> None:
        """Decide what its context is stored as, and reserve slots for it."""
        blocks = self._admission.blocks_needed(state.request)
        self.x_admission.arrived(state.request_id, blocks)
        # What begins with K and V goes on so.
        state.as_x = not found and self.x_admission.admit(state.request_id)
        if state.as_x:
            self._keys.keep_apart(state.request_id)
        state.reserved = -(-blocks // self._per_slot) if state.as_x else blocks
        self._index.reserve(state.reserved)

    def load_begins(self, state: RequestState, load: GroupLoad, blocks: int) -> None:
        """The hit is the beginning of the request's context."""
        self._index.pin(load.slots)
        state.slots = load.slots.tolist()
        self._in_contexts.update(state.slots)
        self._arriving.add(state.request_id, state.slots)
        self._index.unreserve(blocks)
        state.reserved -= blocks
        self._draft.contexts.append(ContextDelta(state.request_id, 0, load.slots))

    def load_ended(self, request_id: str) -> None:
        """Workers know the checksums of its slots."""
        self._arriving.end(request_id)

    # ---- steps ----

    def measured_x(self, rates: XRates) -> None:
        """Choose how many of the requests that come are stored as X."""
        self.x_admission.measured(rates)

    def begin_step(self) -> None:
        """Send back all requests if a node has forgotten what they use: others may get it."""
        if self._own.shared is not None and self._own.shared.take_loss():
            for slot in self._slots.writing.slots():
                self._slots.write_failed(slot)
            for state in self._requests.values():
                self._unclaimed.add(state.request_id)
                self.context_unreadable(state)

    def schedule(
        self,
        plan: SSDKVMetadata,
        state: RequestState,
        computed: int,
        count: int,
        output: SchedulerOutput,
    ) -> None:
        """Tell the workers of the row; every completed block gets a slot, from where it is read
        when the window leaves it."""
        if state.request_id in self._unclaimed:  # its load ended after the claims did
            self.context_unreadable(state)
        asked, window = self._parts.asked.of(state.request_id), self._parts.config.window_tokens
        row = state.row(computed, count, self._block, window, asked)
        plan.rows.append(row)
        choice = self._parts.asked.choice(state.request_id)
        if choice is not None and row.may_choose and computed + count >= choice.exact_below:
            self._keys.bind_choice(state.request, computed // self._block, choice.digest)
        speculation = self._parts.engine.speculation
        end = computed + count
        if speculation.drafts:
            # A token that is still being sampled has its KV; a draft may be another one.
            end = speculation.final(end, state.request.num_tokens)
        self._save(plan, state, end // self._block)

    def _save(self, plan: SSDKVMetadata, state: RequestState, end: int) -> None:
        begin, per_slot = len(state.slots), self._per_slot if state.as_x else 1
        end -= end % per_slot
        if begin >= end or state.cut_off:
            return
        keys = self._keys.to_store(state.request, end, begin)
        new: list[int] = []
        for block in range(begin, end, per_slot):
            known = block - begin < len(keys)  # else its tokens are still being sampled
            found = self._index.find(keys[block - begin]) if known else None
            # A session that goes on with more input needs more than it was admitted with.
            reserved = state.reserved > 0
            if found is not None and found in self._in_contexts and found not in self._arriving:
                # Another running request has this block. One that nobody runs with, or that is
                # still being loaded, is no help: the workers do not know its checksums.
                slot = found
                self._index.unreserve(int(reserved))
            else:
                try:
                    last = state.block_ids[0][block + per_slot - 1]
                    slot = self._slots.allocate(last, index=block, reserved=reserved)
                except StoreFullError:  # as when a lost device took reserved slots with it
                    state.cut_off = True
                    self._recovery.force_preempt(state)
                    break
                state.private[block] = slot
                if state.as_x:
                    plan.x_slots[slot] = state.block_ids[0][block : block + per_slot]
            new += [slot] * per_slot
            self._index.pin(np.array([slot] * per_slot, dtype=np.int64))
            state.reserved -= reserved
        delta = ContextDelta(state.request_id, begin, np.array(new, dtype=np.int64))
        self._draft.contexts.append(delta)
        self._in_contexts.update(new)
        state.slots.extend(new)

    def end_step(self) -> None:
        """Blocks whose hash is known now are written out and may be found."""
        held = sum(len(state.private) for state in self._requests.values())
        # What waits to be written, or not, must leave room in DRAM for what is written.
        hold_back = 4 * held <= self._parts.loads.choice.frames
        for state in self._requests.values():
            if state.private:
                self._publish_known(state, hold_back)

    def _publish_known(self, state: RequestState, hold_back: bool) -> None:
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
        policy = self._parts.store.write_policy
        if not state.request.num_preemptions:
            policy.record_access(new)
        if hold_back:
            # What has left the window must be written: it is read from there.
            left = (state.known - self._parts.config.window_tokens + 1) // self._block
            under_way = len(self._slots.writing)
            wanted = policy.should_write([keys[b - first] for b in ready], under_way)
            ready = [b for b, worth in zip(ready, wanted, strict=True) if worth or b < left]
        for block in ready:
            key = keys[block - first]
            self._replace(key)
            # The request itself needs it: what is not written would fill the DRAM.
            self._slots.publish(state.private.pop(block), key, needed=True)
        if self._parts.events is not None:
            self._parts.events.look(state.request, first, state.published)

    def _replace(self, key: bytes) -> None:
        """A block was computed although it is stored: its copy, or one before it, was unreadable.

        Unless somebody runs with the copy, or it is to be compared, the new block takes its place.
        """
        stored = self._index.find(key)
        if stored is None or self._own.alone is None or self._parts.verifier.keeps(stored):
            return  # a block that others share is dropped only where it was found to be wrong
        if stored not in self._in_contexts:
            self._slots.replace(stored)

    # ---- the end of a request ----

    def finished(self, state: RequestState) -> None:
        """Nothing: its blocks are as old as the steps that read them."""

    def forget(self, request_id: str) -> None:
        """Forget how often its context was lost."""
        self._recovery.forget(request_id)

    def release(self, state: RequestState) -> None:
        """Let go of its context; workers forget it."""
        self._draft.forget.append(state.request_id)
        self._unclaimed.discard(state.request_id)
        self.x_admission.left(state.request_id)
        self._arriving.end(state.request_id)
        contexts = [c for c in self._draft.contexts if c.request_id != state.request_id]
        self._draft.contexts = contexts
        policy = self._parts.store.write_policy
        policy.count_skipped(len(state.private), len(self._slots.writing))
        for slot in state.private.values():
            self._slots.abandon(slot)
        state.private.clear()
        if state.running and state.load is not None and not self._parts.store.suspension:
            self._parts.rewriter.ended(state.load)
        if state.as_x:  # nobody can find them: kept, they would push out what somebody can
            self._index.drop(np.array(state.slots, dtype=np.int64))
        seconds = self._parts.asked.retained_s(state.request_id)
        if seconds:
            slots = np.array(state.slots, dtype=np.int64)
            self._index.retain(slots, seconds, self._parts.config.retain_share)
        self._slots.unpin(state.slots)
        for slot in state.slots:
            self._in_contexts[slot] -= 1
            if not self._in_contexts[slot]:
                del self._in_contexts[slot]
        state.slots = []
        if state.reserved:
            self._index.unreserve(state.reserved)
            state.reserved = 0

    # ---- what goes wrong ----

    def context_slots(self) -> Collection[int]:
        """Slots of all contexts."""
        return self._in_contexts.keys()

    def slot_write_failed(self, slot: int) -> None:
        """The block is never published."""
        for state in self._requests.values():
            for block in [b for b, private in state.private.items() if private == slot]:
                del state.private[block]

    def slot_never_filled(self, slot: int, epoch: int) -> None:
        """Send back requests whose contexts it belongs to: they have a hole."""
        if slot in self._in_contexts and self._index.epoch(slot) == epoch:
            for state in self._requests.values():
                if slot in state.slots:
                    self._recovery.force_preempt(state)

    def context_unreadable(self, state: RequestState) -> None:
        """Send the request back, and drop what it samples in steps under way."""
        state.discard_in_flight_output()
        self._recovery.force_preempt(state)

    def compute_anew(self, state: RequestState, *, told: bool) -> None:
        """As :meth:`context_unreadable`."""
        self.context_unreadable(state)

    def remembers(self) -> dict[str, int]:
        """Contexts, loads of them, and requests that are to be sent back."""
        manager = self._recovery.manager
        leaving = 0 if manager is None else len(manager.send_back)
        return {
            "slots in contexts": len(self._in_contexts),
            "contexts that arrive": len(self._arriving),
            "requests that share X": len(self.x_admission),
            "requests to send back": leaving,
            "requests without claims": len(self._unclaimed),
        }
