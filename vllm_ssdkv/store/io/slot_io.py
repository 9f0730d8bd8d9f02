"""The open data files of one rank with everything needed to address them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.devices.health import DeviceHealth
from vllm_ssdkv.store.devices.throughput import BatchWatch, Moment, ThroughputEstimator
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.integrity.slot_codec import SlotCodec
from vllm_ssdkv.store.io.coalescing import MOST_REQUESTS, CoalescedBatch, submit_coalesced
from vllm_ssdkv.store.io.engines.protocol import U16, U64, Batch, IoEngine, Op
from vllm_ssdkv.store.io.slot_request import SlotRequest
from vllm_ssdkv.store.memory.memory_plan import GROUP
from vllm_ssdkv.store.placement.placement import Placement
from vllm_ssdkv.store.placement.replica_selector import Replicas
from vllm_ssdkv.store.placement.stripe_map import Extents

logger = logging.getLogger(__name__)


GROUP_BYTES = 64 * 1024 * 1024
"""Most bytes of whole slots per submission: what is queued must end well before the deadline."""


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """Copies of slots to read from, where they have two.

    Attributes:
        copy: The first ones, 0, or the second ones, 1.
        without: Devices whose pieces are to come from the other copy all the same.
    """

    copy: int = 0
    without: tuple[int, ...] = ()

    def second(self, first: U16, second: U16) -> NDArray[np.bool_]:
        """Mask of the pieces, [m], whose second copy is meant, given the devices of both."""
        there = second if self.copy else first
        return np.isin(there, self.without) ^ bool(self.copy)


@dataclass(frozen=True, slots=True)
class SlotIO:
    """Slots on the devices of one rank. Only the placement ever changes, when the scheduler says so
    (:meth:`Placement.change`). Methods may be called from any thread."""

    geometry: SlotGeometry
    placement: Placement
    engine: IoEngine
    health: DeviceHealth
    speed: ThroughputEstimator
    counters: Counters
    fingerprint: bytes
    rank: int
    deadline_s: float
    codec: SlotCodec
    replicas: Replicas

    def mark_suspect(self, slots: NDArray[np.int64], devices: U16) -> NDArray[np.bool_]:
        """Copies of slots, [n], on devices, [n], are wrong or out of date, but there are others;
        which of them were not suspect before, [n]. Counted and logged once."""
        new = self.replicas.mark_suspect(slots, devices)
        for copy in np.unique(slots[new] << 16 | devices[new]).tolist():
            slot, path = copy >> 16, self.health.paths[copy & 0xFFFF]
            self.counters.add("bad_copies", 1, device=path)
            logger.warning(
                "ssdkv: the copy of slot %d on %s is wrong or out of date, the other one is read",
                slot,
                path,
            )
        return new

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
        source: ReadFrom | None = None,
        coalesced: bool = False,
        merged: bool = True,
        tails: U64 | None = None,
        again: bool = False,
    ) -> SlotRequest:
        """Start reading or writing bytes [offset, offset + length) of each slot.

        Nothing is sent to a device that is out of use: it might never answer, and would keep the
        buffers. Nor is anything written to one whose writes are paused. What lies there fails at
        once. Both copies of a slot are written; of what is read,
        each piece comes from the copy that is likely to be right, on the device with less to do.

        Args:
            op: Direction.
            slots: Slot numbers, [n].
            offset: Byte offset within each slot, one for all or one each, [n]: multiples of 4096.
            length: Bytes per slot, a multiple of 4096.
            buffers: Arena offset per slot, [n].
            source: Read these copies, or write them, and no others.
            coalesced: Neighbours, on the device and in the arena, go to the engine as one request.
            merged: As in :meth:`Placement.extents`.
            tails: Arena offset per slot of its tail, where that does not lie behind the rest, of
                whole slots.
            again: This was tried before, and has failed: a device is not charged with it twice.
        """
        without = () if source is None else source.without
        asked = time.monotonic()
        cut = 0 if tails is None else self.geometry.frame_bytes
        if not self.health.any_avoided(op):
            most = MOST_REQUESTS if coalesced else 1
            found = self.placement.pieces(
                slots, offset, length, buffers, merged=merged, most=most, tails=tails, cut=cut
            )
            if found is not None:  # no copy to choose, no device to spare
                batch: Batch = self.engine.submit(op, *found.requests())
                watch = BatchWatch(self.speed, found.nbytes(), Moment(asked, time.monotonic()))
                if coalesced:
                    batch = CoalescedBatch(batch, *found.parts())
                return SlotRequest(
                    self, op, slots.copy(), length, watch, batch, found, again, without
                )
        first, second = self.placement.copies(slots, offset, length, merged=merged, cut=cut)
        extents = first
        others: U16 | None = None
        twin: NDArray[np.int64] | None = None
        if second is not None and source is not None:
            extents = _either(source.second(first.device, second.device), second, first)
        elif second is not None and op is Op.WRITE:
            extents, twin = _both(first, second)
            others = extents.device[twin]
        elif second is not None:
            take = self.replicas.choose(slots[first.slot_index], first, second)
            extents = _either(take, second, first)
            others = np.where(take, first.device, second.device)
        inside = extents.buffer - extents.slot_index.astype(np.uint64) * np.uint64(length)
        sent: NDArray[np.int64] | EllipsisType = ...
        if self.health.any_avoided(op):
            sent = np.flatnonzero(~self.health.avoided(op, extents.device))
        device, lengths = extents.device[sent], extents.length[sent]
        at = buffers[extents.slot_index] + inside
        if tails is not None:
            behind = inside >= cut
            at[behind] = (tails[extents.slot_index] + inside - np.uint64(cut))[behind]
        at = at[sent]
        requests = (device, extents.offset[sent], lengths, at)
        asked = time.monotonic()
        if coalesced:
            batch = submit_coalesced(self.engine, op, *requests)
        else:
            batch = self.engine.submit(op, *requests)
        if second is not None:
            self.replicas.submitted(batch, device, lengths)
        nbytes = np.bincount(device, lengths, self.speed.devices).astype(np.float64)
        watch = BatchWatch(self.speed, nbytes, Moment(asked, time.monotonic()))
        return SlotRequest(
            self,
            op,
            slots.copy(),
            length,
            watch,
            batch,
            extents,
            again,
            without,
            others,
            twin,
            sent,
        )


def _both(first: Extents, second: Extents) -> tuple[Extents, NDArray[np.int64]]:
    """Pieces of both copies, and which piece is the same of the other copy; its own number, where
    there is none."""
    doubled = np.flatnonzero(first.device != second.device)
    extents = Extents(
        *(
            np.concatenate([getattr(first, name), getattr(second, name)[doubled]])
            for name in ("device", "offset", "length", "slot_index", "buffer")
        )
    )
    twin = np.arange(len(extents.device), dtype=np.int64)
    behind = np.arange(len(first.device), len(extents.device), dtype=np.int64)
    twin[doubled], twin[behind] = behind, doubled
    return extents, twin


def _either(take: NDArray[np.bool_], second: Extents, first: Extents) -> Extents:
    return Extents(
        np.where(take, second.device, first.device),
        np.where(take, second.offset, first.offset),
        first.length,
        first.slot_index,
        first.buffer,
    )
