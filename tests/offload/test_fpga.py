"""Kernels of an FPGA behind the interfaces of attention, on the oracle of their contract.

Against the native kernels: any group of query heads, page size, causal bound and token mask, with
lists that are cut at the kernel's limits.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.fpga_offload.needs import needs_rtlsim
from tests.oracles.fpga_backend import NumpyBackend
from vllm_ssdkv.base.checksum import checksum_pages
from vllm_ssdkv.base.errors import FpgaError, FpgaListError, WrongPagesError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.fpga_offload.backend import Limits
from vllm_ssdkv.fpga_offload.rtlsim import RtlsimBackend
from vllm_ssdkv.kernels.dense import CpuKernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, BlockSource, PartialState, Rows
from vllm_ssdkv.kernels.operands.page_list import PageList
from vllm_ssdkv.kernels.paged import CpuPageKernels
from vllm_ssdkv.offload.fpga import FpgaDevice, FpgaKernels, kernel_shape

NEAR = 1e-5
KV_HEADS, HEAD_SIZE, BLOCK = 2, 64, 64


def backend_of(heads: int, dtype: torch.dtype, limits: Limits | None = None) -> NumpyBackend:
    return NumpyBackend(kernel_shape(heads, KV_HEADS, HEAD_SIZE, dtype), limits)


def blocks(count: int, page_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, BlockLayout]:
    """Blocks whose pages are padded, as in a slot, at addresses that the kernel takes."""
    payload = 2 * page_tokens * HEAD_SIZE * 2
    layout = BlockLayout(BLOCK, page_tokens, KV_HEADS, HEAD_SIZE, payload + 4096, dtype)
    raw = torch.randn(count * layout.block_bytes // 2 + 32).to(dtype)
    begin = -raw.data_ptr() % 64 // 2
    return raw[begin:], layout


def addresses(memory: torch.Tensor, layout: BlockLayout, which: list[int]) -> np.ndarray:
    return np.array([memory.data_ptr() + i * layout.block_bytes for i in which], np.uint64)


def assert_same(found: PartialState, wanted: PartialState) -> None:
    """The same attention: normalised outputs and log-sum-exps."""
    for one in (found, wanted):
        seen = one.l > 0
        assert torch.equal(torch.isneginf(one.m), ~seen)
    seen = wanted.l > 0
    assert torch.equal(found.l > 0, seen)
    lse = [one.m[seen] + torch.log(one.l[seen]) for one in (found, wanted)]
    torch.testing.assert_close(*lse, rtol=NEAR, atol=NEAR)
    out = [one.acc[seen] / one.l[seen][:, None] for one in (found, wanted)]
    torch.testing.assert_close(*out, rtol=NEAR, atol=NEAR)


def started(query: torch.Tensor) -> PartialState:
    """A state that has seen a window."""
    tokens, heads, size = query.shape
    state = PartialState.empty(tokens, heads, size, query.device)
    state.m.normal_()
    state.l.uniform_(0.5, 2.0)
    state.acc.normal_()
    return state


def copies(state: PartialState) -> tuple[PartialState, PartialState]:
    return state, PartialState(state.m.clone(), state.l.clone(), state.acc.clone())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("heads", [2, 4, 6, 8, 14, 16, 24])
@pytest.mark.parametrize("limits", [None, Limits(job_entries=3, jobs=5)])
def test_blocks(heads: int, page_tokens: int, dtype: torch.dtype, limits: Limits | None) -> None:
    """Rows of one and of several queries, one of them in the middle of its blocks."""
    torch.manual_seed(heads * page_tokens)
    memory, layout = blocks(5, page_tokens, dtype)
    rows = Rows.build(
        [0, 1, 4, 5], [1, 3, 1, 2], [4 * BLOCK, 70, 10, 0], [0, 3, 3, 6], [3, 6, 3, 7]
    )
    which, position = [3, 0, 4, 1, 2, 0, 1], [0, 1, 2, 0, 1, 3, 0]
    source = BlockSource(
        None, addresses(memory, layout, which), np.array(position, np.int64) * BLOCK
    )
    query = torch.randn(7, heads, HEAD_SIZE).to(dtype)
    found, wanted = copies(started(query))
    kernels = FpgaKernels(backend_of(heads, dtype, limits), counters := Counters())
    kernels.attend(query, found, rows, source, layout, 0.125)
    CpuKernels(1).attend(query, wanted, rows, source, layout, 0.125)
    assert_same(found, wanted)
    calls = counters.total("offload_kernel_calls", kernel="attend")
    assert calls == 1 if limits is None else calls > 1


@pytest.mark.parametrize("page_tokens", [16, 32])
@pytest.mark.parametrize("masked", [False, True])
def test_pages(page_tokens: int, *, masked: bool) -> None:
    torch.manual_seed(page_tokens)
    memory, layout = blocks(3, page_tokens, torch.float16)
    groups = layout.groups * KV_HEADS
    chosen = torch.randperm(3 * groups)[: 2 * groups]
    address = memory.data_ptr() + chosen.numpy().astype(np.uint64) * layout.page_stride_bytes
    position = np.arange(len(chosen), dtype=np.int64) * page_tokens
    edges = np.array([0, 3, 3, len(chosen) - 1, len(chosen)], np.int32)
    mask = (torch.rand(len(chosen), page_tokens) < 0.4).to(torch.uint8).numpy()
    mask[1] = 0  # a page of which nothing is attended to
    pages = PageList(
        np.array([2, 0], np.int32),
        np.array([1000, 3 * page_tokens + 5], np.int64),
        edges[:-1],
        edges[1:],
        address,
        position,
        mask if masked else None,
    )
    query = torch.randn(3, 8, HEAD_SIZE).to(torch.float16)
    found, wanted = copies(started(query))
    backend = backend_of(8, torch.float16)
    FpgaKernels(backend, Counters()).attend_pages(query, found, pages, layout, 0.125)
    CpuPageKernels(1).attend_pages(query, wanted, pages, layout, 0.125)
    assert_same(found, wanted)
    assert all((work.entries["mask"] != 0).all() and work.mask == masked for work in backend.calls)


def test_nothing_to_attend_to_is_no_call() -> None:
    memory, layout = blocks(1, 16, torch.float16)
    rows = Rows.build([0, 1], [1, 1], [100, 3], [0, 0], [0, 1])
    source = BlockSource(None, addresses(memory, layout, [0]), np.array([64]))
    query = torch.randn(2, 4, HEAD_SIZE).to(torch.float16)
    found, wanted = copies(started(query))
    backend = backend_of(4, torch.float16)
    FpgaKernels(backend, Counters()).attend(query, found, rows, source, layout, 0.125)
    assert backend.calls == []
    for name in ("m", "l", "acc"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))


def test_a_broken_list_names_its_entry() -> None:
    memory, layout = blocks(2, 16, torch.float16)
    rows = Rows.build([0], [1], [1000], [0], [2])
    at = addresses(memory, layout, [0, 1])
    at[1] += 2
    source = BlockSource(None, at, np.array([0, 64]))
    query = torch.randn(1, 4, HEAD_SIZE).to(torch.float16)
    kernels = FpgaKernels(backend_of(4, torch.float16), Counters())
    with pytest.raises(FpgaListError, match="entry 4 has an address") as raised:
        kernels.attend(query, started(query), rows, source, layout, 0.125)
    assert isinstance(raised.value, FpgaError)


@pytest.mark.parametrize("limits", [None, Limits(job_entries=3, jobs=5)])
@pytest.mark.parametrize(
    "backend", [NumpyBackend, pytest.param(RtlsimBackend, marks=needs_rtlsim(HEAD_SIZE, 2))]
)
def test_pages_that_the_host_has_not_checked(
    backend: type[NumpyBackend | RtlsimBackend], limits: Limits | None
) -> None:
    """One flipped bit in any page is found, before anything is folded."""
    memory, layout = blocks(3, 16, torch.float16)
    rows = Rows.build([0, 1], [1, 2], [1000, 100], [0, 1], [2, 3])
    at, position = addresses(memory, layout, [2, 0, 1]), np.array([0, 64, 128])
    pages = at[:, None] + (np.arange(8) * layout.page_stride_bytes).astype(np.uint64)
    digests = checksum_pages(pages.ravel(), layout.page_payload_bytes).reshape(3, 8)
    query = torch.randn(3, 4, HEAD_SIZE).to(torch.float16)
    shape = kernel_shape(4, KV_HEADS, HEAD_SIZE, torch.float16)
    kernels = FpgaKernels(backend(shape, limits), counters := Counters())
    unchecked = BlockSource(None, at, position, digests)
    found, wanted = copies(started(query))
    kernels.attend(query, found, rows, unchecked, layout, 0.125)
    CpuKernels(1).attend(query, wanted, rows, BlockSource(None, at, position), layout, 0.125)
    assert_same(found, wanted)
    assert counters.total("offload_peer_pages", found="right") > 0
    flipped = memory.view(torch.int16)
    for place in (0, layout.block_bytes // 2 - 2100, layout.block_bytes + 70):
        flipped[place] ^= 1
        same, before = copies(started(query))
        with pytest.raises(WrongPagesError, match=r"\d of .* pages are not what the store wrote"):
            kernels.attend(query, same, rows, unchecked, layout, 0.125)
        assert torch.equal(same.acc, before.acc)
        flipped[place] ^= 1
    with pytest.raises(ValueError, match="do not compare digests"):
        CpuKernels(1).attend(query, wanted, rows, unchecked, layout, 0.125)


def test_what_does_not_fit_is_refused() -> None:
    memory, layout = blocks(1, 16, torch.float16)
    rows = Rows.build([0], [1], [1000], [0], [1])
    source = BlockSource(None, addresses(memory, layout, [0]), np.array([0]))
    kernels = FpgaKernels(backend_of(4, torch.float16), Counters())
    wide = torch.randn(1, 4, HEAD_SIZE)
    with pytest.raises(ValueError, match="do not fit kernels of"):
        kernels.attend(wide, started(wide), rows, source, layout, 0.125)
    query = wide.to(torch.float16)
    inside = BlockSource(memory, np.array([0]), np.array([0]))
    with pytest.raises(ValueError, match="absolute addresses"):
        kernels.attend(query, started(query), rows, inside, layout, 0.125)
    with pytest.raises(ValueError, match="sliding window"):
        kernels.attend(query, started(query), rows, source, layout, 0.125, 64)


@pytest.mark.parametrize(
    ("head_size", "dtype", "problem"),
    [
        (128, torch.bfloat16, ""),
        (96, torch.float16, "heads have 96 channels, and the FPGA kernels have 64, 128, 256"),
        (64, torch.float32, "computes in float32, the FPGA kernels in float16 and bfloat16"),
    ],
)
def test_models_that_fit(head_size: int, dtype: torch.dtype, problem: str) -> None:
    assert FpgaDevice.problem(head_size, dtype).endswith(problem)
    assert bool(FpgaDevice.problem(head_size, dtype)) == bool(problem)
    if problem:
        with pytest.raises(ValueError, match=problem):
            kernel_shape(8, 2, head_size, dtype)


@pytest.mark.parametrize(("each", "group"), [(1, 1), (3, 4), (5, 5), (7, 8), (8, 8), (12, 8)])
def test_any_group_has_kernels(each: int, group: int) -> None:
    assert kernel_shape(2 * each, 2, 128, torch.float16).group == group
