"""Flash translation with several maps: pages that are written once, and blocks that are erased.

Each map has open blocks of its own, so that pages of one map are erased together. A page that is
written again goes to the open block; its old place is stale. Blocks without a live page are erased
in idle time. When too few blocks are free, the one with the fewest live pages is emptied: its live
pages are written again, which is write amplification, and wear.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_ssdkv.base.errors import ConfigError

NOWHERE: Final = -1
SPARE_BLOCKS: Final = 2
"""Free blocks below which one is emptied; each map has an open one beside them."""


@dataclass(frozen=True, slots=True)
class FlashCounts:
    """Work of a translation until now.

    Attributes:
        written: Pages that the host wrote.
        programmed: Pages that were programmed, those of emptied blocks included.
        erases: Blocks that were erased while a write waited.
        idle_erases: Blocks that were erased in idle time.
    """

    written: int
    programmed: int
    erases: int
    idle_erases: int

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
        """``logical``: pages of each map. They may be more than the flash has, if never all are
        written.

        Raises:
            ConfigError: sizes below 1, or fewer blocks than an open one for each map and the spare
                ones.
        """
        if block_pages < 1 or not logical or min(logical.values()) < 1:
            raise ConfigError(f"flash: got {block_pages} pages a block, maps {logical}; at least 1")
        if blocks <= (least := len(logical) + SPARE_BLOCKS):
            raise ConfigError(
                f"flash: got {blocks} blocks for {len(logical)} maps; give more than {least}"
            )
        self._block_pages = block_pages
        self._maps = {name: np.full(pages, NOWHERE, np.int64) for name, pages in logical.items()}
        # Logical page of each place; NOWHERE: stale or empty.
        self._owner = np.full((blocks, block_pages), NOWHERE, np.int64)
        # Map of each block that is in use.
        self._name_of: dict[int, str] = {}
        self._live = np.zeros(blocks, np.int64)
        self._erases = self._idle_erases = 0
        self._free = list(range(blocks - 1, -1, -1))
        self._open: dict[str, tuple[int, int]] = {}
        self._written = self._programmed = 0

    @property
    def counts(self) -> FlashCounts:
        """Work until now."""
        return FlashCounts(self._written, self._programmed, self._erases, self._idle_erases)

    def write(self, name: str, pages: Iterable[int]) -> None:
        """Write logical pages of a map, in this order.

        Raises:
            ConfigError: every block is full of live pages.
        """
        for page in pages:
            self._drop(name, page)
            self._append(name, page)
            self._written += 1
            self._collect()

    def trim(self, name: str, pages: Iterable[int]) -> None:
        """Give logical pages up: nothing of them is written again."""
        for page in pages:
            self._drop(name, page)

    def reclaim(self) -> None:
        """Erase every full block without a live page, as a drive does in idle time."""
        used = self._name_of.keys() - self._open_blocks()
        for block in sorted(one for one in used if not self._live[one]):
            self._erase(block)
            self._idle_erases += 1

    def place(self, name: str, page: int) -> tuple[int, int] | None:
        """Block and page of flash where a logical page lies; None: nowhere."""
        found = int(self._maps[name][page])
        return None if found == NOWHERE else divmod(found, self._block_pages)

    def _drop(self, name: str, page: int) -> None:
        place = self.place(name, page)
        if place is not None:
            self._owner[place] = NOWHERE
            self._live[place[0]] -= 1
            self._maps[name][page] = NOWHERE

    def _append(self, name: str, page: int) -> None:
        block, used = self._open.get(name, (NOWHERE, self._block_pages))
        if used == self._block_pages:
            if not self._free:
                raise ConfigError("flash: all blocks are full of live pages; give it more blocks")
            block, used = self._free.pop(), 0
        self._owner[block, used] = page
        self._name_of[block] = name
        self._live[block] += 1
        self._maps[name][page] = block * self._block_pages + used
        self._programmed += 1
        self._open[name] = (block, used + 1)

    def _collect(self) -> None:
        """Empty blocks until enough are free, those with the fewest live pages first."""
        while len(self._free) <= SPARE_BLOCKS:
            closed = [block for block in self._name_of if block not in self._open_blocks()]
            victim = min(closed, key=lambda block: self._live[block], default=NOWHERE)
            if victim == NOWHERE or self._live[victim] == self._block_pages:
                return
            name = self._name_of[victim]
            for page in self._owner[victim][self._owner[victim] != NOWHERE].tolist():
                self._drop(name, page)
                self._append(name, page)
            self._erase(victim)
            self._erases += 1

    def _erase(self, block: int) -> None:
        self._owner[block] = NOWHERE
        del self._name_of[block]
        self._free.insert(0, block)

    def _open_blocks(self) -> set[int]:
        return {block for block, used in self._open.values() if used < self._block_pages}
