"""Sparse decode over a real store with its kernels from Triton: the tests of the native path."""

from collections.abc import Callable

import pytest
import torch

from tests.attention import test_sparse as native
from tests.attention.test_sparse import Rows, make_rows, make_store
from vllm_ssdkv.connector.worker import paged_port
from vllm_ssdkv.kernels.paged import TritonPageKernels
from vllm_ssdkv.kernels.scoring import TritonScoringKernels
from vllm_ssdkv.store.memory.summary_rows import ChannelTier

__all__ = ["make_rows", "make_store"]


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sparse decode gets on a CUDA device, on CPU tensors; windows come natively."""
    for module in (native, paged_port):
        monkeypatch.setattr(module, "select_page_kernels", TritonPageKernels)
    cpu = torch.device("cpu")
    monkeypatch.setattr(native, "CpuScoringKernels", lambda: TritonScoringKernels(cpu))


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_sparf_by_token_is_sparq(make_rows: Callable[..., Rows], tier: ChannelTier) -> None:
    """Channels from summaries, or only those asked for; token mask, alpha and mean V."""
    native.test_sparf_by_token_is_sparq(make_rows, tier)


def test_sparf_by_page_reads_the_budget(make_rows: Callable[..., Rows]) -> None:
    native.test_sparf_by_page_reads_the_budget_and_adds_the_mean(make_rows, adaptive=True)


def test_bounds_with_all_of_the_budget_is_dense(make_rows: Callable[..., Rows]) -> None:
    native.test_with_all_of_the_budget_it_is_dense_attention(make_rows, places=16)


def test_bounds_in_the_devices_memory_change_no_bit(make_rows: Callable[..., Rows]) -> None:
    native.test_summaries_in_the_devices_memory_change_no_bit(make_rows)


def test_a_row_that_lacks_a_page_is_lost_and_no_other(make_rows: Callable[..., Rows]) -> None:
    native.test_a_row_that_lacks_a_page_is_lost_and_no_other(make_rows)
