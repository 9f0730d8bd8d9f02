"""Values that the layers of a step share."""

from __future__ import annotations

import numpy as np

from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.store.read.context_stream import Piece


def test_rows_over_the_same_blocks_are_made_once() -> None:
    batch = RowBatch.build(
        np.arange(3),
        np.array([70, 41]),
        np.zeros((2, 5), np.int64),
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
