"""Credits: how many bytes a sender may have on the way to a receiver."""

from __future__ import annotations

import threading
import time

from vllm_ssdkv.base.errors import NodeGoneError

_MOST = 1 << 40
"""Bytes; a receiver that gives more away counts wrongly."""


class Credits:
    """Bytes that may still be sent. Any thread may call any method.

    Example:
        >>> credits = Credits()
        >>> credits.add(8)
        >>> credits.take(8, deadline=0.0)
        >>> credits.left
        0
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._left = 0
        self._closed = False

    @property
    def left(self) -> int:
        return self._left

    def add(self, nbytes: int) -> None:
        """Add credit of the receiver."""
        with self._changed:
            self._left = min(self._left + nbytes, _MOST)
            self._changed.notify_all()

    def take(self, nbytes: int, *, deadline: float) -> None:
        """Take credit for ``nbytes``, all at once, as soon as there is enough.

        Args:
            deadline: Time of ``time.monotonic``.

        Raises:
            NodeGoneError: the receiver gave no credit until ``deadline``, or the channel ended.
        """
        with self._changed:
            while self._left < nbytes and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            if self._closed:
                raise NodeGoneError("the connection ended while bytes waited for credit")
            if self._left < nbytes:
                raise NodeGoneError(
                    f"the other side gave credit for {self._left} of {nbytes} bytes until the "
                    "deadline"
                )
            self._left -= nbytes

    def close(self) -> None:
        """Wake all who wait; nothing can be taken from here on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
