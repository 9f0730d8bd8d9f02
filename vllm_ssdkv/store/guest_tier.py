"""A tier that a user brings: what it does, and the halves of a tier over it."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import StoreError, UnsupportedError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.format.slot_geometry import round_up
from vllm_ssdkv.store.index.slot_index import SlotIndex, SlotState
from vllm_ssdkv.store.io.thread_errors import ThreadErrors
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome
from vllm_ssdkv.store.read.prefix_loader import CopyIn
from vllm_ssdkv.store.tier import I32, I64, Pairs

logger = logging.getLogger(__name__)

NUMBERS: Final = 1 << 18
"""Blocks of a guest's that an engine has numbers for at a time; 64 bytes each."""

FRAMES: Final = 4096
"""Blocks on their way at a time, at most."""

LOADED_AT_ONCE: Final = 4

PAGE: Final = 4096

_SUM_BYTES: Final = 16


class Tier(Protocol):
    """Blocks by key. Each worker has one for its own rank, and the scheduler one for each rank.

    Calls may raise: a block that is not found, or cannot be loaded, is computed. :meth:`find` and
    :meth:`drop` hold the engine up while they run, the others run beside it, on one thread.
    """

    def __init__(self, name: str, block_bytes: int) -> None:
        """``name``: of everything that is stored here, of letters and digits: other models and
        ranks have other names. ``block_bytes``: of each block."""

    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Mask of these keys that have a block."""

    def put(self, key: bytes, block: memoryview) -> None:
        """Keep a copy of a block; whole, or not at all. It may be let go at any time."""

    def load(self, key: bytes, into: memoryview) -> bool:
        """Copy a block ``into`` memory; False: there is none."""

    def drop(self, keys: Sequence[bytes]) -> None:
        """Let these go, those that there are."""

    def close(self) -> None:
        """Nothing is called any more."""


class GuestIndex(SlotIndex):
    """The scheduler's half: numbers for the blocks that a guest is known to have.

    Example:
        index = GuestIndex([guest], counters)
        slots = index.lookup(keys)
    """

    def __init__(self, guests: Sequence[Tier], counters: Counters, numbers: int = NUMBERS):
        """``guests``: of each rank; closed by :meth:`close`."""
        super().__init__(numbers, None)
        self._guests, self._metrics = guests, counters
        self._errors = ThreadErrors(counters, "tier")
        self._absent: set[bytes] = set()
        """Keys that the guest did not have since the last step."""
        self._dropped: dict[int, bytes] = {}
        """Keys of slots that were dropped, until nobody uses them."""

    def lookup(self, keys: Sequence[bytes]) -> I64:
        """See ``TierIndex``."""
        found = super().lookup(keys)
        if len(found) < len(keys) and keys[len(found)] not in self._absent:
            self._ask(keys[len(found) :])
            found = super().lookup(keys)
        return found

    def last(self, keys: Sequence[bytes], first: int, end: int, tags: Sequence[int]) -> int:
        """See ``TierIndex``."""
        tagged = [
            key[:-1] + bytes((key[-1] ^ tag,)) for key in keys[first : max(0, end)] for tag in tags
        ]
        self._ask(tagged)
        return super().last(keys, first, end, tags)

    def _ask(self, keys: Sequence[bytes]) -> None:
        """Number those of these blocks that every rank's guest has."""
        new = [key for key in keys if key not in self._absent and self.find(key) is None]
        there: NDArray[np.bool_] = np.zeros(len(new), dtype=np.bool_)
        with self._errors.swallowed("nothing more is found in the tier in this step"):
            there[:] = np.logical_and.reduce([list(guest.find(new)) for guest in self._guests])
        slots = []
        for key, stored in zip(new, there.tolist(), strict=True):
            if not stored:
                self._absent.add(key)
            elif self.available():
                (slot,) = self.allocate(1)
                self.publish(slot, key)
                slots.append(slot)
        self.unpin(np.array(slots, dtype=np.int64))

    def durable(self, slot: int | I64) -> None:
        """See ``TierIndex``."""
        super().durable(slot)
        self._metrics.add("slots_stored", len(np.atleast_1d(slot)))

    def drop(self, slot: int | I64) -> None:
        """See ``TierIndex``."""
        ready = [one for one in np.atleast_1d(slot).tolist() if self.state(one) is SlotState.READY]
        keys = [self.key(one) for one in ready]
        super().drop(slot)
        self._drop(keys)
        pinned = [self.state(one) is not SlotState.FREE for one in ready]
        self._dropped.update(
            (one, key) for one, key, p in zip(ready, keys, pinned, strict=True) if p
        )

    def unpin(self, slots: I64) -> None:
        """See ``TierIndex``. A block that was dropped on its way to the guest is dropped there."""
        super().unpin(slots)
        ended = [slot for slot in slots.tolist() if slot in self._dropped]
        free = [slot for slot in ended if self.state(slot) is SlotState.FREE]
        keys = [self._dropped.pop(slot) for slot in free]
        self._drop([key for key in keys if self.find(key) is None])

    def _drop(self, keys: Sequence[bytes]) -> None:
        self._absent.update(keys)
        for guest in self._guests if keys else ():
            with self._errors.swallowed("a block that is of no use stays in the tier"):
                guest.drop(keys)

    def step(self) -> None:
        """See ``TierSteps``."""
        self._absent.clear()

    def forget_stored(self) -> None:
        """See ``TierSteps``.

        Raises:
            UnsupportedError: always; the options refuse what would need it.
        """
        raise UnsupportedError("tier: a guest cannot be told to forget what is on its way to it")

    def close(self, timeout_s: float = 10.0) -> bool:
        """Close the guests."""
        for guest in self._guests:
            guest.close()
        return super().close(timeout_s)


