"""Round robin: keys share the seats of batches evenly, and batches of a key take turns."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Turns(Generic[Key]):
    """Circles of batches, one per owner.

    The owner that has the fewest seats is next, of those with as many the one that waited longest;
    so one owner's long requests do not come to take all seats. Between two turns of a batch every
    other one of its owner that could go on gets one, so a batch of ten requests does not wait for
    one of ten thousand. Not thread-safe.
    """

    def __init__(self) -> None:
        self._circles: dict[bytes, list[Key]] = {}

    def join(self, owner: bytes, key: Key) -> None:
        """Take part from now on, after those that wait already. Idempotent."""
        circle = self._circles.setdefault(owner, [])
        if key not in circle:
            circle.append(key)

    def leave(self, owner: bytes, key: Key) -> None:
        """Take part no more. Idempotent."""
        circle = self._circles.get(owner, [])
        if key in circle:
            circle.remove(key)
        if not circle:
            self._circles.pop(owner, None)

    def next(
        self, ready: Callable[[Key], bool], seats: Callable[[bytes], int], but: Collection[Key] = ()
    ) -> Key | None:
        """The next one that is ready. None: no one is.

        Args:
            ready: Whether a batch has something to do.
            seats: How many an owner has.
            but: Batches that are passed over; they keep their places.
        """
        for owner in sorted(self._circles, key=seats):
            for key in self._circles[owner]:
                if key not in but and ready(key):
                    return key
        return None

    def took(self, owner: bytes, key: Key) -> None:
        """A batch had its turn: it goes to the end, and so does its owner."""
        circle = self._circles.pop(owner)
        circle.remove(key)
        self._circles[owner] = [*circle, key]
