"""Cache policies and guesses on recorded choices: hit rates, and pages that are read ahead.

Choices are masks [heads, steps, pages]. One cache serves all heads, read head after head; a page
that is being read for a head does not leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.profiling.clusters.trace import F32, I64, Bools

WARM_UP: Final = 32
"""Steps that are not counted."""
GUESSES: Final = 16
"""Pages per head that are read ahead."""
DECAY: Final = 0.7
COUNT_DECAY: Final = 0.9
"""Decay of the count of choices that the predictions use."""


def updated_frequency(
    frequency: I64, activated: NDArray[np.bool_], cached: NDArray[np.bool_]
) -> I64:
    """Frequencies of Swarm's equation (6) after a step (S-7).

    1 more where activated, 1 less, not below 0, where only cached. Corrected, the equation is
    ``f * (T_base + s * T_transfer) / s`` for a cluster of s bytes that was activated f times:
    seconds that holding it saves per byte. As printed, ``(f * T_base + s * T_transfer) / s``, the
    cost of transfer is the same for all clusters, and drops out of their order. Pages of one size,
    in the engine's cache (``csrc/cache/page_order.hpp``) too, go by frequency and their drive.
    """
    idle = cached & ~activated
    changed: I64 = np.maximum(frequency + activated - idle, 0)
    return changed


class Policy(Protocol):
    """The page with the lowest score leaves."""

    def read(self, pages: I64) -> None:
        """A head reads these pages."""

    def step(self, used: Bools, cached: Bools) -> None:
        """A step ended that used these pages, with these in the cache."""

    @property
    def score(self) -> F32:
        """Scores of all pages."""


class Lru:
    """Least recently read."""

    def __init__(self, pages: int):
        self.score = np.zeros(pages, np.float32)
        self._now = 0

    def read(self, pages: I64) -> None:
        """See the protocol."""
        self._now += 1
        self.score[pages] = self._now

    def step(self, used: Bools, cached: Bools) -> None:
        """See the protocol."""


class Decay:
    """Uses, each worth :data:`DECAY` of itself after every step."""

    def __init__(self, pages: int):
        self.score = np.zeros(pages, np.float32)

    def read(self, pages: I64) -> None:
        """See the protocol."""

    def step(self, used: Bools, cached: Bools) -> None:
        """See the protocol."""
        self.score = self.score * np.float32(DECAY) + used


class Frequency:
    """Uses, one less for every step without a use, not below 0."""

    def __init__(self, pages: int):
        self.score = np.zeros(pages, np.float32)

    def read(self, pages: I64) -> None:
        """See the protocol."""

    def step(self, used: Bools, cached: Bools) -> None:
        """See the protocol."""
        self.score = np.maximum(self.score - 1, 0) + 2 * used


class SwarmScore:
    """Swarm's S-7: one more for a use, one less for a cached page without; equal sizes."""

    def __init__(self, pages: int):
        self._count = np.zeros(pages, np.int64)

    @property
    def score(self) -> F32:
        """See the protocol."""
        return self._count.astype(np.float32)

    def read(self, pages: I64) -> None:
        """See the protocol."""

    def step(self, used: Bools, cached: Bools) -> None:
        """See the protocol."""
        self._count = updated_frequency(self._count, used, cached)


POLICIES: Final[dict[str, Callable[[int], Policy]]] = {
    "lru": Lru,
    "decay": Decay,
    "frequency": Frequency,
    "swarm (S-7)": SwarmScore,
}


def hit_rate(chosen: Bools, share: float, policy: Callable[[int], Policy]) -> float:
    """Share of reads that a cache of so much of the context answers, after :data:`WARM_UP`."""
    heads, steps, pages = chosen.shape
    every = heads * pages
    room = int(share * every)
    held = policy(every)
    cached = np.zeros(every, np.bool_)
    hits = reads = 0
    for step in range(steps):
        for head in range(heads):
            wanted = head * pages + np.flatnonzero(chosen[head, step])
            found = cached[wanted]
            if step >= WARM_UP:
                hits += int(found.sum())
                reads += len(wanted)
            held.read(wanted)
            _bring(cached, wanted, wanted[~found], room, held.score)
        held.step(chosen[:, step].ravel(), cached)
    return hits / max(1, reads)


def _bring(cached: Bools, wanted: I64, new: I64, room: int, score: F32) -> None:
    """Cache the pages ``new`` in the place of the lowest scores, as far as there is room."""
    over = int(cached.sum()) + len(new) - room
    if over > 0:
        candidates = cached.copy()
        candidates[wanted] = False
        others = np.flatnonzero(candidates)
        leaving = others[np.argsort(score[others], kind="stable")[:over]]
        cached[leaving] = False
        new = new[: len(new) - (over - len(leaving))]
    cached[new] = True


def right_guesses(chosen: Bools, scores: F32) -> dict[str, float]:
    """Share of :data:`GUESSES` pages beyond the last choice that the next step chooses.

    Args:
        chosen: Of one head, [steps, pages].
        scores: By which they were chosen, the same shape.
    """
    steps, pages = chosen.shape
    count = np.zeros(pages, np.float32)
    right: dict[str, list[float]] = {}
    for step in range(1, steps):
        last = chosen[step - 1]
        count = count * np.float32(COUNT_DECAY) + last
        by_score = _ranks(scores[step - 1])
        # Equal counts go by score.
        by_count = _ranks(count + np.float32(1e-7) * by_score)
        for name, rank in (
            ("last scores", by_score),
            ("decayed count", by_count),
            ("both ranks", by_score + by_count),
        ):
            beyond = np.where(last, np.float32(-1), rank)
            beyond[0] = -1
            guessed = np.argpartition(-beyond, GUESSES)[:GUESSES]
            right.setdefault(name, []).append(float(chosen[step][guessed].mean()))
    return {name: float(np.mean(found)) for name, found in right.items()}


def _ranks(values: F32) -> F32:
    """Place of each value in ascending order."""
    ranks = np.empty(len(values), np.float32)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks
