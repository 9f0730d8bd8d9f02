"""One step of page mode on one rank: which rows there are and where their context comes from.

Built when the scheduler's plan arrives, before the forward pass, so that the first reads are under
way while the first layer computes. The attention backend uses it layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from vllm_ssdkv.attention.blocks import BlockLayout, PartialState
from vllm_ssdkv.attention.clock import AttentionClock
from vllm_ssdkv.attention.decode import SparseDecode
from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.attention.page_kernels import select_page_kernels
from vllm_ssdkv.connector.choosing import Choice
from vllm_ssdkv.connector.messages import Row
from vllm_ssdkv.connector.model import KVLayout
from vllm_ssdkv.metrics import Counters
from vllm_ssdkv.store.stream import Piece
from vllm_ssdkv.store.tiers import TieredStore


def block_layout(layout: KVLayout, page_tokens: int) -> BlockLayout:
    """Layout of a block in HBM: pages back to back, ordered head, group."""
    return BlockLayout.unpadded(
        layout.block_tokens, page_tokens, layout.kv_heads, layout.head_size, layout.dtype
    )


class PagedStep:
    """Rows of one step. Used by the thread that runs the forward pass only."""

    def __init__(
        self,
        store: TieredStore,
        layout: KVLayout,
        rows: Sequence[Row],
        poisoned: set[str],
        choice: Choice | None = None,
    ):
        """``poisoned`` are requests that wait to be computed again: they get no context. Without a
        ``choice`` all rows attend to everything. Blocks while summaries are read, if any are."""
        self._rows = tuple(rows)
        self._by_block = {row.write_block: i for i, row in enumerate(self._rows)}
        self._layers = {name: i for i, name in enumerate(layout.layer_names)}
        self.clock = AttentionClock()
        none = np.zeros(0, dtype=np.int64)
        contexts = []
        self._hopeless: set[int] = set()
        for i, row in enumerate(self._rows):
            context = store.context(row.request_id, row.hbm_start)
            if row.request_id in poisoned or context is None:
                self._hopeless.add(i)
                context = none
            contexts.append(context)
        self._decode: SparseDecode | None = None
        self.left_out = 0
        """Rows that would choose, if DRAM had room for their summaries."""
        choosing = [] if choice is None else choice.rows(self._rows, contexts)
        if choice is not None and choosing:
            chosen = store.choose(contexts, choosing)
            self.left_out = len(chosen.left_out)
            choosing = chosen.rows.tolist()
            slots = block_layout(layout, choice.page_tokens).with_page_stride(
                layout.geometry.page_bytes
            )
            self._decode = SparseDecode(choice.selector, chosen, slots, choice.dense_layers)
        dense_layers = 0 if choice is None else choice.dense_layers
        self._stream = store.stream(contexts, choosing, dense_layers)

    def row_of(self, write_block: int) -> int:
        """Index of the row whose first query token is written to this HBM block.

        Raises:
            KeyError: the scheduler's plan has no such row.
        """
        return self._by_block[write_block]

    def hbm_start(self, row: int) -> int:
        """Index of the row's first block that is read from HBM."""
        return self._rows[row].hbm_start

    def pieces(self, layer_name: str) -> Iterator[Piece]:
        """The layer's context blocks, piece by piece, rows numbered as in :meth:`row_of`."""
        return self._stream.pieces(self._layers[layer_name])

    def choosing(
        self, layer_name: str, query: torch.Tensor, batch: RowBatch, scale: float
    ) -> Callable[[PartialState], None] | None:
        """Folds the layer's chosen pages into a state that has seen the window; None: nobody
        chooses. Query, batch and scale as in ``attend_exact``."""
        decode, layer = self._decode, self._layers[layer_name]
        if decode is None:
            return None

        def fold(state: PartialState) -> None:
            kernels = select_page_kernels(query.device)
            decode.attend(kernels, self.clock, layer, query, state, batch, scale)

        return fold

    def poisoned_rows(self) -> list[Row]:
        """Rows whose output must be thrown away."""
        poisoned = self._hopeless | self._stream.poisoned
        if self._decode is not None:
            poisoned |= self._decode.contexts.poisoned
        return [self._rows[i] for i in sorted(poisoned)]

    @property
    def bad_slots(self) -> list[int]:
        """Slots with wrong or unreadable bytes."""
        chosen = [] if self._decode is None else self._decode.contexts.bad
        return [*self._stream.bad, *chosen]

    def count(self, counters: Counters) -> None:
        """Add what the step did to the worker's counters."""
        counters.add("context_pages_streamed", self._stream.pages_in_dram, tier="dram")
        counters.add("context_pages_streamed", self._stream.pages_on_ssd, tier="ssd")
        for part, seconds in self.clock.seconds.items():
            counters.add("attention_seconds", seconds, part=part)
        counters.add("sparse_rows_exact", self.left_out)
        if self._decode is None:
            return
        counts, fetched = self._decode.counts, self._decode.contexts.fetched
        counters.add("sparse_selections", counts.lists)
        counters.add("sparse_pages_selected", counts.selected)
        counters.add("sparse_pages_in_context", counts.context)
        counters.add("sparse_missing_mass", counts.missing)
        counters.add("sparse_pages_fetched", fetched.frame, tier="dram")
        counters.add("sparse_pages_fetched", fetched.cache, tier="page_cache")
        counters.add("sparse_pages_fetched", fetched.ssd, tier="ssd")

    def close(self) -> None:
        """End of the step."""
        self._stream.close()
        if self._decode is not None:
            self._decode.contexts.close()
