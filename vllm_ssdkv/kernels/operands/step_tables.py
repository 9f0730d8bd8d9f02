"""Tables of a step in one array of int64: who fills them and kernels that read them agree here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

NEWEST: Final = -1
"""Number of pages at least of a row that takes its first pages and its newest ones unseen."""

FIELDS: Final = ("blocks", "first_block", "scored", "least", "most")
"""Numbers of a row: blocks of its context, the first block that is read from HBM, blocks that have
records to choose by, and pages that each KV head takes at least and at most."""


MOST_MISSES: Final = 1 << 18
"""Pages, at most, that a layer may ask for because DRAM has no frame of their blocks."""


@dataclass(frozen=True, slots=True)
class StepTables:
    """Sizes of the tables, and where each of them begins.

    Attributes:
        rows: Rows of a step, at most.
        blocks: Blocks of a context, at most.
        hbm_blocks: Blocks in HBM.
        identified: Whether the tables say what the blocks of rows hold.
    """

    rows: int
    blocks: int
    hbm_blocks: int
    identified: bool = False

    @property
    def service(self) -> int:
        """Begin of what is said of the answers to misses; see ``misses.Misses``. Before it: the
        row whose newest token is written to each block in HBM, or -1."""
        return self.hbm_blocks

    @property
    def fields(self) -> int:
        """Begin of the numbers of rows, [len(FIELDS), rows]."""
        return self.service + 2

    @property
    def frames(self) -> int:
        """Begin of the address of the frame of each row's blocks, [rows, blocks]; 0: none."""
        return self.fields + len(FIELDS) * self.rows

    @property
    def records(self) -> int:
        """Begin of the address of each block's records of the first layer, [rows, blocks]."""
        return self.frames + self.rows * self.blocks

    @property
    def identities(self) -> int:
        """Begin of the identity of what each row's blocks hold, [rows, blocks], if it is there."""
        return self.records + self.rows * self.blocks

    @property
    def size(self) -> int:
        """Numbers in all tables."""
        return self.identities + self.identified * self.rows * self.blocks


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a step, as its tables have it.

    Attributes:
        first_block: First block that is read from HBM.
        frames: Address of the frame of each block of its context, uint64 [n]; 0: it has none.
        records: Address of each block's records of the first layer, uint64 [n]; empty: the row does
            not score its pages.
        least, most: Pages that each KV head takes; :data:`NEWEST` for ``least`` has it take the
            first and the newest.
    """

    first_block: int
    frames: NDArray[np.uint64]
    records: NDArray[np.uint64]
    least: int
    most: int
