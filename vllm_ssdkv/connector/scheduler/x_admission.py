"""Choice of the requests whose contexts are stored as X, and of how many."""

from __future__ import annotations

import logging
from typing import Final, Literal

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.offload.xcache.x_rule import XRates, XShape, best_share, why

logger = logging.getLogger(__name__)

NOTABLE: Final = 0.1
"""Change of the share that is worth a line in the log."""


class XAdmission:
    """Keeps the contexts that are X within a share of all that run. Used by the scheduler's thread.

    Contexts count by the blocks that they may have at most, so the choice depends on nothing but
    share and order of requests. One that would exceed the share is stored as K and V, as is a
    request that runs alone, unless the share is 1.

    Example:
        admission = XAdmission(0.5, None, counters)
        admission.arrived("a", 10)
        admission.admit("a")  # False: the whole would be X

    Attributes:
        share: From 0 to 1; may change between requests.
        rates: By which it was chosen last; None: by none.
    """

    def __init__(self, share: float | Literal["auto"], shape: XShape | None, counters: Counters):
        """``share``: the option, 0 where X does not pay; ``auto``: 0 until rates are known, of
        layers of this ``shape``."""
        self._shape = shape if share == "auto" else None
        self._counters = counters
        self.share = 0.0 if share == "auto" else share
        self.rates: XRates | None = None
        self._told: float | None = None
        self._blocks: dict[str, int] = {}
        self._as_x: set[str] = set()
        if share:
            counters.set("x_cache_share", self.share)

    def __len__(self) -> int:
        """Requests that run."""
        return len(self._blocks)

    def measured(self, rates: XRates) -> None:
        """Workers have told of rates: requests that come from now on have the best share."""
        if self._shape is None:
            return
        self.rates, self.share = rates, best_share(self._shape, rates)
        self._counters.set("x_cache_share", self.share)
        if self._told is None or abs(self.share - self._told) >= NOTABLE:
            self._told = self.share
            reason = why(self._shape, rates, self.share)
            logger.info("ssdkv: X-cache: %.0f %% of contexts: %s", 100 * self.share, reason)

    def arrived(self, request_id: str, blocks: int) -> None:
        """A request runs, which may have so many blocks."""
        self._blocks[request_id] = blocks

    def would_admit(self, blocks: int) -> bool:
        """Check whether a request of so many blocks would be stored as X, if it arrived now."""
        return self._fits(blocks, sum(self._blocks.values()) + blocks)

    def admit(self, request_id: str) -> bool:
        """Decide, once, on a request that has arrived; True: it is stored as X."""
        if not self._fits(self._blocks[request_id], sum(self._blocks.values())):
            return False
        self._as_x.add(request_id)
        self._counters.add("x_cache_requests", 1)
        return True

    def _fits(self, blocks: int, total: int) -> bool:
        """Check whether the share of the ``total`` has room for more X."""
        return self.share > 0 and self._x_blocks() + blocks <= self.share * total

    def left(self, request_id: str) -> None:
        """The request has ended, or was preempted."""
        self._blocks.pop(request_id, None)
        self._as_x.discard(request_id)

    def _x_blocks(self) -> int:
        return sum(self._blocks[request_id] for request_id in self._as_x)
