"""Leases: what a session keeps from eviction, as long as it lives."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from vllm_ssdkv.store.format.slot_geometry import I64


class Lease:
    """Pins of one session, by slot and epoch. Whoever calls holds the store's lock.

    Attributes:
        run: Engine's run that it belongs to.
        since: Blocks of an older generation are not there for this session.

    Example:
        lease = Lease("run 7")
        lease.add([(3, 1 << 32)])
    """

    def __init__(self, run: str):
        self.run = run
        self.since = 0
        self._pins: collections.Counter[tuple[int, int]] = collections.Counter()

    def __len__(self) -> int:
        """Number of pins."""
        return self._pins.total()

    def add(self, pairs: Iterable[tuple[int, int]]) -> None:
        """These slots were pinned once more."""
        self._pins.update(pairs)

    def holds(self, slot: int, epoch: int) -> bool:
        """Check whether the slot is pinned."""
        return self._pins[slot, epoch] > 0

    def take_back(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        """Undo one pin of each entry that has one; these slots, in this order."""
        found = []
        for pair in pairs:
            if self._pins[pair] > 0:
                self._pins[pair] -= 1
                found.append(pair[0])
            if not self._pins[pair]:
                del self._pins[pair]
        return found

    def some(self, most: int) -> list[tuple[int, int]]:
        """Up to ``most`` pins, a pair for each; they stay."""
        return list(itertools.islice(self._pins.elements(), most))


def pairs_of(slots: I64, epochs: I64) -> list[tuple[int, int]]:
    """Slots and epochs as pairs."""
    return list(zip(slots.tolist(), epochs.tolist(), strict=True))


def slots_of(pairs: Sequence[tuple[int, int]]) -> I64:
    """Slots of pairs, int64, [n]."""
    return np.array([slot for slot, _ in pairs], dtype=np.int64)
