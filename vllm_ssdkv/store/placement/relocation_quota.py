"""Free slots that blocks may move to, so that moving costs few stored blocks.

In a full store a free slot is one that something was given up for. So what moves has room of its
own, which is limited, and made of segments that nothing has moved away from: those are cold. Slots
that came free behind what moved are room again when their segment is striped anew: when it is
empty, or, where that is not enough, when more has moved away from it than is left, which is cold by
then. What is kept free for new blocks is not touched.
"""

from __future__ import annotations


class MovingRoom:
    """Counts them. Used by the :class:`Rebalancer`, on its thread.

    Attributes:
        slots: Free slots that may be moved to now.
        total: The same, with those that blocks are moving to, and those that they have left.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.total = 0
        self._vacated: dict[int, int] = {}
        """By segment, how many blocks have moved away."""
        self._left: dict[int, int] = {}
        """By segment, how many stored blocks are left there, at most."""

    def grant(self, slots: int) -> None:
        """So many more slots may be moved to."""
        self.slots += slots
        self.total += slots

    def vacate(self, first: int, moved: int, ready: int) -> None:
        """Blocks have moved away from the segment that begins with slot ``first``, where ``ready``
        are left; known less well, if others came or went since."""
        self._vacated[first] = self._vacated.get(first, 0) + moved
        self._left[first] = ready

    def left(self, first: int) -> int | None:
        """As far as is known, how many stored blocks the segment has; None: nobody has looked."""
        return self._left.get(first)

    def emptiest_first(self) -> list[int]:
        """First slots of the segments that at least half has moved away from; the one with the
        least left comes first."""
        found = [(left, f) for f, left in self._left.items() if left <= self._vacated[f]]
        return [first for _, first in sorted(found)]

    def spent(self, first: int, ready: int) -> bool:
        """Whether more has moved away from the segment than is left, ``ready`` blocks."""
        return self._vacated.get(first, 0) >= max(1, ready)

    def returning(self, first: int, slots: int) -> int:
        """How many of its ``slots`` are room again when the segment is striped anew."""
        return min(self._vacated.get(first, 0), slots)

    def back(self, first: int, slots: int) -> None:
        """The segment was striped anew, with so many slots."""
        returned = self.returning(first, slots)
        self.slots += returned
        self.total += returned - self._vacated.pop(first, 0)
        self._left.pop(first, None)

    def clear(self) -> None:
        """Other segments are to be left from now on, or none."""
        self.slots = self.total = 0
        self._vacated.clear()
        self._left.clear()
