"""Order of what waits for a device: reads overtake writes, up to 32 in a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from vllm_ssdkv.store.io.engines.protocol import Op

READS_PER_WRITE: Final = 32
"""Reads in a row that overtake a write."""

Item = TypeVar("Item")


class ReadsFirst(Generic[Item]):
    """Queue of one device. Used under the owner's lock.

    Example:
        >>> queue = ReadsFirst[str]()
        >>> queue.put(Op.WRITE, "w")
        >>> queue.put(Op.READ, "r")
        >>> queue.take(), queue.take(), bool(queue)
        ('r', 'w', False)
    """

    def __init__(self) -> None:
        self._reads: deque[Item] = deque()
        self._writes: deque[Item] = deque()
        self._in_row = 0

    def __bool__(self) -> bool:
        return bool(self._reads or self._writes)

    def put(self, op: Op, item: Item) -> None:
        """Add one."""
        (self._writes if op is Op.WRITE else self._reads).append(item)

    def peek(self) -> Item:
        """The one that :meth:`take` would take; something waits."""
        return self._next()[0]

    def take(self) -> Item:
        """Take the one whose turn it is; something waits."""
        queue = self._next()
        self._in_row = self._in_row + 1 if queue is self._reads and self._writes else 0
        return queue.popleft()

    def take_while(self, wanted: Callable[[Item], bool]) -> list[Item]:
        """Take the oldest reads and the oldest writes, as long as they are wanted."""
        taken = []
        for queue in (self._reads, self._writes):
            while queue and wanted(queue[0]):
                taken.append(queue.popleft())
        return taken

    def _next(self) -> deque[Item]:
        late = self._writes and self._in_row >= READS_PER_WRITE
        return self._reads if self._reads and not late else self._writes
