"""Rewrite on read: a block that a hit read from slow places is stored again, in fast ones."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.connector.scheduler.kv_groups import GroupLoad
from vllm_ssdkv.connector.scheduler.slot_ledger import PendingWrites
from vllm_ssdkv.store.format.slot_geometry import I64
from vllm_ssdkv.store.index.slot_index import SlotIndex, SlotState
from vllm_ssdkv.store.placement.rebalancer import Rebalancer
from vllm_ssdkv.store.write_policy import WritePolicy

STEP_BYTES: Final = 16 * MIB
"""Limit of the rewrites that one step begins, or one slot: the step's thread copies them."""

FLIGHT_BYTES: Final = 128 * MIB
"""Limit of the rewrites in flight, or eight slots. The slow device is the last to end its part of
each; with less in flight, the fast ones would wait for it."""

FRAMES: Final = 1 / 4
"""Largest share of DRAM's frames that rewrites hold; those frames cannot be evicted."""

MOST_WAITING: Final = 4096
"""Limit of the blocks that wait for frames when their requests have ended."""

_IN_DRAM: Final = 0
"""Null block of vLLM, in place of an HBM block."""

_NO_BLOCKS: Final = np.zeros(0, dtype=np.int64)


class Rewrite(NamedTuple):
    """One block, its old slot and its new one.

    ``block_id`` is its HBM block; 0, vLLM's null block: a frame is copied instead.
    """

    old: int
    old_epoch: int
    new: int
    epoch: int
    key: bytes
    block_id: int


@dataclass(slots=True)
class _Hit:
    """Loaded blocks of a request, arrays of one length.

    Attributes:
        left: Positions that were not rewritten yet, ascending.
        lasting: The request keeps these blocks for as long as it runs.
    """

    slots: I64
    epochs: I64
    keys: Sequence[bytes]
    block_ids: I64
    left: I64
    lasting: bool


class NoRewrites:
    """Stand-in for a :class:`Rewriter` where the devices are a node's: it never chooses a block.

    Example:
        >>> NoRewrites().plan({"request"}, frames=8)
        []
    """

    unfinished = False

    def __len__(self) -> int:
        """Nothing is remembered."""
        return 0

    def loaded(self, request_id: str, load: GroupLoad, *, lasting: bool) -> None:
        """See :meth:`Rewriter.loaded`."""

    def ended(self, load: GroupLoad) -> None:
        """See :meth:`Rewriter.ended`."""

    def forget(self, request_id: str) -> None:
        """See :meth:`Rewriter.forget`."""

    def plan(self, running: Container[str], frames: int) -> list[Rewrite]:
        """See :meth:`Rewriter.plan`."""
        return []

    def pause(self, running: Container[str]) -> None:
        """See :meth:`Rewriter.pause`."""

    def fetch(self, spare: int, frames: int) -> GroupLoad | None:
        """See :meth:`Rewriter.fetch`."""
        return None

    def fetched(self) -> None:
        """See :meth:`Rewriter.fetched`."""

    def written(self, slots: Sequence[int]) -> list[int]:
        """See :meth:`Rewriter.written`."""
        return list(slots)

    def failed(self, slot: int) -> bool:
        """See :meth:`Rewriter.failed`."""
        return False


