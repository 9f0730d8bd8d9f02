"""Choice of the requests whose contexts are stored as X."""

from __future__ import annotations


class XAdmission:
    """Keeps the contexts that are X within a share of all that run. Used by the scheduler's thread.

    Contexts count by the blocks that they may have at most, so the choice depends on nothing but
    the order of requests. One that would exceed the share is stored as K and V, as is a request
    that runs alone, unless the share is 1.

    Example:
        admission = XAdmission(0.5)
        admission.arrived("a", 10)
        admission.admit("a")  # False: the whole would be X

    Attributes:
        share: From 0 to 1; may change between requests.
    """

    def __init__(self, share: float):
        self.share = share
        self._blocks: dict[str, int] = {}
        self._as_x: set[str] = set()

    def __len__(self) -> int:
        """Requests that run."""
        return len(self._blocks)

    @property
    def held(self) -> float:
        """Share of the blocks of all requests that are X."""
        total = sum(self._blocks.values())
        return self._x_blocks() / total if total else 0.0

    def arrived(self, request_id: str, blocks: int) -> None:
        """A request runs, which may have so many blocks."""
        self._blocks[request_id] = blocks

    def admit(self, request_id: str) -> bool:
        """Decide, once, on a request that has arrived; True: it is stored as X."""
        if self.share <= 0:
            return False
        wanted = self._x_blocks() + self._blocks[request_id]
        if wanted > self.share * sum(self._blocks.values()):
            return False
        self._as_x.add(request_id)
        return True

    def left(self, request_id: str) -> None:
        """The request has ended, or was preempted."""
        self._blocks.pop(request_id, None)
        self._as_x.discard(request_id)

    def _x_blocks(self) -> int:
        return sum(self._blocks[request_id] for request_id in self._as_x)
