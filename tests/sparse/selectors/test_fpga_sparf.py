"""An FPGA chooses what the host chooses, token by token and page by page."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from tests.sparse.contexts import Contexts, Row
from vllm_ssdkv.base.errors import FpgaDeadlineError
from vllm_ssdkv.fpga_offload.backend import Limits, SparfResult, SparfWork
from vllm_ssdkv.fpga_offload.csim import CsimBackend
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.offload.fpga import kernel_shape
from vllm_ssdkv.sparse.protocol import Budget, Selection
from vllm_ssdkv.sparse.selectors.fpga_sparf import FpgaChoice, FpgaSparfSelector
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector

Granularity = Literal["token", "page"]
ROWS = [Row(3, 5), Row(0, 40), Row(7, 64), Row(1, 1), Row(2, 17)]
KV_HEADS = 2


class Chooser:
    """The same options on the host and on an FPGA."""

    def __init__(
        self,
        group: int,
        dtype: torch.dtype,
        granularity: Granularity,
        budget: Budget,
        *,
        sinks: int = 4,
        rest: bool = False,
    ):
        kernels = CpuScoringKernels(1)
        self.host = SparfSelector(budget, 8, granularity, sinks, kernels, estimate_rest=rest)
        self.backend = CsimBackend(kernel_shape(group * KV_HEADS, KV_HEADS, 64, dtype))
        self.calls = 0
        self.choice = FpgaChoice(self.backend, self._count)
        self.fpga = FpgaSparfSelector(self.host, self.choice)

    def _count(self) -> None:
        self.calls += 1

    def both(self, contexts: Contexts, ahead: int = 0) -> tuple[Selection, Selection]:
        query = contexts.query.to(contexts.layout.dtype)
        summaries = replace(contexts.summaries, ahead=ahead)
        return (
            self.fpga.select(query, summaries, contexts.scale),
            self.host.select(query, summaries, contexts.scale),
        )


def contexts(
    group: int, dtype: torch.dtype, page_tokens: int = 16, block: int = 32, seed: int = 1
) -> Contexts:
    layout = BlockLayout.unpadded(block, page_tokens, KV_HEADS, 64, dtype)
    return Contexts(layout, group, ROWS, seed)


def assert_same(found: Selection, wanted: Selection) -> None:
    np.testing.assert_array_equal(found.begin, wanted.begin)
    np.testing.assert_array_equal(found.pages, wanted.pages)
    assert (found.token_mask is None) == (wanted.token_mask is None)
    if wanted.token_mask is not None:
        np.testing.assert_array_equal(found.token_mask, wanted.token_mask)
    np.testing.assert_allclose(found.mass, wanted.mass, rtol=1e-4, atol=1e-5)
    assert ((found.mass == 1) == (wanted.mass == 1)).all()
    assert (found.alpha is None) == (wanted.alpha is None)
    if wanted.alpha is not None:
        np.testing.assert_allclose(found.alpha, wanted.alpha, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize(("group", "page_tokens"), [(1, 16), (2, 32), (4, 16)])
def test_the_same_is_chosen(
    group: int, page_tokens: int, granularity: Granularity, dtype: torch.dtype
) -> None:
    made = contexts(group, dtype, page_tokens)
    for budget in (Budget(share=0.5), Budget(tokens=60), Budget(share=1.0), Budget(tokens=0)):
        for rest in (False, True):
            chooser = Chooser(group, dtype, granularity, budget, rest=rest)
            assert_same(*chooser.both(made))
            assert chooser.calls == 1


def test_sinks_and_steps_ahead() -> None:
    made = contexts(2, torch.float16)
    for granularity in ("token", "page"):
        budget = Budget(tokens=50)
        chooser = Chooser(2, torch.float16, granularity, budget, sinks=20)
        assert_same(*chooser.both(made, ahead=3))
        assert chooser.calls == 1


def test_equal_scores_go_by_number() -> None:
    made = contexts(2, torch.float16)
    made.query.zero_()
    made.query[:, :, 0] = 1
    for row, size in enumerate(ROWS):
        for token in range(size.blocks * made.layout.block_tokens):
            made.plant(row, token, torch.ones(KV_HEADS, 64))
    for granularity in ("token", "page"):
        chooser = Chooser(2, torch.float16, granularity, Budget(share=0.5))
        assert_same(*chooser.both(made))


def test_what_the_kernel_cannot_take_is_chosen_by_the_host() -> None:
    """Said once, and what it can take is its own still."""
    made = contexts(2, torch.float16)
    chooser = Chooser(2, torch.float16, "page", Budget(share=0.5))
    chooser.backend.limits = Limits(sparf_tokens=100)
    assert_same(*chooser.both(made))
    assert chooser.calls == 0
    chooser.backend.limits = Limits()
    assert chooser.choice.in_use
    assert_same(*chooser.both(made))
    assert chooser.calls == 1


def test_an_fpga_that_fails_chooses_no_more() -> None:
    made = contexts(2, torch.float16)
    chooser = Chooser(2, torch.float16, "token", Budget(share=0.5))
    asked = 0

    def stand_still(work: SparfWork) -> SparfResult:
        nonlocal asked
        asked += 1
        raise FpgaDeadlineError(f"{len(work.jobs)} jobs stand still")

    chooser.backend.sparf = stand_still  # type: ignore[method-assign]
    for _ in range(2):
        assert_same(*chooser.both(made))
    assert not chooser.choice.in_use
    assert asked == 1
