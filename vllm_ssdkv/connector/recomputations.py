"""How often requests lost their context: some cannot be helped by one more try."""

from __future__ import annotations

MAX_RECOMPUTATIONS = 8
"""A request whose context was lost this often, and that got no further between, is not helped by
one more try."""


class Recomputations:
    """Counts tries of requests in page mode. Used by the scheduler's thread."""

    def __init__(self) -> None:
        # How often a request's context was lost in a row, and how far it had got by then.
        self._of: dict[str, tuple[int, int]] = {}

    def lost(self, request_id: str, reached: int) -> None:
        """The context is lost; ``reached`` grows with what the request has got done."""
        tries, furthest = self._of.get(request_id, (0, 0))
        self._of[request_id] = (1, reached) if reached > furthest else (tries + 1, furthest)

    def too_many(self, request_id: str) -> bool:
        """Whether no more is to be tried."""
        return self._of.get(request_id, (0, 0))[0] > MAX_RECOMPUTATIONS

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._of.pop(request_id, None)
