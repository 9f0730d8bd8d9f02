"""Page mode's attention of one layer, as a worker's step has it. Knows no vLLM.

Whoever runs the model calls it: vLLM's attention backend, or a decoder without vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.exact import RowBatch, attend_exact
from vllm_ssdkv.kernels.dense import select_kernels
from vllm_ssdkv.kernels.operands.block_layout import PLAIN, Softmax

if TYPE_CHECKING:
    from vllm_ssdkv.connector.worker.page_mode import PageMode
    from vllm_ssdkv.connector.worker.paged_step import PagedStep


def rows_of_step(
    step: PagedStep,
    query_start: NDArray[np.int64],
    seq_lens: NDArray[np.int64],
    block_table: NDArray[np.int32],
    block_tokens: int,
) -> RowBatch:
    """Rows of a batch with their windows. Built once per step.

    Batch rows carry no request ids: the block that a row's first token is written to does.

    Args:
        step: Knows the rows by that block.
        query_start, seq_lens, block_table: As of :meth:`RowBatch.build`.
        block_tokens: Tokens per block.

    Raises:
        StepError: the batch is not the one that the step was planned for.
    """
    # Lists: of a few rows they are read faster than arrays are made.
    edges, first, blocks = query_start.tolist(), list[int](), list[int]()
    for row, length in enumerate(seq_lens.tolist()):
        first.append(length - (edges[row + 1] - edges[row]))
        blocks.append(block_table.item(row, first[row] // block_tokens))
    rows, starts = step.rows_of(blocks, first)
    return RowBatch.build(query_start, seq_lens, block_table, starts, rows, block_tokens)


def store_new(
    paged: PageMode,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Write new K and V [T, Hkv, D] into HBM, in page layout, at ``slot_mapping`` [T]; ``scales``:
    of K and of V, where blocks have numbers of 8 bits."""
    layout = paged.block_layout
    cache = kv_cache.view(kv_cache.shape[0], -1).view(layout.dtype)  # whatever vLLM calls it
    kernels = select_kernels(kv_cache.device)
    kernels.store_kv(key, value, cache, slot_mapping, layout, scales)


def attend_layer(
    paged: PageMode,
    layer_name: str,
    query: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    rows: RowBatch,
    scale: float,
    *,
    sliding_window: int | None = None,
    softmax: Softmax = PLAIN,
) -> None:
    """Attention of a layer over the window in HBM and the context in the store.

    Args:
        paged: Page mode of the rank, in a step.
        layer_name: As the layout of the rank names it.
        query: [T, Hq, D].
        value: V of the same tokens, [T, Hkv, D]; the cache has it by now.
        kv_cache: The layer's blocks in HBM, [num_blocks, ...].
        out: [T, Hq, D], written.
        rows: See :func:`rows_of_step`.
        scale: Of the logits.
        sliding_window, softmax: As of ``attend_exact``.

    Raises:
        RuntimeError: there is no step.
    """
    step = paged.step
    if step is None:
        raise RuntimeError("there is no step to attend for")
    cache = kv_cache.view(kv_cache.shape[0], -1).view(paged.block_layout.dtype)
    layer = step.layers[layer_name]
    if paged.ordering is not None and paged.ordering.by_co_activation:
        paged.ordering.observe(layer, query, cache, rows, scale)
    known = step.plans.get(id(rows))
    if known is None:
        if paged.device is not None:
            paged.device.withdraw()
        plan = step.plan(rows, paged.block_layout, paged.context_layout, query)
    else:
        plan = known[1]
    if plan is not None:
        plan.attend(layer, query, cache, out, scale, sliding_window, softmax)
    else:
        attend_exact(
            select_kernels(kv_cache.device),
            query,
            cache,
            out,
            rows,
            step.context(layer_name, rows, paged.context_layout),
            paged.block_layout,
            scale,
            step.clock,
            step.choosing(layer_name, query, value, rows, cache, scale),
            sliding_window,
            softmax,
        )
    if paged.layer_ended is not None:
        paged.layer_ended()
