"""Blocks that were read and lie where reads are slow move to where they are fast."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.connector.scheduler.pending_writes import PendingWrites
from vllm_ssdkv.connector.scheduler.write_policy import WritePolicy
from vllm_ssdkv.store.format.slot_geometry import I64
from vllm_ssdkv.store.index.slot_index import SlotIndex, SlotState
from vllm_ssdkv.store.placement.move import NO_MOVE, Move
from vllm_ssdkv.store.placement.rebalancer import Rebalancer

logger = logging.getLogger(__name__)

STEP_BYTES: Final = 16 * MIB
"""Of slots that begin to move in one step, or one slot: workers copy them from frame to frame at
its end, and check them, which takes some milliseconds."""

FLIGHT_BYTES: Final = 128 * MIB
"""Of slots that move at a time, or eight. The slow device gets a little of each, behind the reads
that it is late with: with less in flight, the others would wait for it. New blocks wait for no more
than that, and reads overtake writes."""

FRAMES: Final = 1 / 4
"""Part of DRAM's frames, at most, that is written from for moves: these cannot be evicted. With an
eighth, blocks moved more slowly than hits were read, and left DRAM before their turn."""

MAX_WAITING: Final = 4096
"""Blocks that were read and wait for their turn. The newest ones are kept: their frames last."""

RECENT: Final = 64
"""Loads that are remembered while nothing is to move."""

PATIENCE_S: Final = 10.0
"""Nothing waits longer for room, and no load is remembered longer: by then other hits have the
frames."""

_TELL_INTERVAL_S = 60.0

_NONE: Final[I64] = np.zeros(0, dtype=np.int64)


class _Read(NamedTuple):
    """A load that has ended, when, and what it read."""

    at: float
    slots: I64
    epochs: I64


class _Waiting(NamedTuple):
    """A slot whose block is to move."""

    epoch: int
    last: bool
    """Whether it failed before: this is its last chance."""


class Moves:
    """Decides which blocks move, and when. Runs in the scheduler, on its thread; never blocks.

    When a hit has been read, its blocks are in DRAM. Those that lie in segments which the
    rebalancer would stripe otherwise, so that they would be read faster, get new slots. Workers
    write these from DRAM, as they write new blocks. When all ranks have, the index finds the block
    in its new slot, and the old one is free when nobody uses it any more. When one has not, all
    stays as it was. So what is hot is read once from where it was; what is cold stays, and costs no
    write.

    A hit larger than DRAM has left it again in part when its turn comes, and a rank may have a
    write that fails: such a block is tried once more, after it was brought into DRAM beside the
    loads of requests. A running request of mode page goes on where its context began.
    """

    def __init__(
        self,
        index: SlotIndex,
        rebalancer: Rebalancer,
        policy: WritePolicy,
        counters: Counters,
        writes: PendingWrites,
        unpin: Callable[[Sequence[int]], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """``unpin`` lets go of slots, and has workers forget those that are free then."""
        self._index = index
        self._rebalancer = rebalancer
        self._policy = policy
        self._counters = counters
        self._writes = writes
        self._unpin = unpin
        self._clock = clock
        slot_bytes = rebalancer.placement.geometry.slot_bytes
        self._per_step = max(1, STEP_BYTES // slot_bytes)
        self._at_once = max(8, FLIGHT_BYTES // slot_bytes)
        self._recent: deque[_Read] = deque(maxlen=RECENT)
        """What was read last, while nothing was to move."""
        self._waiting: dict[int, _Waiting] = {}
        self._missing: dict[int, int] = {}
        """Slots that failed once, and their epochs: they are to be brought into DRAM."""
        self._since = 0.0
        """When a block began to wait, or to move, last."""
        self._moving: dict[int, int] = {}
        """New slot: old slot. Both are pinned."""
        self._sources: dict[int, bool] = {}
        """The old ones, and whether this is their last chance."""
        self._told: Sequence[float] = ()
        self._told_at = -math.inf

    @property
    def unfinished(self) -> bool:
        """Whether steps are needed for moves to go on."""
        return bool(self._moving or self._waiting or self._missing)

    # ---- the plan of a step ----

    def read(self, slots: I64, *, fetched: bool = False) -> None:
        """A load of these slots has ended, which began with the last ones; they are still pinned.
        ``fetched``: they are those of :meth:`take_missing`."""
        if not self._rebalancer.moving:  # as long as the devices are what they were
            self._missing.clear()
            self._recent.append(_Read(self._clock(), slots, self._index.epochs(slots)))
            return
        moving = self._rebalancer.to_move(slots)
        self._wait(slots[moving], self._index.epochs(slots[moving]), last=fetched)

    def _wait(self, slots: I64, epochs: I64, *, last: bool) -> None:
        for slot, epoch in zip(slots.tolist(), epochs.tolist(), strict=True):
            if self._may_move(slot, epoch):
                self._waiting.pop(slot, None)
                self._missing.pop(slot, None)
                self._waiting[slot] = _Waiting(epoch, last)
                self._since = self._clock()
        for waiting in (self._waiting, self._missing):
            while len(waiting) > MAX_WAITING:
                del waiting[next(iter(waiting))]

    def _take_recent(self) -> None:
        """Devices have changed. What was read before that was noticed moves, as far as DRAM still
        has it."""
        for read in self._recent:
            if read.at >= self._clock() - PATIENCE_S:
                moving = self._rebalancer.to_move(read.slots)
                self._wait(read.slots[moving], read.epochs[moving], last=True)
        self._recent.clear()

    def take_missing(self, spare: int, frames: int) -> I64:
        """Slots that are to be brought into DRAM now, as long as no others wait there: as many as
        move in a step, and as there is room for, with their copies, in ``spare`` frames of
        ``frames``. The others are those of running contexts. Not to be called while the slots of
        the last call are on their way."""
        if self._waiting or not self._missing:
            return _NONE
        if frames < 2 or self._policy.used_up(len(self._writes)):
            self._missing.clear()
        most = min(self._per_step, spare // 2, max(1, int(FRAMES * frames)))
        found: list[int] = []
        while self._missing and len(found) < most:
            slot, epoch = self._missing.popitem()
            if self._may_move(slot, epoch):
                found.append(slot)
        slots = np.array(found, dtype=np.int64)
        return slots[self._rebalancer.to_move(slots)]

    def _may_move(self, slot: int, epoch: int) -> bool:
        """Whether the slot still has what it had with this epoch, written, and is not moving."""
        found = self._index.epoch(slot) == epoch and self._index.state(slot) is SlotState.READY
        return found and slot not in self._writes and slot not in self._sources

    def plan(self, frames: int) -> Move:
        """What begins to move in this step. Workers have at least so many ``frames``."""
        if self._recent and self._rebalancer.moving:
            self._take_recent()
        if not self._waiting:
            return NO_MOVE
        at_once = min(self._at_once, max(1, int(FRAMES * frames)))
        old = self._next(min(self._per_step, at_once - len(self._moving)))
        new = self._rebalancer.take_room(len(old))
        if len(old) and not len(new):
            late = self._clock() - self._since > PATIENCE_S
            if late or not self._rebalancer.makes_room:
                self._waiting.clear()
        if not len(new):
            return NO_MOVE
        self._tell()
        self._since = self._clock()
        old = old[: len(new)]
        self._index.pin(old)
        move = Move(
            old,
            self._index.epochs(old),
            new,
            self._index.epochs(new),
            tuple(self._index.key(slot) for slot in old.tolist()),
        )
        for slot, target, epoch in zip(old.tolist(), new.tolist(), move.new_epochs, strict=True):
            self._moving[target] = slot
            self._sources[slot] = self._waiting.pop(slot).last
            self._writes.add(target, int(epoch))
        return move

    def _next(self, most: int) -> I64:
        """The last ``most`` slots of those that wait, ascending, without those that cannot move any
        more. So what was just read is not late for what was read before it; of a hit it is what was
        read first, and leaves DRAM first."""
        found: list[int] = []
        stay: list[int] = []
        for slot, waiting in reversed(self._waiting.items()):
            if len(found) >= most:
                break
            if self._policy.used_up(len(self._writes) + len(found)):
                stay += self._waiting.keys() - found
                break
            (found if self._may_move(slot, waiting.epoch) else stay).append(slot)
        slots = np.sort(np.array(found, dtype=np.int64))
        moving = self._rebalancer.to_move(slots)  # devices may have changed meanwhile
        for slot in {*stay, *slots[~moving].tolist()}:
            del self._waiting[slot]
        return slots[moving]

    def _tell(self) -> None:
        """Say why blocks begin to move: once for each change of the devices, and not too often."""
        weights = list(self._rebalancer.weights)
        if weights == self._told or self._clock() < self._told_at + _TELL_INTERVAL_S:
            return
        self._told, self._told_at = weights, self._clock()
        logger.info(
            "ssdkv: stored blocks that are read again are written anew from now on, where they are "
            "read faster: the devices are worth %s",
            ", ".join(f"{weight:.3g}" for weight in weights),
        )

    # ---- results ----

    def written(self, slots: Sequence[int]) -> list[int]:
        """Every rank has written these slots: blocks that moved are found in them. The others."""
        new = [slot for slot in slots if slot in self._moving]
        if not new:
            return list(slots)
        old = np.array([self._moving.pop(slot) for slot in new], dtype=np.int64)
        for slot in old.tolist():
            del self._sources[slot]
        moved = self._index.replace(old, np.array(new, dtype=np.int64))
        self._unpin(new)
        self._unpin(old.tolist())
        self._rebalancer.vacated(old[moved])
        self._counters.add("blocks_moved", int(moved.sum()))
        self._give_up(int((~moved).sum()))
        return [slot for slot in slots if slot not in new]

    def failed(self, slot: int) -> bool:
        """A rank could not write this slot: the block stays where it was, or is tried once more.

        Returns:
            False: no block was moving there.
        """
        old = self._moving.pop(slot, None)
        if old is None:
            return False
        self._writes.drop(slot)
        if self._sources.pop(old):
            self._give_up(1)
        else:
            self._rebalancer.give_room_back(1)
            self._missing[old] = self._index.epoch(old)
        self._unpin([slot])
        self._unpin([old])
        return True

    def _give_up(self, blocks: int) -> None:
        self._rebalancer.give_room_back(blocks)
        self._counters.add("moves_failed", blocks)
