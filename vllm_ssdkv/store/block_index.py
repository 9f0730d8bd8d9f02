"""Needs of the scheduler in the store's numbers, in this process or in a node.

:class:`SlotIndex` and :class:`Rebalancer` satisfy these protocols, and so does the client of a
node. Page mode needs more: the index itself, which :func:`embedded` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.index.computed_blocks import ComputedBlocks
from vllm_ssdkv.store.index.slot_index import SlotIndex, SlotState
from vllm_ssdkv.store.placement.rebalancer import Rebalancer

I64 = NDArray[np.int64]
Seconds = Callable[[], float | None]
"""Expected time of something; None: nobody knows."""


class BlockIndex(Protocol):
    """Key to slot, of everything that is stored. Methods mean what those of SlotIndex do.

    Only :meth:`lookup`, :meth:`last` and :meth:`claim` may take a round trip, which has a deadline.
    Nothing is found where it ends without an answer.
    """

    @property
    def num_slots(self) -> int:
        """Slot numbers are below this."""

    @property
    def node_replicas(self) -> int:
        """Nodes that are to keep a block: so many times a claim names each key."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Events since the start, by name."""

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

    def order(self) -> I64:
        """Evictable slots that are this engine's alone; int64, shape [n]."""

    def free_slots(self) -> I64:
        """Free slots that this engine's devices may be told of; int64, shape [n]."""

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

    def gauges(self) -> dict[str, int]:
        """Numbers of slots by state, and of the journal; empty: the store's owner tells them."""

    def close(self) -> bool:
        """End; False on error."""


class SlotPlacement(Protocol):
    """Places of slots, as far as the scheduler of any mode asks."""

    @property
    def weights(self) -> Sequence[float]:
        """Share of each device in new slots; empty where the devices are not this engine's."""

    @property
    def slots_to_come(self) -> int:
        """Slots that the store may yet grow by."""

    def step(self) -> None:
        """A step begins: go on with what is under way."""

    def reweigh(self, weights: Sequence[float]) -> None:
        """Give devices other shares."""

    def mask_lost(self) -> int:
        """Find nothing that lies on devices out of use only; how many blocks."""

    def take_returned(self) -> int:
        """Have the slots again that devices which are back in use had taken with them; how many
        blocks are found again."""

    def unmask(self, slots: I64) -> int:
        """Have slots found again that were masked, unless their devices are out of use; how many
        blocks are found."""

    def take_segments(self) -> tuple[Segment, ...] | None:
        """The segments, if they have changed since the last call."""

    def forget_stored(self) -> None:
        """The cache was reset: never find what is stored."""

    def close(self) -> bool:
        """Save what has changed; False when that was not possible in time."""


def embedded(index: BlockIndex) -> SlotIndex:
    """The index of this process, which page mode works with.

    Raises:
        TypeError: a node has it; the options allow that in mode ``reuse`` only.
    """
    if not isinstance(index, SlotIndex):
        raise TypeError("page mode needs the store in its own process")
    return index


def embedded_placement(placement: SlotPlacement) -> Rebalancer:
    """The placement of this process; see :func:`embedded`.

    Raises:
        TypeError: a node has it.
    """
    if not isinstance(placement, Rebalancer):
        raise TypeError("page mode needs the store in its own process")
    return placement
