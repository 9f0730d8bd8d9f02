"""Likeness of a block's tokens by the queries that attend to them together.

Counted from the block's own last prompt queries: what they need together later queries mostly need
together, too. Where nothing was counted, tokens are alike by their K.
"""

from __future__ import annotations

from typing import Final

import torch

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.operands.token_order import ROW_STEP

QUERIES: Final = 2 * ROW_STEP
"""Last queries of a prompt's step that are counted; a whole number of row steps."""


def co_activation_rows(
    query: torch.Tensor,
    block: torch.Tensor,
    layout: BlockLayout,
    position: int,
    first_query: int,
    scale: float,
) -> torch.Tensor:
    """Rows by which tokens are alike that the same queries attend to, float32 [kv_heads,
    block_tokens, QUERIES], of length 1, or 0 where no query attends to a token.

    The product of two tokens' rows is the share of attention that they get together.

    Args:
        query: The last queries of a row, [at most QUERIES, q_heads, head_size].
        block: One layer's part of a block in HBM, flat, laid out by ``layout``.
        layout: Of the block.
        position: Of the block's first token in the request.
        first_query: Position of the first query.
        scale: Of the logits.
    """
    heads, tokens, size = layout.kv_heads, layout.block_tokens, layout.head_size
    count = len(query)
    pages = block.view(heads, layout.groups, 2, layout.page_tokens, size)
    key = pages[:, :, 0].reshape(heads, 1, tokens, size).float()
    grouped = query.float().view(count, heads, -1, size).permute(1, 2, 0, 3)
    logits = grouped @ key.transpose(2, 3) * scale
    steps = torch.arange(tokens, device=query.device)
    asked = torch.arange(count, device=query.device) + (first_query - position)
    unseen = steps[None, :] > asked[:, None]
    weights = logits.masked_fill(unseen, -torch.inf).softmax(dim=3).nan_to_num(0.0)
    rows = torch.zeros(heads, tokens, QUERIES, device=query.device)
    rows[:, :, :count] = weights.mean(dim=1).sqrt().transpose(1, 2)
    return torch.nn.functional.normalize(rows, dim=2, eps=1e-12)
