"""Waits and names that tests of nodes share."""

from __future__ import annotations

import os

PATIENCE_S = 20.0
"""Longer than anything here takes on a busy machine."""


def new_keys(count: int) -> list[bytes]:
    """Keys that no store has."""
    return [os.urandom(32) for _ in range(count)]


def unknown() -> None:
    """Nobody knows how long computing takes."""
