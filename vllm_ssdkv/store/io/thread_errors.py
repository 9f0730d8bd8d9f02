"""Errors that nothing foresaw, in threads that must go on: counted, and logged now and then."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Final

from vllm_ssdkv.base.metrics import Counters

logger = logging.getLogger(__name__)

TELL_INTERVAL_S: Final = 60.0
"""Time between two log lines of a thread: an error may come with every look."""


class ThreadErrors:
    """Counter of one thread's errors. Thread-safe, but for the interval of its log lines."""

    def __init__(self, counters: Counters, thread: str):
        """``thread``: a value of the label of ``thread_errors``."""
        self._counters = counters
        self._thread = thread
        self._told_at = -TELL_INTERVAL_S

    def swallowed(self, consequence: str) -> Swallowed:
        """A context whose errors, and no exits, end in it. ``consequence``: for the log."""
        return Swallowed(self, consequence)

    def count(self, error: Exception, consequence: str) -> None:
        """Count an error; log it unless another one was logged a short while ago."""
        self._counters.add("thread_errors", 1, thread=self._thread)
        now = time.monotonic()
        if now >= self._told_at + TELL_INTERVAL_S:
            self._told_at = now
            logger.error("ssdkv: error in the %s: %s", self._thread, consequence, exc_info=error)


class Swallowed:
    """A context of :meth:`ThreadErrors.swallowed`."""

    def __init__(self, errors: ThreadErrors, consequence: str):
        self._errors = errors
        self._consequence = consequence

    def __enter__(self) -> None:
        """Begin it."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End it; True for an error that is counted here."""
        if not isinstance(error, Exception):
            return False
        self._errors.count(error, self._consequence)
        return True
