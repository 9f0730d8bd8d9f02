"""Time that passes only while somebody waits for a throttled engine, whatever the machine does."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest


class ModelTime:
    """Stands for the module ``time`` where code measures what a throttled engine does."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._lock = threading.Lock()

    def govern(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Have these modules go by it."""
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        with self._lock:
            return self._now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now += max(0.0, seconds)
