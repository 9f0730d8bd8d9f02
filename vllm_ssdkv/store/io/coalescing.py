"""Requests that are neighbours on the device and in memory, sent to the engine as one.

Single pages are small: eight adjacent ones cost the drive as much time as one. Who waits still sees
one result per request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.io.engines.protocol import I32, U16, U32, U64, Batch, IoEngine, Op

MOST_REQUESTS = 64
"""Requests in one at most, so that one failure costs little."""


@dataclass(frozen=True, slots=True, eq=False)
class CoalescedBatch:
    """A batch whose neighbouring requests were coalesced. As ``Batch``."""

    batch: Batch
    run: NDArray[np.int64]
    """Request of the engine that each request is a part of."""
    begin: NDArray[np.int64]
    """Bytes before each request in it."""
    length: U32

    def done(self) -> bool:
        """See ``Batch``."""
        return self.batch.done()

    def wait(self, timeout_s: float) -> bool:
        """See ``Batch``."""
        return self.batch.wait(timeout_s)

    def results(self) -> I32:
        """See ``Batch``; of a request that was cut short, each part has what there is of it."""
        return _io.part_results(self.batch.results(), self.run, self.begin, self.length)


def submit_coalesced(
    engine: IoEngine, op: Op, device: U16, offset: U64, length: U32, buffer: U64
) -> CoalescedBatch:
    """As :meth:`IoEngine.submit`; a request that goes on where the one before it ends joins it."""
    length = np.ascontiguousarray(length)
    device, offset, total, buffer, run, begin = _io.coalesce_requests(
        np.ascontiguousarray(device),
        np.ascontiguousarray(offset),
        length,
        np.ascontiguousarray(buffer),
        MOST_REQUESTS,
    )
    return CoalescedBatch(engine.submit(op, device, offset, total, buffer), run, begin, length)
