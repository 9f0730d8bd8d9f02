"""Chains under way: blocks that a request of some engine is about to compute.

Another request that asks for them meanwhile is told so, and may wait in place of computing them
once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

CHAIN_S: Final = 10.0
"""A chain of which nothing was claimed for so long counts as given up."""

MOST_CHAINS: Final = 4096
MOST_KEYS: Final = 1 << 18
"""Chains of one owner, and keys of all of them, at most; the oldest chain goes. These are the keys
of 4 million tokens in blocks of 16."""


class Chain:
    """Keys that one request computes.

    Attributes:
        keys: Those of which no block was claimed yet.
        until: When it counts as given up, of the monotonic clock.
    """

    __slots__ = ("keys", "until")

    def __init__(self, keys: set[bytes], until: float):
        self.keys, self.until = keys, until


class ChainTable:
    """Chains by owner and number, and by key. Whoever calls holds the store's lock.

    Example:
        >>> table = ChainTable()
        >>> table.begin("engine", 1, [b"a", b"b"], now=0.0)
        >>> table.expected([b"a", b"b", b"c"], "engine", 2, lambda key: False, now=1.0)
        2
    """

    def __init__(self) -> None:
        self._by_owner: dict[object, dict[int, Chain]] = {}
        self._by_key: dict[bytes, Chain] = {}

    def __len__(self) -> int:
        """Number of keys that somebody computes."""
        return len(self._by_key)

    def expected(
        self,
        keys: Sequence[bytes],
        owner: object,
        number: int,
        claimed: Callable[[bytes], bool],
        now: float,
    ) -> int:
        """Number of ``keys``, from the first on, that others than this request are computing.

        ``claimed``: whether a block with this key is being stored.
        """
        own = self._by_owner.get(owner, {}).get(number)

        def comes(key: bytes) -> bool:
            chain = self._by_key.get(key)
            under_way = chain is not None and chain is not own and chain.until > now
            return under_way or claimed(key)

        return sum(1 for _ in itertools.takewhile(comes, keys))

    def begin(self, owner: object, number: int, keys: Sequence[bytes], now: float) -> None:
        """A request computes these blocks from now on, unless another one does."""
        self.leave(owner, number)
        chain = Chain(set(), now + CHAIN_S)
        for key in keys:
            other = self._by_key.get(key)
            if other is not None:
                if other.until > now:
                    continue
                other.keys.discard(key)
            self._by_key[key] = chain
            chain.keys.add(key)
        chains = self._by_owner.setdefault(owner, {})
        chains[number] = chain
        while len(chains) > MOST_CHAINS or sum(len(c.keys) for c in chains.values()) > MOST_KEYS:
            self.leave(owner, next(iter(chains)))

    def claimed(self, key: bytes, now: float) -> None:
        """A block was computed: the rest of its chain goes on."""
        chain = self._by_key.pop(key, None)
        if chain is not None:
            chain.keys.discard(key)
            chain.until = now + CHAIN_S

    def go_on(self, owner: object, number: int, now: float) -> None:
        """A request still computes; its blocks may be claimed in another node."""
        chain = self._by_owner.get(owner, {}).get(number)
        if chain is not None:
            chain.until = now + CHAIN_S

    def leave(self, owner: object, number: int) -> None:
        """A request computes nothing more."""
        chain = self._by_owner.get(owner, {}).pop(number, None)
        for key in () if chain is None else chain.keys:
            del self._by_key[key]

    def end(self, owner: object) -> None:
        """All requests of an owner are gone."""
        for number in list(self._by_owner.get(owner, ())):
            self.leave(owner, number)
        self._by_owner.pop(owner, None)
