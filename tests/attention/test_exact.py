"""Values that the layers of a step share."""

from __future__ import annotations

import numpy as np

from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.store.read.context_stream import Piece


def test_rows_over_the_same_blocks_are_made_once() -> None:
    batch = RowBatch.build(
        np.arange(3),
        np.array([70, 41]),
        np.zeros((2, 5), np.int32),
        np.array([4, 2]),
        np.array([1, 0]),  # the stream has them the other way round
        16,
    )
    index = np.array([0, 1, 0, 1, 2, 3])
    begin, end = np.array([0, 2], np.int32), np.array([2, 6], np.int32)
    rows, position = batch.over(Piece(np.zeros(6, np.uint64), index, begin, end), 16)
    assert np.asarray(rows.block_begin).tolist() == [2, 0]
    assert np.asarray(rows.block_end).tolist() == [6, 2]
    assert position.tolist() == [0, 16, 0, 16, 32, 48]
    again = batch.over(Piece(np.ones(6, np.uint64), index, begin, end), 16)
    assert again[0] is rows
    assert again[1] is position
    # A row that was poisoned in between has no blocks any more.
    fewer = np.array([2, 2], np.int32)
    rows, _ = batch.over(Piece(np.zeros(6, np.uint64), index, begin, fewer), 16)
    assert np.asarray(rows.block_end).tolist() == [2, 2]


def test_two_threads_have_rows_of_their_own() -> None:
    """A device attends to a part of what the step attends to, by turns in each layer."""
    batch = RowBatch.build(
        np.arange(2), np.array([70]), np.zeros((1, 5), np.int32), np.array([4]), np.array([0]), 16
    )
    base, index = np.zeros(2, np.uint64), np.arange(2)
    edges = [np.array([edge], np.int32) for edge in (0, 2)]
    others = [np.array([edge], np.int32) for edge in (0, 1)]
    mine = batch.over(Piece(base, index, *edges), 16)
    theirs = batch.over(Piece(base[:1], index[:1], *others), 16, device=True)
    assert batch.over(Piece(base, index, *edges), 16)[0] is mine[0]
    assert batch.over(Piece(base[:1], index[:1], *others), 16, device=True)[0] is theirs[0]
    assert np.asarray(theirs[0].block_end).tolist() == [1]


def test_tokens_are_where_their_blocks_are() -> None:
    """Rows with one query and several, whose windows begin at different blocks."""
    batch = RowBatch.build(
        np.array([0, 1, 21]),
        np.array([70, 41]),
        np.array([[0, 0, 0, 9, 5], [0, 7, 3, 0, 0]], np.int32),
        np.array([3, 1]),
        np.arange(2),
        16,
    )
    long = [7 * 16 + 16 - 11 + i for i in range(11)] + [3 * 16 + i for i in range(9)]
    assert batch.hbm_slots(16).tolist() == [5 * 16 + 69 - 64, *long]
