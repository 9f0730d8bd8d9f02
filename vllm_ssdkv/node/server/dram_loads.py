"""Hits whose blocks all have a frame: told at once, by the thread that received the load.

The loader's thread would be woken for nothing: there is nothing to read. Each wake-up costs more
than what else a node does for a small hit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.node.server.hosted_rank import HostedRank
from vllm_ssdkv.store.cache.frames import NO_FRAME
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome

MOST: Final = 64
"""Loads at a time; others go through the loader, whose waits have a deadline."""


@dataclass(slots=True)
class _Begun:
    """A load that its worker copies now, from frames that are borrowed for it."""

    job: LoadJob
    frames: NDArray[np.int32]
    since: float


class DramLoads:
    """Loads of one worker. Used by the thread that receives.

    Example:
        frames = loads.begin(call, job)
        outcome = loads.end(call)
    """

    def __init__(self, host: HostedRank, block_tokens: int):
        """``host``: whose frames these are."""
        self._host, self._block_tokens = host, block_tokens
        self._begun: dict[int, _Begun] = {}

    def begin(self, call_id: int, job: LoadJob) -> NDArray[np.int32] | None:
        """Frames of all slots of a load, [n], which stay as they are until :meth:`end`; None: not
        all have one, or too many loads have begun."""
        if len(self._begun) >= MOST or call_id in self._begun:
            return None
        frames = self._host.store.frames.borrow(job.slots)
        if (frames == NO_FRAME).any():
            self._host.store.frames.give_back(frames)
            return None
        self._begun[call_id] = _Begun(job, frames, time.monotonic())
        return frames

    def end(self, call_id: int) -> tuple[LoadJob, LoadOutcome] | None:
        """The worker has copied everything; None: no such load has begun."""
        begun = self._begun.pop(call_id, None)
        if begun is None:
            return None
        job, store = begun.job, self._host.store
        every = np.arange(len(job.slots), dtype=np.int64)
        outcome = LoadOutcome(job.request_id)
        outcome.tokens_from_dram = len(every) * self._block_tokens
        outcome.hit_tokens_from_dram = job.tokens_of(every, self._block_tokens)
        if job.compared:
            copy = store.frames.view(int(begun.frames[-1])).copy()
            outcome.copy = int(job.slots[-1]), int(job.epochs[-1]), copy
        store.frames.give_back(begun.frames)
        outcome.dram_s = time.monotonic() - begun.since
        return job, outcome

    def close(self) -> list[LoadJob]:
        """Give everything back; the loads that had begun."""
        for begun in self._begun.values():
            self._host.store.frames.give_back(begun.frames)
        jobs = [begun.job for begun in self._begun.values()]
        self._begun.clear()
        return jobs
