"""Contexts whose load has not ended well: workers do not know the checksums of their slots yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class PendingContextLoads:
    """Loads by request. Used by the scheduler's thread."""

    def __init__(self) -> None:
        self._slots: Counter[int] = Counter()
        self._of: dict[str, tuple[int, ...]] = {}

    def __contains__(self, slot: int) -> bool:
        """Check whether a slot is in one of them: nobody else may count on its bytes."""
        return slot in self._slots

    def __len__(self) -> int:
        return len(self._of)

    def add(self, request_id: str, slots: Sequence[int]) -> None:
        """A load of this request's context begins."""
        self._of[request_id] = tuple(slots)
        self._slots.update(slots)

    def end(self, request_id: str) -> None:
        """It has ended well, or nobody needs it any more; idempotent."""
        for slot in self._of.pop(request_id, ()):
            self._slots[slot] -= 1
            if not self._slots[slot]:
                del self._slots[slot]
