"""A store in this process, and what only its scheduler does with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.device_weights import DeviceWeights
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.placement.rebalancer import Rebalancer
from vllm_ssdkv.store.tier import I64, TierIndex
from vllm_ssdkv.store.unread_slots import UnreadSlots
from vllm_ssdkv.store.write_pauses import WritePauses

T = TypeVar("T")

RETURN_S: Final = 60.0
"""Wait of requests for devices out of use, where there are no other slots, in seconds."""


class ContextIndex(TierIndex, Protocol):
    """An index whose slots contexts are written to: that of a store in this process, or slots that
    a node grants. Methods mean what those of :class:`SlotIndex` do."""

    def available(self) -> int:
        """Slots that can be reserved."""

    def reserve(self, n: int) -> None:
        """Keep slots for later allocations."""

    def unreserve(self, n: int) -> None:
        """Give up a part of the reservations."""

    def allocate(self, n: int, *, reserved: bool = False) -> I64:
        """Slots for writing, each pinned once."""

    def publish(self, slot: int, key: bytes) -> bool:
        """Have a slot found; False: another one has the key."""

    def retain(self, slots: I64, seconds: float, share: float) -> None:
        """Keep slots from eviction for a time."""

    def free_slots(self) -> I64:
        """Slots that hold nothing."""

    def mask(self, slots: I64) -> tuple[int, int]:
        """Slots cannot be read now: how many are masked, and how many dropped."""

    def gauges(self) -> dict[str, int]:
        """Numbers of slots."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Events since the start."""


class GrantedIndex(ContextIndex, Protocol):
    """Slots that a node grants to several engines."""

    def obtain(self, count: int) -> None:
        """Have so many slots available, as far as the node grants them."""

    def take_loss(self) -> bool:
        """Check whether the node has forgotten this engine's slots since the last call."""


@dataclass(frozen=True, slots=True)
class OwnStore:
    """Slots and devices that this engine writes to by itself.

    Attributes:
        index: Key to slot, and the journal.
        rebalancer: Segments, and how they lie on the devices.
        weights: Shares of the devices in new slots.
        pauses: Pauses of writes.
        unread: Slots that could not be read.
        alone: The index, where the slots are this engine's alone.
        shared: The index, where other engines have the same slots.
    """

    index: ContextIndex
    rebalancer: Rebalancer
    weights: DeviceWeights
    pauses: WritePauses
    unread: UnreadSlots
    alone: SlotIndex | None
    shared: GrantedIndex | None

    @classmethod
    def of(
        cls,
        index: SlotIndex | GrantedIndex,
        rebalancer: Rebalancer,
        paths: Sequence[str],
        counters: Counters,
        *,
        whole: bool,
    ) -> OwnStore:
        """Parts over an open index. ``paths``: of the devices; ``whole`` as in
        :class:`WritePauses`."""
        weights = DeviceWeights(rebalancer, paths, RETURN_S)
        alone = index if isinstance(index, SlotIndex) else None
        shared = None if isinstance(index, SlotIndex) else index
        return cls(
            index,
            rebalancer,
            weights,
            WritePauses(rebalancer.placement, weights, whole=whole),
            UnreadSlots(index, rebalancer, counters, shared=alone is None),
            alone,
            shared,
        )


def owned(part: T | None) -> T:
    """A part of the store of this process, which page mode works with.

    Raises:
        TypeError: it is elsewhere; the options allow that in mode ``reuse`` only.
    """
    if part is None:
        raise TypeError("page mode needs the store in its own process")
    return part
