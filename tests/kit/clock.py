"""Clocks that go when a test lets them."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest


class Clock:
    """A clock that a test sets: a callable, and the module ``time`` for code that measures.

    ``sleep`` lets time pass and returns at once. Safe from several threads.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def govern(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Have these modules go by it."""
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        """Time now, in seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        with self._lock:
            self.now += max(0.0, seconds)
