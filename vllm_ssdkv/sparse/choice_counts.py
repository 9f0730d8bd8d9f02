"""Counts of the choices of each page, which decay: by every token a tenth is taken off.

They know what the last scores do not: pages that are chosen again and again, but not by the last
query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _kernels


@dataclass(frozen=True, slots=True)
class CountedPages:
    """Counts above 0 of pages, in lists; see ``Selection`` for ``pages`` and ``begin``.

    ``counts``: of each page, float32 [n].
    """

    pages: NDArray[np.int32]
    counts: NDArray[np.float32]
    begin: NDArray[np.int32]

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[CountedPages, int] | None], heads: int) -> CountedPages:
        """Lists of the KV heads of some rows, each of which is one of those given, or empty."""
        pages, counts, sizes = [], [], []
        for row in rows:
            if row is None:
                sizes += [0] * heads
                continue
            known, number = row
            edges = known.begin[number * heads : (number + 1) * heads + 1]
            sizes += [b - a for a, b in pairwise(edges.tolist())]
            pages.append(known.pages[edges[0] : edges[-1]])
            counts.append(known.counts[edges[0] : edges[-1]])
        return cls(
            np.concatenate([np.empty(0, np.int32), *pages]),
            np.concatenate([np.empty(0, np.float32), *counts]),
            np.cumsum([0, *sizes]).astype(np.int32),
        )

    def rows(self, rows: NDArray[np.int64], heads: int) -> CountedPages:
        """The lists of some rows, in this order."""
        if np.array_equal(rows, np.arange((len(self.begin) - 1) // heads)):
            return self
        return self.of_rows([(self, row) for row in rows.tolist()], heads)


@dataclass(frozen=True, slots=True)
class _Known:
    requests: list[str]
    blocks: NDArray[np.int64]
    counted: CountedPages


class ChoiceCounts:
    """Counts of the rows of the latest step, layer by layer. Used by the thread of the forward
    pass.

    Memory: 8 bytes for each of twice as many pages as were chosen. A request that is not in a step,
    or begins anew with a shorter context, is not known any more.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def count(
        self,
        layer: int,
        requests: Sequence[str],
        blocks: NDArray[np.int64],
        pages: NDArray[np.int32],
        begin: NDArray[np.int32],
    ) -> CountedPages:
        """Counts of these rows with what they chose now, of contexts of so many ``blocks``."""
        heads = (len(begin) - 1) // max(1, len(requests))
        before = self._before(layer, requests, blocks, heads)
        counted = CountedPages(
            *_kernels.count_choices(
                before.pages, before.counts, before.begin, pages, begin, torch.get_num_threads()
            )
        )
        self._known[layer] = _Known(list(requests), blocks, counted)
        return counted

    def _before(
        self, layer: int, requests: Sequence[str], blocks: NDArray[np.int64], heads: int
    ) -> CountedPages:
        known = self._known.get(layer)
        if known is None:
            return CountedPages.of_rows([None] * len(requests), heads)
        if known.requests == list(requests) and bool((known.blocks <= blocks).all()):
            return known.counted
        places = {request: row for row, request in enumerate(known.requests)}
        rows: list[tuple[CountedPages, int] | None] = []
        for request, size in zip(requests, blocks.tolist(), strict=True):
            row = places.get(request)
            here = row is not None and known.blocks[row] <= size
            rows.append((known.counted, row) if here and row is not None else None)
        return CountedPages.of_rows(rows, heads)
