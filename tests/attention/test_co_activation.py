"""Rows by which tokens are alike that the same queries attend to."""

from __future__ import annotations

import torch

from vllm_ssdkv.attention.co_activation import QUERIES, co_activation_rows
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.profiling.dense_oracle import write_block

LAYOUT = BlockLayout.unpadded(32, 16, 2, 16, torch.float32)


def _block(key: torch.Tensor) -> torch.Tensor:
    block = torch.empty(LAYOUT.block_bytes, dtype=torch.uint8)
    write_block(LAYOUT, block, key, key)
    return block.view(torch.float32)


def test_their_product_is_the_share_of_attention_that_both_get() -> None:
    """By the definition, per query: softmax over the block, mean of the group, normed by token."""
    random = torch.Generator().manual_seed(1)
    key = torch.randn(32, 2, 16, generator=random)
    query = torch.randn(7, 6, 16, generator=random)
    rows = co_activation_rows(query, _block(key), LAYOUT, 64, 200, 0.25)
    assert rows.shape == (2, 32, QUERIES)
    for head in range(2):
        logits = query[:, 3 * head : 3 * head + 3] @ key[:, head].T * 0.25
        weight = logits.softmax(dim=2).mean(dim=1)
        together = (weight.T[:, None] * weight.T[None]).sqrt().sum(dim=2)
        own = together.diagonal().sqrt()
        torch.testing.assert_close(rows[head] @ rows[head].T, together / own[:, None] / own)


def test_queries_see_no_token_behind_them() -> None:
    """Those of the block itself: the first sees one token, the last one all; later tokens that
    nobody sees have no row."""
    random = torch.Generator().manual_seed(2)
    key = torch.randn(32, 2, 16, generator=random)
    query = torch.randn(4, 2, 16, generator=random)
    rows = co_activation_rows(query, _block(key), LAYOUT, 64, 64, 0.25)
    assert torch.equal(rows[:, 4:], torch.zeros(2, 28, QUERIES))
    torch.testing.assert_close(rows[:, :4].norm(dim=2), torch.ones(2, 4))
    assert torch.equal(rows[:, 3, :3], torch.zeros(2, 3))
