"""Error of sparse attention against exact attention, measured while tokens are decoded.

For benches. In some steps the context of every row that chooses is read whole, and its attention is
computed once more over all of it. Nothing that the engine computes changes; what is read counts as
any pages that are fetched, and stays in the page cache.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, PartialState
from vllm_ssdkv.sparse.protocol import Selection
from vllm_ssdkv.store.read.selected_context import SelectedContexts


@dataclass(slots=True)
class LayerDeviation:
    """Sums over the compared outputs of one layer.

    Masses are shares of the exact softmax, the mean over a KV head's query heads.

    Attributes:
        outputs: Compared outputs, one per row and query head.
        relative_l2: Sum of ``|sparse - exact| / |exact|``.
        worst: The largest of these.
        lists: Compared lists of pages, one per row and KV head.
        window: Sum of the masses of the windows.
        chosen: Sum of the masses of what was chosen.
        best: Sum of the largest masses that as many pages have (tokens, if those were chosen).
        estimated: Sum of the masses of window and chosen pages by the selector's estimate; NaN
            where it has none.
    """

    outputs: int = 0
    relative_l2: float = 0.0
    worst: float = 0.0
    lists: int = 0
    window: float = 0.0
    chosen: float = 0.0
    best: float = 0.0
    estimated: float = 0.0

    def figures(self) -> dict[str, float | None]:
        """Means, by name. ``recall``: what was chosen, as a share of the best choice's mass."""
        estimated = self.estimated / self.lists
        return {
            "outputs": self.outputs,
            "relative_l2": self.relative_l2 / self.outputs,
            "worst_relative_l2": self.worst,
            "mass": (self.window + self.chosen) / self.lists,
            "estimated_mass": None if math.isnan(estimated) else estimated,
            "recall": self.chosen / self.best if self.best else 1.0,
        }


@dataclass(frozen=True, slots=True)
class Compared:
    """R rows of a layer that chose.

    Attributes:
        contexts: Of the step.
        alive: The rows' positions in ``contexts.rows``, [R].
        layout: Of a slot's blocks.
        query: [R, Hq, D] on the CPU.
        scale: Of the logits.
        selection: What they chose.
    """

    contexts: SelectedContexts
    alive: NDArray[np.int64]
    layout: BlockLayout
    query: torch.Tensor
    scale: float
    selection: Selection


class SparseDeviation:
    """Compares every ``every``-th step. Used by the thread of the forward pass."""

    def __init__(self, every: int):
        self._every = every
        self._steps = 0
        self._layers: dict[int, LayerDeviation] = {}

    def of_step(self) -> SparseDeviation | None:
        """Itself in steps that are compared. Call it once for each step in which rows choose."""
        self._steps += 1
        return self if self._steps % self._every == 0 else None

    def take(self) -> dict[int, dict[str, float | None]]:
        """:meth:`LayerDeviation.figures` by layer since the last call."""
        taken, self._layers = self._layers, {}
        return {layer: found.figures() for layer, found in sorted(taken.items())}

    def compare(
        self, layer: int, rows: Compared, window: PartialState, state: PartialState
    ) -> None:
        """Read the rows' contexts and compare; blocks until they have arrived.

        A context that cannot be read whole poisons its row, as a chosen page does.

        Args:
            layer: From 0.
            rows: Which, and what they chose.
            window: Their states before pages were folded in.
            state: And after.
        """
        contexts, layout = rows.contexts, rows.layout
        for row, position in enumerate(rows.alive.tolist()):
            blocks = np.arange(contexts.begin[position], contexts.end[position], dtype=np.int64)
            pages = _read(contexts, layer, layout, blocks)
            if int(contexts.rows[position]) not in contexts.poisoned:
                found = self._layers.setdefault(layer, LayerDeviation())
                _add(found, rows, row, pages, window, state)


def _add(
    found: LayerDeviation,
    rows: Compared,
    row: int,
    pages: torch.Tensor,
    window: PartialState,
    state: PartialState,
) -> None:
    """Compare one row, whose context is ``pages``, as :func:`_read` has them."""
    heads, size = rows.layout.kv_heads, rows.layout.head_size
    keys, values = pages[:, :, 0].flatten(1, 2), pages[:, :, 1].flatten(1, 2)
    logits = rows.query[row].float().view(heads, -1, size) @ keys.mT * rows.scale
    seen = (window.m[row] + torch.log(window.l[row])).view(heads, -1, 1)
    lse = torch.logaddexp(seen, logits.logsumexp(2, keepdim=True))
    weights, held = torch.exp(logits - lse), torch.exp(seen - lse)
    beside = (window.acc[row] / window.l[row, :, None]).view(heads, -1, size)
    exact = (weights @ values + held * beside).flatten(0, 1)
    off = (state.acc[row] / state.l[row, :, None] - exact).norm(dim=1) / exact.norm(dim=1)
    chosen, best = _masses(weights.mean(1), rows.selection, row * heads, rows.layout.page_tokens)
    found.outputs += len(off)
    found.relative_l2 += float(off.sum())
    found.worst = max(found.worst, float(off.max()))
    found.lists += heads
    found.window += float(held.mean(1).sum())
    found.chosen += chosen
    found.best += best
    found.estimated += float(rows.selection.mass[row].sum())


def _masses(
    weights: torch.Tensor, selection: Selection, first: int, page_tokens: int
) -> tuple[float, float]:
    """Mass of what lists ``first ..`` chose, and of the best choice of as much, over all heads.

    ``weights`` [kv_heads, tokens] are those of the context's tokens.
    """
    chosen = best = 0.0
    for head, mine in enumerate(weights.view(len(weights), -1, page_tokens)):
        part = slice(selection.begin[first + head], selection.begin[first + head + 1])
        taken = mine[torch.from_numpy(selection.pages[part].astype(np.int64))]
        units, count = mine.sum(1), len(taken)
        if selection.token_mask is not None:
            mask = torch.from_numpy(selection.token_mask[part])
            taken, units, count = taken * mask, mine.flatten(), int(mask.sum())
        chosen += float(taken.sum())
        best += float(units.topk(count).values.sum())
    return chosen, best


def _read(
    contexts: SelectedContexts, layer: int, layout: BlockLayout, blocks: NDArray[np.int64]
) -> torch.Tensor:
    """K and V of whole blocks, float32 [kv_heads, pages, 2, page_tokens, head_size]; zeros where
    they did not arrive."""
    heads, groups = layout.kv_heads, layout.groups
    each = np.repeat(blocks, heads * groups)
    numbers = np.tile(np.arange(heads * groups, dtype=np.int64), len(blocks))
    shape = (len(each), 2, layout.page_tokens, layout.head_size)
    pages = torch.zeros(shape, dtype=layout.dtype)
    nbytes = layout.page_payload_bytes
    for first in range(0, len(each), max(1, contexts.room)):
        part = slice(first, first + max(1, contexts.room))
        fetch = contexts.fetch(contexts.pages(layer, each[part], numbers[part]))
        try:
            for i in np.flatnonzero(contexts.complete(fetch, each[part])).tolist():
                place = pages.data_ptr() + (first + i) * nbytes
                ctypes.memmove(place, int(fetch.address[i]), nbytes)
        finally:
            contexts.release(fetch)
    whole = pages.view(len(blocks), heads, groups, *shape[1:]).transpose(0, 1)
    return whole.reshape(heads, -1, *shape[1:]).float()
