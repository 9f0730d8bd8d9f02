"""Memory of the device that attends, for pages, as the store sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

CopyPages: TypeAlias = Callable[[NDArray[np.uint64], NDArray[np.int32]], None]
"""Copies pages from absolute addresses of DRAM, [n], to places."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device that attends, for single pages.

    Attributes:
        address: Absolute, of the device; of the first place. Others follow at one stride.
        places: Pages that it holds.
        copy: Fills places. It may return before the copy has ended, unless who uses the memory
            needs the source for something else; what attends to the places waits for the copy.
    """

    address: int
    places: int
    copy: CopyPages
