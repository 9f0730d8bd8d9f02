"""Sparse decode over a real store: what it computes, wherever the pages are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.store.conftest import MakeStore, StoreRig, array, key_of, make_store
from vllm_ssdkv.attention.blocks import BlockLayout, BlockSource, PartialState
from vllm_ssdkv.attention.clock import AttentionClock
from vllm_ssdkv.attention.decode import SparseDecode
from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.attention.kernels import select_kernels
from vllm_ssdkv.attention.page_kernels import select_page_kernels
from vllm_ssdkv.attention.reference import dense_attention
from vllm_ssdkv.connector.blocks import PagedPort
from vllm_ssdkv.selection.bounds import BoundsSelector
from vllm_ssdkv.selection.protocol import Budget
from vllm_ssdkv.selection.scores import ScoringKernels
from vllm_ssdkv.store.chosen import ChosenContexts
from vllm_ssdkv.store.layout import SlotGeometry

__all__ = ["make_store"]

CPU = torch.device("cpu")
LAYERS, HEADS, QUERY_HEADS, HEAD_SIZE, PAGE, BLOCK = 2, 2, 4, 32, 16, 32
LAYOUT = BlockLayout.unpadded(BLOCK, PAGE, HEADS, HEAD_SIZE, torch.float32)
GEOMETRY = SlotGeometry("paged", LAYERS, HEADS, BLOCK // PAGE, 4096, summary_pages=1)
SCALE = HEAD_SIZE**-0.5
LENGTHS = (230, 75, 141)
"""Tokens of each row, the current one included."""
WINDOW = 40


@dataclass
class Rows:
    """Requests with all their KV, and which of it is context."""

    rig: StoreRig
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    """Of each row, [layers, tokens, heads, head_size]."""
    caches: list[torch.Tensor]
    blocks: list[list[int]]
    """HBM blocks of each row."""

    def contexts(self) -> list[NDArray[np.int64]]:
        """Slots: those of the blocks that lie wholly before the window."""
        return [
            array(ids[: (length - WINDOW) // BLOCK])
            for ids, length in zip(self.blocks, LENGTHS, strict=True)
        ]

    def attend(
        self, chosen: ChosenContexts, budget: Budget, layer: int, queries: torch.Tensor
    ) -> tuple[torch.Tensor, SparseDecode]:
        """Output of a layer for the rows' last tokens."""
        kernels = select_kernels(CPU)
        width = max(map(len, self.blocks))
        table = np.array([[*ids, *[0] * (width - len(ids))] for ids in self.blocks])
        batch = RowBatch.build(
            np.arange(len(LENGTHS) + 1),
            np.array(LENGTHS),
            table,
            np.array([len(slots) for slots in self.contexts()]),
            np.arange(len(LENGTHS)),
            BLOCK,
        )
        state = PartialState.empty(len(LENGTHS), QUERY_HEADS, HEAD_SIZE, CPU)
        source = BlockSource.of_cache(self.caches[layer], batch.window_ids, batch.window_position)
        kernels.attend(queries, state, batch.window, source, layout=LAYOUT, scale=SCALE)
        selector = BoundsSelector(budget, PAGE, ScoringKernels())
        slots = LAYOUT.with_page_stride(GEOMETRY.page_bytes)
        decode = SparseDecode(selector, chosen, slots, 0)
        clock = AttentionClock()
        clock.start()
        page_kernels = select_page_kernels(CPU)
        decode.attend(page_kernels, clock, layer, queries, state, batch, SCALE)
        out = torch.empty_like(state.acc)
        kernels.finish(state, out)
        return out, decode


