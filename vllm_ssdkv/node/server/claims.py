"""Slots that engines have claimed: until every rank has written them, or nobody will."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Claim:
    """One claimed slot on its way to the devices.

    Attributes:
        slot: Its number.
        epoch: Of this use of it.
        key: That it is to be found under; empty: nobody knows yet.
        run: Engine's run that has claimed it.
        saving: Ranks whose blocks are being copied to frames now.
        kept: Ranks that have the block in a frame; the flusher has it from there.
        written: Ranks that have it on their devices.
        published: Whether it can be found.
        given_up: It is to go as soon as no rank copies into a frame for it any more.
    """

    slot: int
    epoch: int
    key: bytes
    run: str
    saving: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    published: bool = False
    given_up: bool = False


class ClaimTable:
    """Claims by slot and by key, and in what generation a slot was claimed. Whoever calls holds the
    store's lock.

    Example:
        claims = ClaimTable()
        claims.add(Claim(slot, epoch, key, run))
    """

    def __init__(self) -> None:
        self._by_slot: dict[int, Claim] = {}
        self._by_key: dict[bytes, Claim] = {}
        self._generation = 0
        self._generations: dict[int, int] = {}
        """By slot, where it is not 0."""

    def __len__(self) -> int:
        """Number of claims."""
        return len(self._by_slot)

    def __iter__(self) -> Iterator[Claim]:
        """All claims, of a moment."""
        return iter(list(self._by_slot.values()))

    def with_key(self, key: bytes) -> Claim | None:
        """Claim of whoever stores a block with this key now."""
        return self._by_key.get(key)

    def add(self, claim: Claim) -> None:
        """A slot was allocated."""
        self._by_slot[claim.slot] = claim
        self._by_key[claim.key] = claim
        if self._generation:
            self._generations[claim.slot] = self._generation

    def begin_generation(self) -> int:
        """Number of a new generation: slots that are claimed from now on are of it."""
        self._generation += 1
        return self._generation

    def generation(self, slot: int) -> int:
        """Generation in which the slot was claimed last; 0: the first one, or before this start."""
        return self._generations.get(slot, 0)

    def find(self, slot: int, epoch: int) -> Claim | None:
        """Claim of a slot in this use of it."""
        claim = self._by_slot.get(slot)
        return claim if claim is not None and claim.epoch == epoch else None

    def remove(self, claim: Claim) -> None:
        """It is written, or given up."""
        del self._by_slot[claim.slot]
        if self._by_key.get(claim.key) is claim:
            del self._by_key[claim.key]
