"""Summaries of blocks made on the device: the bytes that the native kernel makes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_paged import assert_one_step
from tests.sparse.contexts import Contexts, contexts
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.paged import CpuPageKernels, PageKernels, TritonPageKernels
from vllm_ssdkv.triton_kernels.summarize import summarize

CPU = torch.device("cpu")
NAMES = ("bounds", "spread", "channels", "value_sum")


def made(kernels: PageKernels, problem: Contexts, names: tuple[str, ...]) -> list[torch.Tensor]:
    """What a provider writes of the context blocks, and 0xFF where it writes nothing."""
    layout, count = problem.layout, len(problem.base)
    item = layout.dtype.itemsize
    each = layout.kv_heads * layout.head_size
    sizes = (
        2 * layout.groups * each * item,
        2 * layout.groups * each * item,
        layout.block_tokens * each * item,
        4 * each,
    )
    memory = [torch.full((count, size + 8), 0xFF, dtype=torch.uint8) for size in sizes]
    kernels.summarize(
        problem.base,
        layout,
        **{
            name: (part.data_ptr() + np.arange(count) * part.shape[1]).astype(np.uint64)
            for name, part in zip(NAMES, memory, strict=True)
            if name in names
        },
    )
    return memory


@given(
    problem=contexts(most_blocks=3),
    names=st.sets(st.sampled_from(NAMES)).map(tuple),
)
@settings(max_examples=12, deadline=None)
def test_the_bytes_are_the_native_kernels(problem: Contexts, names: tuple[str, ...]) -> None:
    got = made(TritonPageKernels(CPU), problem, names)
    want = made(CpuPageKernels(1), problem, names)
    for name, mine, native in zip(NAMES, got, want, strict=True):
        if name == "spread":
            # The variance's products may be rounded once more, or once less.
            numbers = (
                part[:, :-8].contiguous().view(problem.layout.dtype) for part in (mine, native)
            )
            assert_one_step(*numbers)
            assert torch.equal(mine[:, -8:], native[:, -8:])
            continue
        assert torch.equal(mine, native), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_broken_keys_show_in_bounds(dtype: torch.dtype) -> None:
    block = torch.ones((2, 3, 8), dtype=dtype)
    block[0, 1, 3] = torch.nan
    bounds = torch.zeros((2, 8), dtype=dtype)
    TritonPageKernels(CPU).summarize(
        np.array([block.data_ptr()], np.uint64),
        BlockLayout.unpadded(3, 3, 1, 8, dtype),
        bounds=np.array([bounds.data_ptr()], np.uint64),
    )
    assert bounds.isnan().tolist() == [[d == 3 for d in range(8)]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_mean_and_variance_at_the_edges(dtype: torch.dtype) -> None:
    """As the native kernel: equal numbers do not vary, the largest is the most, broken shows."""
    block = torch.full((2, 3, 8), 0.1).to(dtype)
    block[0, 1, 3:6] = torch.tensor([torch.nan, torch.inf, -torch.inf]).to(dtype)
    block[0, :, 6] = torch.tensor([6e4, -6e4, 0] if dtype == torch.float16 else [1e20, -1e20, 0])
    spread = torch.zeros((2, 8), dtype=dtype)
    TritonPageKernels(CPU).summarize(
        np.array([block.data_ptr()], np.uint64),
        BlockLayout.unpadded(3, 3, 1, 8, dtype),
        spread=np.array([spread.data_ptr()], np.uint64),
    )
    mean, variance = spread
    assert torch.equal(mean[:3], block[0, 0, :3])
    assert variance[:3].tolist() == [0, 0, 0]
    assert spread[:, 3:6].isnan().all()
    assert variance[6] == torch.finfo(dtype).max


def test_wrong_addresses_are_refused() -> None:
    layout = BlockLayout.unpadded(4, 4, 1, 8, torch.float32)
    one = torch.zeros(1, dtype=torch.int64)
    for bounds in (one.int(), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="bounds must be"):
            summarize(one, layout, bounds=bounds)
