"""A worker that computes nothing and remembers all; see ``simulation.py``."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm.v1.outputs import KVConnectorOutput

from tests.connector.symbols import Symbols
from vllm_ssdkv.connector.messages import (
    BACKGROUND,
    FETCH,
    Adapter,
    Comparison,
    CopyFrames,
    Load,
    LoadTime,
    RankReport,
    Row,
)
from vllm_ssdkv.connector.metadata import SSDKVMetadata, SSDKVWorkerMetadata
from vllm_ssdkv.store.placement.placement import Placement

BLOCK = 16
DEVICES = 2
SLOT_BYTES = 12288
WEIGHTS = b"weights"
"""Digest of those that every rank begins with."""


@dataclass
class Pace:
    """Seconds that pass, on a clock of its own, for what is computed and what is loaded."""

    token_s: float = 0.0
    """Per token computed; 0: steps are not timed."""
    block_s: float = 0.0
    """Per block loaded. All come from devices."""
    now: float = 1000.0


@dataclass
class Slot:
    """What one rank has stored in a slot."""

    epoch: int
    symbols: Symbols
    key: bytes = b""


@dataclass
class Rank:
    """One worker."""

    number: int
    placement: Placement
    pace: Pace
    slots: dict[int, Slot] = field(default_factory=dict)
    contexts: dict[str, list[int]] = field(default_factory=dict)
    poisoned: set[str] = field(default_factory=set)
    writes: deque[tuple[int, int]] = field(default_factory=deque)
    loads: deque[Load] = field(default_factory=deque)
    broken: set[int] = field(default_factory=set)
    """Slots whose bytes are wrong."""
    failing: set[int] = field(default_factory=set)
    """Slots whose reads fail, until they do not."""
    cold: set[int] = field(default_factory=set)
    """Slots that have left DRAM, until they are fetched."""
    lost: set[int] = field(default_factory=set)
    """Devices that the scheduler knows to be out of use."""
    owner: dict[tuple[int, int], int] = field(default_factory=dict)
    """Slot whose bytes are at a place, a device and an offset."""
    sizes: tuple[int, ...] = (BLOCK,)
    """Tokens of a block of each KV cache group."""
    streams: bool = False
    """What requests read is said to come from devices, and to have room in DRAM, in every step."""
    no_frames: int = 0
    """DRAM is full: in so many steps, what is to be saved is skipped. A real worker waits for a
    frame as long as for a device before it skips anything, so this does not go on for long."""
    weights: bytes = WEIGHTS
    """Digest of what it computes with."""
    adapters: dict[int, bytes] = field(default_factory=dict)
    """Digests of adapters in memory."""
    told_weights: bytes = WEIGHTS
    blind: bool = False
    """Only a digest after a reset shows that weights have changed."""
    resets: int = 0
    changes: int = 0
    told_adapters: dict[int, bytes] = field(default_factory=dict)
    adapter_changes: dict[int, int] = field(default_factory=dict)
    distrusts: bool = False
    """This rank says that stored blocks are not those that it computes."""
    paused: bool = False
    """Writes are on trial: the next one that succeeds ends their pause."""
    compared: int = 0
    refused: set[str] = field(default_factory=set)
    """Loads under way that must not be used."""
    report: RankReport = field(default_factory=RankReport)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)

    def begin(self, plan: SSDKVMetadata) -> None:
        if plan.segments is not None:
            self.placement.change(plan.segments)
        for name in plan.forget:
            self.contexts.pop(name, None)
            self.poisoned.discard(name)
        self.invalid.update(plan.invalid)
        for number in self.told_adapters.keys() | self.adapters.keys():
            digest = self.adapters.get(number, b"")
            if self.told_adapters.get(number, b"") != digest:
                self.adapter_changes[number] = 1 + max(self.adapter_changes.values(), default=0)
                self.report.adapters[number] = digest, self.adapter_changes[number]
        self.told_adapters = dict(self.adapters)
        for delta in plan.contexts:
            if delta.start == 0:
                self.poisoned.discard(delta.request_id)
                self.contexts[delta.request_id] = []
            known = self.contexts[delta.request_id]
            assert len(known) == delta.start, "a context has a hole"
            known.extend(delta.slots.tolist())
        for slot in plan.discard:
            self.slots.pop(slot, None)

    def context(self, row: Row) -> Symbols | None:
        """What the row reads from the store; None when it cannot."""
        slots = self.contexts.get(row.request_id, [])[: row.hbm_start]
        if row.request_id in self.poisoned or len(slots) < row.hbm_start:
            return None
        bad = [slot for slot in slots if slot in self.broken or slot not in self.slots]
        self.report.bad.extend((slot, -1) for slot in bad)
        unread = self.failing.intersection(slots)
        self.report.unread.extend((slot, -1) for slot in unread)
        if bad or unread:
            return None
        found: Symbols = []
        for index, slot in enumerate(slots):
            held = self.slots[slot].symbols
            at = index * BLOCK % len(held)  # X of several blocks shares a slot
            found += held[at : at + BLOCK]
        return found

    def poison(self, row: Row) -> set[int]:
        """Throw the row's output away; slots that this step must not save."""
        self.poisoned.add(row.request_id)
        self.report.poisoned.append(row.request_id)
        self.invalid.add(row.fence_block)
        return set(self.contexts.get(row.request_id, [])[row.first_position // BLOCK :])

    def end(self, plan: SSDKVMetadata, hbm: dict[int, Symbols], spoiled: set[int]) -> None:
        bound = self.is_bound(plan)
        for comparison in plan.compare:
            self.compare(comparison, hbm, bound=bound)
        items = zip(plan.save.slots, plan.save.epochs, plan.save.block_ids, strict=True)
        full = self.no_frames > 0
        if full and len(plan.save.slots):
            self.no_frames -= 1
        for slot, epoch, block in ((int(a), int(b), int(c)) for a, b, c in items):
            self.slots.pop(slot, None)
            self.broken.discard(slot)
            if full or slot in spoiled:
                self.report.skipped.append((slot, epoch))
                continue
            blocks = plan.x_slots.get(slot, [block])
            assert all(len(hbm[b]) in self.sizes for b in blocks), "saved before it is full"
            self.overwrite(slot)
            self.slots[slot] = Slot(epoch, [symbol for b in blocks for symbol in hbm[b]])
        if not bound:
            pairs = zip(plan.commit.slots.tolist(), plan.commit.epochs.tolist(), strict=True)
            self.report.unbound.extend(pairs)
        commit = plan.commit if bound else plan.commit.under_keys_of_nobody()
        for slot, epoch, key in zip(
            commit.slots.tolist(), commit.epochs.tolist(), commit.keys, strict=True
        ):
            held = self.slots.get(slot)
            if held is not None and held.epoch == epoch:
                held.key = key
                self.writes.append((slot, epoch))
        if plan.copy_frames is not None:
            self.copy_frames(plan.copy_frames)
        for load in plan.loads:
            if load.request_id in BACKGROUND or (bound and self.holds(load.adapter)):
                self.loads.append(load)
            else:
                self.report.loads.append(LoadTime(load.request_id, 0, 0, 0.0, 0.0, 0.0))
                self.received.add(load.request_id)
                self.failed.add(load.request_id)
        for row in plan.rows if self.streams else ():
            self.report.streamed.append((row.request_id, np.arange(row.hbm_start)))

    def is_bound(self, plan: SSDKVMetadata) -> bool:
        """Compare the plan's keys with this rank's weights; tell of new ones."""
        reset = plan.resets > self.resets
        assert plan.awake or not reset, "weights may be away"
        if self.weights != self.told_weights and (reset or (plan.awake and not self.blind)):
            self.told_weights = self.report.weights = self.weights
            self.changes += 1
            self.report.changes = self.changes
            self.report.unseen = self.blind
            self.refused.update(load.request_id for load in self.loads)
        if reset:
            self.resets = self.report.resets = plan.resets
        held = all(map(self.holds, plan.adapters.values()))
        return plan.changes[self.number] == self.changes and held

    def holds(self, adapter: Adapter | None) -> bool:
        """Whether this rank holds what KV was computed with."""
        if adapter is None:
            return True
        return self.adapter_changes.get(adapter.number) == adapter.changes[self.number]

    def compare(self, comparison: Comparison, hbm: dict[int, Symbols], *, bound: bool) -> None:
        """Tell whether a block that was computed is the stored one, unless that has left DRAM."""
        held = self.slots.get(comparison.slot)
        there = comparison.slot not in self.broken | self.cold
        right = bound and comparison.request_id not in self.poisoned
        deviation, differs = math.nan, False
        if held is not None and there and right:
            assert held.epoch == comparison.epoch, "a comparison with another block"
            assert held.symbols == hbm[comparison.block_id], "a block is not what is stored"
            deviation, differs = (1.0, True) if self.distrusts else (0.0, False)
            self.compared += 1
        self.report.compared.append((comparison.request_id, deviation, differs))
        if differs and comparison.fence_block:
            self.invalid.add(comparison.fence_block)
            self.refused.update(load.request_id for load in self.loads)

    def copy_frames(self, plan: CopyFrames) -> None:
        """Copy slots, as far as they are in DRAM, and begin to write the copies."""
        for old, old_epoch, new, epoch, key in zip(
            plan.old.tolist(),
            plan.old_epochs.tolist(),
            plan.new.tolist(),
            plan.epochs.tolist(),
            plan.keys,
            strict=True,
        ):
            self.slots.pop(new, None)
            self.broken.discard(new)
            held = self.slots.get(old)
            if held is None or old in self.broken or old in self.cold:
                self.report.failed_writes.append((new, epoch))
                continue
            assert (held.epoch, held.key) == (old_epoch, key), "a copy of another block"
            assert (old, old_epoch) not in self.writes, "a copy of what is not written"
            self.overwrite(new)
            self.slots[new] = Slot(epoch, list(held.symbols), key)
            self.writes.append((new, epoch))

    def overwrite(self, slot: int) -> None:
        """Forget what was at the slot's place."""
        self.owner = {place: other for place, other in self.owner.items() if other != slot}
        one = torch.tensor([slot]).numpy()
        extents = self.placement.extents(one, 0, self.placement.geometry.slot_bytes)
        for place in zip(extents.device.tolist(), extents.offset.tolist(), strict=True):
            assert place[0] not in self.lost, "a slot on a lost device is handed out"
            self.slots.pop(self.owner.get(place, slot), None)
            self.owner[place] = slot

    def pause_writes(self) -> None:
        """Writes to all devices are on trial."""
        self.paused = True
        self.report.writing += [(device, 1e-300) for device in range(DEVICES)]

    def resume_writes(self) -> None:
        """Writes go on."""
        self.paused = False
        self.report.writing += [(device, 0.0) for device in range(DEVICES)]

    def end_write(self, good: bool) -> None:
        """The oldest write ends."""
        if self.writes:
            outcome = self.writes.popleft()
            share = SLOT_BYTES // DEVICES
            self.report.written += [(device, share) for device in range(DEVICES) if good]
            (self.report.durable if good else self.report.failed_writes).append(outcome)
            if good and self.paused:
                self.resume_writes()

    def end_load(self, good: bool, hbm: dict[int, Symbols], content: dict[bytes, Symbols]) -> None:
        """The oldest load ends."""
        if not self.loads:
            return
        load = self.loads.popleft()
        names = load.request_id
        skip = len(load.slots) - len(load.block_ids)
        for i, (slot, epoch, key) in enumerate(
            zip(load.slots.tolist(), load.epochs.tolist(), load.keys, strict=True)
        ):
            held = self.slots.get(slot)
            if slot in self.failing:
                self.report.unread.append((slot, epoch))
                good = False
                continue
            # As the real worker sees in the slot's header.
            if slot in self.broken or held is None or (held.epoch, held.key) != (epoch, key):
                self.report.bad.append((slot, epoch))
                good = False
                continue
            # Whole blocks of a running request come to DRAM under keys of nobody, too.
            known = content.get(key, held.symbols) if names in BACKGROUND else content[key]
            assert held.symbols == known, "a slot holds KV of other tokens than its key"
            block = int(load.block_ids[i - skip]) if i >= skip else 0
            if block:
                hbm[block] = list(held.symbols)
        tokens = len(load.slots) * BLOCK if good else 0
        seconds = len(load.slots) * self.pace.block_s
        self.report.loads.append(LoadTime(names, 0, tokens, 0.0, 0.0, seconds))
        if self.number == 0:
            self.pace.now += seconds
        if names == FETCH and good:
            self.cold.difference_update(load.slots.tolist())
        if names in BACKGROUND:
            return
        self.received.add(names)
        if not good or names in self.refused:
            self.failed.add(names)

    def output(self) -> KVConnectorOutput:
        report, self.report = self.report, RankReport()
        found = KVConnectorOutput(
            finished_recving=self.received,
            failed_recving=self.failed,
            invalid_block_ids=self.invalid,
            kv_connector_worker_meta=None
            if report.empty()
            else SSDKVWorkerMetadata([(self.number, report)]),
        )
        self.received, self.failed, self.invalid = set(), set(), set()
        return found
