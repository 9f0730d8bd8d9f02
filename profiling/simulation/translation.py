"""Flash translation with two maps: pages that move as they are written, and blocks that are erased.

KV is stored twice where drives select (InstInfer): token-major and channel-major pages. Each has a
map of its own, and open blocks of its own, so that what is given up together is erased together. A
page that is written again goes to the open block; its old place is stale. When too few blocks are
free, the one with the fewest live pages is emptied: its live pages are written again, which is
write amplification, and wear.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import ConfigError

NOWHERE: Final = -1
SPARE_BLOCKS: Final = 2
"""Free blocks, for each map, below which one is emptied."""
DAYS_PER_YEAR: Final = 365.25


@dataclass(frozen=True, slots=True)
class FlashCounts:
    """Work of a translation until now.

    Attributes:
        written: Pages that the host wrote.
        programmed: Pages that were programmed, those of emptied blocks included.
        erases: Of blocks.
        most_erases: Of one block.
    """

    written: int
    programmed: int
    erases: int
    most_erases: int

    @property
    def write_amplification(self) -> float:
        """Pages programmed for each that was written; 1 before the first one."""
        return self.programmed / self.written if self.written else 1.0


class Translation:
    """Maps of a drive's logical pages to its flash, and its garbage collection.

    Example:
        ftl = Translation(blocks=64, block_pages=256, logical={"tokens": 8192, "channels": 4096})
        ftl.write("tokens", range(8192))
        ftl.counts.write_amplification
    """

    def __init__(self, blocks: int, block_pages: int, logical: dict[str, int]) -> None:
        """``logical``: pages of each map.

        Raises:
            ConfigError: sizes below 1, or maps larger than the flash less the spare blocks.
        """
        spare = (SPARE_BLOCKS + 1) * len(logical)
        room = (blocks - spare) * block_pages
        if block_pages < 1 or not logical or min(logical.values()) < 1:
            raise ConfigError(f"flash: got {block_pages} pages a block, maps {logical}; at least 1")
        if sum(logical.values()) > room:
            raise ConfigError(
                f"flash: maps of {sum(logical.values())} pages; {blocks} blocks less {spare} spare "
                f"ones have {max(0, room)}: take more blocks or smaller maps"
            )
        self._block_pages = block_pages
        self._maps = {name: np.full(pages, NOWHERE, np.int64) for name, pages in logical.items()}
        # Logical page of each place; NOWHERE: stale or empty.
        self._owner = np.full((blocks, block_pages), NOWHERE, np.int64)
        # Map of each block that is in use.
        self._name_of: dict[int, str] = {}
        self._live = np.zeros(blocks, np.int64)
        self._erases = np.zeros(blocks, np.int64)
        self._free = list(range(blocks - 1, -1, -1))
        self._open: dict[str, tuple[int, int]] = {}
        self._written = self._programmed = 0

    @property
    def counts(self) -> FlashCounts:
        """Work until now."""
        return FlashCounts(
            self._written, self._programmed, int(self._erases.sum()), int(self._erases.max())
        )

    def write(self, name: str, pages: Iterable[int]) -> None:
        """Write logical pages of a map, in this order."""
        for page in pages:
            self._drop(name, page)
            self._append(name, page)
            self._written += 1
            self._collect()

    def trim(self, name: str, pages: Iterable[int]) -> None:
        """Give logical pages up: nothing of them is written again."""
        for page in pages:
            self._drop(name, page)

    def place(self, name: str, page: int) -> tuple[int, int] | None:
        """Block and page of flash where a logical page lies; None: nowhere."""
        found = int(self._maps[name][page])
        return None if found == NOWHERE else divmod(found, self._block_pages)

    def live(self) -> NDArray[np.int64]:
        """Live pages of each block."""
        return self._live.copy()

    def _drop(self, name: str, page: int) -> None:
        place = self.place(name, page)
        if place is not None:
            self._owner[place] = NOWHERE
            self._live[place[0]] -= 1
            self._maps[name][page] = NOWHERE

    def _append(self, name: str, page: int) -> None:
        block, used = self._open.get(name, (NOWHERE, self._block_pages))
        if used == self._block_pages:
            block, used = self._free.pop(), 0
        self._owner[block, used] = page
        self._name_of[block] = name
        self._live[block] += 1
        self._maps[name][page] = block * self._block_pages + used
        self._programmed += 1
        self._open[name] = (block, used + 1)

    def _collect(self) -> None:
        """Empty blocks until enough are free, those with the fewest live pages first."""
        while len(self._free) <= SPARE_BLOCKS * len(self._maps):
            closed = [block for block in self._name_of if block not in self._open_blocks()]
            victim = min(closed, key=lambda block: self._live[block], default=NOWHERE)
            if victim == NOWHERE or self._live[victim] == self._block_pages:
                return
            name = self._name_of[victim]
            for page in self._owner[victim][self._owner[victim] != NOWHERE].tolist():
                self._drop(name, page)
                self._append(name, page)
            self._owner[victim] = NOWHERE
            self._erases[victim] += 1
            del self._name_of[victim]
            self._free.insert(0, victim)

    def _open_blocks(self) -> set[int]:
        return {block for block, used in self._open.values() if used < self._block_pages}


def life_years(endurance_bytes: float, daily_bytes: float, amplification: float = 1.0) -> float:
    """Years that a drive lasts.

    ``endurance_bytes``: that a host may write, as data sheets say it, with an amplification of 1.
    ``amplification``: of the writes that it gets.
    """
    if min(endurance_bytes, daily_bytes) <= 0 or amplification < 1:
        raise ConfigError(
            f"life: got {endurance_bytes} bytes, {daily_bytes} a day, times {amplification}; bytes "
            "above 0, and an amplification of 1 or more"
        )
    return endurance_bytes / (daily_bytes * amplification * DAYS_PER_YEAR)
