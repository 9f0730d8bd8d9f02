"""Requests that wait for blocks which others are computing, and when they wait no longer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

STALL_S: Final = 2.0
"""A request that computes for others must store a block so often."""

LONGEST_S: Final = 60.0
"""Maximum time that a request waits."""

ASK_S: Final = 0.005
"""Pause between two questions of one request."""

PATIENCE: Final = 1.5
"""A request waits for so many times as long as it would compute itself."""


@dataclass(slots=True)
class Waiting:
    """One request that has asked.

    Attributes:
        number: Of its chain.
        begun: When it began to wait, of the monotonic clock; None: it does not.
        asked: When it has asked last.
        moved: When more was found than before.
        found: Blocks that were found last.
        over: It has waited long enough, and does not wait again.
    """

    number: int
    begun: float | None = None
    asked: float = 0.0
    moved: float = 0.0
    found: int = 0
    over: bool = False


class AwaitedChains:
    """Chains of requests by name. Used by the scheduler's thread.

    Example:
        >>> chains = AwaitedChains()
        >>> chains.of("request").number
        1
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._by_name: dict[str, Waiting] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        """Requests that have asked and not ended."""
        return len(self._by_name)

    def of(self, name: str) -> Waiting:
        """The chain of a request, which is new where it has none."""
        if name not in self._by_name:
            self._by_name[name] = Waiting(next(self._numbers))
        return self._by_name[name]

    def take(self, name: str) -> Waiting | None:
        """The chain of a request that has ended."""
        return self._by_name.pop(name, None)

    def asks_again(self, chain: Waiting) -> bool:
        """Check whether it is time to ask again; now, where the request does not wait."""
        return chain.begun is None or self._clock() - chain.asked >= ASK_S

    def overdue(self, chain: Waiting, seconds: float | None) -> bool:
        """Check whether a request has waited long enough, once and for all. ``seconds``: how long
        it would compute what is missing; None: nobody knows."""
        if not chain.over and chain.begun is not None:
            now = self._clock()
            most = LONGEST_S if seconds is None else min(LONGEST_S, PATIENCE * seconds)
            waited = now - chain.begun
            chain.over = now - chain.moved > STALL_S or waited > max(most, STALL_S / 4)
        return chain.over

    def told(self, chain: Waiting, found: int) -> None:
        """The node says that others compute what is missing behind ``found`` blocks."""
        now = chain.asked = self._clock()
        if chain.begun is None:
            chain.begun, chain.moved, chain.found = now, now, found
        if found > chain.found:
            chain.moved, chain.found = now, found
