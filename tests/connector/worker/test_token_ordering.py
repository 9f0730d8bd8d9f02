"""Which blocks of a step are ordered, by what, and what keeps its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.connector.worker.token_ordering import TokenOrdering
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout

LAYOUT = BlockLayout.unpadded(32, 16, 2, 16, torch.float32)
LAYERS = range(3)


def ordering(sink_tokens: int = 16, *, counts: bool = False) -> TokenOrdering:
    return TokenOrdering(LAYOUT, 3, (0, 2), sink_tokens, by_co_activation=counts)


def batch() -> RowBatch:
    """A prompt's step of 40 tokens that completes blocks 5 and 6, and a decoded token that
    completes block 9."""
    table = np.array([[4, 5, 6, 7], [8, 9, 0, 0]], np.int32)
    return RowBatch.build(
        np.array([0, 40, 41]),
        np.array([100, 64]),
        table,
        np.array([0, 0]),
        np.array([0, 1]),
        32,
    )


@pytest.mark.parametrize(
    ("sink_tokens", "kept"), [(0, [1, 0, 0]), (16, [1, 0, 0]), (17, [2, 0, 0]), (50, [2, 2, 0])]
)
def test_sinks_keep_their_pages(sink_tokens: int, kept: list[int]) -> None:
    order = ordering(sink_tokens).order(np.array([4, 5, 6]), np.array([0, 1, 2]), LAYERS)
    assert order.kept.tolist() == kept
    assert order.layers.tolist() == [1, 0, 1]


def test_a_block_that_is_stored_again_keeps_its_order() -> None:
    order = ordering().order(np.array([4, 5]), np.array([-1, 3]), LAYERS)
    assert order.kept.tolist() == [LAYOUT.groups, 0]


def test_co_activation_is_counted_for_blocks_of_prompts() -> None:
    random = torch.Generator().manual_seed(4)
    cache = torch.randn(10, LAYOUT.block_bytes // 4, generator=random)
    query = torch.randn(41, 4, 16, generator=random)
    counting = ordering(counts=True)
    counting.begin(np.array([9, 6, 5]))
    for layer in range(3):
        counting.observe(layer, query, cache, batch(), 0.25)
    index = np.array([1, 2, 1])
    found = counting.order(np.array([9, 6, 5]), index, LAYERS)
    assert sorted(found.features) == [(0, 1), (0, 2), (2, 1), (2, 2)]
    last = counting.order(np.array([9, 6, 5]), index, range(2, 3))
    assert last.layers.tolist() == [1]
    assert sorted(last.features) == [(0, 1), (0, 2)]
    assert torch.equal(last.features[0, 1], found.features[2, 1])
    assert {block for _, block in counting.order(np.array([6]), index[1:2], LAYERS).features} == {0}
    counting.begin(np.array([5]))
    assert not counting.order(np.array([5]), index[2:], LAYERS).features


def test_by_keys_nothing_is_counted() -> None:
    by_keys = ordering()
    by_keys.begin(np.array([5]))
    by_keys.observe(0, torch.zeros(41, 4, 16), torch.zeros(10, 2048), batch(), 0.25)
    assert not by_keys.order(np.array([5]), np.array([1]), LAYERS).features
