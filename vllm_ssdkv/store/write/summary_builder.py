"""Interface of the kernels to the store: they make from K and V what selectors must know of them.

The tail of a slot, its summary and channel pages, follows from its pages of KV, bit by bit and
wherever it is made. So no memory is spent on it: who packs a block makes it once, for the tables in
DRAM that selectors look at; the writer makes it again, for the devices, a group of slots at a time;
and what a table has lost is made from a frame.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class SummaryBuilder(Protocol):
    """Reads frames in DRAM. Methods may be called from any thread, and release the GIL.

    Addresses are absolute. Padding of pages stays as it is.
    """

    def make_tails(self, frames: NDArray[np.uint64], tails: NDArray[np.uint64]) -> None:
        """Make the tails, [n], of slots whose header and pages of KV are in frames, [n]."""

    def make_channels(self, pages: NDArray[np.uint64], channels: NDArray[np.uint64]) -> None:
        """Make channel-major K, [n], as it is without padding in the channel pages of one layer,
        from the pages of KV of that layer in frames, of which these are the first, [n]."""
