"""Memory that a request hung in a device may still write to. It is never given back."""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

GRACE_S: Final = 1.0
"""How long an engine that is dropped without ``close`` waits for its requests."""

_memory: list[NDArray[np.uint8]] = []


def abandon(memory: NDArray[np.uint8]) -> None:
    """Keep ``memory`` mapped until the process ends, and say so."""
    logger.error(
        "I/O requests hang in a device; %d bytes of memory are lost to them until the process ends",
        memory.size,
    )
    _memory.append(memory)
