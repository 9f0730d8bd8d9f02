"""A store in this process, and what only its scheduler does with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.device_weights import DeviceWeights
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.placement.rebalancer import Rebalancer
from vllm_ssdkv.store.unread_slots import UnreadSlots
from vllm_ssdkv.store.write_pauses import WritePauses

T = TypeVar("T")

RETURN_S: Final = 60.0
"""Wait of requests for devices out of use, where there are no other slots, in seconds."""


@dataclass(frozen=True, slots=True)
class OwnStore:
    """Slots and devices of a store that is this engine's alone.

    Attributes:
        index: Key to slot, and the journal.
        rebalancer: Segments, and how they lie on the devices.
        weights: Shares of the devices in new slots.
        pauses: Pauses of writes.
        unread: Slots that could not be read.
    """

    index: SlotIndex
    rebalancer: Rebalancer
    weights: DeviceWeights
    pauses: WritePauses
    unread: UnreadSlots

    @classmethod
    def of(
        cls,
        index: SlotIndex,
        rebalancer: Rebalancer,
        paths: Sequence[str],
        counters: Counters,
        *,
        whole: bool,
    ) -> OwnStore:
        """Parts over an open index. ``paths``: of the devices; ``whole`` as in
        :class:`WritePauses`."""
        weights = DeviceWeights(rebalancer, paths, RETURN_S)
        return cls(
            index,
            rebalancer,
            weights,
            WritePauses(rebalancer.placement, weights, whole=whole),
            UnreadSlots(index, rebalancer, counters),
        )


def owned(part: T | None) -> T:
    """A part of the store of this process, which page mode works with.

    Raises:
        TypeError: it is elsewhere; the options allow that in mode ``reuse`` only.
    """
    if part is None:
        raise TypeError("page mode needs the store in its own process")
    return part
