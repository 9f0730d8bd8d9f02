"""Block layouts, block lists, rows and states: what they compute and what they refuse."""

import numpy as np
import pytest
import torch

from vllm_ssdkv.kernels.dense import select_kernels
from vllm_ssdkv.kernels.operands.block_layout import (
    BlockLayout,
    BlockSource,
    PartialState,
    Rows,
    block_stride,
    head_size_problem,
)

CPU = torch.device("cpu")


def test_sizes_of_a_layout() -> None:
    layout = BlockLayout.unpadded(64, 16, 8, 128, torch.bfloat16)
    assert layout.page_payload_bytes == layout.page_stride_bytes == 8192
    assert layout.groups == 4
    assert layout.block_bytes == 8 * 4 * 8192
    wider = layout.with_page_stride(12288)
    assert (wider.page_stride, wider.block_bytes) == (6144, 8 * 4 * 12288)
    assert wider.page_payload_bytes == 8192
    assert wider.with_page_stride(8192) == layout


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1, 1, 64, torch.float32), "at least 1"),
        ((6, 4, 1, 1, 64, torch.float32), "not a multiple"),
        ((4, 4, 1, 1, 64, torch.float64), "KV dtype"),
        ((4, 4, 1, 8, 128, torch.float32), "at least the payload"),
        ((4, 4, 1, 8, 258, torch.float32), "multiple of the element"),
    ],
)
def test_impossible_layouts_are_refused(
    sizes: tuple[int, int, int, int, int, torch.dtype], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BlockLayout(*sizes)


def test_blocks_of_a_cache_are_element_offsets() -> None:
    # Two layers' blocks interleaved in one tensor: blocks of one layer lie twice as far apart.
    cache = torch.zeros(4, 2, 10)[:, 1]
    assert block_stride(cache) == 20
    source = BlockSource.of_cache(cache, np.array([3, 0]), np.array([0, 8]))
    assert np.asarray(source.base).tolist() == [60, 0]
    moved = source.to(CPU)
    assert isinstance(moved.base, torch.Tensor)
    assert moved.base.tolist() == [60, 0]
    assert moved.tensor is cache


def test_blocks_with_holes_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous blocks"):
        block_stride(torch.zeros(4, 6, 10)[:, ::2])
    with pytest.raises(ValueError, match="contiguous blocks"):
        block_stride(torch.zeros(40))
    with pytest.raises(ValueError, match="must both be"):
        BlockSource(None, np.zeros(2, np.uint64), np.zeros(3, np.int64))


def test_rows_know_their_bounds() -> None:
    rows = Rows.build([0, 4], [4, 1], [10, 7], [0, 2], [2, 7])
    assert (len(rows), rows.max_queries, rows.max_blocks) == (2, 4, 5)
    moved = rows.to(CPU)
    assert isinstance(moved.first_position, torch.Tensor)
    assert moved.first_position.dtype == torch.int64
    assert (moved.max_queries, moved.max_blocks) == (4, 5)
    nothing = Rows.build([], [], [], [], [])
    assert (len(nothing), nothing.max_queries, nothing.max_blocks) == (0, 0, 0)


@pytest.mark.parametrize(
    "columns",
    [
        ([0], [1], [0], [0], [1, 2]),
        ([0], [-1], [0], [0], [1]),
        ([-1], [1], [0], [0], [1]),
        ([0], [1], [0], [2], [1]),
        ([0], [1], [0], [-1], [1]),
        ([[0]], [[1]], [[0]], [[0]], [[1]]),
    ],
)
def test_impossible_rows_are_refused(columns: tuple[list[int], ...]) -> None:
    with pytest.raises(ValueError, match=r"rows|row's|list"):
        Rows.build(*columns)


def test_a_state_must_fit_its_query() -> None:
    state = PartialState.empty(2, 3, 4, CPU)
    assert bool(torch.isneginf(state.m).all())
    assert not state.l.any()
    assert not state.acc.any()
    state.check((2, 3, 4), CPU)
    for shape in ((2, 3, 5), (2, 4, 4), (1, 3, 4)):
        with pytest.raises(ValueError, match="must be contiguous float32"):
            state.check(shape, CPU)
    with pytest.raises(ValueError, match="m must be"):
        PartialState(state.m.double(), state.l, state.acc).check((2, 3, 4), CPU)


@pytest.mark.parametrize(
    ("head_size", "served"),
    [(8, True), (80, True), (264, True), (512, True), (520, False), (20, False)],
)
def test_head_sizes_are_those_of_the_kernels(head_size: int, served: bool) -> None:
    """What a start refuses, native kernels refuse, and nothing else."""
    layout = BlockLayout.unpadded(16, 16, 1, head_size, torch.float32)
    query, blocks = torch.zeros(1, 1, head_size), np.zeros(1, np.int64)
    source = BlockSource(torch.zeros(layout.block_bytes // 4), blocks, blocks)
    rows = Rows.build([0], [1], [0], [0], [1])

    def attend() -> None:
        state = PartialState.empty(1, 1, head_size, CPU)
        select_kernels(CPU).attend(query, state, rows, source, layout, 1.0)

    assert (head_size_problem(head_size) == "") == served
    if served:
        attend()
        return
    with pytest.raises(ValueError, match="head_size must be a multiple of 8, at most 512"):
        attend()
