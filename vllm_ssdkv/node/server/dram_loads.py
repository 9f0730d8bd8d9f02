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

MOST_BLOCKS: Final = 4096
"""Blocks of these loads together. Their messages fit into a socket, so that the thread which
receives never waits for a worker that waits for it."""


@dataclass(slots=True)
class _Begun:
    """A load that its worker copies now, from frames that are borrowed for it."""

    job: LoadJob
    frames: NDArray[np.int32]


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
        """By call. The lock guards it and what follows."""
        self._blocks = 0
        self._moved = 0.0
        """When a load was copied last, or the first of those under way began."""

    def begin(self, call_id: int, job: LoadJob) -> NDArray[np.int32] | None:
        """Frames of all slots of a load, [n], which stay as they are until :meth:`end`.

        None: not all have one, or too many are borrowed already. The job is then the loader's.
        """
        blocks = self._blocks + len(job.slots)
        if len(self._begun) >= MOST or call_id in self._begun or blocks > MOST_BLOCKS:
            return None
        if not self._host.lent.take(len(job.slots)):
            return None
        frames = self._host.store.frames.borrow(job.slots)
        if (frames == NO_FRAME).any():
            self._give_back(frames)
            return None
        with self._lock:
            if not self._begun:
                self._moved = time.monotonic()
            self._begun[call_id] = _Begun(job, frames)
            self._blocks = blocks
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
            self._moved = time.monotonic()
            self._blocks -= 0 if begun is None else len(begun.job.slots)
        if begun is None:
            return None
        self._give_back(begun.frames)
        return begun.job

    def stood_still(self, seconds: float) -> bool:
        """Check whether loads are to be copied, and none was for so long."""
        with self._lock:
            return bool(self._begun) and time.monotonic() - self._moved > seconds

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
