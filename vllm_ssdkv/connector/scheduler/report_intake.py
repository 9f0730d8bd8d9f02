"""Reports of the workers: loads and writes that ended, and everything that went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vllm_ssdkv.connector.messages import COMPARED, FETCH, RankReport
from vllm_ssdkv.connector.scheduler.mode_policy import ModePolicy
from vllm_ssdkv.connector.scheduler.scheduler_parts import SchedulerParts
from vllm_ssdkv.store.index.slot_index import SlotState
from vllm_ssdkv.store.own_store import OwnStore


class ReportIntake:
    """Brings reports to whom they concern. Used by the scheduler's thread."""

    def __init__(self, parts: SchedulerParts, policy: ModePolicy):
        self._parts, self._policy = parts, policy
        self._index, self._suspension = parts.store.index, parts.store.suspension
        self._counters, self._requests = parts.store.counters, parts.requests
        self._slots, self._loads, self._verifier = parts.slots, parts.loads, parts.verifier
        self._rewriter = parts.rewriter

    def take(self, reports: Sequence[tuple[int, RankReport]], received: Iterable[str]) -> None:
        """Take in what the workers say, and the loads of requests that have ended."""
        weights, adapters = self._parts.identities.told(reports, self._requests.values())
        if self._parts.events is not None and (weights or adapters):
            self._parts.events.hide(None if weights else adapters)
        self._digested(reports)
        self._compared(reports)
        written: list[int] = []
        own = self._parts.store.own
        for rank, report in reports:
            self._parts.store.write_policy.wrote(report.written)
            received = [*received, *self._loads.reported(rank, report)]
            if own is not None:
                self._of_devices(own, rank, report)
            written += self._of_writes(report)
            self._of_reads(report)
            if report.x_rates is not None:
                self._policy.measured_x(report.x_rates)
        self._written_by_all(written)
        for name in received:
            self._load_ended(name)

    def load_failed(self, request_ids: Iterable[str]) -> None:
        """Loads that failed: vLLM asks again. Comes before :meth:`take` of their end."""
        for _ in self._loads.failed(request_ids):
            self._counters.add("recomputed_requests", 1, cause="hit")

    def _of_devices(self, own: OwnStore, rank: int, report: RankReport) -> None:
        weights = own.weights
        for device in report.lost_devices:
            weights.mark_lost(device, rank)
        for device in report.returned_devices:
            weights.mark_returned(device, rank)
        own.pauses.told(rank, report.writing)
        weights.update(rank, report.speeds)

    def _of_writes(self, report: RankReport) -> list[int]:
        """Slots of which this rank's was the last write."""
        writing = self._slots.writing
        written = [slot for slot, epoch in report.durable if writing.done(slot, epoch)]
        for slot, epoch in report.failed_writes:
            self._write_failed(slot, epoch)
        for slot, epoch in report.skipped:
            self._write_failed(slot, epoch)
            self._policy.slot_never_filled(slot, epoch)
        return written

    def _of_reads(self, report: RankReport) -> None:
        told = [pair for pair in (*report.bad, *report.mended) if self._index.holds(*pair)]
        self._parts.draft.believed.extend(told)
        for slot, epoch in report.bad:
            if epoch in (-1, self._index.epoch(slot)):
                self._slots.drop(slot, "read_error")
        own = self._parts.store.own
        if own is not None:
            own.unread.failed(report.unread)
        for request_id in report.poisoned:
            state = self._requests.get(request_id)
            if state is not None:
                self._policy.context_unreadable(state)

    def _load_ended(self, name: str) -> None:
        slots = self._loads.end(name)
        if slots is not None:
            if not self._loads.retries.failed(name):
                self._policy.load_ended(name)
            if name == FETCH:
                self._rewriter.fetched()
            elif name == COMPARED:
                self._verifier.loaded()
            self._slots.unpin(slots.tolist())

    def _written_by_all(self, slots: Sequence[int]) -> None:
        """One write into the journal for all of them."""
        slots = self._rewriter.written(slots)
        # While the store is suspended nobody looks for them; a later start would keep them.
        if slots and not self._suspension:
            self._index.durable(np.array(slots, dtype=np.int64))
        for slot in slots:  # not as a chain: these are of any requests
            self._slots.unpin([slot])

    def _write_failed(self, slot: int, epoch: int) -> None:
        if self._index.epoch(slot) != epoch:
            # A node's slots have no epochs any more when its session has ended, or other ones.
            if self._slots.writing.awaits(slot, epoch):
                self._slots.writing.drop(slot)
                self._slots.unpin([slot])
            return
        if self._rewriter.failed(slot):
            return
        self._slots.write_failed(slot)
        self._policy.slot_write_failed(slot)

    # ---- weights and verified hits ----

    def _digested(self, reports: Sequence[tuple[int, RankReport]]) -> None:
        """After a reset a digest may show a change of weights that nobody saw before: what was
        stored since the digest before may be of either weights."""
        if any(report.unseen for _, report in reports):
            for slot in self._slots.undigested.slots().tolist():
                self._slots.drop(slot, "weights")
        if any(report.resets for _, report in reports) and not self._parts.identities.resets.hidden:
            self._slots.undigested.clear()

    def _compared(self, reports: Sequence[tuple[int, RankReport]]) -> None:
        """A stored block was compared with what the engine computes, or is of other weights."""
        for _, report in reports:
            for slot, epoch in report.unbound:
                if self._index.holds(slot, epoch):
                    self._slots.drop(slot, "weights")
            for request_id, deviation, differs in report.compared:
                self._verifier.result(request_id, deviation, differs=differs)
                if differs:
                    self._suspend(request_id, deviation)
                elif deviation == deviation and not self._suspension:  # noqa: PLR0124 - not NaN
                    self._slots.unverified.clear()

    def _suspend(self, request_id: str, deviation: float) -> None:
        """A stored block is not what this engine computes: have everybody who runs with stored
        blocks compute anew, as far as vLLM can.

        What this run stored unverified goes: if the engine is wrong, it must not be found when the
        store is taken back; if the store is, all of it is given up."""
        if not self._suspension:
            for slot in self._slots.unverified.slots().tolist():
                self._slots.drop(slot, "unverified")
            self._parts.identities.keys.suspended = True
            if self._parts.events is not None:
                self._parts.events.hide()
            hbm = self._parts.groups.hbm
            if hbm is not None:  # where blocks may be that were loaded, and not verified
                hbm.evict_blocks(set(range(hbm.block_pool.num_gpu_blocks)))
        users = [state for state in self._requests.values() if state.loaded_from >= 0]
        in_use = {*self._policy.context_slots(), *self._loads.slots()}
        ready = [slot for slot in in_use if self._index.state(slot) is SlotState.READY]
        self._index.pin(np.array(ready, dtype=np.int64))
        self._suspension.begin(
            f"a stored block of request {request_id} is {deviation:.2g} from what this engine "
            f"computes, which is more than rounding; requests that run with stored blocks: "
            f"{', '.join(state.request_id for state in users) or 'none'}"
        )
        for state in users:
            self._rewriter.forget(state.request_id)  # vLLM computes into the blocks of its hit
            # Of the one whose block it is, the worker has told already.
            self._policy.compute_anew(state, told=state.request_id == request_id)
            state.loaded_from = -1