class Rewriter:
    """Choose blocks to store again, a few per step. Runs on the scheduler's thread; never blocks.

    A candidate is a block that a request has loaded from an outdated segment
    (:meth:`Rebalancer.outdated`). It gets a new slot as a new block does, and is written as one:
    from HBM while the request runs. In page mode HBM does not have it. There it waits until the
    request has ended and DRAM has frames that no running context has; then it is loaded into one,
    unless it is there, and copied.
    Its key names the old slot until every rank has written the new one. So a kill or a failed
    write leaves the old copy, and the next hit tries again. Cold blocks cost no write.
    """

    def __init__(
        self,
        index: SlotIndex,
        rebalancer: Rebalancer,
        policy: WritePolicy,
        counters: Counters,
        writes: PendingWrites,
        unpin: Callable[[Sequence[int]], None],
    ):
        """``unpin`` releases slots, and has workers forget those that are free then."""
        self._index = index
        self._rebalancer = rebalancer
        self._policy = policy
        self._counters = counters
        self._writes = writes
        self._unpin = unpin
        slot_bytes = rebalancer.placement.geometry.slot_bytes
        self._per_step = max(1, STEP_BYTES // slot_bytes)
        self._in_flight = max(8, FLIGHT_BYTES // slot_bytes)
        self._hits: dict[str, _Hit] = {}
        self._old: dict[int, int] = {}
        """New slot: old slot. Both are pinned."""
        self._leaving: set[int] = set()
        """Old slots of these."""
        self._waiting: dict[int, tuple[int, bytes]] = {}
        """Slot: epoch and key, of blocks to load into frames."""
        self._fetching: list[tuple[int, int, bytes]] = []
        """Slot, epoch and key, of blocks that are being loaded."""
        self._fetched = False
        self._no_frames = False
        """Running contexts have all frames."""

    def __len__(self) -> int:
        """Number of hits and blocks that are remembered."""
        return len(self._hits) + len(self._waiting) + len(self._fetching)

    @property
    def unfinished(self) -> bool:
        """Check whether steps are needed for requests that have ended."""
        return bool(self._fetching or (self._waiting and not self._no_frames))

    def loaded(self, request_id: str, load: GroupLoad, *, lasting: bool) -> None:
        """A running request's hit is in HBM where it has block ids; its slots are still pinned.

        ``lasting``: False where a step may take HBM blocks of it back, as behind a window. Such a
        hit takes part in the first step of its request only.
        """
        left = np.arange(len(load.slots) - len(load.block_ids), len(load.slots), dtype=np.int64)
        block_ids = np.zeros(len(load.slots), dtype=np.int64)
        block_ids[left] = load.block_ids
        epochs = self._index.epochs(load.slots)
        self._hits[request_id] = _Hit(load.slots, epochs, load.keys, block_ids, left, lasting)

    def ended(self, load: GroupLoad) -> None:
        """A request that ran on this hit in page mode is over; its slots are still pinned."""
        self._no_frames = False
        for position in np.flatnonzero(self._rebalancer.outdated(load.slots)).tolist():
            slot = int(load.slots[position])
            if len(self._waiting) < MOST_WAITING:
                self._waiting[slot] = (self._index.epoch(slot), load.keys[position])

    def forget(self, request_id: str) -> None:
        """The request does not run any more; HBM blocks of its hit are not its own."""
        self._hits.pop(request_id, None)

    def plan(self, running: Container[str], frames: int) -> list[Rewrite]:
        """Rewrites that this step begins. Workers have at least so many ``frames``."""
        found: list[Rewrite] = []
        for name, hit in list(self._hits.items()):
            if name not in running:
                continue
            if self._rebalancer.has_outdated:
                slow = hit.left[self._rebalancer.outdated(hit.slots[hit.left])]
                looked = self._take(hit, slow, found, frames)
                hit.left = np.setdiff1d(hit.left, slow[:looked])
            if not hit.lasting:
                del self._hits[name]
        if self._fetched:
            for slot, epoch, key in self._fetching:
                if self._has_room(len(found), frames) and self._may_rewrite(slot, epoch):
                    found.append(self._begin(slot, epoch, key, _IN_DRAM))
            self._fetching, self._fetched = [], False
        return found

    def pause(self, running: Container[str]) -> None:
        """Drop what cannot wait: for :meth:`plan` and :meth:`fetch` while writes are paused.

        The end of a pause may need a new request's write, so steps without one would not bring it
        about.
        """
        for name, hit in list(self._hits.items()):
            if name in running and not hit.lasting:
                del self._hits[name]
        self._waiting.clear()
        if self._fetched:
            self._fetching, self._fetched = [], False

    def fetch(self, spare: int, frames: int) -> GroupLoad | None:
        """Blocks to load into frames now, beside which their copies have room; None: nothing.

        Of ``frames`` that workers have at least, running contexts leave ``spare`` ones.
        """
        if self._fetching or not self._waiting:
            return None
        count = min(self._per_step, self._left(frames), spare // 2, self._index.free_now())
        self._no_frames = spare < 2 <= frames
        if not self._old and (frames < 2 or not self._has_room(0, frames)):
            self._waiting.clear()  # a full store, or a budget that is used up, is not waited for
        while self._waiting and len(self._fetching) < count:
            slot = next(iter(self._waiting))
            epoch, key = self._waiting.pop(slot)
            (outdated,) = self._rebalancer.outdated(np.array([slot], dtype=np.int64))
            if outdated and self._may_rewrite(slot, epoch):
                self._fetching.append((slot, epoch, key))
        if not self._fetching:
            return None
        slots = np.array([slot for slot, _, _ in self._fetching], dtype=np.int64)
        return GroupLoad(slots, tuple(key for _, _, key in self._fetching), _NO_BLOCKS, len(slots))

    def fetched(self) -> None:
        """The load has ended, well or badly: the next step copies the frames that there are."""
        self._fetched = True

    def _take(self, hit: _Hit, positions: I64, found: list[Rewrite], frames: int) -> int:
        """Begin to rewrite a hit's first blocks of these; how many were looked at."""
        for looked, position in enumerate(positions.tolist()):
            if not self._has_room(len(found), frames):
                return looked
            old, epoch = int(hit.slots[position]), int(hit.epochs[position])
            if self._may_rewrite(old, epoch):
                at = int(hit.block_ids[position])
                found.append(self._begin(old, epoch, hit.keys[position], at))
        return len(positions)

    def _has_room(self, begun: int, frames: int) -> bool:
        """Check whether one more block may be rewritten in a step that has ``begun`` so many."""
        return (
            begun < self._per_step
            and self._left(frames) > 0
            # A deferred slot would be outdated itself. The old slot is pinned meanwhile: running
            # requests count on two less.
            and self._index.free_now() > 0
            and self._index.available() > 1
            and not self._policy.used_up(len(self._writes))
        )

    def _left(self, frames: int) -> int:
        """Number of rewrites that may be in flight beside those that are."""
        return min(self._in_flight, max(1, int(FRAMES * frames))) - len(self._old)

    def _may_rewrite(self, slot: int, epoch: int) -> bool:
        """Check whether the slot still has its block, written, and nobody rewrites it already."""
        ready = self._index.epoch(slot) == epoch and self._index.state(slot) is SlotState.READY
        return ready and slot not in self._writes and slot not in self._leaving

    def _begin(self, old: int, old_epoch: int, key: bytes, block_id: int) -> Rewrite:
        self._index.pin(np.array([old], dtype=np.int64))
        new = int(self._index.allocate(1)[0])
        epoch = self._index.epoch(new)
        self._old[new] = old
        self._leaving.add(old)
        self._writes.add(new, epoch)
        return Rewrite(old, old_epoch, new, epoch, key, block_id)

    # ---- results ----

    def written(self, slots: Sequence[int]) -> list[int]:
        """Every rank has written these slots: rewritten blocks are found in them from now on.

        Returns:
            The slots that are no rewrites.
        """
        new = [slot for slot in slots if slot in self._old]
        if not new:
            return list(slots)
        old = [self._old.pop(slot) for slot in new]
        self._leaving.difference_update(old)
        done = self._index.replace(np.array(old, dtype=np.int64), np.array(new, dtype=np.int64))
        self._unpin(new)
        self._unpin(old)
        self._counters.add("blocks_rewritten", int(done.sum()))
        return [slot for slot in slots if slot not in new]

    def failed(self, slot: int) -> bool:
        """A rank could not write this slot: its block stays in the old one.

        Returns:
            False: it is no rewrite.
        """
        old = self._old.pop(slot, None)
        if old is None:
            return False
        self._leaving.discard(old)
        self._writes.drop(slot)
        self._unpin([slot])
        self._unpin([old])
        return True