@pytest.fixture
def make_rows(make_store: MakeStore) -> Callable[..., Rows]:
    """Rows whose blocks are all stored, and in DRAM no more."""

    def make(places: int = 64) -> Rows:
        rig = make_store(GEOMETRY, slots=24, frames=24, places=places)
        torch.manual_seed(1)
        shape = (LAYERS, max(LENGTHS), HEADS, HEAD_SIZE)
        keys = [torch.randn(shape) * 2 for _ in LENGTHS]
        values = [torch.randn(shape) for _ in LENGTHS]
        caches = [torch.zeros(24, LAYOUT.block_bytes // 4) for _ in range(LAYERS)]
        blocks: list[list[int]] = []
        for row, length in enumerate(LENGTHS):
            first = sum(map(len, blocks))
            blocks.append(list(range(first, first + -(-length // BLOCK))))
            token = np.arange(length)
            where = np.array(blocks[row])[token // BLOCK] * BLOCK + token % BLOCK
            for layer, cache in enumerate(caches):
                select_kernels(CPU).store_kv(
                    keys[row][layer, :length], values[row][layer, :length], cache, where, LAYOUT
                )
        rows = Rows(rig, keys, values, caches, blocks)
        store_contexts(rows)
        return rows

    return make


def store_contexts(rows: Rows) -> None:
    rig = rows.rig
    port = PagedPort(select_kernels(CPU), rows.caches, LAYOUT, GEOMETRY, rig.store.frames)
    for row, slots in enumerate(rows.contexts()):
        rig.store.extend_context(str(row), 0, slots)
        frames = rig.store.hold(slots, wait=False)
        assert len(frames) == len(slots)
        port.save(slots, frames)
        keys = [key_of(slot) for slot in slots.tolist()]
        rig.store.commit(slots, array([1] * len(slots)), keys)
    assert rig.store.drain(30)


def away(rows: Rows) -> None:
    rows.rig.store.frames.forget(np.concatenate(rows.contexts()))


def dense(rows: Rows, layer: int, queries: torch.Tensor) -> torch.Tensor:
    parts = [
        dense_attention(
            queries[row : row + 1],
            rows.keys[row][layer, :length],
            rows.values[row][layer, :length],
            scale=SCALE,
            first_position=length - 1,
        )[0]
        for row, length in enumerate(LENGTHS)
    ]
    return torch.cat(parts)


def queries_of(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(len(LENGTHS), QUERY_HEADS, HEAD_SIZE)


def choose(rows: Rows, which: Sequence[int] = (0, 1, 2)) -> ChosenContexts:
    return rows.rig.store.choose(rows.contexts(), which)


@pytest.mark.parametrize("places", [16, 64])
def test_with_all_of_the_budget_it_is_dense_attention(
    make_rows: Callable[..., Rows], places: int
) -> None:
    """With 16 places the pages of a layer come in two turns."""
    rows = make_rows(places)
    away(rows)
    chosen = choose(rows)
    for layer in range(LAYERS):
        queries = queries_of(layer)
        out, decode = rows.attend(chosen, Budget(share=1.0), layer, queries)
        torch.testing.assert_close(out.double(), dense(rows, layer, queries), atol=1e-5, rtol=1e-5)
        assert decode.counts.selected == decode.counts.context
        assert decode.counts.missing == 0
    chosen.close()


def test_where_pages_are_changes_no_bit(make_rows: Callable[..., Rows]) -> None:
    rows = make_rows()
    outs: list[list[torch.Tensor]] = []
    for turn in range(3):  # from frames, from devices, from the page cache
        if turn == 1:
            away(rows)
        chosen = choose(rows)
        made = [
            rows.attend(chosen, Budget(share=0.4), layer, queries_of(layer))
            for layer in range(LAYERS)
        ]
        outs.append([out for out, _ in made])
        fetched = chosen.fetched
        assert [fetched.frame > 0, fetched.ssd > 0, fetched.cache > 0].index(True) == (0, 1, 2)[
            turn
        ]
        for _, decode in made:
            assert 0 < decode.counts.selected < 0.4 * decode.counts.context
            assert decode.counts.missing > 0
        chosen.close()
    for layer in range(LAYERS):
        assert torch.equal(outs[0][layer], outs[1][layer])
        assert torch.equal(outs[0][layer], outs[2][layer])
        assert not torch.allclose(outs[0][layer].double(), dense(rows, layer, queries_of(layer)))


def test_a_row_that_lacks_a_page_is_lost_and_no_other(make_rows: Callable[..., Rows]) -> None:
    rows = make_rows()
    away(rows)
    choose(rows).close()  # brings the summaries
    good = choose(rows)
    wanted, _ = rows.attend(good, Budget(share=1.0), 0, queries_of(0))
    good.close()
    rows.rig.store._pages.forget(np.concatenate(rows.contexts()))  # type: ignore[union-attr]
    rows.rig.flip(int(rows.contexts()[2][0]), GEOMETRY.layer_offset(0) + 5)
    chosen = choose(rows)
    for layer in range(LAYERS):
        out, decode = rows.attend(chosen, Budget(share=1.0), layer, queries_of(layer))
        if layer == 0:
            assert torch.equal(out[:2], wanted[:2])
        # From now on the row does not take part.
        assert decode.counts.lists == (6 if layer == 0 else 4)
        assert chosen.poisoned == {2}
    assert set(chosen.bad) == {int(rows.contexts()[2][0])}
    chosen.close()


def test_rows_that_do_not_choose_keep_their_state(make_rows: Callable[..., Rows]) -> None:
    rows = make_rows()
    queries = queries_of(3)
    nobody, some = choose(rows, []), choose(rows, [0, 2])
    window, _ = rows.attend(nobody, Budget(share=1.0), 1, queries)
    out, decode = rows.attend(some, Budget(share=1.0), 1, queries)
    assert torch.equal(out[1], window[1])
    wanted = dense(rows, 1, queries)
    torch.testing.assert_close(out[[0, 2]].double(), wanted[[0, 2]], atol=1e-5, rtol=1e-5)
    assert decode.counts.lists == 4
    nobody.close()
    some.close()
