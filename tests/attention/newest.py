"""V of single tokens, as vLLM hands it to attention beside the cache."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout


def values_at(
    cache: torch.Tensor, layout: BlockLayout, blocks: NDArray[np.int64], token: NDArray[np.int64]
) -> torch.Tensor:
    """V of one token of each block of a cache, [n, kv_heads, head_size]."""
    used = layout.block_bytes // layout.dtype.itemsize
    shape = layout.kv_heads, layout.groups, 2, layout.page_tokens, layout.head_size
    pages = cache[:, :used].view(len(cache), *shape)
    group, inside = np.divmod(token, layout.page_tokens)
    at = torch.from_numpy(blocks), torch.from_numpy(group), torch.from_numpy(inside)
    return pages[at[0], :, at[1], 1, at[2]]


def newest_values(cache: torch.Tensor, layout: BlockLayout, batch: RowBatch) -> torch.Tensor:
    """V of the rows' current tokens, one each."""
    blocks = batch.window_ids[np.asarray(batch.window.block_end) - 1]
    return values_at(cache, layout, blocks, batch.first_position % layout.block_tokens)
