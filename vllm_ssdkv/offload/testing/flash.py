"""Flash of a drive that attends: dies behind channels, and blocks that are erased in idle time.

InstInfer (Pan et al., arXiv 2409.04992) stores K and V by token, in pages that hold 16 tokens of
one head, and K once more by channel, in pages that hold a few channels of many tokens. Each of both
has an address map. Both deal the pages of a head to all channels, and begin with another channel
for each head, so that a context is read from all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCK_BYTES: Final = 4 << 20
"""Bytes of an erase block: 256 pages of 16 KiB, as on OpenSSD's boards."""
ERASE_S: Final = 3.8e-3
"""Seconds in which a die erases a block: the preset of MQSim, a public simulator of drives."""


@dataclass(frozen=True, slots=True)
class FlashTiming:
    """Times of a drive's flash.

    A die is occupied while it reads a page from its cells and while the page goes over the channel,
    which carries one page at a time. The dies of a channel work beside each other.

    Attributes:
        channels: Number of them.
        dies: Number of dies of each channel.
        page_bytes: Size of a page; less is never read.
        read_s: Seconds in which a die reads a page.
        channel_bandwidth: Bytes/s of one channel.
    """

    channels: int
    dies: int
    page_bytes: int
    read_s: float
    channel_bandwidth: float

    @property
    def transfer_s(self) -> float:
        """Seconds for which a page occupies its channel."""
        return self.page_bytes / self.channel_bandwidth

    @property
    def page_s(self) -> float:
        """Seconds between two pages of a channel, while many are read: by the slower of both."""
        return max(self.transfer_s, (self.read_s + self.transfer_s) / self.dies)

    @property
    def bandwidth(self) -> float:
        """Bytes/s of all channels together, if each has as many pages."""
        return self.channels * self.page_bytes / self.page_s

    def channel(self, page: ArrayLike, head: ArrayLike) -> NDArray[np.int64]:
        """Channel of a head's pages, by either address map.

        ``page``: number of the page among those of its head: a group of tokens, or a group of
        channels of K and a range of tokens. ``head``: number of the KV head; V has one of its own.
        """
        return (np.asarray(page, np.int64) + np.asarray(head, np.int64)) % self.channels

    def read_pages_s(self, pages: ArrayLike) -> float:
        """Seconds for which reads occupy the drive. ``pages`` [channels]: read from each of them;
        the channel with the most pages ends last."""
        return float(np.max(pages)) * self.page_s


class IdleErasure:
    """Blocks of one drive that were given up by whole ranges, and are erased while it is idle.

    A range has all pages of a context or slot, in blocks of its own. So nothing in it is copied
    when it is given up, and no write waits for it. An erase that has begun is ended, though a read
    comes meanwhile: dies do not interrupt it. Not for several threads.

    Attributes:
        stale: Blocks that wait, in parts of one.
        erased: Blocks that were erased.
    """

    def __init__(self, timing: FlashTiming) -> None:
        self._together = timing.channels * timing.dies
        self.stale = 0.0
        self.erased = 0.0

    def drop(self, nbytes: float) -> None:
        """Give up a range of so many bytes."""
        self.stale += nbytes / BLOCK_BYTES

    def idle(self, seconds: float) -> float:
        """Erase in an idle time, one block of each die at a time.

        Returns:
            Seconds from the beginning of that time to the end of the last erase; above ``seconds``
            if it is under way then.
        """
        whole = math.floor(self.stale)
        turns = min(-(-whole // self._together), math.ceil(seconds / ERASE_S))
        done = min(whole, turns * self._together)
        self.stale -= done
        self.erased += done
        return turns * ERASE_S
