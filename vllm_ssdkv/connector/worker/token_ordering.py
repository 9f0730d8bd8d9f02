"""Order of tokens in blocks on their way to slots: option ``sparse.token_order``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.co_activation import QUERIES, co_activation_rows
from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.operands.token_order import TokenOrder


class TokenOrdering:
    """Orders tokens by likeness in the layers that attend to contexts.

    Layers with a sliding window keep the order of positions, which their masks go by. Used by the
    thread of the forward pass.

    Attributes:
        by_co_activation: Whether :meth:`observe` has anything to count.
    """

    def __init__(
        self,
        layout: BlockLayout,
        layers: int,
        context_layers: Sequence[int],
        sink_tokens: int,
        *,
        by_co_activation: bool,
    ):
        """``layout``: of a block in HBM. Pages of the first ``sink_tokens`` tokens of a context
        stay together, at least one. ``by_co_activation``: alike are tokens that the step's last
        prompt queries attend to together, in place of tokens with alike K."""
        self._layout = layout
        self._layers = np.zeros(layers, np.uint8)
        self._layers[list(context_layers)] = 1
        self._sinks = max(1, -(-sink_tokens // layout.page_tokens))
        self.by_co_activation = by_co_activation
        self._wanted: NDArray[np.int64] = np.zeros(0, np.int64)
        self._rows: dict[int, dict[int, torch.Tensor]] = {}
        """Rows of likeness by layer and HBM block."""

    def begin(self, block_ids: NDArray[np.int64]) -> None:
        """A step begins that completes these HBM blocks, [n]."""
        self._wanted = block_ids
        self._rows.clear()

    def observe(
        self, layer: int, query: torch.Tensor, cache: torch.Tensor, rows: RowBatch, scale: float
    ) -> None:
        """Count co-activation in one layer; arguments as of ``attend_exact``. Its new KV is in HBM.

        Blocks that a single decoded token completes are not counted.
        """
        if not (self.by_co_activation and len(self._wanted) and self._layers[layer]):
            return
        seen = self._rows[layer] = {}
        begin, end = np.asarray(rows.window.block_begin), np.asarray(rows.window.block_end)
        for r in np.flatnonzero(rows.query_count > 1).tolist():
            ids = rows.window_ids[begin[r] : end[r]]
            positions = rows.window_position[begin[r] : end[r]]
            count = min(int(rows.query_count[r]), QUERIES)
            last = int(rows.query_begin[r] + rows.query_count[r])
            first = int(rows.first_position[r] + rows.query_count[r]) - count
            for at in np.flatnonzero(np.isin(ids, self._wanted)).tolist():
                seen[int(ids[at])] = co_activation_rows(
                    query[last - count : last],
                    cache[ids[at]],
                    self._layout,
                    int(positions[at]),
                    first,
                    scale,
                )

    def order(
        self, block_ids: NDArray[np.int64], index: NDArray[np.int64], layers: range
    ) -> TokenOrder:
        """Order of some layers of blocks, [n], by their place in their contexts, [n]; -1: one keeps
        its order. Layers that :meth:`observe` is done with may be asked for by any thread."""
        groups = self._layout.groups
        kept = np.clip(self._sinks - index * groups, 0, groups)
        kept[index < 0] = groups
        place = {block: i for i, block in enumerate(block_ids.tolist())}
        features = {
            (layer - layers.start, place[block]): rows
            for layer in layers
            for block, rows in self._rows.get(layer, {}).items()
            if block in place
        }
        ordered = self._layers[layers.start : layers.stop]
        return TokenOrder(ordered, kept.astype(np.int32), features)
