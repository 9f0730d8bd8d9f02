"""One step of page mode on one rank: which rows there are and where their context comes from.

Built when the scheduler's plan arrives, before the forward pass, so that the first reads are under
way while the first layer computes. The attention backend uses it layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vllm_ssdkv.attention.blocks import BlockLayout
from vllm_ssdkv.connector.messages import Row
from vllm_ssdkv.connector.model import KVLayout
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
        self, store: TieredStore, layout: KVLayout, rows: Sequence[Row], poisoned: set[str]
    ):
        """``poisoned`` are requests that wait to be computed again: they get no context."""
        self._rows = tuple(rows)
        self._by_block = {row.write_block: i for i, row in enumerate(self._rows)}
        self._layers = {name: i for i, name in enumerate(layout.layer_names)}
        self._pages = layout.geometry.kv_pages
        none = np.zeros(0, dtype=np.int64)
        contexts = []
        self._hopeless: set[int] = set()
        for i, row in enumerate(self._rows):
            context = store.context(row.request_id, row.hbm_start)
            if row.request_id in poisoned or context is None:
                self._hopeless.add(i)
                context = none
            contexts.append(context)
        self._stream = store.stream(contexts)

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

    def poisoned_rows(self) -> list[Row]:
        """Rows whose output must be thrown away."""
        return [self._rows[i] for i in sorted(self._hopeless | self._stream.poisoned)]

    @property
    def bad_slots(self) -> list[int]:
        """Slots with wrong or unreadable bytes."""
        return self._stream.bad

    @property
    def pages_from_dram(self) -> int:
        """Context pages that were in DRAM, over all layers and heads."""
        return self._stream.blocks_in_dram * self._pages

    @property
    def pages_from_ssd(self) -> int:
        """Context pages that were read from devices, over all layers and heads."""
        return self._stream.blocks_on_ssd * self._pages

    def close(self) -> None:
        """End of the step."""
        self._stream.close()
