"""Mean V: the same bits wherever a request's decode begins, and V of a token is read once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.attention.newest import values_at
from tests.oracles.sparse_attention import mean_value
from vllm_ssdkv.attention.mean_value import Floats, RunningMeanV
from vllm_ssdkv.kernels.dense import select_kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.paged import select_page_kernels

CPU = torch.device("cpu")
LAYERS, LENGTH, BLOCK = 2, 120, 32


@dataclass
class Request:
    """V of a request, all of it in HBM; nothing says that the means must come from there."""

    layout: BlockLayout
    caches: list[torch.Tensor]
    values: torch.Tensor
    """[layers, tokens, kv_heads, head_size]."""

    def context(self, layer: int, blocks: int) -> Floats:
        """Sums of the first blocks, as slots have them."""
        sums = np.empty((blocks, self.layout.kv_heads, self.layout.head_size), np.float32)
        cache = self.caches[layer]
        at = cache.data_ptr() + np.arange(blocks) * cache.stride(0) * cache.itemsize
        to = sums.ctypes.data + np.arange(blocks) * sums.strides[0]
        kernels = select_page_kernels(CPU)
        kernels.summarize(at.astype(np.uint64), self.layout, value_sum=to.astype(np.uint64))
        return sums

    def mean(self, means: RunningMeanV, layer: int, position: int, blocks: int) -> torch.Tensor:
        """The mean at a position, with a context of so many blocks."""
        return self.means(means, layer, ["r"], position, blocks)[0]

    def means(
        self, means: RunningMeanV, layer: int, names: list[str], position: int, blocks: int
    ) -> torch.Tensor:
        """Means of requests of these names, as of :meth:`mean`."""
        cache, at = self.caches[layer], np.full(len(names), position)
        window = np.arange(blocks, position // BLOCK + 1)
        rows = means.rows(names, at)
        kernels = select_page_kernels(CPU)
        means.begin(
            kernels, layer, rows, cache, lambda _: window, lambda _: self.context(layer, blocks)
        )
        assert not means.behind(rows, [layer])
        return means.add(layer, rows, values_at(cache, self.layout, at // BLOCK, at % BLOCK))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def request_(request: pytest.FixtureRequest) -> Request:
    layout = BlockLayout.unpadded(BLOCK, 16, 2, 16, request.param)
    torch.manual_seed(3)
    values = (torch.randn(LAYERS, LENGTH, 2, 16) * 3).to(request.param)
    caches = []
    for layer in range(LAYERS):
        cache = torch.zeros(4, layout.block_bytes // layout.dtype.itemsize, dtype=request.param)
        where = np.arange(LENGTH)
        select_kernels(CPU).store_kv(values[layer], values[layer], cache, where, layout)
        caches.append(cache)
    return Request(layout, caches, values)


def test_it_is_the_mean_of_all_tokens(request_: Request) -> None:
    means = RunningMeanV(LAYERS, request_.layout)
    for position in range(40, LENGTH):
        for layer in range(LAYERS):
            found = request_.mean(means, layer, position, position // BLOCK - 1)
            wanted = mean_value(request_.values[layer, : position + 1])
            torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-6)


def test_where_it_begins_changes_no_bit(request_: Request) -> None:
    long, blocks = RunningMeanV(LAYERS, request_.layout), 1
    for position in range(33, LENGTH):
        steady = request_.mean(long, 1, position, blocks)
        for now in {0, blocks, position // BLOCK}:
            fresh = RunningMeanV(LAYERS, request_.layout)
            assert torch.equal(request_.mean(fresh, 1, position, now), steady), (position, now)


def test_a_request_that_goes_on_is_not_read_again(request_: Request) -> None:
    means = RunningMeanV(LAYERS, request_.layout)
    right = [request_.mean(means, 0, position, 1) for position in range(60, LENGTH)]
    means.drop("r")
    assert len(means) == 0
    assert torch.equal(request_.mean(means, 0, 60, 1), right[0])
    pages = request_.caches[0].view(4, 2, 2, 2, 16, 16)
    for position in range(61, LENGTH):
        block, token = divmod(position, BLOCK)
        now = pages[block, :, token // 16, 1, token % 16].clone()
        pages.fill_(torch.nan)  # only the current token's V is there
        pages[block, :, token // 16, 1, token % 16] = now
        assert torch.equal(request_.mean(means, 0, position, 1), right[position - 60])
        again = request_.values[0]
        where = np.arange(LENGTH)
        select_kernels(CPU).store_kv(again, again, request_.caches[0], where, request_.layout)


def test_a_gap_or_a_token_again_begins_anew(request_: Request) -> None:
    means = RunningMeanV(LAYERS, request_.layout)
    fresh = [
        request_.mean(RunningMeanV(LAYERS, request_.layout), 0, at, 1) for at in range(80)[40:]
    ]
    for position in (40, 41, 41, 50, 45, 79, 40):
        assert torch.equal(request_.mean(means, 0, position, 1), fresh[position - 40]), position


def test_many_requests_have_places_and_give_them_back(request_: Request) -> None:
    means = RunningMeanV(LAYERS, request_.layout)
    for turn in range(3):
        names = [f"{turn}.{i}" for i in range(20)]
        found = request_.means(means, 0, names, 100, 0)
        wanted = request_.mean(RunningMeanV(LAYERS, request_.layout), 0, 100, 0)
        assert all(torch.equal(mean, wanted) for mean in found)
        for name in names:
            means.drop(name)
        means.drop("unknown")
        assert len(means) == 0
    assert len(means._tokens) == 32
