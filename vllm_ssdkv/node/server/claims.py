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
        key: That it is to be found under.
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
    saving: int = 0
    kept: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    published: bool = False
    given_up: bool = False


class ClaimTable:
    """Claims by slot and by key. Whoever calls holds the store's lock."""

    def __init__(self) -> None:
        self._by_slot: dict[int, Claim] = {}
        self._by_key: dict[bytes, Claim] = {}

    def __len__(self) -> int:
        """Number of claims."""
        return len(self._by_slot)

    def __iter__(self) -> Iterator[Claim]:
        """All claims, of a moment."""
        return iter(list(self._by_slot.values()))

    def has_key(self, key: bytes) -> bool:
        """Check whether somebody stores a block with this key now."""
        return key in self._by_key

    def add(self, claim: Claim) -> None:
        """A slot was allocated."""
        self._by_slot[claim.slot] = claim
        self._by_key[claim.key] = claim

    def find(self, slot: int, epoch: int) -> Claim | None:
        """Claim of a slot in this use of it."""
        claim = self._by_slot.get(slot)
        return claim if claim is not None and claim.epoch == epoch else None

    def remove(self, claim: Claim) -> None:
        """It is written, or given up."""
        del self._by_slot[claim.slot]
        if self._by_key.get(claim.key) is claim:
            del self._by_key[claim.key]
