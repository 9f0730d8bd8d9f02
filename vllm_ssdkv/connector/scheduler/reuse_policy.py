"""Mode ``reuse``: a hit goes to HBM, and blocks are stored as soon as their tokens are known."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from vllm_ssdkv.base.wait_reason import WaitReason
from vllm_ssdkv.connector.metadata import SSDKVMetadata
from vllm_ssdkv.connector.scheduler.kv_groups import GroupLoad
from vllm_ssdkv.connector.scheduler.request_state import RequestState
from vllm_ssdkv.connector.scheduler.scheduler_parts import SchedulerParts
from vllm_ssdkv.store.devices.health import WriteState
from vllm_ssdkv.store.index.computed_blocks import RUN_BLOCKS, ComputedBlocks
from vllm_ssdkv.store.own_store import owned

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_ssdkv.offload.xcache.x_rule import XRates


class ReusePolicy:
    """A :class:`ModePolicy`. A request reads nothing from the store once it runs."""

    whole_hits = False

    def __init__(self, parts: SchedulerParts):
        self._index, self._write_policy = parts.store.index, parts.store.write_policy
        self._suspension = parts.store.suspension
        self._block, self._speculation = parts.engine.block_tokens, parts.engine.speculation
        self._stores = parts.engine.stores
        self._groups, self._identities = parts.groups, parts.identities
        self._requests, self._slots, self._draft = parts.requests, parts.slots, parts.draft
        self._rewriter, self._own = parts.rewriter, parts.store.own
        self._events, self._asked = parts.events, parts.asked
        self._retain_share = parts.config.retain_share
        self._no_room = False

    def bind(self, hbm: KVCacheManager) -> None:
        """Nothing: the groups have it."""

    # ---- admission ----

    def admit(self, request: Request) -> WaitReason | None:
        """Nobody overtakes a request that waits for HBM: its room would be gone again."""
        return WaitReason.HBM_TURN if self._no_room else None

    def admit_hit(self, request: Request, first: int, end: int) -> WaitReason | None:
        """Wait until HBM has room for the hit; see :meth:`BlockGroups.has_room`."""
        states = self._requests.values()
        self._no_room = not self._groups.has_room(request, first, end, states)
        return WaitReason.HBM if self._no_room else None

    def answered(self, request_id: str, *, waits: bool) -> None:
        """Nothing: vLLM listens."""

    def may_find(self, request_id: str) -> bool:
        """Always: a request needs no slots."""
        return True

    def allocated(self, state: RequestState, *, found: bool) -> None:
        """Nothing: no slots are set aside, a block without a slot is not stored."""

    def load_begins(self, state: RequestState, load: GroupLoad, blocks: int) -> None:
        """Nothing: when the load has ended, HBM has it all."""

    def load_ended(self, request_id: str) -> None:
        """Blocks of the hit that were read slowly are stored again from HBM."""
        state = self._requests.get(request_id)
        if state is not None and state.load is not None:
            self._rewriter.loaded(request_id, state.load, lasting=self._groups.lasting)
            state.load = None

    # ---- steps ----

    def measured_x(self, rates: XRates) -> None:
        """Nothing: no request is stored as X."""

    def begin_step(self) -> None:
        """Let the request that waits for HBM ask again, before others."""
        self._no_room = False

    def schedule(
        self,
        plan: SSDKVMetadata,
        state: RequestState,
        computed: int,
        count: int,
        output: SchedulerOutput,
    ) -> None:
        """Store blocks that are computed, whose tokens are known and that are not stored."""
        request = state.request
        final = self._speculation.final(computed + count, request.num_tokens)
        first, end = state.published, final // self._block
        if first >= end:
            return
        identity = self._identities.to_store(request)
        self._identities.computes(request, max(first, state.hit), end, state.block_ids)
        known = self._identities.keys.known_blocks(request)
        if known is not None and known <= first:
            state.published = end
            return
        end = end if known is None else min(known, end)
        if not identity:
            return
        if not self._stores or self._suspension:
            state.published = end
            return
        head = first // RUN_BLOCKS * RUN_BLOCKS
        from_head = self._identities.keys.to_store(request, end, head)
        keys = from_head[first - head :]
        if not request.num_preemptions:
            self._write_policy.record_access(keys)
        retained = self._asked.retained_s(state.request_id) > 0
        admitted = retained | self._write_policy.admitted(keys)
        state.published = first + len(keys)  # the last tokens may still be on their way here
        wanted: list[tuple[bytes, int]] = []
        runs: list[bytes] = []
        for block, key, block_id in self._groups.completed(state, output, keys, first, computed):
            if self._index.find(key) is not None:
                continue
            if not admitted[block - first]:
                self._write_policy.skip(1, "admission")
            elif self._write_policy.used_up(len(self._slots.writing) + len(wanted)):
                self._write_policy.skip(1, "budget")
            elif not self._takes_writes(len(wanted)):
                self._write_policy.skip(1, "writes_paused")
            else:
                wanted.append((key, block_id))
                runs.append(from_head[block // RUN_BLOCKS * RUN_BLOCKS - head])
        again, of = bool(request.num_preemptions), ComputedBlocks(state.request_id, runs)
        for cause in self._slots.claim(wanted, of, again=again) if wanted else ():
            self._write_policy.skip(1, cause)
        if self._events is not None:
            self._events.look(request, first, first + len(keys))

    def _takes_writes(self, wanted: int) -> bool:
        """Check whether the store takes one block more than these: while writes are on trial, only
        one at a time."""
        state = WriteState.OPEN if self._own is None else self._own.pauses.state
        if state is WriteState.TRIAL:
            return not (wanted or self._slots.writing)
        return state is WriteState.OPEN

    def end_step(self) -> None:
        """Nothing: blocks are published when they are allocated."""

    # ---- the end of a request ----

    def finished(self, state: RequestState) -> None:
        """Keep its blocks longest: the next turn of a conversation begins with them."""
        seconds, retain = self._asked.retained_s(state.request_id), None
        if seconds and self._own is not None:
            retain = partial(
                owned(self._own.alone).retain_chain, seconds=seconds, share=self._retain_share
            )
        self._groups.touch(self._identities.keys.of(state.request), state.hit, retain)

    def forget(self, request_id: str) -> None:
        """Nothing is remembered."""

    def release(self, state: RequestState) -> None:
        """Nothing: a request holds no slots."""

    # ---- what goes wrong ----

    def context_slots(self) -> Collection[int]:
        """None: requests read HBM."""
        return ()

    def slot_write_failed(self, slot: int) -> None:
        """Nothing: no request needs the slot."""

    def slot_never_filled(self, slot: int, epoch: int) -> None:
        """Nothing, as :meth:`slot_write_failed`."""

    def context_unreadable(self, state: RequestState) -> None:
        """Nothing: workers of this mode read no contexts."""

    def compute_anew(self, state: RequestState, *, told: bool) -> None:
        """Tell vLLM of an invalid block: it computes the request from there."""
        state.discard_in_flight_output()
        if len(state.block_ids) == 1 and state.running and not told:
            self._draft.invalid.append(state.block_ids[0][state.loaded_from])

    def remembers(self) -> dict[str, int]:
        """Nothing."""
        return {}
