"""Sparse attention over page lists against the oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_paged import parts_of, random_selection
from tests.oracles.sparse_attention import attend_chosen
from tests.sparse.contexts import Contexts, Row, contexts
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.operands.page_list import PageList
from vllm_ssdkv.triton_kernels import attend
from vllm_ssdkv.triton_kernels.attend import attend_pages


def tensors(pages: PageList) -> PageList:
    """The same list as tensors."""
    mask = pages.token_mask
    return PageList(
        *(
            torch.from_numpy(np.ascontiguousarray(part))
            for part in (
                pages.query_token,
                pages.query_position,
                pages.begin,
                pages.end,
                np.asarray(pages.address).view(np.int64),
                pages.position,
            )
        ),
        None if mask is None else torch.from_numpy(mask),
    )


@given(
    problem=contexts(most_blocks=4),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
def test_any_pages_and_tokens_give_the_oracle(
    problem: Contexts, share: float, masked: bool, seed: int
) -> None:
    selection = random_selection(problem, share, masked, seed)
    listed = tensors(problem.page_list(selection))
    state = problem.state()
    attend_pages(
        problem.query,
        state,
        listed,
        layout=problem.layout,
        scale=problem.scale,
        max_pages=int(np.diff(selection.begin).max()),
    )
    for row, sizes in enumerate(problem.rows):
        chosen = problem.tokens_of(selection, row)
        chosen[:, sizes.blocks * problem.layout.block_tokens :] = False
        out, lse = attend_chosen(
            problem.query[row], problem.key[row], problem.value[row], chosen, problem.scale
        )
        seen = ~lse.isinf()
        assert torch.equal(state.l[row] > 0, seen)
        got = (state.acc[row] / state.l[row][:, None])[seen].double()
        torch.testing.assert_close(got, out[seen], atol=5e-5, rtol=5e-5)
        got_lse = (state.m[row] + state.l[row].log())[seen].double()
        torch.testing.assert_close(got_lse, lse[seen], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("workspace", [attend.WORKSPACE_BYTES, 1])
def test_no_bit_depends_on_calls(workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists in two calls, or parts in several launches, as where the workspace is small."""
    layout = BlockLayout.unpadded(16, 4, 2, 16, torch.float32)
    problem = Contexts(layout, 2, [Row(12, 3), Row(5, 1)], 3)
    listed = problem.page_list(random_selection(problem, 0.9, True, 1))
    states = []
    for cuts in (set[int](), {1}):
        state = problem.state()
        for part in parts_of(listed, cuts):
            attend_pages(
                problem.query, state, tensors(part), layout=layout, scale=0.3, max_pages=48
            )
        states.append(state)
        monkeypatch.setattr(attend, "WORKSPACE_BYTES", workspace)
    for name in ("m", "l", "acc"):
        assert torch.equal(getattr(states[0], name), getattr(states[1], name))


def test_a_wrong_mask_is_refused() -> None:
    layout = BlockLayout.unpadded(8, 4, 2, 16, torch.float32)
    problem = Contexts(layout, 1, [Row(1, 1)])
    selection = random_selection(problem, 1.0, True, 0)
    listed = problem.page_list(selection)
    with pytest.raises(ValueError, match="mask"):
        attend_pages(problem.query, problem.state(), listed, layout=layout, scale=1.0, max_pages=2)
