"""A prefix hit on its way to HBM: what is asked for, what is under way, how it ended."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.io.verified_read import VerifiedRead


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One request's hit. The last ``len(block_ids)`` slots go to HBM; 0 is no block. The first
    ``chain`` are its tokens, the others what other layers have of the same; None: all are. Of
    ``behind`` blocks of the hit nothing is needed any more. ``compared``: the outcome has a copy of
    the last slot. ``others``: slots with the same blocks on other nodes, -1 where there is none,
    with their epochs; both empty: there are none at all."""

    request_id: str
    slots: NDArray[np.int64]
    epochs: NDArray[np.int64]
    keys: tuple[bytes, ...]
    block_ids: NDArray[np.int64]
    chain: int | None = None
    behind: int = 0
    compared: bool = False
    others: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    other_epochs: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def first_in_hbm(self) -> int:
        """Index of the first slot that goes to HBM."""
        return len(self.slots) - len(self.block_ids)

    def tokens_of(self, which: NDArray[np.int64], block_tokens: int) -> int:
        """Tokens of the hit in slots ``which``, indices of its slots; those behind a window count
        with the first slot."""
        chain = len(self.slots) if self.chain is None else self.chain
        blocks = int(np.count_nonzero(which < chain))
        if self.behind and (which == 0).any():
            blocks += self.behind
        return blocks * block_tokens


@dataclass(slots=True)
class LoadOutcome:
    """Outcome of a job. ``bad`` are (slot, epoch) pairs that must not be found again, ``unread``
    those that could not be read, and may be later.

    Seconds: ``queued_s`` behind other jobs, ``ssd_s`` for what was read from devices, ``dram_s``
    for what was found in frames; copies to HBM included. Frames are copied while the first reads
    are under way, which counts for both. ``ended`` is when that was, of the monotonic clock.
    ``tokens`` are of any layers, ``hit_tokens`` those of the request. ``copy`` is of the last
    slot, where the job asked for it: slot, epoch and its frame, uint8, which may be gone soon.
    """

    request_id: str
    complete: bool = True
    bad: list[tuple[int, int]] = field(default_factory=list)
    tokens_from_dram: int = 0
    tokens_from_ssd: int = 0
    hit_tokens_from_dram: int = 0
    hit_tokens_from_ssd: int = 0
    queued_s: float = 0.0
    dram_s: float = 0.0
    ssd_s: float = 0.0
    ended: float = 0.0
    copy: tuple[int, int, NDArray[np.uint8]] | None = None
    unread: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class LoadRead:
    """Slots ``which`` of a job on their way: whole, into ``frames`` that are ``LOADING``, or their
    headers."""

    which: NDArray[np.int64]
    frames: NDArray[np.int32] | None
    read: VerifiedRead


@dataclass(slots=True)
class Hit:
    """A job that is being loaded. ``keys`` are those of its slots, [n, 32]; ``todo`` are indices
    of slots whose reads are not started yet, ascending."""

    job: LoadJob
    outcome: LoadOutcome
    since: float
    """Time of the request, by the monotonic clock."""
    begun: float | None = None
    """Time of the start."""
    frames: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Borrowed ones, [n]; ``NO_FRAME`` where there is none, or it was given back."""
    keys: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 32), dtype=np.uint8))
    todo: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    reads: collections.deque[LoadRead] = field(default_factory=collections.deque)
    """Reads in the order in which they were started."""
    last_retry: float | None = None

    def retry_until(self, deadline_s: float) -> float:
        """Until when slots that failed are read again, of the monotonic clock: all of them have one
        deadline."""
        if self.last_retry is None:
            self.last_retry = time.monotonic() + deadline_s
        return self.last_retry
