"""Requests that are neighbours on the device and in memory, sent to the engine as one.

Single pages are small: eight adjacent ones cost the drive as much time as one. Who waits still sees
one result per request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.engine.protocol import I32, U16, U32, U64, Batch, IoEngine, Op

MOST_REQUESTS = 64
"""Requests in one at most, so that one failure costs little."""


@dataclass(frozen=True, slots=True, eq=False)
class JoinedBatch:
    """A batch whose requests were joined. As :class:`vllm_ssdkv.store.engine.protocol.Batch`."""

    batch: Batch
    run: NDArray[np.int64]
    """Request of the engine that each request is a part of."""
    begin: NDArray[np.int64]
    """Bytes before each request in it."""
    length: NDArray[np.int64]

    def done(self) -> bool:
        """See ``Batch``."""
        return self.batch.done()

    def wait(self, timeout_s: float) -> bool:
        """See ``Batch``."""
        return self.batch.wait(timeout_s)

    def results(self) -> I32:
        """See ``Batch``; of a request that was cut short, each part has what there is of it."""
        result = self.batch.results()[self.run].astype(np.int64)
        part = np.clip(result - self.begin, 0, self.length)
        return np.where(result < 0, result, part).astype(np.int32)


def submit_joined(
    engine: IoEngine, op: Op, device: U16, offset: U64, length: U32, buffer: U64
) -> JoinedBatch:
    """As :meth:`IoEngine.submit`; a request that goes on where the one before it ends joins it."""
    count = len(device)
    follows = np.zeros(count, dtype=np.bool_)
    follows[1:] = (
        (device[1:] == device[:-1])
        & (offset[1:] == offset[:-1] + length[:-1])
        & (buffer[1:] == buffer[:-1] + length[:-1])
        & (np.arange(1, count) % MOST_REQUESTS != 0)
    )
    head = np.flatnonzero(~follows)
    run = np.cumsum(~follows) - 1
    total = np.add.reduceat(length.astype(np.int64), head) if count else np.zeros(0, np.int64)
    before = np.cumsum(length.astype(np.int64)) - length
    begin = before - before[head][run] if count else before
    batch = engine.submit(op, device[head], offset[head], total.astype(np.uint32), buffer[head])
    return JoinedBatch(batch, run, begin, length.astype(np.int64))