class _Frames:
    """Frames of an arena of their own, by number."""

    def __init__(self, frame_bytes: int, count: int):
        self.arena = Arena(round_up(count * frame_bytes, PAGE))
        self._frame_bytes = frame_bytes
        self.free = list(range(count))

    def address(self, frames: I32) -> NDArray[np.uint64]:
        """See ``FrameMemory``."""
        offsets = frames.astype(np.uint64) * np.uint64(self._frame_bytes)
        return np.uint64(self.arena.address) + offsets

    def view(self, frame: int) -> NDArray[np.uint8]:
        """See ``FrameMemory``."""
        return self.arena.view(frame * self._frame_bytes, self._frame_bytes)


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way, ``since`` when, of the monotonic clock."""

    job: LoadJob
    outcome: LoadOutcome
    since: float
    over: bool = False


class GuestStore:
    """A worker's half: one thread brings blocks to a guest, and from it.

    A block carries a checksum in place of its header, so that what a guest spoils is never used.

    Example:
        store = GuestStore(guest, 65536, counters, dram_bytes=1 << 30, deadline_s=10.0)
        store.start(copy_in, block_tokens=16)
        frames = store.reserve_frames(slots, wait=False)
    """

    open_frames = 0
    """Nothing stays in DRAM."""

    def __init__(
        self,
        guest: Tier,
        frame_bytes: int,
        counters: Counters,
        dram_bytes: int,
        deadline_s: float,
    ):
        """``guest`` is closed by :meth:`close`. ``deadline_s``: for which it may stand still.

        Raises:
            StoreError: there is no memory.
        """
        self._guest, self._deadline_s = guest, deadline_s
        count = max(LOADED_AT_ONCE + 1, min(FRAMES, dram_bytes // frame_bytes))
        self.save_frames = self.load_frames = _Frames(frame_bytes, count)
        self._loading = np.array(
            [self.save_frames.free.pop() for _ in range(LOADED_AT_ONCE)], dtype=np.int32
        )
        self._errors = ThreadErrors(counters, "tier")
        self._copying, self._lock = threading.Lock(), threading.Lock()
        self._held: dict[int, int] = {}
        """Frame by slot, of blocks that are not flushed."""
        self._queued: dict[int, tuple[int, bytes, int]] = {}
        """Epoch, key and frame by slot, of blocks that are."""
        self._putting: tuple[int, int] | None = None
        """Slot and epoch of the block that is put now, until it was told."""
        self._moved = 0.0
        """When the guest last answered, of the monotonic clock."""
        self._results: tuple[Pairs, Pairs] = ([], [])
        self._loads: list[_Load] = []
        self._ended = threading.Condition(self._lock)
        self._todo: queue.SimpleQueue[int | _Load | None] = queue.SimpleQueue()
        self._closed = False
        self._copy_in: CopyIn | None = None
        self._block_tokens = 0
        self._thread = threading.Thread(target=self._run, name="ssdkv-tier", daemon=True)

    def start(self, copy_in: CopyIn, block_tokens: int) -> None:
        """Begin, once. ``copy_in`` copies frames into HBM blocks."""
        self._copy_in, self._block_tokens = copy_in, block_tokens
        self._thread.start()

    # ---- write path ----

    def reserve_frames(self, slots: I64, *, wait: bool, spare_contexts: bool = False) -> I32:
        """See ``TierStore``."""
        self.abandon(slots)
        with self._lock:
            free = self.save_frames.free
            frames = [free.pop() for _ in range(min(len(slots), len(free)))]
            self._held.update(zip(slots.tolist(), frames, strict=False))
        return np.array(frames, dtype=np.int32)

    def flush(self, slots: I64, epochs: I64, keys: Sequence[bytes], *, bound: bool = True) -> None:
        """See ``TierStore``."""
        for slot, epoch, key in zip(slots.tolist(), epochs.tolist(), keys, strict=True):
            with self._lock:
                if not self._queued and self._putting is None:
                    self._moved = time.monotonic()
                self._queued[slot] = epoch, key, self._held.pop(slot)
            self._todo.put(slot)

    def abandon(self, slots: I64) -> None:
        """See ``TierStore``."""
        with self._lock:
            for slot in slots.tolist():
                frame = self._held.pop(slot, None)
                if frame is not None:
                    self.save_frames.free.append(frame)
                self._give_up(slot)

    def _give_up(self, slot: int) -> None:
        """Do not put a block. Lock held."""
        queued = self._queued.pop(slot, None)
        if queued is not None:
            self.save_frames.free.append(queued[2])
            self._results[1].append((slot, queued[0]))

    def take_write_results(self) -> tuple[Pairs, Pairs]:
        """See ``TierStore``. What waits for a guest that stands still for the deadline has
        failed."""
        with self._lock:
            waits = self._queued or self._putting is not None
            if waits and time.monotonic() > self._moved + self._deadline_s:
                if self._putting is not None:
                    self._results[1].append(self._putting)
                    self._putting = None
                for slot in list(self._queued):
                    self._give_up(slot)
            results, self._results = self._results, ([], [])
        return results

    # ---- load path ----

    def load(self, job: LoadJob, *, whole: bool = False) -> None:
        """See ``TierStore``."""
        load = _Load(job, LoadOutcome(job.request_id), time.monotonic())
        with self._lock:
            self._loads.append(load)
        self._todo.put(load)

    def take_load_outcomes(self, patience_s: float = 0.0) -> list[LoadOutcome]:
        """See ``TierStore``. A load that stands still for the deadline has failed."""
        with self._lock:
            if patience_s > 0 and self._loads and not any(load.over for load in self._loads):
                self._ended.wait(patience_s)
            late = time.monotonic() - self._deadline_s
            for load in self._loads:
                if not load.over and late > max(load.since, self._moved):
                    with self._copying:
                        self._end(load, complete=False)
            ended = [load.outcome for load in self._loads if load.over]
            self._loads = [load for load in self._loads if not load.over]
        return ended

    def _end(self, load: _Load, *, complete: bool) -> None:
        """A load is over: nothing of it is copied any more. Lock held."""
        load.over = True
        load.outcome.complete = complete
        load.outcome.ended = time.monotonic()
        self._ended.notify()

    # ---- the thread ----

    def _run(self) -> None:
        while (task := self._todo.get()) is not None:
            if isinstance(task, _Load):
                self._bring(task)
            else:
                self._put(task)

    def _put(self, slot: int) -> None:
        with self._lock:
            queued = self._queued.pop(slot, None)
            if queued is None:
                return  # it was given up
            epoch, key, frame = queued
            self._putting = slot, epoch
        done = False
        with self._errors.swallowed("a block is not stored"):
            _put(self._guest, key, self.save_frames.view(frame))
            done = True
        with self._lock:
            self._moved = time.monotonic()
            self.save_frames.free.append(frame)
            if self._putting is not None:
                self._results[0 if done else 1].append(self._putting)
                self._putting = None

    def _bring(self, load: _Load) -> None:
        job, complete, since = load.job, False, time.monotonic()
        blocks = np.zeros(len(job.slots), dtype=np.int64)
        blocks[job.first_in_hbm :] = job.block_ids
        first = min(job.first_in_hbm, len(blocks) - job.compared)
        with self._errors.swallowed("a load has failed"):
            complete = all(
                self._bring_some(
                    load, range(begin, min(begin + LOADED_AT_ONCE, len(blocks))), blocks
                )
                for begin in range(first, len(blocks), LOADED_AT_ONCE)
            )
        outcome = load.outcome
        if complete:
            all_of_it = np.arange(len(blocks))
            outcome.tokens_from_ssd = len(blocks) * self._block_tokens
            outcome.hit_tokens_from_ssd = job.tokens_of(all_of_it, self._block_tokens)
            outcome.ssd_s = time.monotonic() - since
        with self._lock:
            if not load.over:
                self._end(load, complete=complete)

    def _bring_some(self, load: _Load, which: range, blocks: I64) -> bool:
        """Bring a few blocks; False where one cannot be had. Such ones are dropped."""
        job = load.job
        frames, blocks = self._loading[: len(which)], blocks[which.start : which.stop]
        for at, frame in zip(which, frames.tolist(), strict=True):
            good = False
            with self._errors.swallowed("a block cannot be loaded"):
                good = _load(self._guest, job.keys[at], self.load_frames.view(frame))
            self._moved = time.monotonic()
            if not good:
                load.outcome.bad.append((int(job.slots[at]), int(job.epochs[at])))
        if load.outcome.bad or self._copy_in is None:
            return False
        with self._copying:
            if load.over:
                return False  # the blocks may be somebody else's
            if blocks.any():
                self._copy_in(frames[blocks > 0], blocks[blocks > 0])
        if job.compared and which.stop == len(job.slots):
            copy = self.load_frames.view(int(frames[-1])).copy()
            load.outcome.copy = int(job.slots[-1]), int(job.epochs[-1]), copy
        return True

    # ---- end ----

    def close(self, *, read_elsewhere: bool = False) -> None:
        """Bring what was flushed to the guest, and close it; once."""
        if self._closed:
            return
        self._closed = True
        self._todo.put(None)
        if self._thread.is_alive():
            self._thread.join(self._deadline_s)
        if self._thread.is_alive():
            logger.error("ssdkv: the tier does not answer; its memory stays allocated")
            return
        with self._errors.swallowed("the tier was not closed"):
            self._guest.close()
        if not read_elsewhere:
            self.save_frames.arena.close()


def tell_weights(guest: Tier, run: str, block_bytes: int, digest: bytes) -> None:
    """Leave the digest of a rank's weights for the scheduler of its engine's ``run``."""
    block = np.zeros(block_bytes, dtype=np.uint8)
    note = bytes((len(digest),)) + digest
    block[_SUM_BYTES : _SUM_BYTES + len(note)] = np.frombuffer(note, dtype=np.uint8)
    _put(guest, _key_of(run), block)


def take_weights(guest: Tier, run: str, block_bytes: int) -> bytes:
    """The digest that :func:`tell_weights` has left.

    Raises:
        StoreError: there is none.
    """
    block = np.zeros(block_bytes, dtype=np.uint8)
    if not _load(guest, _key_of(run), block):
        raise StoreError(
            "tier: the tier does not have what a worker has just put there; it has to be the same "
            "for all processes of an engine"
        )
    guest.drop([_key_of(run)])
    note = block[_SUM_BYTES:].tobytes()
    return note[1 : 1 + note[0]]


def _key_of(run: str) -> bytes:
    return hashlib.blake2b(run.encode(), digest_size=32, person=b"weights").digest()


def _put(guest: Tier, key: bytes, block: NDArray[np.uint8]) -> None:
    """Seal a block, and have a guest keep it."""
    block[:_SUM_BYTES] = np.frombuffer(_sum(key, block), dtype=np.uint8)
    guest.put(key, block.data)


def _load(guest: Tier, key: bytes, block: NDArray[np.uint8]) -> bool:
    """Load a block; False where there is none, or another one."""
    return guest.load(key, block.data) and block[:_SUM_BYTES].tobytes() == _sum(key, block)


def _sum(key: bytes, block: NDArray[np.uint8]) -> bytes:
    """Checksum of a block and its key."""
    return hashlib.blake2b(block[_SUM_BYTES:].data, digest_size=_SUM_BYTES, key=key).digest()
