"""A tier: where blocks are kept beyond HBM, in this process or elsewhere.

It has two halves, since vLLM's scheduler and workers are processes of their own. A store in this
process (:class:`SlotIndex`, :class:`TieredStore`) and the clients of nodes do all of this. What
only a store in this process can do is in ``store/own_store.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.index.computed_blocks import ComputedBlocks
from vllm_ssdkv.store.index.slot_index import SlotState
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
Pairs = list[tuple[int, int]]
"""Slots and their epochs."""
Seconds = Callable[[], float | None]
"""Expected time of something; None: nobody knows."""


class TierSteps(Protocol):
    """Steps of a tier, for the scheduler."""

    def step(self) -> None:
        """A step begins."""

    def forget_stored(self) -> None:
        """The cache was reset: never find what is stored."""


class TierIndex(Protocol):
    """The scheduler's half: key to slot, of everything that is stored.

    Only :meth:`lookup`, :meth:`last` and :meth:`claim` may take a round trip, which has a deadline.
    Nothing is found where it ends without an answer.
    """

    @property
    def num_slots(self) -> int:
        """Slot numbers are below this."""

    @property
    def node_replicas(self) -> int:
        """Nodes that are to keep a block: so many times a claim names each key."""

    def find(self, key: bytes) -> int | None:
        """Slot that is ready and holds the key, if one is known here."""

    def lookup(self, keys: Sequence[bytes]) -> I64:
        """Slots of the longest prefix of ``keys`` that is ready; int64, shape [<= n]."""

    def awaits(self, name: str, keys: Sequence[bytes], seconds: Seconds, head: bytes = b"") -> bool:
        """Check whether a request had better wait: others compute what is missing of its blocks.

        ``seconds`` says how long it would compute all of them. ``head``: key of the request's first
        block, where ``keys`` begin later.
        """

    def computes_no_more(self, name: str) -> None:
        """A request has ended."""

    def last(self, keys: Sequence[bytes], first: int, end: int, tags: Sequence[int]) -> int:
        """The last n of ``first`` < n <= ``end`` whose key is ready with each of ``tags``."""

    def others(self, slots: I64) -> tuple[I64, I64]:
        """Slots with the same blocks on other nodes, -1 where none is known, and their epochs; both
        [n], or empty where there is one place for a block."""

    def claim(
        self, keys: Sequence[bytes], *, again: bool = False, of: ComputedBlocks | None = None
    ) -> I64:
        """A published slot for each key, or why there is none, such as ``TAKEN``; int64, [n].

        ``of``: where blocks belong if there are several nodes; None: each is a run of its own.
        """

    def epoch(self, slot: int) -> int:
        """Epoch of the slot's last allocation."""

    def epochs(self, slots: I64) -> I64:
        """Epoch of each slot, int64, shape [n]."""

    def key(self, slot: int) -> bytes:
        """Key of a ready slot."""

    def state(self, slot: int) -> SlotState:
        """State of the slot now."""

    def holds(self, slot: int, epoch: int) -> bool:
        """Check whether the slot holds a block of this epoch, or is being filled with it."""

    def touch_chain(self, keys: Sequence[bytes]) -> None:
        """Mark what is stored of a chain, head first, as just used."""

    def pin(self, slots: I64) -> None:
        """Keep slots from being evicted, once per call and entry."""

    def unpin(self, slots: I64) -> None:
        """Undo one pin of each entry of a chain, head first."""

    def durable(self, slot: int | I64) -> None:
        """Every rank has written these slots."""

    def drop(self, slot: int | I64) -> None:
        """Never find these slots again."""

    def close(self) -> bool:
        """End; False on error."""


class StepIndex(TierIndex, TierSteps, Protocol):
    """Both."""


class FrameMemory(Protocol):
    """Frames in memory, by number."""

    def address(self, frames: I32) -> NDArray[np.uint64]:
        """Absolute address of each frame, [n]."""

    def view(self, frame: int) -> NDArray[np.uint8]:
        """Bytes of a frame, without a copy."""


class TierStore(Protocol):
    """A worker's half: the bytes of one rank. Methods mean what those of TieredStore do."""

    @property
    def save_frames(self) -> FrameMemory:
        """Frames that :meth:`reserve_frames` gives."""

    @property
    def load_frames(self) -> FrameMemory:
        """Frames that hits are copied from."""

    @property
    def open_frames(self) -> int:
        """Frames that DRAM has now."""

    def reserve_frames(self, slots: I64, *, wait: bool, spare_contexts: bool = False) -> I32:
        """Frames for the first of these slots, [k], k <= n, for the caller to fill."""

    def flush(self, slots: I64, epochs: I64, keys: Sequence[bytes], *, bound: bool = True) -> None:
        """Write held slots in the background."""

    def abandon(self, slots: I64) -> None:
        """Forget what is held for these slots."""

    def take_write_results(self) -> tuple[Pairs, Pairs]:
        """(slot, epoch) pairs written and failed since the last call."""

    def load(self, job: LoadJob, *, whole: bool = False) -> None:
        """Bring a hit in, in the background."""

    def take_load_outcomes(self, patience_s: float = 0.0) -> list[LoadOutcome]:
        """Loads that ended since the last call."""

    def close(self, *, read_elsewhere: bool = False) -> None:
        """Write what is committed and stop."""
