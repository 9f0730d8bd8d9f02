"""The open data files of one rank with everything needed to address them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.metrics import Counters
from vllm_ssdkv.store.engine.protocol import PENDING, U64, Batch, IoEngine, Op
from vllm_ssdkv.store.health import DeviceHealth
from vllm_ssdkv.store.joined import submit_joined
from vllm_ssdkv.store.layout import Extents, SlotGeometry
from vllm_ssdkv.store.placement import Placement
from vllm_ssdkv.store.sealer import Sealer
from vllm_ssdkv.store.speed import BatchWatch, DeviceSpeed

GROUP = 64
"""Most whole slots per submission."""

GROUP_BYTES = 64 * 1024 * 1024
"""Most bytes of whole slots per submission: what is queued must end well before the deadline."""

_FIRST_LOOK_S = 0.001
"""How soon a waiting batch looks which devices have done their part; then in growing intervals."""

_LOOK_S = 0.1
"""How often a waiting batch looks whether the devices it waits for were given up meanwhile."""


@dataclass(frozen=True, slots=True)
class SlotFiles:
    """Slots on the devices of one rank. Only the placement ever changes, when the scheduler says so
    (:meth:`Placement.change`). Methods may be called from any thread."""

    geometry: SlotGeometry
    placement: Placement
    engine: IoEngine
    health: DeviceHealth
    speed: DeviceSpeed
    counters: Counters
    fingerprint: bytes
    rank: int
    deadline_s: float
    sealer: Sealer

    @property
    def group(self) -> int:
        """Whole slots to submit at once."""
        return max(1, min(GROUP, GROUP_BYTES // self.geometry.slot_bytes))

    def submit(
        self,
        op: Op,
        slots: NDArray[np.int64],
        offset: int | NDArray[np.int64],
        length: int,
        buffers: U64,
        *,
        joined: bool = False,
    ) -> SlotBatch:
        """Start reading or writing bytes [offset, offset + length) of each slot.

        Nothing is sent to a device that is out of use: it might never answer, and would keep the
        buffers. What lies there fails at once.

        Args:
            op: Direction.
            slots: Slot numbers, [n].
            offset: Byte offset within each slot, one for all or one each, [n]: multiples of 4096.
            length: Bytes per slot, a multiple of 4096.
            buffers: Arena offset per slot, [n].
            joined: Neighbours, on the device and in the arena, go to the engine as one request.
        """
        extents = self.placement.extents(slots, offset, length)
        inside = extents.buffer - extents.slot_index.astype(np.uint64) * np.uint64(length)
        sent = np.flatnonzero(~self.health.out_of_use(extents.device))
        requests = (
            extents.device[sent],
            extents.offset[sent],
            extents.length[sent],
            buffers[extents.slot_index[sent]] + inside[sent],
        )
        batch: Batch
        if joined:
            batch = submit_joined(self.engine, op, *requests)
        else:
            batch = self.engine.submit(op, *requests)
        now = time.monotonic()
        watch = BatchWatch(self.speed, extents.device[sent], extents.length[sent], now)
        deadline = now + self.deadline_s
        return SlotBatch(self, op, len(slots), length, extents, sent, batch, watch, deadline)


@dataclass(frozen=True, slots=True, eq=False)
class SlotBatch:
    """One batch of slot requests in flight. ``sent`` are the extents that reached the engine."""

    files: SlotFiles
    op: Op
    slots: int
    length: int
    """Bytes per slot."""
    extents: Extents
    sent: NDArray[np.int64]
    batch: Batch
    watch: BatchWatch
    deadline: float
    """Time of the monotonic clock, counted from the submission."""

    def wait(self, beside: Sequence[SlotBatch] = ()) -> NDArray[np.bool_]:
        """Wait until all has ended or the deadline passes; which slots succeeded, shape [slots].

        Ends early when only devices out of use are still to answer. Call it once: failures are
        counted here.

        Args:
            beside: Batches in flight whose turn comes later: the speed of the devices is seen from
                when their parts end.
        """
        pause = _FIRST_LOOK_S
        while not self.over(pause):
            pause = min(_LOOK_S, 1.2 * pause)
            for later in beside:
                later.over(0.0)
        name = "read" if self.op is Op.READ else "write"
        device, length = self.extents.device[self.sent], self.extents.length[self.sent]
        good = np.zeros(len(self.extents.device), dtype=np.bool_)
        good[self.sent] = self.files.health.judge(device, self.batch.results(), length, name)
        self._count(good, name)
        return ~self._slots_of(~good)

    def readable(self) -> NDArray[np.bool_]:
        """Slots, [slots], of which every byte has arrived by now."""
        good = np.zeros(len(self.extents.device), dtype=np.bool_)
        good[self.sent] = self.batch.results() == self.extents.length[self.sent].astype(np.int64)
        return ~self._slots_of(~good)

    def over(self, timeout_s: float) -> bool:
        """Whether :meth:`wait` would return at once; blocks for ``timeout_s`` at most."""
        remaining = self.deadline - time.monotonic()
        done = self.batch.wait(max(0.0, min(timeout_s, remaining)))
        if not self.watch.done:
            self.watch.look(self.batch, time.monotonic())
        if done or remaining <= timeout_s:
            return True
        return bool(self.files.health.out_of_use(self.extents.device[self._pending()]).all())

    def held(self) -> NDArray[np.bool_]:
        """Slots, [slots], whose buffers an I/O may still touch now."""
        mask = np.zeros(len(self.extents.device), dtype=np.bool_)
        mask[self._pending()] = True
        return self._slots_of(mask)

    def out_of_reach(self) -> NDArray[np.bool_]:
        """Slots, [slots], a part of which lies on a device that is out of use now."""
        return self._slots_of(self.files.health.out_of_use(self.extents.device))

    def verified(
        self,
        right: NDArray[np.bool_],
        wrong_slot: NDArray[np.intp],
        wrong_offset: NDArray[np.int64],
    ) -> None:
        """Tell what the checksums of this read said, so that a device that garbles is found.

        Args:
            right: Slots of the batch whose bytes are right, [slots].
            wrong_slot: Slot of each wrong page, as an index into the batch, [n].
            wrong_offset: Where that page begins in the slot's bytes, [n].
        """
        device = self.extents.device.astype(np.intp)
        at = wrong_slot * self.length + wrong_offset
        extent = np.searchsorted(self.extents.buffer.astype(np.int64), at, side="right") - 1
        # A page that begins on one device may end on another: then neither is accused.
        end = (self.extents.buffer[extent] + self.extents.length[extent]).astype(np.int64)
        whole = at + self.files.geometry.page_bytes <= end
        accused = np.unique(extent[whole])
        self.files.health.judge_content(device[right[self.extents.slot_index]], device[accused])

    def ended(self) -> bool:
        """Whether all buffers are free again."""
        return self.batch.done()

    def _pending(self) -> NDArray[np.int64]:
        pending: NDArray[np.int64] = self.sent[self.batch.results() == PENDING]
        return pending

    def _slots_of(self, extents: NDArray[np.bool_]) -> NDArray[np.bool_]:
        mask = np.zeros(self.slots, dtype=np.bool_)
        mask[self.extents.slot_index[extents]] = True
        return mask

    def _count(self, good: NDArray[np.bool_], name: str) -> None:
        paths = self.files.health.paths
        metric = "bytes_read" if name == "read" else "bytes_written"
        done = np.bincount(self.extents.device[good], self.extents.length[good])
        for device in np.flatnonzero(done).tolist():
            self.files.counters.add(metric, float(done[device]), device=paths[device])
