"""Codes of K and logits from them against the native kernels, which are tested against oracles."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.codes import Record
from tests.sparse.test_codes import BITS, Coded, drawn, heaviest, layouts, table_error
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.paged import CpuPageKernels, TritonPageKernels
from vllm_ssdkv.kernels.scoring import TritonScoringKernels

CPU = torch.device("cpu")
TRITON = TritonScoringKernels(CPU)


@given(layout=layouts, bits=st.sampled_from(BITS), group=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_logits_are_the_native_kernels(
    layout: BlockLayout, bits: int, group: int, seed: int
) -> None:
    coded = Coded(CpuPageKernels(2), layout, drawn(layout, 3, seed), bits)
    query = torch.randn(
        (group * layout.kv_heads, layout.head_size), generator=torch.Generator().manual_seed(seed)
    )
    scale = layout.head_size**-0.5
    limit = table_error(query.double().numpy(), heaviest(coded), bits, scale) + 1e-4
    got, first = TRITON.code_logits(query[None], coded.context(), scale, bits)
    assert isinstance(got, torch.Tensor)
    assert first.tolist() == [0, 3 * layout.groups]
    np.testing.assert_allclose(got[0].numpy(), coded.logits(query, scale), rtol=0, atol=limit)


def test_pages_longer_than_a_tile() -> None:
    layout = BlockLayout.unpadded(600, 300, 1, 32, torch.float32)
    coded = Coded(CpuPageKernels(1), layout, drawn(layout, 2, 3), 2)
    query = torch.randn((2, 32), generator=torch.Generator().manual_seed(1))
    got, _ = TRITON.code_logits(query[None], coded.context(), 0.2, 2)
    limit = table_error(query.double().numpy(), heaviest(coded), 2, 0.2) + 1e-4
    assert isinstance(got, torch.Tensor)
    np.testing.assert_allclose(got[0].numpy(), coded.logits(query, 0.2), rtol=0, atol=limit)


@given(layout=layouts, bits=st.sampled_from(BITS), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_records_are_the_native_kernels(layout: BlockLayout, bits: int, seed: int) -> None:
    keys = drawn(layout, 2, seed)
    mine, native = (
        Coded(kernels, layout, keys, bits).records
        for kernels in (TritonPageKernels(CPU), CpuPageKernels(1))
    )
    sizes = layout.block_tokens, layout.head_size, bits
    for got, want in zip(
        mine.reshape(-1, mine.shape[-1]), native.reshape(-1, mine.shape[-1]), strict=True
    ):
        Record.of(got, *sizes).assert_near(Record.of(want, *sizes))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_page_of_a_broken_key_shows(broken: float) -> None:
    layout = BlockLayout.unpadded(32, 16, 2, 32, torch.float32)
    keys = drawn(layout, 2, 1)
    keys[1, 20, 1, 7] = broken
    coded = Coded(TritonPageKernels(CPU), layout, keys, 2)
    query = torch.randn((1, 4, 32), generator=torch.Generator().manual_seed(0))
    got, _ = TRITON.code_logits(query, coded.context(), 0.125, 2)
    assert isinstance(got, torch.Tensor)
    assert got[0].isnan().nonzero().tolist() == [[2, 3], [3, 3]]
