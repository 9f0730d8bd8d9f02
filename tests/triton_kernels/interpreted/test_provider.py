"""The Triton provider behind the same interface as the native one: same calls, same answers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.kernels.dense import AttentionKernels, CpuKernels, TritonKernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, BlockSource, PartialState, Rows
from vllm_ssdkv.profiling.attention_problem import AttentionProblem, RowShape, attention_problem

CPU = torch.device("cpu")


def results(
    kernels: AttentionKernels, problem: AttentionProblem, source: BlockSource
) -> tuple[torch.Tensor, torch.Tensor]:
    state = problem.state()
    kernels.attend(problem.query, state, problem.rows, source, problem.layout, problem.scale)
    out = torch.full_like(problem.query, torch.nan)
    lse = torch.full(out.shape[:2], torch.nan)
    kernels.finish(state, out, lse)
    return out, lse


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(
        st.builds(
            lambda queries, context: RowShape(queries, context, 0, context + queries),
            st.integers(0, 5),
            st.integers(0, 40),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 2**31),
)
def test_both_providers_agree_wherever_the_blocks_are_named(
    dtype: torch.dtype, shapes: list[RowShape], seed: int
) -> None:
    layout = BlockLayout.unpadded(8, 4, 2, 16, dtype).with_page_stride(4096)
    problem = attention_problem(layout, 2, shapes, seed)
    inside = problem.source()
    start, step = problem.cache.data_ptr(), layout.block_bytes
    absolute = (start + problem.block_ids.numpy() * step).astype(np.uint64)
    anywhere = BlockSource(None, absolute, problem.position.numpy())
    wanted = results(CpuKernels(1), problem, inside)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for kernels in (CpuKernels(1), TritonKernels(CPU)):
        for source in (inside, anywhere, inside.to(CPU)):
            for got, want in zip(results(kernels, problem, source), wanted, strict=True):
                torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_both_providers_store_the_same_bytes() -> None:
    layout = BlockLayout.unpadded(8, 4, 2, 16, torch.bfloat16)
    key, value = torch.randn(2, 5, 2, 16).bfloat16()
    slots = np.array([3, -1, 17, 0, 31])
    caches = []
    for kernels in (CpuKernels(1), TritonKernels(CPU)):
        cache = torch.zeros((4, layout.block_bytes // 2), dtype=torch.bfloat16)
        kernels.store_kv(key, value, cache, slots, layout)
        caches.append(cache)
    assert caches[0].any()
    assert torch.equal(*caches)


@pytest.mark.parametrize("rows", [0, 1])
def test_nothing_to_do(rows: int) -> None:
    layout = BlockLayout.unpadded(8, 4, 2, 16, torch.float32)
    empty = torch.zeros(0, dtype=torch.int64)
    none = [0] * rows
    state = PartialState.empty(0, 4, 16, CPU)
    TritonKernels(CPU).attend(
        torch.zeros(0, 4, 16),
        state,
        Rows.build(none, none, none, none, none),
        BlockSource(torch.zeros(0), empty, empty),
        layout,
        1.0,
    )
    assert state.m.numel() == 0
