"""vLLM's events of chunks that a tier has stored or given up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent

from vllm_ssdkv.store.index.slot_index import SlotIndex, SlotState

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey

MEDIUM = Medium.STORAGE


class TierEvents:
    """Events of one tier, if they are wanted. Used by the scheduler's thread.

    Chunks of an earlier run have no events: the store has its own keys of them, and not vLLM's.
    """

    def __init__(self, index: SlotIndex, locality: Locality | None, *, wanted: bool):
        self._index, self._locality, self._wanted = index, locality, wanted
        self._names: dict[int, tuple[int, OffloadKey]] = {}
        """Epoch and vLLM's key of what was told, by slot."""
        self._events: list[OffloadingEvent] = []

    def stored(self, slot: int, epoch: int, name: OffloadKey) -> None:
        """A chunk can be found."""
        if self._wanted:
            self._names[slot] = epoch, name
            self._tell([name], removed=False)

    def reused(self, slots: Iterable[int]) -> None:
        """Slots were given to other chunks."""
        gone = [self._names.pop(slot)[1] for slot in slots if slot in self._names]
        self._tell(gone, removed=True)

    def look(self) -> None:
        """Chunks may have been given up: tell of those that cannot be found any more."""
        index = self._index
        self.reused(
            [
                slot
                for slot, (epoch, _) in self._names.items()
                if index.epoch(slot) != epoch or index.state(slot) is not SlotState.READY
            ]
        )

    def renewed(self) -> None:
        """Nothing that was stored so far is found any more."""
        self.reused(list(self._names))

    def _tell(self, names: list[OffloadKey], *, removed: bool) -> None:
        if names:
            self._events.append(
                OffloadingEvent(keys=names, medium=MEDIUM, removed=removed, locality=self._locality)
            )

    def take(self) -> list[OffloadingEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events
