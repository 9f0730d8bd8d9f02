"""Whose turn it is: batches share the seats one request at a time, round robin."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Turns(Generic[Key]):
    """A circle of batches. Of those that could go on, the one that waited longest is next.

    Between two turns of a batch every other one that could go on gets one, so a batch of ten
    requests does not wait for one of ten thousand. Not thread-safe.
    """

    def __init__(self) -> None:
        self._circle: deque[Key] = deque()

    def join(self, key: Key) -> None:
        """Take part from now on, after those that wait already. Idempotent."""
        if key not in self._circle:
            self._circle.append(key)

    def leave(self, key: Key) -> None:
        """Take part no more. Idempotent."""
        if key in self._circle:
            self._circle.remove(key)

    def next(self, ready: Callable[[Key], bool]) -> Key | None:
        """The next one that is ready; it goes to the end. None: no one is."""
        for position, key in enumerate(self._circle):
            if ready(key):
                del self._circle[position]
                self._circle.append(key)
                return key
        return None
