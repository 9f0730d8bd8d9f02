"""Co-activation of pages: which pages the same queries chose.

Swarm counts over the steps of an offline profile. Counts of other texts know positions only, and a
context's own last queries tell more than its older ones. So the counts here are of a context's own
last queries, a window of them, of one layer and KV head.

Two pages i and j were chosen by ``f_i`` and ``f_j`` of the window's queries, by ``f_ij`` of them
together. Forms of their affinity P, Swarm's equation (2):

- ``jaccard``: ``f_ij / (f_i + f_j - f_ij)``, queries that chose both, of those that chose any.
- ``conditional``: ``f_ij / min(f_i, f_j)``. A page that was chosen once is as close as can be to
  all pages of that query.
- ``printed``: ``f_ij`` over the sum of all counts, as the paper prints it. About 1e-6, so no
  threshold tells pages apart.

Memory: one bit per page and query, so 8 bytes a page for 64 queries. At 1M tokens, 65,536 pages of
16 tokens, a window of 64 queries takes 512 KiB. An :class:`Affinity` of 16 partners takes 144 bytes
a page, 9 MiB there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]
F32: TypeAlias = NDArray[np.float32]

Form = Literal["jaccard", "conditional", "printed"]

WORD: Final = 64
"""Queries per word of a page's bits."""

_ENTRIES: Final = 1 << 22
"""Pairs of pages that are counted at a time: 16 MiB for each of a few arrays."""


@dataclass(frozen=True, slots=True)
class Affinity:
    """Affinity of each page to its closest partners, a sparse graph.

    Attributes:
        partner: Numbers of other pages, int32 [pages, partners], closest first, equal ones by
            number; -1 where there are fewer.
        weight: Their affinity P, float32 [pages, partners], above 0; 0 where there is none.
        density: Other pages at a distance below the threshold, listed or not, int64 [pages].
    """

    partner: I32
    weight: F32
    density: I64

    def __len__(self) -> int:
        """Number of pages."""
        return len(self.partner)


class ActivationWindow:
    """The pages that each of the last ``steps`` queries chose, of one layer and KV head.

    One thread at a time.

    Example:
        >>> window = ActivationWindow(pages=4, steps=64)
        >>> window.record(np.array([0, 2]))
        >>> window.record(np.array([0, 3]))
        >>> window.frequency().tolist()
        [2, 0, 1, 1]
    """

    def __init__(self, pages: int, steps: int) -> None:
        """Begin with ``pages`` pages that no query has chosen. Raises ValueError: no steps."""
        if steps < 1:
            raise ValueError(f"a window must hold at least 1 query, not {steps}")
        self.steps = steps
        self.recorded = 0
        """Queries in all, of which the window holds the last ``steps``."""
        self._bits = np.zeros((pages, -(-steps // WORD)), np.uint64)

    def __len__(self) -> int:
        """Number of pages."""
        return len(self._bits)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self._bits.nbytes

    def grow(self, pages: int) -> None:
        """Have ``pages`` pages from now on; new ones were chosen by no query so far."""
        more = pages - len(self._bits)
        if more > 0:
            self._bits = np.pad(self._bits, ((0, more), (0, 0)))

    def record(self, chosen: I32 | I64) -> None:
        """Take in the pages that one more query chose, none twice; the oldest query is forgotten.

        Raises:
            IndexError: a page is none of the window's.
        """
        word, bit = divmod(self.recorded % self.steps, WORD)
        mask = np.uint64(1 << bit)
        self._bits[:, word] &= ~mask
        self._bits[chosen, word] |= mask
        self.recorded += 1

    def frequency(self) -> I64:
        """Queries of the window that chose each page, ``f_i``, int64 [pages]."""
        counts: I64 = np.bitwise_count(self._bits).sum(axis=1, dtype=np.int64)
        return counts

    def together(self, rows: I32 | I64, columns: I32 | I64) -> F32:
        """Queries that chose both of two pages, ``f_ij``, float32 [rows, columns]."""
        counts: F32 = self._matrix(rows) @ self._matrix(columns).T
        return counts

    def affinity(self, form: Form, threshold: float, partners: int) -> Affinity:
        """Each page's closest partners, and its density at a distance ``1 - P`` of ``threshold``.

        The time grows with the square of the pages that the window's queries chose.
        """
        pages = len(self._bits)
        partner = np.full((pages, partners), -1, np.int32)
        weight = np.zeros((pages, partners), np.float32)
        density = np.zeros(pages, np.int64)
        for rows, active, share in self._shares(form):
            density[rows] = (1 - share < threshold).sum(axis=1)
            if partners:
                column, value = _largest(share, partners)
                found = value > 0
                number = np.where(found, active[column], -1)
                partner[rows, : number.shape[1]] = number
                weight[rows, : number.shape[1]] = value
        return Affinity(partner, weight, density)

    def _shares(self, form: Form) -> Iterator[tuple[I64, I64, F32]]:
        """Some pages, all pages that were chosen at all, and P of these pairs, 0 with itself."""
        frequency = self.frequency()
        active = np.flatnonzero(frequency)
        matrix = self._matrix(active)
        alone = frequency[active].astype(np.float32)
        # Sum of f over all ordered pairs, the diagonal included: per query the square of its pages.
        total = float((matrix.sum(axis=0, dtype=np.float64) ** 2).sum())
        height = max(1, _ENTRIES // max(len(active), 1))
        for first in range(0, len(active), height):
            part = slice(first, first + height)
            both: F32 = matrix[part] @ matrix.T
            if form == "jaccard":
                both /= alone[part, None] + alone[None] - both
            elif form == "conditional":
                both /= np.minimum(alone[part, None], alone[None])
            else:
                both /= np.float32(total)
            own = np.arange(len(both))
            both[own, own + first] = 0
            yield active[part], active, both

    def _matrix(self, pages: I32 | I64) -> F32:
        """Matrix of 1 where a query chose a page, float32 [pages, steps up to whole words]."""
        words = np.ascontiguousarray(self._bits[pages])
        return np.unpackbits(words.view(np.uint8), axis=1).astype(np.float32)


def _largest(values: F32, count: int) -> tuple[I64, F32]:
    """Columns of the ``count`` largest values of each row, and these; equal ones by column.

    Values are at least 0. The set is the same on every machine: no two keys are equal.
    """
    width = values.shape[1]
    count = min(count, width)
    # Floats from 0 on are ordered as their bits are.
    keys = values.view(np.uint32).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(width, 0, -1, dtype=np.uint64)
    best = np.sort(np.partition(keys, width - count, axis=1)[:, width - count :], axis=1)[:, ::-1]
    column = width - (best & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return column, np.take_along_axis(values, column, axis=1)
