"""vLLM's events of chunks that a tier has stored or given up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent

from vllm_ssdkv.store.index.slot_index import SlotIndex, SlotState

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey

MEDIUM = Medium.STORAGE

_MAY_RETURN: Final = (SlotState.MASKED, SlotState.PRIVATE)
"""States of a chunk out of reach; it is private as long as a job uses it."""


class TierEvents:
    """Events of one tier, if they are wanted. Used by the scheduler's thread.

    A chunk of an earlier run has its event when a request first names it: the store has its own
    keys of chunks, and not vLLM's.
    """

    def __init__(self, index: SlotIndex, locality: Locality | None, *, wanted: bool):
        self._index, self._locality, self._wanted = index, locality, wanted
        self._names: dict[int, tuple[int, OffloadKey]] = {}
        """Epoch and vLLM's key of each chunk that was reported as stored, by slot."""
        self._away: set[int] = set()
        """Slots of these that were reported as removed, and may be back."""
        self._events: list[OffloadingEvent] = []

    def stored(self, slot: int, epoch: int, name: OffloadKey) -> None:
        """A chunk can be found."""
        if self._wanted:
            self._names[slot] = epoch, name
            self._tell([name], removed=False)

    def found(self, slot: int, name: OffloadKey) -> None:
        """A request has named a chunk that can be found."""
        if self._wanted and slot not in self._names:
            self.stored(slot, self._index.epoch(slot), name)

    def reused(self, slots: Iterable[int]) -> None:
        """Slots were given to other chunks."""
        gone = {slot: self._names.pop(slot)[1] for slot in slots if slot in self._names}
        self._tell([n for slot, n in gone.items() if slot not in self._away], removed=True)
        self._away -= gone.keys()

    def look(self) -> None:
        """Chunks may have been given up, or be out of reach or back: tell of those that cannot be
        found any more, and that can be again."""
        ready, away, gone = set(), set(), []
        for slot, (epoch, _) in self._names.items():
            state = self._index.state(slot) if self._index.epoch(slot) == epoch else None
            if state is SlotState.READY:
                ready.add(slot)
            elif state in _MAY_RETURN:
                away.add(slot)
            else:
                gone.append(slot)
        self.reused(gone)
        self._tell([self._names[slot][1] for slot in away - self._away], removed=True)
        # Behind what is gone: one that is back takes the place of another with its key.
        self._tell([self._names[slot][1] for slot in ready & self._away], removed=False)
        self._away = away

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
