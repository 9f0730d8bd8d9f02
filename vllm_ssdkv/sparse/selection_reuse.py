"""Selections that are kept for the tokens that follow, since choosing looks at every page.

Queries of neighbouring tokens are mostly alike, and so is what they choose. So what one token chose
up to ``steps - 1`` tokens after it attend to as well, with all that has left the window since:
between the pages that were chosen and the window nothing is lost.

The correction is FreeKV's (Liu et al. 2025, arXiv 2505.13109): a row chooses at once when its query
has turned away, which is when the cosine between it and the one that chose, the mean over the query
heads of a KV head, is below ``similarity`` for any KV head. Two things differ. FreeKV compares with
the token before, by which slow drift is never noticed; and it corrects single heads, while here all
heads of a row are scored in one go. A row whose budget has no room for what left its window chooses
at once, too; the selector leaves room for it (``ContextSummaries.ahead``).

What a row attends to follows from its own queries: who else is in the batch, where pages lie and
what is read ahead change nothing. Its alpha and mass are those of the query that chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.sparse.concat import concat, extend, rows_of
from vllm_ssdkv.sparse.protocol import Selection

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Positions of R rows, int64 [R] each.

    Attributes:
        position: Of the current token.
        pages: Of the context.
        left: Context tokens that the budget allows.
    """

    position: I64
    pages: I64
    left: I64


@dataclass(frozen=True, slots=True)
class _Kept:
    """Selections of R rows of one layer that are kept.

    Attributes:
        query: That chose, [R, q_heads, head_size].
        position: Of its token, int64 [R].
        pages: That the context had when ``selection`` was used last, int64 [R].
        tokens: Of the KV head that attends to most, int64 [R].
    """

    selection: Selection
    query: torch.Tensor
    position: I64
    pages: I64
    tokens: I64

    def rows(self, rows: I64, kv_heads: int) -> _Kept:
        """Some of the rows."""
        return _Kept(
            rows_of(self.selection, rows, kv_heads),
            self.query[torch.from_numpy(rows).to(self.query.device)],
            self.position[rows],
            self.pages[rows],
            self.tokens[rows],
        )


