"""Hits whose blocks all have a frame: told at once, by the thread that received the load.

The loader's thread would be woken for nothing: there is nothing to read. Each wake-up costs more
than what else a node does for a small hit.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.node.protocol.messages import LoadEnded
from vllm_ssdkv.node.server.hosted_rank import HostedRank
from vllm_ssdkv.store.cache.frames import NO_FRAME
from vllm_ssdkv.store.read.load_job import LoadJob

MOST: Final = 64
"""Loads of a session at a time; others go through the loader, which has one at a time."""


@dataclass(slots=True)
class _Begun:
    """A load that its worker copies now, from frames that are borrowed for it."""

    job: LoadJob
    frames: NDArray[np.int32]
    since: float


class DramLoads:
    """Loads of one worker that it was told of and has not copied yet.

    The thread that receives calls all methods but :meth:`stood_still`, which any may call.

    Example:
        frames = loads.begin(call, job)
        job = loads.end(call)
    """

    def __init__(self, host: HostedRank, block_tokens: int):
        """``host``: whose frames these are."""
        self._host, self._block_tokens = host, block_tokens
        self._lock = threading.Lock()
        self._begun: dict[int, _Begun] = {}
        """By call, the oldest first. The lock guards it."""

    def begin(self, call_id: int, job: LoadJob) -> NDArray[np.int32] | None:
        """Frames of all slots of a load, [n], which stay as they are until :meth:`end`.

        None: not all have one, or too many are borrowed already. The job is then the loader's.
        """
        if len(self._begun) >= MOST or call_id in self._begun:
            return None
        if not self._host.lent.take(len(job.slots)):
            return None
        frames = self._host.store.frames.borrow(job.slots)
        if (frames == NO_FRAME).any():
            self._give_back(frames)
            return None
        with self._lock:
            self._begun[call_id] = _Begun(job, frames, time.monotonic())
        return frames

    def ended(self, job: LoadJob) -> LoadEnded:
        """End of a load that has begun, once it is copied."""
        blocks = len(job.slots)
        hit = (blocks if job.chain is None else min(job.chain, blocks)) + job.behind
        tokens = blocks * self._block_tokens
        return LoadEnded(True, b"", b"", tokens, 0, hit * self._block_tokens)

    def end(self, call_id: int) -> LoadJob | None:
        """The worker has copied everything; None: no such load has begun."""
        with self._lock:
            begun = self._begun.pop(call_id, None)
        if begun is None:
            return None
        self._give_back(begun.frames)
        return begun.job

    def stood_still(self, seconds: float) -> bool:
        """Check whether a load has not been copied for so long."""
        with self._lock:
            oldest = next(iter(self._begun.values()), None)
        return oldest is not None and time.monotonic() - oldest.since > seconds

    def close(self) -> list[LoadJob]:
        """Give everything back; the loads that had begun."""
        with self._lock:
            begun, self._begun = list(self._begun.values()), {}
        for one in begun:
            self._give_back(one.frames)
        return [one.job for one in begun]

    def _give_back(self, frames: NDArray[np.int32]) -> None:
        self._host.store.frames.give_back(frames)
        self._host.lent.give_back(len(frames))
