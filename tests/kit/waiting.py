"""Waiting for what other threads and processes do."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0
"""Longer than anything takes on a busy machine, but the start of an engine."""


def pause() -> None:
    """Let others compute for a moment."""
    time.sleep(0.005)


def until(
    holds: Callable[[], T],
    what: str = "",
    seconds: float = PATIENCE_S,
    between: Callable[[], object] = pause,
) -> T:
    """Wait until something holds: the first result of ``holds`` that is true.

    Args:
        what: Text for a failure; without one, the failure shows the source of ``holds``.
        seconds: Time after which the test fails.
        between: Called before each further look.
    """
    deadline = time.monotonic() + seconds
    while not (result := holds()):
        if time.monotonic() > deadline:
            source = what or inspect.getsource(holds).strip()
            raise AssertionError(f"waited {seconds:g} s in vain for: {source}")
        between()
    return result
