"""Rendezvous hashing: which of several nodes keep a run of blocks, and in what order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

MOST_REMEMBERED: Final = 1 << 16
"""Heads of runs whose order is remembered; then all are forgotten at once."""


class Rendezvous:
    """Order of nodes for the first key of a run of blocks. Used by one thread.

    Each engine that names the nodes alike has the same order, whatever the order of their names.
    A node that joins or leaves moves only its own share of the runs.

    Example:
        >>> nodes = Rendezvous(["unix:///run/a", "unix:///run/b"])
        >>> sorted(nodes.ranked(b"key"))
        [0, 1]
    """

    def __init__(self, names: Sequence[str]):
        """``names``: of the nodes, such as their addresses."""
        self._names = [hashlib.blake2b(name.encode()).digest() for name in names]
        self._known: dict[bytes, tuple[int, ...]] = {}

    def ranked(self, head: bytes) -> tuple[int, ...]:
        """Positions of the nodes, the home of the run first."""
        found = self._known.get(head)
        if found is None:
            if len(self._known) >= MOST_REMEMBERED:
                self._known.clear()
            scores = [
                hashlib.blake2b(head, key=name, digest_size=8).digest() for name in self._names
            ]
            found = tuple(sorted(range(len(scores)), key=scores.__getitem__, reverse=True))
            self._known[head] = found
        return found
