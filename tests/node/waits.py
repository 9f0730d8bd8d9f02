"""Waits and names that tests of nodes share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

PATIENCE_S = 20.0
"""Longer than anything here takes on a busy machine."""


def until(true: Callable[[], object]) -> None:
    """Wait until it is true, for :data:`PATIENCE_S` at most."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def new_keys(count: int) -> list[bytes]:
    """Keys that no store has."""
    return [os.urandom(32) for _ in range(count)]


def unknown() -> None:
    """Nobody knows how long computing takes."""
