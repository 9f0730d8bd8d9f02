"""Sizes of rows that every layer of a step shares."""

from __future__ import annotations

import numpy as np
import torch

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries, page_budget
from vllm_ssdkv.sparse.sizes import ContextSizes, offsets

LAYOUT = BlockLayout.unpadded(32, 16, 2, 8, torch.float32)
BEGIN, END, WINDOW = (np.array(values, np.int32) for values in ([0, 3], [3, 3], [5, 40]))


def test_columns_of_rows() -> None:
    sizes = ContextSizes(LAYOUT, BEGIN, END, WINDOW)
    assert sizes.pages.tolist() == [6, 0]
    assert sizes.context_tokens.tolist() == [96, 0]
    assert sizes.first_page.tolist() == [0, 6, 6]
    assert sizes.first_token.tolist() == [0, 101, 141]
    assert sizes.all_pages == 6
    assert offsets(np.zeros(0, np.int64)).tolist() == [0]


def test_what_one_layer_worked_out_the_next_one_takes() -> None:
    first = ContextSummaries(LAYOUT, BEGIN, END, WINDOW)
    half = page_budget(Budget(share=0.5), first)
    assert half.tolist() == [2, 0]
    second = ContextSummaries(LAYOUT, BEGIN, END, WINDOW, known_sizes=first.sizes)
    assert page_budget(Budget(share=0.5), second) is half
    assert second.pages is first.pages
    assert page_budget(Budget(share=1.0), second).tolist() == [6, 0]
