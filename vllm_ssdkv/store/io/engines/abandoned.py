"""Memory that a request hung in a device may still write to. It is never given back."""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Final

logger = logging.getLogger(__name__)

GRACE_S: Final = 1.0
"""Time that an engine which is dropped without ``close`` waits for its requests."""

_memory: list[Sized] = []


def abandon(memory: Sized) -> None:
    """Keep ``memory`` mapped until the process ends, and say so."""
    logger.error(
        "I/O requests hang in a device; %d bytes of memory are lost to them until the process ends",
        len(memory),
    )
    _memory.append(memory)
