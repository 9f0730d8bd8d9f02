"""Prediction of the pages that the next query of a request will choose.

Three of four pages are what the query before it chose. Of those that come next by that one's scores
and by how often they were chosen, about two in five are chosen anew.

Reading that ahead, while the layer before is attended to, hides the time of those pages that were
in no tier of DRAM any more. The answer does not depend on it: the layer's own query chooses, and
what was not guessed is read then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.sparse.choice_counts import ChoiceCounts


@dataclass(frozen=True, slots=True)
class Prediction:
    """Pages of some rows; see ``Selection`` for ``pages`` and ``begin``.

    ``rows`` says which rows of those asked about, int64, ascending.
    """

    rows: NDArray[np.int64]
    pages: NDArray[np.int32]
    begin: NDArray[np.int32]


Lists: TypeAlias = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Pages, and the edges of their lists."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    requests: list[str]
    blocks: NDArray[np.int64]
    lists: Lists | _kernels.ChosenLists
    """Lists of one layer, or of a whole step."""


class SelectionHistory:
    """The latest selections, layer by layer. Used by the thread that runs the forward pass.

    Time grows with the rows; pages are copied only when the rows of a step are other ones.
    """

    def __init__(self) -> None:
        self._chosen: dict[int, _Chosen] = {}
        """By layers that were remembered by themselves."""
        self._step: _Chosen | None = None
        """Of all layers together, that are not in :attr:`_chosen`."""

    def remember(
        self,
        layer: int,
        requests: Sequence[str],
        blocks: NDArray[np.int64],
        pages: NDArray[np.int32],
        begin: NDArray[np.int32],
    ) -> None:
        """These rows chose these pages, of contexts of so many ``blocks``, [rows]."""
        self._chosen[layer] = _Chosen(list(requests), blocks, (pages, begin))

    def remember_step(
        self,
        requests: Sequence[str],
        blocks: NDArray[np.int64],
        lists: _kernels.ChosenLists,
    ) -> None:
        """These rows chose these pages, in all layers that have any; the others keep theirs."""
        layers, before = lists.layers, self._step
        if before is not None and isinstance(before.lists, _kernels.ChosenLists):
            known = before.lists.layers
            for layer in () if known == layers else set(known).difference(layers):
                if latest := before.lists.of(layer):
                    self._chosen.setdefault(layer, replace(before, lists=latest))
        for layer in layers if self._chosen else ():
            self._chosen.pop(layer, None)
        self._step = _Chosen(list(requests), blocks, lists)

    def recall(
        self, layer: int, requests: Sequence[str], blocks: NDArray[np.int64]
    ) -> Prediction | None:
        """Last choices of these rows; None: nothing is known of them.

        A row whose context has become shorter has begun anew: nothing is known of it.
        """
        chosen = self._chosen.get(layer, self._step)
        if chosen is None:
            return None
        made = chosen.lists
        latest = made.of(layer) if isinstance(made, _kernels.ChosenLists) else made
        if latest is None:
            return None
        all_pages, all_edges = latest
        if chosen.requests == list(requests) and bool((chosen.blocks <= blocks).all()):
            return Prediction(np.arange(len(blocks)), all_pages, all_edges)
        known = {request: row for row, request in enumerate(chosen.requests)}
        rows, lists = [], []
        heads = (len(all_edges) - 1) // max(1, len(chosen.requests))
        for row, (request, size) in enumerate(zip(requests, blocks.tolist(), strict=True)):
            old = known.get(request)
            if old is None or chosen.blocks[old] > size:
                continue
            rows.append(row)
            edges = all_edges[old * heads : (old + 1) * heads + 1]
            lists += [all_pages[a:b] for a, b in pairwise(edges)]
        if not rows:
            return None
        begin = np.zeros(len(lists) + 1, dtype=np.int32)
        np.cumsum([len(pages) for pages in lists], out=begin[1:])
        return Prediction(np.array(rows, dtype=np.int64), np.concatenate(lists), begin)


@dataclass(frozen=True, slots=True)
class Prefetcher:
    """Memory of the latest choices; see the module.

    Attributes:
        likely: What was chosen: worth reading in any case.
        possible: What came next: worth reading where it costs no time.
        counts: How often pages were chosen lately.
    """

    likely: SelectionHistory = field(default_factory=SelectionHistory)
    possible: SelectionHistory = field(default_factory=SelectionHistory)
    counts: ChoiceCounts = field(default_factory=ChoiceCounts)
