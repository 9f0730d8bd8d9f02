"""States of disjoint parts of the context, by whatever devices, merge to that of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.kernels.dense import AttentionKernels, CpuKernels, TritonKernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, BlockSource, PartialState, Rows

BLOCK, HEADS, GROUP, HEAD_SIZE = 16, 2, 2, 16
LAYOUT = BlockLayout.unpadded(BLOCK, BLOCK, HEADS, HEAD_SIZE, torch.float32)
CPU = torch.device("cpu")
KERNELS = CpuKernels(1)
MERGING: dict[str, AttentionKernels] = {"native": KERNELS, "triton": TritonKernels(CPU)}
"""Of a GPU merging is torch's own work, so it runs here as well."""

merging = pytest.mark.parametrize("merger", MERGING)


def attended(query: torch.Tensor, cache: torch.Tensor, blocks: list[list[int]]) -> PartialState:
    """State of decode rows over these blocks of each, in a cache of one block per position."""
    state = PartialState.empty(len(query), HEADS * GROUP, HEAD_SIZE, CPU)
    edges = np.cumsum([0, *map(len, blocks)])
    ids = np.array([i for row in blocks for i in row], dtype=np.int64)
    last = np.full(len(query), len(cache) * BLOCK - 1)
    rows = Rows.build(np.arange(len(query)), np.ones(len(query)), last, edges[:-1], edges[1:])
    source = BlockSource.of_cache(cache, ids, ids * BLOCK)
    KERNELS.attend(query, state, rows, source, LAYOUT, 0.25)
    return state


def empty(rows: int) -> PartialState:
    return PartialState.empty(rows, HEADS * GROUP, HEAD_SIZE, CPU)


@merging
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 4),
    owner=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_any_split_merges_to_the_whole(
    merger: str, seed: int, rows: int, owner: list[int], size: float
) -> None:
    """``owner[b]``: the device that holds block b; some hold none, or none of some rows."""
    torch.manual_seed(seed)
    query = torch.randn(rows, HEADS * GROUP, HEAD_SIZE) * size
    cache = torch.randn(len(owner), LAYOUT.block_bytes // 4)
    every = list(range(len(owner)))
    contexts = [every[row % len(every) :] for row in range(rows)]
    want, got = torch.empty_like(query), torch.empty_like(query)
    want_lse, got_lse = torch.empty(rows, HEADS * GROUP), torch.empty(rows, HEADS * GROUP)
    KERNELS.finish(attended(query, cache, contexts), want, want_lse)
    state = empty(rows)
    for device in range(5):
        part = [[b for b in blocks if owner[b] == device] for blocks in contexts]
        MERGING[merger].merge(state, attended(query, cache, part))
    KERNELS.finish(state, got, got_lse)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(got_lse, want_lse, rtol=2e-5, atol=2e-5)


@merging
def test_a_part_without_keys_changes_nothing(merger: str) -> None:
    torch.manual_seed(1)
    query, cache = torch.randn(2, HEADS * GROUP, HEAD_SIZE), torch.randn(3, LAYOUT.block_bytes // 4)
    state = attended(query, cache, [[0, 1], [2]])
    before = [x.clone() for x in (state.m, state.l, state.acc)]
    other = empty(2)
    MERGING[merger].merge(state, other)
    MERGING[merger].merge(other, state)
    for found in (state, other):
        for part, was in zip((found.m, found.l, found.acc), before, strict=True):
            assert torch.equal(part, was)


def test_states_of_other_queries_are_refused() -> None:
    with pytest.raises(ValueError, match="same queries"):
        KERNELS.merge(empty(2), empty(3))