class SelectionReuse:
    """The latest selections of running requests, by layer. Used by the thread of the forward pass.

    Memory: per request and layer a query and a list of pages for each KV head, of the budget at
    most. Time grows with the rows; pages are copied only when the rows of a step are other ones,
    some of them choose, or a block has left the window.
    """

    def __init__(self, layers: int, layout: BlockLayout, steps: int, similarity: float):
        """Keep a selection for ``steps`` tokens, of which the first one chose."""
        self.steps = steps
        self._similarity = similarity
        self._layout = layout
        self._where: list[dict[str, tuple[_Kept, int]]] = [{} for _ in range(layers)]
        """Of each request: in which row of what its selection is."""

    def __len__(self) -> int:
        """Requests that are known."""
        return len(set().union(*self._where))

    def drop(self, request_id: str) -> None:
        """The request does not run any more, or begins anew: its next query chooses."""
        for where in self._where:
            where.pop(request_id, None)

    def select(
        self,
        layer: int,
        requests: Sequence[str],
        sizes: RowSizes,
        query: torch.Tensor,
        choose: Callable[[I64], Selection],
    ) -> tuple[Selection, int]:
        """Selections of R rows in a layer, and the number of rows that do not choose now.

        Args:
            layer: From 0.
            requests: Their names, [R].
            sizes: Of the rows.
            query: Their queries, [R, q_heads, head_size]; kept, so the caller may not change it.
            choose: The selection of some of the rows, by their numbers, ascending, int64 [r].
        """
        layout = self._layout
        known, kept = self._recall(layer, requests)
        stay, again = known, np.arange(len(requests))
        if kept is not None:
            stands = self._stands(kept, known, sizes, query)
            stay, kept = known[stands], kept.rows(np.flatnonzero(stands), layout.kv_heads)
            again = np.setdiff1d(again, stay, assume_unique=True)
        if kept is None or not len(stay):
            selection = choose(again)
            tokens = _most_tokens(selection, layout)
            # vLLM's own buffer, which the next layer or step may write to.
            now = _Kept(selection, query.clone(), sizes.position, sizes.pages, tokens)
        else:
            more = sizes.pages[stay] - kept.pages
            parts = [(stay, extend(kept.selection, kept.pages, more, layout.kv_heads))]
            position, tokens = sizes.position.copy(), np.empty_like(sizes.position)
            position[stay] = kept.position
            tokens[stay] = kept.tokens + more * layout.page_tokens
            by = query.clone()
            by[torch.from_numpy(stay).to(query.device)] = kept.query
            if len(again):
                chosen = choose(again)
                tokens[again] = _most_tokens(chosen, layout)
                parts.append((again, chosen))
            selection = concat(parts, layout.kv_heads, layout.page_tokens)
            now = _Kept(selection, by, position, sizes.pages, tokens)
        where = self._where[layer]
        for row, request in enumerate(requests):
            where[request] = now, row
        return selection, len(stay)

    def _recall(self, layer: int, requests: Sequence[str]) -> tuple[I64, _Kept | None]:
        """Rows that are known, ascending, and what is kept for them."""
        where = self._where[layer]
        found = [(row, *where[name]) for row, name in enumerate(requests) if name in where]
        known = np.array([row for row, _, _ in found], dtype=np.int64)
        if not found:
            return known, None
        heads = self._layout.kv_heads
        # Mostly there is one: all rows were in the step before.
        sources = list({id(source): source for _, source, _ in found}.values())
        parts, places = [], []
        for source in sources:
            here = [(i, row) for i, (_, one, row) in enumerate(found) if one is source]
            places.append(np.array([i for i, _ in here], dtype=np.int64))
            parts.append(source.rows(np.array([row for _, row in here], dtype=np.int64), heads))
        if len(parts) == 1:
            return known, parts[0]
        order = np.argsort(np.concatenate(places))
        selections = [(place, part.selection) for place, part in zip(places, parts, strict=True)]
        return known, _Kept(
            concat(selections, heads, self._layout.page_tokens),
            torch.cat([part.query for part in parts])[order],
            np.concatenate([part.position for part in parts])[order],
            np.concatenate([part.pages for part in parts])[order],
            np.concatenate([part.tokens for part in parts])[order],
        )

    def _stands(
        self, kept: _Kept, known: I64, sizes: RowSizes, query: torch.Tensor
    ) -> NDArray[np.bool_]:
        """Mask of the kept selections that the rows ``known`` attend to once more."""
        age = sizes.position[known] - kept.position
        more = sizes.pages[known] - kept.pages
        tokens = kept.tokens + more * self._layout.page_tokens
        # Not after it, or in a shorter context: the request goes on from an earlier token.
        stands: NDArray[np.bool_] = (age > 0) & (age < self.steps) & (more >= 0)
        stands &= tokens <= sizes.left[known]
        if stands.any():
            now = query[torch.from_numpy(known).to(query.device)].double()
            cosine = torch.cosine_similarity(now, kept.query.double(), dim=2)
            heads = cosine.view(len(known), self._layout.kv_heads, -1).mean(2)
            # False for a NaN: broken data is not hidden.
            stands &= (heads >= self._similarity).all(1).cpu().numpy()
        return stands


def _most_tokens(selection: Selection, layout: BlockLayout) -> I64:
    """Tokens of each row's KV head that attends to most, int64 [R]."""
    edges = selection.begin.astype(np.int64) * layout.page_tokens
    if selection.token_mask is not None:
        kept = selection.token_mask.sum(axis=1, dtype=np.int64)
        edges = np.concatenate([[0], np.cumsum(kept)])[selection.begin]
    most: I64 = np.diff(edges).reshape(-1, layout.kv_heads).max(axis=1)
    return most
